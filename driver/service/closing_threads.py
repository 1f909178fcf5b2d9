"""The threads of the process that closes the sockets of clients, a few for each account.

One that does not come back holds up its own account's sockets alone. A signal ends what a close waits for, unless it is
a file system that must answer first.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
import time
from collections import defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from burst.serving_thread import ServingThread
from driver.protocol.rpc import take_fd

if TYPE_CHECKING:
    from collections.abc import Hashable

    from burst.channel import Channel

CLOSED, TAKEN, BEGUN = 0, 8, 16
"""Where the numbers are in the shared memory, in units of 8 bytes: one writer has one cache line."""

_AT_ONCE = 4  # closes of one account
_WITHIN, _TICK = 0.001, 0.05  # seconds that closing one socket may take; later, between two signals
_IMPATIENT = 1.0  # seconds
_SPARE = 256  # descriptors


class _ClosedSockets:
    """Those of one account, some of which are being closed."""

    def __init__(self) -> None:
        self.waiting, self.threads = deque[int](), 0


class NumberedClosings:
    """A loop in the main thread, which takes sockets and closes none."""

    def __init__(self, channel: Channel, shared: memoryview[Any], number: int) -> None:
        """Take no socket yet. `number`: this process's."""
        self._channel, self._shared, self._number = channel, shared, number
        self._of, self._lock = defaultdict[object, _ClosedSockets](_ClosedSockets), threading.Lock()
        self._begun = dict[int, float]()  # when each thread that closes one began to, by its number
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE

    def run(self) -> NoReturn:
        """Take sockets until the process is ended, or another one has begun. Raise PeerDied."""
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        arrivals = select.poll()
        arrivals.register(self._channel, select.POLLIN)
        while self._shared[BEGUN] == self._number:
            pause, held = self._interrupt()
            if held >= self._most:  # until its user replaces it
                time.sleep(_TICK)
            elif arrivals.poll(pause):
                self._take()
        os._exit(0)

    def _take(self) -> None:
        message = self._channel.receive()
        number, account = message.body
        fd = take_fd(message)
        while self._shared[CLOSED] < number:  # the other side has its own copy for a moment
            time.sleep(1e-4)
        self._shared[TAKEN] = number
        with self._lock:
            self._of[account].waiting.append(fd)
        self._start(account)

    def _start(self, account: Hashable) -> None:
        """Start a thread for an account, unless it has enough."""
        with self._lock:
            found = self._of.get(account)
            if not found or not found.waiting or found.threads >= _AT_ONCE:
                return
            found.threads += 1
        try:
            ServingThread(self._close_all, account, name="close").start()
        except RuntimeError:  # no thread can be started: `_interrupt` tries again
            with self._lock:
                found.threads -= 1

    def _close_all(self, account: Hashable) -> None:
        own = threading.get_ident()
        while True:
            with self._lock:
                self._begun.pop(own, None)
                found = self._of[account]
                if not found.waiting:
                    found.threads -= 1
                    if not found.threads:
                        del self._of[account]
                    return
                fd = found.waiting.popleft()
                self._begun[own] = time.monotonic()
            with suppress(OSError):
                os.close(fd)

    def _interrupt(self) -> tuple[float | None, int]:
        """Signal the threads whose close takes long; return the milliseconds until then, and how many sockets it has.

        None: nothing is being closed.
        """
        now = time.monotonic()
        with self._lock:
            for thread, begun in self._begun.items():
                if now - begun > _WITHIN:
                    signal.pthread_kill(thread, signal.SIGALRM)
            is_new = any(now - begun < _IMPATIENT for begun in self._begun.values())
            late = [account for account, found in self._of.items() if found.waiting and found.threads < _AT_ONCE]
            held = len(self._begun) + sum(len(found.waiting) for found in self._of.values())
        for account in late:
            self._start(account)
        return (_WITHIN if is_new else _TICK) * 1e3 if held else None, held
