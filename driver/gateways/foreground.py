"""A gateway as a command: it serves in the foreground until SIGTERM or SIGINT, with a page of metrics if asked for."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, TypeVar

from driver.errors import DeviceFailed

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from prometheus_client.registry import Collector

_ENDS = (signal.SIGTERM, signal.SIGINT)
_Server = TypeVar("_Server")


def serve_in_foreground(server: AbstractAsyncContextManager[_Server], tell: Callable[[_Server], object]) -> None:
    """Enters the server, and leaves it on SIGTERM or SIGINT. `tell`: called when clients may connect."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    async def main() -> None:
        end, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in _ENDS:
            loop.add_signal_handler(number, end.set)
        async with server as serving:
            tell(serving)
            await end.wait()

    asyncio.run(main())


class MetricsPage:
    """/metrics and /healthz of a gateway at the address of --metrics: bound at once, answered from `begin` on."""

    def __init__(self, address: str | None) -> None:
        """None: there is no such page. Raises DeviceFailed."""
        self.where: str | None = None  #: the address as a user would type it
        self._listener: socket.socket | None = None
        if address is not None:
            try:
                from driver.service.metrics_server import listen, where
            except ModuleNotFoundError:
                raise DeviceFailed("--metrics needs prometheus_client: pip install 'burst-engine[metrics]'") from None
            self._listener = listen(address)
            self.where = where(self._listener)

    def begin(self, collector: Callable[[], Collector], trouble: Callable[[], str]) -> None:
        """`collector` makes it, where there is a page. `trouble`: why /healthz is to be 503, empty if it is not."""
        if self._listener:
            from driver.service.metrics_server import serve_metrics

            serve_metrics(collector(), trouble, self._listener.detach())
            self._listener = None

    def close(self) -> None:
        """Frees the address of a page that was not begun; others end with the process."""
        if self._listener:
            self._listener.close()
