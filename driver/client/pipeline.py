"""A burst's requests: admitted, sent, received and completed, up to `depth` at a time.

`InFlight` knows the requests and has the locks, `BurstSession` the device and the ways to a result. `Burst.run` uses
both directly, and the methods of `Pipeline` for everything else.

Ctrl-C may come between any two steps. So every pending request knows its number, and the results are counted in C:
which result a request gets never depends on what we remember to have taken.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from burst import Busy, ErrorStatus, GeneralFailure, NotSent, PeerDied, Result, ResultsHeld, StatusError, Timeout
from burst.dropped import later
from burst.errors import timed_out
from driver import fork
from driver.client.aio import Arrivals
from driver.client.buffers import buffers_for
from driver.client.burst_requests import CLOSED_IN_FLIGHT, BurstRequests
from driver.client.completion import Completion
from driver.client.in_flight import InFlight
from driver.client.recovery import quarantine
from driver.client.session import FAILURES, BurstSession
from driver.deadlines import WAITING, missed_in_waiting, passed, seconds_left, timeout_until, unanswered
from fmq import clock

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from burst import Memory, Request
    from burst.controller import Packet
    from burst.wire import ResultPacket
    from driver.client.buffers import EncodedRequest, RequestBuffers
    from driver.client.executor import BurstParts
    from driver.client.job import Job
    from driver.client.remote_executor import RemoteExecutor
    from driver.client.workspace import InputSet
    from driver.options import Options

_NONE = ErrorStatus.NONE


class Pipeline(BurstRequests):
    """A burst's pipeline of at most `depth` requests in flight.

    Results come in the order of their requests; any thread may wait for them.
    """

    loops: Arrivals | None = None  #: the event loops that await; made by the first one

    def __init__(
        self,
        prepared: RemoteExecutor,
        options: Options,
        parts: BurstParts,
    ) -> None:
        """Open a session. Raise StatusError, PeerDied, ValueError."""
        self.options = options
        self.buffers: RequestBuffers = parts.buffers or buffers_for(prepared.model, options)
        self.in_flight = InFlight(self.buffers)
        self.session = BurstSession(prepared, options, self.buffers, parts)
        self.is_recovering = False  #: in a thread of its own
        quarantine.watch(self, lambda: prepared.key)
        fork.abandon_in_child(self)

    # ---- admission

    @property
    def has_room(self) -> bool:
        """True if one more request may be in flight."""
        return len(self.in_flight.requests) < self.session.depth

    @property
    def depth(self) -> int:
        """The number of requests that may be in flight: what was asked for, or as many as fit into the queue."""
        return self.session.depth

    def note_drop(self) -> None:
        """Count a request that was cancelled, refused or replaced; readers of the trace see it, too."""
        self.session.note_drop()

    def admit(self, arrays: tuple[Any, ...], deadline: int | None, told: int | None = None) -> Completion | None:
        """Submit without waiting; `told` as for `Completion`. None: there is no room."""
        future, session = Completion(self, deadline, told), self.session
        try:
            session.check()
            with self.in_flight.submitting:
                self.in_flight.begin(session.controller)
                self.collect()
                if session.is_displaced:
                    session.try_return_to_device(self.in_flight)
                if (is_full := not self.has_room) and self.options.policy != "latest":
                    return None
                if arrays:
                    if not is_full:
                        session.controller.mark_begin()
                    session.statistics.copied += self.buffers.fill(arrays)
                with self.in_flight.lock:
                    self._admit(future)
        finally:
            self.call_back()
        return future

    def _admit(self, future: Completion) -> None:
        """Send the request, or keep it until there is room. The caller holds both locks."""
        inputs = self.buffers.inputs
        if self.has_room:
            encoded = self.session.encode(inputs, self.buffers.outputs_for(inputs))
            self.buffers.next_inputs()
            self._launch(encoded, future)
        else:
            if self.in_flight.stage(inputs, future):
                self.session.note_drop()
            self.buffers.next_inputs()

    # ---- sending, under the lock

    def _launch(self, encoded: EncodedRequest, future: Completion) -> None:
        """Send it, or have the fallback execute it. Raise only what is not this request's own failure."""
        try:
            self._send(encoded, future)
        except FAILURES as error:
            if self.session.fallback is None:
                raise
            future.finish(self.session.run_fallback(encoded, error))
            self.in_flight.finished.append(future)

    def _send(self, encoded: EncodedRequest, future: Completion) -> None:
        controller, in_flight = self.session.controller, self.in_flight
        if self.options.recover and self.session.has_ended:
            # It goes to the device's next life, which begins when a thread waits for it or for those before it.
            in_flight.append_unsent(encoded, future, controller.sent)
            return
        in_flight.append_next(encoded, future, controller.sent)
        try:
            controller.start(encoded.packet, future.told)
        except NotSent:
            self._send_plain(encoded, future)
        except BaseException:
            if in_flight.requests and in_flight.requests[-1].number > controller.sent:
                in_flight.take_back()
            raise

    def _send_plain(self, encoded: EncodedRequest, future: Completion) -> None:
        """Execute the newest request on the plain path: it did not go out by the queues."""
        try:
            future.finish(self.session.run_plain(encoded, seconds_left(future.told)))
        except StatusError as error:
            future.fail(error)
        except Timeout:
            future.fail(unanswered(clock.now() - (future.told or 0)))
        except PeerDied as error:
            if self.session.is_recoverable(error):
                return  # it stays in flight, for the device's next life
            self.in_flight.take_back()
            raise
        self.in_flight.take_back()
        self.in_flight.finished.append(future)

    def _launch_staged(self) -> None:
        """Launch the frame that was kept until there is room, if there is room."""
        if self.in_flight.staged is None or not self.has_room:
            return
        (inputs, future), self.in_flight.staged = self.in_flight.staged, None
        if future.is_done:
            self.buffers.give_back(inputs)
            return
        try:
            outputs = self.buffers.outputs_for(inputs)
        except ResultsHeld as error:  # not the fault of the thread that waits for another result
            self.in_flight.finished.append(future.fail(error))
            self.buffers.give_back(inputs)
        else:
            self._relaunch(self.session.encode(inputs, outputs), future)

    def _relaunch(self, encoded: EncodedRequest, future: Completion) -> None:
        """Launch a request whose caller is elsewhere: what ends the burst is told to all."""
        try:
            self._launch(encoded, future)
        except (PeerDied, GeneralFailure) as error:
            self.in_flight.append(encoded, future, self.session.controller.sent)
            self._end(error)

    # ---- receiving

    def collect(self) -> None:
        """Take the results that have arrived."""
        if self.in_flight.requests:
            self.in_flight.as_receiver(0, self._take_arrived)

    def _take_arrived(self) -> None:
        while self.in_flight.requests and self.session.has_result:
            self._take_one(0)

    def advance(self, until: Callable[[], bool], timeout: float | None, completion: Completion | None = None) -> None:
        """Take results, in order, until that holds. Raise Timeout."""
        self.session.check_process()
        end = None if timeout is None else time.monotonic() + timeout
        while not until():
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                take = partial(self._take_for, until, left)
                if not (self.in_flight.as_receiver(0, take) or self.in_flight.await_turn(until, left)):
                    raise timed_out(timeout)
            finally:
                self.call_back()

    def drain(self, timeout: float | None) -> None:
        """Take the results of all requests in flight. Raise Timeout."""
        self.advance(lambda: not self.in_flight.requests, timeout)

    def _take_for(self, until: Callable[[], bool], timeout: float | None) -> None:
        if until():
            return
        with self.in_flight.lock:
            self._launch_staged()
            if not self.in_flight.requests and not until():
                raise CancelledError("the request was interrupted before it was sent")
        self._take_one(timeout)

    def _take_one(self, timeout: float | None) -> None:
        """Take the next result, for the oldest request. The caller holds `receiving`.

        `lock` is not held while we wait, so that other threads can submit. Meanwhile the oldest request can change in
        one way alone: `close` or a recovery takes all requests out. So it is looked at again afterwards.
        """
        in_flight, session = self.in_flight, self.session
        with in_flight.lock:
            if not in_flight.requests:
                return
            oldest = number, encoded, future = in_flight.requests[0]
            controller, measure = session.controller, self.options.measure
            missing = number - controller.received
        try:
            # Not missing: Ctrl-C came between taking the result from the queue and giving it to its request.
            reply = controller.receive(timeout, measure=measure) if missing > 0 else controller.again(measure=measure)
        except (PeerDied, GeneralFailure) as error:
            self._end(GeneralFailure(CLOSED_IN_FLIGHT) if session.is_closed else error)
            return
        if missing > 1:
            return  # the result of an earlier request, which Ctrl-C kept from being noted when it was sent
        with in_flight.lock:
            if not in_flight.requests or in_flight.requests[0] is not oldest:
                return
            larger = None
            if future.is_done:  # cancelled, or its deadline has passed
                controller.settle(number)
                future.late_status = reply.status
            elif (larger := session.with_larger_outputs(encoded, reply)) is None:
                self._complete(encoded, future, reply)
            in_flight.is_moving = True  # not idle, although there may be no request for a moment
            in_flight.requests.popleft()
            encoded.outputs.is_busy = False
            if larger:
                self._relaunch(larger, future)
            else:
                self.buffers.give_back(encoded.inputs)
                self._launch_staged()
            in_flight.is_moving = False

    def _complete(self, encoded: EncodedRequest, future: Completion, reply: ResultPacket) -> None:
        """Give a request its result."""
        if reply.status is _NONE:
            if future.deadline is not None and (late := clock.now() - future.deadline) > 0:
                self.in_flight.finished.append(future.fail(unanswered(late)))
                return
            try:
                future.finish(self.session.result_of(encoded, reply))
            except GeneralFailure as error:
                self._give_up(encoded, future, error)
        else:
            self._give_up(encoded, future, self.session.error_of(reply, future.told))
        self.in_flight.finished.append(future)

    def _give_up(self, encoded: EncodedRequest, future: Completion, error: BaseException) -> None:
        """Let the fallback answer, or fail, a request that still has its memory: the device will not answer it."""
        if self.session.fallback is None:
            future.fail(error)
        elif not future.is_done:
            try:
                future.finish(self.session.run_fallback(encoded, error))
            except Exception as final:  # noqa: BLE001 (it is what this request gets)
                future.fail(final)

    def call_back(self) -> None:
        """Call back, outside the locks, as what futures call may come back to us."""
        finished = self.in_flight.finished
        while finished:
            with suppress(IndexError):  # another thread took the last one
                finished.popleft().call_back()
        self.in_flight.tell_waiting()
        if self.loops:
            self.loops.tell()
            self.loops.rearm()

    # ---- what futures ask for

    def expire(self, future: Completion) -> None:
        """Fail it because its deadline has passed, unless it is done."""
        self._give_back(future, unanswered(clock.now() - (future.deadline or 0)))

    def drop(self, future: Completion) -> bool:
        """Cancel it, unless it is done."""
        self.session.check_process()
        return self._give_back(future, CancelledError())

    def _give_back(self, future: Completion, error: BaseException) -> bool:
        """Fail it, unless it is done. The device does not begin its request any more; a result is dropped."""
        with self.in_flight.lock:
            if future.is_done:
                return False
            future.fail(error)
            self.session.abandon(self.in_flight.numbers_of(future))
            if isinstance(error, CancelledError):
                self.session.note_drop()
        future.call_back()
        self.in_flight.tell_waiting()
        return True

    def attend(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have that loop, in its thread, take results until there is room."""
        self.arrivals.watch(loop)

    # ---- for event loops

    @property
    def arrivals(self) -> Arrivals:
        self.loops = self.loops or Arrivals(self)
        return self.loops

    def look(self) -> None:
        """Take what has arrived, and notice the device's death."""
        if not self.session.is_closed:
            self.collect()
            if self.in_flight.requests and self.session.has_ended:
                self._finish_with_dead_device()
        self.call_back()

    def _finish_with_dead_device(self) -> None:
        """Recover in another thread: an event loop does not stand still while a device is started."""
        if not self.options.recover:
            self.in_flight.as_receiver(0, self._take_last)
        elif not self.is_recovering:
            self.is_recovering = True
            threading.Thread(target=self._recover_elsewhere, name="burst-recovery", daemon=True).start()

    def _recover_elsewhere(self) -> None:
        try:
            self.in_flight.as_receiver(-1, self._take_last)
        finally:
            self.is_recovering = False
            self.call_back()

    def _take_last(self) -> None:
        """Take what a dead device left, until another one is there or all futures have failed."""
        while self.in_flight.requests and self.session.has_ended:
            self._take_one(0)

    # ---- for `Burst.run`, which holds `submitting`, when its one C call did not lead to a result

    def recover_from(self, error: BaseException, encoded: EncodedRequest, timeout: float | None) -> Completion:
        """Find another way to the result of `run`; return a future that is done. Raise what there is to raise."""
        if isinstance(error, NotSent | PeerDied) and self.session.try_return_to_device(self.in_flight):
            return self._send_and_wait(self.session.encode(encoded.inputs, encoded.outputs), timeout)
        try:
            return self._recover_from(error, encoded, timeout)
        except FAILURES as failure:
            return Completion(self).finish(self.session.run_fallback(encoded, failure, timeout))

    def _recover_from(self, error: BaseException, encoded: EncodedRequest, timeout: float | None) -> Completion:
        if isinstance(error, Busy):  # an event loop watches the results
            return self._send_and_wait(encoded, timeout)
        if isinstance(error, NotSent):
            try:
                self.session.check_engine()
                return Completion(self).finish(self.session.run_plain(encoded, timeout))
            except PeerDied as died:
                error = died
        if isinstance(error, GeneralFailure):
            self.session.check()
        self.buffers.lent = encoded.inputs
        try:
            future = self._rescue(error, encoded)
            future.join(timeout)
            return future
        finally:
            if not self.in_flight.requests:
                self.buffers.lent = None

    def retry_with_larger_outputs(
        self, encoded: EncodedRequest, reply: ResultPacket, timeout: float | None, end: int | None
    ) -> Completion:
        """Send once more what lacked only room for its outputs; return a future that is done.

        `end`: of the timeout, CLOCK_MONOTONIC ns. Until it returns, the inputs must stay as they are.
        """
        try:
            larger = self.session.with_larger_outputs(encoded, reply)
            if larger is None:
                raise self.session.error_of(reply, end)
            return self._send_and_wait(larger, timeout_until(end))
        except FAILURES as failure:
            return Completion(self).finish(self.session.run_fallback(encoded, failure, timeout))

    def _send_and_wait(self, encoded: EncodedRequest, timeout: float | None) -> Completion:
        """Execute once holding `receiving`, so that no event loop looks at the results."""
        try:
            end = None if timeout is None else clock.deadline_of(timeout)
            reply = self._exchange(encoded.packet, timeout, end)
        except BaseException as error:  # noqa: BLE001 (raised again, unless there is another way)
            return self.recover_from(error, encoded, timeout_until(end))
        if reply.status is not _NONE:
            return self.retry_with_larger_outputs(encoded, reply, timeout, end)
        return Completion(self).finish(self.session.result_of(encoded, reply))

    def _exchange(
        self, packet: Packet, timeout: float | None, end: int | None, last: int | None = None
    ) -> ResultPacket:
        """Execute once. `end`: of the timeout or the deadline, of which the device is told. `last`: of the wait."""
        replies: list[ResultPacket] = []
        controller = self.session.controller
        self.in_flight.as_receiver(-1, lambda: replies.append(controller.send(packet, timeout, end, last)))
        return replies[0]

    def _rescue(self, error: BaseException, encoded: EncodedRequest) -> Completion:
        """Return a future for a `run` that met an error, if its result is still to come or can be asked for again."""
        future, session, in_flight = Completion(self), self.session, self.in_flight
        died = session.is_recoverable(error)
        with in_flight.lock:
            if died and not session.has_ended:  # another thread has recovered the burst
                self._launch(session.encode(encoded.inputs, encoded.outputs), future)
            elif died:
                in_flight.append_unsent(encoded, future, session.controller.sent)
            elif session.controller.in_flight:
                in_flight.append(encoded, future, session.controller.sent)
        if died:
            return future  # the thread that waits for it notices the death, and recovers
        future.fail(CancelledError())
        if isinstance(error, PeerDied):
            self._end(error)
            self.call_back()
        raise error

    # ---- requests on pools of the caller's own

    def perform(self, job: Job) -> Result:
        """Execute a request on pools of the caller's own, once no other is in flight."""
        if missed := passed(job.wait.by):
            return missed
        self.session.check()
        while True:
            try:
                self.drain(seconds_left(job.wait.end))
            except Timeout:
                return job.wait.given_up()
            self.session.bind(job.request, self.in_flight)
            try:
                with self.in_flight.submitting:
                    self.in_flight.begin(self.session.controller)
                    if self.in_flight.is_idle:
                        return self._perform(job)
            except PeerDied as error:
                self._recover_request(error, job.request)
            finally:
                if self.loops:
                    self.loops.rearm()

    def _perform(self, job: Job) -> Result:
        session, request, wait = self.session, job.request, job.wait
        wait.check(WAITING)
        try:
            packet = session.controller.packet(request, measure=job.measure)
            reply = self._exchange(packet, wait.timeout, wait.end, wait.last)
        except StatusError as error:
            return error.as_result()
        except NotSent:
            session.check()
            session.check_engine()
            result = session.prepared.perform(job)
            session.note_plain()
            return result
        except Timeout:
            if missed := missed_in_waiting(wait.by):
                return missed
            raise
        if reply.status is not _NONE:
            return session.error_of(reply, wait.end).as_result()
        return Result(_NONE, session.prepared.outputs(request, reply.output_shapes), reply.output_shapes, reply.timing)

    def _recover_request(self, error: PeerDied, request: Request) -> None:
        """Recover after a death over a request that may be sent again. Raise what cannot be recovered from."""
        if not self.session.is_recoverable(error):
            raise error
        found: list[Exception | None] = []
        self.in_flight.as_receiver(-1, lambda: found.append(self._end(error, request)))
        self.call_back()
        if found[0]:
            raise found[0]

    def free_memory(self, memory: Memory) -> None:
        """Free memory as `Burst.free_memory` does."""
        self.session.check_process()
        self.session.controller.free_memory(memory)

    # ---- the end of the device, or of the burst

    def _end(self, error: BaseException, request: Request | None = None) -> Exception | None:
        """Send everything again after the device's or the burst's end, or fail all futures. Returns why they fail.

        The caller holds `receiving`. `request`: what was running, if it is not among those in flight.
        """
        with self.in_flight.lock:
            try:
                waiting: list[tuple[object, Request | None]] = [
                    (pending.future, pending.encoded.request) for pending in self.in_flight.requests
                ]
                self.session.recover(error, waiting or [(request, request)])
                self._send_all_again()
            except Exception as final:  # noqa: BLE001 (it is what all of them get)
                self._fail_all(final)
                return final
        return None

    def _send_all_again(self) -> None:
        """Send all requests to the device's next life, under the lock.

        A request that cannot be sent fails, and no other for its sake.
        """
        requests = list(self.in_flight.requests)
        self.in_flight.requests.clear()
        for _, encoded, future in requests:
            encoded.outputs.is_busy = False
            if future.is_done:
                self.buffers.give_back(encoded.inputs)
                continue
            try:
                self._launch(self.session.encode(encoded.inputs, encoded.outputs), future)
            except Exception as error:  # noqa: BLE001 (it is what this request gets)
                self.in_flight.finished.append(future.fail(error))
        self._launch_staged()

    def _fail_all(self, error: Exception) -> None:
        """Fail the requests in flight, and the frame that was kept until there is room. The caller holds the lock."""
        in_flight = self.in_flight
        for _, encoded, future in in_flight.requests:
            self._give_up(encoded, future, error)
            in_flight.finished.append(future)
            in_flight.release(encoded)
        in_flight.requests.clear()
        kept, in_flight.staged = in_flight.staged, None
        if kept:
            self._give_up_staged(*kept, error)

    def _give_up_staged(self, inputs: InputSet, future: Completion, error: Exception) -> None:
        if self.session.fallback is None or self.session.is_closed:
            future.fail(error)
        else:
            try:
                self._give_up(self.session.encode(inputs, self.buffers.outputs_for(inputs)), future, error)
            except ResultsHeld as held:
                future.fail(held)
        self.in_flight.finished.append(future)
        self.buffers.give_back(inputs)

    def quarantined(self) -> None:
        """Tell the threads that wait here, by way of `_end`: the model crashed a device too often."""
        if not (self.session.is_closed or self.session.has_ended):
            self.session.controller.close()
            if self.loops:
                self.loops.renew()

    def abandon(self) -> None:
        """Give the burst up in a forked child: the parent's threads held the locks, and its inputs are in use."""
        self.in_flight.abandon()
        self.session.controller.is_ready, self.loops = False, None
        self.buffers.inputs = fork.unusable(self.session.check_process)

    def close(self) -> None:
        """End the burst on both sides; threads that wait get GeneralFailure."""
        self.session.is_closed = True
        self.session.controller.close()
        with self.in_flight.lock:
            self._fail_all(GeneralFailure(CLOSED_IN_FLIGHT))
        self.buffers.close()
        self.call_back()
        if self.loops:
            self.loops.close()
            self.loops.tell()

    def __del__(self) -> None:
        if self.loops:
            later(self.loops.close)
