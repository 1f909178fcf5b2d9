"""Descriptors: what another process needs to attach to a queue, and the checks that it makes.

A descriptor names the element dtype, the flavour, and by its grantors where the two parts of the queue lie: the control
page and the ring, each in one of at most two memories. What came from another process is checked against the kernel
(fstat, seals) and against the control page before it is used.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fmq._core import ffi, lib
from fmq.errors import InvalidDescriptor
from fmq.geometry import ALIGNMENT, Flavour, Geometry, dtype_text, parsed_dtype
from fmq.region import Region
from fmq.role import LIFE_AT, SEATS_AT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

_WIRE_VERSION = 2
_MOST_GRANTORS, _MOST_FDS = 8, 2


class Grantor(NamedTuple):
    """One part of a queue: `extent` bytes at `offset` of the memory behind `fds[fd_index]`."""

    fd_index: int
    offset: int
    extent: int


@dataclass(frozen=True, slots=True)
class AttachedQueue:
    """The memory of a queue in this process: its control page and its ring."""

    geometry: Geometry
    control: Region
    control_at: int
    ring: Region
    ring_at: int
    announces: bool = True  #: ends in this process have their life word in the control page

    @classmethod
    def at(cls, region: Region, offset: int) -> AttachedQueue:
        """Return the queue whose control page lies there, and whose ring follows it."""
        geometry = Geometry.read(region, offset)
        place = cls(geometry, region, offset, region, ring_at=offset + geometry.control_bytes)
        _check_grantors(place.grantors, [region], geometry)
        return place

    def check_room(self) -> None:
        """Raise ValueError when a new queue does not fit there, or when a queue is in use there."""
        try:
            _check_grantors(self.grantors, self.regions, self.geometry)
        except InvalidDescriptor as error:
            raise ValueError(f"offset={self.control_at}: {error}") from None
        if not all(region.writable for region in self.regions):
            raise ValueError("region: it is mapped read-only")
        base, shape = self.control.base + self.control_at, ffi.new("fmq_shape *")
        is_none = bool(lib.fmq_shape_of(base, shape))
        end = self.control.nbytes - self.control_at if shape.flavour == Flavour.BROADCAST else SEATS_AT
        places = [at for at in LIFE_AT.values() if at < end and not is_none]
        if lib.FMQ_ALIVE in {lib.fmq_life_state(base + at) for at in places}:
            raise ValueError(f"offset={self.control_at}: a queue is in use there; choose another offset")

    def close(self) -> None:
        """Close the file descriptors. Ends that were taken go on."""
        self.control.close()
        if self.ring is not self.control:
            self.ring.close()

    @property
    def grantors(self) -> tuple[Grantor, Grantor]:
        """The places of control page and ring."""
        control, second = self.geometry.control_bytes, 0 if self.ring is self.control else 1
        return Grantor(0, self.control_at, control), Grantor(second, self.ring_at, self.geometry.ring_bytes)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The memories that the grantors' `fd_index` counts."""
        return (self.control,) if self.ring is self.control else (self.control, self.ring)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Descriptor:
    """Describes a queue for another process: its elements, and its memory, by file descriptors or by name.

    It pickles through `multiprocessing` (an argument of `Process`, an item of a `Queue`) with its file descriptors.
    Over a Unix socket of your own, send `to_wire()` and the fds beside it.
    """

    dtype: np.dtype[Any]
    flavour: Flavour
    grantors: tuple[Grantor, ...]  #: control page, ring; more are ignored
    fds: tuple[int, ...] = ()  #: borrowed from the queue, or owned by a descriptor that arrived
    name: str | None = None  #: instead of fds
    sealed: bool = True  #: memory that its owner can still shrink is refused
    announces: bool = True  #: see `unannounced`
    capacity: int = field(init=False, repr=False, compare=False)  #: elements that the ring holds

    def __post_init__(self) -> None:
        extent = self.grantors[1].extent if len(self.grantors) > 1 else 0
        object.__setattr__(self, "capacity", extent // max(1, self.dtype.itemsize))

    def attach(self, *, writable: bool | None = None) -> AttachedQueue:
        """Check the description and map the memory; see `MessageQueue.open`."""
        _check_shape(self.grantors, len(self.fds) if self.name is None else 1)
        control, ring = self.grantors[:2]
        regions = self._mapped(writable)
        if len(regions) > 1 and regions[0].is_same_memory(regions[1]):
            raise InvalidDescriptor("both file descriptors are of the same memory; a queue in one memory has one")
        place_of = regions[control.fd_index], control.offset, regions[ring.fd_index], ring.offset
        _check_grantors(self.grantors, regions, self)
        found = Geometry.read(*place_of[:2])
        for what in ("flavour", "dtype", "capacity"):
            said, is_so = getattr(self, what), getattr(found, what)
            if said != is_so:
                raise InvalidDescriptor(f"{what}: the descriptor says {said!r}, the memory holds {is_so!r}")
        return AttachedQueue(found, *place_of, self.announces)

    def region(self) -> Region:
        """Return the memory that holds the control page, attached anew."""
        return self.attach().control

    def read_only(self) -> Descriptor:
        """Return the same memory opened read-only, for readers of an unsynchronized queue that must not write to it."""
        if self.flavour is not Flavour.UNSYNCHRONIZED or self.name is not None:
            raise ValueError("read_only: for unsynchronized queues without a name; both sides of the others write")
        opened = tuple(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) for fd in self.fds)
        return _owning(replace(self, fds=opened))

    def unannounced(self) -> Descriptor:
        """Return the same queue, for a process that tells its peers of its life by a LifePage of its own. The life word
        of an end would be in memory that is the peer's; a peer that truncates it could keep the kernel from telling
        others.
        """
        return replace(self, announces=False) if self.announces else self

    def _mapped(self, writable: bool | None) -> list[Region]:
        """Map the memory writable if possible and wanted; only readers of unsynchronized queues can do without."""
        regions = list[Region]()
        try:
            if self.name is not None:
                return [Region.open(self.name, writable=writable is not False)]
            for fd in self.fds:
                regions.append(Region.from_fd(os.dup(fd), writable=writable is not False, sealed=self.sealed))
        except PermissionError as error:  # sealed against writing (EPERM), or opened for reading only (EACCES)
            if writable is None and self.flavour is Flavour.UNSYNCHRONIZED:
                return self._mapped(False)
            raise InvalidDescriptor("the memory is not writable; a queue's ends both write") from error
        return regions

    def to_wire(self) -> tuple[list[Any], list[int]]:
        """Return a list for msgpack, and the file descriptors to send beside it. Raise ValueError for named queues."""
        if self.name is not None:
            raise ValueError(f"name={self.name!r}: send the name; a peer may not choose which file we open")
        grantors = list(map(list, self.grantors))
        return [_WIRE_VERSION, dtype_text(self.dtype), int(self.flavour), grantors], list(self.fds)

    @classmethod
    def from_wire(cls, plain: object, fds: Sequence[int], *, sealed: bool = True, announces: bool = True) -> Descriptor:
        """Return the descriptor that an untrusted peer sent. Owns the fds, also after an error. Raises
        InvalidDescriptor.

        `sealed=False` accepts memory that its owner can still shrink: only for processes that called
        `fmq.region.guard`. `announces=False`: see `unannounced`.
        """
        try:
            dtype, flavour, grantors = _read(plain)
            _check_shape(grantors, len(fds))
            return _owning(cls(dtype, flavour, grantors, tuple(fds), sealed=sealed, announces=announces))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import reduction  # takes as long to load as this package

        carried = [reduction.DupFd(fd) for fd in self.fds]
        grantors = [tuple(grantor) for grantor in self.grantors]
        return _unpickle, (self.dtype, int(self.flavour), grantors, carried, self.name, self.sealed, self.announces)


def _unpickle(
    dtype: np.dtype[Any],
    flavour: int,
    grantors: list[Any],
    carried: list[Any],
    name: str | None,
    sealed: bool,
    announces: bool,
) -> Descriptor:
    fds = tuple(fd.detach() for fd in carried)
    return _owning(
        Descriptor(
            dtype,
            Flavour(flavour),
            tuple(Grantor(*g) for g in grantors),
            fds,
            name=name,
            sealed=sealed,
            announces=announces,
        )
    )


def _owning(descriptor: Descriptor) -> Descriptor:
    """Close the file descriptors with the last reference to the descriptor; queues have duplicates of their own."""
    if descriptor.fds:
        weakref.finalize(descriptor, _close_all, descriptor.fds).atexit = False
    return descriptor


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _read(plain: object) -> tuple[np.dtype[Any], Flavour, tuple[Grantor, ...]]:
    """Read what an untrusted peer wrote. Raise InvalidDescriptor."""
    match plain:
        case [version, str(text), flavour, [*rows]] if version == _WIRE_VERSION and type(flavour) is int:
            pass
        case _:
            raise InvalidDescriptor(f"{plain!r:.100} is not a queue descriptor of version {_WIRE_VERSION}")
    if flavour not in tuple(Flavour):
        raise InvalidDescriptor(f"flavour {flavour} is unknown; there are {[int(f) for f in Flavour]}")
    dtype = parsed_dtype(text)
    if dtype.hasobject or not dtype.itemsize:
        raise InvalidDescriptor(f"dtype {dtype}: elements are plain data of a fixed size, without objects")
    grantors = list[Grantor]()
    for row in rows[: _MOST_GRANTORS + 1]:
        match row:
            case [index, offset, extent] if type(index) is type(offset) is type(extent) is int:
                grantors.append(Grantor(index, offset, extent))
    if len(grantors) < len(rows) or len(rows) > _MOST_GRANTORS:
        raise InvalidDescriptor(f"{rows!r:.100}: a grantor is [fd_index, offset, extent], and there are 2")
    return dtype, Flavour(flavour), tuple(grantors)


def _check_shape(grantors: tuple[Grantor, ...], fds: int) -> None:
    """Do the checks that need no memory. Grantors beyond the second are ignored."""
    if len(grantors) < 2:
        raise InvalidDescriptor(f"{len(grantors)} grantors: a queue has 2, of its control page and of its ring")
    used = {grantors[0].fd_index, grantors[1].fd_index}
    if not 1 <= fds <= _MOST_FDS or used != set(range(fds)):
        raise InvalidDescriptor(f"{fds} file descriptors and grantors of {sorted(used)}: 1 or 2 are needed, all of use")


def _check_grantors(grantors: tuple[Grantor, ...], regions: Sequence[Region], of: Geometry | Descriptor) -> None:
    """Check that both parts lie inside their memory, aligned, whole, and apart from each other."""
    control, ring = grantors[:2]
    control_bytes, itemsize = lib.fmq_control_bytes(of.flavour), of.dtype.itemsize
    for what, grantor in (("control page", control), ("ring", ring)):
        _, offset, extent = grantor
        if offset < 0 or offset % ALIGNMENT:
            raise InvalidDescriptor(f"{what}: offset {offset} is not a multiple of {ALIGNMENT}")
        size = regions[grantor.fd_index].nbytes
        if extent < 1 or offset + extent > size:
            raise InvalidDescriptor(f"{what}: {extent} bytes at {offset}, but the memory has only {size}")
    if control.extent != control_bytes:
        raise InvalidDescriptor(f"control page: extent {control.extent}; it has {control_bytes} bytes")
    if ring.extent % itemsize:
        raise InvalidDescriptor(f"ring: extent {ring.extent} is not a whole number of elements of {itemsize} bytes")
    apart = control.offset + control_bytes <= ring.offset or ring.offset + ring.extent <= control.offset
    if control.fd_index == ring.fd_index and not apart:
        raise InvalidDescriptor("control page and ring overlap")
