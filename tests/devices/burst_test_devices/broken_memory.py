"""Devices whose own memory is broken in one way, for the conformance kit; and `Buffered`, which does it right.

All are the reference device with buffers of their own: elements lie in them as the HAL has them, behind a guard of 64
bytes. Memory of the kind "com.example.block" is a memfd, the fields are where the bytes begin in it.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import Memory
from driver.devices.reference import ReferenceDevice
from driver.interface import BufferArgument, DriverBuffer, PreparedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, BoundExecution, BufferRequest, MemoryHandle, Preparation
    from driver.nn import Model

    Argument = NDArray[Any] | BufferArgument | None

_GUARD = 64


class Block(DriverBuffer):
    """Bytes behind a guard."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory, self.nbytes = memory, memory.nbytes

    @property
    def value(self) -> NDArray[np.uint8]:
        """The bytes of the value."""
        return self.memory[_GUARD:]

    def array(self) -> NDArray[np.uint8] | None:
        return self.value

    def copy_from(self, source: NDArray[np.uint8]) -> None:
        self.value[...] = source

    def copy_to(self, target: NDArray[np.uint8]) -> None:
        target[...] = self.value


class Buffered(ReferenceDevice):
    """Nothing is wrong with it."""

    name = "buffered"
    own_memory_kinds = frozenset({"com.example.block"})
    kind: type[Block] = Block

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepares everything."""
        return BufferedModel(model, super().prepare(model, preparation))

    def allocate(self, request: BufferRequest) -> DriverBuffer | None:
        """New memory."""
        return self.kind(np.zeros(_GUARD + request.nbytes, np.uint8))

    def map_memory(self, handle: MemoryHandle) -> NDArray[np.uint8] | DriverBuffer:
        """The memfd's bytes, from where the field says."""
        status = os.fstat(handle.fd)
        if not stat.S_ISREG(status.st_mode) or len(handle.fields) != 1:
            raise ValueError("a block is a memfd and one field")
        (start,) = handle.fields
        if not 0 <= start <= status.st_size - handle.nbytes:
            raise ValueError(f"{handle.nbytes} bytes from {start} on are not in {status.st_size}")
        mapped = Memory.from_fd(handle.fd, start + handle.nbytes)
        mapped.close()
        return mapped.asarray()[start:]


class BufferedModel(PreparedModel):
    """The reference's, on arrays in the buffers."""

    def __init__(self, model: Model, prepared: PreparedModel) -> None:
        main = model.main
        self._types = [main.operands[i].type for i in main.inputs]
        self._prepared, self.is_static = prepared, prepared.is_static

    def bind(self, inputs: Sequence[Argument], outputs: Sequence[Argument], options: BindOptions) -> BoundExecution:
        found = [self.input(given, kind.dtype) for given, kind in zip(inputs, self._types, strict=True)]
        return self._prepared.bind(found, [self.output(given) for given in outputs], options)

    def input(self, given: Argument, dtype: Any) -> NDArray[Any] | None:
        """The array of an input."""
        if not isinstance(given, BufferArgument):
            return given
        assert isinstance(given.buffer, Block)
        found: NDArray[Any] = given.buffer.value.view(dtype).reshape(given.dimensions)
        return found

    def output(self, given: Argument) -> NDArray[Any]:
        """The bytes of an output."""
        assert given is not None
        if not isinstance(given, BufferArgument):
            return given
        assert isinstance(given.buffer, Block)
        return given.buffer.value


class _Unswapped(Block):
    def copy_to(self, target: NDArray[np.uint8]) -> None:
        target[...] = self.value[::-1]


class Unswapped(Buffered):
    """Copies values in as they are, and out in reverse order."""

    kind = _Unswapped


class _Halved(Block):
    def copy_from(self, source: NDArray[np.uint8]) -> None:
        self.value[: source.size - source.size % 16] = source[: source.size - source.size % 16]


class Halved(Buffered):
    """Copies whole blocks of 16 bytes in, and forgets what is left of a value."""

    kind = _Halved


class _Guarded(BufferedModel):
    def input(self, given: Argument, dtype: Any) -> NDArray[Any] | None:
        if not isinstance(given, BufferArgument):
            return given
        assert isinstance(given.buffer, Block)
        value = given.buffer.memory[: given.buffer.value.nbytes]
        found: NDArray[Any] = value.view(dtype).reshape(given.dimensions)
        return found


class Guarded(Buffered):
    """Executes on what lies at the beginning of a buffer, guard included."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepares everything."""
        return _Guarded(model, ReferenceDevice.prepare(self, model, preparation))


class Shared(Buffered):
    """Gives the same memory to all buffers of one size."""

    def __init__(self) -> None:
        self._heap: dict[int, DriverBuffer] = {}

    def allocate(self, request: BufferRequest) -> DriverBuffer | None:
        """Memory that may not be new."""
        found = self._heap.setdefault(request.nbytes, Block(np.zeros(_GUARD + request.nbytes, np.uint8)))
        assert isinstance(found, Block)
        return Block(found.memory)


class _Aliasing(Block):
    def copy_from(self, source: NDArray[np.uint8]) -> None:
        self.source = source

    @property
    def value(self) -> NDArray[np.uint8]:
        return getattr(self, "source", self.memory[_GUARD:])


class Aliasing(Buffered):
    """Keeps what it is to copy, instead of a copy."""

    kind = _Aliasing


class Believing(Buffered):
    """Takes every handle for what it says."""

    def map_memory(self, handle: MemoryHandle) -> NDArray[np.uint8] | DriverBuffer:
        """Memory of that size, if there is so much."""
        return np.zeros(min(handle.nbytes, 4096), np.uint8)


class Crashing(Buffered):
    """Dies of a handle that it does not understand."""

    def map_memory(self, handle: MemoryHandle) -> NDArray[np.uint8] | DriverBuffer:
        """Maps what it understands."""
        try:
            return super().map_memory(handle)
        except ValueError:
            os._exit(1)
