"""A model in several steps: each is executed by its device, and what goes between them stays where it is."""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from burst import (
    DeviceBuffer,
    ErrorStatus,
    HardwareBuffer,
    InvalidArgument,
    Memory,
    OutputShape,
    PeerDied,
    Request,
    Result,
    StatusError,
    Timeout,
    Timing,
)
from burst.errors import timed_out
from burst.memory import VendorMemory
from driver.client.completion import Completion, follow
from driver.client.names import copies, together
from driver.client.session import FAILURES
from driver.client.surface import AnyPreparedModel
from driver.client.workspace import FreeList, InputSet, Workspace, input_shapes, nbytes, output_views
from driver.deadlines import check_times, earlier, nanoseconds, passed, until
from driver.engine.binding import check_arguments
from driver.engine.launched import check_outputs
from driver.engine.named_buffers import check_alone
from driver.errors import OutputInsufficientSize
from driver.options import ExecuteOptions
from driver.runtime.cache.device import CacheOutcome
from driver.runtime.launched import failed_here, follow_all
from driver.runtime.places import arguments, between, with_temporaries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from burst import RequestArgument
    from driver.client.fenced import FencedExecution, Waitable
    from driver.nn import Model
    from driver.options import Options, Preference
    from driver.runtime.cache.device import CachedDevice
    from driver.runtime.chain import Chain
    from driver.runtime.fallback import CpuFallback, FallbackModel
    from driver.runtime.partition import Step


Way: TypeAlias = "Callable[..., Result]"
"""A step's `execute`."""


class PreparedStep(NamedTuple):
    """A step, and where it is prepared."""

    step: Step
    device: str
    model: FallbackModel
    cached: CachedDevice | None = None  #: what looked for it in the cache, if there is one

    def compilation(self) -> dict[str, Any]:
        """As `CompiledModel.stats` has it."""
        outcome, stage = self.cached.outcome if self.cached else CacheOutcome("compiled"), None
        with suppress(PeerDied, StatusError, AttributeError):  # the device is gone, or has no stages
            stage = self.model.prepared.stage
        return {"device": self.device, "outcome": outcome.kind, "reason": outcome.reason, "stage": stage}


class AsyncSteps(NamedTuple):
    """An asynchronous execution on its way. It refers to no execution of a step, whose callbacks refer to this."""

    request: Request
    room: Memory  #: for temporaries
    options: ExecuteOptions
    end: float | None  #: of the timeout, a time.monotonic()
    waiting: deque[tuple[PreparedStep, Request]]
    whole: Completion
    spent: list[Timing]  #: by the steps so far


class PlannedModel(AnyPreparedModel):
    """As `RemotePreparedModel`, in steps. Any thread may use it, several at once.

    `fallback`: what `FallbackModel` has for the whole, for the bursts that are made here.
    """

    def __init__(
        self, model: Model, steps: Sequence[PreparedStep], preference: Preference, fallback: CpuFallback | None
    ) -> None:
        self.model, self.steps, self.preference, self.fallback = model, tuple(steps), preference, fallback
        self.temporaries = between(model, [step.step for step in steps])
        self._workspaces: FreeList[Workspace] = FreeList()
        self._rooms: FreeList[Memory] = FreeList()
        # The layout alone: each execution has temporaries of its own.
        graph = with_temporaries(model, self.temporaries).main
        laid = InputSet(
            with_temporaries(model, self.temporaries),
            (*(None for _ in model.main.inputs), *(graph.operands[i].dimensions for i in self.temporaries)),
        )
        self._room, self._places = laid.memory.nbytes, laid.arguments[len(model.main.inputs) :]

    def run(
        self,
        *arrays: ArrayLike | None,
        timeout: float | None = None,
        deadline: float | None = None,
        **by_name: ArrayLike | None,
    ) -> tuple[NDArray[Any], ...]:
        """As `RemotePreparedModel.run`."""
        if deadline is not None:
            with until(timeout, deadline) as left:
                return self.run(*together(arrays, by_name), timeout=left)
        arrays = together(arrays, by_name)
        earlier(timeout, None)
        shapes = input_shapes(self.model, arrays)
        workspace = self._workspaces.take(shapes) or Workspace.create(self.model, shapes)
        workspace.inputs.fill(arrays)
        with self._temporary_room() as room:
            ways = [step.model.execute for step in self.steps]
            result = self._execute(ways, workspace.request, room, ExecuteOptions(timeout=timeout))
        outputs = copies(result.outputs)
        result = result._replace(outputs=())
        self._workspaces.put(shapes, workspace, workspace.nbytes)  # not after an error: a device may still write to it
        result.raise_for_status()
        return outputs

    def execute(
        self,
        request: Request,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Result:
        """As `RemotePreparedModel.execute`; its timing is the sum of the steps'."""
        options = ExecuteOptions(measure, timeout, loop_timeout, deadline)
        return self.execute_by([step.model.execute for step in self.steps], request, options)

    def execute_by(self, ways: Sequence[Way], request: Request, options: ExecuteOptions) -> Result:
        """The same, each step in its way."""
        if refusal := self._refusal(request, options):
            return refusal
        with self._temporary_room() as room:
            return self._execute(ways, request, room, options)

    def execute_async(
        self,
        request: Request,
        measure: bool = False,
        *,
        timeout: float | None = None,
        callback: Callable[[Completion], object] | None = None,
        loop_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Completion:
        """As `RemotePreparedModel.execute_async`: the thread that completes one step launches the next one."""
        whole = Completion()
        if callback:
            whole.add_done_callback(callback)
        options = ExecuteOptions(measure, timeout, loop_timeout, deadline)
        if refusal := self._refusal(request, options):
            whole.settle(lambda: refusal)
        else:
            room = self._take_room()
            end = None if timeout is None else time.monotonic() + timeout
            waiting = deque(zip(self.steps, self._requests(request, room), strict=True))
            self._launch(AsyncSteps(request, room, options, end, waiting, whole, []))
        return whole

    def _launch(self, at: AsyncSteps) -> None:
        """The next step. Raises Timeout, and what the step's model raises."""
        step, its = at.waiting.popleft()
        measure, _, loop_timeout, deadline = at.options
        left = self._left(at.end, at.options)
        execution = step.model.execute_async(its, measure, timeout=left, loop_timeout=loop_timeout, deadline=deadline)
        follow(at.whole, execution, partial(self._then, at, step))

    def _then(self, at: AsyncSteps, step: PreparedStep, execution: Completion) -> None:
        result = execution.result()
        at.spent.append(result.timing)
        if result.status:
            at.whole.settle(lambda: _failure_of(step, result))
        elif at.waiting:
            self._launch(at)
        else:
            self._rooms.put(None, at.room, at.room.nbytes)  # not after an error: a device may still write to it
            at.whole.settle(lambda: self._success_of(at.request, at.spent))

    def execute_fenced(
        self,
        request: Request,
        wait_for: Sequence[Waitable | None] = (),
        *,
        measure: bool = False,
        deadline: float | None = None,
        loop_timeout: float | None = None,
        duration: float | None = None,
    ) -> FencedExecution:
        """As `RemotePreparedModel.execute_fenced`: each step waits for the fence of the one before, on its own device.

        `duration`: of each step.
        """
        options = ExecuteOptions(measure, None, loop_timeout, deadline)
        refusal = self._refusal(request, options)
        if refusal and refusal.status != ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:  # a fence has no room for that one
            refusal.raise_for_status()
        check_outputs(self.model, request)
        room = self._take_room()
        launched: list[FencedExecution] = []
        fences: Sequence[Waitable | None] = wait_for
        begin, delay = time.monotonic_ns(), 0
        for step, its in zip(self.steps, self._requests(request, room), strict=True):
            try:
                execution = step.model.launch(
                    its, fences, measure=measure, deadline=deadline, loop_timeout=loop_timeout, duration=duration
                )
            except (*FAILURES, ValueError) as error:
                if not launched:
                    raise
                execution = failed_here(error)  # the steps before it go on, and are to be waited for
            launched.append(execution)
            fences, delay = [execution], (time.monotonic_ns() - begin) // 1000
        return follow_all(launched, [step.step for step in self.steps], delay, lambda: self._views(request))

    def _take_room(self) -> Memory:
        return self._rooms.take(None) or Memory.create(self._room)

    @contextmanager
    def _temporary_room(self) -> Iterator[Memory]:
        room = self._take_room()
        yield room
        self._rooms.put(None, room, room.nbytes)  # not after an error: a device may still write to it

    def _execute(self, ways: Sequence[Way], request: Request, room: Memory, options: ExecuteOptions) -> Result:
        """Step by step; ends at the first that fails."""
        end, spent = None if options.timeout is None else time.monotonic() + options.timeout, list[Timing]()
        for step, execute, its in zip(self.steps, ways, self._requests(request, room), strict=True):
            try:
                result = execute(its, *options._replace(timeout=self._left(end, options)))
            except Timeout as error:
                raise timed_out(options.timeout, error.phase, error.late_by) from None
            if result.status:
                return _failure_of(step, result)
            spent.append(result.timing)
        return self._success_of(request, spent)

    def _left(self, end: float | None, options: ExecuteOptions) -> float | None:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise timed_out(options.timeout, "executing")
        return left

    def _success_of(self, request: Request, spent: Sequence[Timing]) -> Result:
        return Result(ErrorStatus.NONE, self._views(request), self._shapes(request), _total(spent))

    def _views(self, request: Request) -> tuple[NDArray[Any], ...]:
        return output_views(self.model, request, ())

    def _requests(self, request: Request, room: Memory) -> list[Request]:
        graph, pools = self.model.main, (*request.pools, room)
        where = dict(zip(graph.inputs, request.inputs, strict=True))
        where |= {i: a._replace(pool=len(pools) - 1) for i, a in zip(self.temporaries, self._places, strict=True)}
        where |= zip(graph.outputs, request.outputs, strict=True)
        sides = [arguments(step.step, where) for step in self.steps]
        return [Request(*its, _pools_of(its, pools), request.loop_timeout) for its in sides]

    def _refusal(self, request: Request, options: ExecuteOptions) -> Result | None:
        """What no step could say as it should be said: a step knows neither the model's inputs nor all outputs.

        Raises ValueError, Timeout for times in which nothing can be done.
        """
        check_times(timeout=options.timeout, loop_timeout=options.loop_timeout, deadline=options.deadline)
        by = None if options.deadline is None else nanoseconds(options.deadline)
        earlier(options.timeout, by)
        if missed := passed(by):
            return missed
        try:
            check_arguments(self.model, request)
            check_alone(_buffers_of(request.outputs, request), _buffers_of(request.inputs, request))
        except InvalidArgument as error:
            return error.as_result()
        shapes = self._shapes(request)
        if all(shape.is_sufficient for shape in shapes):
            return None
        words = str(OutputInsufficientSize(shapes))
        return Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, output_shapes=shapes, message=words)

    def _shapes(self, request: Request) -> tuple[OutputShape, ...]:
        operands = [self.model.main.operands[i] for i in self.model.main.outputs]
        return tuple(
            OutputShape(o.dimensions, a.has_no_value or _holds(a, request, nbytes(o, o.dimensions)))
            for o, a in zip(operands, request.outputs, strict=True)
        )

    def open_burst(self, options: Options) -> Chain:
        """A burst for each step, one after the other."""
        from driver.runtime.chain import Chain

        return Chain(self, options)

    def free_memory(self, memory: Memory) -> None:
        """The devices of all steps may unmap it."""
        for step in self.steps:
            with suppress(PeerDied):  # with its device, the mapping is gone too
                step.model.prepared.free_memory(memory)

    def close(self) -> None:
        """Frees the steps on their devices; bursts go on until they are closed."""
        self._workspaces.clear()
        self._rooms.clear()
        for step in self.steps:
            with suppress(PeerDied):  # with its device, all of that is gone too
                step.model.prepared.close()


def _total(spent: Sequence[Timing]) -> Timing:
    """Of all steps; None where one of them was not measured."""
    columns = zip(*spent, strict=True)
    return Timing(*(None if None in times else sum(filter(None, times)) for times in columns))


def _failure_of(step: PreparedStep, result: Result) -> Result:
    """Of the whole, when a step has failed."""
    words = f"operations {list(step.step.operations)}: {result.message}"
    return Result(result.status, message=words, cause=result.cause)


def _pools_of(sides: tuple[Any, Any], pools: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pools of a step's request: with other memory in the place of memory that belongs to other steps' devices."""
    used = {argument.pool for side in sides for argument in side}
    theirs = (isinstance(p, DeviceBuffer | VendorMemory) and n not in used for n, p in enumerate(pools))
    return tuple(pools[-1] if is_theirs else p for p, is_theirs in zip(pools, theirs, strict=True))


def _buffers_of(side: Sequence[RequestArgument], request: Request) -> list[DeviceBuffer]:
    """A device's buffers among these arguments."""
    pools = [request.pools[argument.pool] for argument in side if not argument.has_no_value]
    return [pool for pool in pools if isinstance(pool, DeviceBuffer)]


def _holds(argument: RequestArgument, request: Request, size: int) -> bool:
    """Whether an output of that many bytes fits; an image is used whole, and of its own memory a device knows it."""
    pool = request.pools[argument.pool] if argument.pool < len(request.pools) else None
    if isinstance(pool, DeviceBuffer | VendorMemory):
        return True
    return (pool.nbytes if isinstance(pool, HardwareBuffer) else argument.length) >= size
