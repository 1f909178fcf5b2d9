"""Requests of a burst that are in flight, and their results.

Three locks, always taken in this order: one thread submits, one waits for results, and what both change is short.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import Busy, ErrorStatus, GeneralFailure, NotSent, PeerDied, Request, Result, Timeout
from burst.errors import status_error
from driver.arrivals import Arrivals
from driver.buffers import Buffers, Outputs, Shot
from driver.future import Future
from driver.statistics import Statistics

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from burst import BurstError
    from burst.wire import ResultPacket
    from driver.options import Options
    from driver.remote import RemotePreparedModel
    from driver.workspace import InputSet

_NONE = ErrorStatus.NONE


class Flight(NamedTuple):
    """A request whose result has not come."""

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
        self._submitting, self._receiving, self._lock = threading.Lock(), threading.Lock(), threading.RLock()
        self._finished: deque[Future] = deque()  # whose callbacks are due
        self.is_closed = False
        self.controller = prepared.new_controller(options)

    def shot(self, inputs: InputSet, outputs: Outputs) -> Shot:
        """The request on that memory, encoded once."""
        shot = outputs.shots.get(inputs)
        if shot is None:
            request = Request(inputs.arguments, outputs.arguments, (inputs.memory, outputs.memory))
            packet = self.controller.encode(request, measure=self.options.measure)
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

    def submit(self, arrays: tuple[Any, ...], timeout: float | None) -> Future:
        """As `Burst.submit`."""
        with self._submitting:
            if self.options.policy != "latest":
                self._make_room(timeout)
            if arrays:
                self.controller.mark_begin()
                self.statistics.copied += self.buffers.inputs.fill(arrays)
            future = Future(self)
            self.collect()
            with self._lock:
                inputs = self.buffers.inputs
                if len(self.flights) < self.depth:
                    shot = self.shot(inputs, self.buffers.free_outputs())
                    self.buffers.next_inputs()
                    self.launch(shot, future)
                else:
                    self._stage(inputs, future)
        self._call_back()
        return future

    def _make_room(self, timeout: float | None) -> None:
        if len(self.flights) < self.depth:
            return
        if self.options.policy == "reject":
            self.collect()
            if len(self.flights) >= self.depth:
                self.statistics.drops += 1
                raise Busy(f"depth={self.depth} requests are in flight, and policy is 'reject'; wait for a result")
        self.advance(lambda: len(self.flights) < self.depth, timeout)

    def _stage(self, inputs: InputSet, future: Future) -> None:
        """Under the lock: the newest frame waits in the place of an older one."""
        if self._staged is not None:
            old, dropped = self._staged
            self.statistics.drops += 1
            self._finished.append(dropped.fail(CancelledError("a newer frame took its place")))
            self.buffers.give_back(old)
        self._staged = inputs, future
        self.buffers.next_inputs()

    def launch(self, shot: Shot, future: Future) -> None:
        """Sends it, under the lock."""
        try:
            self.controller.start(shot.packet)
        except NotSent:
            self._finished.append(future.finish(self.run_plain(shot, None)))
            self.buffers.give_back(shot.inputs)
        else:
            self._add(shot, future)

    def _add(self, shot: Shot, future: Future) -> None:
        shot.outputs.is_busy = True
        self.flights.append(Flight(shot, future))

    def _launch_staged(self) -> None:
        """Under the lock."""
        if self._staged is None or len(self.flights) >= self.depth:
            return
        (inputs, future), self._staged = self._staged, None
        if future.done():
            self.buffers.give_back(inputs)
        else:
            self.launch(self.shot(inputs, self.buffers.free_outputs()), future)

    def _call_back(self) -> None:
        """Outside the locks: what futures call may come back to us."""
        while self._finished:
            self._finished.popleft().call_back()
        if self._arrivals:
            self._arrivals.tell()

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """Until it is done, whoever finds that out. Raises Timeout."""
        self.advance(future.done, timeout)

    def collect(self) -> None:
        """Takes the results that have arrived."""
        while self.flights and self._receiving.acquire(blocking=False):
            try:
                if not self.flights or not self.controller.has_result:
                    return
                self._take_one(0)
            finally:
                self._receiving.release()

    def look(self) -> None:
        """For event loops: takes what has arrived, and notices the device's death."""
        if self.controller.has_died and self._receiving.acquire(blocking=False):
            try:
                while self.flights and not self._take_last():
                    pass
            finally:
                self._receiving.release()
        self.collect()
        self._call_back()

    def _take_last(self) -> bool:
        """What a dead device left, one by one; true at the end."""
        before = self.controller
        self._take_one(0)
        return self.controller is not before

    def advance(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Takes results, in order, until that holds. Raises Timeout."""
        end = None if timeout is None else time.monotonic() + timeout
        while not until():
            left = None if end is None else max(0.0, end - time.monotonic())
            if not self._receiving.acquire(timeout=-1 if left is None else left):
                raise Timeout(f"no result within {timeout} s; the burst stays usable")
            try:
                if not until():
                    self._take_one(left)
            finally:
                self._receiving.release()
            self._call_back()

    def _take_one(self, timeout: float | None) -> None:
        """The next result; who holds `_receiving` calls this."""
        try:
            reply = self.controller.receive(timeout, measure=self.options.measure)
        except (PeerDied, GeneralFailure) as error:
            self.end(error)
            return
        with self._lock:
            shot, future = self.flights.popleft()
            shot.outputs.is_busy = False
            if not future.done() and (larger := self.grown(shot, reply)):
                self.launch(larger, future)
                return
            self._complete(shot, future, reply)
            self.buffers.give_back(shot.inputs)
            self._launch_staged()

    def _complete(self, shot: Shot, future: Future, reply: ResultPacket) -> None:
        if future.done():  # cancelled
            return
        if reply.status is _NONE:
            self.statistics.note(reply.timing)
            arrays = shot.outputs.arrays(reply.output_shapes)
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

    def drop(self, future: Future) -> None:
        """It was cancelled."""
        self.statistics.drops += 1
        future.call_back()

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
        self._call_back()

    def _revive(self, flights: list[Flight]) -> None:
        """With a new device; under the lock."""
        self.controller.close()
        self.statistics.retire(self.controller)
        self.controller = self._prepared.new_controller(self.options, revive=True)
        self.statistics.recoveries += 1
        self.buffers.forget_shots()
        for shot, future in flights:
            shot.outputs.is_busy = False
            if future.done():
                self.buffers.give_back(shot.inputs)
            else:
                self.launch(self.shot(shot.inputs, shot.outputs), future)
        self._launch_staged()

    def _fail(self, flights: list[Flight], error: Exception) -> None:
        waiting = [future for _, future in flights]
        if self._staged:
            waiting.append(self._staged[1])
            self._staged = None
        for shot, _ in flights:
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
        self._prepared.device.check_process()
        if self.is_closed:
            raise ValueError("this burst is closed; open another")

    def close(self) -> None:
        """Ends the burst on both sides; who still waits is told."""
        self.is_closed, self._arrivals = True, None
        self.controller.close()


def error_of(reply: ResultPacket) -> BurstError:
    """The exception for a result without outputs."""
    error = status_error(reply.status)
    error.result = Result(reply.status, (), reply.output_shapes, reply.timing)
    return error
