"""An HTTP server whose connections are bounded in number, by account and in time, on aiohttp.

aiohttp has no limit of connections, and none for a client that leaves an answer unread. A connection here has a
deadline at each moment but while its handler runs, so handlers bound their own waits for the client.

It counts from when it is accepted. asyncio's own server tells nothing of a connection until the handshake of TLS is
done, so this one accepts by itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http import HttpProcessingError

from driver.errors import DeviceFailed
from driver.service.http_connections import account_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from driver.service.peer_limiter import PeerLimiter, PeerVisit

_LOG = logging.getLogger("burst.http")
_GRACE = 0.1  # seconds for requests that run when `serve_http` is cancelled
_PAUSE = 0.1  # seconds after a connection that could not be accepted: the process may have no descriptors left


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for a client that has sent what is not HTTP, of which it could fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_LOG.addFilter(_is_ours)


class BoundedServer(web.Server):
    """An aiohttp server that counts its connections and ends those that are overdue. Make it in the event loop."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limiter: PeerLimiter,
        patience: float,
        *,
        cancels: bool = False,
    ) -> None:
        """`patience`: seconds from the beginning of a connection, or from an answer, to the next request's header.
        `cancels`: the handler of a client that goes away is cancelled.
        """
        super().__init__(
            handler,
            handler_cancellation=cancels,
            access_log=None,
            logger=_LOG,
            auto_decompress=False,
            keepalive_timeout=patience,
            lingering_time=1.0,
        )
        self._limiter, self._patience = limiter, patience
        self._of: dict[web.RequestHandler, PeerVisit] = {}

    async def accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Take connections until cancelled, which ends those whose handshake is not done."""
        listener.setblocking(False)
        loop, beginning = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        try:
            while True:
                await asyncio.sleep(0)  # `sock_accept` lets no other task run while clients are waiting
                try:
                    client, _ = await loop.sock_accept(listener)
                except OSError:
                    await asyncio.sleep(_PAUSE)
                    continue
                task = asyncio.create_task(self._begin_connection(client, tls))
                beginning.add(task)
                task.add_done_callback(beginning.discard)
        finally:
            for task in beginning:
                task.cancel()
            await asyncio.gather(*beginning, return_exceptions=True)

    async def _begin_connection(self, client: socket.socket, tls: ssl.SSLContext | None) -> None:
        def hang_up() -> None:
            with suppress(OSError):  # the client has gone
                client.shutdown(socket.SHUT_RDWR)

        connection = self._limiter.enter(account_of(client), hang_up)
        if connection is None:
            client.close()
            return
        connection.wait(self._patience)
        handler = self()
        self._of[handler] = connection
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: handler, client, ssl=tls)
        except Exception as error:
            self._forget(handler)
            if not isinstance(error, OSError):  # else it has ended before its handshake was done
                raise

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._of[handler].end = transport.abort

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._forget(handler)

    def _forget(self, handler: web.RequestHandler) -> None:
        if connection := self._of.pop(handler, None):
            self._limiter.leave(connection)

    def begin(self, request: web.BaseRequest) -> None:
        """Keep the connection until `allow` sets its next deadline. Raise ConnectionError if it has ended."""
        if (connection := self._of.get(request.protocol)) is None:
            raise ConnectionResetError("the client has gone")
        connection.work()

    def allow(self, request: web.BaseRequest, seconds: float = 0.0, *, is_idle: bool = False) -> None:
        """End the connection after the patience and so many seconds. `is_idle`: a newcomer may take its place."""
        if connection := self._of.get(request.protocol):
            connection.wait(self._patience + seconds, yields_in=0.0 if is_idle else math.inf)

    async def end_overdue(self) -> None:
        """End overdue connections until cancelled."""
        while True:
            await asyncio.sleep(self._patience / 4)
            self._limiter.end_overdue()


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return the terms of a server by these PEM files. Raise DeviceFailed."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        found.load_cert_chain(certificate, key)
    except OSError as error:  # of ssl, too
        raise DeviceFailed(f"TLS: {certificate} and {key} are no certificate and its key in PEM: {error}") from error
    return found


async def serve_http(
    server: BoundedServer, listener: socket.socket, end: asyncio.Future[float], tls: ssl.SSLContext | None = None
) -> None:
    """Serve until `end` is done: its result is the seconds that running requests get. Close the listening socket."""
    accepting, watching = asyncio.create_task(server.accept(listener, tls)), asyncio.create_task(server.end_overdue())
    grace = _GRACE
    try:
        grace = await end
    finally:
        accepting.cancel()
        watching.cancel()
        await asyncio.wait([accepting])
        listener.close()
        server.pre_shutdown()
        with suppress(asyncio.CancelledError):
            await server.shutdown(grace)
