"""Requests of a burst that are in flight, and their results.

Three locks, always taken in this order: one thread submits (or runs), one waits for results, and what both change is
short. Nobody waits for room while it holds the first, nor calls back while it holds the others.

Ctrl-C may come between any two steps. So every flight knows its number, and the results are counted in C: which result
a flight gets never depends on what we remember to have taken.
"""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from burst import (
    ErrorStatus,
    GeneralFailure,
    PeerDied,
    Result,
    Timeout,
)
from burst.causes import cause_of
from burst.errors import status_error
from driver.client.aio import Arrivals
from driver.client.endings import CLOSED, Endings
from driver.deadlines import earlier, seconds_left, unanswered
from fmq import Busy, FmqError, clock

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from burst import BurstError
    from burst.controller import Packet
    from burst.messages import Cause
    from burst.wire import ResultPacket
    from driver.client.buffers import Shot
    from driver.client.future import Future

_NONE = ErrorStatus.NONE


class Pipeline(Endings):
    """At most `depth` requests in flight. Results come in the order of their requests; any thread may wait for them."""

    def _call_back(self) -> None:
        """Outside the locks: what futures call may come back to us."""
        while self._finished:
            with suppress(IndexError):  # another thread took the last one
                self._finished.popleft().call_back()
        if self.loops:
            self.loops.tell()
            self.loops.rearm()

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Until it is done, whoever finds that out: at its deadline it is. Raises Timeout."""
        left = seconds_left(future.deadline)
        if left is None or (timeout is not None and timeout <= left):
            self.advance(future.done, timeout)
            return
        try:
            self.advance(future.done, left)
        except Timeout:
            self.expire(future)

    def expire(self, future: Future) -> None:
        """At its deadline: it is done, whatever comes."""
        with self._lock:
            is_new = not future.done()
            future.fail(unanswered(clock.now() - (future.deadline or 0)))  # its result is dropped when it comes
        if is_new:
            future.call_back()

    def collect(self) -> None:
        """Takes the results that have arrived."""
        if self.flights:
            self.as_receiver(0, self._take_all)

    def _take_all(self) -> None:
        while self.flights and self._has_result():
            self._take_one(0)

    def _has_result(self) -> bool:
        try:
            return self.controller.has_result
        except FmqError:  # the other end is gone: `_take_one` says it as it should be said
            return True

    def as_receiver(self, wait: float, work: Callable[[], None]) -> bool:
        """Does that while nobody else receives; False: somebody did, for so many seconds.

        By `for`, because Ctrl-C comes after a call, and so between `acquire()` and `try`.
        """
        for is_mine in map(self._receiving.acquire, (True,), (wait,)):
            try:
                if is_mine:
                    work()
            finally:
                if is_mine:
                    self._receiving.release()
        return is_mine

    def exchange(self, packet: Packet, timeout: float | None, deadline: int | None = None) -> ResultPacket:
        """One execution while no event loop looks at the results; who holds `submitting` calls this.

        The device is told when the timeout ends, too.
        """
        replies: list[ResultPacket] = []
        end = earlier(timeout, deadline)
        self.as_receiver(-1, lambda: replies.append(self.controller.send(packet, timeout, end)))
        return replies[0]

    def begin_by(self, timeout: float | None) -> int | None:
        """The next request has to be done by then, CLOCK_MONOTONIC ns; `controller.due(None)` ends that."""
        end = earlier(timeout, None)
        if end is not None:
            self.controller.due(end)
        return end

    def watch_fd(self) -> int:
        """Readable when there is something to `look` at; -1 when somebody receives, who calls `rearm` afterwards."""
        found = [-1]
        with suppress(Busy):  # in the C call of `run`, which does not take our locks
            self.as_receiver(0, lambda: found.append(-1 if self.is_closed else self.controller.arrival_fd()))
        return found[-1]

    def look(self) -> None:
        """For event loops: takes what has arrived, and notices the device's death."""
        if not self.is_closed:
            self.collect()
            if self.flights and self._has_ended:
                self.take_last()
        self._call_back()

    def advance(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Takes results, in order, until that holds. Raises Timeout."""
        self.check_process()
        end = None if timeout is None else time.monotonic() + timeout
        while not until():
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                if not self.as_receiver(-1 if left is None else left, partial(self._take_for, until, left)):
                    raise Timeout(f"no result within {timeout} s; the burst stays usable")
            finally:
                self._call_back()

    def _take_for(self, until: Callable[[], bool], timeout: float | None) -> None:
        if until():
            return
        with self._lock:
            self._launch_staged()
            if not self.flights and not until():
                raise CancelledError("the request was interrupted before it was sent")
        self._take_one(timeout)

    def _take_one(self, timeout: float | None) -> None:
        """The next result; who holds `_receiving` calls this."""
        with self._lock:
            if not self.flights:
                return
            flight = number, shot, future = self.flights[0]
            controller, measure = self.controller, self.options.measure
            missing = number - controller.received
        try:
            reply = controller.receive(timeout, measure=measure) if missing > 0 else controller.again(measure=measure)
        except (PeerDied, GeneralFailure) as error:
            self.end(GeneralFailure(CLOSED) if self.is_closed else error)
            return
        if missing > 1:
            return  # it is nobody's: an interrupt came when it was sent
        with self._lock:
            if not self.flights or self.flights[0] is not flight:
                return  # closed meanwhile
            larger = None if future.done() else self.grown(shot, reply)
            if larger is None:
                self._complete(shot, future, reply)
            self.is_moving = True
            self.flights.popleft()
            shot.outputs.is_busy = False
            if larger:
                self._relaunch(larger, future)
            else:
                self.buffers.give_back(shot.inputs)
                self._launch_staged()
            self.is_moving = False

    def result_of(self, shot: Shot, reply: ResultPacket) -> Result:
        """Of a request that succeeded. Raises GeneralFailure."""
        self.statistics.note(reply.timing)
        return Result(_NONE, shot.outputs.arrays(reply.output_shapes), reply.output_shapes, reply.timing)

    def _complete(self, shot: Shot, future: Future, reply: ResultPacket) -> None:
        if future.done():  # cancelled
            return
        if reply.status is _NONE:
            if future.deadline is not None and (late := clock.now() - future.deadline) > 0:
                self._finished.append(future.fail(unanswered(late)))
                return
            try:
                future.finish(self.result_of(shot, reply))
            except GeneralFailure as error:
                self.give_up(shot, future, error)
        else:
            self.give_up(shot, future, error_of(reply, self.cause_of(reply, future.deadline)))
        self._finished.append(future)

    def cause_of(self, reply: ResultPacket, deadline: int | None) -> Cause:
        """Of the last result, as far as a client can tell."""
        controller = self.controller
        return cause_of(reply.status, deadline, controller.trace, controller.received)

    def drop(self, future: Future) -> bool:
        """Cancels it, unless it is done."""
        self.check_process()
        with self._lock:
            if future.done():
                return False
            future.fail(CancelledError())
            self.statistics.note_drop(self.controller.trace)
        future.call_back()
        return True

    @property
    def arrivals(self) -> Arrivals:
        """For asyncio."""
        self.loops = self.loops or Arrivals(self)
        return self.loops

    def arrival(self, future: Future) -> asyncio.Future[None]:
        """Done in the running loop when `future` is."""
        return self.arrivals.of(future)


def error_of(reply: ResultPacket, cause: Cause) -> BurstError:
    """The exception for a result without outputs."""
    error = status_error(reply.status, cause=cause)
    error.result = Result(reply.status, (), reply.output_shapes, reply.timing, cause=error.cause)
    return error
