"""Bursts for requests, each executed in the thread that has it: what lies in shared memory is used in place, the rest
beside it.

A lane is a burst and some memory of ours, for the inputs and outputs of a request that are not in shared memory. A
request has a lane to itself, for which it may have to wait in the same queue as those of `compiled.serve`.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import BurstError, DeviceUnavailable, ErrorStatus, Memory, Request, RequestArgument
from driver.client.job import Job
from driver.client.tasks import TaskTimes
from driver.deadlines import seconds_left
from driver.gateways.oip.refusal import invalid
from driver.replicas.waiting import ExecutionEstimate, QueueFull, RequestQueue, WaitingRequest
from fmq import FmqError, clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from burst import Result
    from driver.client.surface import AnyBurst, AnyPreparedModel
    from driver.gateways.oip.inference import GivenTensor, ModelPorts, TensorPort, WantedTensor
    from driver.gateways.oip.regions import RegionUse

_ALIGN = 64
_GUESS = 1 << 22  # bytes of an output whose size only its execution tells
_QUEUE = 256
_GONE = "this model is being unloaded"


class InPlaceCall(NamedTuple):
    """A request with its tensors in the model's order. wanted: None for an output that was not asked for."""

    given: Sequence[GivenTensor]
    wanted: Sequence[WantedTensor | None]
    regions: RegionUse
    deadline: float | None


class LaidOutRequest(NamedTuple):
    """targets: where the inputs go that are not in shared memory; None for those that are."""

    request: Request
    targets: Sequence[NDArray[Any] | None]


class Lane:
    """One burst, and memory for what does not lie in shared memory."""

    def __init__(self, burst: AnyBurst, ports: ModelPorts) -> None:
        self.burst, self._ports = burst, ports
        self._own: Memory | None = None
        self._latest: tuple[Any, LaidOutRequest] | None = None
        self._guesses = [_GUESS if port.known_bytes is None else port.known_bytes for port in ports.outputs]

    def execute(self, call: InPlaceCall) -> Result:
        """Raises Refusal where an output does not fit in its place, and what the burst raises."""
        call.regions.note(self)
        try:
            result = self._execute(call)
            if result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and self._grow(call, result):
                result = self._execute(call)
            result.raise_for_status()
        except BaseException:
            self.drop_memory()  # the device may still write to it
            raise
        return result

    def _execute(self, call: InPlaceCall) -> Result:
        key, latest = _key(call), self._latest  # read once: `forget` of another thread clears it
        if latest and latest[0] == key:
            found = latest[1]  # known to the burst, which need not encode it again
        else:
            found = self._laid_out(call)
            self._latest = key, found
        for target, port, given in zip(found.targets, self._ports.inputs, call.given, strict=True):
            if target is not None:
                target[...] = port.stored(given)
        return self.burst.perform(Job.of(found.request, deadline=call.deadline))

    def _laid_out(self, call: InPlaceCall) -> LaidOutRequest:
        pools = {region.name: n for n, region in enumerate(call.regions, 1)}
        regions, end = list(call.regions), 0
        inputs, places, outputs = [], list[int | None](), []
        for port, given in zip(self._ports.inputs, call.given, strict=True):
            dimensions = () if port.is_known else given.shape
            if given.place:
                inputs.append(_placed(given.place, pools, call.regions, dimensions))
                places.append(None)
            else:
                nbytes = port.nbytes(given.shape)
                inputs.append(RequestArgument(pool=0, offset=end, length=nbytes, dimensions=dimensions))
                places.append(end)
                end = _aligned(end + nbytes)
        for port, wanted, guess in zip(self._ports.outputs, call.wanted, self._guesses, strict=True):
            if wanted and wanted.place:
                _check_room(port, wanted.place.nbytes, port.known_bytes)
                outputs.append(_placed(wanted.place, pools, call.regions, ()))
            else:
                outputs.append(RequestArgument(pool=0, offset=end, length=guess))
                end = _aligned(end + guess)
        own = self._memory(end)
        request = Request(tuple(inputs), tuple(outputs), (own, *(region.memory for region in regions)))
        targets = [
            None if offset is None else own.asarray(port.dtype, given.shape, offset)
            for offset, port, given in zip(places, self._ports.inputs, call.given, strict=True)
        ]
        return LaidOutRequest(request, targets)

    def _memory(self, nbytes: int) -> Memory:
        if self._own is None or self._own.nbytes < nbytes:
            self.drop_memory()
            self._own = Memory.create(max(nbytes, 1))
        return self._own

    def _grow(self, call: InPlaceCall, result: Result) -> bool:
        """After an output did not fit. Whether another try may succeed. Raises Refusal for one in shared memory."""
        is_larger = False
        self._latest = None
        for n, (port, shape) in enumerate(zip(self._ports.outputs, result.output_shapes, strict=True)):
            needed, wanted = port.nbytes(shape.dimensions), call.wanted[n]
            if wanted and wanted.place:
                _check_room(port, wanted.place.nbytes, needed)
            elif needed > self._guesses[n]:
                self._guesses[n], is_larger = needed, True
        return is_larger

    def drop_memory(self) -> None:
        """The next request gets new memory."""
        self._latest = None
        own, self._own = self._own, None
        if own is not None:
            self.forget(own)

    def forget(self, memory: Memory) -> None:
        """The device may unmap it. Any thread, while no request names it."""
        self._latest = None  # which keeps memory mapped
        with suppress(BurstError, FmqError, ValueError):  # the burst is closed, or its device has died
            self.burst.free_memory(memory)

    def close(self) -> None:
        """Ends the burst."""
        self.burst.close()


def _key(call: InPlaceCall) -> Any:
    """What is equal for requests that are laid out alike."""
    given = [(each.place, each.shape) for each in call.given]
    return given, [each and each.place for each in call.wanted], [*map(id, call.regions)]


def _check_room(port: TensorPort, room: int, needed: int | None) -> None:
    if needed is not None and needed > room:
        raise invalid(f"output {port.name!r} has {needed} bytes; its place in shared memory has {room}")


def _placed(place: Any, pools: dict[str, int], regions: RegionUse, dimensions: tuple[int, ...]) -> RequestArgument:
    return RequestArgument(
        pool=pools[place.region],
        offset=regions[place.region].begin + place.offset,
        length=place.nbytes,
        dimensions=dimensions,
    )


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


class Turn:
    """What a thread waits for: a lane, None if it is to open one, or an error."""

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
        """False: it has not come."""
        return self._ready.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def result(self) -> Lane | None:
        """Raises the error. It is done."""
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
        """Waits for a lane until the deadline, and executes there. The arrays are copies of the outputs that are not in
        shared memory, None for the others. Raises QueueFull, and as `Lane.execute`.
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
        """A new lane, which has been counted."""
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
        """To the next request. None: it opens a lane instead of one that could not be opened. False: `lane` is to be
        closed. Under the lock.
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
        """Of each burst that is free now."""
        with self._changed:
            lanes = list(self._free)
        return [lane.burst.stats() for lane in lanes]

    def close(self) -> None:
        """Finishes the requests that run and wait. There are no others from now on."""
        with self._changed:
            self._is_closed = True
            lanes, self._free = self._free, []
            self._count -= len(lanes)
            while self._count:
                self._changed.wait()
        for lane in lanes:
            lane.close()
