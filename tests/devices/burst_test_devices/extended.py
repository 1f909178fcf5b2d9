"""A device with a vendor extension: numbers of 16 bits with a fixed binary point, which the HAL does not have."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.errors import OutputInsufficientSize
from driver.interface import BoundExecution, CacheFiles, Device, PreparedModel, Saved
from driver.nn import Extension, ExtensionType, Model, Operand, Operation, Subgraph
from driver.nn.extension import OEM
from driver.vts import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, Preparation

    Step = Callable[[], object]

NAME = "test.fixed"
FIXED = Extension(
    NAME,
    (
        ExtensionType(NAME, 0, "TENSOR_FIXED16", np.dtype(np.int16)),
        ExtensionType(NAME, 1, "FIXED16", np.dtype(np.int16), is_scalar=True),
    ),
    ("FROM_FLOAT", "ADD", "SCALE", "TO_FLOAT"),
)
"""extension_params: one byte, how many of the 16 bits are behind the point."""


class FixedPoint(Device):
    """Runs the operations of its extension, and OEM_OPERATION, which gives its input back. None of the HAL's."""

    name, version, type = "fixed", "1", "CPU"
    cache_files = CacheFiles(0, 0)
    extensions = (FIXED, OEM)

    def supported_operations(self, model: Model) -> list[bool]:
        return [reason is None for reason in self.explain(model)]

    def explain(self, model: Model) -> list[str | None]:
        """A reason for what is of the HAL, and for numbers without a binary point."""
        return [_obstacle(operation, model.main.operands) for operation in model.main.operations]

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        return FixedModel(model)


def _obstacle(operation: Operation, operands: Sequence[Operand]) -> str | None:
    if operation.type not in {"OEM_OPERATION", *map(FIXED.operation, FIXED.operations)}:
        return f"the device runs {', '.join(FIXED.operations)} of {NAME} alone"
    for i in (*operation.inputs, *operation.outputs):
        if operands[i].type in FIXED.operand_types and len(operands[i].extension_params or b"") != 1:
            return f"operand {i}: extension_params has to be one byte, the bits behind the point"
    return None


def _one(operand: Operand) -> float:
    return float(1 << (operand.extension_params or b"\0")[0])


class FixedModel(PreparedModel):
    """Computes in float64, and rounds."""

    def __init__(self, model: Model) -> None:
        self._graph = model.main

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        options: BindOptions,
    ) -> BoundExecution:
        graph, operands = self._graph, self._graph.operands
        arrays: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
        arrays |= {i: o.value for i, o in enumerate(operands) if o.lifetime.is_constant}
        places, steps = dict(zip(graph.outputs, outputs, strict=True)), list[Any]()
        sizes = {i: array.shape for i, array in arrays.items()}
        for operation in graph.operations:
            kind, (target,) = operands[operation.outputs[0]], operation.outputs
            shape = sizes[target] = sizes[operation.inputs[0]]
            nbytes = int(np.prod(shape)) * kind.type.element_size
            place = places.get(target, np.empty(nbytes, np.uint8))[:nbytes]
            if len(place) == nbytes:
                arrays[target] = place.view(kind.type.dtype).reshape(shape)
                given = [(arrays[i], operands[i]) for i in operation.inputs]
                steps.append(partial(_run, operation.type, given, arrays[target], kind))
        shapes = [(sizes[i], i in arrays) for i in graph.outputs]
        return FixedExecution(steps, shapes)

    def saved(self, root: NDArray[np.uint8]) -> Saved:
        return Saved()


def _run(name: str, given: Sequence[tuple[Any, Operand]], target: NDArray[Any], kind: Operand) -> None:
    if name == "OEM_OPERATION":
        target[...] = given[0][0]
        return
    real = [np.asarray(array, np.float64) / _one(operand) for array, operand in given]
    found = {"ADD": np.add, "SCALE": np.multiply}[name[len(NAME) + 1 :]](*real) if len(real) > 1 else real[0]
    bounds = np.iinfo(np.int16)
    target[...] = np.clip(np.rint(found * _one(kind)), bounds.min, bounds.max) if kind.type.dtype.kind == "i" else found


class FixedExecution(BoundExecution):
    """A step for each operation."""

    def __init__(self, steps: Sequence[Step], shapes: Sequence[tuple[tuple[int, ...], bool]]) -> None:
        self._steps, self.shapes = steps, shapes

    def run(self) -> None:
        if not all(is_enough for _, is_enough in self.shapes):
            raise OutputInsufficientSize(tuple(self.shapes))
        for step in self._steps:
            step()


def cases() -> Iterator[Case]:
    """Yield a case for `burst vts --cases`: to fixed and back, and one whose output is fixed."""
    number, x = FIXED.type("TENSOR_FIXED16"), np.array([1.5, -2.25], np.float32)
    floats = [Operand("TENSOR_FLOAT32", (2,), lifetime=life) for life in ("INPUT", "OUTPUT")]
    between, end = (
        Operand(number, (2,), lifetime=life, extension_params=b"\x04") for life in ("TEMPORARY_VARIABLE", "OUTPUT")
    )
    there, back = (FIXED.operation(name) for name in ("FROM_FLOAT", "TO_FLOAT"))
    steps = [Operation(there, [0], [1]), Operation(back, [1], [2])]
    yield Case("fixed_there_and_back", Model(Subgraph([floats[0], between, floats[1]], steps, [0], [2])), (x,), (x,))
    there_alone = Model(Subgraph([floats[0], end], steps[:1], [0], [1]))
    yield Case("fixed_there", there_alone, (x,), (np.array([24, -36], np.int16),))
