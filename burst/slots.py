"""Slots: the numbers by which the requests of a burst name its memory.

The client gives each pool a slot when it first uses it (SlotTable). The server asks for the memory behind a slot that
it does not know, maps it once, and keeps the mapping until the slot is freed (MappingCache). A slot's number is never
used again, so a late message about a freed slot can only miss, never hit other memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from burst.memory import Memory

MAX_SLOT = 2**31 - 1  # i32 on the wire


class SlotTable:
    """The client's side: which slot stands for which memory. Holds the memory until it is forgotten."""

    def __init__(self) -> None:
        self._slots: dict[Memory, int] = {}
        self._memories: dict[int, Memory] = {}
        self._next = 0

    def slot_of(self, memory: Memory) -> int:
        """The memory's slot, a new one at first sight."""
        slot = self._slots.get(memory)
        if slot is None:
            if self._next > MAX_SLOT:
                raise OverflowError("this burst has used up its 2**31 slots; open another")
            slot = self._next
            self._next += 1
            self._slots[memory], self._memories[slot] = slot, memory
        return slot

    def memories(self, slots: Iterable[int]) -> list[Memory]:
        """All of them. Raises InvalidArgument when one is unknown or was freed."""
        try:
            return [self._memories[slot] for slot in slots]
        except KeyError as error:
            raise InvalidArgument(f"slot {error.args[0]} stands for no memory") from None

    def forget(self, memory: Memory) -> int | None:
        """The slot that stood for it, or None."""
        slot = self._slots.pop(memory, None)
        if slot is not None:
            del self._memories[slot]
        return slot


class MappingCache:
    """The server's side: mapped memory by slot."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}

    def resolve(self, slots: Sequence[int], fetch: Callable[[list[int]], list[Memory]]) -> list[Memory]:
        """The memory of each slot. Asks `fetch` once for all that are unknown; nothing is kept when that fails."""
        known = self._memories
        if missing := sorted({slot for slot in slots if slot not in known}):
            known.update(dict(zip(missing, fetch(missing), strict=True)))
        return [known[slot] for slot in slots]

    def free(self, slot: int) -> None:
        """Lets the mapping go; arrays on it keep it until they go too. An unknown slot is no error."""
        self._memories.pop(slot, None)

    def clear(self) -> None:
        """Frees all."""
        self._memories.clear()
