"""An executor with a cache: what lasts over several executions of one client.

Memory stays mapped under its slot, and a request that was checked and bound once stays bound under the bytes it came
as: the next time it costs one dictionary look-up. What was proved for those bytes still holds, because nothing can
change what a slot stands for; freeing a slot drops every plan that uses it.

Both ways into a device use it: the listener of a burst and the plain path differ in how they decode and answer.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from burst.errors import InternalError, Malformed, StatusError
from burst.memory import MappingCache, Memory
from burst.messages import NO_TIMING, ErrorStatus, OutputShape, Request, Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst.wire import RequestPacket

_log = logging.getLogger(__name__)
_MAX_PLANS = 64  # a client that uses more requests binds again


class Execution(Protocol):
    """One request, bound to its memory, to be run any number of times."""

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
    """A request as it was decoded, and the model that it is for."""

    packet: RequestPacket
    bind: Callable[[Request], Execution]


class Protocols(NamedTuple):
    """How one way into a device speaks.

    decode: raw request -> Job; raises Malformed, StatusError. encode: status, shapes, timing, text -> raw answer.
    fetch: slots nobody knows yet -> their memory, all or nothing; raises StatusError.
    """

    decode: Callable[[bytes], Job]
    encode: Callable[[ErrorStatus, Sequence[OutputShape], Timing, str], bytes]
    fetch: Callable[[list[int]], list[Memory]]


def _ended(*_: object) -> NoReturn:
    raise InternalError("this executor was cleared")


_NONE = Protocols(_ended, _ended, _ended)


class _Plan:
    """A request that was checked and bound: what to run, and what to answer where that is known beforehand."""

    __slots__ = ("_encode", "_execution", "_measure", "run", "slots", "success")

    def __init__(self, execution: Execution, packet: RequestPacket, protocols: Protocols) -> None:
        self.slots = frozenset(packet.slots)
        self.run = execution.run
        self._execution, self._measure, self._encode = execution, packet.measure, protocols.encode
        is_constant = execution.is_static and not packet.measure
        self.success = self._encode(ErrorStatus.NONE, execution.shapes, NO_TIMING, "") if is_constant else None

    def answer(self, arrived: int) -> bytes:
        """Executes once. `arrived`: when the request was taken, in CLOCK_MONOTONIC ns."""
        begin = time.monotonic_ns()
        self.run()
        end = time.monotonic_ns()
        timing = Timing((end - begin) // 1000, (end - arrived) // 1000) if self._measure else NO_TIMING
        return self._encode(ErrorStatus.NONE, self._execution.shapes, timing, "")


class CachedExecutor:
    """Answers one client's requests, one at a time."""

    def __init__(self, protocols: Protocols) -> None:
        self._protocols = protocols
        self._lock = threading.Lock()  # held while a request is handled
        self._mappings = MappingCache()
        self._plans: dict[bytes, _Plan] = {}
        self._freed: list[int | None] = []  # slots; None stands for all plans
        self._complain = _log.exception

    def answer(self, raw: bytes) -> bytes:
        """Never raises: whatever a client sends, it gets an answer and the process goes on."""
        lock = self._lock
        lock.acquire()  # by hand: this is every request's way, and `with` costs twice as much
        try:
            plan = self._plans.get(raw)
            if plan is None or plan.success is None:
                return self._answer(raw, plan)
            plan.run()
            return plan.success  # noqa: TRY300 (else: would put the common case last)
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            return self._refuse(error)
        finally:
            lock.release()
            if self._freed:
                self._free_when_idle()

    def _answer(self, raw: bytes, plan: _Plan | None) -> bytes:
        arrived = time.monotonic_ns()
        return (plan or self._plan(raw)).answer(arrived)

    def _refuse(self, error: Exception) -> bytes:
        encode = self._protocols.encode
        if isinstance(error, StatusError):
            insufficient = error.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE  # no other error has shapes
            shapes = error.result.output_shapes if insufficient and error.result else ()
            try:
                return encode(error.status, shapes, NO_TIMING, str(error))
            except Exception as worse:  # noqa: BLE001 (shapes that cannot be said)
                error = worse
        if not isinstance(error, Malformed):
            self._complain("an execution failed in an unforeseen way: %r", error)
            self._complain = _log.debug  # once per client: it could repeat this for ever
        return encode(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING, f"{type(error).__name__}: {error}")

    def free_memory(self, slot: int) -> None:
        """The client needs that slot no more. Returns at once; memory in use is let go after the run."""
        self._freed.append(slot)
        self._free_when_idle()

    def forget_plans(self) -> None:
        """What requests were bound to has changed: checks and binds them anew, once a running execution has ended."""
        self._freed.append(None)
        self._free_when_idle()

    def close(self) -> None:
        """Lets everything go, after a running execution. Nothing may be answered any more.

        What leads back to our owner, too: while a burst lives a device collects no garbage, so there must be none.
        """
        with self._lock:
            self._plans.clear()
            self._mappings.clear()
            self._protocols = _NONE

    def _plan(self, raw: bytes) -> _Plan:
        packet, bind = self._protocols.decode(raw)
        memories = self._mappings.resolve(packet.slots, self._protocols.fetch)
        execution = bind(Request(packet.inputs, packet.outputs, tuple(memories)))
        plan = _Plan(execution, packet, self._protocols)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[raw] = plan
        return plan

    def _free_when_idle(self) -> None:
        """Whoever finds the lock free applies what was freed, so the last one to leave always does."""
        while self._freed and self._lock.acquire(blocking=False):
            try:
                while self._freed:
                    self._free(self._freed.pop())
            finally:
                self._lock.release()

    def _free(self, slot: int | None) -> None:
        if slot is None:
            self._plans.clear()
            return
        self._mappings.free(slot)
        self._plans = {raw: plan for raw, plan in self._plans.items() if slot not in plan.slots}
