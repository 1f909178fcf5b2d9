"""The CPU device in the client's own process: the methods of a remote device, and nothing between call and kernel.

An execution cannot be given up half-way here, nor can it take the process down: it is numpy, as the reference is. A
request is checked and bound as a device process does it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn, Self, get_args

import numpy as np

from burst import BurstError, ErrorStatus, GeneralFailure, Result, StatusError, Timeout, Timing
from driver.buffers import Buffers
from driver.devices.reference import ReferenceDevice
from driver.errors import ExecutionFailed
from driver.future import Future
from driver.nn import validate
from driver.options import Options, Preference
from driver.plain import with_loop_timeout
from driver.request import BoundRequest
from driver.session import shapes_of
from driver.workspace import InputSet, OutputSet, Workspace, input_shapes, output_views
from fmq.end import DEFAULT_SPIN

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterable

    from numpy.typing import ArrayLike, NDArray

    from burst import Memory, Request
    from driver.buffers import Outputs
    from driver.interface import Device
    from driver.nn import Model

NAME = "cpu"


class LocalDevice:
    """Runs models in this process, by default as the reference device does. Any thread may use it."""

    address = NAME

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or ReferenceDevice()
        self.name, self.version, self.type = NAME, self._device.version, "CPU"

    def supported_operations(self, model: Model) -> list[bool]:
        """For each operation of the main subgraph: True is a promise. Raises InvalidModel."""
        validate(model)
        return self._device.supported_operations(model)

    def prepare(self, model: Model, *, preference: Preference = "fast_single_answer") -> LocalPrepared:
        """Makes a model ready. Raises InvalidModel."""
        if preference not in get_args(Preference):
            raise ValueError(f"preference={preference!r}: one of {', '.join(map(repr, get_args(Preference)))}")
        validate(model)
        return LocalPrepared(self, model, preference, self._device)

    def free_memory(self, memory: Memory) -> None:
        """Nothing is kept of pools."""

    def close(self) -> None:
        """Nothing to close: prepared models go on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalPrepared:
    """A model made ready to run in this process. Any thread may use it, several at once."""

    def __init__(self, device: LocalDevice, model: Model, preference: Preference, kernels: Device) -> None:
        """Use `device.prepare`."""
        self.device, self.model, self.preference = device, model, preference
        self._prepared = kernels.prepare(model, lambda: None)

    def run(self, *arrays: ArrayLike | None, timeout: float | None = None) -> tuple[NDArray[Any], ...]:
        """As `RemotePreparedModel.run`."""
        workspace = Workspace(InputSet(self.model, input_shapes(self.model, arrays)), OutputSet(self.model))
        workspace.inputs.fill(arrays)
        result = self.execute(workspace.request, timeout=timeout)
        if result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and workspace.grow(result.output_shapes):
            result = self.execute(workspace.request, timeout=timeout)
        result.raise_for_status()
        return result.outputs

    def execute(
        self,
        request: Request,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> Result:
        """As `RemotePreparedModel.execute`. Raises Timeout when the result comes later than in `timeout` seconds."""
        request = with_loop_timeout(request, loop_timeout)
        begin = time.monotonic()
        try:
            execution = self.bind(request)
            run_here(execution)
        except StatusError as error:
            return error.result or Result(error.status, message=str(error))
        check_time(begin, timeout)
        shapes = tuple(execution.shapes)
        return Result(
            ErrorStatus.NONE, output_views(self.model, request, shapes), shapes, timing_since(begin, measure=measure)
        )

    def bind(self, request: Request) -> BoundRequest:
        """Checks a request and binds it. Raises InvalidArgument, GeneralFailure."""
        return BoundRequest(self.model, self._prepared, request)

    def burst(self, **options: Any) -> LocalBurst:
        """As `RemotePreparedModel.burst`; what says how to wait, how deep, and how to recover has nothing to say."""
        return LocalBurst(self, options_of(self.preference, **options))

    def close(self) -> None:
        """Nothing to close: bursts go on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalBurst:
    """The surface of `driver.Burst`, where an execution is a call. Any thread may run; one does at a time."""

    def __init__(self, prepared: LocalPrepared, options: Options, buffers: Any = None) -> None:
        """Use `prepared.burst()`. `buffers`: in place of its own."""
        self._prepared, self._measure = prepared, options.measure
        self._buffers = buffers or Buffers(prepared.model, shapes_of(prepared.model, options), options.depth)
        self._bound: dict[tuple[InputSet, Outputs], tuple[Memory, BoundRequest]] = {}
        self._lock = threading.RLock()
        self._runs = self._copied = self._total_ns = 0
        self._is_closed = False

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """Arrays of the next request, to be written in place; None where an input is omitted."""
        return self._buffers.inputs.arrays

    def run(self, *arrays: Any, timeout: float | None = None) -> Result:
        """As `Burst.run`. Raises Timeout when the result comes later than in `timeout` seconds."""
        with self._lock:
            if self._is_closed:
                raise ValueError("this burst is closed; open another")
            begin = time.monotonic()
            buffers = self._buffers
            if arrays:
                self._copied += buffers.inputs.fill(arrays)
            outputs = buffers.free_outputs()
            execution = self._run(buffers.inputs, outputs)
            self._runs += 1
            self._total_ns += int((time.monotonic() - begin) * 1e9)
            check_time(begin, timeout)
            shapes = tuple(execution.shapes)
            timing = timing_since(begin, measure=self._measure)
            return Result(ErrorStatus.NONE, outputs.arrays(shapes), shapes, timing)

    def _run(self, inputs: InputSet, outputs: Outputs) -> BoundRequest:
        """Executes, once more if it lacked only room for its outputs. Raises StatusError."""
        try:
            execution = self._execution(inputs, outputs)
            run_here(execution)
        except StatusError as error:
            if not (error.result and self._buffers.grow(outputs, error.result.output_shapes)):
                raise
            return self._run(inputs, outputs)
        return execution

    def _execution(self, inputs: InputSet, outputs: Outputs) -> BoundRequest:
        """The request on that memory, bound once."""
        memory, execution = self._bound.get((inputs, outputs), (None, None))
        if execution is None or memory is not outputs.memory:
            execution = self._prepared.bind(Workspace(inputs, outputs).request)
            self._bound[inputs, outputs] = outputs.memory, execution
        return execution

    def submit(self, *arrays: Any, timeout: float | None = None) -> Future:
        """As `Burst.submit`: the future is done."""
        future = Future(self)
        try:
            return future.finish(self.run(*arrays, timeout=timeout))
        except BurstError as error:
            return future.fail(error)

    async def run_async(self, *arrays: Any) -> Result:
        """As `run`, for asyncio: the loop stands still meanwhile."""
        return self.run(*arrays)

    async def stream(self, frames: Iterable[Any]) -> AsyncIterator[Result]:
        """As `Burst.stream`, for an ordinary iterable."""
        for frame in frames:
            yield self.run(*(frame if isinstance(frame, tuple) else (frame,)))

    def execute(self, request: Request, **terms: Any) -> Result:
        """As `LocalPrepared.execute`."""
        return self._prepared.execute(request, **terms)

    def free_memory(self, memory: Memory) -> None:
        """Nothing is kept of pools."""

    def stats(self) -> dict[str, Any]:
        """The figures of `Burst.stats` that there are here."""
        return {
            "runs": {"burst": self._runs, "plain": 0},
            "in_flight": 0,
            "copied_bytes": {"bulk": self._copied, "control": 0},
            "seconds": {"total": self._total_ns / 1e9},
        }

    def close(self) -> None:
        """Ends the burst. Arrays stay readable."""
        with self._lock:
            self._is_closed = True
            self._bound.clear()
            self._buffers.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a burst cannot be pickled: pickle the model, and compile it where it is unpickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- of futures, which are done

    def wait_for(self, future: Future, timeout: float | None) -> None:
        """They are done."""

    def drop(self, future: Future) -> bool:
        """They are done."""
        return False

    def arrival(self, future: Future) -> asyncio.Future[None]:
        """They are done."""
        raise AssertionError(future)


def options_of(preference: Preference, **options: Any) -> Options:
    """Checked, with the defaults of `RemotePreparedModel.burst`. Raises ValueError, TypeError."""
    defaults = Options(0.0 if preference == "low_power" else DEFAULT_SPIN, "memfd", False, None, 1, "block", False)
    if unknown := options.keys() - set(Options._fields):
        raise TypeError(f"burst() takes {', '.join(Options._fields)}, and not {', '.join(sorted(unknown))}")
    given = {name: value for name, value in options.items() if name != "spin" or value is not None}
    return defaults._replace(**given).checked()


def run_here(execution: BoundRequest) -> None:
    """As a device process does it. Raises StatusError."""
    try:
        with np.errstate(all="ignore"):
            execution.run()
    except ExecutionFailed as error:
        raise GeneralFailure(str(error)) from error


def check_time(begin: float, timeout: float | None) -> None:
    """Raises Timeout when more than `timeout` seconds have passed since."""
    if timeout is not None and time.monotonic() - begin > timeout:
        raise Timeout(f"no result within {timeout} s; it came later, and is dropped")


def timing_since(begin: float, *, measure: bool) -> Timing:
    """All of it on the device, which is us."""
    microseconds = int((time.monotonic() - begin) * 1e6) if measure else None
    return Timing(microseconds, microseconds)
