"""The device's side of a burst: a listener thread that takes requests, runs them and answers.

Two ways to make one. `BurstServer(…, bind)` is for a device that can bind a request to memory once and run it many
times: mappings and bound requests are cached, and a request recognised by its bytes costs one dictionary look-up.
`BurstServer.from_prepared_model(…, execute)` is for one that only has a synchronous execution.

The listener is tied to its client: it ends when the client closes its context, breaks the protocol, or dies.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from burst.channel import MAX_FDS, Channel, Message, close_all
from burst.errors import GeneralFailure, InvalidArgument, Malformed, PeerDied, StatusError, Timeout
from burst.memory import MappingCache, Memory
from burst.messages import NO_TIMING, ErrorStatus, OutputShape, Request, Result, Timing
from burst.wire import RequestPacket, decode_request, encode_result
from fmq import Exchange, FmqError, MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fmq import Descriptor

_log = logging.getLogger(__name__)
_CALLBACK_TIMEOUT = 10.0  # seconds that a client has to hand over its memory
_MAX_PLANS = 64  # bound requests kept per burst; a client that needs more binds again
FAILURE_PACKET = encode_result(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)


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


class Plan:
    """A request that was checked and bound: what to run, and what to answer."""

    __slots__ = ("_execution", "_measure", "_success", "run", "slots")

    def __init__(self, execution: Execution, packet: RequestPacket) -> None:
        self.slots = frozenset(packet.slots)
        self.run = execution.run
        self._execution, self._measure = execution, packet.measure
        is_constant = execution.is_static and not packet.measure
        self._success = encode_result(ErrorStatus.NONE, execution.shapes, NO_TIMING) if is_constant else None

    def answer(self, arrived: int) -> bytes:
        """Executes once; the result packet. `arrived`: when the request was taken, in CLOCK_MONOTONIC ns."""
        if self._success is not None:
            self.run()
            return self._success
        begin = time.monotonic_ns()
        self.run()
        end = time.monotonic_ns()
        timing = Timing((end - begin) // 1000, (end - arrived) // 1000) if self._measure else NO_TIMING
        return encode_result(ErrorStatus.NONE, self._execution.shapes, timing)


class BurstServer:
    """One burst. `start` begins listening; `stop` ends it from any thread and does not wait for a running execution."""

    def __init__(
        self,
        requests: Descriptor,
        results: Descriptor,
        callback: Channel,
        bind: Callable[[Request], Execution],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Attaches the client's queues. `bind` gets requests whose pools are `Memory`, mapped once per slot.

        Raises InvalidDescriptor, RoleTaken. `on_end` runs in the listener when it has freed all.
        """
        self._callback, self._bind, self._on_end = callback, bind, on_end
        with MessageQueue.open(requests) as queue:
            self._reader = queue.reader()
        try:
            with MessageQueue.open(results) as queue:
                self._writer = queue.writer()
        except BaseException:
            self._reader.close()
            raise
        self._exchange = Exchange(self._writer, self._reader)
        self._lock = threading.Lock()  # held while a request is handled
        self._mappings = MappingCache()
        self._plans: dict[bytes, Plan] = {}
        self._freed: list[int] = []
        self._thread = threading.Thread(target=self._listen, name="burst-listener", daemon=True)

    @classmethod
    def from_prepared_model(
        cls,
        requests: Descriptor,
        results: Descriptor,
        callback: Channel,
        execute: Callable[[Request], Result],
        on_end: Callable[[], None] = lambda: None,
    ) -> BurstServer:
        """For a device that can only execute synchronously; memory is still mapped once and kept."""
        return cls(requests, results, callback, lambda request: _Synchronous(request, execute), on_end)

    def start(self) -> None:
        """Begins listening."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the burst. A running execution finishes first; its result is dropped."""
        self._callback.shutdown()
        self._reader.close()

    def join(self, timeout: float | None = None) -> None:
        """Waits until the listener has freed everything."""
        self._thread.join(timeout)

    def set_spin(self, seconds: float) -> None:
        """How long the listener polls for the next request before it sleeps."""
        self._reader.spin = seconds

    def free_memory(self, slot: int) -> None:
        """The client needs that slot no more. Returns at once; memory in use is let go after the run."""
        self._freed.append(slot)
        self._free_when_idle()

    def _free_when_idle(self) -> None:
        """Whoever finds the lock free applies what was freed, so the last one to leave always does."""
        while self._freed and self._lock.acquire(blocking=False):
            try:
                while self._freed:
                    self._free(self._freed.pop())
            finally:
                self._lock.release()

    def _free(self, slot: int) -> None:
        self._mappings.free(slot)
        self._plans = {raw: plan for raw, plan in self._plans.items() if slot not in plan.slots}

    def _listen(self) -> None:
        try:
            with self._reader.watch(self._callback.socket):
                self._serve()
        except (FmqError, ValueError) as end:
            _log.debug("a burst ended: %s", end)
        finally:
            self._writer.close()
            self._reader.close()
            self._callback.close()
            with self._lock:
                self._plans.clear()
                self._mappings.clear()
            self._on_end()

    def _serve(self) -> None:
        reply = b""
        exchange, answer = self._exchange, self._answer
        while True:
            try:
                raw = exchange(reply)
            except BufferError:
                if reply == FAILURE_PACKET:
                    raise GeneralFailure("the client does not read its results") from None
                reply = FAILURE_PACKET  # a result that is too long for the channel
            else:
                reply = answer(raw)

    def _answer(self, raw: bytes) -> bytes:
        arrived = time.monotonic_ns()
        try:
            with self._lock:
                plan = self._plans.get(raw) or self._plan(raw)
                reply = plan.answer(arrived)
        except StatusError as error:
            reply = encode_result(error.status, error.result.output_shapes if error.result else (), NO_TIMING)
        except Malformed as error:
            _log.debug("refused a packet: %s", error)
            reply = FAILURE_PACKET
        except Exception:  # noqa: BLE001 (one bad request must not end a process that serves many)
            _log.exception("an execution failed in an unforeseen way")
            reply = FAILURE_PACKET
        if self._freed:
            self._free_when_idle()
        return reply

    def _plan(self, raw: bytes) -> Plan:
        packet = decode_request(raw)
        memories = self._mappings.resolve(packet.slots, self._fetch)
        plan = Plan(self._bind(Request(packet.inputs, packet.outputs, tuple(memories))), packet)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[raw] = plan
        return plan

    def _fetch(self, slots: list[int]) -> list[Memory]:
        """Asks the client, once for all. Raises InvalidArgument for a slot that it does not know."""
        if len(slots) > MAX_FDS:
            raise InvalidArgument(
                f"{len(slots)} new pools in one request; at most {MAX_FDS} can be handed over at once"
            )
        try:
            message = self._callback.call(["get_memories", slots], timeout=_CALLBACK_TIMEOUT)
        except (PeerDied, Timeout) as error:
            raise GeneralFailure(f"the client did not hand over its memory: {error}") from error
        try:
            return _memories(message, len(slots))
        finally:
            message.close()


def _memories(message: Message, expected: int) -> list[Memory]:
    """All or nothing, from a client that is not trusted."""
    match message.body:
        case [0, list(plains)] if len(plains) == len(message.fds) == expected:
            return _map_all(plains, message.take_fds())
        case [int(status), *_] if status != 0:
            raise InvalidArgument("the client knows no memory for a slot of its request")
        case _:
            raise GeneralFailure("the client's answer to get_memories is malformed")


def _map_all(plains: list[Any], fds: list[int]) -> list[Memory]:
    try:
        return [Memory.from_wire(plain, fds.pop(0)) for plain in plains]
    except Malformed as error:
        raise GeneralFailure(f"the client handed over memory that cannot be used: {error}") from error
    finally:
        close_all(fds)


class _Synchronous:
    """Makes an Execution of a synchronous `execute`."""

    is_static = False

    def __init__(self, request: Request, execute: Callable[[Request], Result]) -> None:
        self._request, self._execute = request, execute
        self.shapes: Sequence[OutputShape] = ()

    def run(self) -> None:
        result = self._execute(self._request)
        result.raise_for_status()
        self.shapes = result.output_shapes
