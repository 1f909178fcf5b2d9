"""Executions bound to their memory: one call of C each, which copies what LiteRT cannot use where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from burst import ErrorStatus
from burst._core import ffi, lib
from driver.deadlines import overdue
from driver.devices.litert.library import TensorBuffers, library, status_text
from driver.devices.litert.library import ffi as library_ffi
from driver.devices.litert.weights import aligned
from driver.devices.lowering.alignment import ALIGNMENT
from driver.errors import ExecutionFailed, LoopTimeout, OutputInsufficientSize
from driver.interface import BoundExecution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from burst import StatusError
    from driver.devices.litert.program import LiteRtPort, Runnable


class LiteRtExecution(BoundExecution):
    """An execution on its memory. `native` is set when the outputs have room.

    `copied_bytes`: arguments at addresses that LiteRT cannot use in place. `checked_bytes`: of these, operands whose
    values choose an address, which are checked in private memory.
    """

    what = "the model"  #: that runs, as errors call it

    def __init__(
        self,
        program: Runnable,
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

    def _bind(self, program: Runnable, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]]) -> None:
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
        self.native = address(ffi.addressof(lib, "burst_foreign_run")), address(self._context)

    def run(self) -> None:
        """Execute once, without the GIL. Raise OutputInsufficientSize, LoopTimeout, MissedDeadlineTransient,
        ExecutionFailed.
        """
        if self._context is None:
            raise OutputInsufficientSize(tuple(self.shapes))
        if lib.burst_foreign_run(self._context):
            raise self.failure(ErrorStatus.GENERAL_FAILURE)

    def failure(self, status: ErrorStatus) -> LoopTimeout | ExecutionFailed | StatusError:
        """Return why the last run of `native` failed. The context knows more than the status."""
        del status
        if self._context.ended == lib.BURST_QUEUED:
            return overdue("queued", lib.burst_due())
        if self._context.ended == lib.BURST_OVERDUE:
            return overdue("executing", lib.burst_due())
        if self._context.ended == lib.BURST_TIMED_OUT:
            return LoopTimeout(f"a WHILE took longer than its loop timeout of {self._loop_timeout} s")
        if self._context.ended == lib.BURST_CANCELLED:
            return ExecutionFailed(0, self.what, "it was cancelled")
        return ExecutionFailed(0, self.what, self.fault(self._context.status))

    def fault(self, status: int) -> str:
        """Return the library's status in words."""
        return status_text(status)

    def cancel(self) -> None:
        """End the run in progress at its next segment, and all later ones before their first."""
        if self._context is not None:
            lib.burst_foreign_cancel(self._context)

    def is_running(self) -> bool:
        return self._context is not None and bool(lib.burst_foreign_runs(self._context))


def _place(port: LiteRtPort, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the memory that LiteRT uses for `memory`: itself if possible, else a copy."""
    return aligned(port.nbytes) if port.copied or memory.ctypes.data % ALIGNMENT else memory


def _context(
    program: Runnable, ports: TensorBuffers, before: Any, after: Any, loop_timeout: float
) -> tuple[Any, Any, Any]:
    """Return the context of burst_foreign_run, and what must live as long."""
    context = ffi.new("burst_foreign *")
    run = library_ffi.addressof(library(), "LiteRtRunCompiledModel")
    context.function = ffi.cast("foreign_function *", address(run, library_ffi))
    context.object = ffi.cast("void *", address(program.compiled.handle, library_ffi))
    handles = [
        address(buffers.handles[k], library_ffi) for buffers in (ports, program.between) for k in range(len(buffers))
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


def address(pointer: Any, of: Any = ffi) -> int:
    """Return the address of what a pointer of the library `of` points to."""
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
