"""Metrics and health of a served device over HTTP: /metrics for Prometheus, /healthz for supervisors.

By default only this machine can connect. The answers hold numbers, no names and no data.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, MetricsHandler

from driver.errors import DeviceFailed
from driver.service.metrics import MetricsCollector

if TYPE_CHECKING:
    from driver.service.health import HealthMonitor

_AT_ONCE = 8  # concurrent requests; further ones are closed
_PATIENCE = 5.0  # seconds that a client may take to send its request
_BACKLOG = 16


def listen(address: str) -> socket.socket:
    """Listens at "HOST:PORT", at ":PORT" for this machine alone, or at the path of a socket. Raises DeviceFailed."""
    try:
        if "/" in address:
            return _at_path(Path(address))
        if not (match := re.fullmatch(r"(?:\[(.+)\]|([^:\[\]]*)):(\d{1,5})", address)) or int(match[3]) > 65535:
            raise DeviceFailed(f"--metrics {address}: give HOST:PORT, such as 127.0.0.1:9464, or the path of a socket")
        host, port = match[1] or match[2] or "127.0.0.1", int(match[3])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise DeviceFailed(
            f"--metrics {address}: cannot listen there ({error.strerror}); use another address"
        ) from error


def _at_path(path: Path) -> socket.socket:
    """Replaces a socket at which no process listens any more."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(str(path))
        except OSError:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if not path.is_socket() or probe.connect_ex(str(path)) == 0:
                    raise
            path.unlink()
            listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def where(listener: socket.socket) -> str:
    """The address as a user would type it."""
    if listener.family == socket.AF_UNIX:
        return str(listener.getsockname())
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def expose(monitor: HealthMonitor, fd: int) -> None:
    """Serves metrics in threads of this process until it ends. Owns `fd`, a listening socket."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(monitor))
    handler = type("Handler", (_Handler,), {"registry": registry, "monitor": monitor})
    server = _Server(socket.socket(fileno=fd), handler)
    os.register_at_fork(after_in_child=server.socket.close)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


class _Handler(MetricsHandler):
    monitor: HealthMonitor
    timeout = _PATIENCE
    server_version, sys_version = "Burst", ""

    def do_GET(self) -> None:  # noqa: N802 (http.server looks for that name)
        match self.path.partition("?")[0]:
            case "/metrics":
                super().do_GET()
            case "/healthz":
                trouble = self.monitor.trouble()
                self._answer(503 if trouble else 200, trouble or "ok")
            case _:
                self._answer(404, "try /metrics or /healthz")

    def _answer(self, status: int, words: str) -> None:
        body = f"{words}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: Any) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._free = threading.Semaphore(_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect before their answer."""
