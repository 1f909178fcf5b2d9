"""An argument that lies in memory of an NVIDIA GPU, as a runtime binds it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias, Union, cast

from driver.interface import BufferArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Room: TypeAlias = Union[NDArray[np.uint8], "GpuPlace"]  # noqa: UP007 (a name that comes later)


class GpuPlace:
    """A part of a `GpuBuffer`. Its values are the GPU's: kernels read and write them where they lie."""

    def __init__(self, argument: BufferArgument, nbytes: int | None = None) -> None:
        """`nbytes`: of it; None: all that the argument has."""
        self.buffer = cast("Any", argument.buffer)
        self.argument, self.shape = argument, argument.dimensions
        self.address: int = self.buffer.address + argument.offset
        self.ordinal: int = self.buffer.ordinal
        room = self.buffer.room - argument.offset if argument.nbytes is None else argument.nbytes
        self.nbytes: int = room if nbytes is None else nbytes

    def first(self, nbytes: int) -> GpuPlace:
        """Return the first `nbytes`."""
        return GpuPlace(self.argument, nbytes)

    def write(self, values: NDArray[np.uint8]) -> None:
        """Copy values of the CPU to its beginning. Raise LibraryFailed."""
        self.buffer.copy_from(values, self.argument.offset)


def address_of(place: Room) -> int:
    """Return where its first byte lies, on the CPU or on the GPU."""
    return place.address if isinstance(place, GpuPlace) else place.ctypes.data


def overlap(some: Sequence[Room], others: Sequence[Room]) -> bool:
    """Return True if one of the first has a byte in common with one of the others. All are contiguous."""
    sides = enumerate((some, others))
    spans = [(isinstance(p, GpuPlace), address_of(p), p.nbytes, side) for side, places in sides for p in places]
    reached = [(False, 0), (False, 0)]  # the furthest end of each side so far
    for on_gpu, begin, nbytes, side in sorted(spans):
        if nbytes and (on_gpu, begin) < reached[1 - side]:
            return True
        reached[side] = max(reached[side], (on_gpu, begin + nbytes))
    return False


def checked_gpu_input(where: str, argument: BufferArgument, size: int, *, chooses: bool) -> GpuPlace:
    """Return the input, if it can be read there. `size`: of an element; `chooses`: its values are indices, sizes,
    conditions.

    Raise ValueError.
    """
    if chooses:
        raise ValueError(
            f"{where}: its values may choose addresses, and memory of the GPU can change while they do; put it into "
            "memory of the CPU"
        )
    return GpuPlace(argument, size * math.prod(argument.dimensions))


def places_of(outputs: Sequence[Any]) -> list[Room]:
    """Return the memory of each output."""
    return [GpuPlace(output) if isinstance(output, BufferArgument) else output for output in outputs]
