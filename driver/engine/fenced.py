"""The engine's side of fenced executions: launched now, run once their fences are signalled, completed by a fence.

A client has one connection for them, with three threads: one answers calls, one watches fences and deadlines, one runs
what is ready, one execution after the other. A waiting execution has no thread.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, NamedTuple

from burst import (
    ErrorStatus,
    GeneralFailure,
    HardwareBuffer,
    InvalidArgument,
    Memory,
    MissedDeadlinePersistent,
    PeerDied,
    ResourceExhaustedTransient,
    Timing,
)
from burst.channel import Channel, Message, close_all, pack
from burst.slots import checked_slots
from driver.engine.request_worker import RequestWorker
from driver.nn import combine_dimensions
from driver.protocol.fences import FenceSignal, FenceState, kind_of, look
from driver.protocol.rpc import Reply, serve, take_fd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from burst import Request
    from burst.executor import Execution, Plan
    from burst.messages import Cause
    from burst.turns import Flow
    from burst.wire import ResultPacket
    from driver.engine.limits import Limits
    from driver.nn import Model


_MOST_KEPT = 4096  # outcomes that the client has not fetched
_NONE, _GENERAL_FAILURE = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE
_MISSED = ErrorStatus.MISSED_DEADLINE_TRANSIENT


class FencedOutcome(NamedTuple):
    """How an execution ended."""

    status: ErrorStatus
    launched: Timing = Timing()
    fenced: Timing = Timing()
    text: str = ""


class TimeLimits(NamedTuple):
    """In ns. deadline: of CLOCK_MONOTONIC. duration: counted from when all fences are signalled. None: no limit."""

    deadline: int | None
    duration: int | None


class LaunchedExecution:
    """One execution, from its launch to its end. `plan`: None if `request` must be bound again."""

    def __init__(self, number: int, request: object, plan: Plan, bounds: TimeLimits) -> None:
        self.number, self.request, self._bounds = number, request, bounds
        self.plan: Plan | None = plan
        self.context = copy_context()  # of the thread that bound it: memory is charged to the client
        self.begin, self.fenced = time.monotonic_ns(), 0
        self.end = bounds.deadline  #: the effective deadline
        self.missing = 0  #: number of fences that are not signalled yet
        self.fences: list[int] = []  #: those that the watching thread polls
        self.followers: list[LaunchedExecution] = []
        self.is_running = self.is_forgotten = False
        self.signal = FenceSignal()

    def ready(self) -> None:
        """All its fences are signalled: its duration begins."""
        self.fenced = time.monotonic_ns()
        ends = (self._bounds.deadline, None if self._bounds.duration is None else self.fenced + self._bounds.duration)
        self.end = min((end for end in ends if end is not None), default=None)

    def missed(self, now: int) -> str:
        """Why it is too late; empty if it is not."""
        if self.end is None or now < self.end:
            return ""
        what = "waited for fences" if self.missing else "ran" if self.is_running else "was queued"
        return f"it missed its deadline by {(now - self.end) / 1e6:.1f} ms while it {what}"


class FenceSchedule:
    """The executions that one client has launched: which fences each waits for, until when, and with what outcome.

    A fence of another pending execution of this client is recognised by its pipe. Its followers become ready without a
    look at any descriptor, so a chain runs inside the device, whatever its client does meanwhile. One thread watches
    all other fences and the deadlines. A fence that never comes costs that thread nothing.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self._lock = limits, threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pending: dict[int, LaunchedExecution] = {}
        self._by_fence: dict[int, LaunchedExecution] = {}
        self._watched: dict[int, LaunchedExecution] = {}
        self._queue: list[LaunchedExecution] = []
        self._kept: dict[int, FencedOutcome] = {}
        self._last, self._is_over = 0, False
        self._epoll, self._wake = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)

    def check_room(self, fences: int) -> None:
        """Whether one more fits into the client's limits. Raises ResourceExhaustedTransient."""
        self._limits.check("client_launched", len(self._pending), "wait for one of them")
        self._limits.check(
            "client_fences", len(self._watched), f"wait for some of them, as this request brings {fences}", fences
        )

    def launch(self, request: object, plan: Plan, fds: list[int], bounds: TimeLimits) -> tuple[int, int]:
        """Returns its number and its fence, which the caller closes. Takes from `fds` those that it watches.

        Raises InvalidArgument for a descriptor that is not a fence or is in error; MissedDeadlinePersistent,
        ResourceExhaustedTransient.
        """
        if bounds.deadline is not None and bounds.deadline <= time.monotonic_ns():
            late = (time.monotonic_ns() - bounds.deadline) / 1e6
            raise MissedDeadlinePersistent(f"the deadline passed {late:.1f} ms before the execution was launched")
        kinds = [kind_of(fd) for fd in fds]
        if "" in kinds:
            raise InvalidArgument(
                f"wait_for: fence {kinds.index('')} is not a fence: fences are pipes, eventfds and sync files"
            )
        with self._lock:
            leaders, watched = self._sorted(fds, kinds)
            self._last += 1
            try:
                launched = LaunchedExecution(self._last, request, plan, bounds)
            except OSError as error:
                raise ResourceExhaustedTransient(f"no file descriptors are left for another fence: {error}") from error
            for fd in watched:
                fds.remove(fd)
            self._add(launched, leaders, watched)
            return launched.number, launched.signal.fence

    def _sorted(self, fds: list[int], kinds: list[str]) -> tuple[list[LaunchedExecution], list[int]]:
        """Executions that must run before, and fences to watch. Raises InvalidArgument."""
        leaders, watched = [], []
        for n, (fd, kind) in enumerate(zip(fds, kinds, strict=True)):
            leader = self._by_fence.get(os.fstat(fd).st_ino) if kind == "pipe" else None
            if leader:
                leaders.append(leader)
                continue
            match look(fd):
                case FenceState.ACTIVE:
                    watched.append(fd)
                case FenceState.ERROR | FenceState.UNKNOWN:
                    raise InvalidArgument(f"wait_for: fence {n}, {kind}, is already in error")
        return leaders, watched

    def _add(self, launched: LaunchedExecution, leaders: list[LaunchedExecution], watched: list[int]) -> None:
        self._pending[launched.number] = self._by_fence[launched.signal.identity] = launched
        launched.missing, launched.fences = len(leaders) + len(watched), list(watched)
        for leader in leaders:
            leader.followers.append(launched)
        for fd in watched:
            self._watched[fd] = launched
        try:
            for fd in watched:
                self._epoll.register(fd, select.EPOLLIN)
        except OSError as error:
            self._settle(launched, FencedOutcome(_GENERAL_FAILURE, text=f"the device cannot watch its fences: {error}"))
            return
        if not launched.missing:
            self._ready(launched)
        elif launched.end is not None:
            self._rouse()

    def _ready(self, launched: LaunchedExecution) -> None:
        launched.ready()
        self._queue.append(launched)
        self._changed.notify()
        if launched.end is not None:
            self._rouse()

    def _rouse(self) -> None:
        """Wakes the watching thread: there is a new deadline."""
        os.eventfd_write(self._wake, 1)

    def next(self) -> LaunchedExecution | None:
        """Waits for the next execution that is ready; None when the connection has ended."""
        with self._lock:
            self._changed.wait_for(lambda: self._queue or self._is_over)
            if self._is_over:
                return None
            launched = self._queue.pop(0)
            launched.is_running = True
            return launched

    def finish(self, launched: LaunchedExecution, info: FencedOutcome) -> bool:
        """Records the outcome of a run. False if it was too late or the client is gone: the plan may be cancelled."""
        with self._lock:
            if launched.number not in self._pending:
                return False
            late = launched.missed(time.monotonic_ns())
            self._settle(launched, FencedOutcome(_MISSED, text=late) if late else info)
            return not late

    def unbind(self, plan: Plan) -> None:
        """Takes a cancelled plan from all executions that were to run it: they are bound again."""
        with self._lock:
            for launched in self._pending.values():
                if launched.plan is plan:
                    launched.plan = None

    def _settle(self, launched: LaunchedExecution, info: FencedOutcome) -> None:
        """Signals its fence. After a failure, sets it to error, and with it the fences of all its followers."""
        work = [(launched, info)]
        while work:
            done, info = work.pop()
            if not self._pending.pop(done.number, None):
                continue  # another of its leaders failed before
            del self._by_fence[done.signal.identity]
            if not done.is_forgotten:
                self._kept[done.number] = info
            if len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._unwatch(list(done.fences))
            if done in self._queue:
                self._queue.remove(done)
            if info.status == _NONE:
                done.signal.signal()
                for follower in done.followers:
                    self._one_less(follower)
            else:
                done.signal.fail()
                text = f"it waited for fenced execution {done.number}, which ended with {info.status.name}"
                work += [(follower, FencedOutcome(_GENERAL_FAILURE, text=text)) for follower in done.followers]

    def _one_less(self, launched: LaunchedExecution) -> None:
        launched.missing -= 1
        if not launched.missing and launched.number in self._pending:
            self._ready(launched)

    def _unwatch(self, fds: list[int]) -> None:
        for fd in fds:
            self._watched.pop(fd).fences.remove(fd)
            with suppress(FileNotFoundError):  # registering it failed
                self._epoll.unregister(fd)  # closing is not enough: other processes hold copies
        close_all(fds)

    def info(self, number: int) -> FencedOutcome:
        """The outcome of an execution that has ended. Raises GeneralFailure."""
        with self._lock:
            if number in self._kept:
                return self._kept[number]
            state = "is not done yet" if number in self._pending else "is unknown to this client, or was dropped"
            raise GeneralFailure(f"fenced execution {number!r:.20} {state}")

    def forget(self, numbers: Iterable[int]) -> None:
        """Drops the outcomes of these executions: the client will not fetch them."""
        with self._lock:
            for number in numbers:
                self._kept.pop(number, None)
                if number in self._pending:
                    self._pending[number].is_forgotten = True

    def watch(self) -> None:
        """The watching thread: polls fences and enforces deadlines until the end."""
        seconds: float | None = None
        while True:
            ready = self._epoll.poll(seconds)
            with self._lock:
                if self._is_over:
                    break
                for fd, _ in ready:
                    self._look(fd)
                seconds = self._expire(time.monotonic_ns())
        self._epoll.close()
        os.close(self._wake)

    def _look(self, fd: int) -> None:
        if fd == self._wake:
            os.eventfd_read(fd)
        launched = self._watched.get(fd)
        # Look again: the descriptor's number may stand for another fence by now.
        state = look(fd) if launched else FenceState.ACTIVE
        if launched is None or state == FenceState.ACTIVE:
            return
        self._unwatch([fd])
        if state == FenceState.SIGNALED:
            self._one_less(launched)
        else:
            self._settle(launched, FencedOutcome(_GENERAL_FAILURE, text="a fence that it waited for was set to error"))

    def _expire(self, now: int) -> float | None:
        """Ends executions that are too late; returns the seconds left to the next deadline."""
        for launched in list(self._pending.values()):
            if text := launched.missed(now):
                if launched.is_running and launched.plan:
                    launched.plan.cancel()
                self._settle(launched, FencedOutcome(_MISSED, text=text))
        ends = [launched.end for launched in self._pending.values() if launched.end is not None]
        return max(0, min(ends) - now) / 1e9 if ends else None

    def stop(self) -> None:
        """The client is gone: sets all its fences to error and runs nothing more."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            for launched in self._pending.values():
                launched.signal.fail()
                if launched.is_running and launched.plan:
                    launched.plan.cancel()
            self._unwatch(list(self._watched))
            for held in (self._pending, self._by_fence, self._kept):
                held.clear()
            self._queue.clear()
            self._changed.notify_all()
            self._rouse()


MOST_FENCES = 64  # per execution


class FencedServer:
    """Serves one connection."""

    def __init__(
        self,
        channel: Channel,
        model: Callable[[int], Callable[[Request], Execution]],
        flow: Callable[[int], Flow],
        on_end: Callable[[], None],
        limits: Limits,
    ) -> None:
        """`model`: the binder of the prepared model with that number. `flow`: where its executions queue."""
        self._channel, self._on_end = channel, on_end
        self._worker = RequestWorker(model, flow, _encode)
        self._schedule = FenceSchedule(limits)
        self.forget_plans = self._worker.forget_plans
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._serve, "fenced"), (self._schedule.watch, "fences"), (self._run, "fenced-run"))
        ]

    def start(self) -> None:
        """Starts all three threads."""
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        return self._threads[0].is_alive()

    def stop(self) -> None:
        """Ends the connection. A running execution is cancelled if the device can; else it finishes first."""
        self._schedule.stop()
        self._worker.stop()
        with suppress(OSError):
            self._channel.shutdown()

    def _serve(self) -> None:
        handlers: dict[str, Callable[..., Reply]] = {
            "memory": self.memory,
            "free_memory": self.free_memory,
            "execute": self.execute,
            "info": self.info,
        }
        try:
            serve(self._channel, handlers)
        except PeerDied:
            pass
        finally:
            self._schedule.stop()
            self._worker.stop()
            self._channel.close()
            self._threads[-1].join()  # it uses the worker
            self._worker.close()
            self._on_end()

    # ---- calls

    def memory(self, message: Message, slot: int, plain: object) -> Reply:
        """Registers memory: requests name it by `slot` from now on."""
        self._worker.register(slot, Memory.from_wire(plain, take_fd(message)))
        return Reply()

    def free_memory(self, _: Message, *slots: int) -> Reply:
        """Forgets that memory."""
        self._worker.free_memory(checked_slots(slots))
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
            self._schedule.forget(forgotten)
            bounds = TimeLimits(_time("deadline", deadline), _time("duration", duration))
            if type(fences) is not int or not 0 <= len(fds) <= fences <= MOST_FENCES:
                raise InvalidArgument(
                    f"wait_for: {fences!r:.20} fences; an execution can wait for at most {MOST_FENCES}"
                )
            self._schedule.check_room(fences)
            plan = self._plan(request)
            if len(fds) < fences:
                raise InvalidArgument(f"wait_for: {fences - len(fds)} of {fences} fences are null")
            number, fence = self._schedule.launch(request, plan, fds, bounds)
            return Reply([number], [fence])
        finally:
            close_all(fds)

    def info(self, _: Message, number: int, forgotten: list[int]) -> Reply:
        """Status, time since the launch, time since the fences were signalled, and a text."""
        self._schedule.forget(forgotten)
        found = self._schedule.info(number)
        return Reply([int(found.status), found.launched, found.fenced, found.text])

    def _plan(self, request: object) -> Plan:
        """The request, checked and bound. Raises Malformed, StatusError."""
        key = pack([request])
        try:
            with self._worker.lock:
                return self._worker.find(key) or self._worker.bind(key, request)
        finally:
            self._worker.free_when_idle()

    # ---- execution

    def _run(self) -> None:
        while launched := self._schedule.next():
            info = self._executed(launched)
            plan = launched.plan
            if not self._schedule.finish(launched, info) and plan:
                self._worker.drop(plan)  # it may have been cancelled
                self._schedule.unbind(plan)
            del launched, plan  # hold no client memory while waiting

    def _executed(self, launched: LaunchedExecution) -> FencedOutcome:
        try:
            plan = launched.plan = launched.plan or launched.context.run(self._plan, launched.request)
            begin, end = launched.context.run(plan.run_in_turn)
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            status, text = Message(self._worker.refuse(error), []).body
            return FencedOutcome(ErrorStatus(status), text=text)
        if not plan.measure:
            return FencedOutcome(ErrorStatus.NONE)
        spent = (end - begin) // 1000
        since_launch, since_fences = ((end - since) // 1000 for since in (launched.begin, launched.fenced))
        return FencedOutcome(ErrorStatus.NONE, Timing(spent, since_launch), Timing(spent, since_fences))


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
        if isinstance(pool, Memory) and not isinstance(pool, HardwareBuffer) and argument.length < needed:
            raise InvalidArgument(
                f"output {n}: {argument.length} bytes are too few for {operand.type.name} {list(found)}"
            )


def _time(name: str, value: object) -> int | None:
    if value is None or (type(value) is int and value >= 0):
        return value
    raise InvalidArgument(f"{name}={value!r:.40}: must be nanoseconds, or nil")


def _encode(result: ResultPacket, text: str, _: Cause) -> bytes:
    return pack([int(result.status), text[:1000]])
