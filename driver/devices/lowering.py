"""What devices that hand models to another library have in common: operations with the shapes of their operands, one
after the other, and the question which of them can be lowered.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from driver.interface import PreparedModel
from driver.nn import OPERATIONS, ExecutionFailed, OperandLifeTime, Subgraph
from driver.nn.calls import match_signature
from driver.nn.operation import Call, Tensor
from driver.nn.plan import REFUSALS, Prepared

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from driver.nn import Model, Operand

Tensors = dict[int, "Tensor | None"]
Shapes = Sequence[tuple[int, ...] | None]
P = TypeVar("P", bound="Listed")
_MAX_PROGRAMS = 16
"""Sets of input shapes that a model is kept compiled for."""
_PROBES = (5, 8)
"""Stand-ins for unknown dimensions."""

ALIGNMENT = 64
"""Of memory that libraries use in place."""

_CONTROL = ("IF", "WHILE")


def _at_once() -> None:
    """Nobody else is waiting."""


def prepared(graph: Subgraph, pace: Callable[[], object] = _at_once) -> list[Prepared]:
    """What is known of the operations before there are shapes. `graph` is valid."""
    result = []
    for index, operation in enumerate(graph.operations):
        kind = OPERATIONS[operation.type]
        signature, slots = match_signature(kind, [graph.operands[i] for i in operation.inputs])
        result.append(Prepared(index, operation, kind, signature.of, slots, {}))
        pace()
    return result


def constants(graph: Subgraph, pace: Callable[[], object] = _at_once) -> Tensors:
    """By operand; None for those that are omitted."""
    found: Tensors = {}
    for index, operand in enumerate(graph.operands):
        if operand.lifetime.is_constant:
            found[index] = Tensor.of(operand)
            pace()
        elif operand.lifetime == OperandLifeTime.NO_VALUE:
            found[index] = None
        elif operand.lifetime == OperandLifeTime.SUBGRAPH:
            found[index] = Tensor.of(operand)
    return found


def place(operation: Prepared, graph: Subgraph, tensors: Tensors) -> Call:
    """The operation with the shapes of its operands; its outputs are added to `tensors`. Raises one of REFUSALS,
    UnsupportedError.

    What control flow gives has the shapes that it declares: its lowering has to look whether that is so.
    """
    outputs = [Tensor.of(graph.operands[i]) for i in operation.operation.outputs]
    if operation.kind.name in _CONTROL:
        require(all(graph.operands[i].is_known for i in operation.operation.outputs), "its shapes are not declared")
        call = Call([tensors.get(i) for i in operation.operation.inputs], outputs)
    else:
        call = Call(operation.inputs(tensors), outputs)
        with np.errstate(all="ignore"):
            operation.place(call, graph.operands)
    tensors.update(zip(operation.operation.outputs, outputs, strict=True))
    return call


class UnsupportedError(Exception):
    """The library cannot compute this operation exactly. Never leaves the device."""


def require(condition: object, reason: str) -> None:
    """Raises UnsupportedError unless `condition` holds."""
    if not condition:
        raise UnsupportedError(reason)


Draft = Callable[[Prepared, Call, Subgraph, Tensors], None]
"""Lowers an operation for a look only. Raises UnsupportedError."""

Place = Callable[[Prepared, Subgraph, Tensors], Call]
"""`place`, or what a device has in its stead that places operations with subgraphs, too."""


def supported(model: Model, draft: Draft, place: Place = place) -> list[bool]:
    """For each operation of the main subgraph, whether it can be lowered; for every size of dimensions left open."""
    dimensions = [d for i in model.main.inputs for d in model.main.operands[i].dimensions]
    probes = _PROBES if 0 in dimensions else _PROBES[:1]
    return [
        all(found) for found in zip(*(_supported(model.main, draft, place, probe) for probe in probes), strict=True)
    ]


def _supported(graph: Subgraph, draft: Draft, place: Place, probe: int) -> list[bool]:
    tensors, operations = constants(graph), prepared(graph)
    needed = {i for op in operations for i, slot in zip(op.operation.inputs, op.slots, strict=True) if slot[-1] != "?"}
    for i in graph.inputs:
        tensor = Tensor.of(graph.operands[i])
        is_known = tensor.type.is_scalar or (tensor.shape and (i in needed or 0 not in tensor.shape))
        tensor.shape = tuple(d or probe for d in tensor.shape)
        tensors[i] = tensor if is_known else None  # what may be omitted and is not described is taken to be
    return [_can_lower(operation, graph, tensors, draft, place) for operation in operations]


def _can_lower(operation: Prepared, graph: Subgraph, tensors: Tensors, draft: Draft, place: Place) -> bool:
    try:
        call = place(operation, graph, tensors)
        draft(operation, call, graph, tensors)
    except (UnsupportedError, *REFUSALS):
        for i in operation.operation.outputs:
            declared = Tensor.of(graph.operands[i])
            is_known = declared.shape and 0 not in declared.shape
            tensors.setdefault(i, declared if is_known else None)
        return False
    return True


def check_input(number: int, operand: Operand, array: NDArray[Any] | None) -> None:
    """Raises ValueError for an array that is not one of the operand."""
    if array is None:
        return
    declared = operand.dimensions
    if array.dtype.itemsize != operand.type.element_size:
        raise ValueError(f"input {number}: {array.dtype} for {operand.type.name}; give it {operand.type.dtype}")
    fits = len(declared) == array.ndim and all(d in (0, s) for d, s in zip(declared, array.shape, strict=True))
    if 0 in array.shape or (declared and not fits):
        raise ValueError(f"input {number}: dimensions {list(array.shape)} for {list(declared)}, none of which may be 0")
    if not array.flags.c_contiguous:
        raise ValueError(f"input {number}: strides {array.strides}; its elements have to lie in order")


def offset_in(root: NDArray[np.uint8] | None, array: NDArray[Any]) -> int | None:
    """Where the array begins in `root`, if it lies there as LiteRT needs it; else None."""
    if root is None or not array.flags.c_contiguous or array.ctypes.data % ALIGNMENT:
        return None
    offset = array.ctypes.data - root.ctypes.data
    return offset if array.nbytes and 0 <= offset <= root.nbytes - array.nbytes else None


class Listed(Protocol):
    """A compiled model."""

    operations: list[str]  #: by the library's names, in order


class Programs(PreparedModel, Generic[P]):
    """A prepared model, compiled for sets of input shapes: at once when the model tells them, else when it is bound."""

    def __init__(self, model: Model, pace: Callable[[], object], program: P | None = None) -> None:
        """`program`: for the shapes that the model tells, if there is one. Raises what `compiled` raises."""
        self.model, self._pace = model, pace
        self._programs: dict[tuple[tuple[int, ...] | None, ...], P] = {}
        operands = [model.main.operands[i] for i in model.main.inputs]
        shapes = tuple(operand.dimensions for operand in operands)
        self._is_known = all(operand.is_known for operand in operands)
        if program:
            self._programs[shapes] = program
        elif self._is_known:
            with suppress(ExecutionFailed):  # as a binding will say
                self._program(shapes, pace)

    @cached_property
    def prepared(self) -> list[Prepared]:
        """What is known of the operations."""
        return prepared(self.model.main, self._pace)

    @cached_property
    def _constants(self) -> Tensors:
        return constants(self.model.main, self._pace)

    @property
    def only_program(self) -> P | None:
        """The one of a model that tells all shapes, if it could be compiled."""
        return next(iter(self._programs.values()), None) if self._is_known else None

    @abstractmethod
    def compiled(self, tensors: Tensors, pace: Callable[[], object]) -> P:
        """For these constants and inputs, None for omitted ones. Raises ExecutionFailed, and as the library does."""

    def program_for(self, inputs: Sequence[NDArray[Any] | None], pace: Callable[[], object]) -> P:
        """The one that inputs like these need. Raises ValueError, and as `compiled`."""
        graph = self.model.main
        for number, (index, array) in enumerate(zip(graph.inputs, inputs, strict=True)):
            check_input(number, graph.operands[index], array)
        return self._program([None if a is None else a.shape for a in inputs], pace)

    def rest(self) -> None:
        """Of programs for several sets of shapes the last one stays; those that something is bound to live on."""
        for shapes in [*self._programs][:-1]:
            self._programs.pop(shapes, None)

    def operations(self) -> list[str]:
        """The library's operations of the program that was compiled last, in order."""
        return [name for program in [*self._programs.values()][-1:] for name in program.operations]

    def _program(self, shapes: Shapes, pace: Callable[[], object]) -> P:
        key = tuple(shapes)
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            tensors = dict(self._constants)
            for index, shape in zip(self.model.main.inputs, shapes, strict=True):
                operand = Tensor.of(self.model.main.operands[index])
                tensors[index] = None if shape is None else replace(operand, shape=shape)
            program = self._programs[key] = self.compiled(tensors, pace)
        return program
