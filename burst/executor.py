"""Memory and plans that a device keeps between executions of one client: mapped, and bound.

A plan is a request that was checked and bound once, kept under its bytes. What was proved for those bytes still holds,
because nothing can change what a slot stands for; freeing a slot drops every plan that uses it.

Every request path binds and executes here: the listener of a burst, which recognises packets in C, the plain path,
asynchronous and fenced requests. `CachedExecutor.execute` runs one and says what came of it; a path decodes, and
encodes the `Outcome`. csrc/burst/deadline.c decides when it begins and judges its end, also for packets that the
listener recognises (csrc/burst/listener.c).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np

from burst._core import ffi, lib
from burst._hot import HotPlan
from burst.adapted import as_execution
from burst.causes import missed
from burst.ends import address_of
from burst.errors import (
    GeneralFailure,
    InternalError,
    Malformed,
    StatusError,
)
from burst.exhaustion import exhausted, with_room
from burst.messages import NO_CAUSE, NO_TIMING, Cause, ErrorStatus, OutputShape, Request, Timing
from burst.request_checks import check_request
from burst.run_queue import FOREVER
from burst.slots import MappingCache
from burst.wire import Token
from fmq import clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from burst.execution import Execution
    from burst.memory import Memory
    from burst.messages import Phase
    from burst.run_queue import Flow, Ticket
    from burst.wire import RequestPacket

_log = logging.getLogger(__name__)


COMPLETED = address_of(ffi.addressof(lib, "burst_inflight_complete"))
"""The address of the C function that ends what `Execution.launch` has begun."""


class EstimateTable:
    """A burst_estimate for each of `most` keys; one more begins the table anew. Any thread."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._found: dict[object, Any] = {}

    def of(self, key: object, known: int = 0) -> Any:
        """Return the estimate for a key. `known`: ns that it begins with, where it is new."""
        with self._lock:
            found = self._found.get(key)
            if found is None:
                if len(self._found) >= self._most:
                    self._found.clear()
                found = self._found[key] = ffi.new("burst_estimate *")
                found.least_ns = found.usual_ns = known
        return found


class Estimates:
    """A burst_estimate for executions with inputs of the same shapes. Any thread."""

    _MOST = 16

    def __init__(self) -> None:
        self._table = EstimateTable(self._MOST)

    def of(self, request: Request) -> Any:
        """Return the estimate for this request."""
        return self._table.of(tuple([None if a.has_no_value else tuple(a.dimensions) for a in request.inputs]))


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
        """Let the memory of these slots go. An unknown slot is no error."""

    def clear(self) -> None:
        """Free all."""


def with_tokens(slots: Sequence[int | Token], memories: Sequence[Any]) -> tuple[Any, ...]:
    """Return the pools of a request: the memory of each slot in turn, and the tokens between them."""
    if len(slots) == len(memories):
        return tuple(memories)
    found = iter(memories)
    return tuple(slot if isinstance(slot, Token) else next(found) for slot in slots)


def _ended(*_: object) -> NoReturn:
    raise InternalError("this executor was cleared")


def _nothing(_: frozenset[int] | None) -> frozenset[int]:
    """Do nothing with what a client frees after `close`."""
    return frozenset()


_NONE = RequestCodec(_ended, _ended, _ended)


class Plan(HotPlan):
    """A request that was checked and bound: what to run, and the answer where it is known beforehand.

    One thread at a time runs it. Several threads that have the same request to run `claim` it. What is read of it in C
    is in its base.
    """

    __slots__ = ("_bind", "_spares", "estimate", "execution", "fits_fences", "outcome", "slots", "ticket")

    def __init__(self, job: DecodedRequest, request: Request) -> None:
        """Bind it. Raise StatusError, and anything that a device raises."""
        packet, self.flow = job.packet, job.flow
        self.slots: frozenset[int] = frozenset()  #: that its memory has
        self._bind: Callable[[], Plan] = lambda: Plan(job, request)
        self._spares = list[Plan]()
        self.execution = execution = as_execution(job.bind(request))
        self.run, self.measure, self.estimate = execution.run, bool(packet.measure), execution.estimate
        self._function, self._context = execution.native or (0, 0)
        self.enters_itself = bool(execution.enters_itself)
        if self.estimate is not None:
            self._estimate_at = address_of(self.estimate)
        self.ticket: Ticket | None = None  #: of the thread that runs it, where that is always the same
        self.fits_fences = False  #: its outputs were found to be known beforehand
        #: of a success, without its times, where the shapes never change
        self.outcome = Outcome(ErrorStatus.NONE, tuple(execution.shapes)) if execution.is_static else None
        self.success = None  #: the same, encoded

    def success_now(self, timing: Timing = NO_TIMING) -> Outcome:
        """Return the outcome of its run, which has just succeeded."""
        computed = self.execution.time_on_device
        if computed is not None and self.measure:
            timing = timing._replace(time_on_device=computed)
        return Outcome(ErrorStatus.NONE, tuple(self.execution.shapes), timing)

    def claim(self) -> Plan:
        """Return a plan that no other thread is running: this one, a spare, or a newly bound copy.

        Give it back with `release`. Raise what binding raises.
        """
        if self._try_claim():
            return self
        try:
            return self._spares.pop()
        except IndexError:
            return self._bind()

    def release(self, claimed: Plan) -> None:
        """Give back what `claim` returned. A plan that was cancelled is not given back: it never runs again."""
        if claimed is self:
            self._end_claim()
        else:
            self._spares.append(claimed)

    def invalidate_outputs(self) -> None:
        """Note that the buffers that it writes have no value: an execution failed, or was not run."""
        for word in self.execution.written:
            word[0] = 1

    def cancel(self) -> None:
        """End its run as soon as possible, where the execution can be cancelled. Its result is not needed any more."""
        self.execution.cancel()


_TRANSIENT, _GENERAL_FAILURE = ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.GENERAL_FAILURE
_PHASES: dict[int, Phase] = {_TRANSIENT: "queued", ErrorStatus.MISSED_DEADLINE_PERSISTENT: "before start"}
BEFORE = frozenset(_PHASES.values())
"""The phases of an error that is about an execution that did not begin."""


class PlanRun:
    """One execution of a plan, which csrc/burst/deadline.c judges. All times are CLOCK_MONOTONIC nanoseconds.

    arrived: when the device received the request.
    """

    def __init__(
        self,
        plan: Plan,
        arrived: int,
        deadline: int = FOREVER,
        *,
        since: int = 0,
        bound: int = 0,
        judged: Any = None,
    ) -> None:
        """`since`: when it could have begun, but for other executions; 0: when it is executed.

        `bound`: ns in which it was bound before that, if it was. `judged`: the burst_attempt, where there is one.
        """
        self.plan, self.arrived = plan, arrived
        self._judged = ffi.new("burst_attempt *") if judged is None else judged
        estimate = ffi.NULL if plan.estimate is None else plan.estimate
        self._judged[0] = (deadline, since, 0, 0, 0, 0, 0, estimate, not plan.has_run, bound)

    @property
    def begun(self) -> int:
        """The time of its begin; 0 before."""
        begun: int = self._judged.begun
        return begun

    @property
    def ended(self) -> int:
        """The time of its end; 0 before."""
        ended: int = self._judged.done
        return ended

    @property
    def timing(self) -> Timing:
        """The times of a run that has ended."""
        judged = self._judged
        return Timing((judged.done - judged.begun) // 1000, (judged.done - self.arrived) // 1000)

    def run(self, ticket: Ticket | None) -> None:
        """Wait for a slot and run, if and as long as there is time. Raise StatusError, and what the plan raises."""
        run_judged(self._judged, self._run, None if self.plan.enters_itself else ticket)

    def _run(self) -> None:
        self.plan.run()
        self.plan.has_run = True

    def not_done(self, ticket: Ticket | None) -> StatusError:
        """Return the error of a run that has begun with that ticket, and is not done by its deadline. Any thread."""
        in_line = None if self.plan.enters_itself else ticket
        return _missed(self._judged, lib.burst_judge_late(self._judged, in_line.handle if in_line else ffi.NULL))


def binding_time(since: int, deadline: int) -> int:
    """Return the ns that binding has taken since then; 0 if that is little of the time until the deadline."""
    took = clock.now() - since
    return took if took > (deadline - since) // 8 else 0


def run_judged(judged: Any, run: Callable[[], object], ticket: Ticket | None = None) -> None:
    """Wait for a slot and run, if and as long as there is time. `judged`: a burst_attempt.

    Raise StatusError, and what `run` raises.
    """
    handle = ffi.NULL if ticket is None else ticket.handle
    if code := lib.burst_begin_attempt(judged, handle):
        raise _not_begun(judged, code)
    try:
        run()
    except BaseException as error:
        if (said := _end_failed(judged, handle, error)) is not error:
            raise said from error
        raise
    if status := lib.burst_end_attempt(judged, handle, 0):
        raise _missed(judged, status)


def _not_begun(judged: Any, code: int) -> StatusError:
    return GeneralFailure("its client is gone") if code < 0 else _missed(judged, code, _PHASES[code])


def _end_failed(judged: Any, handle: Any, error: BaseException) -> BaseException:
    """End an attempt whose run has raised this, and return what is said of it."""
    was_given_up = isinstance(error, StatusError) and error.status == _TRANSIENT and error.phase not in BEFORE
    status = lib.burst_end_attempt(judged, handle, _TRANSIENT if was_given_up else _GENERAL_FAILURE)
    is_late = was_given_up and judged.done > judged.deadline  # else it waited in the device, or a loop took too long
    return _missed(judged, status) if is_late else error


def error_of(judged: Any, ticket: Ticket | None, code: int, error: BaseException | None) -> Exception:
    """Return what is said of an attempt that was begun in C: it could not begin, or was late, both by their `code`,
    or its run has raised an error.

    Raise what ends threads.
    """
    if error is None:
        return _missed(judged, code) if judged.begun else _not_begun(judged, code)
    said = _end_failed(judged, ffi.NULL if ticket is None else ticket.handle, error)
    if not isinstance(said, Exception):
        raise said
    return said


def _missed(judged: Any, status: int, phase: Phase = "executing") -> StatusError:
    return missed(status, phase, judged.deadline, judged.estimate or None)


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
        """Check and bind a request. Raise Malformed, StatusError, and anything that a device raises."""
        job = self._codec.decode(request)
        packet = job.packet
        np.seterr(all="ignore")  # in this thread, which runs it: a warning costs as much as a short execution
        check_request(packet.inputs, packet.outputs, len(packet.slots))
        slots = [slot for slot in packet.slots if not isinstance(slot, Token)]
        memories = self._mappings.resolve(slots, self._codec.fetch)
        pools = with_tokens(packet.slots, memories)
        whole = Request(packet.inputs, packet.outputs, pools, packet.loop_timeout)
        bound = with_room(partial(Plan, job, whole), partial(self._forget, None))
        bound.slots = frozenset(slots)
        if bound.outcome:
            bound.success = self._codec.encode(bound.outcome)
        return bound

    def execute(self, run: PlanRun, ticket: Ticket | None) -> Outcome:
        """Admit, wait for a slot, run and judge, as for every request however it came. Never raises."""
        try:
            run.run(ticket)
            known, measure = run.plan.outcome, run.plan.measure
            if known and not measure:
                return known
            return run.plan.success_now(run.timing if measure else NO_TIMING)
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            run.plan.invalidate_outputs()
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
        """Free slots. Returns at once; memory in use is unmapped after the run."""
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
