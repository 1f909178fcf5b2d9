"""The engine's side of launched executions: asynchronous ones, and those that wait for fences.

A client has one connection for each kind. A connection has two threads, one that takes launches and one that watches
fences and deadlines, and while it executes a few for each priority. A waiting execution has no thread.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from burst import (
    ErrorStatus,
    GeneralFailure,
    HardwareBuffer,
    InvalidArgument,
    Malformed,
    Memory,
    PeerDied,
    ResourceExhaustedTransient,
    StatusError,
    Timing,
)
from burst.channel import Channel, Message, close_all, pack
from burst.exhaustion import DescriptorsLost
from burst.messages import NO_CAUSE, NO_TIMING, Cause
from burst.run_queue import Ticket
from burst.serving_thread import ServingThread
from burst.slots import checked_slots
from driver.engine.driver_memory import DriverPool
from driver.engine.ledger import price
from driver.engine.request_worker import RequestWorker
from driver.engine.schedule import FenceSchedule, LaunchedExecution, TimeLimits, check_deadline
from driver.nn import combine_dimensions
from driver.protocol.fences import FenceSignal
from driver.protocol.plain_codec import encode_answer
from driver.protocol.rpc import Reply, serve, take_fd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from burst import Request
    from burst.execution import Execution
    from burst.executor import Outcome, Plan
    from burst.run_queue import Flow
    from driver.engine.ledger import Claim
    from driver.engine.limits import Limits
    from driver.engine.schedule import ReadyQueue
    from driver.nn import Model


MOST_KEPT = 4096  # outcomes that the client has not fetched
MOST_FENCES = 64  # per execution
_FEW = 4  # descriptors that a launch usually brings at most


class LaunchOwner(NamedTuple):
    """What a server of launched executions needs to know of its client.

    model: the binder of the prepared model with that number. flow: where its executions queue.
    memory_from: maps what the client hands over. take: charges what the engine makes for it, as of `Quota`. slots: of
    the device.
    """

    model: Callable[[int], Callable[[Request], Execution]]
    flow: Callable[[int], Flow]
    memory_from: Callable[[Any, int], Memory]
    take: Callable[..., Claim]
    slots: int
    limits: Limits


class LaunchServer:
    """Serves one connection. A subclass says what is said on it."""

    name = "launches"

    def __init__(self, channel: Channel, owner: LaunchOwner, on_end: Callable[[], None]) -> None:
        self.channel, self.limits, self._on_end, self.take = channel, owner.limits, on_end, owner.take
        self.memory_from = owner.memory_from
        self.worker = RequestWorker(owner.model, owner.flow, encode_answer, owner.memory_from)
        self.schedule = FenceSchedule(owner.slots, self._start_thread)
        self.forget_plans = self.worker.forget_plans
        self._context: Context | None = None
        self._thread = ServingThread(self._serve, name=self.name)
        self._watch = ServingThread(self.schedule.watch, self.flush, name="fences")
        self._threads: set[ServingThread] = set()

    def start(self) -> None:
        """Begins to serve. Raises RuntimeError when no thread can be started."""
        try:
            self._watch.start()
            self._thread.start()
        except RuntimeError:
            self._thread.forget()
            self.stop()
            if not self._watch.has_started:
                self._watch.forget()
                self.schedule.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the connection. A running execution is cancelled if the device can; else it finishes first."""
        self.schedule.stop()
        self.worker.stop()
        with suppress(OSError):
            self.channel.shutdown()

    def serve(self) -> None:
        """Takes launches until the peer is gone. Raises PeerDied, Malformed."""
        raise NotImplementedError

    def flush(self) -> None:
        """Sends what there is to say, if anything. Called by any thread, without the schedule's lock."""

    def _serve(self) -> None:
        with ExitStack() as end:  # all of it, whatever fails
            end.callback(self._on_end)
            end.callback(self.worker.close)
            end.callback(self._join)  # first: those threads use the worker
            end.callback(self.channel.close)
            end.callback(self.worker.stop)
            end.callback(self.schedule.stop)
            end.enter_context(suppress(PeerDied, Malformed))
            self.serve()

    def _join(self) -> None:
        for thread in list(self._threads):
            thread.join()

    def plan(self, request: object) -> Plan:
        """The request, checked and bound. Raises Malformed, StatusError."""
        key = pack([request])
        try:
            with self.worker.lock:
                plan = self.worker.find(key) or self.worker.bind(key, request)
        finally:
            self.worker.free_when_idle()
        if self._context is None:
            # Of a thread that has bound: memory is charged to the client, and numpy does not warn.
            self._context = copy_context()
        return plan

    # ---- threads that execute

    def _start_thread(self, queue: ReadyQueue, flow: Flow) -> None:
        assert self._context is not None
        claim = self.take("launch executions of fewer priorities at once", **price("launch thread"))
        threads = list[ServingThread]()
        work = partial(self._work, queue, flow, threads, claim)
        thread = ServingThread(self._context.copy().run, work, name=f"{self.name}-run")
        threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            threads.clear()  # it refers to the claim
            raise
        self._threads.add(thread)  # it ends only with the schedule's lock, which the caller holds

    def _work(self, queue: ReadyQueue, flow: Flow, threads: list[ServingThread], claim: Claim) -> None:
        """`threads`: this one."""
        ticket = Ticket(flow)
        while launched := self.schedule.take(queue, ticket):
            plan, outcome = self._executed(launched, ticket)
            if self.schedule.finish(queue, launched, outcome):
                if plan:
                    launched.plan.release(plan)
            else:
                ticket = Ticket(flow)  # the other was closed
                self.worker.drop(launched.plan)  # it may have been cancelled
            self.flush()
            del launched, plan  # hold no client memory while waiting
        self._threads.difference_update(threads)
        claim.give_back()

    def _executed(self, launched: LaunchedExecution, ticket: Ticket) -> tuple[Plan | None, Outcome]:
        try:
            plan = launched.plan.claim()
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            return None, self.worker.failure(error)
        return plan, self.worker.execute(launched.begin_run(plan), ticket)


# ---- asynchronous executions


class AsyncExecution(LaunchedExecution):
    """Completed by a message."""

    def __init__(
        self, number: int, plan: Plan, deadline: int | None, say: Callable[[int, Outcome, Plan], None]
    ) -> None:
        super().__init__(number, plan, TimeLimits(deadline))
        self._say = say

    def conclude(self, outcome: Outcome) -> None:
        """Says how it ended."""
        self._say(self.number, outcome, self.plan)


class AsyncServer(LaunchServer):
    """Takes requests, and answers each when it is done, in any order."""

    name = "async"

    def __init__(self, channel: Channel, owner: LaunchOwner, on_end: Callable[[], None]) -> None:
        super().__init__(channel, owner, on_end)
        self._outbox: deque[bytes] = deque()
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Takes launches and cancellations, and memory as on the plain path."""
        while True:
            try:
                message = self.channel.receive()
            except DescriptorsLost as error:
                self.worker.note_lost(error)
                continue
            try:
                self.handle(message)
            finally:
                message.close()
            self.flush()

    def handle(self, message: Message) -> None:
        """Takes one message. Raises Malformed."""
        match message.body:
            case ["execute", int(number), list(request), int() | None as deadline]:
                if not 0 <= number < 2**64 or number in self.schedule.pending:
                    raise Malformed(f"{number} does not number a new execution")
                self._launch(number, request, deadline)
            case ["cancel", int(number)]:
                self.schedule.cancel(number)
            case _:
                self.worker.manage(message)

    def _launch(self, number: int, request: list[Any], deadline: int | None) -> None:
        try:
            self.limits.check("client_async", len(self.schedule.pending), "wait for some of them")
            execution = AsyncExecution(number, self.plan(request), _time("deadline", deadline), self._say)
            self.schedule.launch(lambda: execution, [])
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            self._say(number, self.worker.failure(error))

    def _say(self, number: int, outcome: Outcome, plan: Plan | None = None) -> None:
        self._outbox.append(b"\x92" + msgpack.packb(number) + self.worker.answer(outcome, plan))

    def flush(self) -> None:
        """Sends what is to be said."""
        while self._outbox:
            with self._sending, suppress(PeerDied, IndexError):
                self.channel.send_raw(self._outbox.popleft())


# ---- executions with fences


class FencedOutcome(NamedTuple):
    """How an execution ended."""

    status: ErrorStatus
    launched: Timing = NO_TIMING
    fenced: Timing = NO_TIMING
    text: str = ""
    cause: Cause = NO_CAUSE


class FencedExecution(LaunchedExecution):
    """Completed by a fence."""

    def __init__(
        self, number: int, plan: Plan, limits: TimeLimits, keep: Callable[[FencedExecution, FencedOutcome], None]
    ) -> None:
        """Raises OSError."""
        super().__init__(number, plan, limits)
        self._keep, self.is_forgotten = keep, False
        self.signal = FenceSignal()
        self.identity = self.signal.identity

    def conclude(self, outcome: Outcome) -> None:
        """Signals its fence, or sets it to error."""
        times = NO_TIMING, NO_TIMING
        if self.run and outcome.timing != NO_TIMING:
            since_fences = (self.run.ended - self.fenced) // 1000
            times = outcome.timing, Timing(outcome.timing.time_on_device, since_fences)
        self._keep(self, FencedOutcome(outcome.status, *times, outcome.text, outcome.cause))
        if outcome.status == ErrorStatus.NONE:
            self.signal.signal()
        else:
            self.signal.fail()

    def vanish(self) -> None:
        """Sets its fence to error."""
        self.signal.fail()


class FencedServer(LaunchServer):
    """Answers each launch with a fence."""

    name = "fenced"

    def __init__(self, channel: Channel, owner: LaunchOwner, on_end: Callable[[], None]) -> None:
        super().__init__(channel, owner, on_end)
        self._last = 0
        self._kept: dict[int, FencedOutcome] = {}  # under the schedule's lock

    def serve(self) -> None:
        """Answers calls."""
        handlers: dict[str, Callable[..., Reply]] = {
            "memory": self.memory,
            "free_memory": self.free_memory,
            "execute": self.execute,
            "info": self.info,
        }
        with self._few_descriptors() as few:
            serve(self.channel, handlers, partial(self._take_more, few))

    @contextmanager
    def _few_descriptors(self) -> Iterator[int]:
        """Counts some descriptors for as long as the connection lasts, as if a call that brings them always went on: to
        count them call by call would take a tenth of an execution.
        """
        try:
            claim = self.take("open fewer connections", descriptors=_FEW)
        except StatusError:
            yield 0
            return
        with claim:
            yield _FEW

    def _take_more(self, few: int, remedy: str, descriptors: int) -> AbstractContextManager[object]:
        return self.take(remedy, descriptors=descriptors - few) if descriptors > few else nullcontext()

    def memory(self, message: Message, slot: int, plain: object) -> Reply:
        """Registers memory: requests name it by `slot` from now on."""
        self.worker.register(slot, self.memory_from(plain, take_fd(message)))
        return Reply()

    def free_memory(self, _: Message, *slots: int) -> Reply:
        """Forgets that memory."""
        self.worker.free_memory(checked_slots(slots))
        return Reply()

    def execute(
        self,
        message: Message,
        request: object,
        deadline: int | None,
        duration: int | None,
        fences: int,
        forgotten: list[int],
    ) -> Reply:
        """Launches an execution; answers its number and its fence. `fences`: how many descriptors should have come; the
        client sends none for a null fence.
        """
        fds = message.take_fds()
        try:
            self._forget(forgotten)
            bounds = TimeLimits(_time("deadline", deadline), _time("duration", duration))
            if type(fences) is not int or not 0 <= len(fds) <= fences <= MOST_FENCES:
                raise InvalidArgument(
                    f"wait_for: {fences!r:.20} fences; an execution can wait for at most {MOST_FENCES}"
                )
            self._check_room(fences)
            plan = self.plan(request)
            if len(fds) < fences:
                raise InvalidArgument(f"wait_for: {fences - len(fds)} of {fences} fences are null")
            check_deadline(bounds.deadline)
            launched, fence = self._launched(plan, bounds, fds)
            return Reply([launched.number], [fence])
        finally:
            close_all(fds)

    def _check_room(self, fences: int) -> None:
        """Whether one more fits into the client's limits. Raises ResourceExhaustedTransient."""
        self.limits.check("client_launched", len(self.schedule.pending), "wait for one of them")
        watched = self.schedule.watched
        self.limits.check("client_fences", watched, f"wait for some of them, as this request brings {fences}", fences)

    def _launched(self, plan: Plan, bounds: TimeLimits, fds: list[int]) -> tuple[LaunchedExecution, int]:
        """The execution and its fence. Raises InvalidArgument, ResourceExhaustedTransient."""
        fence = -1
        claim = self.take("wait for some of them", **price("fenced execution", descriptors=len(fds)))

        def make() -> FencedExecution:
            nonlocal fence
            execution = FencedExecution(self._last + 1, plan, bounds, self._keep)
            fence, execution.claim = execution.signal.fence, claim
            self._last += 1
            return execution

        try:
            return self.schedule.launch(make, fds), fence
        except OSError as error:
            raise ResourceExhaustedTransient(f"no file descriptors are left for another fence: {error}") from error

    def info(self, _: Message, number: int, forgotten: list[int]) -> Reply:
        """Status, time since the launch, time since the fences were signalled, a text, and a cause if there is one.

        Raises GeneralFailure before the execution has ended.
        """
        self._forget(forgotten)
        with self.schedule.lock:
            if found := self._kept.get(number):
                more = [] if found.cause == NO_CAUSE else [found.cause]
                return Reply([int(found.status), found.launched, found.fenced, found.text[:1000], *more])
            is_pending = number in self.schedule.pending
        state = "is not done yet" if is_pending else "is unknown to this client, or was dropped"
        raise GeneralFailure(f"fenced execution {number!r:.20} {state}")

    def _keep(self, execution: FencedExecution, outcome: FencedOutcome) -> None:
        if not execution.is_forgotten:
            self._kept[execution.number] = outcome
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def _forget(self, numbers: Iterable[int]) -> None:
        """Drops the outcomes of these executions: the client will not fetch them."""
        with self.schedule.lock:
            for number in numbers:
                self._kept.pop(number, None)
                pending = self.schedule.pending.get(number)
                if isinstance(pending, FencedExecution):
                    pending.is_forgotten = True


def check_outputs(model: Model, request: Request) -> None:
    """Raises InvalidArgument unless model and request fix the shapes of all outputs, and their memory suffices."""
    graph = model.main
    for n, (argument, index) in enumerate(zip(request.outputs, graph.outputs, strict=False)):
        operand = graph.operands[index]
        found = combine_dimensions(operand.dimensions, argument.dimensions)
        if found is None or argument.has_no_value:
            continue  # binding refuses it
        if not operand.type.is_scalar and (not found or 0 in found):
            raise InvalidArgument(
                f"output {n}: dimensions {list(found)} are not fully known; a fenced request must give them"
            )
        pool = request.pools[argument.pool] if argument.pool < len(request.pools) else None
        needed = math.prod(found) * operand.type.element_size
        is_whole = isinstance(pool, HardwareBuffer) or (isinstance(pool, DriverPool) and pool.held)
        if isinstance(pool, Memory) and not is_whole and argument.length < needed:
            raise InvalidArgument(
                f"output {n}: {argument.length} bytes are too few for {operand.type.name} {list(found)}"
            )


def _time(name: str, value: object) -> int | None:
    if value is None or (type(value) is int and value >= 0):
        return value
    raise InvalidArgument(f"{name}={value!r:.40}: must be nanoseconds, or nil")
