"""Memory pools, and the two caches that let a request name one by a number.

`Memory` itself is the plain kind, `ashmem`; the others are in burst/pools.py and burst/images.py.

The client gives each pool a slot when it first uses it (SlotTable); the server asks for the memory behind a slot that
it does not know, maps it once, and keeps the mapping until the slot is freed (MappingCache). A slot's number is never
used again, so a late message about a freed slot can only miss, never hit other memory.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import KEEP, IntFlag
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from burst.errors import GeneralFailure, InvalidArgument, ResourceExhaustedPersistent
from burst.memory_limits import available_text, check_available
from fmq import Region
from fmq.errors import InvalidDescriptor, NoSpace
from fmq.region import checked_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from burst.images import HardwareBuffer
    from burst.pools import HardwareBufferBlob, MappedFd
    from fmq.region import Kind

_MAX_SLOT = 2**31 - 1  # i32 on the wire


class Usage(IntFlag, boundary=KEEP):
    """What a hardware buffer is for, as AHardwareBuffer counts it; other bits of 64 are carried along.

    Devices here are on the CPU: without CPU_READ they cannot use it, and without CPU_WRITE there are no outputs in it.
    """

    CPU_READ = 0x03
    CPU_WRITE = 0x30
    GPU_SAMPLED_IMAGE = 0x100
    CAMERA_WRITE = 0x20000


class Memory(Region):
    """A memory pool: inputs and outputs of executions lie in it, at offsets.

    Made by `create`, or on memory of others by `from_fd` and `from_hardware_buffer`. It travels as [kind, fields…] and
    a descriptor, and it pickles, with all that is known about it.
    """

    kind: ClassVar[str] = "ashmem"  #: the HAL's name
    needs_sync = False  #: executions have to call `begin` and `end`
    needs_descriptor = False  #: also when it is mapped

    @classmethod
    def create(
        cls,
        nbytes: int,
        kind: Kind | None = None,
        name: str | None = None,
        prepare: Callable[[Region], None] | None = None,
    ) -> Self:
        """As `Region.create`. Raises ResourceExhaustedPersistent for more than there is."""
        check_available(nbytes)
        try:
            return super().create(nbytes, kind, name, prepare)
        except NoSpace as error:
            raise ResourceExhaustedPersistent(str(error)) from error
        except (OSError, MemoryError) as error:
            raise ResourceExhaustedPersistent(f"nbytes={nbytes}: {error}; {available_text()}") from error

    @classmethod
    def adopt(cls, fd: int, nbytes: int | None = None, *, writable: bool = True, sealed: bool = True) -> Self:
        """As `Region.from_fd`: memory of the plain kind that another process made. Owns `fd`."""
        return super().from_fd(fd, nbytes, writable=writable, sealed=sealed)

    @classmethod
    def from_fd(  # type: ignore[override]  # another kind than ours
        cls, fd: int, nbytes: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE, offset: int = 0
    ) -> MappedFd:
        """The HAL's `mmap_fd`: `nbytes` of a file, or of other memory, from `offset` on. `fd` stays the caller's.

        `protection`: of `mmap`; with PROT_READ alone devices cannot write there, and refuse outputs in it.
        Raises ValueError for what is not in the file, OSError for what cannot be mapped.
        """
        from burst.pools import MappedFd

        return adopted(MappedFd, [nbytes, protection, offset], os.dup(fd))

    @classmethod
    def from_hardware_buffer(
        cls,
        fd: int,
        format: str,  # noqa: A002 (what AHardwareBuffer calls it)
        width: int,
        height: int = 1,
        planes: Sequence[tuple[int, int]] | None = None,
        usage: int = Usage.CPU_READ | Usage.CPU_WRITE,
    ) -> HardwareBuffer | HardwareBufferBlob:
        """An image in a DMA-BUF, or other shared memory; for format "blob" just `width` bytes. `fd` stays the caller's.

        `format`: one of `burst.images.FORMATS`. `planes`: (offset, stride) of each in bytes; None: without gaps.
        Raises ValueError for what is not in the memory, OSError for what cannot be mapped.
        """
        from burst.images import HardwareBuffer, packed_planes
        from burst.pools import HardwareBufferBlob

        if format == "blob":
            return adopted(HardwareBufferBlob, [width, int(usage)], os.dup(fd))
        where = packed_planes(format, width, height) if planes is None else planes
        fields = [format, width, height, [list(plane) for plane in where], int(usage)]
        return adopted(HardwareBuffer, fields, os.dup(fd))

    def to_wire(self) -> list[Any]:
        """What travels beside the descriptor."""
        return [self.kind, *self.fields()]

    def fields(self) -> list[Any]:
        """What describes memory of this kind: bytes, and whether that size is sealed."""
        return [self.nbytes, self.sealed]

    @classmethod
    def checked(cls, fields: list[Any], fd: int) -> dict[str, Any]:
        """What to make one of, beside the descriptor. `fields` may be anything. Raises InvalidDescriptor."""
        match fields:
            case [int(nbytes), bool(sealed)] if type(nbytes) is int:
                return {"nbytes": checked_size(fd, nbytes, sealed=sealed)}
        raise InvalidDescriptor(f"{fields!r:.80} does not describe memory: [bytes, is sealed]")

    @staticmethod
    def from_wire(plain: object, fd: int) -> Memory:
        """From somebody who is not trusted, for reading and writing in place. Owns `fd`.

        Only the mapping is kept: memory that a device knows costs it no descriptor, but for DMA-BUFs.
        Raises InvalidArgument for a kind that is unknown, GeneralFailure for what cannot be mapped.
        """
        memory = _received(plain, fd)
        if not memory.needs_descriptor:
            memory.close()
        return memory

    def begin(self, *, writes: bool) -> None:
        """Called before an execution reads this memory, or also writes it. Only where `needs_sync`."""

    def end(self, *, writes: bool) -> None:
        """Called after it. Only where `needs_sync`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For `multiprocessing`, between one's own processes."""
        return _unpickled, (self.to_wire(), reduction.DupFd(self.fd))


_M = TypeVar("_M", bound=Memory)


def adopted(kind: type[_M], fields: list[Any], fd: int) -> _M:
    """Memory of that kind, checked and mapped. Owns `fd`. Raises InvalidDescriptor, OSError."""
    try:
        arguments = kind.checked(fields, fd)
    except BaseException:
        os.close(fd)
        raise
    return kind(fd, **arguments)


def _received(plain: object, fd: int) -> Memory:
    from burst.pools import KINDS

    match plain:
        case [str(name), *fields] if name in KINDS:
            try:
                return adopted(KINDS[name], fields, fd)
            except (InvalidDescriptor, OSError) as error:
                raise GeneralFailure(f"{name} cannot be mapped: {error}") from error
        case [str(name), *_]:
            os.close(fd)
            raise InvalidArgument(f"memory of kind {name!r:.40}: this device knows {', '.join(KINDS)}")
    os.close(fd)
    raise GeneralFailure(f"{plain!r:.80} does not describe memory: [kind, fields…]")


def _unpickled(plain: list[Any], carried: Any) -> Memory:
    return _received(plain, carried.detach())


@dataclass(eq=False)
class DeviceBuffer:
    """Memory that the device manages, where a request could name a `Memory`. Its token means something to it alone."""

    token: int


class SlotTable:
    """The client's side: which slot stands for which memory. Holds the memory until it is forgotten."""

    def __init__(self) -> None:
        self._slots: dict[Memory, int] = {}
        self._memories: dict[int, Memory] = {}
        self._next = 0

    def slot_of(self, memory: Memory) -> int:
        """The memory's slot, a new one at first sight."""
        slot = self._slots.get(memory)
        if slot is None:
            if self._next > _MAX_SLOT:
                raise OverflowError("this burst has used up its 2**31 slots; open another")
            slot = self._next
            self._next += 1
            self._slots[memory], self._memories[slot] = slot, memory
        return slot

    def memories(self, slots: Iterable[int]) -> list[Memory]:
        """All of them. Raises InvalidArgument when one is unknown or was freed."""
        try:
            return [self._memories[slot] for slot in slots]
        except KeyError as error:
            raise InvalidArgument(f"slot {error.args[0]} stands for no memory") from None

    def forget(self, memory: Memory) -> int | None:
        """The slot that stood for it, or None."""
        slot = self._slots.pop(memory, None)
        if slot is not None:
            del self._memories[slot]
        return slot


class MappingCache:
    """The server's side: mapped memory by slot."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}

    def resolve(self, slots: Sequence[int], fetch: Callable[[list[int]], list[Memory]]) -> list[Memory]:
        """The memory of each slot. Asks `fetch` once for all that are unknown; nothing is kept when that fails."""
        known = self._memories
        if missing := sorted({slot for slot in slots if slot not in known}):
            known.update(dict(zip(missing, fetch(missing), strict=True)))
        return [known[slot] for slot in slots]

    def free(self, slot: int) -> None:
        """Lets the mapping go; arrays on it keep it until they go too. An unknown slot is no error."""
        self._memories.pop(slot, None)

    def clear(self) -> None:
        """Frees all."""
        self._memories.clear()
