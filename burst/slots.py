"""Slots: the numbers by which requests name their memory.

The client gives each pool a slot when it first uses it (SlotTable). The device learns the memory behind a slot that it
does not know, maps it once, and keeps the mapping until the slot is freed (MappingCache). A slot's number is never
used again, so a late message about a freed slot can only miss, never hit other memory.

The client's side refers to memory weakly: a pool that the application drops is freed on the device, too.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import ref

from burst.errors import InvalidArgument, Malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from burst.dropped import DropList
    from burst.memory import Memory
    from burst.messages import Request

MAX_SLOT = 2**31 - 1  # i32 on the wire


def identity_of(request: Request, *more: object) -> tuple[Any, ...]:
    """A key that stands for this request as long as its pools live, and does not keep them alive.

    What is kept under the key must keep the request's `inputs` and `outputs`, whose ids are part of it.
    """
    return id(request.inputs), id(request.outputs), request.loop_timeout, *more, *map(ref, request.pools)


class _PoolReference(ref["Memory"]):
    """A weak reference that knows the memory's slot."""

    __slots__ = ("slot",)
    slot: int


class SlotTable:
    """The client's side: which slot stands for which memory. Any thread."""

    def __init__(self, dropped: DropList[int]) -> None:
        """`dropped` gets the slots of memory that is dropped or freed."""
        self._dropped, self._lock = dropped, threading.Lock()
        self._slots: dict[ref[Memory], int] = {}
        self._memories: dict[int, _PoolReference] = {}
        self._next = 0

    def slot_of(self, memory: Memory) -> int:
        """The memory's slot, a new one at first sight."""
        slot = self._slots.get(ref(memory))
        return self._add(memory) if slot is None else slot

    def _add(self, memory: Memory) -> int:
        dropped = self._dropped
        with self._lock:
            name = _PoolReference(memory, lambda name: dropped.add(name.slot))  # does not refer to this table
            if (known := self._slots.get(name)) is not None:
                return known  # another thread was faster
            if self._next > MAX_SLOT:
                raise OverflowError("2**31 slots are used up; open another burst or connection")
            name.slot = slot = self._next
            self._next += 1
            self._slots[name], self._memories[slot] = slot, name
            return slot

    def memories(self, slots: Iterable[int]) -> list[Memory]:
        """All of them. Raises InvalidArgument when one is unknown or was freed."""
        found = []
        for slot in slots:
            name = self._memories.get(slot)
            memory = name() if name else None
            if memory is None:
                raise InvalidArgument(f"slot {slot!r:.20} stands for no memory")
            found.append(memory)
        return found

    def free_memory(self, memory: Memory) -> None:
        """The device is told to free its slot. Unknown memory is no error."""
        slot = self._slots.get(ref(memory))
        if slot is not None:
            self.forget([slot])
            self._dropped.tell_now(slot)

    def forget(self, slots: Iterable[int]) -> None:
        """These slots stand for nothing any more."""
        with self._lock:
            for slot in slots:
                if name := self._memories.pop(slot, None):
                    self._slots.pop(name, None)


def checked_slots(slots: Sequence[object]) -> list[int]:
    """Slots that a client frees. Raises Malformed."""
    numbers = [slot for slot in slots if type(slot) is int]
    if len(numbers) < len(slots):
        raise Malformed(f"free_memory{tuple(slots)!r:.80}: slots are integers")
    return numbers


class MappingCache:
    """The device's side: mapped memory by slot."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}

    def resolve(self, slots: Sequence[int], fetch: Callable[[list[int]], list[Memory]]) -> list[Memory]:
        """The memory of each slot. Asks `fetch` once for all that are unknown; nothing is kept when that fails."""
        known = self._memories
        if missing := sorted({slot for slot in slots if slot not in known}):
            known.update(dict(zip(missing, fetch(missing), strict=True)))
        return [known[slot] for slot in slots]

    def free(self, slots: Iterable[int]) -> None:
        """Lets the mappings go; arrays on them keep them until they go too. An unknown slot is no error."""
        for slot in slots:
            self._memories.pop(slot, None)

    def clear(self) -> None:
        """Frees all."""
        self._memories.clear()
