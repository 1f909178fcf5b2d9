"""MessageQueue: create a queue, open it, and take its roles."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from fmq.closing import Closing
from fmq.descriptor import AttachedQueue, Descriptor
from fmq.end import MessageQueueReader, MessageQueueWriter
from fmq.event import EventFlag
from fmq.geometry import ALIGNMENT, Flavour, Geometry
from fmq.inspection import why_taken
from fmq.region import Kind, Region

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike

_PAGE = 4096
_EVENT_AT = 640  # csrc/fmq/layout.h


class MessageQueue(Closing):
    """An atomic circular FIFO in shared memory, between any two processes.

    Elements are a numpy dtype of a fixed size. Transfers are all or nothing: n elements become visible at once.
    """

    def __init__(self, place: AttachedQueue, *, owns: bool = True) -> None:
        """Use `create` or `open`."""
        self._place, self._owns = place, owns

    @classmethod
    def create(
        cls,
        dtype: DTypeLike,
        capacity: int,
        flavour: Flavour = Flavour.SYNCHRONIZED,
        name: str | None = None,
        memory: Kind | None = None,
        *,
        region: Region | None = None,
        offset: int = 0,
        ring: Region | None = None,
    ) -> MessageQueue:
        """Return a new empty queue of `capacity` elements, in memory of its own: a "memfd" (None), or "posix".

        With a name ("/like-this") other programs can open it, and it stays until `fmq.unlink`, even if every process
        dies.

        With `region` the queue takes `nbytes(dtype, capacity, flavour)` bytes of it, from `offset` on; so many queues
        share one mapping and one file descriptor. `ring` is another region, which holds the elements from its beginning
        on.

        Raise FileExistsError, which says whether the queue of that name is in use, NoSpace, and ValueError for a dtype
        with objects, an impossible capacity, a region that is too small, and an offset where a queue is in use.
        """
        geometry = Geometry.of(dtype, capacity, flavour)
        if region is None:
            if offset or ring is not None:
                raise ValueError(f"offset={offset}, ring={ring!r}: these are for a queue that is placed in a region")
            nbytes = geometry.control_bytes + -(-geometry.ring_bytes // _PAGE) * _PAGE
            try:
                region = Region.create(nbytes, memory, name, geometry.format)
            except FileExistsError:
                raise FileExistsError(errno.EEXIST, why_taken(str(name))) from None
            return cls(AttachedQueue(geometry, region, 0, region, ring_at=geometry.control_bytes))
        if name is not None or memory is not None:
            raise ValueError(f"name={name!r}, memory={memory!r}: the region says what memory that is")
        ring_at = 0 if ring else offset + geometry.control_bytes
        place = AttachedQueue(geometry, region, offset, ring or region, ring_at=ring_at)
        place.check_room()
        geometry.format(region, offset)
        return cls(place, owns=False)

    @classmethod
    def open(cls, what: Descriptor | str | Region, *, offset: int = 0, writable: bool | None = None) -> MessageQueue:
        """Open the queue of a descriptor, of a name, or at `offset` of a region.

        `writable=False` opens an unsynchronized queue read-only, so that this process cannot write to it; None does so
        when the memory allows nothing else. Raise InvalidDescriptor, FileNotFoundError.
        """
        if isinstance(what, Region):
            if writable not in (None, what.writable):
                raise ValueError(
                    f"writable={writable}: the region is mapped with {what.writable}; map it anew for that"
                )
            return cls(AttachedQueue.at(what, offset), owns=False)
        if isinstance(what, str):
            return cls(AttachedQueue.at(Region.open(what, writable=writable is not False), 0))
        return cls(what.attach(writable=writable))

    @staticmethod
    def nbytes(dtype: DTypeLike, capacity: int, flavour: Flavour = Flavour.SYNCHRONIZED) -> int:
        """Return the bytes that a queue takes in a region: control pages and the ring, rounded up to where the next may
        begin.
        """
        geometry = Geometry.of(dtype, capacity, flavour)
        return geometry.control_bytes + -(-geometry.ring_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of one element."""
        return self._place.geometry.dtype

    @property
    def capacity(self) -> int:
        """The number of elements that the queue holds."""
        return self._place.geometry.capacity

    @property
    def flavour(self) -> Flavour:
        """The rule for how many writers and readers it has, and what happens when it is full."""
        return self._place.geometry.flavour

    @property
    def name(self) -> str | None:
        """The name; None for a queue without one."""
        return self._place.control.name

    @property
    def event_flag(self) -> EventFlag:
        """The event flag in the queue's own memory, for any use; no transfer touches it without `notify`."""
        return EventFlag(self._place.control, self._place.control_at + _EVENT_AT)

    @property
    def descriptor(self) -> Descriptor:
        """The description by which another process opens this queue. Borrows this queue's file descriptors."""
        place, g = self._place, self._place.geometry
        if place.control.name is not None:
            return Descriptor(g.dtype, g.flavour, place.grantors, (), name=place.control.name, sealed=False)
        fds: tuple[int, ...] = (place.control.fd,)
        is_sealed = place.control.sealed
        if place.ring is not place.control:
            fds, is_sealed = (*fds, place.ring.fd), is_sealed and place.ring.sealed
        return Descriptor(g.dtype, g.flavour, place.grantors, fds, sealed=is_sealed)

    def writer(self, *, follows: bool = False) -> MessageQueueWriter:
        """Take the writer's role. Raise RoleTaken while another writer lives.

        `follows`: the peer will tell of its life by a LifePage of its own; call `follow` before any transfer.
        """
        return MessageQueueWriter(self._place, follows=follows)

    def reader(self, *, follows: bool = False) -> MessageQueueReader:
        """Take the reader's role. Raise RoleTaken while another reader lives. An unsynchronized queue takes any number
        of readers, and a broadcast queue up to 64; each has its own position and begins with the next element that is
        written.

        `follows`: as of `writer`.
        """
        return MessageQueueReader(self._place, follows=follows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it for `multiprocessing`, as its descriptor. The roles are taken where it arrives."""
        return MessageQueue.open, (self.descriptor,)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name is not None else ""
        return f"<MessageQueue{name}: {self.capacity} x {self.dtype}, {self.flavour.name.lower()}>"

    def close(self) -> None:
        """Close the file descriptors; ends that were taken go on. Regions that were passed in stay open."""
        if self._owns:
            self._place.close()
