"""One pool that holds all arguments of one execution, and its request: where `run` and a burst put their arrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import Memory, OutputShape, Request, RequestArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from driver.nn import Model, Operand

_ALIGN = 64  # bytes: what the fast devices need, and a cache line
_FIRST_GUESS = 4096  # bytes for an output whose size only its execution tells


class Workspace:
    """Inputs first, then outputs, each on a 64-byte boundary of one sealed memfd.

    `inputs` are typed views (None: omitted); the prepared model gives views of the outputs, by `request`.
    """

    def __init__(self, model: Model, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """`shapes`: of the inputs; None omits one."""
        self._operands = [model.main.operands[i] for i in model.main.inputs]
        self._results = [model.main.operands[i] for i in model.main.outputs]
        self._shapes = shapes
        self._lay_out([output_size(o) for o in self._results])

    def _lay_out(self, sizes: Sequence[int]) -> None:
        """New memory for the inputs and for outputs of these sizes in bytes."""
        lengths = [0 if s is None else nbytes(o, s) for o, s in zip(self._operands, self._shapes, strict=True)]
        *places, end = _offsets([*lengths, *sizes])
        self.memory = Memory.create(end)
        arguments = zip(self._operands, self._shapes, places, lengths, strict=False)
        results = zip(places[len(lengths) :], sizes, strict=True)
        self.request = Request(
            tuple(_argument(*a) for a in arguments),
            tuple(RequestArgument(offset=offset, length=length) for offset, length in results),
            (self.memory,),
        )
        self.inputs = tuple(
            None if shape is None else self.memory.asarray(operand.type.dtype, shape, offset)
            for operand, shape, offset in zip(self._operands, self._shapes, places, strict=False)
        )

    def grow(self, shapes: Sequence[OutputShape]) -> Memory | None:
        """Makes room for outputs of these shapes; the old memory, or None when there was room already."""
        sizes = [nbytes(o, shape.dimensions) for o, shape in zip(self._results, shapes, strict=False)]
        reserved = [a.length for a in self.request.outputs]
        if len(sizes) != len(reserved) or all(size <= room for size, room in zip(sizes, reserved, strict=True)):
            return None
        memory, inputs = self.memory, self.inputs
        self._lay_out([max(pair) for pair in zip(sizes, reserved, strict=True)])
        self.fill(inputs)
        return memory

    def fill(self, arrays: Sequence[ArrayLike | None]) -> int:
        """Copies arrays into the inputs, all or none; returns how many bytes that were.

        Raises ValueError naming the input that does not fit.
        """
        if len(arrays) != len(self.inputs):
            raise ValueError(f"{len(arrays)} inputs were given; the model takes {len(self.inputs)}")
        pairs = [
            (place, checked(n, array, place.dtype, place.shape))
            for n, (array, place) in enumerate(zip(arrays, self.inputs, strict=True))
            if place is not None
        ]
        for place, array in pairs:
            place[...] = array
        return sum(place.nbytes for place, _ in pairs)


def input_shapes(
    model: Model, given: Sequence[ArrayLike | tuple[int, ...] | None]
) -> tuple[tuple[int, ...] | None, ...]:
    """The shape of each input: the model's, or the given array's where that leaves it open. Raises ValueError."""
    operands = [model.main.operands[i] for i in model.main.inputs]
    if len(given) != len(operands):
        raise ValueError(f"{len(given)} inputs were given; the model takes {len(operands)}")
    return tuple(_shape(n, o, g) for n, (o, g) in enumerate(zip(operands, given, strict=True)))


def _shape(n: int, operand: Operand, given: ArrayLike | tuple[int, ...] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    if is_known(operand):
        return operand.dimensions
    return given if isinstance(given, tuple) else np.shape(given)


def checked(n: int, array: ArrayLike | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The array, if it is just what input `n` takes. Nothing is converted silently. Raises ValueError."""
    if array is None:
        raise ValueError(f"input {n} is None, but the burst was made with it; give an array of shape {shape}")
    found = np.asarray(array)
    if found.dtype != dtype and not (found.dtype == np.bool_ and dtype == np.uint8):
        raise ValueError(
            f"input {n} has dtype {found.dtype}; the model takes {dtype}: convert it with .astype('{dtype}')"
        )
    if found.shape != shape:
        raise ValueError(f"input {n} has shape {found.shape}; the model takes {shape}")
    return found


def is_known(operand: Operand) -> bool:
    """True when the model fixes the operand's shape."""
    return operand.type.is_scalar or (bool(operand.dimensions) and 0 not in operand.dimensions)


def nbytes(operand: Operand, shape: tuple[int, ...]) -> int:
    """Of an operand of that shape."""
    return math.prod(shape) * operand.type.element_size


def output_size(operand: Operand) -> int:
    """Bytes to reserve for an output."""
    return nbytes(operand, operand.dimensions) if is_known(operand) else _FIRST_GUESS


def _argument(operand: Operand, shape: tuple[int, ...] | None, offset: int, length: int) -> RequestArgument:
    if shape is None:
        return RequestArgument(has_no_value=True)
    return RequestArgument(offset=offset, length=length, dimensions=() if shape == operand.dimensions else shape)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each part begins, and where the last one ends."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-max(size, 1) // _ALIGN) * _ALIGN)
    return places
