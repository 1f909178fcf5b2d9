"""The page of metrics and health that a gateway has, if `burst serve --metrics` asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst_engine.names import install_command
from driver.errors import DeviceFailed

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from prometheus_client.registry import Collector


class MetricsPage:
    """/metrics and /healthz of a gateway: bound at once, answered from `begin` on."""

    def __init__(self, address: str | None) -> None:
        """`address`: of --metrics; None for no page. Raise DeviceFailed."""
        self.where: str | None = None  #: the address as a user would type it
        self._listener: socket.socket | None = None
        if address is not None:
            try:
                from driver.service.metrics_server import listen, where
            except ModuleNotFoundError:
                raise DeviceFailed(f"--metrics needs prometheus_client: {install_command('metrics')}") from None
            self._listener = listen(address)
            self.where = where(self._listener)

    def begin(self, collector: Callable[[], Collector], trouble: Callable[[], str]) -> None:
        """Answer from now on. `collector` is called if there is a page; `trouble` says why /healthz is 503, or ""."""
        if self._listener:
            from driver.service.metrics_server import serve_metrics

            serve_metrics(collector(), trouble, self._listener.detach())
            self._listener = None

    def close(self) -> None:
        """Free the address of a page that was not begun. A page that was begun ends with the process."""
        if self._listener:
            self._listener.close()
