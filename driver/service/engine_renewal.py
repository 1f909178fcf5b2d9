"""The renewal of an engine, as its service sees it: what clients are told, and when the service may end.

`driver.protocol.renewal` has the protocol.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING

from burst import GeneralFailure, InvalidArgument, ResourceExhaustedTransient
from burst.channel import close_all
from burst.memory_limits import available_bytes
from driver.protocol.renewal import RenewalState
from driver.protocol.rpc import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.service.client_source import ClientSource

_log = logging.getLogger(__name__)
_MOST_WORDS = 1000
_NOT_PAUSED = "it has a client that knows nothing of renewals, as programs in C; end that, or restart the device"


class Renewal:
    """The renewal of one service's engine. Any thread."""

    def __init__(
        self,
        source: ClientSource,
        obstacle: str,
        held: Callable[[], int],
        wake: Callable[[], object],
        restarts: bool = False,
    ) -> None:
        """`obstacle`: why there can be no second engine; "": there can. `restarts`: then a client starts the device
        again. `held`: returns the bytes of the first engine. `wake`: called when the second service has taken over, or
        a client is drained.
        """
        self._source, self._obstacle, self._held, self._wake = source, obstacle, held, wake
        self._restarts = restarts
        self._drained = set[Hashable]()
        self._lock = threading.Lock()
        self._state = RenewalState()
        self._movers = set[Hashable]()  #: clients that go over
        self._fixed = set[Hashable]()  #: clients with models that do not
        self._starter: Hashable = None
        self._has_begun = False  #: the second service accepts clients
        self._pipes: dict[Hashable, int] = {}

    @property
    def state(self) -> RenewalState:
        """The state that clients are told."""
        return self._state

    @property
    def is_succeeded(self) -> bool:
        """True if a second service takes the new clients."""
        return self._has_begun

    def begin(self, why: str) -> None:
        """Ask the clients to move; where none can, new clients go to a second engine all the same. Does nothing while
        they do.

        Raise GeneralFailure where there can be no second engine; ResourceExhaustedTransient, with the figures, where
        there is no memory for two.
        """
        if self._obstacle and self._restarts:
            self._drain(why)
            return
        if self._obstacle:
            raise GeneralFailure(f"it is not renewed: {self._obstacle}")
        with self._lock:
            if self._state.is_going_on:
                return
            held, (free, of) = self._held(), available_bytes()
            if held > free:
                words = f"a second engine needs as much as the first, {held} bytes, and {free} are available ({of})"
                self._change(self._state._replace(stage="stayed", words=words))
                raise ResourceExhaustedTransient(f"it is not renewed: {words}; free memory, or restart the device")
            _log.info("the engine is renewed: %s", why)
            self._starter = None
            self._change(RenewalState(self._state.number + 1, "asked", why[:_MOST_WORDS]))
            if not self._movers and self._source.begin_beside():
                self._succeed()

    def _drain(self, why: str) -> None:
        with self._lock:
            if self._state.is_going_on:
                return
            if self._fixed:
                self._change(self._state._replace(stage="stayed", words=_NOT_PAUSED))
                raise GeneralFailure(f"it is not restarted: {_NOT_PAUSED}")
            _log.info("the device is restarted, once nothing is in flight: %s", why)
            self._drained = set()
            self._change(RenewalState(self._state.number + 1, "draining", why[:_MOST_WORDS]))

    def drained(self, client: Hashable) -> Reply:
        """Note that a client has nothing in flight, and begins nothing. Raise InvalidArgument at other times."""
        with self._lock:
            if self._state.stage != "draining":
                raise InvalidArgument("the device is not restarted now")
            self._drained.add(client)
        self._wake()
        return Reply([])

    def is_drained(self, clients: int) -> bool:
        """Return True if the device is to be restarted now. `clients`: so many are connected."""
        with self._lock:
            return self._state.stage == "draining" and len(self._drained) >= clients

    def tell(self, client: Hashable) -> Reply:
        """Return the state, and a pipe that ends with it."""
        readable, writable = os.pipe2(os.O_CLOEXEC)
        with self._lock:
            self._end_pipe(client)
            self._pipes[client] = writable
            self._movers.add(client)
            self._fixed.discard(client)
            return Reply([*self._state], [readable])

    def note_models(self, client: Hashable) -> None:
        """Note that a client has models here. One that has not asked for the state by then keeps the engine."""
        with self._lock:
            if client not in self._movers:
                self._fixed.add(client)
                if self._state.stage == "draining":
                    self._give_up(client, _NOT_PAUSED)

    @property
    def fixed(self) -> int:
        """The number of clients that keep the engine until they leave."""
        return len(self._fixed)

    def successor(self, client: Hashable, can_start: bool) -> Reply:
        """Return what a client has to do to reach the second service; `can_start`: it can start one. Raise
        InvalidArgument while none is asked for.
        """
        with self._lock:
            if self._state.stage not in ("asked", "moving"):
                raise InvalidArgument("no renewal goes on")
            if self._starter is not None and not self._has_begun:
                return Reply(["wait"])
            if not (self._source.begin_beside() or self._has_begun):
                if not can_start:
                    return Reply(["wait"])
                self._starter = client
                return Reply(["start"])
            self._succeed()
            return Reply(["go"])

    def succeeded(self, client: Hashable) -> Reply:
        """Note that the second service has taken the name. Raise InvalidArgument for others than its starter."""
        with self._lock:
            if client is not self._starter or self._state.stage != "asked":
                raise InvalidArgument("this client has started no second service")
            self._succeed()
        return Reply([])

    def _succeed(self) -> None:
        self._has_begun = True
        if self._state.stage != "moving":
            self._change(self._state._replace(stage="moving"))
        self._wake()

    def stays(self, client: Hashable, why: str) -> Reply:
        """Note that a client cannot move, and why: the first engine goes on for it, and for those that have not."""
        with self._lock:
            if self._state.is_going_on:
                self._give_up(client, why)
        return Reply([])

    def forget(self, client: Hashable) -> None:
        """Note that a client has left."""
        with self._lock:
            self._end_pipe(client)
            for those in (self._drained, self._movers, self._fixed):
                those.discard(client)
            if client is self._starter and self._state.stage == "asked":
                self._give_up(client, "the client that started the second engine has ended")

    def _give_up(self, client: Hashable, why: str) -> None:
        _log.error("the engine is not renewed: %s", why)
        self._source.stay()
        self._change(self._state._replace(stage="stayed", words=why[:_MOST_WORDS]))

    def _change(self, state: RenewalState) -> None:
        self._state = state
        pipes, self._pipes = self._pipes, {}
        close_all(list(pipes.values()))

    def _end_pipe(self, client: Hashable) -> None:
        if (fd := self._pipes.pop(client, None)) is not None:
            os.close(fd)
