"""Serves the live page on loopback until Ctrl-C, and only to browsers with its secret address: it may show a camera."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import signal
import socket
import tempfile
import webbrowser
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from driver.demos.recordings import private
from driver.demos.web.board import Board, Viewer
from driver.demos.web.settings import Values
from driver.demos.web.stream import ShowThread
from driver.gateways.http_server import BoundedServer, serve_http
from driver.service.http_connections import MOST, PATIENCE
from driver.service.peer_limiter import PeerLimiter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from driver.demos.web.stream import Show


HOST = "127.0.0.1"
MOST_VIEWERS = 8
LONGEST_MESSAGE = 4096  # bytes, from a page
HEARTBEAT = 20.0  # seconds after which a page that is silent is asked whether it lives
_METHODS = "GET", "HEAD"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Server:
    """One show, its pages, and who may see them."""

    def __init__(self, show: Show, port: int) -> None:
        """Raise OSError when the port is taken."""
        self._socket = socket.create_server((HOST, port))
        self._port = self._socket.getsockname()[1]
        self._token = secrets.token_urlsafe(32)
        self._show, self._values, self._board = show, Values(show.settings), Board()
        self.url = f"http://{HOST}:{self._port}/{self._token}/"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Board]:
        """Play the show and serve its pages while entered."""
        loop = asyncio.get_running_loop()

        def from_thread(function: Callable[..., None], *arguments: Any, **words: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: function(*arguments, **words))

        board = self._board
        board.say(values=self._values.plain(), status="starting", place=None, deaths=0, notice="", recording=None)
        self._stream = ShowThread(
            self._show,
            self._values,
            lambda update: from_thread(board.post, update),
            lambda **facts: from_thread(board.say, **facts),
        )
        self._http = BoundedServer(self._answer, PeerLimiter(MOST, 2 * MOST_VIEWERS), PATIENCE)
        serving = asyncio.create_task(serve_http(self._http, self._socket, loop.create_future()))
        try:
            self._stream.start()
            yield board
        finally:
            await asyncio.to_thread(self._stream.stop)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. The connection's deadline goes on: it has one request, and a stream ends it."""
        try:
            self._guard(request)
            name = request.path.removeprefix(f"/{self._token}/")
            if name == "stream":
                return await self._talk(request)
            response = _page(name)
        except web.HTTPException as refusal:
            self._harden(refusal)
            raise
        self._harden(response)
        return response

    # ---- who may see it

    def _guard(self, request: web.BaseRequest) -> None:
        """Refuse names that others' pages could come by, other pages, and requests without the token."""
        if request.headers.getall("Host", []) not in [[host] for host in self._hosts]:
            raise web.HTTPMisdirectedRequest(text=f"this server answers only to {HOST}:{self._port}\n")
        origins = request.headers.getall("Origin", [])
        if origins not in ([], [f"http://{request.host}"]):
            raise web.HTTPForbidden(text="pages of another origin have no access\n")
        token = request.path.split("/")[1]
        if not hmac.compare_digest(token.encode(errors="replace"), self._token.encode()):
            raise web.HTTPNotFound(text="not found: open the address that the program printed\n")
        if request.method not in _METHODS:
            raise web.HTTPMethodNotAllowed(request.method, _METHODS)

    @property
    def _hosts(self) -> tuple[str, str]:
        return f"{HOST}:{self._port}", f"localhost:{self._port}"

    def _harden(self, response: web.StreamResponse) -> None:
        """Tell the browser to be strict, and end the connection after this response."""
        response.force_close()
        sockets = " ".join(f"ws://{host}" for host in self._hosts)
        policy = (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
            f"connect-src 'self' {sockets}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        response.headers.update(
            {
                "Content-Security-Policy": policy,
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-store",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Cross-Origin-Opener-Policy": "same-origin",
            }
        )

    # ---- what a page gets and says

    async def _talk(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve one page, as long as it is open."""
        if "Origin" not in request.headers:
            raise web.HTTPForbidden(text="only the page itself may open the stream: the Origin header is missing\n")
        if len(self._board) >= MOST_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_VIEWERS} pages are open; close one\n")
        self._http.begin(request)
        page = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=LONGEST_MESSAGE, compress=False)
        self._harden(page)
        viewer = Viewer(self._board)
        self._board.join(viewer)
        try:
            await page.prepare(request)
            settings = [asdict(setting) for setting in self._show.settings]
            await page.send_json({"type": "hello", "kind": self._show.kind, "settings": settings, **self._show.about()})
            feeding = asyncio.create_task(_feed(page, viewer))
            try:
                await self._listen(page, viewer)
            finally:
                feeding.cancel()
        finally:
            self._board.leave(viewer)
        return page

    async def _listen(self, page: web.WebSocketResponse, viewer: Viewer) -> None:
        """Do as the page says, until it closes."""
        async for message in page:
            try:
                self._obey(message.data if message.type == WSMsgType.TEXT else "", viewer)
            except ValueError as error:
                await page.send_json({"type": "refused", "text": str(error)})

    def _obey(self, text: str, viewer: Viewer) -> None:
        """Obey one message. Raise ValueError in words."""
        try:
            said = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError('this is no message: send {"drawn": true} or {"set": {name: value}}') from error
        match said:
            case {"drawn": _, **rest} if not rest:
                viewer.drew()
            case {"set": wanted, **rest} if not rest:
                self._values.change(wanted)
                self._board.say(values=self._values.plain(), notice="")
                self._stream.changed()
            case _:
                raise ValueError(f'{text!r:.40}: send {{"drawn": true}} or {{"set": {{name: value}}}}')


async def _feed(page: web.WebSocketResponse, viewer: Viewer) -> None:
    """Send what is new, as fast as the page takes it, and never more than that."""
    with suppress(ConnectionError):
        while not page.closed:
            await viewer.news.wait()
            viewer.news.clear()
            if state := viewer.state():
                await page.send_json(state)
            if update := viewer.update():
                words, picture = update
                await page.send_json(words)
                if picture is not None:
                    await page.send_bytes(picture)


def _page(name: str) -> web.Response:
    """Return a file of the page. Raise HTTPNotFound."""
    name = name or "page.html"
    if name not in FILES:
        raise web.HTTPNotFound(text="not found\n")
    return web.Response(body=FILES[name], content_type=TYPES[name.rpartition(".")[2]], charset="utf-8")


FILES = {file.name: file.read_bytes() for file in (files("driver.demos.web") / "page").iterdir()}


def serve(show: Show, port: int, opens: bool, print_it: Callable[[str], None]) -> None:
    """Serve the page on that port; 0 takes a free one. Raise ValueError if the port is taken."""
    try:
        server = Server(show, port)
    except OSError as error:
        raise ValueError(f"--port {port}: not available on {HOST} ({error.strerror}); pass another, or 0") from error
    with ExitStack() as stack:
        print_it(f"{show.kind}, live: {server.url}")
        print_it("Anyone with this address can watch; keep it secret. Ctrl-C ends it.")
        if opens:
            webbrowser.open(stack.enter_context(leading_to(server.url)))
        asyncio.run(_until_stopped(server))


async def _until_stopped(server: Server) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with server.running():
        await stopped.wait()


@contextmanager
def leading_to(url: str) -> Iterator[str]:
    """Yield a private file that redirects there, because every account can read a browser's command line."""
    with tempfile.TemporaryDirectory(prefix="burst-page-") as folder:
        file = private(Path(folder) / "page.html")
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">\n')
        yield f"file://{os.fspath(file)}"
