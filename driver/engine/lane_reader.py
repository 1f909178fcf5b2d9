"""One socket of a client's lane, and the thread that reads it: messages become jobs here, and outcomes answers.

What is to be executed in turn runs in this thread, so a plain execution costs no switch of threads; its socket is read
again afterwards. What is launched waits in the lane's schedule and has no thread, so nothing of a socket on which a
client launches and cancels is ever held up. A client with several executions at once that it waits for has several
sockets.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, cast

import msgpack

from burst import (
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    Malformed,
    PeerDied,
    ResourceExhaustedTransient,
    StatusError,
)
from burst._core import ffi, lib
from burst._hot import HotLane, HotPlan
from burst.channel import Message, close_all
from burst.ends import address_of
from burst.executor import Outcome, PlanRun, binding_time, error_of
from burst.exhaustion import DescriptorsLost, exhausted
from burst.messages import NO_TIMING
from burst.run_queue import Tickets
from burst.serving_thread import ServingThread
from burst.slots import checked_slots
from driver.engine.lane import SignallingExecution
from driver.engine.ledger import price
from driver.engine.result_stream import RepeatedExecution
from driver.engine.schedule import LaunchedExecution, TimeLimits, check_deadline
from driver.protocol.fences import check_count, check_most
from driver.protocol.lane_codec import (
    FENCED,
    IN_TURN,
    LAUNCH,
    LAUNCHED,
    QUESTION,
    answer_to,
    split,
    split_in_turn,
)
from driver.protocol.rpc import READ_WITHIN
from driver.protocol.stream_terms import FAILED, MOST_ROOM, STREAM, answer_to_steps, unpack_terms

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst.channel import Channel
    from burst.executor import Plan
    from burst.run_queue import Ticket
    from driver.engine.lane import ClientLane

_MOST_REFUSALS = 4096  # that a client has not read
_BEGIN, _END = (address_of(ffi.addressof(lib, f"burst_{name}_attempt")) for name in ("begin", "end"))


class AnsweredExecution(LaunchedExecution):
    """An execution whose outcome is sent when it has ended."""

    limit = "client_async"

    def __init__(self, number: int, plan: Plan, limits: TimeLimits, socket: LaneReader) -> None:
        super().__init__(number, plan, limits)
        self.socket = socket

    def conclude(self, outcome: Outcome) -> None:
        """Say how it ended."""
        assert self.socket
        self.socket.say(self.number, outcome, self.plan)


class LaneReader(HotLane):
    """A reader that serves one socket in a thread of its own. Known requests go no further than its base."""

    def __init__(self, channel: Channel, lane: ClientLane, on_end: Callable[[], None]) -> None:
        self._channel, self._lane, self._on_end = channel, lane, on_end
        self._tickets = Tickets()
        self._ticket: Ticket | None = None  # of the last one
        self._judged = ffi.new("burst_attempt *")  # of an execution that the base has begun
        self._begin_lane(_BEGIN, _END, address_of(self._judged), HotPlan)
        self._slots: set[int] = set()  # that were registered here
        self._outbox: deque[bytes] = deque()  # answers to what was launched
        self._sending, self._is_full = threading.Lock(), False
        self._thread = ServingThread(self._serve, name="lane")

    def start(self) -> None:
        """Begin to serve. Raise RuntimeError when no thread can be started."""
        self._lane.sockets.add(self)
        try:
            self._thread.start()
        except RuntimeError:
            self._lane.sockets.discard(self)
            self._thread.forget()
            raise

    def stop(self) -> None:
        """End it. A running execution is cancelled if the device can; else it finishes first."""
        self._tickets.close()
        if running := cast("Plan | None", self._running):
            running.cancel()
        self._channel.shutdown()

    @property
    def unread(self) -> int:
        """The number of answers to launches that wait for the client to read others."""
        return len(self._outbox) if self._is_full else 0

    def send_due(self) -> None:
        """Send answers to what was launched, from any thread, as far as the socket takes them; the rest goes later."""
        while self._outbox and not self._is_full and self._sending.acquire(blocking=False):
            try:
                self._send_some()
            except (PeerDied, StatusError, OSError):
                self._outbox.clear()
                self._channel.shutdown()
            finally:
                self._sending.release()

    def _send_some(self) -> None:
        """Send answers while there is room, under `_sending`.

        Raise PeerDied, and what keeps the lane from watching the socket.
        """
        while self._outbox:
            answer = self._outbox.popleft()
            if not self._channel.send_at_once(answer):
                self._outbox.appendleft(answer)
                self._is_full = True
                self._lane.await_room(self._channel.fileno(), self._go_on)
                break

    def _go_on(self) -> None:
        self._is_full = False
        self.send_due()

    def _close(self) -> None:
        with self._sending:  # nothing is about to be watched by the descriptor's number
            self._lane.forget_room(self._channel.fileno())
            self._channel.close()

    def say(self, number: int, outcome: Outcome, plan: Plan | None = None) -> None:
        """Have the outcome of something that was launched sent, when the lane is flushed."""
        self.post(b"\x92" + msgpack.packb(number) + self._lane.answer(outcome, plan))

    def post(self, answer: bytes) -> None:
        """Have an answer to something that was launched sent, when the lane is flushed."""
        self._outbox.append(answer)
        self._lane.due.append(self)

    def _serve(self) -> None:
        lane = self._lane
        with ExitStack() as end:  # all of it, whatever fails
            end.callback(self._on_end)
            end.callback(lane.leave, self, self._slots)
            end.callback(self._close)
            end.enter_context(suppress(PeerDied, Malformed))
            lane.enter()
            while True:
                try:
                    message = self._receive()
                except DescriptorsLost as error:
                    self._note_lost(error)
                else:
                    self.handle(message)

    def _receive(self) -> Message:
        """Return the next message that is no known request. Raise as `Channel.receive`."""
        found = self._next_message(self._channel.fileno(), self._lane.known)
        return self._channel.received(*found) if found else self._channel.receive()

    def handle(self, message: Message) -> None:
        """Do what one message asks for. Raise PeerDied, Malformed."""
        raw = message.raw
        head = raw[:2]
        try:
            if head == IN_TURN:
                self._channel.send_raw(self._executed(raw))
            elif head == FENCED:
                self._launch_behind_fences(message)
            elif head == LAUNCH:
                self._launch(raw)
                self._check_reads()
            elif head == QUESTION:
                self._channel.send_raw(self._told(raw))
            elif head == STREAM:
                self._open_stream(raw)
                self._check_reads(MOST_ROOM)
            else:
                self._manage(message)
        finally:
            if message.fds:  # also descriptors that came where they do not belong
                message.close()
        if self._lane.due:
            self._lane.flush()

    def _check_reads(self, each: int = 1) -> None:
        """Raise PeerDied for a client that launches executions, and leaves too many answers unread.

        `each`: answers that one may have, unread.
        """
        if self.unread > self._lane.limits.client_async * each + _MOST_REFUSALS:
            raise PeerDied("the other side launches executions, and does not read the answers")

    # ---- in turn

    def _executed(self, raw: bytes) -> bytes:
        """Return the answer, whatever the client sends. Raise Malformed for a message without a number."""
        lane, arrived = self._lane, time.monotonic_ns()
        end, key = split_in_turn(raw)
        self.answered += 1
        try:
            plan = lane.plan(key)
            self._running = claimed = plan.claim()
            if claimed.flow is not self._flow:
                assert claimed.flow
                self._ticket = ticket = self._tickets.of(claimed.flow)
                self._flow, self._ticket_at = claimed.flow, address_of(ticket.handle)
            bound = 0 if claimed.has_run else binding_time(arrived, end)
            outcome = lane.execute(PlanRun(claimed, arrived, end, bound=bound), self._ticket)
            answer = (outcome is claimed.outcome and claimed.success) or lane.answer(outcome)
            plan.release(claimed)
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            answer = lane.refuse(error)
        self._running = None
        return answer_to(raw, answer)

    def _fail(self, plan: Plan, code: int, status: int, error: BaseException | None) -> bytes:
        """Return the outcome, packed, of a known request that has not begun, was late, or has failed.

        `status`: what its C function has returned. Raise what ends threads.
        """
        if status:
            try:
                error = plan.execution.failure(ErrorStatus(status))
            except Exception as worse:  # noqa: BLE001 (as in _executed)
                error = worse
        said = error_of(self._judged, None if plan.enters_itself else self._ticket, code, error)
        plan.invalidate_outputs()
        return self._lane.refuse(said)

    def _send(self, head: bytes, outcome: bytes) -> None:
        """Send the answer to a message that began like this, when it did not go out at once. Raise PeerDied."""
        self._channel.send_raw(answer_to(head, outcome))

    # ---- what is launched

    def _launch(self, raw: bytes) -> None:
        lane, arrived = self._lane, time.monotonic_ns()
        number, end, duration, _, key = split(raw)
        try:
            schedule = lane.schedule
            lane.check_async(schedule.waiting["client_async"])
            plan = lane.plan(key)
            limits = TimeLimits.of(end, duration).after_binding(plan, arrived)
            execution = AnsweredExecution(number, plan, limits, self)
        except Exception as error:  # noqa: BLE001 (as in _executed)
            self.say(number, lane.failure(error))
            return
        try:
            schedule.launch(number, lambda: execution, [])
        except StatusError as error:
            self.say(number, lane.failure(error))

    def _open_stream(self, raw: bytes) -> None:
        lane, terms = self._lane, unpack_terms(raw)
        try:
            schedule = lane.schedule
            lane.check_async(schedule.waiting["client_async"])
            claim = lane.take("end some streams", bytes=len(raw))
            stream = RepeatedExecution(terms, lane, self)
            stream.claim = claim
        except Exception as error:  # noqa: BLE001 (as in _executed)
            self.post(answer_to_steps(terms.number, lane.refuse(error), FAILED))
            return

        def alone() -> RepeatedExecution:
            stream.check_alone(schedule.pending.values())
            return stream

        try:
            schedule.launch(terms.number, alone, [])
        except StatusError as error:
            self.post(answer_to_steps(terms.number, lane.refuse(error), FAILED))

    def _launch_behind_fences(self, message: Message) -> None:
        number, end, duration, fences, key = split(message.raw)
        fence, fds, answer = -1, message.take_fds() if message.fds else [], LAUNCHED
        try:
            fence = self._launched(number, TimeLimits.of(end, duration), fences, key, fds=fds)
        except Malformed:
            raise
        except Exception as error:  # noqa: BLE001 (as in _executed)
            answer = self._lane.refuse(error)
        finally:
            if fds:
                close_all(fds)
        self._answer_with(answer_to(message.raw, answer), fence)

    def _answer_with(self, answer: bytes, fence: int) -> None:
        """Answer with a fence. Raise PeerDied, also for a peer that lets fences lie: these count for this account."""
        if fence < 0:
            self._channel.send_raw(answer)
            return
        try:
            if not self._channel.await_reader(READ_WITHIN):
                raise PeerDied(f"the other side has not read its messages for {READ_WITHIN:g} s")
            self._channel.send_raw(answer, [fence])
        except ResourceExhaustedTransient as error:
            self._channel.send_raw(answer_to(answer, self._lane.refuse(error)))
        finally:
            os.close(fence)

    def _launched(self, number: int, bounds: TimeLimits, fences: int, key: bytes, fds: list[int]) -> int:
        """Return the fence of the execution. Raise StatusError, and as binding does; Malformed for a number in use."""
        lane, schedule, fence, arrived = self._lane, self._lane.schedule, -1, time.monotonic_ns()
        if len(fds) > fences:
            raise InvalidArgument(f"wait_for: {len(fds)} descriptors came for {fences} fences")
        lane.limits.check("client_launched", schedule.waiting["client_launched"], "wait for one of them")
        if fences:
            check_most(fences)
            remedy = f"wait for some of them, as this request brings {fences}"
            lane.limits.check("client_fences", schedule.watched, remedy, fences)
        claim = lane.take("wait for some of them", **price("fenced execution", descriptors=len(fds)))
        try:
            plan = lane.plan_for_fences(key)
        except Malformed as error:
            raise InvalidArgument(str(error)) from error
        check_count(fds, fences)
        if bounds.deadline is not None:
            bounds = bounds.after_binding(plan, arrived)
            check_deadline(bounds)

        def make() -> SignallingExecution:
            nonlocal fence
            execution = SignallingExecution(number, plan, bounds, lane.keep)
            fence, execution.claim = execution.signal.fence, claim
            return execution

        schedule.launch(number, make, fds)
        return fence

    def _told(self, raw: bytes) -> bytes:
        _, execution, *_ = split(raw)
        try:
            outcome, fenced = self._lane.kept(execution)
        except GeneralFailure as error:
            outcome, fenced = self._lane.failure(error), NO_TIMING
        times: bytes = msgpack.packb(fenced)
        return b"\x93" + answer_to(raw, self._lane.answer(outcome))[1:] + times

    # ---- what has no answer

    def _manage(self, message: Message) -> None:
        """Take or free memory, or cancel. Requests that use memory get its error. Raise Malformed."""
        match message.body:
            case ["memory", int(slot), list(plain)] if len(message.fds) == 1:
                if slot in self._slots:
                    raise Malformed(f"slot {slot} stands for other memory")
                if self._lane.memory.register(slot, plain, message.take_fds().pop()):
                    self._slots.add(slot)
            case ["free_memory", *slots]:
                found = self._slots.intersection(checked_slots(slots))
                self._slots -= found
                self._lane.free_memory(found)
            case ["cancel", int(number)]:
                self._lane.cancel(number)
            case ["go_on", int(number), int(room)]:
                self._lane.schedule.give_room(number, room)
                self._check_reads(MOST_ROOM)
            case ["forget", *numbers] if all(type(number) is int for number in numbers):
                self._lane.forget_outcomes(numbers)
            case _:
                raise Malformed(
                    "a message is a request, memory, free_memory, cancel, go_on or forget, in the form of the protocol"
                )

    def _note_lost(self, error: DescriptorsLost) -> None:
        """Give the error to requests that use the memory whose descriptor is lost. Raise it if none would."""
        match Message(error.raw, []).body:
            case ["memory", int(slot), list()] if slot not in self._slots and (found := exhausted(error)):
                if self._lane.memory.note_failure(slot, found):
                    self._slots.add(slot)
            case _:
                raise error
