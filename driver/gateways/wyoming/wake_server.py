"""`burst serve DEVICE --wyoming ADDRESS --wake-word FILE`, until SIGTERM or SIGINT.

The process is a client of the device, as any other. It is one event loop: a satellite costs it a connection and 20 KB.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple, Self

from driver.errors import DeviceFailed
from driver.gateways.wyoming.satellite import SatelliteHandler, TriggerOptions, refuse
from driver.gateways.wyoming.satellite_figures import SatelliteFigures, metrics_collector
from driver.gateways.wyoming.wake_models import WakeModels, read_models

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_LOG = logging.getLogger(__name__)
_TCP = re.compile(r"tcp://(?:\[(.+)\]|([^:\[\]/]*)):(\d{1,5})/?")
_LOOPBACK = "127.0.0.1"
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class WakeOptions(NamedTuple):
    """What `burst serve --wyoming` may be told. features: folder of the two models that all words share."""

    features: Path | None = None
    trigger: TriggerOptions = TriggerOptions()
    satellites: int = 64
    metrics: str | None = None

    def checked(self) -> WakeOptions:
        """Raises DeviceFailed naming what is wrong."""
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


class WyomingAddress(NamedTuple):
    """A TCP address as `--wyoming` takes it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_open(self) -> bool:
        """Whether other machines may reach it."""
        return self.host not in {_LOOPBACK, "::1", "localhost"}

    def listen(self) -> socket.socket:
        """A listening socket. Raises DeviceFailed."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=64)
        except OSError as error:
            raise DeviceFailed(f"--wyoming {self}: cannot listen there ({error.strerror or error})") from error


def wyoming_address(text: str) -> WyomingAddress:
    """What an address says. Raises DeviceFailed."""
    match = _TCP.fullmatch(text)
    if not match or int(match[3]) > 65535:
        raise DeviceFailed(f"--wyoming {text}: give tcp://HOST:PORT, or tcp://:PORT for this machine alone")
    return WyomingAddress(match[1] or match[2] or _LOOPBACK, int(match[3]))


class WakeServer:
    """Wake words at one address, in one event loop: `async with` it."""

    def __init__(self, device: str, words: Sequence[Path], address: str, options: WakeOptions = WakeOptions()) -> None:  # noqa: B008 (it is immutable)
        """Reads and checks the models, and binds the address. Raises DeviceFailed."""
        self._options = options.checked()
        self.figures = SatelliteFigures()
        wanted = wyoming_address(address)
        files = read_models(words, options.features)
        self.models = WakeModels(files, device, self._options.satellites)
        self._listener = wanted.listen()
        self.address = wanted._replace(port=self._listener.getsockname()[1])
        self._metrics = _metrics_listener(options.metrics) if options.metrics is not None else None
        self.metrics = _where(self._metrics) if self._metrics else None  #: address of the metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._listener.close)
            await stack.enter_async_context(self.models)
            if self._metrics:
                self._expose(self._metrics)
            stack.push_async_callback(self._hang_up)
            server = await asyncio.start_server(self._connected, sock=self._listener)
            stack.callback(server.close)
            self._stack = stack.pop_all()
        if self.address.is_open:
            _LOG.warning(
                "--wyoming %s: every machine that reaches this address may use the wake words; Wyoming has no password",
                self.address,
            )
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self._stack.aclose()

    def _expose(self, listener: socket.socket) -> None:
        from driver.service.metrics_server import serve_metrics

        serve_metrics(
            metrics_collector(self.figures, self.models.stats), lambda: self.models.trouble, listener.detach()
        )

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.figures.connected >= self._options.satellites:
            self.figures.refused += 1
            await refuse(
                writer, f"{self._options.satellites} satellites are connected, which is all that --satellites allows"
            )
            return
        self._keep_alive(writer)
        handler = SatelliteHandler(reader, writer, self.models, self._options.trigger, self.figures)
        self.figures.connected += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await handler.run()
        finally:
            self.figures.connected -= 1
            self._tasks.discard(task)

    @staticmethod
    def _keep_alive(writer: asyncio.StreamWriter) -> None:
        """A satellite that loses its power says nothing: the kernel asks whether it is still there."""
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


def serve_wake_words(
    device: str, words: Sequence[Path], address: str, options: WakeOptions, tell: Callable[[WakeServer], object]
) -> None:
    """Serves until SIGTERM or SIGINT. `tell`: called when satellites may connect. Raises DeviceFailed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    server = WakeServer(device, words, address, options)

    async def main() -> None:
        end, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end.set)
        async with server:
            tell(server)
            await end.wait()

    asyncio.run(main())


def _metrics_listener(address: str) -> socket.socket:
    try:
        from driver.service import metrics_server
    except ModuleNotFoundError:
        raise DeviceFailed("--metrics needs prometheus_client: pip install 'burst-engine[metrics]'") from None
    return metrics_server.listen(address)


def _where(listener: socket.socket) -> str:
    from driver.service import metrics_server

    return metrics_server.where(listener)


__all__ = ["WakeOptions", "WakeServer", "serve_wake_words", "wyoming_address"]
