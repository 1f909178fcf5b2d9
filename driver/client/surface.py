"""The surface of models and bursts, whatever executes: one for one device, for several, and for this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import ErrorStatus, MissedDeadlineTransient, Timeout
from burst.errors import status_error
from driver.client.completion import Completion
from driver.client.job import Job, perform_with_room
from driver.client.names import by_position, copies, together
from driver.client.open_input import OpenInput
from driver.client.packed_inputs import blank_input
from driver.client.result_stream import RepeatedRun
from driver.client.statistics import write_timeline
from driver.client.stream_plan import CHECKPOINT, StreamPlan, fed_pairs
from driver.client.tasks import TaskTimes
from driver.client.workspace import FreeList, Workspace, input_shapes, shapes_of
from driver.deadlines import Wait, check_times, nanoseconds, passed
from driver.options import options_of
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from burst import Memory, Request, Result
    from driver.client.burst_requests import BurstRequests
    from driver.client.executor import Executor
    from driver.client.fenced import FencedExecution, Waitable
    from driver.client.result_stream import ResultStream
    from driver.client.stream_plan import Until
    from driver.client.tasks import Tasks
    from driver.nn import Model
    from driver.options import InputShapes, Policy, Preference
    from fmq.region import Kind


def signature(model: Model) -> str:
    """Return inputs and outputs, for people."""
    return " -> ".join(", ".join(map(str, side)) for side in (model.inputs, model.outputs))


def blank_inputs(model: Model, shapes: Sequence[InputShapes] | None) -> Iterator[tuple[Any, ...]]:
    """Return arrays of zeros for each set of shapes, and empty texts. Raise ValueError."""
    for each in [None] if shapes is None else shapes:
        sides = zip(model.inputs, shapes_of(model, each, "warm_up(shapes=[…])"), _in_order(model, each), strict=True)
        yield tuple(
            None if shape is None else blank_input(tensor, given) if tensor.kind else np.zeros(shape, tensor.dtype)
            for tensor, shape, given in sides
        )


def _in_order(model: Model, shapes: InputShapes | None) -> Sequence[Any]:
    if shapes is None:
        return [None] * len(model.inputs)
    by_name = (dict(shapes),) if isinstance(shapes, Mapping) else tuple(shapes)
    return by_position(by_name, tuple(tensor.name for tensor in model.inputs), model.optional)


class AnyPreparedModel(Closing):
    """A model made ready to run: on one device, on several, or in this process. Any thread, several at once."""

    to_send = "pickle its `model`, and prepare that"

    def __init__(self, executor: Executor, preference: Preference) -> None:
        self.executor, self.model, self.preference = executor, executor.model, preference

    @cached_property
    def _workspaces(self) -> FreeList[Workspace]:
        """The memory of earlier runs, by the shapes of their inputs."""
        return FreeList()

    def run(
        self,
        *arrays: ArrayLike | None,
        timeout: float | None = None,
        deadline: float | None = None,
        **by_name: ArrayLike | None,
    ) -> tuple[NDArray[Any], ...]:
        """Execute once: an array per input (None: omitted), an array per output, which is yours.

        Inputs come by position, by name (`run(images=x)`), or in one dict by name, which also takes names such as
        "timeout". Outputs are a tuple that also takes names: `outputs["boxes"]`.

        Raise ValueError for a wrong dtype or shape (nothing was sent), StatusError, PeerDied, Timeout when the result
        does not come in `timeout` seconds, and MissedDeadline* when it does not come by the `deadline`, a
        time.monotonic(). The device is told the earlier one, and gives up what it cannot do by then.
        """
        arrays, wait = together(arrays, by_name), Wait.of(timeout, deadline)
        workspace = self._filled_workspace(arrays)
        result = perform_with_room(self.executor.perform, Job(workspace.request, wait), workspace.grown_for)
        return self._outputs_of(workspace, result)

    async def run_async(
        self,
        *arrays: ArrayLike | None,
        timeout: float | None = None,
        deadline: float | None = None,
        **by_name: ArrayLike | None,
    ) -> tuple[NDArray[Any], ...]:
        """Do as `run`, for asyncio. Cancelling the task gives the request up."""
        arrays, wait = together(arrays, by_name), Wait.of(timeout, deadline)
        workspace = self._filled_workspace(arrays)
        result = await self.executor.start(Job(workspace.request, wait))
        if result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and (request := workspace.grown_for(result)):
            result = await self.executor.start(Job(request, wait))
        return self._outputs_of(workspace, result)

    def _filled_workspace(self, arrays: Sequence[Any]) -> Workspace:
        """Return memory that no execution uses, with these arrays in its inputs. Raise ValueError."""
        shapes = input_shapes(self.model, arrays)
        workspace = self._workspaces.take(shapes) or Workspace.create(self.model, shapes)
        workspace.inputs.fill(arrays)
        return workspace

    def _outputs_of(self, workspace: Workspace, result: Result) -> tuple[NDArray[Any], ...]:
        """Return the caller's own copies. After a failure the memory is not used again: a device may write to it."""
        result.raise_for_status()
        outputs = copies(result.outputs)
        self._workspaces.put(workspace.inputs.shapes, workspace, workspace.nbytes)
        return outputs

    def warm_up(
        self,
        shapes: Sequence[InputShapes] | None = None,
        *,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> None:
        """Run once for each set of input shapes, on zeros: what a first run does beyond the others is done then.

        `shapes`: tuples of shapes by position, or dicts by name; None: the shapes that the model tells. Raise as `run`
        does, and ValueError for open shapes that are not given.
        """
        for zeros in blank_inputs(self.model, shapes):
            self.run(*zeros, timeout=timeout, deadline=deadline)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {signature(self.model)}>"

    def execute(
        self,
        request: Request,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Result:
        """Execute an explicit request, with any status; outputs are views of its pools.

        `timeout`: seconds from now, `deadline`: a time.monotonic(). The device is told the earlier one, and gives up
        what it cannot do by then. The wait ends whatever it does: 0.2 s after the deadline with a result of status
        MISSED_DEADLINE_TRANSIENT, if the device has not said another, after the timeout by Timeout. `loop_timeout`:
        seconds that a WHILE may take; by default 2, at most 15.

        Raise PeerDied, Timeout, and Malformed for a request that cannot be said.
        """
        job = Job.of(request, measure=measure, timeout=timeout, loop_timeout=loop_timeout, deadline=deadline)
        return self.executor.perform(job)

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
        """Execute an explicit request in the background. A device queues thousands, by priority.

        The future has what `execute` returns or raises, and can be awaited. `cancel()` gives the request up on the
        device, too. `callback` gets the future when it is done, in a thread that completes others: it must not wait for
        another one.

        Raise ValueError for what is no time.
        """
        try:
            job = Job.of(request, measure=measure, timeout=timeout, loop_timeout=loop_timeout, deadline=deadline)
            completion = self.executor.start(job)
        except Timeout as error:
            completion = Completion().fail(error)
        if callback:
            completion.add_done_callback(callback)
        return completion

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
        """Launch an execution that runs when all of `wait_for` are signalled, and return at once.

        Args:
            request: must say the shapes of outputs that the model leaves open.
            wait_for: fences: descriptors, or whatever has a `fileno()`, as other fenced executions do. They stay yours.
            measure: whether `info` has times.
            deadline: of `time.monotonic()`; what is not done by then is missed.
            loop_timeout: seconds that a WHILE may take.
            duration: seconds that it may take from when the fences are signalled; those of each step, where a model is
                divided between devices.

        Raise InvalidArgument for a request that does not fit, for what is no fence and for fences in error;
        MissedDeadlinePersistent for a deadline in the past; ResourceExhaustedTransient when too many are pending;
        PeerDied.
        """
        job = Job.of(request, measure=measure, loop_timeout=loop_timeout, deadline=deadline)
        return self.executor.launch(job.behind(wait_for, duration))

    def burst(
        self,
        *,
        spin: float | str | None = None,
        memory: Kind = "memfd",
        measure: bool = False,
        input_shapes: InputShapes | None = None,
        depth: int | None = None,
        policy: Policy = "block",
        recover: bool = False,
        loop_timeout: float | None = None,
        state: Mapping[str, str] | None = None,
    ) -> AnyBurst:
        """Open a burst.

        Args:
            spin: seconds that both sides poll before they sleep; 0 sleeps at once, "adaptive" polls while that pays.
                By default 50 us, and 0 for a model that was prepared for low power.
            memory: what its queues are made of, "memfd" or "posix".
            measure: whether results carry their timing.
            input_shapes: of the first inputs, by position or in a dict by name, for a model that leaves them open;
                None there omits that input. By default the inputs are made for the first arrays that are given.
            depth: requests that may be in flight at once, for `submit`, from 1 to 64. By default 1, and 4 for a model
                that was prepared for sustained speed.
            policy: what `submit` does when so many are: "block", "reject" or "latest".
            recover: when the device dies, start it again, prepare the model again and send again what was not
                answered; the caller sees one slow result. A model that crashes the device twice over one request, or
                three times in all, gets Quarantined; a burst that is bound to buffers of the device, BuffersLost.
            loop_timeout: seconds that a WHILE may take in each of its executions; by default 2, at most 15. `execute`
                takes one for a request.
            state: outputs and the inputs that they become, by name, as {"stateN": "state"}. These inputs begin as
                zeros, and each run leaves there what it has made of them. Such a burst has `run` and `run_async`, whose
                callers may leave the states out or give new ones. A run that fails leaves the states as they were, and
                they outlive the device. `stream_results` keeps large states on the device.

        Raise StatusError, PeerDied, ValueError.
        """
        pairs = None if state is None else fed_pairs(self.model, state, "state")
        if pairs and depth is None:
            depth = 1
        its = options_of(
            self.preference,
            spin=spin,
            memory=memory,
            measure=measure,
            input_shapes=input_shapes,
            depth=depth,
            policy=policy,
            recover=recover,
            loop_timeout=loop_timeout,
        )
        burst = self.executor.open_burst(its)
        if not pairs:
            return burst
        from driver.client.stateful_burst import StatefulBurst  # it needs AnyBurst

        return StatefulBurst(burst, pairs)

    def free_memory(self, memory: Memory) -> None:
        """Have the devices unmap it: at once, or after the executions that use it. Unknown memory is no error.

        Memory that the application drops is freed without this.
        """
        self.executor.free_memory(memory)

    def close(self) -> None:
        """Free the model; bursts on it go on until they are closed.

        A device that does not answer, because it is stopped, say, is not waited for long: it frees the model later.
        """
        self._workspaces.clear()
        self.executor.close()


class AnyBurst(Closing, ABC):
    """A burst: executions in quick succession. `run` from one thread; `submit` and futures from any.

    `inputs` are arrays in shared memory: the device reads what is written there, without a copy. They belong to the
    next request: with `submit`, look them up for each. The `outputs` of a result are arrays in shared memory, too, and
    yours as long as you hold them, or views of them.
    """

    to_send = "pickle its model, and open a burst on the unpickled one"

    on_memory: Callable[[Job, Callable[[Job], Result]], Result] | None = None
    """Of a compiled model's burst: performs a job with memory in the place of shared buffers that it names."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """The arrays of the next request, to be written in place; None where an input is omitted.

        Where the model leaves a shape open that was not given yet, each use of the input says how to give it.
        """

    @property
    @abstractmethod
    def source(self) -> BurstRequests:
        """The object that takes requests, and completes their futures."""

    @property
    @abstractmethod
    def tasks(self) -> Tasks:
        """The tasks that wait for `source` in event loops."""

    @abstractmethod
    def run(self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any) -> Result:
        """Execute once; copy arrays, given by position or by name, into the inputs first.

        Arrays may have any shape that the model leaves open; `inputs` are of the last one.

        Raise ValueError for a wrong dtype or shape (nothing was sent), StatusError, PeerDied, Busy, ResultsHeld,
        Timeout when the result does not come in `timeout` seconds, and MissedDeadline* when it does not come by the
        `deadline`, a time.monotonic(): the burst stays usable, a late result is dropped.
        """

    def warm_up(
        self,
        shapes: Sequence[InputShapes] | None = None,
        *,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> None:
        """Do what `AnyPreparedModel.warm_up` does; None: the shapes of the present inputs, which are zeroed."""
        present = [tuple(None if a is None or isinstance(a, OpenInput) else a.shape for a in self.inputs)]
        for zeros in blank_inputs(self.model, present if shapes is None else shapes):
            self.run(*zeros, timeout=timeout, deadline=deadline)

    @property
    @abstractmethod
    def model(self) -> Model:
        """The model that it executes."""

    def __repr__(self) -> str:
        arrays = [None if isinstance(a, OpenInput) else a for a in self.inputs]
        shapes = ", ".join("-" if a is None else f"{a.dtype}{list(a.shape)}" for a in arrays)
        return f"<{type(self).__name__} on {shapes}>"

    def submit(
        self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any
    ) -> Completion:
        """Send a request without waiting for its result. Arrays are copied into the inputs first.

        While `depth` requests are in flight, policy "block" waits (at most `timeout` seconds, then Timeout), "reject"
        raises Busy, and "latest" keeps this request until there is room, in the place of one that was kept before.
        `deadline`: a time.monotonic() by which it has to be done; then the future is, with MissedDeadline*.
        Raise as `run` does for what was not sent.
        """
        check_times(timeout=timeout)
        by = None if deadline is None else nanoseconds(deadline)
        return self._missed(by) or self.source.submit_by(together(arrays, by_name), timeout, by)

    def try_submit(self, *arrays: Any, deadline: float | None = None, **by_name: Any) -> Completion | None:
        """Send a request if there is room now, and return its future; else None. It waits for no result.

        Arrays and `deadline` as of `submit`. With policy "latest" there always is room.
        """
        by = None if deadline is None else nanoseconds(deadline)
        return self._missed(by) or self.source.admit(together(arrays, by_name), by)

    def _missed(self, by: int | None) -> Completion | None:
        """Return the failed future of a request whose deadline is over already."""
        missed = passed(by)
        return missed and Completion(self.source, by).fail(status_error(missed.status, missed.message, missed.cause))

    def poll(self, completion: Completion) -> Result | None:
        """Return the result of a request that `try_submit` or `submit` has sent if it has come; else None. It waits for
        nothing. Raise as `completion.result()` does.
        """
        self.source.look()
        return completion.result() if completion.done() else None

    def submit_and_wait(self, arrays: tuple[Any, ...], timeout: float | None, deadline: float | None) -> Result:
        """Submit a request and return its result. Raise Timeout at the `deadline`, to which the `timeout` has led."""
        completion = self.submit(*arrays, timeout=timeout, deadline=deadline)
        completion.ends_by_timeout = True
        try:
            return completion.result()
        except MissedDeadlineTransient as error:
            raise TaskTimes.of(timeout, None).error(error) from None

    async def run_async(
        self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any
    ) -> Result:
        """Do as `run`, for asyncio. Cancelling the task drops the result when it comes.

        `timeout`: seconds from now, also for tasks before it; `deadline`: a time.monotonic(). The device is told the
        earlier one. Raise Timeout after the one, and MissedDeadline* at the other.
        """
        return await self.tasks.run(self.source, together(arrays, by_name), timeout, deadline)

    def stream(
        self,
        frames: Iterable[Any] | AsyncIterable[Any],
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> AsyncIterator[Result]:
        """Yield results in the order of the frames, `depth` in flight: `async for result in burst.stream(frames)`.

        A frame is an array, a tuple of one for each input, or a dict by name. With policy "latest" a source that is
        faster than the device loses frames, and not time; with "reject", too, and the oldest stay. `timeout`: of each
        frame, from when it is taken; `deadline`: of all. What misses it ends the stream, as `run_async` would.
        """
        return self.tasks.stream(self.source, frames, timeout, deadline)

    def stream_results(
        self,
        inputs: Any,
        *,
        feedback: Mapping[str, str],
        until: Until = None,
        most: int = 4096,
        also: Sequence[str] = (),
        deadline: float | None = None,
        checkpoint: int = CHECKPOINT,
    ) -> ResultStream:
        """Repeat an execution on what it leaves: `for result in burst.stream_results(…)`, or `async for`.

        On one device the engine repeats it, up to `depth` results ahead of the caller, whose outputs are views of
        shared memory, yours as long as you hold them. Each step takes its turn by priority and share. With policy
        "latest" the caller gets the newest result, copied, and the engine does not wait for it. On several devices,
        and in this process, a step is a `run` of this burst, when its result is asked for.

        Args:
            inputs: of the first step: a dict by name, or a sequence by position. Those that are not fed stay the same.
                A buffer of the device can be one, such as those of another stream's `state`.
            feedback: outputs and the inputs that they become, by name. Each pair has one type, and shapes that fit.
            until: ends the stream after the step in which all elements of that output are true ("done"), or one of
                some values ({"token": 2}, {"token": [0, 2]}).
            most: steps, at most 1048576.
            also: names of outputs that results have although they are fed back, as the one of `until` always is.
                Others that are fed back are empty there: they stay where the model runs.
            deadline: of the whole stream, a time.monotonic().
            checkpoint: steps after which a burst with `recover=True` on one device copies the state to this process:
                if the device dies, it is started again, and the steps since are executed once more, which
                `stream.repeated` counts. The caller sees one slow result, and none twice.

        Raise ValueError, TypeError for what does not fit (nothing was sent), StatusError and PeerDied for the first
        step, which has run when this returns.
        """
        plan = StreamPlan.of(self.model, feedback, until=until, most=most, also=also, checkpoint=checkpoint)
        given = (dict(inputs),) if isinstance(inputs, Mapping) else tuple(inputs)
        return self.repeated(plan, given, deadline)

    def repeated(self, plan: StreamPlan, inputs: tuple[Any, ...], deadline: float | None) -> ResultStream:
        """Return the stream of `stream_results`, for a plan that was checked."""
        return RepeatedRun(self, plan, inputs, deadline)

    def execute(
        self,
        request: Request,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Result:
        """Execute an explicit request on pools of your own, with any status.

        `timeout`: seconds from now, `deadline`: a time.monotonic(). The device is told the earlier one, and gives up
        what it cannot do by then. The wait ends whatever it does: 0.2 s after the deadline with a result of status
        MISSED_DEADLINE_TRANSIENT, if the device has not said another, after the timeout by Timeout. `loop_timeout`:
        seconds that a WHILE may take.

        Raise PeerDied, Timeout, Busy.
        """
        job = Job.of(request, measure=measure, timeout=timeout, loop_timeout=loop_timeout, deadline=deadline)
        if self.on_memory is None:
            return self.perform(job)
        return self.on_memory(job, self.perform)

    @abstractmethod
    def perform(self, job: Job) -> Result:
        """Execute a request on pools of the caller's own."""

    @abstractmethod
    def free_memory(self, memory: Memory) -> None:
        """Let the device unmap a pool of `execute`. Unknown memory is no error."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return counts since the beginning, and where the time went; see `driver.client.statistics`.

        Times in `stages` are microseconds, in `seconds` and `cpu_seconds` seconds; `copied_bytes` are bytes.
        `fallbacks`: those of the compiled model, if this is a burst of one.
        """

    def trace(self, path: str) -> int:
        """Write the last requests by stages, as a file for Perfetto or chrome://tracing; return how many."""
        return write_timeline(path, self.timeline("burst"))

    @abstractmethod
    def timeline(self, name: str, first_lane: int = 0) -> list[dict[str, Any]]:
        """Return the last requests under that name, in lanes from that one on, for `trace`."""

    @abstractmethod
    def close(self) -> None:
        """End the burst on both sides; threads and tasks that wait get GeneralFailure. Arrays stay readable."""
