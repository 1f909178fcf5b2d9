"""The requests of one burst that have no result yet, in the order of their numbers, and the locks that guard them."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Controller
    from driver.client.buffers import EncodedRequest, RequestBuffers
    from driver.client.completion import Completion
    from driver.client.workspace import InputSet


class PendingRequest(NamedTuple):
    """A request whose result has not come."""

    number: int  #: of its result, counted by the controller
    encoded: EncodedRequest
    future: Completion


class InFlight:
    """The requests in flight, oldest first, and three locks, always taken in this order.

    `submitting` is held by the thread that submits or runs, `receiving` by the thread that waits for results, and
    `lock`, briefly, by a thread that changes what both of them use. No thread waits for room while it holds
    `submitting`, and none calls back while it holds one of the others.

    Threads that wait while another one receives are in `waiting`. Whoever stops receiving, or completes a request,
    wakes those whose wait is over, and one more, which receives from now on.
    """

    def __init__(self, buffers: RequestBuffers) -> None:
        self._buffers = buffers
        self.requests: deque[PendingRequest] = deque()
        self.staged: tuple[InputSet, Completion] | None = None  #: the newest frame, kept until there is room
        self.finished: deque[Completion] = deque()  #: futures whose callbacks are due
        self.is_moving = False  #: a request is being taken out, and another may take its place
        self.is_running = False  #: a `Burst.run` holds `submitting`, and its request is not among `requests`
        self.new_locks()

    def new_locks(self) -> None:
        self.submitting, self.receiving, self.lock = threading.RLock(), threading.Lock(), threading.RLock()
        self.waiting: dict[threading.Lock, Callable[[], bool]] = {}  #: released to be woken, and what each waits for

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight or about to be. `Burst.run` reads the same three fields itself."""
        return not (self.requests or self.staged or self.is_moving)

    def begin(self, controller: Controller) -> None:
        """Keep `run` from beginning in C. The caller does this first, under `submitting`.

        One that has begun there, and whose thread has yet to take `submitting`, goes first.
        """
        controller.is_ready = False
        while controller.is_calling and not self.is_running:
            self.submitting.release()
            try:
                controller.await_call()
            finally:
                self.submitting.acquire()
            controller.is_ready = False  # a `run` of the meantime may have made the next one ready

    def as_receiver(self, wait: float, work: Callable[[], None]) -> bool:
        """Run `work` holding `receiving`; False if not acquired within `wait` seconds (-1: no limit).

        By `for`, because Ctrl-C comes after a call, and so between `acquire()` and `try`.
        """
        for is_mine in map(self.receiving.acquire, (True,), (min(wait, threading.TIMEOUT_MAX),)):
            try:
                if is_mine:
                    work()
            finally:
                if is_mine:
                    self.receiving.release()
                    self.tell_waiting()
        return is_mine

    def await_turn(self, until: Callable[[], bool], wait: float | None) -> bool:
        """Sleep until that holds, or until no thread receives; False if neither came within `wait` seconds.

        The caller calls `tell_waiting` afterwards, unless it receives: it may be the one that was to do so.
        """
        turn = threading.Lock()
        turn.acquire()
        self.waiting[turn] = until
        try:
            if until() or not self.receiving.locked():  # told before we were among those that are woken
                return True
            return turn.acquire(True, -1 if wait is None else min(wait, threading.TIMEOUT_MAX))
        finally:
            self.waiting.pop(turn, None)

    def tell_waiting(self) -> None:
        """Wake the threads whose wait is over, and one more if none receives. The caller holds no lock."""
        if not self.waiting:
            return
        is_free = not self.receiving.locked()
        for turn, until in self.waiting.copy().items():
            if (is_over := until()) or is_free:
                is_free = is_free and is_over
                if self.waiting.pop(turn, None):
                    turn.release()

    def when_idle(self, work: Callable[[], None]) -> None:
        """Run `work` holding `receiving` and `lock`, unless requests are in flight or another thread receives."""

        def work_if_idle() -> None:
            with self.lock:
                if self.is_idle:
                    work()

        self.as_receiver(0, work_if_idle)

    def append(self, encoded: EncodedRequest, future: Completion, number: int) -> None:
        """Append the newest request, under the lock. Its outputs are in use from now on."""
        encoded.outputs.is_busy, encoded.outputs.number = True, number
        self.requests.append(PendingRequest(number, encoded, future))

    def append_next(self, encoded: EncodedRequest, future: Completion, sent: int) -> None:
        """Append a request that is about to be sent after `sent` others."""
        while self.requests and self.requests[-1].number > sent:
            self.take_back()  # Ctrl-C came before it was sent
        self.append(encoded, future, sent + 1)

    def append_unsent(self, encoded: EncodedRequest, future: Completion, sent: int) -> None:
        """Append a request that waits for the device to be started again, behind others that do."""
        last = self.requests[-1].number if self.requests else 0
        self.append(encoded, future, max(last, sent) + 1)

    def numbers_of(self, future: Completion) -> list[int]:
        """Return the number of its request, if it is in flight. The caller holds the lock."""
        return [pending.number for pending in self.requests if pending.future is future]

    def take_back(self) -> None:
        """Take the newest request out, under the lock: it was not sent."""
        self.release(self.requests.pop().encoded)

    def release(self, encoded: EncodedRequest) -> None:
        """Free its memory for other requests."""
        encoded.outputs.is_busy = False
        self._buffers.give_back(encoded.inputs)

    def stage(self, inputs: InputSet, future: Completion) -> bool:
        """Keep the newest frame, under the lock, until there is room. True if an older frame was dropped for it."""
        is_drop = False
        if self.staged is not None:
            old, dropped = self.staged
            if is_drop := not dropped.is_done:
                self.finished.append(dropped.fail(CancelledError("a newer frame took its place")))
            self._buffers.give_back(old)
        self.staged = inputs, future
        return is_drop

    def abandon(self) -> None:
        """Forget the requests in a forked child: they are the parent's, and so were the threads that held the locks."""
        self.new_locks()
        self.requests.clear()
        self.finished.clear()
        self.staged = None
