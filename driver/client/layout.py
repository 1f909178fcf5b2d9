"""Where the inputs and outputs of a model lie in memory: worked out once for each model and its shapes."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import RequestArgument
from driver.client.names import named
from driver.client.open_input import NOT_GIVEN, OpenInput, open_inputs
from driver.nn.file_form import PACKED, takes_empty
from driver.protocol.packed_values import room_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from driver.nn import Model, Operand

Shapes = tuple[tuple[int, ...] | None, ...]
_ALIGN = 64  # bytes: what the fast devices need, and a cache line
_FIRST_GUESS = 4096  # bytes for an output whose size only its execution tells
_FILE_GUESS = 2**22  # of a model file, which says less of its outputs: memory that is not touched costs nothing
_INPUTS, _OUTPUTS = 0, 1  # pools of every request that is made here
_MOST = 64  # layouts of inputs that are kept for one model


class InputLayout(NamedTuple):
    """The places of inputs of certain shapes in one memory.

    nbytes: the least that the memory has. views: dtype, shape and offset of each input's array; None where it is
    omitted, or its shape is not given. instead: what stands for an array whose shape is not given.
    """

    nbytes: int
    arguments: tuple[RequestArgument, ...]
    views: tuple[tuple[np.dtype[Any], tuple[int, ...], int] | None, ...]
    instead: tuple[OpenInput | None, ...]


class OutputLayout(NamedTuple):
    """The places of outputs of certain sizes in bytes, in one memory."""

    sizes: tuple[int, ...]
    places: tuple[int, ...]
    nbytes: int
    arguments: tuple[RequestArgument, ...]


class Layouts:
    """The layouts of one model, and what else its requests need to know of it. Any thread."""

    def __init__(self, model: Model) -> None:
        """Use `layouts_of`. It does not refer to the model."""
        graph = model.main
        self.inputs = tuple(graph.operands[i] for i in graph.inputs)
        self.outputs = tuple(graph.operands[i] for i in graph.outputs)
        self.names = tuple(tensor.name for tensor in model.inputs)
        self.optional = model.optional
        self.named_inputs, self.named_outputs = named(self.names), named(tuple(t.name for t in model.outputs))
        self.packed = tuple(n for n, operand in enumerate(self.inputs) if operand.type == PACKED)
        self.has_packed_outputs = any(operand.type == PACKED for operand in self.outputs)
        #: arrays may have other shapes than the model says, or be left out
        self.is_open = bool(self.optional) or not all(operand.is_known for operand in self.inputs)
        self.first_shapes: Shapes = tuple(map(first_shape, self.inputs))
        guess = _FILE_GUESS if takes_empty(model) else _FIRST_GUESS
        self.are_outputs_known = all(operand.is_known for operand in self.outputs)
        self._first_outputs = _output_layout([nbytes(o, o.dimensions) if o.is_known else guess for o in self.outputs])
        self._inputs: dict[Shapes, InputLayout] = {}

    def of_inputs(self, model: Model, shapes: Shapes) -> InputLayout:
        """Return the layout of inputs of these shapes; None omits one."""
        found = self._inputs.get(shapes)
        if found is None:
            if len(self._inputs) >= _MOST:
                self._inputs.clear()
            found = self._inputs[shapes] = _input_layout(model, self.inputs, shapes)
        return found

    def of_outputs(self, sizes: Sequence[int] | None) -> OutputLayout:
        """Return the layout of outputs of these sizes in bytes; None: what the model says, or a guess."""
        return _output_layout(sizes) if sizes else self._first_outputs


_known: dict[int, Layouts] = {}


def layouts_of(model: Model) -> Layouts:
    """Return the layouts of this very model: two that are equal are not compared."""
    found = _known.get(id(model))
    if found is None:
        found = _known[id(model)] = Layouts(model)
        weakref.finalize(model, _known.pop, id(model), None).atexit = False
    return found


def first_shape(operand: Operand) -> Any:
    """Return an input's shape before it is given: as the model says, with some room for what is no tensor."""
    if operand.type == PACKED:
        return (room_for(1),)
    return operand.dimensions if operand.is_known else NOT_GIVEN


def nbytes(operand: Operand, shape: tuple[int, ...]) -> int:
    """Return the bytes of an operand of that shape."""
    return math.prod(shape) * operand.type.element_size


def _input_layout(model: Model, operands: Sequence[Operand], shapes: Shapes) -> InputLayout:
    instead = tuple(open_inputs(model, shapes)) if NOT_GIVEN in shapes else (None,) * len(shapes)
    given = [None if shape == NOT_GIVEN else shape for shape in shapes]
    lengths = [0 if s is None else nbytes(o, s) for o, s in zip(operands, given, strict=True)]
    *places, end = _offsets(lengths)
    each = list(zip(operands, given, places, lengths, strict=True))
    views = tuple(None if shape is None else (o.type.dtype, shape, place) for o, shape, place, _ in each)
    return InputLayout(max(end, 1), tuple(_argument(*of_one) for of_one in each), views, instead)


def _output_layout(sizes: Sequence[int]) -> OutputLayout:
    *places, end = _offsets(sizes)
    arguments = tuple(
        RequestArgument(pool=_OUTPUTS, offset=offset, length=length)
        for offset, length in zip(places, sizes, strict=True)
    )
    return OutputLayout(tuple(sizes), tuple(places), end, arguments)


def _argument(operand: Operand, shape: tuple[int, ...] | None, offset: int, length: int) -> RequestArgument:
    if shape is None:
        return RequestArgument(has_no_value=True)
    dimensions = () if shape == operand.dimensions else shape
    return RequestArgument(pool=_INPUTS, offset=offset, length=length, dimensions=dimensions)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return where each part begins, and where the last one ends."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-max(size, 1) // _ALIGN) * _ALIGN)
    return places
