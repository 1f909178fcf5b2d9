"""The memory of one client by slot: one table, whatever sockets and ways name it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from burst import InvalidArgument, Malformed, Memory, StatusError
from burst.channel import close_all
from driver.engine.ledger import Claim, price

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_MOST_SLOTS = 2**16


class LaneMemory:
    """A table of what sockets have registered. Each socket frees its own slots; the last one ends a mapping.

    So a client may free a slot on a socket while a request that names it is on its way on another one.
    """

    def __init__(self, memory_from: Callable[[Any, int], Memory], take: Callable[..., Claim]) -> None:
        """Begin with no memory. `memory_from`: maps what the client hands over. `take`: charges what is kept for it."""
        self._memory_from, self._take = memory_from, take
        self._found: dict[int, Memory | StatusError] = {}
        self._users: dict[int, list[Claim]] = {}  # one for each socket that has registered the slot
        self._refusal: StatusError | None = None  # of the last slot for which there was nothing left
        self._lock = threading.Lock()

    def register(self, slot: int, plain: list[Any], fd: int) -> bool:
        """Let requests name this memory by `slot`. What another socket has registered there stays. Owns `fd`.

        An error is raised by each request that names the slot. False if there is nothing to release then. Raise
        Malformed for too many slots.
        """
        fds = [fd]
        try:
            if (has_memory := self._counted(slot)) is None:
                return False
            if has_memory:
                return True
            try:
                self._keep(slot, self._mapped(plain, fds.pop()))
            except BaseException:
                self.release([slot])
                raise
            return True
        finally:
            close_all(fds)

    def note_failure(self, slot: int, error: StatusError) -> bool:
        """Have requests that name this slot raise the error, unless another socket has registered memory for it.

        False as for `register`.
        """
        is_counted = self._counted(slot) is not None
        if is_counted:
            self._keep(slot, error)
        return is_counted

    def _counted(self, slot: int) -> bool | None:
        """Count one more user of the slot, and return whether it has memory, in one step. None: it was refused."""
        try:
            claim = self._take("free memory", **price("slot"))
        except StatusError as error:
            self._refusal = type(error)(str(error))
            return None
        with self._lock:
            if slot not in self._users and len(self._users) >= _MOST_SLOTS:
                raise Malformed(f"a client has at most {_MOST_SLOTS} slots")
            self._users.setdefault(slot, []).append(claim)
            return isinstance(self._found.get(slot), Memory)

    def _keep(self, slot: int, found: Memory | StatusError) -> None:
        """Keep what a user that is counted has found, unless another one has found memory meanwhile."""
        with self._lock:
            if slot in self._users and not isinstance(self._found.get(slot), Memory):
                self._found[slot] = found

    def release(self, slots: Iterable[int]) -> list[int]:
        """Free slots of one socket, each once for each time that it has registered it; return those that are gone."""
        gone, claims = [], list[Claim]()
        with self._lock:
            for slot in slots:
                users = self._users[slot]
                claims.append(users.pop())
                if not users:
                    del self._users[slot]
                    self._found.pop(slot, None)
                    gone.append(slot)
        for claim in claims:
            claim.give_back()
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
            case None if self._refusal:  # the slot may be the one, or an earlier one: its client sends it again
                error = self._refusal
            case None:
                raise InvalidArgument(f"no memory is registered as {slot}")
            case found:
                error = found
        raise type(error)(str(error))  # a new one: each keeps the frames through which it went

    def free(self, slots: Iterable[int]) -> None:
        """Do nothing: `release` has let them go."""

    def clear(self) -> None:
        """Free all."""
        with self._lock:
            self._found.clear()
            self._users.clear()  # with its claims

    def _mapped(self, plain: list[Any], fd: int) -> Memory | StatusError:
        """Return the memory, or the error that its users will get."""
        try:
            return self._memory_from(plain, fd)
        except StatusError as error:
            return type(error)(str(error))  # a fresh one, without its traceback
