"""The protocol over HTTP, served by aiohttp in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from driver.gateways.http_answer import HttpAnswer
from driver.gateways.http_requests import BoundedRequests
from driver.gateways.http_server import tls_context
from driver.gateways.loop_thread import LoopThread
from driver.gateways.oip.http_front import HttpFront
from driver.service.peer_limiter import of_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.gateways.http_requests import WholeRequest
    from driver.gateways.oip.grpc_door import Credentials, DoorLimits
    from driver.gateways.oip.service import InferenceService


class HttpDoor:
    """An HTTP server on one listening socket. Requests run in threads, as many at once as the limits say."""

    def __init__(
        self,
        service: InferenceService,
        listener: socket.socket,
        limits: DoorLimits,
        credentials: Credentials | None = None,
    ) -> None:
        """Raise DeviceFailed if the files of TLS cannot be used."""
        self.port: int = 0 if listener.family == socket.AF_UNIX else listener.getsockname()[1]
        self._listener, self._limits = listener, limits
        self._front = HttpFront(service, limits.message)
        self._tls = tls_context(*credentials) if credentials else None
        self._threads = ThreadPoolExecutor(of_all(limits.requests), thread_name_prefix="burst-oip-http")
        self._thread = LoopThread("burst-oip-http", self._serve)

    def begin(self) -> None:
        """Serve clients from now on; those that connected before wait in the socket."""
        self._thread.begin()

    async def _serve(self, begun: Callable[[], object], end: asyncio.Future[float]) -> None:
        advice = "send tensors as binary data, or in shared memory"
        requests = BoundedRequests(self._answer, _refused, self._limits, self._front.memory, advice=advice)
        begun()
        await requests.serve(self._listener, end, self._tls)

    def close(self, grace: float) -> None:
        """Take no more requests, and give those that run so many seconds."""
        self._thread.end(grace)
        self._listener.close()
        self._threads.shutdown()

    async def _answer(self, request: WholeRequest) -> HttpAnswer:
        answer = partial(
            self._front.answer, request.method, request.path, request.fields, request.body, claim=request.claim
        )
        return await asyncio.get_running_loop().run_in_executor(self._threads, answer)


def _refused(status: int, text: str) -> HttpAnswer:
    return HttpAnswer.of({"error": text}, status)
