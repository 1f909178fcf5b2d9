"""Threads for work that takes long: no account's work waits for another account's.

The work of one account is done one piece after the other, in the order in which it came, so an account occupies one
thread at most. Where more accounts have work than there may be threads, the accounts take turns by pieces.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from burst import ResourceExhaustedTransient
from burst.serving_thread import ServingThread

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
LINGER = 5.0
"""Seconds that a thread waits for more work."""


class _Piece(NamedTuple):
    future: Future[Any]
    work: Callable[[], object]


class AccountThreads:
    """A few threads, which begin when there is work and end when there has been none for a while. Any thread."""

    def __init__(self, name: str, most: int, begin: Callable[[], object] = lambda: None) -> None:
        """Start no thread yet. `most`: threads at once. `begin`: what each calls first."""
        self._name, self._most, self._begin = name, most, begin
        self._changed = threading.Condition()
        self._queues: dict[int, deque[_Piece]] = {}  # of accounts with work that is not done
        self._turns: deque[int] = deque()  # accounts whose next piece no thread has
        self._threads = self._idle = 0

    def submit(self, uid: int, work: Callable[[], T]) -> Future[T]:
        """Do the work in a thread, after what the account has submitted before.

        Cancelling the future drops it, while it has not begun.

        Raise ResourceExhaustedTransient when there is no thread and none can be started.
        """
        future: Future[T] = Future()
        with self._changed:
            queue = self._queues.get(uid)
            if queue is None:
                if self._idle <= len(self._turns) and self._threads < self._most:
                    self._start()
                queue = self._queues[uid] = deque()
                self._turns.append(uid)
                self._changed.notify()
            queue.append(_Piece(future, work))
        return future

    def _start(self) -> None:
        try:
            ServingThread(self._serve, name=self._name).start()
        except RuntimeError as error:
            if not self._threads:
                raise ResourceExhaustedTransient(
                    f"no thread can be started for {self._name} now: {error}; try again later"
                ) from error
        else:
            self._threads += 1

    def _serve(self) -> None:
        self._begin()
        while (uid := self._next()) is not None:
            self._do(uid)
            self._finish(uid)

    def _next(self) -> int | None:
        """Return the account whose turn it is; None: this thread ends."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._turns, LINGER)
            self._idle -= 1
            if self._turns:
                return self._turns.popleft()
            self._threads -= 1
            return None

    def _do(self, uid: int) -> None:
        """Do one piece in a frame of its own, so that nothing is kept until the next piece comes."""
        future, work = self._queues[uid].popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is asked for)
            future.set_exception(error)
            del future, work  # the error knows this frame
        else:
            future.set_result(found)

    def _finish(self, uid: int) -> None:
        """Let the account wait for its next turn, if it has more work."""
        with self._changed:
            if self._queues[uid]:
                self._turns.append(uid)
                self._changed.notify()
            else:
                del self._queues[uid]
