"""What is known of a model before it runs: its operations made ready, and what shapes and places their results have."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from .arena import lay_out
from .errors import ExecutionFailed, OutputShapes
from .model import Operand, Operation, Subgraph
from .operation import MOST_VALUES, Array, Call, OperationType, Tensor, steers
from .types import MAX_BYTES, Dimensions, OperandLifeTime, byte_size

REFUSALS = (ValueError, ArithmeticError, LookupError, MemoryError)
"""What shape functions, kernel builders and numpy raise for values that cannot be computed."""

Tensors = dict[int, Tensor | None]
"""By operand; None where omitted."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One operation of a model with all that is known about it before there is any input."""

    index: int
    operation: Operation
    kind: OperationType
    of: int
    slots: tuple[str, ...]
    packed: dict[int, Array]

    def failure(self, error: Exception) -> ExecutionFailed:
        """`error` with the operation that met it."""
        return ExecutionFailed(self.index, self.kind.name, str(error) or type(error).__name__)

    def inputs(self, tensors: Tensors) -> list[Tensor | None]:
        """Return its inputs; those that steer it with values of their own. Raise ValueError."""
        return [self._input(i, slot, tensors) for slot, i in zip(self.slots, self.operation.inputs, strict=True)]

    def _input(self, index: int, slot: str, tensors: Tensors) -> Tensor | None:
        tensor = tensors.get(index)
        if tensor is None:
            if not slot.endswith("?"):
                raise ValueError(f"operand {index} is omitted but needed")
            return None
        if 0 in tensor.shape and not self.kind.takes_empty and not steers(slot):
            raise ValueError(
                f"operand {index} has dimensions {list(tensor.shape)}, and the operation takes no empty tensor"
            )
        if steers(slot) and tensor.values is None:
            if math.prod(tensor.shape) > MOST_VALUES:
                raise ValueError(f"operand {index} has dimensions {list(tensor.shape)}: more than {MOST_VALUES} values")
            tensor = replace(tensor)
            tensor.keep_values()
        return tensor

    def place(self, call: Call, operands: Sequence[Operand]) -> None:
        """Give the outputs of `call` their shapes and quantisation. Raise ValueError."""
        shapes, source = self.kind.shape(call), call.inputs[self.of]
        if len(shapes) != len(call.outputs):
            raise ValueError(f"{len(call.outputs)} outputs are declared; it has {len(shapes)}")
        for number, (index, tensor, shape) in enumerate(zip(self.operation.outputs, call.outputs, shapes, strict=True)):
            tensor.shape = _agreed(index, operands[index], tuple(shape))
            if source is not None:
                _quantise(index, operands[index], tensor, self.kind.quantise(number, source, tensor))

    def build(self, call: Call) -> None:
        """Append the steps of its kernel to `call`, whose tensors have arrays."""
        if all(0 not in tensor.shape for tensor in call.outputs):
            self.kind.build(call)


def _agreed(index: int, operand: Operand, shape: Dimensions) -> Dimensions:
    """`shape`, if it is what the operand declares and not too large."""
    declared = operand.dimensions
    if declared and (len(declared) != len(shape) or any(d not in (0, s) for d, s in zip(declared, shape, strict=True))):
        raise ValueError(f"output operand {index} is declared {list(declared)} but has dimensions {list(shape)}")
    if byte_size(operand.type, shape) > MAX_BYTES:
        raise ValueError(f"output operand {index} with dimensions {list(shape)} is larger than 4 GiB")
    return shape


def _quantise(index: int, operand: Operand, tensor: Tensor, found: tuple[float, int]) -> None:
    is_output = operand.lifetime == OperandLifeTime.SUBGRAPH_OUTPUT
    if is_output and found != (tensor.scale, tensor.zero_point):
        raise ValueError(f"output operand {index} has to have scale {found[0]} and zero point {found[1]}")
    tensor.scale, tensor.zero_point = found


def guarded(prepared: Prepared, work: Callable[[], None]) -> None:
    """Do the work without floating point warnings; a failure names the operation."""
    try:
        with np.errstate(all="ignore"):
            work()
    except REFUSALS as error:
        raise prepared.failure(error) from error


class StaticPlan:
    """A plan of a model whose shapes do not depend on values, for inputs of given shapes.

    tensors: every operand, without an array unless it is constant.
    places: offsets of the temporaries in a block of `nbytes`, where those lie apart that are needed at the same time.
    """

    def __init__(
        self, operations: Sequence[Prepared], graph: Subgraph, tensors: Tensors, pace: Callable[[], object]
    ) -> None:
        """`tensors`: constants and inputs. `pace`: called after each operation. Raise ExecutionFailed."""
        self.tensors, operands = tensors, graph.operands
        for prepared in operations:
            guarded(prepared, partial(self._place, prepared, operands))
            pace()
        temporaries = {i for prepared in operations for i in prepared.operation.outputs}.difference(graph.outputs)
        placed = {i: self.tensors[i] for i in temporaries}
        sizes = {i: byte_size(tensor.type, tensor.shape) for i, tensor in placed.items() if tensor is not None}
        self.places, self.nbytes = lay_out([(o.inputs, o.outputs) for o in graph.operations], sizes, pace)

    def _place(self, prepared: Prepared, operands: Sequence[Operand]) -> None:
        outputs = [Tensor.of(operands[i]) for i in prepared.operation.outputs]
        prepared.place(Call(prepared.inputs(self.tensors), outputs), operands)
        self.tensors.update(zip(prepared.operation.outputs, outputs, strict=True))


def output_shapes(
    outputs: Iterable[int], buffers: dict[int, Array], operands: Sequence[Operand], tensors: Tensors
) -> OutputShapes:
    """Return the dimensions of the outputs as far as they are known, and whether their buffers suffice; unknown ones
    are 0.
    """
    result = []
    for index in outputs:
        tensor, buffer = tensors.get(index), buffers.get(index)
        dimensions = tensor.shape if tensor is not None else operands[index].dimensions
        result.append((dimensions, buffer is None or buffer.nbytes >= byte_size(operands[index].type, dimensions)))
    return tuple(result)
