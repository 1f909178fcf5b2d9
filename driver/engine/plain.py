"""The engine's side of the plain path: one connection, one thread, one call at a time."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from burst import Malformed, PeerDied
from burst.channel import Channel, Message
from burst.executor import PlanRun
from burst.exhaustion import DescriptorsLost
from burst.run_queue import Tickets
from burst.serving_thread import ServingThread
from driver.engine.request_worker import RequestWorker
from driver.protocol.plain_codec import EXECUTE, EXECUTE_BY, encode_answer, split_deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Memory, Request
    from burst.execution import Execution
    from burst.executor import Plan
    from burst.run_queue import Flow


class PlainServer:
    """Serves one connection in a thread of its own."""

    def __init__(
        self,
        channel: Channel,
        model: Callable[[int], Callable[[Request], Execution]],
        flow: Callable[[int], Flow],
        memory_from: Callable[[Any, int], Memory],
        on_end: Callable[[], None],
    ) -> None:
        """`model`: the binder of the prepared model with that number. `flow`: where its executions queue.
        `memory_from`: maps what the client hands over.
        """
        self._channel, self._on_end = channel, on_end
        self._worker, self._tickets = RequestWorker(model, flow, encode_answer, memory_from), Tickets()
        self.answered = 0  #: number of requests so far
        self._thread = ServingThread(self._serve, name="plain")
        self.forget_plans = self._worker.forget_plans

    def start(self) -> None:
        """Begins to serve. Raises RuntimeError when no thread can be started."""
        try:
            self._thread.start()
        except RuntimeError:
            self._thread.forget()
            raise

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
        self._tickets.close()
        self._channel.shutdown()

    def _serve(self) -> None:
        with ExitStack() as end:  # all of it, whatever fails
            end.callback(self._on_end)
            end.callback(self._worker.close)
            end.callback(self._channel.close)
            end.enter_context(suppress(PeerDied, Malformed))
            while True:
                try:
                    message = self._channel.receive()
                except DescriptorsLost as error:
                    self._worker.note_lost(error)
                else:
                    self.handle(message)

    def handle(self, message: Message) -> None:
        """Answers a request, or keeps or frees memory. Raises PeerDied, Malformed."""
        try:
            if message.raw.startswith(EXECUTE):
                self._channel.send_raw(self._answer(message.raw))
            elif message.raw.startswith(EXECUTE_BY):
                self._channel.send_raw(self._answer_by(message.raw))
            else:
                self._worker.manage(message)
        finally:
            message.close()  # also descriptors that came with a request, where they do not belong

    def _answer(self, raw: bytes, deadline: int | None = None) -> bytes:
        """Never raises: every request gets an answer, whatever the client sends."""
        worker, arrived = self._worker, time.monotonic_ns()
        self.answered += 1
        worker.lock.acquire()  # by hand: `with` costs twice as much
        try:
            plan = worker.find(raw) or self._bound(raw)
            outcome = worker.execute(PlanRun(plan, arrived, deadline), plan.ticket)
            return (outcome is plan.outcome and plan.success) or worker.answer(outcome)
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            return worker.refuse(error)
        finally:
            worker.lock.release()
            worker.free_when_idle()

    def _bound(self, raw: bytes) -> Plan:
        plan = self._worker.bind(raw, Message(raw, []).body[1:])
        assert plan.flow
        plan.ticket = self._tickets.of(plan.flow)
        return plan

    def _answer_by(self, raw: bytes) -> bytes:
        """The same for a request with a deadline. The deadline comes last and is cut off: a plan is for the rest."""
        try:
            known, deadline = split_deadline(raw)
        except Malformed as error:
            return self._worker.refuse(error)
        return self._answer(known, deadline)
