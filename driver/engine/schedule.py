"""The schedule of launched executions: they wait for fences, for a thread, for their end.

An execution is launched now and runs when its fences are signalled. Then it goes to the `ReadyQueue` of its flow, where
a few threads take one after the other into the run queue of the device. Within one flow the run queue is first come,
first served, so that equals all of them waiting in the run queue; and an execution that waits has no thread.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from burst import (
    ErrorStatus,
    GeneralFailure,
    Malformed,
    MissedDeadlineTransient,
    ResourceExhaustedTransient,
    StatusError,
)
from burst._core import ffi, lib
from burst.causes import missed
from burst.channel import close_all
from burst.executor import Outcome, PlanRun, binding_time
from burst.messages import Cause
from driver.protocol.fences import FenceState, is_pending, kinds_of, look
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst.executor import Plan
    from burst.run_queue import Flow, Ticket
    from driver.engine.lane_reader import LaneReader
    from driver.engine.ledger import Claim

_NONE, _GENERAL_FAILURE = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE
_log = logging.getLogger(__name__)
_NEVER = 2**64 - 1
_LONGEST = 1e6  # seconds that one poll may take
_IDLE = 1.0  # seconds that a thread waits for another execution before it ends


class TimeLimits(NamedTuple):
    """The limits of an execution, in ns. deadline: of CLOCK_MONOTONIC. duration: from when all fences are signalled.

    bound: how long it took to bind it, if it was: then it may go on for as long after its deadline (burst_attempt).
    """

    deadline: int | None = None
    duration: int | None = None
    bound: int = 0

    @classmethod
    def of(cls, end: int, duration: int) -> Self:
        """Read them as they travel: FOREVER is no limit."""
        return cls(None if end == FOREVER else end, None if duration == FOREVER else duration)

    def after_binding(self, plan: Plan, since: int) -> Self:
        """Return them for that plan, whose binding began at that time."""
        if plan.has_run or self.deadline is None:
            return self
        return self._replace(bound=binding_time(since, self.deadline))


class LaunchedExecution:
    """An execution, from its launch to its end. A subclass says how the client learns of the end.

    identity: of the fence that it owes, if it owes one. run: None before a thread has taken it. limit: the name of how
    many there may be. socket: with whose end it ends, too.
    """

    limit = ""
    identity: int | None = None
    socket: LaneReader | None = None

    def __init__(self, number: int, plan: Plan, limits: TimeLimits) -> None:
        self.number, self.plan, self._limits = number, plan, limits
        self.begin = time.monotonic_ns()
        self.fenced = 0  #: when its fences were signalled
        self.end = limits.deadline  #: the effective deadline
        self.missing = 0  #: number of fences that are not signalled yet
        self.has_waited = False  #: for another execution: for its fence, or for a thread
        self.fences: list[int] = []  #: those that the watching thread polls
        self.followers: list[LaunchedExecution] = []
        self.run: PlanRun | None = None
        self.ticket: Ticket | None = None
        self.claim: Claim | None = None  #: for its descriptors, until it is gone

    def conclude(self, outcome: Outcome) -> None:
        """Tell the client how it ended. Called once, under the schedule's lock."""
        raise NotImplementedError

    def claimed_plan(self) -> Plan:
        """Return a plan for its run, which no other thread runs. Raise what binding raises."""
        return self.plan.claim()

    def judged(self, outcome: Outcome) -> Outcome:
        """Return the outcome of its run as it counts. Called in the thread that has run it."""
        return outcome

    def invalidate_outputs(self) -> None:
        """Note that the buffers that it writes have no value: it has failed, or was not run."""
        self.plan.invalidate_outputs()

    is_parked = False  #: what goes on has no room for another result

    def goes_on(self, outcome: Outcome) -> bool:
        """Return True if it is to be run again after this outcome. Called under the schedule's lock."""
        del outcome
        return False

    def give_room(self, room: int) -> bool:
        """Have room for so many results; return True if that was what it waited for. Raise Malformed."""
        del room
        return False

    def vanish(self) -> None:
        """End without a run: the client is gone. Called under the schedule's lock."""

    def ready(self) -> None:
        """Begin its duration: all its fences are signalled."""
        self.fenced = time.monotonic_ns()
        duration = self._limits.duration
        if duration is not None and (self.end is None or self.fenced + duration < self.end):
            self.end, self.has_waited = self.fenced + duration, False

    @property
    def _ends_by_duration(self) -> bool:
        return self.end != self._limits.deadline

    @property
    def _could_begin(self) -> int:
        return self.fenced if self._ends_by_duration else self.begin

    @property
    def _bound(self) -> int:
        return 0 if self._ends_by_duration else self._limits.bound

    @property
    def last(self) -> int | None:
        """The time when it is given up."""
        return None if self.end is None else self.end + self._bound

    def begin_run(self, plan: Plan) -> PlanRun:
        """Return its run, with a plan that was claimed for it."""
        since = self._could_begin if self.has_waited else 0
        if self.end is None:
            self.run = PlanRun(plan, self.begin, since=since)
        else:
            self.run = PlanRun(plan, self.begin, self.end, since=since, bound=self._bound)
        return self.run

    def give_up(self) -> None:
        """End its wait in the run queue, and its run if the device can. The result is not needed any more."""
        if self.ticket:
            self.ticket.close()
        if self.run:
            self.run.plan.cancel()

    def missed(self, now: int) -> Outcome | None:
        """Return what to say of it if it is too late by now."""
        if self.end is None or now < self.end + self._bound:
            return None
        error: StatusError
        if self.run and self.run.begun:
            error = self.run.not_done(self.ticket)
        elif self.missing:
            late = (now - self.end) / 1e9
            text = f"it missed its deadline by {late * 1e3:.1f} ms while it waited for fences"
            error = MissedDeadlineTransient(text, cause=Cause("queued", late))
        else:
            known = ffi.NULL if self.plan.estimate is None else self.plan.estimate
            last = self.end + self._bound
            status = lib.burst_admit(known, self._could_begin, max(now, last + 1), last)
            is_transient = status == ErrorStatus.MISSED_DEADLINE_TRANSIENT
            error = missed(status, "queued" if is_transient else "before start", self.end, self.plan.estimate)
        return Outcome(error.status, text=str(error), cause=error.as_cause())


class ReadyQueue:
    """The executions of one flow that are ready, and the threads that run them. Used under the schedule's lock.

    Threads are made when they are needed, at most one for each slot of the device: more could not run at once.
    """

    def __init__(self, lock: threading.RLock, most: int, start: Callable[[ReadyQueue], None]) -> None:
        """Begin empty. `most`: threads. `start`: starts one, which calls `take` until it returns None."""
        self._most, self._start = most, start
        self._changed = threading.Condition(lock)
        self._items: deque[LaunchedExecution] = deque()
        self._threads = self._idle = self._woken = 0
        self.coming = 0  #: threads that are about to look, because they start, were woken or finish an execution
        self._is_over = False

    def put(self, launched: LaunchedExecution) -> None:
        """Add an execution, and see to a thread for it. Raise StatusError where no thread will ever look."""
        self._items.append(launched)
        if len(self._items) <= self.coming:
            return
        if self._idle:
            self._idle -= 1
            self._woken += 1
            self.coming += 1
            self._changed.notify()
        elif self._threads < self._most:
            self._add_thread()
        else:
            launched.has_waited = True

    def _add_thread(self) -> None:
        try:
            self._start(self)
        except (RuntimeError, StatusError) as error:  # the process, or the account, has as many as it may have
            if not self._threads:
                self._items.pop()
                text = f"no thread can be started for executions of this priority: {error}"
                raise ResourceExhaustedTransient(text) from error
            _log.warning("no thread for executions that are ready: %s", error)
        else:
            self._threads += 1
            self.coming += 1

    def remove(self, launched: LaunchedExecution) -> None:
        """Take it out, unless a thread has."""
        with suppress(ValueError):
            self._items.remove(launched)

    def take(self) -> LaunchedExecution | None:
        """Wait for the next execution, and return it. None: the calling thread has to end. It was `coming`."""
        self.coming -= 1
        while not self._is_over:
            if self._items:
                return self._items.popleft()
            self._idle += 1
            self._changed.wait(_IDLE)
            if self._woken:  # perhaps in place of another thread, which then finds nothing
                self._woken -= 1
                self.coming -= 1
            else:
                self._idle -= 1
                if not self._items:
                    break
        self._threads -= 1
        return None

    def stop(self) -> None:
        """Stop: nothing is run any more."""
        self._is_over = True
        self._items.clear()
        self._changed.notify_all()


class FenceSchedule:
    """The executions that one client has launched: which fences each waits for, until when, and in which queue.

    A fence of another pending execution of this client is recognised by its pipe. Its followers become ready
    without a look at any descriptor, so a chain runs inside the device, whatever its client does meanwhile. One thread
    watches all other fences and the deadlines. A fence that never comes costs that thread nothing.
    """

    def __init__(self, slots: int, start: Callable[..., None]) -> None:
        """Begin empty. `slots`: of the device. `start`: starts a thread for a flow, as `ReadyQueue` has it."""
        self.lock = threading.RLock()
        self.pending: dict[int, LaunchedExecution] = {}
        self.waiting: Counter[str] = Counter()  #: how many of them there are, by their limits
        self._slots = slots
        self._start: Callable[..., None] | None = start
        self._queues: dict[Flow, ReadyQueue] = {}
        self._by_fence: dict[int, LaunchedExecution] = {}
        self._watched: dict[int, LaunchedExecution] = {}
        self._full: dict[int, Callable[[], object]] = {}  # sockets whose clients have to read first
        self._is_over = False
        self._next_end = _NEVER  # of those that the watching thread knows
        self._epoll, self._wake = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._epoll.register(self._wake, select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    @property
    def watched(self) -> int:
        """The number of fences of others that executions wait for."""
        return len(self._watched)

    def launch(self, number: int, make: Callable[[], LaunchedExecution], fds: list[int]) -> None:
        """Add the execution that `make` returns, to wait for these fences. Takes from `fds` those that it watches.

        Raise InvalidArgument for a descriptor that is not a fence or is in error, Malformed for a number that is
        pending, and what `make` raises.
        """
        kinds = kinds_of(fds) if fds else []
        with self.lock:
            if self._is_over:
                raise GeneralFailure("the client is gone")
            if number in self.pending:
                raise Malformed(f"{number} numbers an execution that is pending")
            leaders, watched = self._sorted(fds, kinds) if fds else ([], [])
            launched = make()
            for fd in watched:
                fds.remove(fd)
            self._add(launched, leaders, watched)

    def _sorted(self, fds: list[int], kinds: list[str]) -> tuple[list[LaunchedExecution], list[int]]:
        """Return executions that must run before, and fences to watch. Raise InvalidArgument."""
        leaders, watched = [], []
        for n, (fd, kind) in enumerate(zip(fds, kinds, strict=True)):
            leader = self._by_fence.get(os.fstat(fd).st_ino) if kind == "pipe" else None
            if leader:
                leaders.append(leader)
            elif is_pending(n, fd, kind):
                watched.append(fd)
        return leaders, watched

    def _add(self, launched: LaunchedExecution, leaders: list[LaunchedExecution], watched: list[int]) -> None:
        self.pending[launched.number] = launched
        self.waiting[launched.limit] += 1
        if launched.identity is not None:
            self._by_fence[launched.identity] = launched
        launched.missing, launched.fences = len(leaders) + len(watched), list(watched)
        launched.has_waited = bool(launched.missing)
        for leader in leaders:
            leader.followers.append(launched)
        for fd in watched:
            self._watched[fd] = launched
        try:
            for fd in watched:
                self._epoll.register(fd, select.EPOLLIN)
        except OSError as error:
            self._fail(launched, f"the device cannot watch its fences: {error}")
            return
        if not launched.missing:
            self._ready(launched)
        elif launched.end is not None:
            self._note_end(launched)

    def _ready(self, launched: LaunchedExecution) -> None:
        launched.ready()
        try:
            self._queue_of(launched).put(launched)
        except StatusError as error:
            self._settle(launched, Outcome(error.status, text=str(error)))
        else:
            if launched.end is not None:
                self._note_end(launched)

    def _queue_of(self, launched: LaunchedExecution) -> ReadyQueue:
        flow = launched.plan.flow
        assert flow is not None
        queue = self._queues.get(flow)
        if queue is None:
            assert self._start
            start = partial(self._start, flow=flow)
            queue = self._queues[flow] = ReadyQueue(self.lock, self._slots, start)
        return queue

    def _note_end(self, launched: LaunchedExecution) -> None:
        """Wake the watching thread if this deadline is the next one."""
        if (last := launched.last) is not None and last < self._next_end:
            self._next_end = last
            os.eventfd_write(self._wake, 1)

    def take(self, queue: ReadyQueue, ticket: Ticket) -> LaunchedExecution | None:
        """Return the queue's next execution, for this thread to run with that ticket; None: it has to end."""
        with self.lock:
            launched = queue.take()
            if launched:
                launched.ticket = ticket
            return launched

    def finish(self, queue: ReadyQueue, launched: LaunchedExecution, outcome: Outcome) -> bool:
        """Record how a run ended; the calling thread takes from `queue` next.

        Returns False if its client was told before, or is gone: the plan and the ticket cannot be used any more.
        """
        with self.lock:
            queue.coming += 1
            was_awaited = launched.number in self.pending
            if not was_awaited:
                launched.plan.invalidate_outputs()
            elif not launched.goes_on(outcome):
                self._settle(launched, outcome)
            elif not launched.is_parked:
                queue.put(launched)  # for the calling thread, which comes, or for another one
            launched.ticket = None
            return was_awaited

    def give_room(self, number: int, room: int) -> None:
        """Let a stream write so many results in all. Raise Malformed."""
        with self.lock:
            launched = self.pending.get(number)
            if launched and launched.give_room(room):
                self._ready(launched)

    def cancel(self, number: int) -> bool:
        """Give an execution up; its client does not want to know how it ended."""
        with self.lock:
            launched = self.pending.get(number)
            if launched:
                launched.give_up()
                self._settle(launched, Outcome(_GENERAL_FAILURE, text="its client has cancelled it"))
            return launched is not None

    def abandon(self, socket: LaneReader) -> None:
        """Give up what was launched to be answered on a socket that has ended."""
        with self.lock:
            for number in [launched.number for launched in self.pending.values() if launched.socket is socket]:
                self.cancel(number)

    def _fail(self, launched: LaunchedExecution, text: str) -> None:
        self._settle(launched, Outcome(_GENERAL_FAILURE, text=text))

    def _settle(self, launched: LaunchedExecution, outcome: Outcome) -> None:
        """Conclude it. After a failure conclude all its followers, which are not run."""
        work = [(launched, outcome)]
        while work:
            done, outcome = work.pop()
            if not self.pending.pop(done.number, None):
                continue  # another of its leaders failed before
            self.waiting[done.limit] -= 1
            if done.identity is not None:
                del self._by_fence[done.identity]
            if done.fences:
                self._unwatch(list(done.fences))
            if done.fenced and not done.ticket:
                self._queue_of(done).remove(done)
            if outcome.status != _NONE:
                done.invalidate_outputs()
            done.conclude(outcome)
            if outcome.status == _NONE:
                for follower in done.followers:
                    self._one_less(follower)
            else:
                text = f"it waited for fenced execution {done.number}, which ended with {outcome.status.name}"
                work += [(follower, Outcome(_GENERAL_FAILURE, text=text)) for follower in done.followers]

    def _one_less(self, launched: LaunchedExecution) -> None:
        launched.missing -= 1
        if not launched.missing and launched.number in self.pending:
            self._ready(launched)

    def _unwatch(self, fds: list[int]) -> None:
        for fd in fds:
            self._watched.pop(fd).fences.remove(fd)
            with suppress(FileNotFoundError):  # registering it failed
                self._epoll.unregister(fd)  # closing is not enough: other processes hold copies
        close_all(fds)

    def watch(self, after: Callable[[], object]) -> None:
        """Poll fences and enforce deadlines until the end, in the watching thread. `after`: called after each look."""
        seconds: float | None = None
        try:
            while True:
                ready = self._epoll.poll(seconds)
                with self.lock:
                    if self._is_over:
                        break
                    with_room = [found for fd, _ in ready if (found := self.forget_room(fd))]
                    for fd, _ in ready:
                        self._look(fd)
                    seconds = self._expire(time.monotonic_ns())
                for go_on in with_room:
                    go_on()
                del with_room
                after()
        finally:
            self.stop()
            self.close()

    def await_room(self, socket: int, go_on: Callable[[], object]) -> None:
        """Have the watching thread call `go_on` once the socket takes more, or has ended. Raise OSError."""
        with self.lock:
            if not self._is_over:
                self._epoll.register(socket, select.EPOLLOUT)
                self._full[socket] = go_on

    def forget_room(self, socket: int) -> Callable[[], object] | None:
        """Do not watch this socket any more; return what was to be called. Call this before closing it."""
        with self.lock:
            if go_on := self._full.pop(socket, None):
                with suppress(OSError, ValueError):  # the schedule has ended
                    self._epoll.unregister(socket)
            return go_on

    def close(self) -> None:
        """Free the rest. Called last, by the watching thread if there is one."""
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
            self._fail(launched, "a fence that it waited for was set to error")

    def _expire(self, now: int) -> float | None:
        """End executions that are too late; return the seconds left to the next deadline."""
        for launched in list(self.pending.values()):
            if outcome := launched.missed(now):
                launched.give_up()
                self._settle(launched, outcome)
        ends = (launched.last for launched in self.pending.values())
        self._next_end = min((end for end in ends if end is not None), default=_NEVER)
        return None if self._next_end == _NEVER else min(max(0, self._next_end - now) / 1e9, _LONGEST)

    def stop(self) -> None:
        """End all, as the client is gone: set its fences to error and run nothing more."""
        with self.lock:
            if self._is_over:
                return
            self._is_over = True
            for launched in self.pending.values():
                launched.vanish()
                launched.give_up()
            self._unwatch(list(self._watched))
            for held in (self.pending, self._by_fence, self.waiting, self._full):
                held.clear()
            for queue in self._queues.values():
                queue.stop()
            # They refer to the server: break the cycle, as no garbage is collected while a burst is open.
            self._queues.clear()
            self._start = None
            os.eventfd_write(self._wake, 1)


def check_deadline(limits: TimeLimits) -> None:
    """Raise MissedDeadlinePersistent for one that has passed."""
    deadline = limits.deadline
    if deadline is not None and time.monotonic_ns() >= deadline + limits.bound:
        raise missed(ErrorStatus.MISSED_DEADLINE_PERSISTENT, "before start", deadline)
