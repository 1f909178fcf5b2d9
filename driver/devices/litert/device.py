"""The device, its prepared models, and executions bound to their memory."""

from __future__ import annotations

import os
import tomllib
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.litert.flatbuffer import Writer
from driver.devices.litert.library import (
    VERSION,
    Compiled,
    LibraryFailed,
    TensorBuffers,
    library,
    status_text,
)
from driver.devices.litert.library import ffi as library_ffi
from driver.devices.litert.program import Program, supported
from driver.devices.litert.weights import ALIGNMENT, aligned
from driver.devices.lowering import check_input, constants, is_known, prepared
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.nn.operation import Tensor
from fmq._core import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.nn import Model

_MAX_PROGRAMS = 16
"""Sets of input shapes that a model is kept compiled for."""

LARGE = 20_000_000
"""Products of an execution from which on it is worth more than one thread."""

MOST_THREADS = 4


def configuration() -> Path:
    """The file with the device's options. A device's environment is fixed, so that no client shapes what others get."""
    return Path("~/.config/burst/litert.toml").expanduser()


def _configured_threads() -> int | None:
    """`threads` of the configuration; None when it says nothing. Raises ValueError."""
    try:
        found = tomllib.loads(configuration().read_text()).get("threads")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{configuration()}: {error}") from error
    if found is not None and (type(found) is not int or found < 1):
        raise ValueError(f"{configuration()}: threads = {found!r} has to be a whole number above 0")
    return found


class LiteRtDevice:
    """Runs on the CPU, with XNNPACK's kernels and the others of LiteRT, what these compute exactly as the HAL says."""

    name = "litert"
    version = f"1 (LiteRT {VERSION})"
    type = "CPU"

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: of every execution; None: as configured, else one for small models and some for large ones.

        Raises LibraryMissing, LibraryFailed; ValueError for options that make no sense.
        """
        self._threads = _configured_threads() if threads is None else threads
        _self_test()

    def supported_operations(self, model: Model) -> list[bool]:
        """True for what TFLite computes exactly, with these types, layouts and constant parameters."""
        return supported(model)

    def prepare(self, model: Model, pace: Callable[[], object]) -> PreparedModel:
        """Lowered and compiled. A model whose inputs leave dimensions open is so whenever it is bound to new shapes."""
        return PreparedModel(model, pace, self.threads_for)

    def threads_for(self, work: int) -> int:
        """As many as an execution of `work` products should have. Clients need processors, too."""
        if self._threads is not None:
            return self._threads
        return 1 if work < LARGE else max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))


class PreparedModel:
    """A model for one or more sets of input shapes. Executions of one set take turns."""

    is_static = True

    def __init__(self, model: Model, pace: Callable[[], object], threads: Callable[[int], int]) -> None:
        """Raises LibraryFailed."""
        self._model, self._threads = model, threads
        self._operations = prepared(model.main, pace)
        self._constants = constants(model.main, pace)
        self.copied_weights = 0  #: bytes that were copied when it was compiled last; all others stayed where they were
        self._programs: dict[tuple[tuple[int, ...] | None, ...], Program] = {}
        operands = [model.main.operands[i] for i in model.main.inputs]
        if all(is_known(o) for o in operands):
            with suppress(ExecutionFailed):  # as a binding will say
                self._program([o.dimensions for o in operands], pace)

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        pace: Callable[[], object] = lambda: None,
        loop_timeout: float = 0.0,
    ) -> Bound:
        """As in the protocol."""
        graph = self._model.main
        for number, (index, array) in enumerate(zip(graph.inputs, inputs, strict=True)):
            check_input(number, graph.operands[index], array)
        program = self._program([None if a is None else a.shape for a in inputs], pace)
        return Bound(program, inputs, outputs)

    def operations(self) -> list[str]:
        """The TFLite operations of the program that was compiled last, in order."""
        return [name for program in [*self._programs.values()][-1:] for name in program.operations]

    def _program(self, shapes: Sequence[tuple[int, ...] | None], pace: Callable[[], object]) -> Program:
        key = tuple(shapes)
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            tensors = dict(self._constants)
            for index, shape in zip(self._model.main.inputs, shapes, strict=True):
                operand = Tensor.of(self._model.main.operands[index])
                tensors[index] = None if shape is None else replace(operand, shape=shape)
            program = Program(self._model, self._operations, tensors, self._threads, pace)
            self._programs[key] = program
            self.copied_weights = program.copied_weights
        return program


class Bound:
    """An execution on its memory. `copied_bytes`: what each copies, because it lies where LiteRT cannot use it.

    `checked_bytes`: of these, operands that choose an address, which are looked at in private memory.
    """

    def __init__(
        self, program: Program, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]]
    ) -> None:
        self.shapes = tuple(
            (shape, memory.nbytes >= port.nbytes)
            for shape, memory, port in zip(program.shapes, outputs, program.outputs, strict=True)
        )
        self.copied_bytes = self.checked_bytes = 0
        self._context: Any = None
        if all(is_sufficient for _, is_sufficient in self.shapes):
            self._program = program  # lives as long as what refers to it
            self._bind(program, inputs, outputs)

    def _bind(self, program: Program, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]]) -> None:
        before: list[tuple[Any, Any]] = []
        after: list[tuple[Any, Any]] = []
        sources, targets = [], []
        for port in program.inputs:
            array = inputs[port.number]
            assert array is not None
            memory = array.reshape(-1).view(np.uint8)
            place = aligned(port.nbytes) if port.copied or memory.ctypes.data % ALIGNMENT else memory
            if place is not memory:
                before.append((place, memory))
            sources.append((port.type, port.shape, place))
        for port in program.outputs:
            memory = outputs[port.number][: port.nbytes]
            place = aligned(port.nbytes) if memory.ctypes.data % ALIGNMENT else memory
            if place is not memory:
                after.append((memory, place))
            targets.append((port.type, port.shape, place))
        self.copied_bytes = sum(memory.nbytes for memory, _ in (*before, *after))
        self.checked_bytes = sum(port.nbytes for port in program.inputs if port.copied)
        self._kept = TensorBuffers(sources), TensorBuffers(targets), _copies(before), _copies(after), before, after
        self._context = _context(program, *self._kept[:4])
        self.native = _address(ffi.addressof(lib, "burst_foreign_run")), _address(self._context)

    def run(self) -> None:
        """Executes once, without Python's lock. Raises OutputInsufficientSize, ExecutionFailed."""
        if self._context is None:
            raise OutputInsufficientSize(self.shapes)
        if lib.burst_foreign_run(self._context):
            raise ExecutionFailed(0, "the model", status_text(self._context.status))


def _context(program: Program, inputs: TensorBuffers, outputs: TensorBuffers, before: Any, after: Any) -> Any:
    """What burst_foreign_run needs."""
    context = ffi.new("burst_foreign *")
    run = library_ffi.addressof(library(), "LiteRtRunCompiledModel")
    context.function = ffi.cast("foreign_function *", _address(run, library_ffi))
    context.object = ffi.cast("void *", _address(program.compiled.handle, library_ffi))
    context.inputs = ffi.cast("void *", _address(inputs.handles, library_ffi))
    context.outputs = ffi.cast("void *", _address(outputs.handles, library_ffi))
    context.n_inputs, context.n_outputs = len(inputs), len(outputs)
    context.before, context.n_before = before, len(before)
    context.after, context.n_after = after, len(after)
    context.turn = program.turn
    return context


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
    """One operation, from a flatbuffer to its result: a library that is not what we take it for fails here, once.

    Raises LibraryMissing, LibraryFailed.
    """
    writer = Writer()
    x, y = (writer.tensor("FLOAT32", (4,)) for _ in range(2))
    one = writer.constant("FLOAT32", np.ones(4, np.float32))
    writer.operation("ADD", [x, one], [y], "AddOptions", fusedActivationFunction=0)
    compiled = Compiled(writer.finish([x], [y]), 1)
    source, result = aligned(16), aligned(16)
    source.view(np.float32)[:] = range(4)
    inputs, outputs = (TensorBuffers([("FLOAT32", (4,), memory)]) for memory in (source, result))
    status = library().LiteRtRunCompiledModel(compiled.handle, 0, 1, inputs.handles, 1, outputs.handles)
    if status or result.view(np.float32).tolist() != [1, 2, 3, 4]:
        raise LibraryFailed(f"self test: status {status}, {result.view(np.float32)} for [0, 1, 2, 3] + 1")
