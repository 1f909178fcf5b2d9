"""The memory of one client by slot: one table, whatever sockets and ways name it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from burst import InvalidArgument, Malformed, Memory, StatusError
from burst.channel import close_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_MOST_SLOTS = 2**16


class LaneMemory:
    """A table of what sockets have registered. Each socket frees its own slots; the last one ends a mapping.

    So a client may free a slot on a socket while a request that names it is on its way on another one.
    """

    def __init__(self, memory_from: Callable[[Any, int], Memory]) -> None:
        """Begin with no memory. `memory_from`: maps what the client hands over."""
        self._memory_from = memory_from
        self._found: dict[int, Memory | StatusError] = {}
        self._users: Counter[int] = Counter()
        self._lock = threading.Lock()

    def register(self, slot: int, plain: list[Any], fd: int) -> None:
        """Let requests name this memory by `slot`. What another socket has registered there stays. Owns `fd`.

        An error is raised by each request that names the slot. Raise Malformed for too many slots.
        """
        if isinstance(self._found.get(slot), Memory):
            close_all([fd])
            self._use(slot, None)
        else:
            self._use(slot, self._mapped(plain, fd))

    def note_failure(self, slot: int, error: StatusError) -> None:
        """Have requests that name this slot raise the error, unless another socket has registered memory for it."""
        self._use(slot, error)

    def _use(self, slot: int, found: Memory | StatusError | None) -> None:
        with self._lock:
            if len(self._found) >= _MOST_SLOTS:
                raise Malformed(f"a client has at most {_MOST_SLOTS} slots")
            self._users[slot] += 1
            if found is not None and not isinstance(self._found.get(slot), Memory):
                self._found[slot] = found

    def release(self, slots: Iterable[int]) -> list[int]:
        """Free slots of one socket, each once for each time that it has registered it; return those that are gone."""
        gone = []
        with self._lock:
            for slot in slots:
                self._users[slot] -= 1
                if self._users[slot] <= 0:
                    del self._users[slot]
                    self._found.pop(slot, None)
                    gone.append(slot)
        return gone

    def holds(self, slots: Iterable[int]) -> bool:
        """Return True if memory is registered as each of these."""
        return all(isinstance(self._found.get(slot), Memory) for slot in slots)

    def resolve(self, slots: Sequence[int], _: object = None) -> list[Memory]:
        """Return the memory of each slot. Raise InvalidArgument, and what mapping it has raised."""
        return [self._memory(slot) for slot in slots]

    def _memory(self, slot: int) -> Memory:
        match self._found.get(slot):
            case Memory() as memory:
                return memory
            case None:
                raise InvalidArgument(f"no memory is registered as {slot}")
            case error:
                raise type(error)(f"the memory registered as {slot} cannot be used: {error}")

    def free(self, slots: Iterable[int]) -> None:
        """Do nothing: `release` has let them go."""

    def clear(self) -> None:
        """Free all."""
        with self._lock:
            self._found.clear()
            self._users.clear()

    def _mapped(self, plain: list[Any], fd: int) -> Memory | StatusError:
        """Return the memory, or the error that its users will get."""
        try:
            return self._memory_from(plain, fd)
        except StatusError as error:
            return type(error)(str(error))  # a fresh one, without its traceback
