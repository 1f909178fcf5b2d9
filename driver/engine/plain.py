"""The engine's side of the plain path."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from burst import (
    ErrorStatus,
    InvalidArgument,
    Malformed,
    Memory,
    MissedDeadlineTransient,
    PeerDied,
    StatusError,
    Timing,
)
from burst._core import lib
from burst.channel import Channel, Message
from burst.executor import CachedExecutor, Execution, Job, Plan, Protocols
from burst.messages import NO_CAUSE
from burst.server import MAX_PLANS
from burst.turns import Tickets
from burst.wire import RequestPacket, ResultPacket
from driver.deadlines import admit, check, due, usual
from driver.protocol.plain_codec import EXECUTE, EXECUTE_BY, argument_of, encode_answer, pool_of, split_deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Request
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
        self._executor = CachedExecutor(Protocols(self._decode, encode_answer, self._fetch), self._forget)
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
            if message.raw.startswith(EXECUTE):
                self._channel.send_raw(self._answer(message.raw))
            elif message.raw.startswith(EXECUTE_BY):
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
            return encode_answer(ResultPacket(ErrorStatus.NONE, tuple(plan.execution.shapes), timing), "", NO_CAUSE)
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            return executor.refuse(self._hinted(error, plan))
        finally:
            executor.lock.release()
            executor.free_when_idle()

    def _answer_by(self, raw: bytes) -> bytes:
        """The same for a request with a deadline, which comes last; without it, it is the one that a plan is for."""
        try:
            known, deadline = split_deadline(raw)
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
