"""The HTTP server of gateways, and clients that connect and then say nothing, or half of what they should.

Most of them stop before TLS has begun, where aiohttp knows nothing of a connection yet.
"""

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager, closing

import pytest
from aiohttp import web
from certificates import write_certificate
from waiting import PATIENCE

from driver.gateways.http_server import BoundedServer, serve_http
from driver.service.peer_limiter import PeerLimiter

MOST = 6  # connections
FOREVER, SOON = 1e6, 0.2  # seconds that a silent connection may stay
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # a handshake begins: these are of a record of 512 bytes
HEADER = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def answered(request):
    return web.Response(text=request.path)


@pytest.fixture(scope="module", params=["plain", "tls"])
def contexts(request, tmp_path_factory):
    """The server's and the client's ends of TLS; None and None without."""
    if request.param == "plain":
        return None, None
    cert, key = write_certificate(tmp_path_factory.mktemp("tls"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    return server, ssl.create_default_context(cafile=str(cert))


@asynccontextmanager
async def serving(tls, patience):
    """The address of a server with few places."""
    listener, end = socket.create_server(("127.0.0.1", 0)), asyncio.get_running_loop().create_future()
    server = BoundedServer(answered, PeerLimiter(MOST, MOST), patience)
    task = asyncio.create_task(serve_http(server, listener, end, tls))
    try:
        yield listener.getsockname()
    finally:
        end.set_result(0.0)
        await task


async def connected(address, first=b""):
    """A client that sends so much and no more."""
    sock = socket.socket()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, address)
    await loop.sock_sendall(sock, first)
    return sock


async def ended(sock):
    """The server ends the connection."""
    try:
        while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 4096), PATIENCE):
            pass
    except ConnectionError:
        pass


def stays(sock):
    """Whether the server keeps the connection, as far as this client knows."""
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


async def asked(address, context):
    """What a client that does as it should is told."""
    name = "localhost" if context else None
    reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=name)
    writer.write(b"GET /path HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    return answer


@pytest.fixture(params=[0, 1, 8], ids="{} bytes".format)
def first(request, contexts):
    """The first bytes of what a client should send."""
    return (HELLO if contexts[0] else HEADER)[: request.param]


class TestUnfinished:
    def test_a_newcomer_takes_the_place_of_the_oldest(self, contexts, first):
        """There are never more than so many, and a client that makes its request is served beside them."""

        async def main():
            tls, context = contexts
            async with serving(tls, FOREVER) as address:
                socks = [await connected(address, first) for _ in range(3 * MOST)]
                for sock in socks[:-MOST]:
                    await ended(sock)
                assert all(stays(sock) for sock in socks[-MOST:])
                assert (await asked(address, context)).endswith(b"/path")
                await ended(socks[-MOST])
                assert all(stays(sock) for sock in socks[1 - MOST :])
                for sock in socks:
                    sock.close()

        asyncio.run(main())

    def test_its_time(self, contexts, first):
        """Each is ended after the patience, also where there is room."""

        async def main():
            async with serving(contexts[0], SOON) as address:
                with closing(await connected(address, first)) as sock:
                    await ended(sock)

        asyncio.run(main())

    def test_the_end_of_the_server(self, contexts, first):
        """A server that ends waits for none of them."""

        async def main():
            async with serving(contexts[0], FOREVER) as address:
                sock = await connected(address, first)
                assert await asked(address, contexts[1])  # accepted after the one before
            await ended(sock)
            sock.close()

        asyncio.run(main())


def test_places_come_back(contexts):
    """Clients that go away in the midst of the beginning leave their places."""

    async def main():
        tls, context = contexts
        async with serving(tls, FOREVER) as address:
            for _ in range(3 * MOST):
                (await connected(address, HELLO if tls else HEADER)).close()
            for _ in range(3 * MOST):
                assert (await asked(address, context)).endswith(b"/path")

    asyncio.run(main())
