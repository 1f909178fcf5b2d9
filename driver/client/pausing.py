"""The pause of a client whose device is renewed by a restart, as two engines cannot have it.

Requests wait, and none fails: all that are in flight end first, then the device is told so. When all of its clients
have said that, it ends, and the first of them starts it again. If one of them has not within some seconds, all go on as
before. `driver.protocol.renewal` has the protocol.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from burst import BurstError, PeerDied
from driver.client.moving import BurstBeside, ask, await_buffers, await_change, await_done, is_drained, say_stays
from driver.errors import DeviceFailed, DriverError

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.client.connection import Connection
    from driver.client.device import RemoteDevice
    from driver.client.pipeline import Pipeline
    from driver.client.remote_executor import Home, RemoteExecutor

_log = logging.getLogger(__name__)
WITHIN = 10.0
"""Seconds in which all that is in flight, of all clients, has to end."""

_LOOK = 1e-3  # seconds


class _Nowhere:
    """In the place of a connection: models are at home nowhere, and whoever needs one waits."""

    def drop(self, *_: object) -> None:
        """Do nothing: the engine ends."""


class Pause:
    """One pause, over one connection of a device."""

    def __init__(self, device: RemoteDevice, old: Connection) -> None:
        self.device, self.old = device, old
        self._homes: dict[RemoteExecutor, Home] = {}
        self._pipelines: list[Pipeline] = []

    def run(self) -> bool:
        """Make it; return True if the device was restarted. Otherwise all goes on as before."""
        with ExitStack() as held:
            try:
                self._begin(held)
                self._await_end()
            except Exception as error:  # noqa: BLE001 (whatever it is, all goes on as before)
                self._go_on(error)
                return False
            self.resume()
        for pipeline in self._pipelines:
            pipeline.call_back()
        return True

    def _begin(self, held: ExitStack) -> None:
        """Let what is in flight end, and nothing begin until `held` is closed. Raise DeviceFailed, PeerDied."""
        await_buffers(self.old)
        end = time.monotonic() + WITHIN
        for executor in [each for each in list(self.device.executors) if each.home.connection is self.old]:
            held.enter_context(executor.preparing)
            self._homes[executor] = executor.home
            executor.home = executor.home._replace(connection=_Nowhere())  # type: ignore[arg-type]
            self._pipelines += [each for each in list(executor.pipelines) if each.session.is_at(self.old)]
        for pipeline in self._pipelines:
            held.enter_context(pipeline.in_flight.submitting)
            self._await(partial(is_drained, pipeline), end)
        self._await(self.old.lane.retire, end)

    def _await(self, is_done: Callable[[], bool], end: float) -> None:
        await_done(is_done, end, lambda: f"requests were in flight for {WITHIN:g} s", pause=_LOOK)

    def _await_end(self) -> None:
        """Tell the device, and wait until it has ended. Raise DeviceFailed if it goes on."""
        end = time.monotonic() + WITHIN
        with suppress(PeerDied):
            ask(self.old, "drained")
            while time.monotonic() < end:
                state = await_change(self.old, end - time.monotonic())
                if state.stage == "stayed":
                    raise DeviceFailed(state.words)
            raise DeviceFailed(f"another client had requests in flight for {WITHIN:g} s")

    def _go_on(self, error: Exception) -> None:
        _log.warning("device %r: its engine stays: %s", self.device.name, error)
        self.old.lane.resume()
        for executor, home in self._homes.items():
            executor.home = home
        say_stays(self.old, error)

    def resume(self) -> None:
        """Start the device again, and prepare all models there. What cannot be is as after the device's death."""
        for executor, home in self._homes.items():
            executor.home = home
        try:
            self.device.revive(self.old)
            for executor in self._homes:
                executor.home = executor.prepared_on(self.device.connection)
                for pipeline in [each for each in self._pipelines if each.session.prepared is executor]:
                    beside = BurstBeside(pipeline.session.opened_at(executor.home), [])
                    pipeline.in_flight.when_idle(partial(pipeline.session.move, executor.home, beside))
        except (BurstError, DriverError, OSError, ValueError) as error:
            _log.warning("device %r: it was not restarted: %s", self.device.address, error)
