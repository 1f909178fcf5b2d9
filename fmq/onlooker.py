"""Copies what passes through a named queue, without a role, without a write, and unnoticed by both sides.

Element i of a queue lies in slot i % capacity, which it shares with element i + capacity. The writer may be overwriting
it while we copy. So we read head, copy, and *then* read the word that bounds what may have been overwritten by now.

* Unsynchronized and broadcast: the writer stores in `begin` how far it is about to write before it does so. What we
  copied is whole from begin - capacity on.
* Synchronized: the writer may touch element i + capacity as soon as it has seen a tail beyond i, and a reservation
  is not visible. So exactly the elements at or beyond the tail that we read after the copy are whole. Elements that the
  reader has taken are most often still there, but nothing proves it: they are `doubtful`, and left out by default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fmq._core import lib
from fmq.closing import Closing
from fmq.descriptor import AttachedQueue
from fmq.errors import Corrupt
from fmq.geometry import Flavour
from fmq.inspection import BEGIN_AT, HEAD_AT, TAIL_AT, lives_of
from fmq.region import Region

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK = 1 << 20  # bytes that one look copies at most


@dataclass(frozen=True, slots=True)
class Sight:
    """The result of one look: elements `first`, `first` + 1, … of the queue's life."""

    first: int
    elements: NDArray[Any]
    doubtful: int  #: how many of them, the oldest, may have been overwritten while they were copied
    missed: int  #: how many elements before them came and went unseen


class Onlooker(Closing):
    """Follows a named queue at a position of its own. `with_taken`: also shows elements that the reader has taken."""

    def __init__(self, name: str, *, with_taken: bool = False) -> None:
        self._region = Region.open(name, writable=False)
        place = AttachedQueue.at(self._region, 0)
        self.dtype, self.capacity = place.geometry.dtype, place.geometry.capacity
        self._overwrites = place.geometry.flavour is not Flavour.SYNCHRONIZED  # its writer says how far it is about to
        self._with_taken = with_taken
        self._ring = self._region.asarray(self.dtype, self.capacity, place.ring_at)
        self.position = 0  #: the element that the next look begins with

    def keep_latest(self, n: int) -> None:
        """Skip all but the n newest elements."""
        head = self._glance(HEAD_AT)
        self.position = max(0, head - n, min(head, self._oldest(head)))

    def look(self) -> Sight:
        """Copy the elements since the last look that are still there; about a megabyte at most."""
        head = self._glance(HEAD_AT)
        if head < self.position:
            raise Corrupt(f"the queue's head went back from {self.position} to {head}: its writer broke the protocol")
        first = min(head, max(self.position, self._oldest(head)))
        last = min(head, first + max(1, _CHUNK // self.dtype.itemsize))
        copied = self._copy(first, last)
        whole = min(last, max(first, self._whole_from()))
        begin = min(last, max(first, self._oldest(self._glance(HEAD_AT)))) if self._with_taken else whole
        sight = Sight(begin, copied[begin - first :], max(0, whole - begin), begin - self.position)
        self.position = last
        return sight

    @property
    def is_over(self) -> bool:
        """True if the name and both sides are gone, so that no element will come any more."""
        return not os.fstat(self._region.fd).st_nlink and "alive" not in lives_of(self._region)

    def _whole_from(self) -> int:
        """Return the first element that is surely whole, of those that were copied before this call."""
        return self._glance(BEGIN_AT) - self.capacity if self._overwrites else self._glance(TAIL_AT)

    def _oldest(self, head: int) -> int:
        """Return the first element that is worth copying."""
        is_in_ring = head - self.capacity
        return is_in_ring if self._with_taken and not self._overwrites else max(is_in_ring, self._whole_from())

    def _copy(self, first: int, last: int) -> NDArray[Any]:
        slot, n = first % self.capacity, last - first
        straight = min(n, self.capacity - slot)
        copied = np.empty(n, self.dtype)
        copied[:straight], copied[straight:] = self._ring[slot : slot + straight], self._ring[: n - straight]
        return copied

    def _glance(self, at: int) -> int:
        counter: int = lib.fmq_glance(self._region.base + at)
        return counter

    def close(self) -> None:
        """Close the descriptor."""
        self._region.close()
