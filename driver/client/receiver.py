"""The thread that takes results where no caller waits for them: for callbacks, and for `concurrent.futures.wait`.

It is an event loop, as any that a program may have, and takes results as those do. The first callback or wait starts
it; a process that has none has no such thread. While nothing arrives it sleeps.
"""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING

from driver import fork

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable


class Receiver:
    """The event loop of one process, and its thread. Any thread."""

    _loop: AbstractEventLoop | None = None
    _thread: threading.Thread | None = None

    def __init__(self) -> None:
        self._forsaken: list[AbstractEventLoop | None] = []
        self._starting = threading.RLock()
        fork.abandon_in_child(self)
        atexit.register(self._stop)

    def call(self, attend: Callable[[], object]) -> None:
        """Call `attend` in the event loop: it has the loop watch what is to come."""
        with self._starting:
            loop = self._loop = self._loop or self._started()
        loop.call_soon_threadsafe(attend)

    def _started(self) -> AbstractEventLoop:
        import asyncio

        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="burst-results", daemon=True)
        self._thread.start()
        return loop

    def abandon(self) -> None:
        """Forget it in a forked child: the thread is the parent's, and so are the descriptors that its loop watches."""
        self._forsaken.append(self._loop)
        self._starting, self._loop, self._thread = threading.RLock(), None, None

    def _stop(self) -> None:
        """Stop it at the end of the process."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(1)
            if not self._thread.is_alive():
                self._loop.close()


RECEIVER = Receiver()
