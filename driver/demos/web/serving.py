"""Runs a page until Ctrl-C, and opens it in the browser."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import webbrowser
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from driver.demos.recordings import private
from driver.demos.web.server import HOST, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.demos.web.stream import Show


def serve(show: Show, port: int, opens: bool, print_it: Callable[[str], None]) -> None:
    """Serve the page on that port; 0 takes a free one. Raises ValueError if the port is taken."""
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
    """A private file that redirects there, because every account can read a browser's command line."""
    with tempfile.TemporaryDirectory(prefix="burst-page-") as folder:
        file = private(Path(folder) / "page.html")
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">\n')
        yield f"file://{os.fspath(file)}"
