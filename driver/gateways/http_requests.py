"""HTTP requests whose number, memory and time are bounded for each machine or account, on `BoundedServer`.

A request is answered once it has come whole. What a gateway says to it, and in which form it refuses, is its own.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol

from aiohttp import HttpVersion11, web

from driver.gateways.http_answer import HttpAnswer
from driver.gateways.http_server import BoundedServer, serve_http
from driver.gateways.refusal import Refusal
from driver.gateways.request_memory import SMALL, MemoryClaim
from driver.service.http_connections import MISADDRESSED, account_of, is_misaddressed
from driver.service.peer_limiter import PeerLimiter

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Mapping

    from driver.gateways.request_memory import RequestMemory
    from driver.service.peer_limiter import PeerVisit

_LOG = logging.getLogger("burst.http")


class HttpLimits(Protocol):
    """The limits of one machine or account. All together may have half as much again.

    message: bytes of a body. requests, connections: at once. patience: seconds until a request that has begun is
    complete, and for an answer to be read. slowest: to these is added the time of so many bytes a second.
    """

    @property
    def message(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def connections(self) -> int: ...
    @property
    def patience(self) -> float: ...
    @property
    def slowest(self) -> int: ...


class WholeRequest(NamedTuple):
    """A request that has come. path: as it came, quoted. fields: of its header, their names in small letters.

    claim: the memory of the body, to which what it becomes is to be added.
    """

    method: str
    path: str
    fields: Mapping[str, str]
    body: bytes
    claim: MemoryClaim


class BoundedRequests:
    """The requests at one listening socket. Of one event loop."""

    def __init__(
        self,
        answer: Callable[[WholeRequest], Awaitable[HttpAnswer]],
        refuse: Callable[[int, str], HttpAnswer],
        limits: HttpLimits,
        memory: RequestMemory,
        advice: str = "send less at once",
        *,
        cancels: bool = False,
    ) -> None:
        """`refuse`: makes an answer of a status and a text. `advice`: for clients whose body did not come in time.
        `cancels`: `answer` is cancelled when its client goes away.
        """
        self._answer, self._refuse, self._limits, self._memory = answer, refuse, limits, memory
        self._advice, self._cancels = advice, cancels
        self._requests = PeerLimiter.of_one(limits.requests)

    async def serve(
        self, listener: socket.socket, end: asyncio.Future[float], tls: ssl.SSLContext | None = None
    ) -> None:
        """Serve until `end` is done: its result is the seconds that running requests get. Close the socket."""
        connections = PeerLimiter.of_one(self._limits.connections)
        self._server = BoundedServer(self._handled, connections, self._limits.patience, cancels=self._cancels)
        await serve_http(self._server, listener, end, tls)

    async def _handled(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, and wait until the client has taken the answer."""
        self._server.begin(request)
        if (transport := request.transport) is None:
            raise ConnectionResetError("the client has gone")
        visit = self._requests.enter(account_of(transport.get_extra_info("socket")), transport.abort)
        if visit is None:
            answer = self._refuse(429, f"{self._limits.requests} requests run; send this one again later")
            return await self._sent(request, answer, ends=True)
        visit.wait(self._limits.patience, yields_in=self._limits.patience / 10)
        try:
            answer, ends = await self._answered(request, visit)
            return await self._sent(request, answer, ends=ends)
        finally:
            self._requests.leave(visit)

    async def _answered(self, request: web.BaseRequest, visit: PeerVisit) -> tuple[HttpAnswer, bool]:
        """Return the answer, and whether the connection ends with it: after a body that was not read to its end."""
        connection = request.transport and request.transport.get_extra_info("socket")
        if connection and is_misaddressed(request.headers.get("Host"), connection):
            return self._refuse(403, MISADDRESSED), True
        most, length = self._limits.message, request.content_length or 0
        if length > most:
            return self._refuse(413, f"a body of {length} bytes; at most {most} are taken"), True
        if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer has not begun
        with MemoryClaim(self._memory, visit.account) as claim:
            body = await self._body(request, claim)
            if isinstance(body, HttpAnswer):
                return body, True
            visit.work()
            fields = {name.lower(): value for name, value in request.headers.items()}
            path = request.raw_path.partition("?")[0]
            return await self._answer(WholeRequest(request.method, path, fields, body, claim=claim)), False

    async def _body(self, request: web.BaseRequest, claim: MemoryClaim) -> bytes | HttpAnswer:
        """Return the body, or the answer to one that does not come, or is too large."""
        most, limits, begin = self._limits.message, self._limits, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limits.patience) as limit:

                def note(nbytes: int) -> None:
                    limit.reschedule(begin + limits.patience + nbytes / limits.slowest)

                body = await _read(request, most, claim, note)
        except TimeoutError:
            told = f"the body did not come within {limits.patience:g} s and 1 s for each {limits.slowest} bytes"
            _LOG.warning("a request has ended: %s", told)
            return self._refuse(408, f"{told}: {self._advice}")
        except web.RequestPayloadError:
            return self._refuse(400, "the body is damaged")
        except Refusal as refusal:
            return self._refuse(refusal.code.http, refusal.text)
        return self._refuse(413, f"the body has more than {most} bytes") if body is None else body

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
