"""What a device keeps between executions of one client: its memory stays mapped, and its requests stay bound.

A plan is a request that was checked and bound once, kept under its bytes. What was proved for those bytes still holds,
because nothing can change what a slot stands for; freeing a slot drops every plan that uses it.

Every request path binds here: the listener of a burst, which recognises packets in C, the plain path and fenced
requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from burst.errors import InternalError, Malformed, StatusError, status_error
from burst.messages import NO_CAUSE, NO_TIMING, Cause, ErrorStatus, OutputShape, Request
from burst.request_checks import check_request
from burst.slots import MappingCache
from burst.turns import FOREVER
from burst.wire import ResultPacket, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from burst.memory import Memory
    from burst.turns import Ticket
    from burst.wire import RequestPacket

_log = logging.getLogger(__name__)


class Execution(Protocol):
    """One request, bound to its memory, to be run any number of times.

    It may have an attribute `native`: the addresses of a C function `int32_t f(void *context)` that does what `run`
    does, and of its context. If the shapes never change, the listener calls that function instead of `run`, without
    Python and without the GIL, one call at a time. It returns an ErrorStatus and lives as long as the execution. None
    is the same as no attribute. An attribute `failure` is a function from that status to the error that `run` would
    have raised; without one the error says the status alone.

    It may have an attribute `cancel`, which any thread may call when the client is gone: the run in progress ends as
    soon as it can, and later runs end at once. None is the same as no attribute.

    It may have an attribute `estimate`: a burst_estimate of the time that executions of this kind take; runs update it.

    And attributes `copied_bytes`, the bytes of its arguments that each run copies, and `checked_bytes`, how many of
    these it copies only to check them in private memory; 0 where they are missing.
    """

    @property
    def run(self) -> Callable[[], object]:
        """Executes. Raises StatusError."""

    @property
    def shapes(self) -> Sequence[OutputShape]:
        """The shapes of the outputs, after a run."""

    @property
    def is_static(self) -> bool:
        """True when `shapes` never changes."""


class Job(NamedTuple):
    """A decoded request and the model to bind it to. Its pools are `Memory`, and `Token` for buffers.

    `ticket`: its executions wait for their turn with it; None: they do not wait.
    """

    packet: RequestPacket
    bind: Callable[[Request], Execution]
    ticket: Ticket | None = None


Encode = Callable[[ResultPacket, str, Cause], bytes]


class RequestCodec(NamedTuple):
    """Decode, encode and memory lookup for one request path.

    decode: a request as its path received it -> Job; raises Malformed, StatusError. encode: result, text and cause ->
    raw answer. fetch: slots that the device does not know yet -> their memory, all or nothing; raises StatusError.
    """

    decode: Callable[[Any], Job]
    encode: Encode
    fetch: Callable[[list[int]], list[Memory]]


def _ended(*_: object) -> NoReturn:
    raise InternalError("this executor was cleared")


def _nothing(_: frozenset[int] | None) -> None:
    """Takes what a client frees after `close`."""


_NONE = RequestCodec(_ended, _ended, _ended)


class Plan:
    """A request that was checked and bound: what to run, and the answer where it is known beforehand."""

    __slots__ = (
        "_encode",
        "checked",
        "copied",
        "estimate",
        "execution",
        "measure",
        "run",
        "slots",
        "success",
        "ticket",
    )

    def __init__(self, execution: Execution, job: Job, encode: Encode) -> None:
        packet, self.ticket = job.packet, job.ticket
        self.slots = frozenset(slot for slot in packet.slots if not isinstance(slot, Token))
        self.execution, self.run, self.measure, self._encode = execution, execution.run, packet.measure, encode
        self.copied: int = getattr(execution, "copied_bytes", 0)
        self.checked: int = getattr(execution, "checked_bytes", 0)
        self.estimate: Any = getattr(execution, "estimate", None)
        self.success = self._answer() if execution.is_static else None

    def cancel(self) -> None:
        """Ends its run as soon as possible, where the execution can be cancelled. The result is not needed any more."""
        cancel = getattr(self.execution, "cancel", None)
        if cancel is not None:
            cancel()

    def run_in_turn(self, deadline: int | None = None) -> tuple[int, int]:
        """Runs once its ticket has a slot. Returns when the run began and ended, in ns.

        Raises what the execution raises, MissedDeadlineTransient, GeneralFailure.
        """
        ticket = self.ticket
        if ticket is not None:
            ticket.enter(FOREVER if deadline is None else deadline)
        try:
            begin = time.monotonic_ns()
            self.run()
            return begin, time.monotonic_ns()
        finally:
            if ticket is not None:
                ticket.leave()

    def failure(self, status: ErrorStatus) -> Exception:
        """Why the C function of its execution returned that status."""
        failure = getattr(self.execution, "failure", None)
        found: Exception = failure(status) if failure else status_error(status)
        return found

    def answer(self) -> bytes:
        """The answer to the execution that has just succeeded, without its times."""
        return self.success or self._answer()

    def _answer(self) -> bytes:
        return self._encode(ResultPacket(ErrorStatus.NONE, tuple(self.execution.shapes), NO_TIMING), "", NO_CAUSE)


class CachedExecutor:
    """Binds the requests of one client. The owner holds `lock` from binding until `forget` can find the new plan."""

    def __init__(self, codec: RequestCodec, forget: Callable[[frozenset[int] | None], None]) -> None:
        """`forget`: drops the plans that use one of these slots, or all (None). It is called under `lock`, in any
        thread.
        """
        self._codec, self._forget = codec, forget
        self.lock = threading.Lock()
        self._mappings = MappingCache()
        self._freed: list[frozenset[int] | None] = []
        self._complain = _log.exception

    def plan(self, request: Any) -> Plan:
        """Checks and binds a request. Raises Malformed, StatusError, and anything that a device raises."""
        job = self._codec.decode(request)
        packet = job.packet
        check_request(packet.inputs, packet.outputs, len(packet.slots))
        slots = [slot for slot in packet.slots if not isinstance(slot, Token)]
        memories = iter(self._mappings.resolve(slots, self._codec.fetch))
        pools = tuple(slot if isinstance(slot, Token) else next(memories) for slot in packet.slots)
        bound = job.bind(Request(packet.inputs, packet.outputs, pools, packet.loop_timeout))
        return Plan(bound, job, self._codec.encode)

    def refuse(self, error: Exception) -> bytes:
        """The answer to a request that failed. Never raises: every request gets an answer."""
        encode = self._codec.encode
        if isinstance(error, StatusError):
            insufficient = error.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE  # no other error has shapes
            shapes = error.result.output_shapes if insufficient and error.result else ()
            try:
                return encode(ResultPacket(error.status, shapes, NO_TIMING), str(error), error.cause)
            except Exception as worse:  # noqa: BLE001 (shapes that cannot be encoded)
                error = worse
        if not isinstance(error, Malformed):
            self._complain("an execution failed in an unforeseen way: %r", error)
            self._complain = _log.debug  # once per client, which could repeat this for ever
        text = f"{type(error).__name__}: {error}"
        return encode(ResultPacket(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING), text, NO_CAUSE)

    def free_memory(self, slots: Iterable[int]) -> None:
        """Frees slots. Returns at once; memory in use is unmapped after the run."""
        self._freed.append(frozenset(slots))
        self.free_when_idle()

    def forget_plans(self) -> None:
        """Checks and binds all requests anew, because what they were bound to has changed."""
        self._freed.append(None)
        self.free_when_idle()

    def free_when_idle(self) -> None:
        """Applies what was freed, if the lock is free. Every thread that releases the lock calls this afterwards."""
        while self._freed and self.lock.acquire(blocking=False):
            try:
                while self._freed:
                    slots = self._freed.pop()
                    if slots is not None:
                        self._mappings.free(slots)
                    self._forget(slots)
            finally:
                self.lock.release()

    def close(self) -> None:
        """Drops everything. Nothing may be answered any more.

        The references to the owner go, too: a device collects no garbage while a burst lives, so there must be no
        cycles.
        """
        with self.lock:
            self._forget(None)
            self._mappings.clear()
            self._codec, self._forget = _NONE, _nothing
