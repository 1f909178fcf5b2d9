"""The extension "burst.file": an operation that is a whole model file, and the operand types that files have beyond the
HAL's.

A model in *file form* has one operation, such as ONNX or TFLITE. Its first input is the file, as a constant of type
BYTES; its inputs and outputs are the file's own, in the file's order. The runtime that the file was made for runs it as
it is.

Settings of that runtime, where the model asks for some, are JSON in the place of a further file without a name.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidModel
from .extension import Extension, ExtensionType
from .model import Model, Operand, Operation, Subgraph
from .types import OperandLifeTime, OperandType

NAME = "burst.file"
_TYPES = {
    "INT8": np.int8,
    "UINT8": np.uint8,
    "INT16": np.int16,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FLOAT64": np.float64,
    "BFLOAT16": np.uint16,
}
"""Element types of files that the HAL lacks, or has only quantised. numpy has no bfloat16: its bits are uint16."""
_TENSORS, _SCALARS, _BYTES, _PACKED = 0x100, 0x200, 0x300, 0x301  # where the numbers of each kind of type begin


def _types() -> tuple[ExtensionType, ...]:
    both = (("TENSOR_", _TENSORS, False), ("", _SCALARS, True))
    found = [
        ExtensionType(NAME, first + n, prefix + name, np.dtype(dtype), is_scalar=is_scalar)
        for prefix, first, is_scalar in both
        for n, (name, dtype) in enumerate(_TYPES.items())
    ]
    of_bytes = (_BYTES, "BYTES"), (_PACKED, "PACKED")
    return (*found, *(ExtensionType(NAME, number, name, np.dtype(np.uint8)) for number, name in of_bytes))


KINDS = {"onnx": "ONNX", "tflite": "TFLITE", "jax": "JAX", "pt2": "PT2"}
"""Kind of file -> its operation."""
FILE = Extension(NAME, _types(), tuple(KINDS.values()))
PACKED = FILE.type("PACKED")
"""Of an input or output that is no tensor of numbers: the bytes of a value, as `driver.protocol.packed_values` has it.
In the operand's `extra`, `type` says what it is in ONNX's words, such as "tensor(string)" or
"seq(map(int64,tensor(float)))", and `shape` has the sizes of a tensor, 0 where they are open.
"""
FILE_OPERATIONS = {FILE.operation(word): kind for kind, word in KINDS.items()}
"""Full name of an operation -> kind of file."""
_OF_HAL = {
    "float32": (OperandType.TENSOR_FLOAT32, OperandType.FLOAT32),
    "float16": (OperandType.TENSOR_FLOAT16, OperandType.FLOAT16),
    "int32": (OperandType.TENSOR_INT32, OperandType.INT32),
    "bool": (OperandType.TENSOR_BOOL8, OperandType.BOOL),
}
_MOST_EXTERNAL = 1000
_MOST_SETTINGS = 2**16  # bytes
_LONGEST_NAME = 1000


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A model file in memory.

    kind: one of `KINDS`. data: its bytes. external: the files beside it that it names, by that name. settings: what
    its runtime is to be set to, in values that JSON has; {}: as the device has it.
    """

    kind: str
    data: NDArray[np.uint8]
    external: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def tensor_type(dtype: Any, rank: int | None) -> OperandType | ExtensionType:
    """Return the operand type of a file's input or output that is not quantised.

    dtype: a numpy dtype, or its name; "bfloat16" too. rank: 0 for a scalar, None where the file does not tell it.
    Raise InvalidModel.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name in _OF_HAL:
        return _OF_HAL[name][rank == 0]
    if name.upper() in _TYPES:
        return FILE.type(name.upper() if rank == 0 else f"TENSOR_{name.upper()}")
    raise InvalidModel(f"tensors of {name} are not carried: {', '.join((*_OF_HAL, *map(str.lower, _TYPES)))} are")


def model_of_file(
    file: ModelFile, inputs: Sequence[Operand], outputs: Sequence[Operand], portable: Callable[[], Model] | None = None
) -> Model:
    """Return the model that is this file. `inputs`, `outputs`: in the file's order, whatever their lifetimes.

    `portable`: makes the same network of the HAL's operations, for devices that do not run such files.
    """
    given = [replace(operand, lifetime=OperandLifeTime.SUBGRAPH_INPUT) for operand in inputs]
    taken = [replace(operand, lifetime=OperandLifeTime.SUBGRAPH_OUTPUT) for operand in outputs]
    contents = [_constant(file.data)]
    beside = dict(file.external)
    if file.settings:
        beside[""] = np.frombuffer(json.dumps(file.settings, sort_keys=True).encode(), np.uint8)
    for name, data in beside.items():
        contents += [_constant(np.frombuffer(name.encode(), np.uint8)), _constant(data)]
    operands = [*contents, *given, *taken]
    first, last = len(contents), len(contents) + len(given)
    numbers = range(first, last), range(last, len(operands))
    run = Operation(FILE.operation(KINDS[file.kind]), [*range(last)], numbers[1])
    main = Subgraph(operands, [run], *numbers)
    return Model(main, extensions=((NAME, 1),), portable=portable)


def _constant(data: NDArray[np.uint8]) -> Operand:
    return Operand(FILE.type("BYTES"), (data.size,), lifetime=OperandLifeTime.CONSTANT_REFERENCE, value=data)


def is_file(model: Model) -> bool:
    """Return True if the model is a file and nothing else."""
    operations = model.main.operations
    return len(operations) == 1 and operations[0].type in FILE_OPERATIONS


def file_of(model: Model) -> ModelFile | None:
    """Return the file that a valid model in file form is; None: it is not of that form.

    Raise InvalidModel for one that is put together wrongly.
    """
    if not is_file(model):
        return None
    operation, operands = model.main.operations[0], model.main.operands
    count = len(operation.inputs) - len(model.main.inputs)
    contents = [operands[i] for i in operation.inputs[:count]]
    is_whole = operation.inputs[count:] == model.main.inputs and operation.outputs == model.main.outputs
    if not is_whole or count < 1 or count % 2 == 0 or count > 2 * _MOST_EXTERNAL:
        raise InvalidModel(
            f"{operation.type} takes the file, names and contents of further files, and the model's inputs in order; "
            "it gives the model's outputs in order"
        )
    if any(operand.type != FILE.type("BYTES") or not operand.lifetime.is_constant for operand in contents):
        raise InvalidModel(f"{operation.type}: its first {count} inputs have to be constants of type BYTES")
    data, *rest = [np.asarray(operand.value).reshape(-1).view(np.uint8) for operand in contents]
    if any(name.size > _LONGEST_NAME for name in rest[::2]):
        raise InvalidModel(f"{operation.type}: the name of a further file has more than {_LONGEST_NAME} bytes")
    names = [bytes(name).decode(errors="replace") for name in rest[::2]]
    external = dict(zip(names, rest[1::2], strict=True))
    settings = _settings(operation, external.pop("")) if "" in external else {}
    for name in external:
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or "*" in name or not name.isprintable():
            raise InvalidModel(f"{operation.type}: the further file {name!r:.100} is not below the model's folder")
    return ModelFile(FILE_OPERATIONS[operation.type], data, external, settings)


def _settings(operation: Operation, told: NDArray[np.uint8]) -> Mapping[str, Any]:
    if told.size > _MOST_SETTINGS:
        raise InvalidModel(f"{operation.type}: its settings have more than {_MOST_SETTINGS} bytes")
    try:
        found = json.loads(told.tobytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidModel(f"{operation.type}: its settings are no object of JSON")
    return found


def takes_empty(model: Model) -> bool:
    """Return True if a dimension of 0 in a request is a size: in a model file, as in numpy. In the HAL it means
    open.
    """
    operations = model.main.operations
    return bool(operations) and operations[0].type in FILE_OPERATIONS
