"""Slots: the numbers by which requests name their memory.

The client gives each pool a slot when it first uses it (SlotTable, on csrc/burst/slots.c). The device learns the memory
behind a slot that it does not know, maps it once, and keeps the mapping until the slot is freed (MappingCache). A
slot's number is never used again, so a late message about a freed slot can only miss, never hit other memory.

The client's side refers to memory weakly: a pool that the application drops is freed on the device, too.
"""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Any
from weakref import ref

from burst._core import ffi, lib
from burst.channel import pack
from burst.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from burst.dropped import DropList
    from burst.memory import Memory
    from burst.messages import Request


def identity_of(request: Request, *more: object) -> tuple[Any, ...]:
    """Return a key that stands for this request as long as its pools live, and does not keep them alive.

    What is kept under the key must keep the request's `inputs` and `outputs`, whose ids are part of it.
    """
    return id(request.inputs), id(request.outputs), request.loop_timeout, *more, *map(ref, request.pools)


class _PoolReference(ref["Memory"]):
    """A weak reference that knows the memory's slot."""

    __slots__ = ("slot",)
    slot: int


def why() -> str:
    """Return why the last call of this thread into C failed."""
    return str(ffi.string(lib.burst_why()).decode(errors="replace"))


class SlotTable:
    """The client's side: which slot stands for which memory. Any thread."""

    def __init__(self, dropped: DropList[int]) -> None:
        """Make an empty table. `dropped` gets the slots of memory that is dropped or freed."""
        self._dropped, self._lock = dropped, threading.Lock()
        self.handle = ffi.gc(lib.burst_slots_new(), lib.burst_slots_free)  #: of the C core
        self._slots: dict[ref[Memory], int] = {}
        self._memories: dict[int, _PoolReference] = {}

    def slot_of(self, memory: Memory) -> int:
        """Return the memory's slot, a new one at first sight. Raise OverflowError after 2**31 of them."""
        slot = self._slots.get(ref(memory))
        return self._add(memory) if slot is None else slot

    def _add(self, memory: Memory) -> int:
        dropped = self._dropped
        fd, description = (-1, b"") if memory.is_closed else (memory.fd, pack(memory.to_wire()))
        with self._lock:
            name = _PoolReference(memory, lambda name: dropped.add(name.slot))  # does not refer to this table
            if (known := self._slots.get(name)) is not None:
                return known  # another thread was faster
            slot: int = lib.burst_slots_use(self.handle, ffi.NULL, fd, description, len(description))
            if slot == -errno.EOVERFLOW:
                raise OverflowError(why())
            if slot < 0:
                raise OSError(-slot, why())
            name.slot = slot
            self._slots[name], self._memories[slot] = slot, name
            return slot

    def free_memory(self, memory: Memory) -> None:
        """Have the device free its slot. Unknown memory is no error."""
        slot = self._slots.get(ref(memory))
        if slot is not None:
            self.forget([slot])
            self._dropped.tell_now(slot)

    def forget(self, slots: Iterable[int]) -> None:
        """Forget these slots: they stand for nothing any more."""
        with self._lock:
            for slot in slots:
                if name := self._memories.pop(slot, None):
                    self._slots.pop(name, None)
                    lib.burst_slots_drop(self.handle, slot)


def checked_slots(slots: Sequence[object]) -> list[int]:
    """Return the slots that a client frees. Raise Malformed."""
    numbers = [slot for slot in slots if type(slot) is int]
    if len(numbers) < len(slots):
        raise Malformed(f"free_memory{tuple(slots)!r:.80}: slots are integers")
    return numbers


class MappingCache:
    """The device's side: mapped memory by slot."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}

    def resolve(self, slots: Sequence[int], fetch: Callable[[list[int]], list[Memory]]) -> list[Memory]:
        """Return the memory of each slot. Asks `fetch` once for all that are unknown; nothing is kept when
        that fails.
        """
        known = self._memories
        if missing := sorted({slot for slot in slots if slot not in known}):
            known.update(dict(zip(missing, fetch(missing), strict=True)))
        return [known[slot] for slot in slots]

    def free(self, slots: Iterable[int]) -> None:
        """Let the mappings go; arrays on them keep them until they go too. An unknown slot is no error."""
        for slot in slots:
            self._memories.pop(slot, None)

    def clear(self) -> None:
        """Free all."""
        self._memories.clear()
