"""The protocol over HTTP, served by aiohttp in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

from driver.gateways.http_server import BoundedServer, serve_http
from driver.gateways.oip.http_front import HttpAnswer, HttpFront
from driver.gateways.oip.refusal import Refusal
from driver.gateways.oip.request_memory import SMALL, MemoryClaim
from driver.service.http_connections import MISADDRESSED, account_of, is_misaddressed
from driver.service.peer_limiter import PeerLimiter, of_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.gateways.oip.grpc_door import Credentials, DoorLimits
    from driver.gateways.oip.service import InferenceService
    from driver.service.peer_limiter import PeerVisit

_LOG = logging.getLogger("burst.oip")


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
        self._threads = ThreadPoolExecutor(of_all(limits.requests), thread_name_prefix="burst-oip-http")
        self._requests = PeerLimiter.of_one(limits.requests)
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
        self._server = BoundedServer(self._handled, PeerLimiter.of_one(limits.connections), limits.patience)
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
        if (transport := request.transport) is None:
            raise ConnectionResetError("the client has gone")
        visit = self._requests.enter(account_of(transport.get_extra_info("socket")), transport.abort)
        if visit is None:
            answer = HttpAnswer.of({"error": f"{self._limits.requests} requests run; send this one again later"}, 429)
            return await self._sent(request, answer, ends=True)
        visit.wait(self._limits.patience, yields_in=self._limits.patience / 10)
        try:
            answer, ends = await self._answer(request, visit)
            return await self._sent(request, answer, ends=ends)
        finally:
            self._requests.leave(visit)

    async def _answer(self, request: web.BaseRequest, visit: PeerVisit) -> tuple[HttpAnswer, bool]:
        """Return the answer, and whether the connection ends with it: after a body that was not read to its end."""
        connection = request.transport and request.transport.get_extra_info("socket")
        if connection and is_misaddressed(request.headers.get("Host"), connection):
            return HttpAnswer.of({"error": MISADDRESSED}, 403), True
        most, length = self._limits.message, request.content_length or 0
        if length > most:
            return HttpAnswer.of({"error": f"a body of {length} bytes; at most {most} are taken"}, 413), True
        if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer has not begun
        with MemoryClaim(self._front.memory, visit.account) as claim:
            body = await self._body(request, claim)
            if isinstance(body, HttpAnswer):
                return body, True
            visit.work()
            fields = {name.lower(): value for name, value in request.headers.items()}
            path = request.raw_path.partition("?")[0]
            answer = partial(self._front.answer, request.method, path, fields, body, claim=claim)
            return await asyncio.get_running_loop().run_in_executor(self._threads, answer), False

    async def _body(self, request: web.BaseRequest, claim: MemoryClaim) -> bytes | HttpAnswer:
        """Return the body, or the answer to one that does not come, or is too large."""
        most, limits, begin = self._limits.message, self._limits, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limits.patience) as limit:
                body = await _read(request, most, claim, lambda n: limit.reschedule(begin + limits.time_of(n)))
        except TimeoutError:
            told = f"the body did not come within {limits.patience:g} s and 1 s for each {limits.slowest} bytes"
            _LOG.warning("a request has ended: %s", told)
            return HttpAnswer.of({"error": f"{told}: send tensors as binary data, or in shared memory"}, 408)
        except web.RequestPayloadError:
            return HttpAnswer.of({"error": "the body is damaged"}, 400)
        except Refusal as refusal:
            return HttpAnswer.of({"error": refusal.text}, refusal.code.http)
        return HttpAnswer.of({"error": f"the body has more than {most} bytes"}, 413) if body is None else body

    async def _sent(self, request: web.BaseRequest, answer: HttpAnswer, *, ends: bool) -> web.StreamResponse:
        body = answer.body[0] if len(answer.body) == 1 else b"".join(answer.body)
        response = web.Response(status=answer.status, headers=[*answer.fields, ("Server", "Burst")], body=body)
        if ends:
            response.force_close()
        self._server.allow(request, len(body) / self._limits.slowest)
        await response.prepare(request)
        await response.write_eof()
        self._server.allow(request, is_idle=True)
        return response


async def _read(request: web.BaseRequest, most: int, claim: MemoryClaim, note: Callable[[int], object]) -> bytes | None:
    """Return the body; None if it has more than `most` bytes. Raise Refusal if there is no room for it. `note` is told
    how many bytes have come.
    """
    parts, nbytes, claimed = [], 0, SMALL
    while part := await request.content.readany():
        parts.append(part)
        nbytes += len(part)
        if nbytes > most:
            return None
        note(nbytes)
        if nbytes > claimed:
            claim.add(2 * (nbytes - claimed))  # for its parts, and for the whole
            claimed = nbytes
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    claim.give_back(claimed - SMALL)  # of the parts
    return body
