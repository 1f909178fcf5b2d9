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
from driver.recovery import Deaths, quarantine
from driver.statistics import Statistics
from fmq import Closed

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from burst import BurstError, Controller
    from burst.wire import ResultPacket
    from driver.options import Options
    from driver.prepared import Home, RemotePreparedModel
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
        self._deaths = Deaths(prepared, options)
        self.bind = self._deaths.bind
        self._home, self.controller = self._open()
        quarantine.watch(self, lambda: prepared.key)

    def _open(self) -> tuple[Home, Controller]:
        home = self._prepared.present_home()
        try:
            return home, self._prepared.new_controller(self.options, home)
        except PeerDied:
            if not self.options.recover:
                raise
            return self._prepared.revived(self.options, home.connection)

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
        self._deaths.in_a_row = 0
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
            try:
                self._finished.append(future.finish(self.run_plain(shot, None)))
                self.buffers.give_back(shot.inputs)
            except PeerDied as error:
                if not self.is_to_recover(error):
                    raise
                self._add(shot, future)  # it is sent with the others, on the device's next life
        except GeneralFailure:
            self.check()
            raise
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
        if self._has_ended and self._receiving.acquire(blocking=False):
            try:
                while self.flights and not self._take_last():
                    pass
            finally:
                self._receiving.release()
        self.collect()
        self._call_back()

    @property
    def _has_ended(self) -> bool:
        try:
            return self.controller.has_died
        except Closed:  # in quarantine
            return True

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
        self._deaths.in_a_row = 0
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
        died = self.is_to_recover(error)
        with self._lock:
            if died and not self.controller.has_died:  # somebody has seen to it already
                self.launch(self.shot(shot.inputs, shot.outputs), future)
            elif died or self.controller.in_flight:
                self._add(shot, future)
        if died:
            return future  # who waits for it notices the death, and recovers
        future.fail(CancelledError())
        if isinstance(error, PeerDied):
            self.end(error)
        raise error

    def drop(self, future: Future) -> None:
        """It was cancelled."""
        self.statistics.drops += 1
        future.call_back()

    def end(self, error: BaseException, request: Request | None = None) -> Exception | None:
        """The device is gone, or ended this burst: everything is sent again, or everybody is told, and us.

        Who holds `_receiving` calls this. `request`: what was running, if it is not among those in flight.
        """
        final = None
        with self._lock:
            try:
                if self.is_closed:
                    raise error  # noqa: TRY301 (as the others)
                waiting: list[tuple[object, Request | None]] = [(f.future, f.shot.request) for f in self.flights]
                successor = self._deaths.successor(
                    error, self._home, self.controller.trace, waiting or [(request, request)]
                )
                self._move_to(*successor)
            except Exception as found:  # noqa: BLE001 (it is what all of them get)
                final = found
                self._fail(final)
        self._call_back()
        return final

    def _move_to(self, home: Home, controller: Controller) -> None:
        """Under the lock: goes on there with everything that was not answered."""
        self.statistics.retire(self.controller)
        self.statistics.recoveries += 1
        self.controller.close()
        self._home, self.controller = home, controller
        try:
            self._prepared.check_quarantine()  # which closed what it found, and that was another
        except PeerDied:
            controller.close()
            raise
        self.buffers.forget_shots()
        flights = list(self.flights)
        self.flights.clear()
        for shot, future in flights:
            shot.outputs.is_busy = False
            if future.done():
                self.buffers.give_back(shot.inputs)
            else:
                self._send_again(shot, future)
        self._launch_staged()
        if self._arrivals:
            self._arrivals.renew()

    def _send_again(self, shot: Shot, future: Future) -> None:
        try:
            self.launch(self.shot(shot.inputs, shot.outputs), future)
        except Exception as error:  # noqa: BLE001 (that one gets it, and the others their results)
            self._finished.append(future.fail(error))
            self.buffers.give_back(shot.inputs)

    def _fail(self, error: Exception) -> None:
        waiting = [future for _, future in self.flights]
        if self._staged:
            waiting.append(self._staged[1])
            self.buffers.give_back(self._staged[0])
            self._staged = None
        for shot, _ in self.flights:
            shot.outputs.is_busy = False
            self.buffers.give_back(shot.inputs)
        self.flights.clear()
        self._finished.extend(future.fail(error) for future in waiting)

    def is_to_recover(self, error: BaseException) -> bool:
        """Whether that is the device's death, and ours to get over."""
        return not self.is_closed and self._deaths.are_to_recover(error, lambda: self.controller.has_died)

    def recover(self, error: PeerDied, request: Request) -> None:
        """After the device died over an explicit request, which may be sent again. Raises what it cannot get over."""
        with self._receiving:
            final = self.end(error, request) if self.is_to_recover(error) else error
        if final:
            raise final

    def quarantined(self) -> None:
        """The model crashed a device too often: whoever waits here is told, and comes by `end`."""
        if not (self.is_closed or self.controller.has_died):
            self.controller.close()
            if self._arrivals:
                self._arrivals.renew()

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
        self._prepared.check_quarantine()

    def close(self) -> None:
        """Ends the burst on both sides; who still waits is told."""
        self.is_closed, self._arrivals = True, None
        self.controller.close()


def error_of(reply: ResultPacket) -> BurstError:
    """The exception for a result without outputs."""
    error = status_error(reply.status)
    error.result = Result(reply.status, (), reply.output_shapes, reply.timing)
    return error
