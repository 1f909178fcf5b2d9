"""The protocol over HTTP, served by aiohttp in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

from driver.gateways.http_server import BoundedServer, serve_http
from driver.gateways.oip.http_front import HttpAnswer, HttpFront
from driver.service.http_connections import ConnectionLimiter

if TYPE_CHECKING:
    from driver.gateways.oip.grpc_door import Credentials, DoorLimits
    from driver.gateways.oip.service import InferenceService

_SLOWEST = 1 << 20  # bytes a second of a body or an answer, after the patience for its beginning


class HttpDoor:
    """An HTTP server on one listening socket. Requests run in threads, as many at once as the limits say."""

    def __init__(
        self,
        service: InferenceService,
        listener: socket.socket,
        limits: DoorLimits,
        credentials: Credentials | None = None,
    ) -> None:
        """Raise OSError if the files of TLS cannot be read."""
        self.port: int = 0 if listener.family == socket.AF_UNIX else listener.getsockname()[1]
        self._listener, self._limits = listener, limits
        self._front = HttpFront(service, limits.message)
        self._tls: ssl.SSLContext | None = None
        if credentials:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(credentials.certificate, credentials.key)
        self._threads = ThreadPoolExecutor(limits.requests, thread_name_prefix="burst-oip-http")
        self._running = 0
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="burst-oip-http", daemon=True)

    def begin(self) -> None:
        """Serve clients from now on; those that connected before wait in the socket."""
        self._thread.start()
        self._has_begun.wait()

    async def _serve(self) -> None:
        limits = self._limits
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[float] = self._loop.create_future()
        limiter = ConnectionLimiter(limits.connections, limits.connections)
        self._server = BoundedServer(self._handled, limiter, limits.patience)
        self._has_begun.set()
        await serve_http(self._server, self._listener, self._end, self._tls)

    def close(self, grace: float) -> None:
        """Take no more requests, and give those that run so many seconds."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set_result, grace)
            self._thread.join()
        self._listener.close()
        self._threads.shutdown()

    async def _handled(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, and wait until the client has taken the answer."""
        self._server.begin(request)
        if self._running >= self._limits.requests:
            answer = HttpAnswer.of({"error": f"{self._limits.requests} requests run; send this one again later"}, 429)
            return await self._sent(request, answer, ends=True)
        self._running += 1
        try:
            answer, ends = await self._answer(request)
            return await self._sent(request, answer, ends=ends)
        finally:
            self._running -= 1

    async def _answer(self, request: web.BaseRequest) -> tuple[HttpAnswer, bool]:
        """Return the answer, and whether the connection ends with it: after a body that was not read to its end."""
        most, length = self._limits.message, request.content_length or 0
        if length > most:
            return HttpAnswer.of({"error": f"a body of {length} bytes; at most {most} are taken"}, 413), True
        if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer has not begun
        try:
            async with asyncio.timeout(self._limits.patience + most / _SLOWEST):
                body = await _body(request, most)
        except TimeoutError:
            return HttpAnswer.of({"error": "the body did not come in time"}, 408), True
        except web.RequestPayloadError:
            return HttpAnswer.of({"error": "the body is damaged"}, 400), True
        if body is None:
            return HttpAnswer.of({"error": f"the body has more than {most} bytes"}, 413), True
        fields = {name.lower(): value for name, value in request.headers.items()}
        path = request.raw_path.partition("?")[0]
        answering = asyncio.get_running_loop().run_in_executor(
            self._threads, self._front.answer, request.method, path, fields, body
        )
        return await answering, False

    async def _sent(self, request: web.BaseRequest, answer: HttpAnswer, *, ends: bool) -> web.StreamResponse:
        body = answer.body[0] if len(answer.body) == 1 else b"".join(answer.body)
        response = web.Response(status=answer.status, headers=[*answer.fields, ("Server", "Burst")], body=body)
        if ends:
            response.force_close()
        self._server.allow(request, len(body) / _SLOWEST)
        await response.prepare(request)
        await response.write_eof()
        self._server.allow(request, is_idle=True)
        return response


async def _body(request: web.BaseRequest, most: int) -> bytes | None:
    """Return the body; None if it has more than `most` bytes."""
    parts, nbytes = [], 0
    while part := await request.content.readany():
        parts.append(part)
        nbytes += len(part)
        if nbytes > most:
            return None
    return parts[0] if len(parts) == 1 else b"".join(parts)
