"""The device, its prepared models, and executions bound to their memory."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import ErrorStatus
from burst._core import ffi, lib
from driver.config import configured
from driver.deadlines import overdue
from driver.devices.litert.flatbuffer import FlatbufferWriter
from driver.devices.litert.library import (
    VERSION,
    Compiled,
    TensorBuffers,
    library,
    missing,
    status_text,
)
from driver.devices.litert.library import ffi as library_ffi
from driver.devices.litert.packed import Packing
from driver.devices.litert.program import LiteRtPort, LiteRtProgram, lowered, restored, supported
from driver.devices.litert.weights import aligned
from driver.devices.lowering.errors import LibraryFailed
from driver.devices.lowering.model import ALIGNMENT, LoweredModel, LoweringDevice
from driver.devices.lowering.placing import at_once
from driver.errors import ExecutionFailed, LoopTimeout, OutputInsufficientSize
from driver.interface import BoundExecution, CacheFiles
from driver.nn import LOOP_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from burst import StatusError
    from driver.devices.lowering.placing import Tensors
    from driver.interface import Saved
    from driver.nn import Model
    from driver.options import Preference

LARGE = 20_000_000
"""Executions with as many multiply-adds or more get more than one thread."""

MOST_THREADS = 4

_MOST_OPTION = 2**31 - 1


def configuration() -> Path:
    """The file with the device's options; not the environment, which the first client would set for all others."""
    return Path("~/.config/burst/litert.toml").expanduser()


def _configured() -> dict[str, Any]:
    """The options in the configuration file. Raises ValueError."""
    found = configured(configuration())
    if unknown := found.keys() - {"threads"}:
        raise ValueError(f"{configuration()}: unknown option {', '.join(sorted(unknown))}; the only option is threads")
    threads = found.get("threads", 1)
    if type(threads) is not int or not 1 <= threads <= _MOST_OPTION:
        raise ValueError(f"{configuration()}: threads = {threads!r} must be a positive integer")
    return found


class LiteRtDevice(LoweringDevice[LiteRtProgram]):
    """Runs models on the CPU with LiteRT and XNNPACK, where their kernels compute exactly what the HAL says."""

    name = "litert"
    version = f"2 (LiteRT {VERSION})"
    type = "CPU"
    cache_files = CacheFiles(2, 0)  #: the description of a program, and its flatbuffer

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: of each execution; None: as configured, else one for small models and several for large ones.

        Raises LibraryMissing, LibraryFailed; ValueError for invalid options.
        """
        options = _configured()
        self._threads = options.get("threads") if threads is None else threads
        self._packing = Packing()
        _self_test()

    @classmethod
    def missing(cls) -> str | None:
        return missing()

    def supported_operations(self, model: Model) -> list[bool]:
        """True for what TFLite computes exactly, with these types, layouts and constant parameters."""
        return supported(model)

    def lowered(
        self,
        model: Model,
        pace: Callable[[], object],
        threads: Callable[[int], int],
        program: LiteRtProgram | None = None,
    ) -> LiteRtModel:
        return LiteRtModel(model, pace, threads, self._packing, program)

    def restored(self, saved: Saved, root: NDArray[np.uint8], threads: Callable[[int], int]) -> LiteRtProgram:
        return LiteRtProgram(*restored(saved, root), threads, self._packing.compiled)

    def threads_for(self, work: int, preference: Preference = "fast_single_answer") -> int:
        """How many threads an execution of `work` products gets. A client that does not wait needs a processor, too.

        Executions of a prepared model take turns here, so "sustained_speed" gets as many as the others.
        """
        if preference == "low_power":
            return 1
        if self._threads is not None:
            return self._threads
        processors = os.cpu_count() or 1
        return 1 if work < LARGE else min(MOST_THREADS, max(processors // 2, min(2, processors)))


class LiteRtModel(LoweredModel[LiteRtProgram]):
    """A model for one or more sets of input shapes. Executions of one set take turns."""

    def __init__(
        self,
        model: Model,
        pace: Callable[[], object],
        threads: Callable[[int], int],
        packing: Packing,
        program: LiteRtProgram | None = None,
    ) -> None:
        """Raises LibraryFailed."""
        self._threads, self._packing = threads, packing
        self.copied_weights = 0  #: bytes that were copied when it was compiled last; all others stayed where they were
        super().__init__(model, pace, program)

    def compiled(self, tensors: Tensors, pace: Callable[[], object]) -> LiteRtProgram:
        program = LiteRtProgram(
            *lowered(self.model, self.prepared, tensors, pace), self._threads, self._packing.compiled
        )
        self.copied_weights = program.copied_weights
        return program

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        pace: Callable[[], object] = at_once,
        loop_timeout: float = LOOP_TIMEOUT,
    ) -> LiteRtExecution:
        return LiteRtExecution(self.program_for(inputs, pace), inputs, outputs, loop_timeout)


class LiteRtExecution(BoundExecution):
    """An execution on its memory. `native` is set when the outputs have room.

    `copied_bytes`: arguments at addresses that LiteRT cannot use in place. `checked_bytes`: of these, operands whose
    values choose an address, which are checked in private memory.
    """

    def __init__(
        self,
        program: LiteRtProgram,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        loop_timeout: float,
    ) -> None:
        self.shapes = tuple(
            (shape, memory.nbytes >= port.nbytes)
            for shape, memory, port in zip(program.shapes, outputs, program.outputs, strict=True)
        )
        self._loop_timeout = loop_timeout
        self._context: Any = None
        if all(is_sufficient for _, is_sufficient in self.shapes):
            self._program = program  # lives as long as what refers to it
            self._bind(program, inputs, outputs)

    def _bind(
        self, program: LiteRtProgram, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]]
    ) -> None:
        before: list[tuple[Any, Any]] = []
        after: list[tuple[Any, Any]] = []
        found = []
        for port in program.inputs:
            array = inputs[port.number]
            assert array is not None
            memory = array.reshape(-1).view(np.uint8)
            place = _place(port, memory)
            if place is not memory:
                before.append((place, memory))
            found.append((port.type, port.shape, place))
        for port in program.outputs:
            memory = outputs[port.number][: port.nbytes]
            place = _place(port, memory)
            if place is not memory:
                after.append((memory, place))
            found.append((port.type, port.shape, place))
        self.copied_bytes = sum(memory.nbytes for memory, _ in (*before, *after))
        self.checked_bytes = sum(port.nbytes for port in (*program.inputs, *program.outputs) if port.copied)
        ports, copies = TensorBuffers(found), (_copies(before), _copies(after))
        self._context, *more = _context(program, ports, *copies, self._loop_timeout)
        self._kept = ports, copies, before, after, more
        self.native = _address(ffi.addressof(lib, "burst_foreign_run")), _address(self._context)

    def run(self) -> None:
        """Executes once, without the GIL. Raises OutputInsufficientSize, LoopTimeout, MissedDeadlineTransient,
        ExecutionFailed.
        """
        if self._context is None:
            raise OutputInsufficientSize(tuple(self.shapes))
        if lib.burst_foreign_run(self._context):
            raise self.failure(ErrorStatus.GENERAL_FAILURE)

    def failure(self, status: ErrorStatus) -> LoopTimeout | ExecutionFailed | StatusError:
        """Why the last run of `native` failed. The context knows more than the status."""
        del status
        if self._context.ended == lib.BURST_QUEUED:
            return overdue("queued", lib.burst_due())
        if self._context.ended == lib.BURST_OVERDUE:
            return overdue("executing", lib.burst_due())
        if self._context.ended == lib.BURST_TIMED_OUT:
            return LoopTimeout(f"a WHILE took longer than its loop timeout of {self._loop_timeout} s")
        was_cancelled = self._context.ended == lib.BURST_CANCELLED
        return ExecutionFailed(
            0, "the model", "it was cancelled" if was_cancelled else status_text(self._context.status)
        )

    def cancel(self) -> None:
        """Ends the run in progress at its next segment, and all later ones before their first."""
        if self._context is not None:
            lib.burst_foreign_cancel(self._context)


def _place(port: LiteRtPort, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The memory that LiteRT uses for `memory`: itself if possible, else a copy."""
    return aligned(port.nbytes) if port.copied or memory.ctypes.data % ALIGNMENT else memory


def _context(
    program: LiteRtProgram, ports: TensorBuffers, before: Any, after: Any, loop_timeout: float
) -> tuple[Any, Any, Any]:
    """The context of burst_foreign_run, and what must live as long."""
    context = ffi.new("burst_foreign *")
    run = library_ffi.addressof(library(), "LiteRtRunCompiledModel")
    context.function = ffi.cast("foreign_function *", _address(run, library_ffi))
    context.object = ffi.cast("void *", _address(program.compiled.handle, library_ffi))
    handles = [
        _address(buffers.handles[k], library_ffi) for buffers in (ports, program.between) for k in range(len(buffers))
    ]
    lists, steps = [], []
    for number, segment in enumerate(program.segments):
        given, results = (
            ffi.new("void *[]", [ffi.cast("void *", handles[k]) for k in places])
            for places in (segment.inputs, segment.outputs)
        )
        lists += [given, results]
        limit = max(1, int(segment.loops * loop_timeout * 1e9)) if segment.loops else 0
        steps.append((number, len(given), len(results), given, results, limit))
    context.steps = table = ffi.new("burst_step[]", steps)
    context.n_steps = len(steps)
    context.before, context.n_before = before, len(before)
    context.after, context.n_after = after, len(after)
    context.turn = program.turn
    return context, table, lists


def _address(pointer: Any, of: Any = ffi) -> int:
    return int(of.cast("uintptr_t", pointer))


def _copies(pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> Any:
    """burst_copy of each (to, from)."""
    return ffi.new(
        "burst_copy[]",
        [
            (ffi.cast("void *", to.ctypes.data), ffi.cast("void *", source.ctypes.data), source.nbytes)
            for to, source in pairs
        ],
    )


@cache
def _self_test() -> None:
    """Runs one operation, from a flatbuffer to its result: a library with another ABI than expected fails here, once.

    Raises LibraryMissing, LibraryFailed.
    """
    writer = FlatbufferWriter()
    graph = writer.section()
    x, y = (graph.tensor("FLOAT32", (4,)) for _ in range(2))
    one = graph.constant("FLOAT32", np.ones(4, np.float32))
    graph.operation("ADD", [x, one], [y], "AddOptions", fusedActivationFunction=0)
    graph.inputs, graph.outputs = [x], [y]
    compiled = Compiled(writer.finish(), 1)
    source, result = aligned(16), aligned(16)
    source.view(np.float32)[:] = range(4)
    inputs, outputs = (TensorBuffers([("FLOAT32", (4,), memory)]) for memory in (source, result))
    status = library().LiteRtRunCompiledModel(compiled.handle, 0, 1, inputs.handles, 1, outputs.handles)
    if status or result.view(np.float32).tolist() != [1, 2, 3, 4]:
        raise LibraryFailed(f"self test: status {status}, and [0, 1, 2, 3] + 1 is {result.view(np.float32)}")
