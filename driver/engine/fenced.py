"""The engine's side of fenced executions: launched now, run once their fences are signalled, completed by a fence.

A client has one connection for them, with three threads: one answers calls, one watches fences and deadlines, one runs
what is ready, one execution after the other. A waiting execution has no thread.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from burst import ErrorStatus, HardwareBuffer, InvalidArgument, Memory, PeerDied, Timing
from burst.channel import Channel, Message, close_all, pack
from driver.engine.fence_schedule import FencedOutcome, FenceSchedule, LaunchedExecution, TimeLimits
from driver.engine.request_worker import RequestWorker
from driver.nn import combine_dimensions
from driver.protocol.rpc import Reply, serve, take_fd

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Request
    from burst.executor import Execution, Plan
    from burst.messages import Cause
    from burst.turns import Flow
    from burst.wire import ResultPacket
    from driver.engine.limits import Limits
    from driver.nn import Model

MOST_FENCES = 64  # per execution


class FencedServer:
    """Serves one connection."""

    def __init__(
        self,
        channel: Channel,
        model: Callable[[int], Callable[[Request], Execution]],
        flow: Callable[[int], Flow],
        on_end: Callable[[], None],
        limits: Limits,
    ) -> None:
        """`model`: the binder of the prepared model with that number. `flow`: where its executions queue."""
        self._channel, self._on_end = channel, on_end
        self._worker = RequestWorker(model, flow, _encode)
        self._schedule = FenceSchedule(limits)
        self.forget_plans = self._worker.forget_plans
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._serve, "fenced"), (self._schedule.watch, "fences"), (self._run, "fenced-run"))
        ]

    def start(self) -> None:
        """Starts all three threads."""
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        return self._threads[0].is_alive()

    def stop(self) -> None:
        """Ends the connection. A running execution is cancelled if the device can; else it finishes first."""
        self._schedule.stop()
        self._worker.stop()
        with suppress(OSError):
            self._channel.shutdown()

    def _serve(self) -> None:
        handlers: dict[str, Callable[..., Reply]] = {
            "memory": self.memory,
            "free_memory": self.free_memory,
            "execute": self.execute,
            "info": self.info,
        }
        try:
            serve(self._channel, handlers)
        except PeerDied:
            pass
        finally:
            self._schedule.stop()
            self._worker.stop()
            self._channel.close()
            self._threads[-1].join()  # it uses the worker
            self._worker.close()
            self._on_end()

    # ---- calls

    def memory(self, message: Message, slot: int, plain: object) -> Reply:
        """Registers memory: requests name it by `slot` from now on."""
        self._worker.register(slot, Memory.from_wire(plain, take_fd(message)))
        return Reply()

    def free_memory(self, _: Message, slot: int) -> Reply:
        """Forgets that memory."""
        self._worker.free_memory(slot)
        return Reply()

    def execute(
        self,
        message: Message,
        request: object,
        deadline: int | None,
        duration: int | None,
        fences: int,
        forgotten: list[int],
    ) -> Reply:
        """Launches an execution; answers its number and its fence. `fences`: how many descriptors should have come; the
        client sends none for a null fence.
        """
        fds = message.take_fds()
        try:
            self._schedule.forget(forgotten)
            bounds = TimeLimits(_time("deadline", deadline), _time("duration", duration))
            if type(fences) is not int or not 0 <= len(fds) <= fences <= MOST_FENCES:
                raise InvalidArgument(
                    f"wait_for: {fences!r:.20} fences; an execution can wait for at most {MOST_FENCES}"
                )
            self._schedule.check_room(fences)
            plan = self._plan(request)
            if len(fds) < fences:
                raise InvalidArgument(f"wait_for: {fences - len(fds)} of {fences} fences are null")
            number, fence = self._schedule.launch(request, plan, fds, bounds)
            return Reply([number], [fence])
        finally:
            close_all(fds)

    def info(self, _: Message, number: int, forgotten: list[int]) -> Reply:
        """Status, time since the launch, time since the fences were signalled, and a text."""
        self._schedule.forget(forgotten)
        found = self._schedule.info(number)
        return Reply([int(found.status), found.launched, found.fenced, found.text])

    def _plan(self, request: object) -> Plan:
        """The request, checked and bound. Raises Malformed, StatusError."""
        key = pack([request])
        try:
            with self._worker.lock:
                return self._worker.find(key) or self._worker.bind(key, request)
        finally:
            self._worker.free_when_idle()

    # ---- execution

    def _run(self) -> None:
        while launched := self._schedule.next():
            info = self._executed(launched)
            plan = launched.plan
            if not self._schedule.finish(launched, info) and plan:
                self._worker.drop(plan)  # it may have been cancelled
                self._schedule.unbind(plan)
            del launched, plan  # hold no client memory while waiting

    def _executed(self, launched: LaunchedExecution) -> FencedOutcome:
        try:
            plan = launched.plan = launched.plan or launched.context.run(self._plan, launched.request)
            begin, end = launched.context.run(plan.run_in_turn)
        except Exception as error:  # noqa: BLE001 (one bad request must not end a process that serves many)
            status, text = Message(self._worker.refuse(error), []).body
            return FencedOutcome(ErrorStatus(status), text=text)
        if not plan.measure:
            return FencedOutcome(ErrorStatus.NONE)
        spent = (end - begin) // 1000
        since_launch, since_fences = ((end - since) // 1000 for since in (launched.begin, launched.fenced))
        return FencedOutcome(ErrorStatus.NONE, Timing(spent, since_launch), Timing(spent, since_fences))


def check_outputs(model: Model, request: Request) -> None:
    """Raises InvalidArgument unless model and request fix the shapes of all outputs, and their memory suffices."""
    graph = model.main
    for n, (argument, index) in enumerate(zip(request.outputs, graph.outputs, strict=False)):
        operand = graph.operands[index]
        found = combine_dimensions(operand.dimensions, argument.dimensions)
        if found is None or argument.has_no_value:
            continue  # binding refuses it
        if not operand.type.is_scalar and (not found or 0 in found):
            raise InvalidArgument(
                f"output {n}: dimensions {list(found)} are not fully known; a fenced request must give them"
            )
        pool = request.pools[argument.pool] if argument.pool < len(request.pools) else None
        needed = math.prod(found) * operand.type.element_size
        if isinstance(pool, Memory) and not isinstance(pool, HardwareBuffer) and argument.length < needed:
            raise InvalidArgument(
                f"output {n}: {argument.length} bytes are too few for {operand.type.name} {list(found)}"
            )


def _time(name: str, value: object) -> int | None:
    if value is None or (type(value) is int and value >= 0):
        return value
    raise InvalidArgument(f"{name}={value!r:.40}: must be nanoseconds, or nil")


def _encode(result: ResultPacket, text: str, _: Cause) -> bytes:
    return pack([int(result.status), text[:1000]])
