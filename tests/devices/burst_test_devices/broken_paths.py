"""Devices that are right on the plain path, and wrong in one way on another, or with another kind of memory.

Run `burst vts burst_test_devices.broken_paths:Hollow`. They reach into the engine that runs them, because that does on
a device's behalf what the kit wants to see done wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst import ErrorStatus, GeneralFailure, Memory, Timing
from burst.executor import Outcome
from burst.memory import HardwareBufferBlob
from driver.devices.reference import ReferenceDevice
from driver.engine import device_memory
from driver.engine.client import EngineClient
from driver.engine.device_memory import ManagedBuffer
from driver.engine.lane import ClientLane, SignallingExecution
from driver.engine.lane_reader import AnsweredExecution
from driver.engine.memory_import import MemoryImporter
from driver.protocol.prepare_arguments import PrepareArguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst.channel import Message
    from burst.executor import Plan
    from driver.engine.device_memory import LoadedModel
    from driver.engine.lane_reader import LaneReader
    from driver.engine.schedule import LaunchedExecution, TimeLimits
    from driver.protocol.rpc import Reply


def _replace(kind: type, **methods: Callable[..., object]) -> None:
    for name, method in methods.items():
        setattr(kind, name, method)


def _executing(change: Callable[[Outcome], Outcome], kind: type[LaunchedExecution], *, runs: bool) -> None:
    """Change the outcomes of what was launched in that way."""
    execute = ClientLane._executed

    def executed(self: ClientLane, launched: LaunchedExecution, ticket: Any) -> Any:
        if not isinstance(launched, kind):
            return execute(self, launched, ticket)
        plan, outcome = execute(self, launched, ticket) if runs else (None, Outcome(ErrorStatus.NONE))
        return plan, change(outcome)

    _replace(ClientLane, _executed=executed)


class Hollow(ReferenceDevice):
    """Answers asynchronous executions without a run."""

    def __init__(self) -> None:
        _executing(lambda outcome: outcome, AnsweredExecution, runs=False)


class Garrulous(ReferenceDevice):
    """Reports times of every asynchronous execution, and longer ones on the device than in the driver."""

    def __init__(self) -> None:
        _executing(lambda outcome: outcome._replace(timing=Timing(3, 2)), AnsweredExecution, runs=True)


class Hasty(ReferenceDevice):
    """Signals the fences of executions without a run."""

    def __init__(self) -> None:
        _executing(lambda outcome: outcome, SignallingExecution, runs=False)


class Exhausted(ReferenceDevice):
    """Fails fenced executions, with a status that the HAL does not allow for want of fences."""

    def __init__(self) -> None:
        _executing(lambda outcome: Outcome(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT), SignallingExecution, runs=True)


class Hopeful(ReferenceDevice):
    """Launches fenced executions whose output shapes are unknown."""

    def __init__(self) -> None:
        _replace(ClientLane, plan_for_fences=ClientLane.plan)


class Private(ReferenceDevice):
    """Works in a copy of hardware buffers."""

    def __init__(self) -> None:
        take = MemoryImporter.__call__

        def copied(self: MemoryImporter, plain: Any, fd: int) -> Memory:
            memory = take(self, plain, fd)
            if not isinstance(memory, HardwareBufferBlob):
                return memory
            copy = Memory.create(memory.nbytes)
            copy.asarray()[:] = memory.asarray()
            return copy

        _replace(MemoryImporter, __call__=copied)


class Curt(ReferenceDevice):
    """Fails asynchronous executions that have a deadline, for no reason."""

    def __init__(self) -> None:
        begin = AnsweredExecution.__init__

        def without_clock(
            self: AnsweredExecution, number: int, plan: Plan, limits: TimeLimits, socket: LaneReader
        ) -> None:
            if limits.deadline is not None:
                raise GeneralFailure("this device has no clock")
            begin(self, number, plan, limits, socket)

        _replace(AnsweredExecution, __init__=without_clock)


class Impatient(ReferenceDevice):
    """Fails preparations that have a deadline, for no reason."""

    def __init__(self) -> None:
        load = EngineClient.load

        def without_clock(
            self: EngineClient, message: Message, file: bytes, takes: list[Any], where: list[Any], *plain: object
        ) -> Reply:
            if PrepareArguments.from_wire(*plain).deadline is not None:
                raise GeneralFailure("this device has no clock")
            return load(self, message, file, takes, where, *plain)

        _replace(EngineClient, load=without_clock)


class Lenient(ReferenceDevice):
    """Allocates buffers for the last prepared model, where there is none of that number."""

    def __init__(self) -> None:
        def any_model(self: EngineClient, number: Any) -> LoadedModel:
            return self._models.get(number) or next(reversed(self._models.values()))

        _replace(EngineClient, _loaded=any_model)


class Elastic(ReferenceDevice):
    """Copies too few bytes into buffers whose dimensions are open, and leaves the rest as it is."""

    def __init__(self) -> None:
        copy, check = ManagedBuffer.copy_from, device_memory._check_size

        def not_too_large(memory: Memory, nbytes: int, what: str) -> None:
            if memory.nbytes >= nbytes:
                check(memory, nbytes, what)

        def lax(self: ManagedBuffer, memory: Memory, dimensions: tuple[int, ...]) -> None:
            vars(device_memory)["_check_size"] = check if self.is_fixed else not_too_large
            try:
                copy(self, memory, dimensions)
            finally:
                vars(device_memory)["_check_size"] = check

        _replace(ManagedBuffer, copy_from=lax)
