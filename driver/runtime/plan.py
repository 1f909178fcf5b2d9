"""A model in several steps: each is executed by its device, and what goes between them stays where it is."""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import (
    DeviceBuffer,
    ErrorStatus,
    HardwareBuffer,
    InvalidArgument,
    Memory,
    MissedDeadlineTransient,
    OutputShape,
    PeerDied,
    Request,
    Result,
    StatusError,
    Timing,
)
from burst.memory import VendorMemory
from burst.messages import Cause
from driver.client.completion import Completion, follow
from driver.client.executor import PLAIN, BurstParts
from driver.client.layout import layouts_of, nbytes
from driver.client.session import FAILURES
from driver.client.workspace import FreeList, output_views
from driver.deadlines import passed
from driver.engine.binding import check_arguments
from driver.engine.named_buffers import check_alone
from driver.engine.output_checks import check_outputs
from driver.errors import OutputInsufficientSize
from driver.runtime.cache.device import CacheOutcome
from driver.runtime.launched import failed_here, follow_all, total_of
from driver.runtime.places import arguments, between, with_temporaries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from burst import RequestArgument
    from driver.client.executor import Executor
    from driver.client.fenced import FencedExecution, Waitable
    from driver.client.job import Job
    from driver.client.surface import AnyBurst
    from driver.nn import Model
    from driver.options import Options
    from driver.runtime.cache.device import CachedDevice
    from driver.runtime.chain import Chain
    from driver.runtime.fallback import CpuFallback, FallbackExecutor
    from driver.runtime.partition import Step
    from driver.runtime.values import Way


class PreparedStep(NamedTuple):
    """A step, and where it is prepared."""

    step: Step
    device: str
    model: FallbackExecutor
    cached: CachedDevice | None = None  #: what looked for it in the cache, if there is one

    def compilation(self) -> dict[str, Any]:
        """Return what `CompiledModel.stats` has of it."""
        outcome, stage = self.cached.outcome if self.cached else CacheOutcome("compiled"), None
        if remote := self.model.remote:
            with suppress(PeerDied, StatusError):  # the device is gone
                stage = remote.stage
        return {"device": self.device, "outcome": outcome.kind, "reason": outcome.reason, "stage": stage}


class AsyncSteps(NamedTuple):
    """An asynchronous execution on its way. It does not refer to the executions of its steps, which refer to it."""

    job: Job
    room: Memory  #: for temporaries
    waiting: deque[tuple[PreparedStep, Request]]
    whole: Completion
    spent: list[Timing]  #: by the steps so far


class StepsExecutor:
    """A model in steps, each of which has an executor of its own. Any thread may use it, several at once.

    `fallback`: what `FallbackExecutor` has for the whole, for the bursts that are made here.
    """

    remote = None

    def __init__(self, model: Model, steps: Sequence[PreparedStep], fallback: CpuFallback | None) -> None:
        self.model, self.steps, self.fallback = model, tuple(steps), fallback
        self.temporaries = between(model, [step.step for step in steps])
        self._rooms: FreeList[Memory] = FreeList()
        # The layout alone: each execution has temporaries of its own.
        wider = with_temporaries(model, self.temporaries)
        sizes = (*(None for _ in model.main.inputs), *(wider.main.operands[i].dimensions for i in self.temporaries))
        laid = layouts_of(wider).of_inputs(wider, sizes)
        self._room, self._places = laid.nbytes, laid.arguments[len(model.main.inputs) :]

    def perform(self, job: Job) -> Result:
        """Execute it step by step; its timing is the sum of the steps'."""
        return self.perform_by([step.model.perform for step in self.steps], job)

    def perform_by(self, ways: Sequence[Way], job: Job) -> Result:
        """Execute the job, each step in its way."""
        if refusal := self._refusal(job):
            return refusal
        with self._temporary_room() as room:
            return self._perform(ways, job, room)

    def start(self, job: Job) -> Completion:
        """Execute it step by step: the thread that completes one step starts the next one."""
        whole = Completion()
        if refusal := self._refusal(job):
            return whole.finish(refusal)
        room = self._take_room()
        waiting = deque(zip(self.steps, self._requests(job.request, room), strict=True))
        self._start_next(AsyncSteps(job, room, waiting, whole, spent=[]))
        return whole

    def _start_next(self, at: AsyncSteps) -> None:
        """Start the next step. Raise Timeout when no time is left for it."""
        step, its = at.waiting.popleft()
        at.job.wait.check("executing")
        follow(at.whole, step.model.start(at.job._replace(request=its)), partial(self._then, at, step))

    def _then(self, at: AsyncSteps, step: PreparedStep, execution: Completion) -> None:
        result = execution.result()
        at.spent.append(result.timing)
        if result.status:
            at.whole.settle(lambda: failure_of(step, result, is_first=step is self.steps[0]))
        elif at.waiting:
            self._start_next(at)
        else:
            self._rooms.put(None, at.room, at.room.nbytes)  # not after an error: a device may still write to it
            at.whole.settle(lambda: self._success_of(at.job.request, at.spent))

    def launch(self, job: Job) -> FencedExecution:
        """Launch all steps: each waits for the fence of the one before, on its own device. `duration`: of each step."""
        refusal = self._refusal(job)
        if refusal and refusal.status != ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:  # a fence has no room for that one
            refusal.raise_for_status()
        check_outputs(self.model, job.request)
        room = self._take_room()
        launched: list[FencedExecution] = []
        fences: Sequence[Waitable | None] = job.after
        begin, delay = time.monotonic_ns(), 0
        for step, its in zip(self.steps, self._requests(job.request, room), strict=True):
            try:
                execution = step.model.launch_or_replace(job._replace(request=its, after=fences))
            except (*FAILURES, ValueError) as error:
                if not launched:
                    raise
                execution = failed_here(error)  # the steps before it go on, and are to be waited for
            launched.append(execution)
            fences, delay = [execution], (time.monotonic_ns() - begin) // 1000
        return follow_all(launched, [step.step for step in self.steps], delay, lambda: self._views(job.request))

    def _take_room(self) -> Memory:
        return self._rooms.take(None) or Memory.create(self._room)

    @contextmanager
    def _temporary_room(self) -> Iterator[Memory]:
        room = self._take_room()
        yield room
        self._rooms.put(None, room, room.nbytes)  # not after an error: a device may still write to it

    def _perform(self, ways: Sequence[Way], job: Job, room: Memory) -> Result:
        """Execute step by step; end at the first that fails."""
        spent = list[Timing]()
        for step, perform, its in zip(self.steps, ways, self._requests(job.request, room), strict=True):
            job.wait.check("executing")
            result = perform(job._replace(request=its))
            if result.status:
                return failure_of(step, result, is_first=step is self.steps[0])
            spent.append(result.timing)
        return self._success_of(job.request, spent)

    def _success_of(self, request: Request, spent: Sequence[Timing]) -> Result:
        return Result(ErrorStatus.NONE, self._views(request), self._shapes(request), total_of(spent))

    def _views(self, request: Request) -> tuple[NDArray[Any], ...]:
        return output_views(self.model, request, ())

    def _requests(self, request: Request, room: Memory) -> list[Request]:
        graph, pools = self.model.main, (*request.pools, room)
        where = dict(zip(graph.inputs, request.inputs, strict=True))
        where |= {i: a._replace(pool=len(pools) - 1) for i, a in zip(self.temporaries, self._places, strict=True)}
        where |= zip(graph.outputs, request.outputs, strict=True)
        sides = [arguments(step.step, where) for step in self.steps]
        return [Request(*its, _pools_of(its, pools), request.loop_timeout) for its in sides]

    def _refusal(self, job: Job) -> Result | None:
        """Return what no step could say well, as none knows the model's inputs and all outputs; None: it fits."""
        request = job.request
        if missed := passed(job.wait.by):
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

    def open_burst(self, options: Options, parts: BurstParts = PLAIN) -> Chain:
        """Return a chain of bursts, one for each step: it falls back, and lays requests out, by itself."""
        del parts
        from driver.runtime.chain import Chain

        return Chain(self, options)

    def free_memory(self, memory: Memory) -> None:
        """Let the devices of all steps unmap it."""
        free_everywhere(memory, [step.model for step in self.steps])

    def close(self) -> None:
        """Free the steps on their devices; bursts go on until they are closed."""
        self._rooms.clear()
        for step in self.steps:
            step.model.close()


def free_everywhere(memory: Memory, users: Iterable[Executor | AnyBurst]) -> None:
    """Let the devices of all of them unmap it."""
    for user in users:
        with suppress(PeerDied):  # with its device, the mapping is gone too
            user.free_memory(memory)


def begun(result: Result) -> Result:
    """Return the result of what had begun in time, when a later part of it was too late to begin: others had it."""
    if result.status != ErrorStatus.MISSED_DEADLINE_PERSISTENT:
        return result
    return MissedDeadlineTransient(cause=Cause("executing", result.cause.late_by)).as_result()


def failure_of(step: PreparedStep, result: Result, *, is_first: bool = False) -> Result:
    """Return the result of the whole, when a step has failed."""
    result = result if is_first else begun(result)
    words = f"operations {list(step.step.operations)}: {result.message}"
    return Result(result.status, message=words, cause=result.cause)


def _pools_of(sides: tuple[Any, Any], pools: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the pools of a step's request, with other memory in the place of that of other steps' devices."""
    used = {argument.pool for side in sides for argument in side}
    theirs = (isinstance(p, DeviceBuffer | VendorMemory) and n not in used for n, p in enumerate(pools))
    return tuple(pools[-1] if is_theirs else p for p, is_theirs in zip(pools, theirs, strict=True))


def _buffers_of(side: Sequence[RequestArgument], request: Request) -> list[DeviceBuffer]:
    """Return a device's buffers among these arguments."""
    pools = [request.pools[argument.pool] for argument in side if not argument.has_no_value]
    return [pool for pool in pools if isinstance(pool, DeviceBuffer)]


def _holds(argument: RequestArgument, request: Request, size: int) -> bool:
    """Return True if so many bytes fit; an image is used whole, and a device knows its own memory."""
    pool = request.pools[argument.pool] if argument.pool < len(request.pools) else None
    if isinstance(pool, DeviceBuffer | VendorMemory):
        return True
    return (pool.nbytes if isinstance(pool, HardwareBuffer) else argument.length) >= size
