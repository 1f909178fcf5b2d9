"""A model served to many tasks of one event loop: replicas behind one bounded queue.

A replica is a burst. The queue gives the next requests to the replica that has the fewest; no thread stands between a
task and the device.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from burst import DeviceUnavailable, MissedDeadlineTransient, StatusError
from driver.client.names import together
from driver.client.surface import signature
from driver.client.tasks import TaskTimes
from driver.client.workspace import shapes_of
from driver.deadlines import WAITING, seconds_left
from driver.replicas.batching import apart, batch_gain, joinable, joined
from driver.replicas.figures import ServerFigures
from driver.replicas.waiting import ExecutionEstimate, QueueFull, RequestQueue, WaitingRequest
from fmq import clock
from fmq.clock import FOREVER
from fmq.process_bound import ProcessBound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from burst import Result
    from driver.client.layout import Shapes
    from driver.client.surface import AnyBurst, AnyPreparedModel
    from driver.nn import Model
    from driver.replicas.options import ServeOptions

_log = logging.getLogger(__name__)
LEAST_GAIN = 1.1
"""Requests are joined where as many rows a second more come of it: it has them wait for each other."""


class Replica:
    """A burst, and what it has to do."""

    def __init__(self, burst: AnyBurst) -> None:
        self.burst = burst
        self.in_flight = self.executions = 0

    def enter(self) -> ReplicaPlace:
        """Enter for one more execution."""
        return ReplicaPlace(self)

    def load(self) -> tuple[bool, int]:
        """Return its load, for comparison. A device may still execute what no caller waits for any more."""
        return not self.burst.source.has_room, self.in_flight

    def report(self) -> dict[str, Any]:
        return {"executions": self.executions, "in_flight": self.in_flight, "burst": self.burst.stats()}


class ReplicaPlace:
    """The place of an execution in its replica, until it is left."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self._is_left = replica, False
        replica.in_flight += 1

    def leave(self) -> bool:
        """Give the place back; return False if that was done before."""
        if self._is_left:
            return False
        self._is_left = True
        self.replica.in_flight -= 1
        return True


class ModelServer(ProcessBound):
    """One model for any number of tasks of one event loop. `CompiledModel.serve` makes it."""

    to_send = "pickle the compiled model, and serve the unpickled one"

    def __init__(self, prepared: AnyPreparedModel, options: ServeOptions) -> None:
        """Use `CompiledModel.serve`, and `open` before `run`."""
        self._prepared, self.options = prepared, options
        self.figures = ServerFigures()
        self._queue = RequestQueue(options.queue, options.batch, options.batch_window)
        self._estimate = ExecutionEstimate()
        self._batch_gain: float | None = None
        self._replicas: list[Replica] = []
        self._batches: set[asyncio.Task[None]] = set()
        self._bursts = ExitStack()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._refuses = "it has not been opened: use it in `async with`"
        self._callers, self._idle = 0, asyncio.Event()

    @property
    def name(self) -> str:
        """For people."""
        return self.options.name or f"the server of {signature(self.model)}"

    @property
    def model(self) -> Model:
        """The model that is executed."""
        return self._prepared.model

    # ---- requests

    async def run(
        self, *arrays: Any, timeout: float | None = None, deadline: float | None = None, **by_name: Any
    ) -> tuple[Any, ...]:
        """Execute once, when it is this request's turn. Takes and returns what `CompiledModel.run` does.

        `timeout`: seconds from now; `deadline`: a time.monotonic(). The device is told the earlier one. With `batch`,
        the first dimension of each input is the rows of this request, and the outputs have as many.

        Raise QueueFull at once when as many requests wait as may; Timeout or MissedDeadline* when it is not done in
        time; ValueError for inputs that do not fit; DeviceUnavailable when the server drains or is closed; StatusError,
        and PeerDied when the device is gone for good.
        """
        request = self._admitted(together(arrays, by_name), TaskTimes.of(timeout, deadline))
        expiry = self._expiry(request)
        self._callers += 1
        try:
            found: Any = await request.done
            outputs: tuple[Any, ...] = (
                await self._execute_alone(found, request) if type(found) is ReplicaPlace else found
            )
        except asyncio.CancelledError:
            self.figures.cancelled += 1
            raise
        except TimeoutError:
            self.figures.missed += 1
            raise
        except BaseException:
            self.figures.failed += 1
            raise
        finally:
            if expiry:
                expiry.cancel()
            self._drop(request)
            self._callers -= 1
            if not self._callers:
                self._idle.set()
        self.figures.note_answer(clock.now() - request.begin)
        return outputs

    def _drop(self, request: WaitingRequest) -> None:
        """Drop the request of a task that has ended: it may have been cancelled before it saw that it has a place."""
        done = request.done
        if done.done() and not done.cancelled() and not done.exception() and type(done.result()) is ReplicaPlace:
            self._leave(done.result())
        else:
            self._queue.discard(request)

    def _admitted(self, arrays: tuple[Any, ...], times: TaskTimes) -> WaitingRequest:
        loop = asyncio.get_running_loop()
        if self._refuses:
            raise DeviceUnavailable(f"{self.name} takes no requests: {self._refuses}")
        if loop is not self._loop:
            raise RuntimeError("this server belongs to another event loop; serve threads with `with model.serve(…)`")
        rows, key = 1, None
        if self._queue.batch > 1:
            arrays, rows, key = joinable(self.model, arrays)
        self.figures.requests += 1
        if self._queue.is_full and not self._has_room:
            self.figures.refused += 1
            raise self._full()
        request = WaitingRequest(arrays, times, loop.create_future(), rows, key=key)
        if any(replica.in_flight for replica in self._replicas):
            self._queue.note_company()
        self._queue.append(request)
        self._dispatch()
        return request

    def _full(self) -> QueueFull:
        each = self._estimate.usual / 1e9 / len(self._replicas)
        return QueueFull(
            f"{self.name}: {len(self._queue)} requests wait, which is all that queue={self.options.queue} allows; try "
            "again later, or send fewer at once",
            max(0.001, each * len(self._queue) / 2),
        )

    def _expiry(self, request: WaitingRequest) -> asyncio.TimerHandle | None:
        left = seconds_left(request.times.end)
        if left is None or request.done.done():
            return None
        return asyncio.get_running_loop().call_later(left, self._expire, request)

    def _expire(self, request: WaitingRequest) -> None:
        request.miss("queued" if self._queue.discard(request) else WAITING)

    # ---- replicas

    @property
    def _has_room(self) -> bool:
        return any(replica.in_flight < self.options.depth for replica in self._replicas)

    def _free_replicas(self) -> Iterator[Replica]:
        """Return those that take one more, the one with the fewest first."""
        while self._replicas:
            replica = min(self._replicas, key=Replica.load)
            if replica.in_flight >= self.options.depth:
                return
            yield replica

    def _dispatch(self) -> None:
        """Give waiting requests to the replicas that have room."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        for replica in self._free_replicas():
            ready = self._queue.take(self._estimate, at_once=bool(self._refuses))
            if ready.again is not None:
                left = seconds_left(ready.again) or 0.0
                self._timer = asyncio.get_running_loop().call_later(left, self._dispatch)
            if not ready.requests:
                break
            place = replica.enter()
            if len(ready.requests) == 1:
                ready.requests[0].done.set_result(place)  # its own task executes it
                continue
            task = asyncio.get_running_loop().create_task(self._execute_together(place, ready.requests))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    def _leave(self, place: ReplicaPlace) -> None:
        if place.leave():
            self._dispatch()

    async def _execute_alone(self, place: ReplicaPlace, request: WaitingRequest) -> tuple[Any, ...]:
        """Execute it in the request's own task, which may be cancelled."""
        try:
            return (await self._outputs(place, [request]))[0]
        except MissedDeadlineTransient as error:
            raise request.times.error(error) from None

    async def _execute_together(self, place: ReplicaPlace, requests: list[WaitingRequest]) -> None:
        """Execute them in a task of its own: each of the callers may give up, and the others wait on."""
        try:
            outputs = await self._outputs(place, requests)
        except Exception as error:  # noqa: BLE001 (it is what the callers get)
            if isinstance(error, StatusError) and not isinstance(error, TimeoutError):
                await self._execute_one_by_one(place.replica, requests)
                return
            for request in requests:
                _fail(request, error)
            return
        for request, its in zip(requests, outputs, strict=True):
            if not request.done.done():
                request.done.set_result(its)

    async def _execute_one_by_one(self, replica: Replica, requests: list[WaitingRequest]) -> None:
        """Execute them one by one after a batch failed: one of its requests may be the cause, which must not fail the
        others.
        """
        for request in requests:
            if request.done.done():
                continue
            try:
                request.done.set_result(await self._execute_alone(replica.enter(), request))
            except Exception as error:  # noqa: BLE001 (as above)
                _fail(request, error)

    async def _outputs(self, place: ReplicaPlace, requests: list[WaitingRequest]) -> list[tuple[Any, ...]]:
        """Return the outputs of each request. The device is told the latest deadline: earlier ones are judged here."""
        begin, end = clock.now(), max(request.end for request in requests)
        self.figures.note_begin(requests, begin)
        deadline = None if end == FOREVER else end / 1e9
        try:
            result: Result = await place.replica.burst.run_async(*joined(requests), deadline=deadline)
            result.raise_for_status()
            took = clock.now() - begin
            self._estimate.took(took)
            self.figures.executed.append(took)
            place.replica.executions += 1
            return apart(result.outputs, requests)
        finally:
            self._leave(place)

    # ---- the server

    async def open(self) -> None:
        """Open the replicas, and warm them up. Raise what `CompiledModel.burst` does."""
        self._loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(asyncio.to_thread(self._open_bursts))
        try:
            await asyncio.shield(opening)
        except BaseException:
            if not opening.done():
                await asyncio.wait([opening])
            await asyncio.to_thread(self._bursts.close)
            raise
        self._refuses = ""

    def _open_bursts(self) -> None:
        its, model = self.options, self.model
        shapes, is_known = _first_shapes(model, its)
        joined_shapes = _with_rows(shapes, its.batch)
        sets = [shapes, joined_shapes] if its.batch > 1 else [shapes]
        for _ in range(its.replicas):
            burst = self._prepared.burst(depth=its.depth, recover=its.recover, input_shapes=shapes)
            self._bursts.callback(burst.close)
            self._replicas.append(Replica(burst))
            if its.warm_up and is_known:
                burst.warm_up(sets)
        if its.warm_up and is_known and its.batch > 1 and joined_shapes != shapes:
            self._measure_batch_gain(shapes, joined_shapes)

    def _measure_batch_gain(self, alone: Shapes, together: Shapes) -> None:
        """Join no requests where nothing is gained by it."""
        bursts = [replica.burst for replica in self._replicas]
        try:
            self._batch_gain = gain = batch_gain(bursts, alone, together, self.options.depth)
        except StatusError as error:  # as many at once need more than one does
            _log.warning("%s joins requests: what that gains could not be measured: %s", self.name, error)
            return
        if gain < LEAST_GAIN:
            rows, self._queue.batch = self._queue.batch, 1
            _log.warning(
                "%s joins no requests: %d rows together give %.2f times the rows a second, not %.2f",
                *(self.name, rows, gain, LEAST_GAIN),
            )

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait for those that are here; return False if `timeout` seconds do not suffice."""
        self._refuses = self._refuses or "it drains"
        self._dispatch()  # what waits for company goes now
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout):
                while self._callers:
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, *, drain: bool = True) -> None:
        """Close the replicas, after `drain`. Requests that are left get DeviceUnavailable."""
        if drain and self._replicas:
            await self.drain()
        self._refuses = "it is closed"
        for request in self._queue:
            self._queue.discard(request)
            _fail(request, DeviceUnavailable(f"{self.name} was closed before the result came"))
        self._replicas, bursts = [], self._bursts.pop_all()
        await asyncio.shield(asyncio.to_thread(bursts.close))
        if self._batches:
            await asyncio.wait(self._batches)

    def stats(self) -> dict[str, Any]:
        """Return what the server has done since it was opened.

        Counts, but for `seconds`, and for times in the `stages` of `replicas`, which are microseconds.

        `requests`, of which were `answered`, `refused` (no room in the queue), `missed` (their time), `failed` and
        `cancelled`; how many are `waiting` and `executing` now. `batch`: rows that may run together, 1 where joining
        gains nothing; `batch_gain`: how many times as many rows a second came of it at warm-up, None where that was
        not measured. `batches`: how often so many requests ran together.
        `seconds`: of the latest requests, the median and the 99th percentile of the time in the queue (`queued`), from
        there to the result (`executed`), and of all (`total`). `replicas`: of each, its executions, its requests in
        flight, and the `stats()` of its burst.
        """
        figures = self.figures
        return {
            "name": self.name,
            **figures.counts(),
            "waiting": len(self._queue),
            "executing": sum(each.in_flight for each in self._replicas),
            "batch": self._queue.batch,
            "batch_gain": self._batch_gain,
            "batches": dict(sorted(figures.batches.items())),
            "seconds": figures.seconds(),
            "replicas": [each.report() for each in self._replicas],
        }

    def __repr__(self) -> str:
        return f"<ModelServer {self.name}: {len(self._replicas)} replicas, {len(self._queue)} requests wait>"


def _first_shapes(model: Model, options: ServeOptions) -> tuple[Shapes, bool]:
    """Return the shapes of the inputs of a first request, and True if the model takes them: it may not where we
    guessed.
    """
    if options.shapes is not None:
        return shapes_of(model, options.shapes, "serve(shapes=…)"), True
    found, is_known = [], True
    for tensor in model.inputs:
        sizes = (1,) if tensor.shape is None else tensor.shape
        is_known = is_known and tensor.shape is not None and None not in sizes[1:]
        found.append(tuple(size or 1 for size in sizes))
    return tuple(found), is_known


def _with_rows(shapes: Shapes, rows: int) -> Shapes:
    return tuple(None if shape is None else (rows, *shape[1:]) for shape in shapes)


def _fail(request: WaitingRequest, error: BaseException) -> None:
    if not request.done.done():
        request.done.set_exception(request.times.error(error) if isinstance(error, MissedDeadlineTransient) else error)
