"""What lasts over several executions of one client: its memory stays mapped, and its requests stay bound.

A request that was checked and bound once is a plan, kept under the bytes that it came as. What was proved for those
bytes still holds, because nothing can change what a slot stands for; freeing a slot drops every plan that uses it.

Both ways into a device bind here: the listener of a burst, which recognises packets in C, and the plain path.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from burst.errors import InternalError, Malformed, StatusError
from burst.messages import NO_CAUSE, NO_TIMING, Cause, ErrorStatus, OutputShape, Request
from burst.slots import MappingCache
from burst.turns import FOREVER
from burst.wire import ResultPacket, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst.memory import Memory
    from burst.turns import Ticket
    from burst.wire import RequestPacket

_log = logging.getLogger(__name__)


class Execution(Protocol):
    """One request, bound to its memory, to be run any number of times.

    It may have an attribute `native`: the addresses of a C function `int32_t f(void *context)` that does what `run`
    does, and of its context. If the shapes never change, the listener then calls that, without Python and without the
    GIL, one call at a time. It returns an ErrorStatus and lives as long as the execution. None is the same as no such
    attribute.

    It may have an attribute `cancel`, to be called in any thread: the run in progress ends as soon as it can, and later
    ones at once; which nobody will see, as it is called when the client is gone. None is the same as no such attribute.

    It may have an attribute `estimate`: a burst_estimate, of what executions of this kind take, which is added to here.

    And attributes `copied_bytes`, what each run copies of its arguments, and `checked_bytes`, how many of these only to
    look at them in private memory; without them that is nothing.
    """

    @property
    def run(self) -> Callable[[], object]:
        """Executes. Raises StatusError."""

    @property
    def shapes(self) -> Sequence[OutputShape]:
        """Of the outputs, once it has run."""

    @property
    def is_static(self) -> bool:
        """True when `shapes` never changes."""


class Job(NamedTuple):
    """A request as it was decoded, and the model that it is for. Its pools are `Memory`, and `Token` for buffers.

    `ticket`: with which its executions wait for their turn, if they do.
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


def _nothing(_: int | None) -> None:
    """What a client frees after its end was gone before."""


_NONE = RequestCodec(_ended, _ended, _ended)


class Plan:
    """A request that was checked and bound: what to run, and what to answer where that is known beforehand."""

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
        """Ends its run as soon as it can, if it can; nobody wants its result any more."""
        cancel = getattr(self.execution, "cancel", None)
        if cancel is not None:
            cancel()

    def run_in_turn(self, deadline: int | None = None) -> tuple[int, int]:
        """Runs when its ticket gets a slot; when that began and ended, in ns.

        Raises what the execution does, MissedDeadlineTransient, GeneralFailure.
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

    def answer(self) -> bytes:
        """To an execution that succeeded just now; its times are not in it yet."""
        return self.success or self._answer()

    def _answer(self) -> bytes:
        return self._encode(ResultPacket(ErrorStatus.NONE, tuple(self.execution.shapes), NO_TIMING), "", NO_CAUSE)


class CachedExecutor:
    """Plans of one client. Its owner holds `lock` while it binds and until the plan is where `forget` finds it."""

    def __init__(self, codec: RequestCodec, forget: Callable[[int | None], None]) -> None:
        """`forget`: drops the plans that use a slot, or all (None); called by whoever finds `lock` free."""
        self._codec, self._forget = codec, forget
        self.lock = threading.Lock()
        self._mappings = MappingCache()
        self._freed: list[int | None] = []
        self._complain = _log.exception

    def plan(self, request: Any) -> Plan:
        """Checks and binds a request. Raises Malformed, StatusError, and whatever a device raises."""
        job = self._codec.decode(request)
        packet = job.packet
        slots = [slot for slot in packet.slots if not isinstance(slot, Token)]
        memories = iter(self._mappings.resolve(slots, self._codec.fetch))
        pools = tuple(slot if isinstance(slot, Token) else next(memories) for slot in packet.slots)
        bound = job.bind(Request(packet.inputs, packet.outputs, pools, packet.loop_timeout))
        return Plan(bound, job, self._codec.encode)

    def refuse(self, error: Exception) -> bytes:
        """The answer to a request that failed. Never raises: whatever a client sends, it is answered."""
        encode = self._codec.encode
        if isinstance(error, StatusError):
            insufficient = error.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE  # no other error has shapes
            shapes = error.result.output_shapes if insufficient and error.result else ()
            try:
                return encode(ResultPacket(error.status, shapes, NO_TIMING), str(error), error.cause)
            except Exception as worse:  # noqa: BLE001 (shapes that cannot be said)
                error = worse
        if not isinstance(error, Malformed):
            self._complain("an execution failed in an unforeseen way: %r", error)
            self._complain = _log.debug  # once per client: it could repeat this for ever
        text = f"{type(error).__name__}: {error}"
        return encode(ResultPacket(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING), text, NO_CAUSE)

    def free_memory(self, slot: int) -> None:
        """The client needs that slot no more. Returns at once; memory in use is let go after the run."""
        self._freed.append(slot)
        self.free_when_idle()

    def forget_plans(self) -> None:
        """What requests were bound to has changed: they are checked and bound anew."""
        self._freed.append(None)
        self.free_when_idle()

    def free_when_idle(self) -> None:
        """Whoever finds the lock free applies what was freed, so the last one to leave it always does."""
        while self._freed and self.lock.acquire(blocking=False):
            try:
                while self._freed:
                    slot = self._freed.pop()
                    if slot is not None:
                        self._mappings.free(slot)
                    self._forget(slot)
            finally:
                self.lock.release()

    def close(self) -> None:
        """Lets everything go. Nothing may be answered any more.

        What leads back to our owner, too: while a burst lives a device collects no garbage, so there must be none.
        """
        with self.lock:
            self._forget(None)
            self._mappings.clear()
            self._codec, self._forget = _NONE, _nothing
