"""Bursts for requests, each executed in the thread that has it: what lies in shared memory is used in place, the rest
beside it.

A lane is a burst and some memory of ours, for the inputs and outputs of a request that are not in shared memory. A
request has a lane to itself, for which it may have to wait in the same queue as those of `compiled.serve`.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import BurstError, DeviceUnavailable, Memory, Request, RequestArgument
from driver.client.job import Job, perform_with_room
from driver.client.tasks import TaskTimes
from driver.client.workspace import InputSet, OutputSet, Workspace, input_shapes
from driver.deadlines import seconds_left
from driver.gateways.refusal import invalid
from driver.replicas.waiting import ExecutionEstimate, QueueFull, RequestQueue, WaitingRequest
from fmq import FmqError, clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from burst import Result
    from driver.client.surface import AnyBurst, AnyPreparedModel
    from driver.gateways.oip.inference import GivenTensor, ModelPorts, WantedTensor
    from driver.gateways.oip.regions import RegionSlice, RegionUse

_QUEUE = 256
_OWN_POOLS = 2  # of a workspace: inputs and outputs
_GONE = "this model is being unloaded"


class InPlaceCall(NamedTuple):
    """A request with its tensors in the model's order.

    values: of the inputs; None for those in shared memory. wanted: None for an output that was not asked for.
    """

    given: Sequence[GivenTensor]
    values: Sequence[NDArray[Any] | None]
    wanted: Sequence[WantedTensor | None]
    regions: RegionUse
    deadline: float | None


class PlacedWorkspace(Workspace):
    """A workspace for requests of which some tensors lie in shared memory that clients registered."""

    def __init__(self, inputs: InputSet, outputs: OutputSet, call: InPlaceCall, ports: ModelPorts) -> None:
        """Keep nothing of the call but places. Raise Refusal for an output that does not fit in its place."""
        self._ports, self._regions = ports, tuple(region.memory for region in call.regions)
        pools = {region.name: n for n, region in enumerate(call.regions, _OWN_POOLS)}

        def placed(place: RegionSlice | None, dimensions: tuple[int, ...]) -> RequestArgument | None:
            if not place:
                return None
            offset = call.regions[place.region].begin + place.offset
            return RequestArgument(pool=pools[place.region], offset=offset, length=place.nbytes, dimensions=dimensions)

        self._given = [
            placed(given.place, () if port.is_known else given.shape)
            for port, given in zip(ports.inputs, call.given, strict=True)
        ]
        self._wanted = [placed(wanted.place, ()) if wanted else None for wanted in call.wanted]
        self._check_room([port.known_bytes for port in ports.outputs])
        super().__init__(inputs, outputs)

    def _combine(self) -> None:
        super()._combine()
        own = self.request
        inputs = tuple(placed or its for placed, its in zip(self._given, own.inputs, strict=True))
        outputs = tuple(placed or its for placed, its in zip(self._wanted, own.outputs, strict=True))
        self.request = Request(inputs, outputs, (*own.pools, *self._regions))

    def grown_for(self, result: Result) -> Request | None:
        """Do as a workspace does. Raise Refusal for an output that does not fit in its place."""
        pairs = zip(self._ports.outputs, result.output_shapes, strict=True)
        self._check_room([port.nbytes(shape.dimensions) for port, shape in pairs])
        return super().grown_for(result)

    def _check_room(self, needed: Sequence[int | None]) -> None:
        for port, placed, nbytes in zip(self._ports.outputs, self._wanted, needed, strict=True):
            if placed and nbytes is not None and nbytes > placed.length:
                raise invalid(
                    f"output {port.name!r} has {nbytes} bytes; its place in shared memory has {placed.length}"
                )


class Lane:
    """One burst, and memory for what does not lie in shared memory."""

    def __init__(self, burst: AnyBurst, ports: ModelPorts) -> None:
        self.burst, self._ports = burst, ports
        self._inputs: Memory | None = None
        self._outputs: OutputSet | None = None
        self._latest: tuple[Any, PlacedWorkspace] | None = None

    def execute(self, call: InPlaceCall) -> Result:
        """Raise Refusal where an output does not fit in its place, and what the burst raises."""
        call.regions.note(self)
        try:
            workspace = self._workspace(call)
            workspace.inputs.fill(call.values)
            outputs = workspace.outputs.memory

            def grown(result: Result) -> Request | None:
                if request := workspace.grown_for(result):
                    self._free(outputs)
                return request

            job = Job.of(workspace.request, deadline=call.deadline)
            result = perform_with_room(self.burst.perform, job, grown)
            result.raise_for_status()
        except BaseException:
            self.drop_memory()  # the device may still write to it
            raise
        return result

    def _workspace(self, call: InPlaceCall) -> PlacedWorkspace:
        """Return the latest one if it is laid out alike: the burst knows its request, and need not encode it again."""
        shapes = input_shapes(self._ports.model, call.values)
        placed = [each.place and (each.place, each.shape) for each in call.given]
        key = shapes, placed, [each and each.place for each in call.wanted], [*map(id, call.regions)]
        latest = self._latest  # read once: `forget` of another thread clears it
        if latest and latest[0] == key:
            return latest[1]
        inputs = InputSet(self._ports.model, shapes, self._inputs)
        if self._inputs is not None and inputs.memory is not self._inputs:
            self._free(self._inputs)
        outputs = self._outputs or OutputSet(self._ports.model)
        self._inputs, self._outputs = inputs.memory, outputs
        found = PlacedWorkspace(inputs, outputs, call, self._ports)
        self._latest = key, found
        return found

    def drop_memory(self) -> None:
        """Give the next request new memory, of the size that this one has grown to."""
        self._latest = None
        if self._inputs is not None:
            self._free(self._inputs)
            self._inputs = None
        if self._outputs is not None:
            self._free(self._outputs.memory)
            self._outputs.lay_out(self._outputs.sizes)

    def forget(self, memory: Memory) -> None:
        """Allow the device to unmap a region. Any thread, while no request names it."""
        self._latest = None  # which keeps memory mapped
        self._free(memory)

    def _free(self, memory: Memory) -> None:
        with suppress(BurstError, FmqError, ValueError):  # the burst is closed, or its device has died
            self.burst.free_memory(memory)

    def close(self) -> None:
        """End the burst."""
        self.burst.close()


class Turn:
    """A thread's place in the queue. It gets a lane, None if it is to open one, or an error."""

    def __init__(self) -> None:
        self._ready = threading.Lock()
        self._ready.acquire()
        self._lane: Lane | None = None
        self._error: BaseException | None = None
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, lane: Lane | None) -> None:
        self._lane, self._is_done = lane, True
        self._ready.release()

    def set_exception(self, error: BaseException) -> None:
        self._error, self._is_done = error, True
        self._ready.release()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the lane or the error. Return False if neither has come in time."""
        return self._ready.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def result(self) -> Lane | None:
        """Return the lane that has come, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._lane


class Lanes:
    """At most so many lanes of one model, opened as they are needed. Any thread."""

    def __init__(self, prepared: AnyPreparedModel, ports: ModelPorts, most: int) -> None:
        self._prepared, self._ports, self._most = prepared, ports, most
        self._free: list[Lane] = []  # of which there are none while requests wait
        self._count, self._is_closed = 0, False
        self._changed = threading.Condition(threading.Lock())
        self._queue, self._estimate = RequestQueue(_QUEUE, 1, 0.0), ExecutionEstimate()

    def execute(self, call: InPlaceCall) -> tuple[Result, list[Any]]:
        """Wait for a lane until the deadline, and execute there. The arrays are copies of the outputs that are not in
        shared memory, None for the others. Raise QueueFull, and as `Lane.execute`.
        """
        lane = self._taken(call.deadline)
        begin, took = clock.now(), 0
        try:
            result = lane.execute(call)
            took = clock.now() - begin
            arrays = [
                None if wanted is None or wanted.place else output.copy()
                for wanted, output in zip(call.wanted, result.outputs, strict=True)
            ]
        finally:
            self._give_back(lane, took)
        return result, arrays

    def _taken(self, deadline: float | None) -> Lane:
        with self._changed:
            if self._is_closed:
                raise DeviceUnavailable(_GONE)
            if self._free:
                return self._free.pop()
            request = self._queued(deadline) if self._count >= self._most else None
            if request is None:
                self._count += 1
        if request is None:
            return self._opened()
        turn: Any = request.done
        if not turn.wait(seconds_left(request.times.end)):
            with self._changed:
                if self._queue.discard(request):
                    request.miss("queued")
        return turn.result() or self._opened()

    def _queued(self, deadline: float | None) -> WaitingRequest:
        if self._queue.is_full:
            each = self._estimate.usual / 1e9 / self._most
            raise QueueFull(f"{len(self._queue)} requests wait; try again later", max(0.001, each * _QUEUE / 2))
        turn: Any = Turn()  # which does for a thread what a future does for a task
        request = WaitingRequest((), TaskTimes.of(None, deadline), turn)
        self._queue.append(request)
        return request

    def _opened(self) -> Lane:
        """Open a lane, which has been counted."""
        try:
            return Lane(self._prepared.burst(recover=True), self._ports)
        except BaseException:
            with self._changed:
                self._pass_on(None)
            raise

    def _give_back(self, lane: Lane, took: int) -> None:
        """`took`: ns of the execution; 0: it failed."""
        with self._changed:
            if took:
                self._estimate.took(took)
            is_over = not self._pass_on(lane)
        if is_over:
            lane.close()

    def _pass_on(self, lane: Lane | None) -> bool:
        """Pass a lane on to the next request, under the lock; return False if it is to be closed instead.

        lane: None if it could not be opened: the next request opens one.
        """
        if waiting := self._queue.take(self._estimate, at_once=True).requests:
            waiting[0].done.set_result(lane)
        elif lane is not None and not self._is_closed:
            self._free.append(lane)
        else:
            self._count -= 1
            self._changed.notify_all()
            return False
        return True

    @property
    def waiting(self) -> int:
        """Requests that wait for a lane."""
        return len(self._queue)

    def stats(self) -> list[dict[str, Any]]:
        """Return the statistics of each burst that is free now."""
        with self._changed:
            lanes = list(self._free)
        return [lane.burst.stats() for lane in lanes]

    def close(self) -> None:
        """Finish the requests that run and wait. There are no others from now on."""
        with self._changed:
            self._is_closed = True
            lanes, self._free = self._free, []
            self._count -= len(lanes)
            while self._count:
                self._changed.wait()
        for lane in lanes:
            lane.close()
