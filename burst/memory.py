"""Memory pools: `Memory` itself is the plain kind, `ashmem`; its subclasses are the others.

A hardware buffer is memory as cameras and other devices leave it, in a DMA-BUF or any shared memory. An image is used
in place where its planes follow each other without gaps; other images are put together by copying, which is counted.

A new kind is a class and its place in `KINDS`.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from dataclasses import dataclass
from enum import KEEP, IntFlag
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import numpy as np

from burst.backing import Backing, backing_of
from burst.dma_buf import END, READ, WRITE, is_dma_buf, sync_dma_buf
from burst.errors import GeneralFailure, InvalidArgument, ResourceExhaustedPersistent, ResourceExhaustedTransient
from burst.exhaustion import exhausted
from burst.freezing import copy_file, file_changed, filled, frozen_fd
from burst.freezing import is_frozen as is_frozen_fd
from burst.images import FORMATS, Plane, checked_format, checked_planes, end_of, packed_planes, plane_sizes
from burst.memory_limits import available_text, check_available, descriptors_text
from burst.own_kinds import described, is_own_kind, opener_of, registered_kinds
from fmq import Region
from fmq._core import ffi, lib
from fmq.errors import InvalidDescriptor, NoSpace, raise_errno
from fmq.region import checked_size, memfd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import FileIO

    from numpy.typing import NDArray

    from fmq.region import Kind

    Admit = Callable[[int], object]

_READ_ONLY, _READ_WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_MAX_BYTES = 2**47  # what can be mapped at all
_TICK = 20_000_000  # ns: within a tick of its clock, at most 10 ms, the kernel gives two writes to a file the same time


class Usage(IntFlag, boundary=KEEP):
    """The uses of a hardware buffer, in the bits of AHardwareBuffer; other bits of 64 are carried along.

    Devices here are on the CPU: without CPU_READ they cannot use it, and without CPU_WRITE there are no outputs in it.
    """

    CPU_READ = 0x03
    CPU_WRITE = 0x30
    GPU_SAMPLED_IMAGE = 0x100
    CAMERA_WRITE = 0x20000


class FrozenMemory:
    """A mapping that no process can write any more: the base of the arrays on it. It keeps a descriptor of its own."""

    def __init__(self, memory: Memory, offset: int) -> None:
        self.kind, self.offset, self.fd = memory.kind, offset, os.dup(memory.fd)
        self._mapping, self.address = memory.base, int(ffi.cast("uintptr_t", memory.base))
        shape, data = (memory.nbytes,), (self.address, True)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": data}

    def close(self) -> None:
        """Close the descriptor: the memory cannot be sent any more. Arrays on it stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def frozen_memory(array: object) -> FrozenMemory | None:
    """Return the frozen memory in which an array lies, if it can be sent."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, FrozenMemory) and array.fd >= 0 else None


class Memory(Region):
    """A memory pool: inputs and outputs of executions lie in it, at offsets.

    Made by `create`, or on memory of others by `from_fd` and `from_hardware_buffer`. It travels as [kind, fields…] and
    a descriptor, and it pickles, with all that is known about it.
    """

    kind: str = "ashmem"  #: the HAL's name; one that is a driver's own is named like an extension
    needs_sync = False  #: executions have to call `begin` and `end`
    needs_descriptor = False  #: also when it is mapped
    is_file = False  #: its pages may have to come from a disk, or from the process that serves the file

    def _protect(self, offset: int) -> None:
        super()._protect(offset)
        if is_frozen_fd(self.fd):
            self._bytes = np.asarray(FrozenMemory(self, offset))

    @classmethod
    def create(
        cls,
        nbytes: int,
        kind: Kind | None = None,
        name: str | None = None,
        prepare: Callable[[Region], None] | None = None,
    ) -> Self:
        """Make memory as `Region.create` does. Raise ResourceExhaustedPersistent for more memory than there is, and
        ResourceExhaustedTransient when no descriptor is left.
        """
        check_available(nbytes)
        try:
            return super().create(nbytes, kind, name, prepare)
        except NoSpace as error:
            raise ResourceExhaustedPersistent(str(error)) from error
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise ResourceExhaustedTransient(f"nbytes={nbytes}: {error.strerror}; {descriptors_text()}") from error
            raise ResourceExhaustedPersistent(f"nbytes={nbytes}: {error}; {available_text()}") from error
        except MemoryError as error:
            raise ResourceExhaustedPersistent(f"nbytes={nbytes}: {error}; {available_text()}") from error

    @classmethod
    def frozen(cls, source: bytes | NDArray[Any] | str | os.PathLike[str]) -> Memory:
        """Return new memory with a copy of an array, of bytes or of a file (by its path), which no process can write
        any more.

        Constants of a model in such a pool travel to devices as a handle and are not copied. Raises
        ResourceExhaustedPersistent for more than there is, OSError, also for a file that changes while it is read, and
        ValueError for no bytes at all.
        """
        if isinstance(source, str | os.PathLike):
            with open(source, "rb", buffering=0) as file:
                return cls.frozen_file(file)
        array = np.ascontiguousarray(np.frombuffer(source, np.uint8) if isinstance(source, bytes) else source)
        return cls._frozen(array.nbytes, filled(lambda room: np.copyto(room, array.reshape(-1).view(np.uint8))))

    @classmethod
    def frozen_file(cls, file: FileIO, parts: Sequence[tuple[int, int]] | None = None) -> Memory:
        """Return frozen memory with a copy of a file that is open for reading, which stays the caller's. `parts`: where
        those begin and end that are copied, one behind the other; None: all of it. Raise the same.
        """
        before = os.fstat(file.fileno())
        age = time.time_ns() - before.st_mtime_ns
        if age < _TICK:  # a write during the copy could not be told from the last one
            time.sleep(min(_TICK, _TICK - age) / 1e9)
        parts = [(0, before.st_size)] if parts is None else parts
        memory = cls._frozen(sum(end - begin for begin, end in parts), partial(copy_file, file, parts))
        after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise file_changed(file)
        return memory

    @classmethod
    def frozen_by(cls, nbytes: int, fill: Callable[[NDArray[np.uint8]], object]) -> Memory:
        """Return frozen memory of `nbytes` that `fill` writes in place: it gets them as an array of zeros, and may not
        keep it.

        Raise ValueError when it did.
        """
        return cls._frozen(nbytes, filled(fill))

    @staticmethod
    def _frozen(nbytes: int, write: Callable[[int, int], object]) -> Memory:
        return Memory(frozen_fd(nbytes, write), nbytes, writable=False)

    @property
    def is_frozen(self) -> bool:
        """True if no process can write it any more."""
        return isinstance(self._bytes.base, FrozenMemory)

    @classmethod
    def adopt(cls, fd: int, nbytes: int | None = None, *, writable: bool = True, sealed: bool = True) -> Self:
        """Take over memory of the plain kind that another process made, as `Region.from_fd` does. Owns `fd`."""
        return super().from_fd(fd, nbytes, writable=writable, sealed=sealed)

    @classmethod
    def from_fd(  # type: ignore[override]  # another kind than ours
        cls, fd: int, nbytes: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE, offset: int = 0
    ) -> MappedFd:
        """Map `nbytes` of a file, or of other memory, from `offset` on. `fd` stays the caller's. The HAL's
        `mmap_fd`.

        `protection`: of `mmap`; with PROT_READ alone devices cannot write there, and refuse outputs in it.
        Raise ValueError for what is not in the file, OSError for what cannot be mapped.
        """
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
        """Return an image in a DMA-BUF, or other shared memory; for format "blob" just `width` bytes. `fd` stays the
        caller's.

        `format`: one of `burst.images.FORMATS`. `planes`: (offset, stride) of each in bytes; None: without gaps.
        Raise ValueError for what is not in the memory, OSError for what cannot be mapped.
        """
        if format == "blob":
            return adopted(HardwareBufferBlob, [width, int(usage)], os.dup(fd))
        where = packed_planes(format, width, height) if planes is None else planes
        fields = [format, width, height, [list(plane) for plane in where], int(usage)]
        return adopted(HardwareBuffer, fields, os.dup(fd))

    @classmethod
    def from_handle(cls, fd: int, nbytes: int, kind: str, fields: Sequence[int] = ()) -> VendorMemory:
        """Memory of a kind that only the device's driver knows, named like an extension: "com.example.heap".

        The driver says what `nbytes` and `fields`, at most 16 integers of 64 bits, mean. `fd` stays the caller's.
        Raise ValueError for arguments that no kind has, OSError for a descriptor that is not open.
        """
        return adopted(VendorMemory, [kind, nbytes, list(fields)], os.dup(fd))

    def to_wire(self) -> list[Any]:
        """Return the fields that travel beside the descriptor."""
        return [self.kind, *self.fields()]

    def fields(self) -> list[Any]:
        """Return what describes memory of this kind: bytes, and whether that size is sealed."""
        return [self.nbytes, self.sealed]

    @classmethod
    def checked(cls, fields: list[Any], fd: int) -> dict[str, Any]:
        """Return the checked fields beside a descriptor, of which memory is made. `fields` may be anything. Raises
        InvalidDescriptor.
        """
        match fields:
            case [int(nbytes), bool(sealed)] if type(nbytes) is int:
                return {"nbytes": checked_size(fd, nbytes, sealed=sealed), "writable": not is_frozen_fd(fd)}
        raise InvalidDescriptor(f"{fields!r:.80} does not describe memory: [bytes, is sealed]")

    @staticmethod
    def size_of(arguments: dict[str, Any]) -> int:
        """Return how many bytes memory of these arguments, which `checked` returned, has mapped."""
        found: int = arguments["nbytes"]
        return found

    @staticmethod
    def from_wire(plain: object, fd: int, admit: Admit | None = None) -> Memory:
        """Memory that an untrusted peer describes, for reading and writing in place. Owns `fd`.

        Only the mapping is kept: memory that a device knows costs it no descriptor, but for DMA-BUFs.
        `admit` gets the bytes before they are mapped, and may raise.
        Raise InvalidArgument for what describes no memory, GeneralFailure for what cannot be mapped, such as memory of
        a kind that another driver alone knows.
        """
        memory = _received(plain, fd, admit)
        if not memory.needs_descriptor:
            memory.close()
            if not memory.writable and (found := frozen_memory(memory.asarray())):
                found.close()
        return memory

    def begin(self, *, writes: bool) -> None:
        """Prepare for an execution that reads this memory, or also writes it. Only called where `needs_sync`."""

    def end(self, *, writes: bool) -> None:
        """End what `begin` began. Only called where `needs_sync`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it for `multiprocessing`, between one's own processes."""
        from multiprocessing import reduction  # takes as long to load as this package

        return _unpickled, (self.to_wire(), reduction.DupFd(self.fd))


class MappedFd(Memory):
    """Part of whatever can be mapped, most often of a file: the HAL's `mmap_fd`. Made by `Memory.from_fd`.

    What was written to a file on a disk is there when the execution's result comes.
    """

    kind = "mmap_fd"

    def __init__(self, fd: int, nbytes: int, protection: int, offset: int) -> None:
        """Take over `fd`, which was checked."""
        self.is_file = backing_of(fd) in {Backing.FILE, Backing.DISK}
        super().__init__(fd, nbytes, writable=protection == _READ_WRITE, offset=offset)
        self.protection, self.offset = protection, offset
        self.needs_sync = self.writable and self.is_file

    def fields(self) -> list[Any]:
        """Return the bytes, protection as of `mmap`, and where they begin in the file."""
        return [self.nbytes, self.protection, self.offset]

    @classmethod
    def checked(cls, fields: list[Any], fd: int) -> dict[str, Any]:
        """Return the checked fields, as `Memory.checked` does."""
        match fields:
            case [int(nbytes), int(protection), int(offset)] if all(type(field) is int for field in fields):
                pass
            case _:
                raise InvalidDescriptor(f"{fields!r:.80} does not describe a mapping: [bytes, protection, offset]")
        if protection not in (_READ_ONLY, _READ_WRITE):
            raise InvalidDescriptor(f"protection={protection}: PROT_READ, or PROT_READ | PROT_WRITE")
        if offset % mmap.PAGESIZE or not 0 <= offset < _MAX_BYTES:
            raise InvalidDescriptor(f"offset={offset}: a multiple of the page size, {mmap.PAGESIZE}")
        if not 0 < nbytes < _MAX_BYTES:
            raise InvalidDescriptor(f"nbytes={nbytes}: a pool has at least one byte")
        if _is_file(fd):  # of others mmap knows
            checked_size(fd, offset + nbytes, sealed=False)
        return {"nbytes": nbytes, "protection": protection, "offset": offset}

    def end(self, *, writes: bool) -> None:
        """Wait until the disk has it."""
        if writes and (code := lib.fmq_flush(self.base, self.nbytes)):
            raise_errno(code, "flush")


class DmaBuf(Memory):
    """A hardware buffer of either kind. The kernel hears of accesses to a DMA-BUF: there may be caches to flush."""

    def __init__(self, fd: int, nbytes: int, usage: Usage) -> None:
        """Take over `fd`, which was checked."""
        self.usage = usage
        self.needs_sync = self.needs_descriptor = is_dma_buf(fd)
        super().__init__(fd, nbytes, writable=bool(usage & Usage.CPU_WRITE))

    def begin(self, *, writes: bool) -> None:
        """Tell the kernel that the CPU begins to read, or also to write."""
        sync_dma_buf(self.fd, READ | (WRITE if writes else 0))

    def end(self, *, writes: bool) -> None:
        """Tell the kernel that the CPU is done."""
        sync_dma_buf(self.fd, READ | (WRITE if writes else 0) | END)


class HardwareBufferBlob(DmaBuf):
    """A hardware buffer that is no image: bytes. Made by `Memory.from_hardware_buffer` with the format "blob"."""

    kind = "hardware_buffer_blob"

    def fields(self) -> list[Any]:
        """Return the bytes, which is the buffer's width, and usage."""
        return [self.nbytes, int(self.usage)]

    @classmethod
    def checked(cls, fields: list[Any], fd: int) -> dict[str, Any]:
        """Return the checked fields, as `Memory.checked` does."""
        match fields:
            case [int(nbytes), int(usage)] if type(nbytes) is int and 0 < nbytes < _MAX_BYTES:
                if not is_dma_buf(fd):
                    checked_size(fd, nbytes, sealed=False)
                return {"nbytes": nbytes, "usage": _checked_usage(usage)}
        raise InvalidDescriptor(f"{fields!r:.80} does not describe a blob: [bytes, usage]")


class HardwareBuffer(DmaBuf):
    """An image. Made by `allocate`, or by `Memory.from_hardware_buffer` in memory of others."""

    kind = "hardware_buffer"

    def __init__(
        self,
        fd: int,
        format: str,  # noqa: A002
        width: int,
        height: int,
        planes: Sequence[Plane],
        usage: Usage,
    ) -> None:
        """Take over `fd`, which was checked."""
        self.format, self.width, self.height, self.planes = format, width, height, tuple(planes)
        found = FORMATS[format]
        self.dtype, self.shape = found.dtype, found.shape(width, height)  #: of the operand that it is
        self._sizes = plane_sizes(found, width, height)
        super().__init__(fd, end_of(self.planes, self._sizes), usage)

    @classmethod
    def allocate(
        cls,
        format: str,  # noqa: A002
        width: int,
        height: int,
        planes: Sequence[tuple[int, int]] | None = None,
        usage: int = Usage.CPU_READ | Usage.CPU_WRITE,
    ) -> Self:
        """Return a new image in sealed memory. Raise ValueError, ResourceExhaustedPersistent."""
        sizes = plane_sizes(checked_format(format, width, height), width, height)
        given = packed_planes(format, width, height) if planes is None else planes
        where = checked_planes([list(plane) for plane in given], sizes, FORMATS[format].dtype.itemsize)
        nbytes = end_of(where, sizes)
        check_available(nbytes)
        return cls(memfd(nbytes), format, width, height, planes=where, usage=_checked_usage(int(usage)))

    def fields(self) -> list[Any]:
        """Format, width and height in pixels, offset and stride of each plane, usage."""
        return [self.format, self.width, self.height, [list(plane) for plane in self.planes], int(self.usage)]

    @classmethod
    def checked(cls, fields: list[Any], fd: int) -> dict[str, Any]:
        """Return the checked fields, as `Memory.checked` does."""
        match fields:
            case [name, width, height, list(planes), usage]:
                pass
            case _:
                raise InvalidDescriptor(f"{fields!r:.80} is no image: [format, width, height, planes, usage]")
        sizes = plane_sizes(checked_format(name, width, height), width, height)
        where = checked_planes(planes, sizes, FORMATS[name].dtype.itemsize)
        if not is_dma_buf(fd):
            checked_size(fd, end_of(where, sizes), sealed=False)
        return {"format": name, "width": width, "height": height, "planes": where, "usage": _checked_usage(usage)}

    @staticmethod
    def size_of(arguments: dict[str, Any]) -> int:
        """Return the bytes of memory with these fields."""
        sizes = plane_sizes(FORMATS[arguments["format"]], arguments["width"], arguments["height"])
        return end_of(arguments["planes"], sizes)

    def plane(self, n: int) -> NDArray[Any]:
        """Return a view of one plane: [rows, columns, channels]."""
        (rows, _), part, item = self._sizes[n], FORMATS[self.format].parts[n], self.dtype.itemsize
        shape = rows, self.width // part.step, part.channels
        strides = self.planes[n].stride, part.channels * item, item
        return np.ndarray(shape, self.dtype, self.asarray(), self.planes[n].offset, strides)

    def view(self) -> NDArray[Any] | None:
        """Return the operand in place; None where it has to be put together."""
        starts = [plane.offset for plane in self.planes]
        ends = [p.offset + rows * p.stride for p, (rows, _) in zip(self.planes, self._sizes, strict=True)]
        is_tight = all(p.stride == nbytes for p, (_, nbytes) in zip(self.planes, self._sizes, strict=True))
        if not is_tight or ends[:-1] != starts[1:]:
            return None
        return self.asarray(self.dtype, self.shape, starts[0])

    def read(self) -> NDArray[Any]:
        """Return the operand: in place where that can be, else a copy."""
        found = self.view()
        if found is None:
            found = np.empty(self.shape, self.dtype)
            self.gather(found)
        return found

    def gather(self, into: NDArray[Any]) -> None:
        """Copy the planes to a contiguous array of the operand's shape."""
        for n, part in enumerate(self._parts_of(into)):
            part[...] = self.plane(n)

    def scatter(self, source: NDArray[Any]) -> None:
        """Copy a contiguous array of the operand's shape to the planes."""
        for n, part in enumerate(self._parts_of(source)):
            self.plane(n)[...] = part

    def _parts_of(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the part of the operand that belongs to each plane."""
        flat, begin, parts = array.reshape(-1), 0, []
        for n in range(len(self.planes)):
            shape = self.plane(n).shape
            size = shape[0] * shape[1] * shape[2]
            parts.append(flat[begin : begin + size].reshape(shape))
            begin += size
        return parts


class VendorMemory(Memory):
    """Memory of a kind that only the device's driver knows: this process does not map it. Made by
    `Memory.from_handle`.
    """

    def __init__(self, fd: int, kind: str, nbytes: int, numbers: tuple[int, ...]) -> None:
        """Take over `fd`. Does not map it, so it makes no `Region`."""
        self._fd, self.name, self.writable = fd, None, True
        self.kind, self.nbytes, self.numbers = kind, nbytes, numbers

    def fields(self) -> list[Any]:
        """Return the bytes, and what the driver needs besides."""
        return [self.nbytes, list(self.numbers)]

    @classmethod
    def checked(cls, fields: list[Any], fd: int) -> dict[str, Any]:
        """Return the checked fields, as `Memory.checked` does; they begin with the kind, and the descriptor may be of
        anything.
        """
        kind, nbytes, numbers = described(*fields)
        return {"kind": kind, "nbytes": nbytes, "numbers": numbers}

    @property
    def is_frozen(self) -> bool:
        """Never: what is behind it is the driver's business."""
        return False

    def asarray(self, dtype: Any = np.uint8, shape: int | tuple[int, ...] | None = None, offset: int = 0) -> NoReturn:
        """Raise ValueError: only the driver knows what is in there."""
        raise ValueError(f"memory of kind {self.kind} is not mapped here: map it with the library that made it")


@dataclass(eq=False)
class DeviceBuffer:
    """Memory that the device manages, where a request could name a `Memory`. Its token means something to it alone."""

    token: int
    in_place: bool = False  #: whether one request may name it as an input and as an output


KINDS: dict[str, type[Memory]] = {
    kind.kind: kind for kind in (Memory, MappedFd, HardwareBufferBlob, HardwareBuffer)
}  #: by the name that travels


_M = TypeVar("_M", bound=Memory)


def adopted(kind: type[_M], fields: list[Any], fd: int, admit: Admit | None = None) -> _M:
    """Memory of that kind, checked and mapped. Owns `fd`. Raise InvalidDescriptor, OSError, and what `admit` does."""
    try:
        arguments = kind.checked(fields, fd)
        if admit:
            admit(kind.size_of(arguments))
    except BaseException:
        os.close(fd)
        raise
    return kind(fd, **arguments)


def _received(plain: object, fd: int, admit: Admit | None = None) -> Memory:
    match plain:
        case [str(name), *fields] if name in KINDS:
            try:
                return adopted(KINDS[name], fields, fd, admit)
            except (InvalidDescriptor, OSError) as error:
                kind = ResourceExhaustedTransient if exhausted(error) else GeneralFailure
                raise kind(f"{name} cannot be mapped: {error}") from error
        case [str(name), *fields] if opener := opener_of(name):
            try:
                handle = described(name, *fields)
                if admit:
                    admit(handle.nbytes)
            except InvalidDescriptor as error:
                os.close(fd)
                raise InvalidArgument(f"memory of kind {name}: {error}") from error
            except BaseException:
                os.close(fd)
                raise
            opened: Memory = opener(handle, fd)
            return opened
        case [str(name), *_]:
            os.close(fd)
            raise undecodable(name)
    os.close(fd)
    raise GeneralFailure(f"{plain!r:.80} does not describe memory: [kind, fields…]")


def undecodable(kind: str) -> GeneralFailure | InvalidArgument:
    """Return the error for memory of a kind that this process cannot decode; the name may be of no kind at all."""
    known = ", ".join((*KINDS, *registered_kinds()))
    if is_own_kind(kind):
        return GeneralFailure(f"memory of kind {kind!r}: this device knows {known}; copy the values to Memory.create")
    return InvalidArgument(f"memory of kind {kind!r:.120}: there is none; this device knows {known}")


def _unpickled(plain: list[Any], carried: Any) -> Memory:
    if is_own_kind(plain[0]):
        return adopted(VendorMemory, plain, carried.detach())
    return _received(plain, carried.detach())


def _checked_usage(usage: object) -> Usage:
    """Raise InvalidDescriptor."""
    if type(usage) is not int or not 0 <= usage < 2**64:
        raise InvalidDescriptor(f"usage={usage!r:.40}: bits of burst.Usage")
    if not usage & Usage.CPU_READ:
        raise InvalidDescriptor(f"usage={usage:#x}: devices run on the CPU, so CPU_READ is needed")
    return Usage(usage)


def _is_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)
