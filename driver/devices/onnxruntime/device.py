"""The device, its prepared models, and executions bound to their memory."""

from __future__ import annotations

import os
import threading
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from driver.devices.lowering import Programs, Tensors
from driver.devices.onnxruntime.library import (
    PROVIDERS,
    LibraryFailed,
    Session,
    library,
    require_provider,
    run_options,
    version,
)
from driver.devices.onnxruntime.program import Port, Program, supported
from driver.devices.onnxruntime.writer import Writer, model
from driver.errors import ExecutionFailed, LoopTimeout, OutputInsufficientSize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.nn import Model

LARGE = 20_000_000
"""Products of an execution from which on it is worth more than one thread."""

MOST_THREADS = 4


class Options(NamedTuple):
    """What the configuration may say."""

    threads: int | None = None
    provider: str = "cpu"


def configuration() -> Path:
    """The file with the device's options. A device's environment is fixed, so that no client shapes what others get."""
    return Path("~/.config/burst/onnxruntime.toml").expanduser()


def configured() -> Options:
    """What the configuration says. Raises ValueError."""
    try:
        found = tomllib.loads(configuration().read_text())
    except FileNotFoundError:
        return Options()
    except (OSError, ValueError) as error:
        raise ValueError(f"{configuration()}: {error}") from error
    threads, provider = found.get("threads"), found.get("provider", "cpu")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"{configuration()}: threads = {threads!r} has to be a whole number above 0")
    if provider not in PROVIDERS:
        raise ValueError(f"{configuration()}: provider = {provider!r} has to be one of {', '.join(PROVIDERS)}")
    return Options(threads, provider)


class OnnxRuntimeDevice:
    """Runs on the CPU or by CUDA, with ONNX Runtime's kernels."""

    name = "onnxruntime"
    version = f"1 (ONNX Runtime {version()})"
    type = "CPU"

    def __init__(self, threads: int | None = None, provider: str | None = None) -> None:
        """`threads`: of every execution; None: as configured, else one for small models and some for large ones.

        `provider`: "cpu" or "cuda"; None: as configured, else the CPU.

        Raises LibraryMissing, LibraryFailed; ValueError for options that make no sense.
        """
        options = configured()
        self._threads = options.threads if threads is None else threads
        self._provider = options.provider if provider is None else provider
        library()
        require_provider(self._provider)
        if self._provider == "cuda":
            self.type = "GPU"
        self_test(self._provider)

    def supported_operations(self, model: Model) -> list[bool]:
        """True for what ONNX Runtime computes as the HAL says, with these types, layouts and constant parameters."""
        return supported(model)

    def prepare(self, model: Model, pace: Callable[[], object]) -> PreparedModel:
        """Lowered and compiled. A model whose inputs leave dimensions open is so whenever it is bound to new shapes."""
        return PreparedModel(model, pace, self.threads_for, self._provider)

    def threads_for(self, work: int) -> int:
        """As many as an execution of `work` products should have. Clients need processors, too."""
        if self._threads is not None:
            return self._threads
        return 1 if work < LARGE else max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))


class PreparedModel(Programs[Program]):
    """A model for one or more sets of input shapes. Any number of executions run at the same time."""

    serves_all = True

    def __init__(
        self, model: Model, pace: Callable[[], object], threads: Callable[[int], int], provider: str = "cpu"
    ) -> None:
        """Raises LibraryFailed."""
        self._threads, self._provider = threads, provider
        super().__init__(model, pace)

    def compiled(self, tensors: Tensors, pace: Callable[[], object]) -> Program:
        """As in `Programs`."""
        return Program(self.model, self.prepared, tensors, self._threads, self._provider, pace)

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        pace: Callable[[], object] = lambda: None,
        loop_timeout: float = 0.0,
    ) -> Bound:
        """As in the protocol."""
        return Bound(self.program_for(inputs, pace), inputs, outputs, loop_timeout)


class Bound:
    """An execution on its memory. `copied_bytes`: what each copies, because it lies off the grid of its elements."""

    def __init__(
        self,
        program: Program,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        loop_timeout: float,
    ) -> None:
        self.shapes = tuple(
            (port.shape, memory.nbytes >= port.nbytes) for memory, port in zip(outputs, program.outputs, strict=True)
        )
        self.copied_bytes = 0
        self._binding: Any = None
        self._timeout = loop_timeout * program.loops
        self._is_long = bool(program.loops) or program.work >= LARGE
        self._options: Any = None  # of the run in progress, if it can be ended
        if all(is_sufficient for _, is_sufficient in self.shapes):
            sources = [_bytes(inputs[port.number]) for port in program.inputs]
            targets = [outputs[port.number][: port.nbytes] for port in program.outputs]
            self._before = [_moved(memory, port) for memory, port in zip(sources, program.inputs, strict=True)]
            self._after = [_moved(memory, port) for memory, port in zip(targets, program.outputs, strict=True)]
            self._bind(program)

    def _bind(self, program: Program) -> None:
        ports = (*program.inputs, *program.outputs)
        pairs = (*self._before, *self._after)
        places = [(port.name, port.type, port.shape, place) for port, (_, place) in zip(ports, pairs, strict=True)]
        count = len(program.inputs)
        self._binding = program.session.binding(places[:count], places[count:])
        self._before, self._after = (
            [pair for pair in found if pair[0] is not pair[1]] for found in (self._before, self._after)
        )
        self.copied_bytes = sum(memory.nbytes for memory, _ in (*self._before, *self._after))

    def run(self) -> None:
        """Executes once, without Python's lock. Raises OutputInsufficientSize, ExecutionFailed, LoopTimeout."""
        if self._binding is None:
            raise OutputInsufficientSize(self.shapes)
        for memory, place in self._before:
            np.copyto(place, memory)
        if fault := self._run_long() if self._is_long else self._binding.run():
            raise ExecutionFailed(0, "the model", fault)
        for memory, place in self._after:
            np.copyto(memory, place)

    def _run_long(self) -> str | None:
        """So that it can be ended: by `cancel`, and by a loop that takes too long."""
        self._options = options = run_options()
        if not self._timeout:
            return self._ended(options)
        overdue = threading.Event()
        watchdog = threading.Timer(self._timeout, _end, (options, overdue))
        watchdog.daemon = True
        watchdog.start()
        fault = self._ended(options)
        watchdog.cancel()
        if fault and overdue.is_set():
            raise LoopTimeout(f"its loops took longer than their loop timeouts of {self._timeout} s together")
        return fault

    def _ended(self, options: Any) -> str | None:
        try:
            return cast("str | None", self._binding.run(options))
        finally:
            self._options = None

    def cancel(self) -> None:
        """The run in progress ends before its next operation, with ExecutionFailed. From any thread.

        Models without loops that are small are not worth it: they end soon.
        """
        options = self._options
        if options is not None:
            options.terminate = True


def _end(options: Any, overdue: threading.Event) -> None:
    overdue.set()
    options.terminate = True


def _bytes(array: NDArray[Any] | None) -> NDArray[np.uint8]:
    assert array is not None
    return array.reshape(-1).view(np.uint8)


def _moved(memory: NDArray[np.uint8], port: Port) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Memory, and where ONNX Runtime uses it: there, unless its elements lie off their grid."""
    elements = max(1, memory.nbytes // max(1, int(np.prod(port.shape))))
    return memory, memory if memory.ctypes.data % elements == 0 else np.empty(memory.nbytes, np.uint8)


@cache
def self_test(provider: str = "cpu") -> None:
    """Sums of products of bytes, all of them the largest there are: where 16 bits saturate on the way, they are too
    small. A library that is not what we take it for, or a processor that it is wrong on, is found out here, once.

    Raises LibraryMissing, LibraryFailed.
    """
    for dtype in (np.uint8, np.int8):
        fault, found = _extreme_products(np.iinfo(dtype), provider)
        if fault or not (found == _STEPS).all():
            raise LibraryFailed(f"self test: {fault or found} for sums of {dtype.__name__} that make {_STEPS} steps")


_STEPS = 100


def _extreme_products(info: np.iinfo[Any], provider: str) -> tuple[str | None, NDArray[Any]]:
    channels, writer, dtype = 64, Writer(), info.dtype
    shape, type_ = (1, channels, 4, 4), info.dtype.name.upper()
    source, one, zero = (
        writer.names.new(),
        writer.constant(np.array(1, np.float32)),
        writer.constant(np.zeros((), dtype)),
    )
    weights = writer.constant(np.full((channels, channels, 1, 1), info.max, dtype))
    step = writer.constant(np.array(channels * int(info.max) ** 2 / _STEPS, np.float32))
    (result,) = writer.node("QLinearConv", [source, one, zero, weights, one, zero, step, zero])
    written = writer.graph([(source, type_, shape)], [(result, type_)])
    session = Session(model(written), writer.weights, 1, provider)
    data, found = (np.full(channels * 16, value, dtype) for value in (info.max, 0))
    places = [(name, type_, shape, array.view(np.uint8)) for name, array in ((source, data), (result, found))]
    return session.binding(places[:1], places[1:]).run(), found
