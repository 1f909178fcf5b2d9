"""An HTTP server whose connections are bounded in number, by account and in time, on aiohttp.

aiohttp has no limit of connections, and none for a client that leaves an answer unread. A connection here has a
deadline at each moment but while its handler runs, so handlers bound their own waits for the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http import HttpProcessingError

from driver.service.http_connections import account_of

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable

    from driver.service.http_connections import ConnectionLimiter, HttpConnection

_LOG = logging.getLogger("burst.http")
_GRACE = 0.1  # seconds for requests that run when `serve_http` is cancelled


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for a client that has sent what is not HTTP, of which it could fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_LOG.addFilter(_is_ours)


class BoundedServer(web.Server):
    """An aiohttp server that counts its connections and ends those that are overdue. Make it in the event loop."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limiter: ConnectionLimiter,
        patience: float,
    ) -> None:
        """`patience`: seconds from the beginning of a connection, or from an answer, to the next request's header."""
        super().__init__(
            handler, access_log=None, logger=_LOG, auto_decompress=False, keepalive_timeout=patience, lingering_time=1.0
        )
        self._limiter, self._patience = limiter, patience
        self._of: dict[web.RequestHandler, HttpConnection] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        connection = self._limiter.enter(account_of(transport.get_extra_info("socket")), transport.abort)
        if connection is None:
            transport.abort()
            return
        self._of[handler] = connection
        connection.deadline = time.monotonic() + self._patience

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        if connection := self._of.pop(handler, None):
            self._limiter.leave(connection)

    def begin(self, request: web.BaseRequest) -> None:
        """Keep the connection until `allow` sets its next deadline. Raise ConnectionError if it has ended."""
        if (connection := self._of.get(request.protocol)) is None:
            raise ConnectionResetError("the client has gone")
        connection.has_asked, connection.deadline = True, None

    def allow(self, request: web.BaseRequest, seconds: float = 0.0, *, is_idle: bool = False) -> None:
        """End the connection after the patience and so many seconds. `is_idle`: a newcomer may take its place."""
        if connection := self._of.get(request.protocol):
            connection.deadline = time.monotonic() + self._patience + seconds
            connection.has_asked = not is_idle

    async def end_overdue(self) -> None:
        """End overdue connections until cancelled."""
        while True:
            await asyncio.sleep(self._patience / 4)
            self._limiter.end_overdue()


async def serve_http(
    server: BoundedServer, listener: socket.socket, end: asyncio.Future[float], tls: ssl.SSLContext | None = None
) -> None:
    """Serve until `end` is done: its result is the seconds that running requests get. Close the listening socket."""
    listening = await asyncio.get_running_loop().create_server(server, sock=listener, ssl=tls)
    watching, grace = asyncio.create_task(server.end_overdue()), _GRACE
    try:
        grace = await end
    finally:
        listening.close()
        watching.cancel()
        server.pre_shutdown()
        with suppress(asyncio.CancelledError):
            await server.shutdown(grace)
