"""Executions on a GPU: copies in, work and copies out, in three streams, so that successive requests overlap.

An execution has memory of the GPU of its own for each argument, so the next request may be copied in while this one
computes. Within a lane executions compute one after the other. When the last copy is out, a host function of the stream
publishes the answer (`burst_inflight_complete`): no thread of Python waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from burst._core import ffi as burst_ffi
from burst._core import lib as burst_lib
from burst.executor import COMPLETED
from burst.serving_thread import ServingThread
from burst.work_notes import work_note
from driver.devices.cuda.driver_api import CudaFailed
from driver.devices.cuda.pools import PinnedPools, Staging
from driver.devices.cuda.work_clock import IN, KERNELS, OUT, WorkClock, WorkTimes
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.interface import BoundExecution, BufferArgument
from driver.nn.arena import on_accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from driver.devices.cuda.context import CudaContext, CudaEvent, CudaStream, DeviceMemory, PinnedMemory
    from driver.devices.cuda.device_buffers import GpuBuffer

_log = logging.getLogger(__name__)
_COMPLETED_AFTER = int(burst_ffi.cast("uintptr_t", burst_ffi.addressof(burst_lib, "burst_inflight_copy_and_complete")))
_LOOK = 0.05
"""Seconds between two looks at whether the context is lost, while executions go on."""


class CudaGpu:
    """The state that all executions of an engine share on one GPU: the context, clients' pools, and the context's
    watch.
    """

    def __init__(self, context: CudaContext, give_up: Callable[[str], object]) -> None:
        """`give_up`: ends the engine; called with the reason when the context is lost."""
        self.context = context
        context.on_lost, context.is_at_home = give_up, True
        self.pools, self.staging, self.clock = PinnedPools(context), Staging(context), WorkClock(context)
        self._lanes: weakref.WeakSet[CudaLane] = weakref.WeakSet()
        self._busy, self._starting = threading.Event(), threading.Lock()
        self._thread = ServingThread(self._watch, name="cuda-watch")

    def lane(self, priority: int = 0) -> CudaLane:
        """Return a new lane. Raise CudaFailed."""
        lane = CudaLane(self, priority)
        with self._starting:
            self._lanes.add(lane)
            if not self._thread.has_started:
                self._thread.start()
        return lane

    def begins(self) -> None:
        """Begin an execution. CUDA calls no host function once the context is lost, so look for that."""
        if not self._busy.is_set():
            self._busy.set()

    def _watch(self) -> None:
        while True:
            self._busy.wait()
            time.sleep(_LOOK)
            self._busy.clear()  # before the looks: an execution that begins meanwhile sets it again
            try:
                self._look()
            except CudaFailed as error:  # of a lost context the engine has been told
                _log.warning("a look at the GPU's streams failed: %s", error)

    def _look(self) -> None:
        """Look at all lanes, until they are idle and have told their times. Raise CudaFailed. Lanes live no longer for
        it.
        """
        with self._starting:
            lanes = list(self._lanes)
        for lane in lanes:
            if not (lane.is_idle() & lane.tell_times()):
                self._busy.set()


class GpuArgument:
    """An argument of a request: where it lies in the client's memory, and in the GPU's.

    A driver's buffer that is in the GPU's memory (it has an `address`) is used where it lies.
    """

    def __init__(self, gpu: CudaGpu, given: NDArray[Any] | BufferArgument, nbytes: int, *, is_input: bool) -> None:
        """Take memory of a request. Raise CudaFailed."""
        self._gpu, self.nbytes = gpu, nbytes
        self.memory: DeviceMemory | None = None
        self._block: PinnedMemory | None = None
        self._given = given  # what keeps the memory mapped
        self.buffer: GpuBuffer | None = None
        if isinstance(given, BufferArgument):
            self.buffer = cast("GpuBuffer", given.buffer)
            self.address: int = self.buffer.address + given.offset
            return
        self._claim: object = on_accelerator.get()(max(1, nbytes))  # raises for a client that has its share
        self.memory = gpu.context.allocate(max(1, nbytes))
        self.address = self.memory.address
        if nbytes and not gpu.pools.pin(given):
            self._block = gpu.staging.take(nbytes)  # last: a block is given back by `close` alone
        self.lies_at: int = given.ctypes.data
        self.host = self._block.address if self._block else self.lies_at
        self._staged: NDArray[np.uint8] | None = None
        if self._block:
            self._staged = np.frombuffer(self._block.view(), np.uint8)[:nbytes]
            self._bytes = given.reshape(-1).view(np.uint8)[:nbytes] if is_input else given[:nbytes]

    @property
    def staged_bytes(self) -> int:
        """The bytes that the CPU copies in each run."""
        return self.nbytes if self._block else 0

    @property
    def is_copied(self) -> bool:
        """True if each run copies it, to or from the client's memory."""
        return self.memory is not None and self.nbytes > 0

    def copy_in(self, stream: CudaStream) -> None:
        """Copy it to the GPU, if it is copied. Raise CudaFailed."""
        if not self.is_copied:
            return
        if self._staged is not None:
            np.copyto(self._staged, self._bytes)
        stream.copy_in(self.address, self.host, self.nbytes)

    def copy_out(self, stream: CudaStream) -> None:
        """Copy to the client's memory, or to the block. Raise CudaFailed."""
        if self.is_copied:
            stream.copy_out(self.host, self.address, self.nbytes)

    def meets(self, other: GpuArgument) -> bool:
        """Return True if both have a byte of the client's memory of the CPU in common."""
        if not (self.is_copied and other.is_copied):
            return False
        return self.lies_at < other.lies_at + other.nbytes and other.lies_at < self.lies_at + self.nbytes

    def last_copy(self) -> tuple[int, int, int] | None:
        """Return the last copy, from the block to the client's memory: to, from, bytes. None: there is no block."""
        return (self._bytes.ctypes.data, self.host, self.nbytes) if self._block else None

    def close(self) -> None:
        """Free its memory. Nothing runs on it any more."""
        if self.memory is not None:
            self.memory.close()
            self._claim = None
        if self._block is not None:
            self._gpu.staging.give_back(self._block)
            self._block = None


class GpuExecution(BoundExecution):
    """An execution on a GPU. `work` adds what it computes to a stream, reading and writing the arguments' addresses."""

    def __init__(
        self,
        lane: CudaLane,
        inputs: Sequence[tuple[NDArray[Any] | BufferArgument, int]],
        outputs: Sequence[tuple[NDArray[Any] | BufferArgument, int]],
    ) -> None:
        """Take inputs and outputs with the bytes that they have. Raise CudaFailed."""
        self._lane, self._is_cancelled = lane, False
        arguments = list[GpuArgument]()
        weakref.finalize(self, _close, arguments).atexit = False  # first: there may be no memory for the last of them
        for given, nbytes in inputs:
            arguments.append(GpuArgument(lane.gpu, given, nbytes, is_input=True))
        for given, nbytes in outputs:
            arguments.append(GpuArgument(lane.gpu, given, nbytes, is_input=False))
        self.inputs, self.outputs = arguments[: len(inputs)], arguments[len(inputs) :]
        self.buffers = [argument.buffer for argument in arguments if argument.buffer is not None]
        self.copied_bytes = sum(argument.staged_bytes for argument in arguments)
        self.events = [lane.gpu.context.event() for _ in range(3)]  #: copied in, computed, copied out
        self._times: WorkTimes | None = None
        self.sources: weakref.WeakSet[GpuExecution] = weakref.WeakSet()  #: those of its lane that write what it reads
        lane.enter(self)
        copies = [copy for output in self.outputs if (copy := output.last_copy())]
        self._copies = burst_ffi.new("burst_copy[]", [tuple(_pointers(copy)) for copy in copies])
        self._completion = burst_ffi.new("burst_completion *", (burst_ffi.NULL, self._copies, len(copies)))

    def work(self, stream: CudaStream) -> None:
        """Add the computation to the stream. Raise CudaFailed, ExecutionFailed."""
        raise NotImplementedError

    def prepare_next(self) -> None:
        """Make later runs faster. Called with the lane's lock held, once a run and its answer are added."""

    def run(self) -> None:
        """Execute, and wait. Raise CudaFailed, and what `work` raises."""
        self._check_begin()
        self._lane.add(self).synchronize()
        for copy in self._copies:
            burst_ffi.memmove(copy.to, getattr(copy, "from"), copy.bytes)

    def _check_begin(self) -> None:
        """Raise ExecutionFailed once it was cancelled; OutputInsufficientSize for an output that does not fit."""
        if self._is_cancelled:
            raise ExecutionFailed(0, "the model", "it was cancelled")
        if not all(is_sufficient for _, is_sufficient in self.shapes):
            raise OutputInsufficientSize(tuple(self.shapes))

    def launch(self, run: int) -> None:
        """Execute, and let the stream answer. Raise what `run` does."""
        self._check_begin()
        function, argument = COMPLETED, run
        if len(self._copies):
            self._completion.run = burst_ffi.cast("void *", run)
            function, argument = _COMPLETED_AFTER, int(burst_ffi.cast("uintptr_t", self._completion))
        self._lane.add(self, (function, argument), self._timed(run))

    def _timed(self, run: int) -> WorkTimes | None:
        """Return the timer of the run that begins; None: its times are not wanted. Raise CudaFailed."""
        gpu = self._lane.gpu
        note = work_note(run) if gpu.clock.is_wanted else None
        if note is None:
            return None
        if self._times is None:
            self._times = WorkTimes(gpu.clock, gpu.context)
        self._times.request = note
        return self._times

    def cancel(self) -> None:
        """Later runs fail. Nothing stops what the GPU does: the engine ends when that goes on."""
        self._is_cancelled = True

    def is_running(self) -> bool:
        """Return True if the GPU is still busy with it."""
        try:
            return not self.events[-1].is_done()
        except CudaFailed:
            return True


class CudaLane:
    """Three streams: in, compute, out. Any thread."""

    def __init__(self, gpu: CudaGpu, priority: int = 0) -> None:
        """Make the streams. Raise CudaFailed."""
        self.gpu, self.priority = gpu, priority
        self.lock = threading.Lock()  #: held while work is added to the streams
        self.incoming, self.compute, self.outgoing = (gpu.context.stream(priority) for _ in range(3))
        self._untold = list[WorkTimes]()
        self._executions: weakref.WeakSet[GpuExecution] = weakref.WeakSet()

    def add(
        self, execution: GpuExecution, then: tuple[int, int] | None = None, times: WorkTimes | None = None
    ) -> CudaEvent:
        """Add an execution; `then`: a host function and its argument, called when its outputs are written.

        `times`: what notes when the GPU works on it. Returns the event of its end. Raise CudaFailed, ExecutionFailed;
        then nothing of it goes on.
        """
        copied, computed, done = execution.events
        with self.lock:
            self.gpu.begins()
            try:
                times = _begun(times)
                for source in execution.sources:
                    self._await(source, execution)
                with _part(times, IN, self.incoming, execution.inputs):
                    for argument in execution.inputs:
                        argument.copy_in(self.incoming)
                self.incoming.record(copied)
                self.compute.wait(copied)
                for buffer in execution.buffers:
                    buffer.await_on(self.compute)
                with times.around(KERNELS, self.compute) if times else nullcontext():
                    execution.work(self.compute)
                self.compute.record(computed)
                for buffer in execution.buffers:
                    buffer.note_use(self.compute, computed)
                self.outgoing.wait(computed)
                with _part(times, OUT, self.outgoing, execution.outputs):
                    for argument in execution.outputs:
                        argument.copy_out(self.outgoing)
                self.outgoing.record(done)
                if then:
                    self.outgoing.host_function(*then)
            except Exception:
                self._settle()
                raise
            if times:
                times.added()
                self._untold.append(times)
            execution.prepare_next()
        return done

    def enter(self, execution: GpuExecution) -> None:
        """Take a new execution.

        Note those that read what another one writes to the CPU's memory: what one has not copied out yet, the next one
        must not copy in.
        """
        with self.lock:
            for other in self._executions:
                for first, second in ((execution, other), (other, execution)):
                    if any(output.meets(source) for output in first.outputs for source in second.inputs):
                        second.sources.add(first)
            self._executions.add(execution)

    def _await(self, source: GpuExecution, execution: GpuExecution) -> None:
        """Wait until what `source` writes is there, before `execution` copies it in. Raise CudaFailed."""
        done = source.events[-1]
        if source.copied_bytes or execution.copied_bytes:  # some of it by the CPU, also after that event
            self.outgoing.synchronize()
        else:
            self.incoming.wait(done)

    def tell_times(self) -> bool:
        """Note the times of runs that have ended. False: there are others. Raise CudaFailed."""
        if not self.lock.acquire(blocking=False):  # its holder may wait for the GPU
            return not self._untold
        try:
            self._untold = [times for times in self._untold if not times.is_told()]
            return not self._untold
        finally:
            self.lock.release()

    def _settle(self) -> None:
        """Something could not be added. What was added before must not outlive the request."""
        with suppress(CudaFailed):
            for stream in (self.incoming, self.compute, self.outgoing):
                stream.synchronize()

    def is_idle(self) -> bool:
        """Return True if all work is done. Raise CudaFailed when the context is lost."""
        return all(stream.is_done() for stream in (self.incoming, self.compute, self.outgoing))


def _begun(times: WorkTimes | None) -> WorkTimes | None:
    """Return the events for the run that begins; None: they are not wanted, or cannot be had, which is no reason to
    fail a request.
    """
    try:
        if times:
            times.begin()
    except CudaFailed as error:
        _log.warning("a request has no times: %s", str(error))
        return None
    return times


def _part(
    times: WorkTimes | None, part: str, stream: CudaStream, arguments: Sequence[GpuArgument]
) -> AbstractContextManager[None]:
    """Around copies, if there are any and their times are wanted."""
    has_copies = times and any(argument.is_copied for argument in arguments)
    return times.around(part, stream) if times and has_copies else nullcontext()


def _close(arguments: Sequence[GpuArgument]) -> None:
    for argument in arguments:
        argument.close()


def _pointers(copy: tuple[int, int, int]) -> tuple[Any, Any, int]:
    to, source, nbytes = copy
    return burst_ffi.cast("void *", to), burst_ffi.cast("void *", source), nbytes
