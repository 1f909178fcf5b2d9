"""The plain path: one message there, one back, over a Unix socket.

It carries what a burst carries, as msgpack; memory is registered once, by descriptor, and named by number from then on.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from burst import (
    DeviceBuffer,
    ErrorStatus,
    InvalidArgument,
    Malformed,
    Memory,
    MissedDeadlineTransient,
    OutputShape,
    PeerDied,
    RequestArgument,
    Result,
    StatusError,
    Timeout,
    Timing,
)
from burst.channel import Channel, Message, pack
from burst.executor import CachedExecutor, Execution, Job, Plan, Protocols
from burst.memory import SlotTable
from burst.messages import NO_CAUSE
from burst.server import MAX_PLANS
from burst.turns import Tickets
from burst.wire import RequestPacket, ResultPacket, Token
from driver.deadlines import admit, check, due, nanoseconds, seconds_left, usual
from driver.rpc import cause_in
from fmq._core import lib

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Request
    from burst.messages import Cause
    from burst.turns import Flow


class PlainServer:
    """The engine's side of one connection: a thread that answers one call after the other."""

    def __init__(
        self,
        channel: Channel,
        model: Callable[[int], Callable[[Request], Execution]],
        flow: Callable[[int], Flow],
        on_end: Callable[[], None],
    ) -> None:
        """`model`: binds requests to the prepared model of a number; `flow`: in which its executions wait."""
        self._channel, self._model, self._flow, self._on_end = channel, model, flow, on_end
        self._tickets = Tickets()
        self._registered: dict[int, Memory | StatusError] = {}
        self._executor = CachedExecutor(Protocols(self._decode, _encode, self._fetch), self._forget)
        self._plans: dict[bytes, Plan] = {}
        self._is_ending = False
        self.answered = 0  #: requests
        self._thread = threading.Thread(target=self._serve, name="plain", daemon=True)
        self.start = self._thread.start
        self.forget_plans = self._executor.forget_plans

    @property
    def is_alive(self) -> bool:
        """Until its connection has ended."""
        return self._thread.is_alive()

    @property
    def bound(self) -> int:
        """How many requests it knows, and will not bind again."""
        return len(self._plans)

    def stop(self) -> None:
        """Ends the connection; a running execution is cancelled, or finishes first."""
        self._is_ending = True  # before we look, as for a burst
        for plan in list(self._plans.values()):
            plan.cancel()
        self._tickets.close()
        self._channel.shutdown()

    def _serve(self) -> None:
        try:
            while True:
                self._handle(self._channel.receive())
        except (PeerDied, Malformed):
            pass
        finally:
            self._channel.close()
            self._executor.close()
            self._on_end()

    def _handle(self, message: Message) -> None:
        try:
            if message.raw.startswith(_EXECUTE):
                self._channel.send_raw(self._answer(message.raw))
            elif message.raw.startswith(_EXECUTE_BY):
                self._channel.send_raw(self._answer_by(message.raw))
            else:
                self._manage(message)
        finally:
            message.close()  # of descriptors, too, that came with a request and belong to nothing

    def _answer(self, raw: bytes, deadline: int | None = None) -> bytes:
        """Never raises: whatever a client sends, it gets an answer and the process goes on."""
        executor, arrived = self._executor, time.monotonic_ns()
        self.answered += 1
        plan: Plan | None = None
        executor.lock.acquire()  # by hand: `with` costs twice as much
        try:
            plan = self._plans.get(raw)
            is_first = plan is None
            plan = plan or self._plan(raw)
            if deadline is not None:
                admit(plan.estimate, arrived, deadline)
            begin, end = plan.run_in_turn(deadline)
            if not is_first and plan.estimate is not None:
                lib.burst_took(plan.estimate, end - begin, 1)
            if deadline is not None:
                check("executing", deadline)
            if not plan.measure:
                return plan.answer()
            timing = Timing((end - begin) // 1000, (end - arrived) // 1000)
            return _encode(ResultPacket(ErrorStatus.NONE, tuple(plan.execution.shapes), timing), "", NO_CAUSE)
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            return executor.refuse(self._hinted(error, plan))
        finally:
            executor.lock.release()
            executor.free_when_idle()

    def _answer_by(self, raw: bytes) -> bytes:
        """The same for a request with a deadline, which comes last; without it, it is the one that a plan is for."""
        try:
            known, deadline = _split(raw)
        except Malformed as error:
            return self._executor.refuse(error)
        with due(deadline):
            return self._answer(known, deadline)

    @staticmethod
    def _hinted(error: Exception, plan: Plan | None) -> Exception:
        """An execution that was given up has taken long enough to know that; the same again takes as long as usual."""
        if isinstance(error, MissedDeadlineTransient) and plan is not None and plan.estimate is not None:
            if error.phase == "executing":
                lib.burst_took(plan.estimate, 0, 0)
            error.retry_after = usual(plan.estimate) or error.retry_after
        return error

    def _plan(self, raw: bytes) -> Plan:
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[raw] = plan = self._executor.plan(raw)
        if self._is_ending:
            plan.cancel()
        return plan

    def _forget(self, slot: int | None) -> None:
        self._plans = {raw: p for raw, p in self._plans.items() if slot is not None and slot not in p.slots}

    def _manage(self, message: Message) -> None:
        """Memory comes and goes without an answer: what is wrong with it shows in the execution that uses it."""
        match message.body:
            case ["memory", int(slot), list(plain)] if len(message.fds) == 1:
                self._registered[slot] = _mapped(plain, message.take_fds().pop())
            case ["free_memory", int(slot)]:
                self._registered.pop(slot, None)
                self._executor.free_memory(slot)
            case _:
                raise Malformed("the plain path takes execute, memory and free_memory")

    def _decode(self, raw: bytes) -> Job:
        match Message(raw, []).body:
            case ["execute", number, list(inputs), list(outputs), list(slots), bool(measure), int() | None as loop]:
                arguments = tuple(map(argument_of, inputs)), tuple(map(argument_of, outputs))
                packet = RequestPacket(*arguments, tuple(map(pool_of, slots)), measure, loop)
                return Job(packet, self._model(number), self._tickets.of(self._flow(number)))
            case _:
                raise Malformed("the plain path takes execute(model, inputs, outputs, slots, measure, loop timeout)")

    def _fetch(self, slots: list[int]) -> list[Memory]:
        """Registered memory becomes mapped memory of the executor."""
        return [self._memory(slot) for slot in slots]

    def _memory(self, slot: int) -> Memory:
        match self._registered.get(slot):
            case Memory() as memory:
                return memory
            case None:
                raise InvalidArgument(f"no memory is registered as {slot}")
            case error:
                raise type(error)(f"the memory registered as {slot} cannot be used: {error}")


def _mapped(plain: list[Any], fd: int) -> Memory | StatusError:
    """The memory, or what is wrong with it: nobody waits for an answer now."""
    try:
        return Memory.from_wire(plain, fd)
    except StatusError as error:
        return type(error)(str(error))  # without the frames that it came through


_EXECUTE, _EXECUTE_BY = (
    pack(["execute", *[0] * n])[:9] for n in (6, 7)
)  # how every request begins, and every one with a deadline: the array's head and the method's name
_UINT64 = b"\xcf"  # of msgpack: eight bytes follow, the highest first
_NO_VALUE = RequestArgument(has_no_value=True)


def pool_of(plain: object) -> int | Token:
    """A pool as it travels. Raises Malformed."""
    match plain:
        case int(slot) if type(slot) is int:
            return slot
        case [int(token)]:
            return Token(token)
    raise Malformed(f"{plain!r:.60} is no pool: a slot, or [token]")


def argument_of(plain: object) -> RequestArgument:
    """An argument as it travels. Raises Malformed."""
    match plain:
        case None:
            return _NO_VALUE
        case [int(pool), int(offset), int(length), list(dims)] if min(pool, offset, length) >= 0:
            if all(isinstance(d, int) and 0 <= d < 2**32 for d in dims):
                return RequestArgument(
                    has_no_value=False, pool=pool, offset=offset, length=length, dimensions=tuple(dims)
                )
    raise Malformed(f"{plain!r:.60} is no argument: [pool, offset, length, dimensions] or nil")


def _split(raw: bytes) -> tuple[bytes, int]:
    """A request without its deadline, and that. Raises Malformed."""
    if raw[-9:-8] != _UINT64:
        raise Malformed("a deadline is the last element of execute, an integer of 64 bits without a sign")
    return _EXECUTE[:1] + raw[1:-9], int.from_bytes(raw[-8:])


def _encode(result: ResultPacket, text: str, cause: Cause) -> bytes:
    more = [] if cause == NO_CAUSE else [cause]
    return pack([int(result.status), result.output_shapes, result.timing, text[:1000], *more])


def _decode_answer(raw: bytes) -> tuple[Any, ...]:
    """The fields of a Result."""
    match Message(raw, []).body:
        case [int(status), list(shapes), [device, driver], str(text), *more] if 0 <= status <= max(ErrorStatus):
            found = tuple(OutputShape(tuple(dims), bool(enough)) for dims, enough in shapes)
            return ErrorStatus(status), (), found, Timing(device, driver), text, cause_in(more)
        case _:
            raise Malformed("the device's answer is not one")


class PlainClient:
    """The client's side of one connection. One call at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._slots = channel, SlotTable()
        self._sent: set[int] = set()
        self._last: tuple[int, Request, bool, bytes] | None = None
        self._answer: tuple[bytes, tuple[Any, ...]] = b"", ()

    def execute(self, model: int, request: Request, *, measure: bool, deadline: int | None) -> Result:
        """Raises PeerDied; Timeout at the deadline, after which this connection is of no more use."""
        self._send(model, request, measure, deadline)
        raw = self._channel.receive(seconds_left(deadline)).raw
        if deadline is not None and lib.fmq_now() > deadline:
            raise Timeout("an answer came too late")
        if raw != self._answer[0]:
            self._answer = raw, _decode_answer(raw)
        return Result(*self._answer[1])

    def judged(self, model: int, request: Request, deadline: int, patience: float) -> Result:
        """What the device itself says of a request and its deadline, however late. Raises PeerDied, Timeout."""
        self._send(model, request, False, deadline)
        return Result(*_decode_answer(self._channel.receive(patience).raw))

    def _send(self, model: int, request: Request, measure: bool, deadline: int | None) -> None:
        raw = self._encoded(model, request, measure)
        if deadline is not None:
            raw = _EXECUTE_BY[:1] + raw[1:] + _UINT64 + deadline.to_bytes(8)
        self._channel.send_raw(raw)

    def _encoded(self, model: int, request: Request, measure: bool) -> bytes:
        """Requests are immutable, so the last one is not encoded again."""
        last = self._last
        if last and last[1] is request and (last[0], last[2]) == (model, measure):
            return last[3]
        slots = [[p.token] if isinstance(p, DeviceBuffer) else self._slot(p) for p in request.pools]
        arguments = [[to_plain(a) for a in side] for side in (request.inputs, request.outputs)]
        raw = pack(["execute", model, *arguments, slots, measure, request.loop_timeout])
        self._last = model, request, measure, raw
        return raw

    def _slot(self, memory: Memory) -> int:
        slot = self._slots.slot_of(memory)
        if slot not in self._sent:
            self._channel.send(["memory", slot, memory.to_wire()], [memory.fd])
            self._sent.add(slot)
        return slot

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap it."""
        self._last = None
        slot = self._slots.forget(memory)
        if slot is not None:
            self._sent.discard(slot)
            self._channel.send(["free_memory", slot])

    def close(self) -> None:
        """Ends the connection and frees on the other side what belonged to it."""
        self._channel.close()


def with_loop_timeout(request: Request, seconds: float | None) -> Request:
    """The request with that loop timeout; as it is for None."""
    return request if seconds is None else request._replace(loop_timeout=nanoseconds(seconds))


def to_plain(a: RequestArgument) -> Any:
    """An argument, to travel."""
    return None if a.has_no_value else [a.pool, a.offset, a.length, a.dimensions]
