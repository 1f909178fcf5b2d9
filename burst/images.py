"""Hardware buffers: images as cameras and other devices leave them, in DMA-BUFs or any shared memory.

An image is an operand of its own shape, NHWC: [1, height, width, channels]. Formats of several planes count as one
channel of height * 3/2 rows: the planes one after another. Where its planes lie just so, without gaps, it is used in
place; other images are put together by copying, which is counted.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from burst.memory import Memory, Usage
from burst.memory_limits import check_available
from fmq.errors import InvalidDescriptor
from fmq.region import checked_size, memfd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_MOST_PIXELS = 2**16 - 1  # in a row or column
_MAX_END = 2**40
_SYNC, _READ, _WRITE, _END = 0x40086200, 1, 2, 4  # DMA_BUF_IOCTL_SYNC and its flags


class Plane(NamedTuple):
    """Where a plane lies, in bytes; stride: from one row to the next."""

    offset: int
    stride: int


class PlaneFormat(NamedTuple):
    """Values of a plane for each pixel, or for each square of `step` x `step` pixels."""

    channels: int
    step: int = 1


class Format(NamedTuple):
    """Of images: what each value is, and the planes."""

    dtype: np.dtype[Any]
    parts: tuple[PlaneFormat, ...]

    def shape(self, width: int, height: int) -> tuple[int, ...]:
        """Of the operand that such an image is."""
        if len(self.parts) == 1:
            return 1, height, width, self.parts[0].channels
        return 1, height * 3 // 2, width, 1


def _format(dtype: str, *channels: int) -> Format:
    return Format(np.dtype(dtype), (PlaneFormat(channels[0]), *(PlaneFormat(n, 2) for n in channels[1:])))


FORMATS: dict[str, Format] = {
    "rgba": _format("u1", 4),
    "rgb": _format("u1", 3),
    "gray": _format("u1", 1),
    "nv12": _format("u1", 1, 2),
    "yuv420": _format("u1", 1, 1, 1),
    "rgba_float16": _format("f2", 4),
    "rgba_float32": _format("f4", 4),
    "rgb_float32": _format("f4", 3),
    "gray_float32": _format("f4", 1),
}
"""By the name that travels. "nv12": Y, and U and V by turns for each 2 x 2 pixels; "yuv420": Y, U, V."""


def packed_planes(name: str, width: int, height: int) -> list[Plane]:
    """Of an image without gaps. Raises InvalidDescriptor."""
    offset, planes = 0, []
    for rows, nbytes in _sizes(_checked_format(name, width, height), width, height):
        planes.append(Plane(offset, nbytes))
        offset += rows * nbytes
    return planes


def _checked_format(name: object, width: object, height: object) -> Format:
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidDescriptor(f"format={name!r:.40}: one of {', '.join(FORMATS)}")
    for what, pixels in (("width", width), ("height", height)):
        if type(pixels) is not int or not 1 <= pixels <= _MOST_PIXELS or pixels % found.parts[-1].step:
            raise InvalidDescriptor(f"{what}={pixels!r:.40}: 1 to {_MOST_PIXELS} pixels; even ones for {name}")
    return found


def _sizes(found: Format, width: int, height: int) -> list[tuple[int, int]]:
    """Rows of each plane, and bytes of a row."""
    item = found.dtype.itemsize
    return [(height // step, width // step * channels * item) for channels, step in found.parts]


def checked_usage(usage: object) -> Usage:
    """Raises InvalidDescriptor."""
    if type(usage) is not int or not 0 <= usage < 2**64:
        raise InvalidDescriptor(f"usage={usage!r:.40}: bits of burst.Usage")
    if not usage & Usage.CPU_READ:
        raise InvalidDescriptor(f"usage={usage:#x}: without CPU_READ nobody here can use it")
    return Usage(usage)


class DmaBuf(Memory):
    """A hardware buffer of either kind. The kernel hears of accesses to a DMA-BUF: there may be caches to flush."""

    def __init__(self, fd: int, nbytes: int, usage: Usage) -> None:
        """Owns `fd`, which was checked."""
        self.usage = usage
        self.needs_sync = self.needs_descriptor = is_dma_buf(fd)
        super().__init__(fd, nbytes, writable=bool(usage & Usage.CPU_WRITE))

    def begin(self, *, writes: bool) -> None:
        """Tells the kernel that the CPU begins to read, or also to write."""
        sync_dma_buf(self.fd, _READ | (_WRITE if writes else 0))

    def end(self, *, writes: bool) -> None:
        """Tells the kernel that the CPU is done."""
        sync_dma_buf(self.fd, _READ | (_WRITE if writes else 0) | _END)


class HardwareBuffer(DmaBuf):
    """An image. Made by `allocate`, or by `Memory.from_hardware_buffer` in memory of others."""

    kind: ClassVar[str] = "hardware_buffer"

    def __init__(
        self,
        fd: int,
        format: str,  # noqa: A002
        width: int,
        height: int,
        planes: Sequence[Plane],
        usage: Usage,
    ) -> None:
        """Owns `fd`, which was checked."""
        self.format, self.width, self.height, self.planes = format, width, height, tuple(planes)
        found = FORMATS[format]
        self.dtype, self.shape = found.dtype, found.shape(width, height)  #: of the operand that it is
        self._sizes = _sizes(found, width, height)
        super().__init__(fd, _end(self.planes, self._sizes), usage)

    @classmethod
    def allocate(
        cls,
        format: str,  # noqa: A002
        width: int,
        height: int,
        planes: Sequence[tuple[int, int]] | None = None,
        usage: int = Usage.CPU_READ | Usage.CPU_WRITE,
    ) -> Self:
        """A new image in sealed memory. Raises ValueError, ResourceExhaustedPersistent."""
        sizes = _sizes(_checked_format(format, width, height), width, height)
        given = packed_planes(format, width, height) if planes is None else planes
        where = _checked_planes([list(plane) for plane in given], sizes, FORMATS[format].dtype.itemsize)
        nbytes = _end(where, sizes)
        check_available(nbytes)
        return cls(memfd(nbytes), format, width, height, where, checked_usage(int(usage)))

    def fields(self) -> list[Any]:
        """Format, width and height in pixels, offset and stride of each plane, usage."""
        return [self.format, self.width, self.height, [list(plane) for plane in self.planes], int(self.usage)]

    @classmethod
    def checked(cls, fields: list[Any], fd: int) -> dict[str, Any]:
        """As of `Memory`."""
        match fields:
            case [name, width, height, list(planes), usage]:
                pass
            case _:
                raise InvalidDescriptor(f"{fields!r:.80} is no image: [format, width, height, planes, usage]")
        sizes = _sizes(_checked_format(name, width, height), width, height)
        where = _checked_planes(planes, sizes, FORMATS[name].dtype.itemsize)
        if not is_dma_buf(fd):
            checked_size(fd, _end(where, sizes), sealed=False)
        return {"format": name, "width": width, "height": height, "planes": where, "usage": checked_usage(usage)}

    def plane(self, n: int) -> NDArray[Any]:
        """A view of one plane: [rows, columns, channels]."""
        (rows, _), part, item = self._sizes[n], FORMATS[self.format].parts[n], self.dtype.itemsize
        shape = rows, self.width // part.step, part.channels
        strides = self.planes[n].stride, part.channels * item, item
        return np.ndarray(shape, self.dtype, self.asarray(), self.planes[n].offset, strides)

    def view(self) -> NDArray[Any] | None:
        """The operand in place; None where it has to be put together."""
        starts = [plane.offset for plane in self.planes]
        ends = [p.offset + rows * p.stride for p, (rows, _) in zip(self.planes, self._sizes, strict=True)]
        is_tight = all(p.stride == nbytes for p, (_, nbytes) in zip(self.planes, self._sizes, strict=True))
        if not is_tight or ends[:-1] != starts[1:]:
            return None
        return self.asarray(self.dtype, self.shape, starts[0])

    def read(self) -> NDArray[Any]:
        """The operand: in place where that can be, else a copy."""
        found = self.view()
        if found is None:
            found = np.empty(self.shape, self.dtype)
            self.gather(found)
        return found

    def gather(self, into: NDArray[Any]) -> None:
        """Copies the planes to a contiguous array of the operand's shape."""
        for n, part in enumerate(self._parts_of(into)):
            part[...] = self.plane(n)

    def scatter(self, source: NDArray[Any]) -> None:
        """Copies a contiguous array of the operand's shape to the planes."""
        for n, part in enumerate(self._parts_of(source)):
            self.plane(n)[...] = part

    def _parts_of(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """What belongs to each plane."""
        flat, begin, parts = array.reshape(-1), 0, []
        for n in range(len(self.planes)):
            shape = self.plane(n).shape
            size = shape[0] * shape[1] * shape[2]
            parts.append(flat[begin : begin + size].reshape(shape))
            begin += size
        return parts


def _checked_planes(planes: list[Any], sizes: list[tuple[int, int]], item: int) -> list[Plane]:
    if len(planes) != len(sizes):
        raise InvalidDescriptor(f"planes={planes!r:.80}: {len(sizes)} are needed, each (offset, stride)")
    for plane, (rows, nbytes) in zip(planes, sizes, strict=True):
        match plane:
            case [int(offset), int(stride)] if type(offset) is type(stride) is int:
                pass
            case _:
                raise InvalidDescriptor(f"plane {plane!r:.40}: (offset, stride) in bytes")
        if offset % item or stride % item:
            raise InvalidDescriptor(f"plane {plane}: multiples of {item} bytes, which a value has")
        if offset < 0 or stride < nbytes or offset + rows * stride > _MAX_END:
            raise InvalidDescriptor(f"plane {plane}: {rows} rows of {nbytes} bytes; a stride is no less")
    found = [Plane(*plane) for plane in planes]
    ranges = sorted((p.offset, _end([p], [size])) for p, size in zip(found, sizes, strict=True))
    if any(end > start for (_, end), (start, _) in pairwise(ranges)):
        raise InvalidDescriptor(f"planes={planes!r:.80}: they overlap")
    return found


def _end(planes: Sequence[Plane], sizes: list[tuple[int, int]]) -> int:
    """Of the last row; nothing may follow it."""
    return max(p.offset + (rows - 1) * p.stride + nbytes for p, (rows, nbytes) in zip(planes, sizes, strict=True))


def is_dma_buf(fd: int) -> bool:
    """Whether the descriptor is of a DMA-BUF: it alone knows how to be synchronised."""
    if stat.S_IFMT(os.fstat(fd).st_mode):  # a file, a device, a pipe: something with a name
        return False
    try:
        sync_dma_buf(fd, _READ)
        sync_dma_buf(fd, _READ | _END)
    except OSError:
        return False
    return True


def sync_dma_buf(fd: int, flags: int) -> None:
    """Tells the kernel of an access. Raises OSError."""
    while True:
        try:
            fcntl.ioctl(fd, _SYNC, struct.pack("Q", flags))
        except (InterruptedError, BlockingIOError):
            continue
        return
