"""Memory and plans that a device keeps between executions of one client: mapped, and bound.

A plan is a request that was checked and bound once, kept under its bytes. What was proved for those bytes still holds,
because nothing can change what a slot stands for; freeing a slot drops every plan that uses it.

Every request path binds and executes here: the listener of a burst, which recognises packets in C, the plain path,
asynchronous and fenced requests. `CachedExecutor.execute` is the one place that admits a request, waits in the run
queue, runs, judges the end by the deadline and says what came of it; a path decodes, and encodes the `Outcome`. For
packets that it recognises, csrc/burst/listener.c does the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import contextmanager
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np

from burst._core import ffi, lib
from burst.adapted import as_execution
from burst.causes import admit, missed, not_done
from burst.errors import (
    InternalError,
    Malformed,
    MissedDeadlineTransient,
    ResourceExhaustedTransient,
    StatusError,
)
from burst.exhaustion import exhausted
from burst.messages import NO_CAUSE, NO_TIMING, Cause, ErrorStatus, OutputShape, Request, Timing
from burst.request_checks import check_request
from burst.run_queue import FOREVER
from burst.slots import MappingCache
from burst.wire import Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from burst.execution import Execution
    from burst.memory import Memory
    from burst.run_queue import Flow, Ticket
    from burst.wire import RequestPacket

_log = logging.getLogger(__name__)


COMPLETED = int(ffi.cast("uintptr_t", ffi.addressof(lib, "burst_inflight_complete")))
"""The address of the C function that ends what `Execution.launch` has begun."""


class Estimates:
    """A burst_estimate for executions with inputs of the same shapes. Any thread."""

    _MOST = 16

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[object, Any] = {}

    def of(self, request: Request) -> Any:
        """Return the estimate for this request."""
        shapes = tuple(None if a.has_no_value else tuple(a.dimensions) for a in request.inputs)
        with self._lock:
            found = self._found.get(shapes)
            if found is None:
                if len(self._found) >= self._MOST:
                    self._found.clear()
                found = self._found[shapes] = ffi.new("burst_estimate *")
        return found


class DecodedRequest(NamedTuple):
    """A decoded request and the model to bind it to. Its pools are `Memory`, and `Token` for buffers.

    `flow`: of the run queue, where a path serves several.
    """

    packet: RequestPacket
    bind: Callable[[Request], Execution]
    flow: Flow | None = None


class Outcome(NamedTuple):
    """The outcome of one execution, for its path to encode."""

    status: ErrorStatus
    shapes: tuple[OutputShape, ...] = ()
    timing: Timing = NO_TIMING
    text: str = ""
    cause: Cause = NO_CAUSE


Encode = Callable[[Outcome], bytes]


class RequestCodec(NamedTuple):
    """Decode, encode and memory lookup for one request path.

    decode: a request as its path received it -> what to bind; raises Malformed, StatusError. encode: outcome -> raw
    answer. fetch: slots that the device does not know yet -> their memory, all or nothing; raises StatusError.
    """

    decode: Callable[[Any], DecodedRequest]
    encode: Encode
    fetch: Callable[[list[int]], list[Memory]]


Forget = Callable[[frozenset[int] | None], frozenset[int]]
"""Drops the plans that use one of these slots, or all (None), and returns those of the slots that must not be freed
before a run has ended; then they are freed anew. It is called under the executor's lock, in any thread.
"""


class MemoryCache(Protocol):
    """A client's memory by slot."""

    def resolve(self, slots: Sequence[int], fetch: Callable[[list[int]], list[Memory]]) -> Sequence[Any]:
        """Return what requests have as their pools, for each slot. All or nothing; raises what `fetch` raises."""

    def free(self, slots: Iterable[int]) -> None:
        """Lets the memory of these slots go. An unknown slot is no error."""

    def clear(self) -> None:
        """Frees all."""


def _ended(*_: object) -> NoReturn:
    raise InternalError("this executor was cleared")


def _nothing(_: frozenset[int] | None) -> frozenset[int]:
    """Do nothing with what a client frees after `close`."""
    return frozenset()


_NONE = RequestCodec(_ended, _ended, _ended)


class Plan:
    """A request that was checked and bound: what to run, and the answer where it is known beforehand.

    One thread at a time runs it. Several threads that have the same request to run `claim` it.
    """

    __slots__ = (
        "_bind",
        "_claimed",
        "_spares",
        "estimate",
        "execution",
        "flow",
        "has_run",
        "measure",
        "outcome",
        "run",
        "slots",
        "success",
        "ticket",
    )

    def __init__(self, job: DecodedRequest, request: Request) -> None:
        """Binds. Raises StatusError, and anything that a device raises."""
        packet, self.flow = job.packet, job.flow
        self.slots = frozenset(slot for slot in packet.slots if not isinstance(slot, Token))
        self._bind: Callable[[], Plan] = lambda: Plan(job, request)
        self._claimed, self._spares = threading.Lock(), list[Plan]()
        self.execution = execution = as_execution(job.bind(request))
        self.run, self.measure, self.estimate = execution.run, packet.measure, execution.estimate
        self.ticket: Ticket | None = None  #: of the thread that runs it, where that is always the same
        self.has_run = False  #: the first run takes longer than the others, so the estimate ignores it
        #: of a success, without its times, where the shapes never change
        self.outcome = Outcome(ErrorStatus.NONE, tuple(execution.shapes)) if execution.is_static else None
        self.success: bytes | None = None  #: the same, encoded

    def success_now(self, timing: Timing = NO_TIMING) -> Outcome:
        """Return what came of its run, which has just succeeded."""
        computed = self.execution.time_on_device
        if computed is not None and self.measure:
            timing = timing._replace(time_on_device=computed)
        return Outcome(ErrorStatus.NONE, tuple(self.execution.shapes), timing)

    def claim(self) -> Plan:
        """Return the outcome of its run, which has just succeeded.

        Give it back with `release`. Raises what binding raises.
        """
        if self._claimed.acquire(blocking=False):
            return self
        try:
            return self._spares.pop()
        except IndexError:
            return self._bind()

    def release(self, claimed: Plan) -> None:
        """Give back what `claim` returned. A plan that was cancelled is not given back: it never runs again."""
        if claimed is self:
            self._claimed.release()
        else:
            self._spares.append(claimed)

    def invalidate_outputs(self) -> None:
        """Note that the buffers that it writes have no value: an execution failed, or was not run."""
        for word in self.execution.written:
            word[0] = 1

    def cancel(self) -> None:
        """End its run as soon as possible, where the execution can be cancelled. Its result is not needed any more."""
        self.execution.cancel()


class PlanRun:
    """One execution of a plan. All times are CLOCK_MONOTONIC nanoseconds.

    arrived: when the device received the request. since: when it could have begun, but for other executions; None: when
    it is executed. begun, ended: of the run itself; 0 before.
    """

    begun = ended = _others = 0
    _took = 0  # ns, without the time that others took meanwhile; 0 until it has ended

    def __init__(self, plan: Plan, arrived: int, deadline: int | None = None, since: int | None = None) -> None:
        self.plan, self.arrived, self.since, self._is_first = plan, arrived, since, not plan.has_run
        self.deadline = None if deadline == FOREVER else deadline

    def in_turn(self, ticket: Ticket | None, deadline: int = FOREVER) -> None:
        """Wait for a slot and run. Raises StatusError, and what the execution raises."""
        plan, entered = self.plan, monotonic_ns()
        if ticket is not None:
            ticket.enter(deadline, plan.estimate)
        try:
            self.begun = begun = monotonic_ns()
            plan.run()
            self.ended = monotonic_ns()
        finally:
            if ticket is not None:
                self._others = ticket.leave()
        others = max(0, self._others - (begun - entered)) if self._others else 0
        self._took = self.ended - begun - others
        if self._is_first:
            plan.has_run = True
        elif plan.estimate is not None:
            lib.burst_took(plan.estimate, self._took, 1)

    def in_time(self, ticket: Ticket | None, deadline: int) -> None:
        """Run in turn, if and as long as there is time until its deadline."""
        if self.since is None:
            self.since = monotonic_ns()
        with _due(deadline):
            admit(self.plan.estimate, self.since, deadline)
            try:
                self.in_turn(ticket, deadline)
            except MissedDeadlineTransient as error:
                if not self.begun:
                    raise missed(error.status, "queued", deadline, self.plan.estimate) from None
                if error.phase != "executing" or monotonic_ns() <= deadline:
                    raise  # it waited for others within the device, or a loop has taken too long
                raise self.not_done() from error
        if self.ended > deadline:
            raise self.not_done()

    def not_done(self) -> StatusError:
        """Return the error of a run that began and was not done by its deadline, or was given up."""
        assert self.deadline is not None
        assert self.since is not None
        took = 0 if self._is_first else self._took
        is_unsure = self._is_first or self._others > 0
        return not_done(self.plan.estimate, self.since, self.deadline, took, is_unsure=is_unsure)

    def fail(self, error: Exception) -> None:
        """Note that it failed."""
        plan = self.plan
        plan.invalidate_outputs()
        was_given_up = isinstance(error, StatusError) and error.phase == "executing" and not self.ended
        if was_given_up and plan.estimate is not None and not self._is_first:
            lib.burst_took(plan.estimate, monotonic_ns() - self.begun, 0)

    @property
    def timing(self) -> Timing:
        """The times of a run that has ended."""
        return Timing((self.ended - self.begun) // 1000, (self.ended - self.arrived) // 1000)


@contextmanager
def _due(deadline: int) -> Iterator[None]:
    """Operations in the midst of the run look at it (csrc/burst/deadline.c)."""
    before = lib.burst_due()
    lib.burst_set_due(deadline)
    try:
        yield
    finally:
        lib.burst_set_due(before)


class CachedExecutor:
    """Binds and executes the requests of one client. The owner holds `lock` from binding until `forget` can find the
    new plan.
    """

    def __init__(self, codec: RequestCodec, forget: Forget, memories: MemoryCache | None = None) -> None:
        """`memories`: by default a `MappingCache`."""
        self._codec, self._forget = codec, forget
        self.lock = threading.Lock()
        self._mappings = MappingCache() if memories is None else memories
        self._freed: list[frozenset[int] | None] = []
        self._complain = _log.exception

    def plan(self, request: Any) -> Plan:
        """Check and bind a request. Raises Malformed, StatusError, and anything that a device raises."""
        job = self._codec.decode(request)
        packet = job.packet
        np.seterr(all="ignore")  # in this thread, which runs it: a warning costs as much as a short execution
        check_request(packet.inputs, packet.outputs, len(packet.slots))
        slots = [slot for slot in packet.slots if not isinstance(slot, Token)]
        memories = iter(self._mappings.resolve(slots, self._codec.fetch))
        pools = tuple(slot if isinstance(slot, Token) else next(memories) for slot in packet.slots)
        bound = self._bound(job, Request(packet.inputs, packet.outputs, pools, packet.loop_timeout))
        if bound.outcome:
            bound.success = self._codec.encode(bound.outcome)
        return bound

    def _bound(self, job: DecodedRequest, request: Request) -> Plan:
        try:
            return Plan(job, request)
        except ResourceExhaustedTransient:
            self._forget(None)  # plans cost less to make anew than a refusal
            return Plan(job, request)

    def execute(self, run: PlanRun, ticket: Ticket | None) -> Outcome:
        """Admits, waits for a slot, runs and judges, as for every request however it came. Never raises."""
        try:
            if run.deadline is None:
                run.in_turn(ticket)
            else:
                run.in_time(ticket, run.deadline)
            known, measure = run.plan.outcome, run.plan.measure
            if known and not measure:
                return known
            return run.plan.success_now(run.timing if measure else NO_TIMING)
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            run.fail(error)
            return self.failure(error)

    def failure(self, error: Exception) -> Outcome:
        """Return the outcome of a request that failed. Never raises."""
        if isinstance(error, StatusError):
            insufficient = error.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE  # no other error has shapes
            shapes = error.result.output_shapes if insufficient and error.result else ()
            return Outcome(error.status, shapes, NO_TIMING, str(error), cause=error.as_cause())
        if found := exhausted(error):
            return Outcome(found.status, text=str(found))
        if not isinstance(error, Malformed):
            self._complain("an execution failed in an unforeseen way: %r", error)
            self._complain = _log.debug  # once per client, which could repeat this for ever
        return Outcome(ErrorStatus.GENERAL_FAILURE, text=f"{type(error).__name__}: {error}")

    def answer(self, outcome: Outcome, plan: Plan | None = None) -> bytes:
        """Return the outcome, encoded. Never raises: every request gets an answer."""
        if plan and plan.success and outcome is plan.outcome:
            return plan.success
        try:
            return self._codec.encode(outcome)
        except Exception as error:  # noqa: BLE001 (shapes that cannot be encoded)
            return self._codec.encode(self.failure(error))

    def refuse(self, error: Exception) -> bytes:
        """Return the answer to a request that could not be bound. Never raises."""
        return self.answer(self.failure(error))

    def free_memory(self, slots: Iterable[int]) -> None:
        """Frees slots. Returns at once; memory in use is unmapped after the run."""
        self._freed.append(frozenset(slots))
        self.free_when_idle()

    def forget_plans(self) -> None:
        """Check and bind all requests anew, because what they were bound to has changed."""
        self._freed.append(None)
        self.free_when_idle()

    def free_when_idle(self) -> None:
        """Apply what was freed, if the lock is free. Every thread that releases the lock calls this afterwards."""
        while self._freed and self.lock.acquire(blocking=False):
            try:
                while self._freed:
                    slots = self._freed.pop()
                    held = self._forget(slots)
                    if slots is not None:
                        self._mappings.free(slots - held)
            finally:
                self.lock.release()

    def close(self) -> None:
        """Drop everything. Nothing may be answered any more.

        The references to the owner go, too: a device collects no garbage while a burst lives, so there must be no
        cycles.
        """
        with self.lock:
            self._forget(None)
            self._mappings.clear()
            self._codec, self._forget = _NONE, _nothing
