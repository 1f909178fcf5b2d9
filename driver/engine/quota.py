"""The bytes of one client, and memory within them."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from burst import ResourceExhaustedPersistent
from driver.engine.ledger import Claim
from driver.engine.limits import RELEASE, no_room

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from driver.engine.ledger import Holder

_ALIGNMENT = 64
_LARGE = 2**18


class MemorySource(Protocol):
    """A source of memory for a buffer."""

    def room(self, nbytes: int) -> NDArray[np.uint8]:
        """Return new memory. Raise ResourceExhaustedTransient, ResourceExhaustedPersistent."""


class Quota:
    """A limit on the bytes of one client and, through its holder, of its application, its account and all clients."""

    def __init__(self, nbytes: int, holder: Holder | None = None) -> None:
        """Begin at zero. `holder`: for whom things are taken. None: only the client's bytes are counted."""
        self._free, self._limit, self.holder = nbytes, nbytes, holder
        self._holds: Counter[Hashable] = Counter()
        self._held = 0
        self._lock = threading.RLock()  # a finalizer may give back while this thread holds it

    def room(self, nbytes: int) -> NDArray[np.uint8]:
        """Return new memory, given back when the last array on it is gone. Raise ResourceExhausted*."""
        claim = self.charge(nbytes, mappings=1) if nbytes >= _LARGE else self.charge(nbytes)
        try:
            block = _block(nbytes)
        except (MemoryError, OSError):
            claim.give_back()
            raise ResourceExhaustedPersistent(f"the machine has no memory for {nbytes} bytes") from None
        weakref.finalize(block, claim.give_back).atexit = False
        start = -block.ctypes.data % _ALIGNMENT
        return block[start : start + nbytes]

    def charge(self, nbytes: int, **figures: int) -> Claim:
        """Charge memory that is `taken`, and what else it costs. Raise ResourceExhausted*."""
        return self._charged(RELEASE, nbytes, False, figures)

    def take(self, remedy: str, **figures: int) -> Claim:
        """Charge what the engine is about to make for the client, as `Holder` does; the bytes are `held`."""
        return self._charged(remedy, figures.get("bytes", 0), True, figures)

    def hold(self, key: Hashable, nbytes: int) -> Claim:
        """Charge memory that is there already, once however often it is held. Raise ResourceExhausted*."""
        with self._lock:
            if not self._holds[key]:
                self._use(nbytes, True)
            self._holds[key] += 1
        try:
            claim = self.holder.hold(RELEASE, key, nbytes) if self.holder else None
        except BaseException:
            self._let_go(key, nbytes, None)
            raise
        return Claim(partial(self._let_go, key, nbytes, claim))

    @property
    def held(self) -> int:
        """The bytes of models, and of what the engine keeps for the client."""
        return self._held

    @property
    def taken(self) -> int:
        """The bytes of buffers, plans and temporaries in use."""
        return self._limit - self._free - self._held

    def _charged(self, remedy: str, nbytes: int, is_held: bool, figures: dict[str, int]) -> Claim:
        holder = self.holder
        if nbytes:
            figures["bytes"] = nbytes
            with self._lock:
                self._use(nbytes, is_held)
        try:
            if holder:
                holder.account.ledger.count(holder, remedy, figures)
        except BaseException:
            self._unuse(nbytes, is_held)
            raise
        if holder and not nbytes:
            return Claim(partial(holder.account.ledger.uncount, holder, figures))
        return Claim(partial(self._give_back, nbytes, is_held, holder, figures))

    def _use(self, nbytes: int, is_held: bool) -> None:
        if nbytes > self._free:
            raise no_room(nbytes, self._free, self._limit)
        self._free -= nbytes
        self._held += nbytes * is_held

    def _unuse(self, nbytes: int, is_held: bool) -> None:
        with self._lock:
            self._free += nbytes
            self._held -= nbytes * is_held

    def _give_back(self, nbytes: int, is_held: bool, holder: Holder | None, figures: dict[str, int]) -> None:
        if nbytes:
            self._unuse(nbytes, is_held)
        if holder:
            holder.account.ledger.uncount(holder, figures)

    def _let_go(self, key: Hashable, nbytes: int, claim: Claim | None) -> None:
        with self._lock:
            self._holds[key] -= 1
            if not self._holds[key]:
                del self._holds[key]
                self._unuse(nbytes, True)
        if claim:
            claim.give_back()


def _block(nbytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory with room to align it. Large blocks have pages of their own, which go back at once."""
    if nbytes >= _LARGE:
        pages: Any = mmap.mmap(-1, nbytes)
        return np.frombuffer(pages, np.uint8)
    return np.zeros(nbytes + _ALIGNMENT, np.uint8)
