"""The protocol over HTTP: an ASGI application, served by uvicorn in a thread.

uvicorn, because it is the ASGI server with the fewest dependencies (h11, which parses strictly, and click), takes a
socket that is bound already, and its connections are objects that a limit can be put on. It has no limit of its own for
a client that sends half a header or leaves an answer unread; `BoundedProtocol` has.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from driver.gateways.oip.http_front import HttpAnswer, HttpFront

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from driver.gateways.oip.grpc_door import Credentials, DoorLimits
    from driver.gateways.oip.service import InferenceService

_SLOWEST = 1 << 20  # bytes a second of a body, after the patience for its beginning


class HttpApplication:
    """An ASGI application. Requests run in threads, as many at once as the limits say."""

    def __init__(self, front: HttpFront, limits: DoorLimits) -> None:
        self._front, self._limits = front, limits
        self._threads = ThreadPoolExecutor(limits.requests, thread_name_prefix="burst-oip-http")
        self._running = 0

    async def __call__(
        self, scope: Mapping[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            return
        if self._running >= self._limits.requests:
            answer = HttpAnswer.of({"error": f"{self._limits.requests} requests run; send this one again later"}, 429)
            await _send(send, answer, ends=True)
            return
        self._running += 1
        try:
            answer, ends = await self._answer(scope, receive)
            await _send(send, answer, ends=ends)
        finally:
            self._running -= 1

    async def _answer(self, scope: Mapping[str, Any], receive: Callable[[], Awaitable[Any]]) -> tuple[HttpAnswer, bool]:
        """And whether the connection ends with it: of a body that was not read to its end."""
        fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        most, length = self._limits.message, fields.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            return HttpAnswer.of({"error": f"a body of {length} bytes; at most {most} are taken"}, 413), True
        try:
            async with asyncio.timeout(self._limits.patience + most / _SLOWEST):
                body = await _body(receive, most)
        except TimeoutError:
            return HttpAnswer.of({"error": "the body did not come in time"}, 408), True
        if body is None:
            return HttpAnswer.of({"error": f"the body has more than {most} bytes"}, 413), True
        path = scope["raw_path"].decode("latin-1")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._front.answer, scope["method"], path, fields, body), False

    def close(self) -> None:
        """Waits for the requests that run."""
        self._threads.shutdown()


async def _body(receive: Callable[[], Awaitable[Any]], most: int) -> bytes | None:
    """None: it has more than `most` bytes. Raises TimeoutError when the client has gone."""
    parts, nbytes = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise TimeoutError
        parts.append(message.get("body", b""))
        nbytes += len(parts[-1])
        if nbytes > most:
            return None
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _send(send: Callable[[Any], Awaitable[None]], answer: HttpAnswer, *, ends: bool) -> None:
    body = answer.body[0] if len(answer.body) == 1 else b"".join(answer.body)
    fields = [*answer.fields, ("content-length", str(len(body))), *([("connection", "close")] if ends else [])]
    headers = [(name.encode(), value.encode()) for name, value in fields]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _protocol(limits: DoorLimits) -> type[asyncio.Protocol]:
    class BoundedProtocol(H11Protocol):
        """One of a bounded number of connections, and none in which nothing moves."""

        def connection_made(self, transport: Any) -> None:
            if len(self.connections) >= limits.connections:
                transport.abort()
                return
            super().connection_made(transport)
            self._seen: object = None
            self._watch()

        def _watch(self) -> None:
            self._timer = self.loop.call_later(limits.patience / 2, self._look)

        def _look(self) -> None:
            """Twice the same, and no request that runs: the client neither sends a request nor reads an answer."""
            unread = self.transport.get_write_buffer_size()
            runs = self.cycle is not None and not self.cycle.response_complete and not unread
            seen = (self.cycle, unread)
            if not runs and seen == self._seen:
                self.transport.abort()
                return
            self._seen = None if runs else seen
            self._watch()

        def data_received(self, data: bytes) -> None:
            if not self.transport or self.transport.is_closing():
                return
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.transport:
                self._timer.cancel()
                super().connection_lost(exc)

    return BoundedProtocol


class HttpDoor:
    """An HTTP server on one listening socket."""

    def __init__(
        self,
        service: InferenceService,
        listener: socket.socket,
        limits: DoorLimits,
        credentials: Credentials | None = None,
    ) -> None:
        self._listener = listener
        self.port: int = 0 if listener.family == socket.AF_UNIX else listener.getsockname()[1]
        self._application = HttpApplication(HttpFront(service, limits.message), limits)
        config = uvicorn.Config(
            self._application,
            loop="asyncio",
            http=_protocol(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=max(1, int(limits.patience)),
            h11_max_incomplete_event_size=16 << 10,
            ssl_certfile=credentials.certificate if credentials else None,
            ssl_keyfile=credentials.key if credentials else None,
        )
        config.load()  # TLS files are read here, so that they are missed before clients come
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="burst-oip-http", daemon=True)

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def begin(self) -> None:
        """Clients are served from now on; those that connect before wait in the socket."""
        self._thread.start()

    def close(self, grace: float) -> None:
        """Takes no more requests, and gives those that run so many seconds."""
        self._server.config.timeout_graceful_shutdown = int(grace)
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._application.close()
