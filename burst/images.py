"""Image formats of hardware buffers: what a plane holds, and where it lies.

An image is an operand of its own shape, NHWC: [1, height, width, channels]. Formats of several planes count as one
channel of height * 3/2 rows: the planes one after another.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fmq.errors import InvalidDescriptor

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_PIXELS = 2**16 - 1  # in a row or column
_MAX_END = 2**40


class Plane(NamedTuple):
    """Where a plane lies, in bytes; stride: from one row to the next."""

    offset: int
    stride: int


class PlaneFormat(NamedTuple):
    """Values of a plane for each pixel, or for each square of `step` x `step` pixels."""

    channels: int
    step: int = 1


class Format(NamedTuple):
    """A format of images: the type of a value, and the planes."""

    dtype: np.dtype[Any]
    parts: tuple[PlaneFormat, ...]
    is_in_pairs: bool = False  #: whether two pixels of a row share values in one plane

    def shape(self, width: int, height: int) -> tuple[int, ...]:
        """Return the shape of the operand that such an image is."""
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
    "yuyv": _format("u1", 2)._replace(is_in_pairs=True),
    "yuv420": _format("u1", 1, 1, 1),
    "rgba_float16": _format("f2", 4),
    "rgba_float32": _format("f4", 4),
    "rgb_float32": _format("f4", 3),
    "gray_float32": _format("f4", 1),
}
"""By the name that travels. "nv12": Y, and U and V by turns for each 2 x 2 pixels; "yuv420": Y, U, V; "yuyv": Y and
U of even columns, Y and V of odd ones.
"""


def packed_planes(name: str, width: int, height: int) -> list[Plane]:
    """Return the planes of an image without gaps. Raise InvalidDescriptor."""
    offset, planes = 0, []
    for rows, nbytes in plane_sizes(checked_format(name, width, height), width, height):
        planes.append(Plane(offset, nbytes))
        offset += rows * nbytes
    return planes


def checked_format(name: object, width: object, height: object) -> Format:
    """Return the format of that name, if such an image exists. Raise InvalidDescriptor."""
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidDescriptor(f"format={name!r:.40}: one of {', '.join(FORMATS)}")
    step = found.parts[-1].step
    for what, pixels, whole in (("width", width, 2 if found.is_in_pairs else step), ("height", height, step)):
        if type(pixels) is not int or not 1 <= pixels <= _MOST_PIXELS or pixels % whole:
            raise InvalidDescriptor(f"{what}={pixels!r:.40}: 1 to {_MOST_PIXELS} pixels; even ones for {name}")
    return found


def plane_sizes(found: Format, width: int, height: int) -> list[tuple[int, int]]:
    """Return the rows of each plane, and bytes of a row."""
    item = found.dtype.itemsize
    return [(height // step, width // step * channels * item) for channels, step in found.parts]


def checked_planes(planes: list[Any], sizes: list[tuple[int, int]], item: int) -> list[Plane]:
    """Return the planes that a client describes, for values of `item` bytes. Raise InvalidDescriptor."""
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
    ranges = sorted((p.offset, end_of([p], [size])) for p, size in zip(found, sizes, strict=True))
    if any(end > start for (_, end), (start, _) in pairwise(ranges)):
        raise InvalidDescriptor(f"planes={planes!r:.80}: they overlap")
    return found


def end_of(planes: Sequence[Plane], sizes: list[tuple[int, int]]) -> int:
    """Return the first byte after the last row; nothing may follow it."""
    return max(p.offset + (rows - 1) * p.stride + nbytes for p, (rows, nbytes) in zip(planes, sizes, strict=True))
