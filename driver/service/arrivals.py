"""Where the clients of a service come from: its own listening socket, or the broker that accepts them for it."""

from __future__ import annotations

import select
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from burst.channel import Channel
from driver.service.last_descriptor import LastDescriptor

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from driver.client.discovery import Place

_GREETING = 0.1  # seconds for the hello of a client that is turned away
_PATIENCE = 2.0  # seconds to wait for the lock at the end


class Arrival(NamedTuple):
    """A connection that has come."""

    channel: Channel
    is_watcher: bool = False  #: it only looks at figures, and is outside of the limits


class ClientArrivals(Protocol):
    """Where the clients of one service come from."""

    def fileno(self) -> int:
        """Readable when `accept` has something to do; negative once no client comes any more."""

    def accept(self) -> Arrival | None:
        """The next client; None: another message came. Raises OSError; PeerDied when the service has to end."""

    def left(self) -> None:
        """A client has left. Any thread."""

    def retire(self, finish: Callable[[], object]) -> bool:
        """Whether the service, which has no clients, ends now: none is on its way to it. Calls `finish` before."""

    def ending(self) -> AbstractContextManager[None]:
        """No further client comes, and within no other service begins."""

    def cells(self, first: int) -> tuple[list[object], list[int]]:
        """The number of all cells and a page of `CellRow`, from number `first` on; a connection to each of these."""

    def close(self) -> None:
        """Closes the descriptors of this process: of the engine, when it has been forked."""


class ListeningSocket:
    """The socket of a device, on which its only service listens."""

    def __init__(self, listener: socket.socket, place: Place) -> None:
        self._listener, self._place, self._last = listener, place, LastDescriptor()

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> Arrival:
        try:
            return Arrival(Channel(self._listener.accept()[0]))
        except OSError as error:
            self._last.turn_away(self._listener, error, _GREETING)
            raise

    def left(self) -> None:
        """Does nothing: the service counts its clients itself."""

    def retire(self, finish: Callable[[], object]) -> bool:
        """A client takes the same lock before it starts a service, so it either finds this one or starts another."""
        if self.fileno() < 0:  # another one has taken over
            finish()
            return True
        with self._place.locked(0) as alone:
            if not alone or select.select([self._listener], [], [], 0)[0]:
                return False
            self._place.leave(self._listener)
            finish()
            return True

    @contextmanager
    def ending(self) -> Iterator[None]:
        with self._place.locked(_PATIENCE) as is_locked:
            self._place.leave(self._listener, is_locked=is_locked)
            yield

    def cells(self, first: int) -> tuple[list[object], list[int]]:
        """None: one service has all accounts."""
        del first
        return [0], []

    def close(self) -> None:
        self._listener.close()
