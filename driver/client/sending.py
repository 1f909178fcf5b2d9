"""The half of a burst's pipeline that sends: admission, policies, and what is in flight."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
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
from driver import fork
from driver.client.buffers import Buffers, Outputs, Shot
from driver.client.device_buffers import check_buffers
from driver.client.future import Driver, Future
from driver.client.recovery import Deaths, quarantine
from driver.client.statistics import Statistics
from driver.deadlines import seconds_left
from fmq import Closed

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst.wire import ResultPacket
    from driver.client.aio import Arrivals
    from driver.client.prepared_model import RemotePreparedModel
    from driver.client.workspace import InputSet
    from driver.options import Options


class Flight(NamedTuple):
    """A request whose result has not come."""

    number: int
    shot: Shot
    future: Future


class Sending(Driver):
    """At most `depth` requests in flight. Its locks are explained in driver/client/pipeline.py."""

    def __init__(self, prepared: RemotePreparedModel, options: Options, buffers: Buffers) -> None:
        self.options, self.buffers, self.depth = options, buffers, options.depth
        self.flights: deque[Flight] = deque()
        self.statistics = Statistics()
        self.loops: Arrivals | None = None  # that await; made by the first one
        self._prepared = prepared
        self.staged: tuple[InputSet, Future] | None = None  # the newest frame, while `depth` others are in flight
        self.is_moving = False  # one was taken, and another may take its place
        self.is_running = False  # a `run`, which holds `submitting`
        self._new_locks()
        self._finished: deque[Future] = deque()  # whose callbacks are due
        self.is_closed = False
        self._deaths = Deaths(prepared, options)
        self._home, self.controller = self._deaths.begin()
        quarantine.watch(self, lambda: prepared.key)
        fork.tell(self)

    def bind(self, request: Request) -> None:
        """The burst depends on the buffers that this request names. Raises BuffersLost, ValueError."""
        check_buffers(request.pools, self._home.connection)
        self._deaths.bind(request)

    def _new_locks(self) -> None:
        self.submitting, self._receiving, self._lock = threading.RLock(), threading.Lock(), threading.RLock()

    def shot(self, inputs: InputSet, outputs: Outputs) -> Shot:
        """The request on that memory, encoded once."""
        shot = outputs.shots.get(inputs)
        if shot is None:
            request = Request(inputs.arguments, outputs.arguments, (inputs.memory, outputs.memory))
            packet = self.controller.encode(request, measure=self.options.measure)
            fitting = CHANNEL_LENGTH * DATUM // packet.nbytes  # into the channel
            self.depth = max(1, min(self.depth, fitting))
            outputs.shots[inputs] = shot = Shot(inputs, outputs, request, packet)
        return shot

    def grown(self, shot: Shot, reply: ResultPacket) -> Shot | None:
        """The same request with outputs that suffice, or None when that was not what it lacked."""
        if reply.status != ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            return None
        old = self.buffers.grow(shot.outputs, reply.output_shapes)
        if old is None:
            return None
        with suppress(PeerDied):  # which is noticed in its turn
            self.controller.free_memory(old)
        return self.shot(shot.inputs, shot.outputs)

    def run_plain(self, shot: Shot, timeout: float | None) -> Result:
        """One execution on the plain path."""
        self.check()
        self.statistics.note_plain(self.controller.trace)
        result = self._prepared.execute(shot.request, measure=self.options.measure, timeout=timeout)
        self._deaths.in_a_row = 0
        result.raise_for_status()
        result.outputs = shot.outputs.arrays(result.output_shapes)
        return result

    @property
    def has_room(self) -> bool:
        """For one more request."""
        return len(self.flights) < self.depth

    def submit(self, arrays: tuple[Any, ...], timeout: float | None, deadline: int | None = None) -> Future:
        """As `Burst.submit`; `deadline`: CLOCK_MONOTONIC ns."""
        end = None if timeout is None else time.monotonic() + timeout
        while (future := self.try_submit(arrays, deadline)) is None:
            if self.options.policy == "reject":
                self.statistics.note_drop(self.controller.trace)
                raise Busy(f"depth={self.depth} requests are in flight, and policy is 'reject'; wait for a result")
            try:
                self.advance(lambda: self.has_room, None if end is None else max(0.0, end - time.monotonic()))
            except Timeout:
                raise Timeout(f"depth={self.depth} requests were in flight for {timeout} s; nothing was sent") from None
        return future

    def try_submit(self, arrays: tuple[Any, ...], deadline: int | None = None) -> Future | None:
        """Without waiting. None: there is no room."""
        future = Future(self, deadline)
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
            shot = self.shot(inputs, self.buffers.outputs_for(inputs))
            self.buffers.next_inputs()
            self.launch(shot, future)
        else:
            self._stage(inputs, future)

    def _stage(self, inputs: InputSet, future: Future) -> None:
        """Under the lock: the newest frame waits in the place of an older one."""
        if self.staged is not None:
            old, dropped = self.staged
            if not dropped.done():
                self.statistics.note_drop(self.controller.trace)
                self._finished.append(dropped.fail(CancelledError("a newer frame took its place")))
            self.buffers.give_back(old)
        self.staged = inputs, future
        self.buffers.next_inputs()

    def launch(self, shot: Shot, future: Future) -> None:
        """Sends it, under the lock. Raises only what is not this request's own failure."""
        if self.options.recover and self._has_ended:
            self._keep(shot, future)
            return
        self._add(shot, future, self.controller.sent + 1)
        try:
            self.controller.start(shot.packet, future.deadline)
        except NotSent:
            try:
                future.finish(self.run_plain(shot, seconds_left(future.deadline)))
            except StatusError as error:
                future.fail(error)
            except PeerDied as error:
                if self.is_to_recover(error):
                    return  # it stays, as in `_keep`
                self._take_back(shot)
                raise
            self._take_back(shot)
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

    def _keep(self, shot: Shot, future: Future) -> None:
        """For the device's next life, which begins when somebody waits for it, or for those before it."""
        shot.outputs.is_busy = True
        last = self.flights[-1].number if self.flights else 0
        self.flights.append(Flight(max(last, self.controller.sent) + 1, shot, future))

    @property
    def _has_ended(self) -> bool:
        try:
            return self.controller.has_died
        except Closed:  # in quarantine
            return True

    def is_to_recover(self, error: BaseException) -> bool:
        """Whether that is the device's death, and ours to get over."""
        return not self.is_closed and self._deaths.are_to_recover(error, lambda: self.controller.has_died)

    def _take_back(self, shot: Shot) -> None:
        """The last flight, which did not go out."""
        self.flights.pop()
        shot.outputs.is_busy = False
        self.buffers.give_back(shot.inputs)

    def _launch_staged(self) -> None:
        """Under the lock."""
        if self.staged is None or len(self.flights) >= self.depth:
            return
        (inputs, future), self.staged = self.staged, None
        if future.done():
            self.buffers.give_back(inputs)
            return
        try:
            outputs = self.buffers.outputs_for(inputs)
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

    def check(self) -> None:
        """Before the plain path is taken instead: the burst is still ours. Raises ValueError, DriverError."""
        self.check_process()
        if self.is_closed:
            raise ValueError("this burst is closed; open another")
        self._prepared.check_quarantine()

    def check_process(self) -> None:
        """Raises DriverError in a forked child."""
        self._prepared.device.check_process()

    # ---- the other half

    @abstractmethod
    def collect(self) -> None:
        """Takes the results that have arrived."""

    @abstractmethod
    def advance(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Takes results until that holds. Raises Timeout."""

    @abstractmethod
    def end(self, error: BaseException) -> Exception | None:
        """The device is gone, or ended this burst."""

    @abstractmethod
    def quarantined(self) -> None:
        """The model crashed a device too often."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child."""

    @abstractmethod
    def _call_back(self) -> None:
        """Outside the locks: calls whom finished futures are to call, and lets loops watch."""
