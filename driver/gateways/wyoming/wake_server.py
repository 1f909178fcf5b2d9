"""`burst serve DEVICE --wyoming ADDRESS --wake-word FILE`, until SIGTERM or SIGINT.

The process is a client of the device, as any other. It is one event loop: a satellite costs it a connection and 20 KB.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple, Self

from driver.errors import DeviceFailed
from driver.gateways.door_address import DoorAddress
from driver.gateways.metrics_page import MetricsPage
from driver.gateways.wyoming.satellite import YIELDS_AFTER, SatelliteHandler, TriggerOptions, refuse
from driver.gateways.wyoming.satellite_figures import SatelliteFigures, metrics_collector
from driver.gateways.wyoming.wake_models import WakeModels, read_models
from driver.service.http_connections import account_of
from driver.service.peer_limiter import PeerLimiter, of_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LOG = logging.getLogger(__name__)
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class WakeOptions(NamedTuple):
    """The options of `burst serve --wyoming`. features: folder of the two models that all words share."""

    features: Path | None = None
    trigger: TriggerOptions = TriggerOptions()
    satellites: int = 64
    metrics: str | None = None
    zeroconf: bool = False

    def checked(self) -> WakeOptions:
        """Return the options. Raise DeviceFailed naming what is wrong."""
        trigger = self.trigger
        if not 0 <= trigger.threshold <= 1:
            raise DeviceFailed(f"--threshold {trigger.threshold}: a number from 0 to 1")
        if not 1 <= trigger.trigger_level <= 1000:
            raise DeviceFailed(f"--trigger-level {trigger.trigger_level}: an integer from 1 to 1000")
        if not 0 <= trigger.refractory <= 3600:
            raise DeviceFailed(f"--refractory-seconds {trigger.refractory}: a number from 0 to 3600")
        if not 1 <= self.satellites <= 1024:
            raise DeviceFailed(f"--satellites {self.satellites}: an integer from 1 to 1024")
        return self


def wyoming_address(text: str) -> DoorAddress:
    """Parse an address. Raise DeviceFailed."""
    said = f"--wyoming {text}"
    if text.startswith("unix://"):
        return DoorAddress.of_path(said, text.removeprefix("unix://"), os.getuid())
    door = DoorAddress.of_tcp(said, text.removeprefix("tcp://")) if text.startswith("tcp://") else None
    if not door:
        raise DeviceFailed(
            f"{said}: give tcp://HOST:PORT, tcp://:PORT for this machine alone, or unix:///PATH for this account alone"
        )
    return door


class WakeServer:
    """Wake words at one address, in one event loop: `async with` it."""

    def __init__(self, device: str, words: Sequence[Path], address: str, options: WakeOptions = WakeOptions()) -> None:  # noqa: B008 (it is immutable)
        """Read and check the models, and bind the address. Raise DeviceFailed."""
        self._options = options.checked()
        self.figures = SatelliteFigures()
        wanted = wyoming_address(address)
        if options.zeroconf and not wanted.is_open:
            raise DeviceFailed(f"{wanted.said}: --zeroconf tells other machines; give tcp://0.0.0.0:10400")
        files = read_models(words, options.features)
        self._limiter = PeerLimiter.of_one(self._options.satellites)
        self.models = WakeModels(files, device, of_all(self._options.satellites))
        self._listener = wanted.listen()
        self.address = wanted if wanted.path else wanted._replace(port=self._listener.getsockname()[1])
        self.metrics = MetricsPage(options.metrics)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    @property
    def uri(self) -> str:
        """The address where satellites connect, as Wyoming's programs write it."""
        return f"unix://{self.address.path}" if self.address.path else f"tcp://{self.address.place}"

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.address.remove)
            stack.callback(self._listener.close)
            await stack.enter_async_context(self.models)
            self.metrics.begin(lambda: metrics_collector(self.figures, self.models.stats), lambda: self.models.trouble)
            stack.push_async_callback(self._hang_up)
            server = await asyncio.start_server(self._connected, sock=self._listener)
            stack.callback(server.close)
            if self._options.zeroconf:
                from driver.gateways.wyoming.announcement import Announcement

                await stack.enter_async_context(Announcement(self.address))
            self._stack = stack.pop_all()
        if self.address.is_open:
            _LOG.warning(
                "%s: every machine that reaches this address may use the wake words; Wyoming has no password",
                self.address.said,
            )
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self._stack.aclose()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        visit = self._limiter.enter(account_of(writer.get_extra_info("socket")), task.cancel)
        if visit is None:
            self.figures.refused += 1
            await refuse(
                writer, f"{self._options.satellites} satellites are connected, which is all that --satellites allows"
            )
            return
        visit.wait(math.inf, yields_in=YIELDS_AFTER)
        self._keep_alive(writer)
        handler = SatelliteHandler(reader, writer, self.models, self._options.trigger, figures=self.figures)
        visit.asks = handler.was_heard
        self._tasks.add(task)
        try:
            with suppress(asyncio.CancelledError):  # by _hang_up or a newcomer, and asyncio's callback would log it
                await handler.run()
        finally:
            self._tasks.discard(task)
            self._limiter.leave(visit)

    @staticmethod
    def _keep_alive(writer: asyncio.StreamWriter) -> None:
        """Let the kernel ask whether a satellite is still there: one that loses its power says nothing."""
        its = writer.get_extra_info("socket")
        with suppress(OSError):
            its.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                its.setsockopt(socket.IPPROTO_TCP, option, value)

    async def _hang_up(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


__all__ = ["WakeOptions", "WakeServer", "wyoming_address"]
