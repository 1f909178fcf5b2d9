"""The lane of one client: what all its sockets into the engine have in common.

One table of memory, one cache of plans, one schedule of what was launched, one way to an outcome. A socket
(`driver.engine.lane_reader`) only reads messages and writes answers: plain, asynchronous and fenced executions differ
in who runs them, and in who is told.

A plan is kept under the packed bytes of its request, so the same request is decoded, checked and bound once, whatever
way it comes.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import ErrorStatus, GeneralFailure, Request, Timing
from burst.executor import CachedExecutor, DecodedRequest, Outcome, RequestCodec, with_tokens
from burst.exhaustion import with_room
from burst.messages import NO_TIMING
from burst.plan_cache import PlanCache
from burst.run_queue import Ticket
from burst.serving_thread import ServingThread
from burst.wire import Token
from driver.engine.lane_memory import LaneMemory
from driver.engine.ledger import price
from driver.engine.output_checks import check_outputs
from driver.engine.schedule import FenceSchedule, LaunchedExecution, TimeLimits
from driver.protocol.fences import FenceSignal
from driver.protocol.lane_codec import decode_request, encode_outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from burst import Memory
    from burst.execution import Execution
    from burst.executor import Plan
    from burst.run_queue import Flow
    from driver.engine.lane_reader import LaneReader
    from driver.engine.ledger import Claim
    from driver.engine.limits import Limits
    from driver.engine.schedule import ReadyQueue
    from driver.nn import Model

MOST_KEPT = 4096  # outcomes of fenced executions that the client has not asked for


class LaneOwner(NamedTuple):
    """The client as its lane needs to know it.

    bind: the binder of the prepared model with that number. model: that model. flow: where its executions queue.
    memory_from: maps what the client hands over. take: charges what the engine makes for it. enter: called in each
    thread that executes for it. slots: of the device.
    """

    bind: Callable[[int], Callable[[Request], Execution]]
    model: Callable[[int], Model]
    flow: Callable[[int], Flow]
    memory_from: Callable[[Any, int], Memory]
    take: Callable[..., Claim]
    enter: Callable[[], object]
    slots: int
    limits: Limits


class FencedOutcome(NamedTuple):
    """The end of a fenced execution; its times count from the launch, `fenced` from when its fences were signalled."""

    outcome: Outcome
    fenced: Timing


class SignallingExecution(LaunchedExecution):
    """An execution that signals a fence when it has ended. Its outcome is kept until the client asks."""

    limit = "client_launched"

    def __init__(self, number: int, plan: Plan, limits: TimeLimits, keep: Callable[[int, FencedOutcome], None]) -> None:
        """Make its fence. Raise ResourceExhaustedTransient."""
        super().__init__(number, plan, limits)
        self._keep, self.is_forgotten = keep, False
        self.signal = FenceSignal()
        self.identity = self.signal.identity

    def conclude(self, outcome: Outcome) -> None:
        """Signal its fence, or set it to error."""
        if not self.is_forgotten:
            since_fences = NO_TIMING
            if self.run and outcome.timing != NO_TIMING:
                fenced = (self.run.ended - self.fenced) // 1000
                since_fences = Timing(outcome.timing.time_on_device, fenced)
            self._keep(self.number, FencedOutcome(outcome, since_fences))
        if outcome.status == ErrorStatus.NONE:
            self.signal.signal()
        else:
            self.signal.fail()

    def vanish(self) -> None:
        """Set its fence to error."""
        self.signal.fail()


class ClientLane:
    """A client's lane. Any thread may use it. It ends with its client; a socket of it may end before."""

    def __init__(self, owner: LaneOwner) -> None:
        self._owner, self.limits, self.take, self.model = owner, owner.limits, owner.take, owner.model
        self.memory = LaneMemory(owner.memory_from, self._take_with_room)
        codec = RequestCodec(self._decode, encode_outcome, self.memory.resolve)
        self._executor = executor = CachedExecutor(codec, self._forget, self.memory)
        self.execute, self.answer = executor.execute, executor.answer
        self.failure, self.refuse = executor.failure, executor.refuse
        self._plans = PlanCache()  # by their packed requests
        self.known = self._plans.plans  #: which sockets execute without a step of Python
        self._lock, self._changes, self._is_over = threading.Lock(), 0, False
        self.sockets: set[LaneReader] = set()
        self._schedule: FenceSchedule | None = None
        self._threads: set[ServingThread] = set()
        self._kept: dict[int, FencedOutcome] = {}  # under the schedule's lock
        self.due: deque[LaneReader] = deque()  #: sockets that have answers to what was launched

    @property
    def bound(self) -> int:
        """The number of plans: requests that need no binding."""
        return len(self._plans)

    @property
    def answered(self) -> int:
        """The number of requests that were executed in turn, on sockets that are open."""
        return sum(socket.answered for socket in list(self.sockets))

    def enter(self) -> None:
        """Charge the calling thread's memory to the client, and keep numpy from warning. Each thread calls it first."""
        np.seterr(all="ignore")
        self._owner.enter()

    # ---- plans

    def plan(self, key: bytes) -> Plan:
        """Return a packed request, checked and bound. Raise Malformed, StatusError, and whatever the device raises."""
        return self._plans.find(key) or self._bound(key)

    def _bound(self, key: bytes) -> Plan:
        """Bind a request. Keep the plan unless something has changed meanwhile that it may be bound to."""
        before, plan = self._changes, self._executor.plan(key)
        gone: list[Plan | None] = []  # freed without the lock
        with self._lock:
            if self._is_over:
                plan.cancel()
            elif before == self._changes and self.memory.holds(plan.slots):
                gone = self._plans.keep(key, plan)
        del gone
        return plan

    def plan_for_fences(self, key: bytes) -> Plan:
        """Do as `plan`, for a request whose outputs have to be known beforehand."""
        plan = self.plan(key)
        if not plan.fits_fences:
            number, packet = decode_request(key)
            slots = [slot for slot in packet.slots if not isinstance(slot, Token)]
            pools = with_tokens(packet.slots, self.memory.resolve(slots))
            check_outputs(self._owner.model(number), Request(packet.inputs, packet.outputs, pools))
            plan.fits_fences = True
        return plan

    def _decode(self, key: bytes) -> DecodedRequest:
        number, packet = decode_request(key)
        return DecodedRequest(packet, self._owner.bind(number), self._owner.flow(number))

    def forget_plans(self) -> None:
        """Have requests bound anew: what they were bound to has changed."""
        self._forget(None)

    def _take_with_room(self, remedy: str, **figures: int) -> Claim:
        return with_room(partial(self.take, remedy, **figures), self.forget_plans)

    def free_memory(self, slots: Iterable[int]) -> None:
        """Free slots for one socket. Memory stays mapped until no execution uses it."""
        if gone := frozenset(self.memory.release(slots)):
            self._forget(gone)

    def _forget(self, slots: frozenset[int] | None) -> frozenset[int]:
        with self._lock:
            self._changes += 1
        self._plans.forget(slots)
        return frozenset()

    def drop(self, plan: Plan) -> None:
        """Forget a plan that may have been cancelled: the next request like it is bound anew."""
        self._plans.drop(plan)

    # ---- what was launched

    @property
    def schedule(self) -> FenceSchedule:
        """The schedule, with the thread that watches its fences, from the first launch on. Raises StatusError."""
        return self._schedule or self._begin_to_schedule()

    def _begin_to_schedule(self) -> FenceSchedule:
        with self._lock:
            if self._schedule:
                return self._schedule
            if self._is_over:
                raise GeneralFailure("the client is gone")
            claim = self.take("launch executions from fewer connections", **price("launches"))
            try:
                schedule = FenceSchedule(self._owner.slots, self._start_thread)
                watch = ServingThread(self._watch, schedule, claim, name="fences")
                try:
                    watch.start()
                except RuntimeError:
                    watch.forget()
                    schedule.close()
                    raise
            except BaseException:
                claim.give_back()
                raise
            self._schedule = schedule
            return schedule

    def _watch(self, schedule: FenceSchedule, claim: Claim) -> None:
        try:
            schedule.watch(self.flush)
        finally:
            claim.give_back()

    def _start_thread(self, queue: ReadyQueue, flow: Flow) -> None:
        claim = self.take("launch executions of fewer priorities at once", **price("launch thread"))
        threads = list[ServingThread]()
        thread = ServingThread(self._work, queue, flow, threads, claim, name="launched")
        threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            threads.clear()  # it refers to the claim
            raise
        self._threads.add(thread)  # it ends only with the schedule's lock, which the caller holds

    def _work(self, queue: ReadyQueue, flow: Flow, threads: list[ServingThread], claim: Claim) -> None:
        """Run what is ready in one flow. `threads`: this one."""
        self.enter()
        schedule, ticket = self._schedule, Ticket(flow)
        while schedule and (launched := schedule.take(queue, ticket)):
            plan, outcome = self._executed(launched, ticket)
            its = launched.plan  # what goes on has another one for its next run
            if schedule.finish(queue, launched, outcome):
                if plan:
                    its.release(plan)
            else:
                ticket = Ticket(flow)  # the other was closed
                self.drop(its)  # it may have been cancelled
            if self.due:
                self.flush()
            del launched, plan, its  # hold no client memory while waiting
        self._threads.difference_update(threads)
        claim.give_back()
        self._end_if_idle()

    def _executed(self, launched: LaunchedExecution, ticket: Ticket) -> tuple[Plan | None, Outcome]:
        try:
            plan = launched.claimed_plan()
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            return None, self.failure(error)
        return plan, launched.judged(self.execute(launched.begin_run(plan), ticket))

    def flush(self) -> None:
        """Send the answers that are due, as far as sockets take them. Any thread, without the schedule's lock."""
        while self.due:
            with suppress(IndexError):
                self.due.popleft().send_due()

    def await_room(self, socket: int, go_on: Callable[[], object]) -> None:
        """Have the thread that watches fences call this once the socket takes more. Raise StatusError, OSError."""
        self.schedule.await_room(socket, go_on)

    def forget_room(self, socket: int) -> None:
        """Do not watch this socket any more; call this before closing it."""
        if self._schedule:
            self._schedule.forget_room(socket)

    def check_async(self, pending: int) -> None:
        """Raise ResourceExhaustedTransient if so many executions are pending, or not read, that there can be no more.

        Those count, too, whose answers wait for their client to read others.
        """
        unread = sum(socket.unread for socket in list(self.sockets))
        self.limits.check("client_async", pending + unread, "wait for some of them")

    def cancel(self, number: int) -> None:
        """Give an execution up; its client does not want to know how it ended."""
        if self._schedule:
            self._schedule.cancel(number)
            self.flush()

    # ---- outcomes of fenced executions

    def keep(self, number: int, outcome: FencedOutcome) -> None:
        """Keep the outcome for the client. Under the schedule's lock."""
        self._kept[number] = outcome
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def kept(self, number: int) -> FencedOutcome:
        """Return how that execution ended. Raise GeneralFailure before it has."""
        if found := self._kept.get(number):
            return found
        is_pending = self._schedule is not None and number in self._schedule.pending
        state = "is not done yet" if is_pending else "is unknown to this client, or was dropped"
        raise GeneralFailure(f"fenced execution {number} {state}")

    def forget_outcomes(self, numbers: Iterable[int]) -> None:
        """Drop the outcomes of these executions: the client will not ask for them."""
        if not self._schedule:
            return
        with self._schedule.lock:
            for number in numbers:
                self._kept.pop(number, None)
                pending = self._schedule.pending.get(number)
                if isinstance(pending, SignallingExecution):
                    pending.is_forgotten = True

    # ---- the end

    def leave(self, socket: LaneReader, slots: Iterable[int]) -> None:
        """End what was launched to be answered on a socket that has ended, and free that socket's slots."""
        if self._schedule:
            self._schedule.abandon(socket)
        self.free_memory(slots)
        self.sockets.discard(socket)  # from here on another thread may free everything
        self._end_if_idle()

    def stop(self) -> None:
        """End all of it. Running executions are cancelled if the device can; else they finish first."""
        with self._lock:
            self._is_over = True  # first: a plan that another thread binds meanwhile is cancelled there
            schedule = self._schedule
        if schedule:
            schedule.stop()
        self._plans.cancel()
        for socket in list(self.sockets):
            socket.stop()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        """Free everything once the last thread has ended. A device collects no garbage while a burst lives."""
        if self._is_over and not self.sockets and not self._threads:
            self._executor.close()
            self._kept.clear()
            self.due.clear()
