"""The engine's side of the plain path: one connection, one thread, one call at a time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from burst import ErrorStatus, Malformed, Memory, MissedDeadlineTransient, PeerDied, StatusError, Timing
from burst._core import lib
from burst.channel import Channel, Message
from burst.messages import NO_CAUSE
from burst.slots import checked_slots
from burst.wire import ResultPacket
from driver.deadlines import admit, check, due, usual
from driver.engine.request_worker import RequestWorker
from driver.protocol.plain_codec import EXECUTE, EXECUTE_BY, encode_answer, split_deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Request
    from burst.executor import Execution, Plan
    from burst.turns import Flow


class PlainServer:
    """Serves one connection in a thread of its own."""

    def __init__(
        self,
        channel: Channel,
        model: Callable[[int], Callable[[Request], Execution]],
        flow: Callable[[int], Flow],
        on_end: Callable[[], None],
    ) -> None:
        """`model`: the binder of the prepared model with that number. `flow`: where its executions queue."""
        self._channel, self._on_end = channel, on_end
        self._worker = RequestWorker(model, flow, encode_answer)
        self.answered = 0  #: number of requests so far
        self._thread = threading.Thread(target=self._serve, name="plain", daemon=True)
        self.start = self._thread.start
        self.forget_plans = self._worker.forget_plans

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def bound(self) -> int:
        """Number of plans: requests that need no binding."""
        return self._worker.bound

    def stop(self) -> None:
        """Ends the connection. A running execution is cancelled if the device can; else it finishes first."""
        self._worker.stop()
        self._channel.shutdown()

    def _serve(self) -> None:
        try:
            while True:
                self.handle(self._channel.receive())
        except (PeerDied, Malformed):
            pass
        finally:
            self._channel.close()
            self._worker.close()
            self._on_end()

    def handle(self, message: Message) -> None:
        """Answers a request, or keeps or frees memory. Raises PeerDied, Malformed."""
        try:
            if message.raw.startswith(EXECUTE):
                self._channel.send_raw(self._answer(message.raw))
            elif message.raw.startswith(EXECUTE_BY):
                self._channel.send_raw(self._answer_by(message.raw))
            else:
                self._manage(message)
        finally:
            message.close()  # also descriptors that came with a request, where they do not belong

    def _answer(self, raw: bytes, deadline: int | None = None) -> bytes:
        """Never raises: every request gets an answer, whatever the client sends."""
        worker, arrived = self._worker, time.monotonic_ns()
        self.answered += 1
        plan: Plan | None = None
        worker.lock.acquire()  # by hand: `with` costs twice as much
        try:
            plan = worker.find(raw)
            is_first = plan is None
            plan = plan or worker.bind(raw, Message(raw, []).body[1:])
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
            return worker.refuse(self._hinted(error, plan))
        finally:
            worker.lock.release()
            worker.free_when_idle()

    def _answer_by(self, raw: bytes) -> bytes:
        """The same for a request with a deadline. The deadline comes last and is cut off: a plan is for the rest."""
        try:
            known, deadline = split_deadline(raw)
        except Malformed as error:
            return self._worker.refuse(error)
        with due(deadline):
            return self._answer(known, deadline)

    @staticmethod
    def _hinted(error: Exception, plan: Plan | None) -> Exception:
        """Adds the usual duration to a missed deadline; notes in the estimate that this execution was given up."""
        if isinstance(error, MissedDeadlineTransient) and plan is not None and plan.estimate is not None:
            if error.phase == "executing":
                lib.burst_took(plan.estimate, 0, 0)
            error.retry_after = usual(plan.estimate) or error.retry_after
        return error

    def _manage(self, message: Message) -> None:
        """Registers and frees memory. There is no answer: requests that use bad memory get the error."""
        match message.body:
            case ["memory", int(slot), list(plain)] if len(message.fds) == 1:
                self._worker.register(slot, _mapped(plain, message.take_fds().pop()))
            case ["free_memory", *slots]:
                self._worker.free_memory(checked_slots(slots))
            case _:
                raise Malformed("the plain path takes execute, memory and free_memory")


def _mapped(plain: list[Any], fd: int) -> Memory | StatusError:
    """The memory, or the error that its users will get."""
    try:
        return Memory.from_wire(plain, fd)
    except StatusError as error:
        return type(error)(str(error))  # a fresh one, without its traceback
