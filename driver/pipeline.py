"""Requests of a burst that are in flight, and their results.

Three locks, always taken in this order: one thread submits (or runs), one waits for results, and what both change is
short. Nobody waits for room while it holds the first, nor calls back while it holds the others.

Ctrl-C may come between any two steps. So every flight knows its number, and the results are counted in C: which result
a flight gets never depends on what we remember to have taken.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import (
    Busy,
    ErrorStatus,
    GeneralFailure,
    NotSent,
    PeerDied,
    Request,
    Result,
    ResultsHeld,
    StatusError,
    Timeout,
)
from burst.controller import CHANNEL_LENGTH
from burst.datum import DATUM
from burst.errors import status_error
from driver import forked
from driver.arrivals import Arrivals
from driver.buffers import Buffers, Outputs, Shot
from driver.future import Future
from driver.statistics import Statistics
from fmq import FmqError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from burst import BurstError, Controller
    from burst.wire import ResultPacket
    from driver.remote import RemotePreparedModel
    from driver.options import Options
    from driver.workspace import InputSet

_NONE = ErrorStatus.NONE
_CLOSED = "this burst was closed before the result came"


class Flight(NamedTuple):
    """A request whose result has not come."""

    number: int
    shot: Shot
    future: Future


class Pipeline:
    """At most `depth` requests in flight. Results come in the order of their requests; any thread may wait for them."""

    def __init__(self, prepared: RemotePreparedModel, options: Options, buffers: Buffers) -> None:
        self.options, self.buffers, self.depth = options, buffers, options.depth
        self.flights: deque[Flight] = deque()
        self.statistics = Statistics()
        self._arrivals: Arrivals | None = None  # made by the first await
        self._prepared = prepared
        self._staged: tuple[InputSet, Future] | None = None  # the newest frame, while `depth` others are in flight
        self._is_moving = False  # one was taken, and another may take its place
        self.is_running = False  # a `run`, which holds `submitting`
        self._new_locks()
        self._finished: deque[Future] = deque()  # whose callbacks are due
        self.is_closed = False
        self.controller = prepared.new_controller(options)
        forked.tell(self)

    def _new_locks(self) -> None:
        self.submitting, self._receiving, self._lock = threading.RLock(), threading.Lock(), threading.RLock()

    def shot(self, inputs: InputSet, outputs: Outputs) -> Shot:
        """The request on that memory, encoded once."""
        shot = outputs.shots.get(inputs)
        if shot is None:
            request = Request(inputs.arguments, outputs.arguments, (inputs.memory, outputs.memory))
            packet = self.controller.encode(request, measure=self.options.measure)
            self.depth = max(1, min(self.depth, CHANNEL_LENGTH * DATUM // packet.nbytes))  # so many fit into the channel
            outputs.shots[inputs] = shot = Shot(inputs, outputs, request, packet)
        return shot

    def grown(self, shot: Shot, reply: ResultPacket) -> Shot | None:
        """The same request with outputs that suffice, or None when that was not what it lacked."""
        if reply.status != ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            return None
        old = self.buffers.grow(shot.outputs, reply.output_shapes)
        if old is None:
            return None
        self.controller.free_memory(old)
        return self.shot(shot.inputs, shot.outputs)

    def run_plain(self, shot: Shot, timeout: float | None) -> Result:
        """One execution on the plain path."""
        self.check()
        self.statistics.plain += 1
        result = self._prepared.execute(shot.request, measure=self.options.measure, timeout=timeout)
        result.raise_for_status()
        result.outputs = shot.outputs.arrays(result.output_shapes)
        return result

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight, nor about to be; who holds `submitting` can rely on it."""
        return not self.flights and not self._staged and not self._is_moving

    @property
    def has_room(self) -> bool:
        """For one more request."""
        return len(self.flights) < self.depth

    def submit(self, arrays: tuple[Any, ...], timeout: float | None) -> Future:
        """As `Burst.submit`."""
        end = None if timeout is None else time.monotonic() + timeout
        while (future := self.try_submit(arrays)) is None:
            if self.options.policy == "reject":
                self.statistics.drops += 1
                raise Busy(f"depth={self.depth} requests are in flight, and policy is 'reject'; wait for a result")
            try:
                self.advance(lambda: self.has_room, None if end is None else max(0.0, end - time.monotonic()))
            except Timeout:
                raise Timeout(f"depth={self.depth} requests were in flight for {timeout} s; nothing was sent") from None
        return future

    def try_submit(self, arrays: tuple[Any, ...]) -> Future | None:
        """Without waiting. None: there is no room."""
        future = Future(self)
        try:
            self.check()
            with self.submitting:
                self.collect()
                is_full = not self.has_room
                if is_full and self.options.policy != "latest":
                    return None
                if arrays:
                    if not is_full:
                        self.controller.mark_begin()
                    self.statistics.copied += self.buffers.inputs.fill(arrays)
                with self._lock:
                    self._admit(future)
        finally:
            self._call_back()
        return future

    def _admit(self, future: Future) -> None:
        """Under both locks: sends it, or keeps it until there is room."""
        inputs = self.buffers.inputs
        if self.has_room:
            shot = self.shot(inputs, self.buffers.free_outputs())
            self.buffers.next_inputs()
            self.launch(shot, future)
        else:
            self._stage(inputs, future)

    def _stage(self, inputs: InputSet, future: Future) -> None:
        """Under the lock: the newest frame waits in the place of an older one."""
        if self._staged is not None:
            old, dropped = self._staged
            if not dropped.done():
                self.statistics.drops += 1
                self._finished.append(dropped.fail(CancelledError("a newer frame took its place")))
            self.buffers.give_back(old)
        self._staged = inputs, future
        self.buffers.next_inputs()

    def launch(self, shot: Shot, future: Future) -> None:
        """Sends it, under the lock. Raises only what is not this request's own failure."""
        self._add(shot, future, self.controller.sent + 1)
        try:
            self.controller.start(shot.packet)
        except NotSent:
            self._take_back(shot)
            try:
                future.finish(self.run_plain(shot, None))
            except StatusError as error:
                future.fail(error)
            self._finished.append(future)
        except BaseException:
            if self.flights and self.flights[-1].number > self.controller.sent:
                self._take_back(shot)
            raise

    def _add(self, shot: Shot, future: Future, number: int = 0) -> None:
        """`number`: when it is not the one that was sent last."""
        while self.flights and number and self.flights[-1].number >= number:
            self._take_back(self.flights[-1].shot)  # it never was sent: an interrupt came
        shot.outputs.is_busy = True
        self.flights.append(Flight(number or self.controller.sent, shot, future))

    def _take_back(self, shot: Shot) -> None:
        """The last flight, which did not go out."""
        self.flights.pop()
        shot.outputs.is_busy = False
        self.buffers.give_back(shot.inputs)

    def _launch_staged(self) -> None:
        """Under the lock."""
        if self._staged is None or len(self.flights) >= self.depth:
            return
        (inputs, future), self._staged = self._staged, None
        if future.done():
            self.buffers.give_back(inputs)
            return
        try:
            outputs = self.buffers.free_outputs()
        except ResultsHeld as error:  # which is not the fault of whoever waits for another one
            self._finished.append(future.fail(error))
            self.buffers.give_back(inputs)
        else:
            self._relaunch(self.shot(inputs, outputs), future)

    def _relaunch(self, shot: Shot, future: Future) -> None:
        """As `launch`, for a request whose caller is elsewhere: what ends the burst is told to all."""
        try:
            self.launch(shot, future)
        except (PeerDied, GeneralFailure) as error:
            self._add(shot, future)
            self.end(error)

    def _call_back(self) -> None:
        """Outside the locks: what futures call may come back to us."""
        while self._finished:
            with suppress(IndexError):  # another thread took the last one
                self._finished.popleft().call_back()
        if self._arrivals:
            self._arrivals.tell()

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Until it is done, whoever finds that out. Raises Timeout."""
        self.advance(future.done, timeout)

    def collect(self) -> None:
        """Takes the results that have arrived."""
        if self.flights:
            self._as_receiver(0, self._take_all)

    def _take_all(self) -> None:
        while self.flights and self._has_result():
            self._take_one(0)

    def _has_result(self) -> bool:
        try:
            return self.controller.has_result
        except FmqError:  # the other end is gone: `_take_one` says it as it should be said
            return True

    def _as_receiver(self, wait: float, work: Callable[[], None]) -> bool:
        """Does that while nobody else receives; False: somebody did, for so many seconds.

        By `for`, because Ctrl-C comes after a call, and so between `acquire()` and `try`.
        """
        try:
            for is_mine in map(self._receiving.acquire, (True,), (wait,)):
                try:
                    if is_mine:
                        work()
                finally:
                    if is_mine:
                        self._receiving.release()
        finally:
            if self._arrivals:
                self._arrivals.rearm()
        return is_mine

    def watch_fd(self) -> int:
        """Readable when there is something to `look` at; -1 when somebody receives, who calls `rearm` afterwards."""
        for is_mine in map(self._receiving.acquire, (False,)):
            try:
                return self.controller.arrival_fd() if is_mine and not self.is_closed else -1
            finally:
                if is_mine:
                    self._receiving.release()
        return -1

    def look(self) -> None:
        """For event loops: takes what has arrived, and notices the device's death."""
        if not self.is_closed:
            self.collect()
            if self.flights and self.controller.has_died:
                self._as_receiver(0, self._take_last)
        self._call_back()

    def _take_last(self) -> None:
        """What a dead device left, until another one is there or everybody is told."""
        before = self.controller
        while self.flights and self.controller is before:
            self._take_one(0)

    def advance(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Takes results, in order, until that holds. Raises Timeout."""
        self.check_process()
        end = None if timeout is None else time.monotonic() + timeout
        while not until():
            left = None if end is None else max(0.0, end - time.monotonic())
            if not self._as_receiver(-1 if left is None else left, partial(self._take_for, until, left)):
                raise Timeout(f"no result within {timeout} s; the burst stays usable")
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
            self.end(GeneralFailure(_CLOSED) if self.is_closed else error)
            return
        if missing > 1:
            return  # it is nobody's: an interrupt came when it was sent
        with self._lock:
            if not self.flights or self.flights[0] is not flight:
                return  # closed meanwhile
            larger = None if future.done() else self.grown(shot, reply)
            if larger is None:
                self._complete(shot, future, reply)
            self._is_moving = True
            self.flights.popleft()
            shot.outputs.is_busy = False
            if larger:
                self._relaunch(larger, future)
            else:
                self.buffers.give_back(shot.inputs)
                self._launch_staged()
            self._is_moving = False

    def _complete(self, shot: Shot, future: Future, reply: ResultPacket) -> None:
        if future.done():  # cancelled
            return
        if reply.status is _NONE:
            self.statistics.note(reply.timing)
            try:
                arrays = shot.outputs.arrays(reply.output_shapes)
            except GeneralFailure as error:
                future.fail(error)
            else:
                future.finish(Result(_NONE, arrays, reply.output_shapes, reply.timing))
        else:
            future.fail(error_of(reply))
        self._finished.append(future)

    def adopt(self, shot: Shot, future: Future) -> None:
        """Sends a request that `run` began with."""
        with self._lock:
            self.launch(shot, future)
        self._call_back()

    def rescue(self, error: BaseException, shot: Shot) -> Future:
        """After an error in `run`: its result is still to come, or is asked for again, or it is the error."""
        future = Future(self)
        died = isinstance(error, PeerDied)
        with self._lock:
            if died or self.controller.in_flight:
                self._add(shot, future)
        if died:
            self.end(error)
            return future
        future.fail(CancelledError())
        raise error

    def drop(self, future: Future) -> bool:
        """Cancels it, unless it is done."""
        self.check_process()
        with self._lock:
            if future.done():
                return False
            future.fail(CancelledError())
            self.statistics.drops += 1
        future.call_back()
        return True

    def end(self, error: BaseException) -> None:
        """The device is gone, or ended this burst: everything is sent again, or everybody is told."""
        with self._lock:
            flights = list(self.flights)
            self.flights.clear()
            try:
                if not (self.options.recover and isinstance(error, PeerDied)):
                    raise error
                self._revive(flights)
            except Exception as final:  # noqa: BLE001 (it is what all of them get)
                self._fail(flights, final)

    def _revive(self, flights: list[Flight]) -> None:
        """With a new device; under the lock."""
        self.controller.close()
        self.statistics.retire(self.controller)
        self.controller = self._prepared.new_controller(self.options, revive=True)
        self.statistics.recoveries += 1
        self.buffers.forget_shots()
        for _, shot, future in flights:
            shot.outputs.is_busy = False
            if future.done():
                self.buffers.give_back(shot.inputs)
            else:
                self.launch(self.shot(shot.inputs, shot.outputs), future)
        self._launch_staged()

    def _fail(self, flights: list[Flight], error: Exception) -> None:
        waiting = [flight.future for flight in flights]
        if self._staged:
            waiting.append(self._staged[1])
            self._staged = None
        for _, shot, _ in flights:
            shot.outputs.is_busy = False
            self.buffers.give_back(shot.inputs)
        self._finished.extend(future.fail(error) for future in waiting)

    @property
    def arrivals(self) -> Arrivals:
        """For asyncio."""
        self._arrivals = self._arrivals or Arrivals(self)
        return self._arrivals

    def arrival(self, future: Future) -> asyncio.Future[None]:
        """Done in the running loop when `future` is."""
        return self.arrivals.of(future)

    def check(self) -> None:
        """Before the plain path is taken instead: the burst is still ours. Raises ValueError, DriverError."""
        self.check_process()
        if self.is_closed:
            raise ValueError("this burst is closed; open another")

    def check_process(self) -> None:
        """Raises DriverError in a forked child."""
        self._prepared.device.check_process()

    def abandon(self) -> None:
        """In a forked child: the burst is the parent's, whose threads held the locks and whose inputs are in use."""
        self._new_locks()
        self.flights.clear()
        self._finished.clear()
        self._staged = self._arrivals = None
        self.buffers.inputs = forked.lost(self.check_process)

    def close(self) -> None:
        """Ends the burst on both sides; who still waits is told."""
        self.is_closed = True
        self.controller.close()
        with self._lock:
            flights = list(self.flights)
            self.flights.clear()
            self._fail(flights, GeneralFailure(_CLOSED))
        self._call_back()
        if self._arrivals:
            self._arrivals.close()


def error_of(reply: ResultPacket) -> BurstError:
    """The exception for a result without outputs."""
    error = status_error(reply.status)
    error.result = Result(reply.status, (), reply.output_shapes, reply.timing)
    return error
