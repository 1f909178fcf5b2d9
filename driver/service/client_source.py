"""The sources of a service's clients: its own listening socket, or the broker that accepts them for it."""

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

_PATIENCE = 2.0  # seconds to wait for the lock at the end


class AcceptedClient(NamedTuple):
    """A connection to a client, newly accepted."""

    channel: Channel
    is_watcher: bool = False  #: it only reads figures, and no limit counts it


class ClientSource(Protocol):
    """A source of clients for one service."""

    on_renew: Callable[[], object]  #: called where the source has the service renew its engine

    def fileno(self) -> int:
        """Return a descriptor: readable when `accept` has something to do, negative once no client comes any more."""

    def accept(self) -> AcceptedClient | None:
        """Return the next client, or None after another message. Raise OSError; PeerDied when the service must end."""

    def turn_away(self, error: OSError, close: Callable[[socket.socket], object]) -> None:
        """Tell the next client why `accept` failed, and `close` its socket, if there is one for which nothing is left.

        Waits for nothing.
        """

    def left(self) -> None:
        """Note that a client has left. Safe from any thread."""

    def retire(self, finish: Callable[[], object]) -> bool:
        """Return True if the service, which has no clients, ends now, as none is on its way. Calls `finish` before."""

    def ending(self) -> AbstractContextManager[None]:
        """Accept no further client; no other service begins until the context ends."""

    def begin_beside(self) -> bool:
        """Let a second service begin beside this one. Return True if the next client finds it, False if a client has to
        start it.
        """

    def stay(self) -> None:
        """Note that this service goes on, with the new clients, too, unless there is a second one for these."""

    def hand_over(self) -> bool:
        """Take no more clients, as a second service does. Return True if `accept` has nothing to do any more."""

    def cells(self, first: int) -> tuple[list[object], list[int]]:
        """Return how many cells there are, and a page of `CellRow` from number `first` on with a connection to each."""

    def close(self) -> None:
        """Close the source's descriptors in this process: the engine, which has inherited them, calls it."""


class ListeningSocket:
    """The `ClientSource` of a device with one service: the socket on which it listens."""

    def __init__(self, listener: socket.socket, place: Place) -> None:
        self._listener, self._place, self._last = listener, place, LastDescriptor()
        self.on_renew: Callable[[], object] = list

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> AcceptedClient:
        return AcceptedClient(Channel(self._listener.accept()[0]))

    def turn_away(self, error: OSError, close: Callable[[socket.socket], object]) -> None:
        self._last.turn_away(self._listener, error, close)

    def left(self) -> None:
        """Do nothing: the service counts its clients itself."""

    def retire(self, finish: Callable[[], object]) -> bool:
        """Take the lock that a client takes before it starts a service: it finds this one or starts another."""
        if self.fileno() < 0:  # another one has taken over
            finish()
            return True
        with self._place.locked_to_leave(0) as alone:
            if not alone or select.select([self._listener], [], [], 0)[0]:
                return False
            self._place.leave(self._listener)
            finish()
            return True

    @contextmanager
    def ending(self) -> Iterator[None]:
        with self._place.locked_to_leave(_PATIENCE) as is_locked:
            self._place.leave(self._listener, is_locked=is_locked)
            yield

    def begin_beside(self) -> bool:
        return False

    def stay(self) -> None:
        """Do nothing: the name is this service's until another one has taken it."""

    def hand_over(self) -> bool:
        with self.ending():
            pass
        return True

    def cells(self, first: int) -> tuple[list[object], list[int]]:
        """Return no cells: one service has all accounts."""
        del first
        return [0], []

    def close(self) -> None:
        self._listener.close()
