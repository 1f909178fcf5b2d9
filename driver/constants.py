"""The models of all clients of a device: equal ones are one, so that their weights are in memory once.

A model comes in memory that nobody can change any more (sealed against writing, shrinking and growing), so what was
equal once stays equal. Bytes are compared, not their digests: that takes a hundredth of a second for 100 MB, and only
when a model of the same size is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from cffi import FFI

from driver.encoding import decode, sealed

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.interface import Device, PreparedModel
    from driver.nn import Model
    from fmq import Region

_ffi = FFI()
_ffi.cdef("int memcmp(const void *one, const void *other, size_t nbytes);")
_libc: Any = _ffi.dlopen(None)  # calls give up the GIL


class Kept:
    """A model, and what the device made of it, as long as somebody has it."""

    __slots__ = ("__weakref__", "model", "prepared", "region", "where")

    def __init__(self, region: Region, where: object, model: Model, prepared: PreparedModel) -> None:
        self.region, self.where, self.model, self.prepared = region, where, model, prepared

    def is_of(self, region: Region, where: object) -> bool:
        """Whether the same bytes lie there."""
        nbytes = self.region.nbytes
        if (nbytes, self.where) != (region.nbytes, where):
            return False
        return not _libc.memcmp(_address(self.region), _address(region), nbytes)


def _address(region: Region) -> Any:
    return _ffi.cast("void *", region.asarray().ctypes.data)


class Models:
    """Those that a device has prepared and somebody still has. One thread at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: WeakSet[Kept] = WeakSet()

    def prepare(self, fd: int, where: object, pace: Callable[[], object]) -> Kept:
        """The model in a memfd that somebody sent, or the equal one that is there. Owns `fd`.

        Raises InvalidModel, and what the device raises.
        """
        region = sealed(fd)
        known = next((kept for kept in self._kept if kept.is_of(region, where)), None)
        if known and getattr(known.prepared, "serves_all", False):
            return known
        source = known.region if known else region
        model = known.model if known else decode(region, where, pace)
        kept = Kept(source, where, model, self._device.prepare(model, pace))
        self._kept.add(kept)
        return kept
