"""The device, its prepared models, and executions bound to their memory."""

from __future__ import annotations

import os
from abc import abstractmethod
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.config import configured
from driver.deadlines import check
from driver.devices.device_options import configuration_of
from driver.devices.lowering.errors import LibraryFailed, in_words
from driver.devices.lowering.model import LoweredModel, LoweringDevice, ThreadRule
from driver.devices.onnxruntime.file_model import OnnxFileModel, optimised
from driver.devices.onnxruntime.library import Session, library, missing, version
from driver.devices.onnxruntime.onnx_file import taken_apart
from driver.devices.onnxruntime.program import OrtPort, OrtProgram, lowered, obstacles, restored_program
from driver.devices.onnxruntime.state import StateBuffer
from driver.devices.onnxruntime.writer import OrtWriter, model
from driver.devices.stoppable import StoppableRuns
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.interface import BoundExecution, BufferArgument, CacheFiles, Needs
from driver.nn.file_form import FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.devices.lowering.placing import Tensors
    from driver.devices.onnxruntime.providers import ExecutionProvider
    from driver.interface import BindOptions, BufferRequest, GrowingBuffer, Preparation, Saved
    from driver.nn import Model
    from driver.nn.file_form import ModelFile
    from driver.options import Preference


LARGE = 20_000_000
"""Executions with as many multiply-adds or more get more than one thread."""

MOST_THREADS = 4


class OrtOptions(NamedTuple):
    """The options of the configuration file."""

    threads: int | None = None
    staged: bool = False


def configuration() -> Path:
    """Return the file with the device's options; not the environment, which the first client would set for all
    others.
    """
    return configuration_of("onnxruntime")


def options() -> OrtOptions:
    """Read the configuration file. Raise ValueError."""
    found = configured(configuration())
    threads, staged = found.get("threads"), found.get("staged", False)
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"{configuration()}: threads = {threads!r} must be a positive integer")
    if "provider" in found:
        raise ValueError(
            f"{configuration()}: provider = {found['provider']!r} is no option: CUDA is a device of its own, "
            "onnxruntime-cuda; remove the line"
        )
    if type(staged) is not bool:
        raise ValueError(f"{configuration()}: staged = {staged!r} must be true or false")
    return OrtOptions(threads, staged)


_HARDWARE = "/sys/devices/system/cpu", "/sys/bus/pci/devices", "/sys/class/drm", "/sys/class/accel", "/proc/cpuinfo"


class OrtDevice(LoweringDevice[OrtProgram]):
    """Runs models with ONNX Runtime, by a provider of its own or on the CPU."""

    cache_files = CacheFiles(1, 1)  #: graphs, and weights that are not laid out as in the model
    extensions = (FILE,)
    file_kind = "onnx"
    provider: ExecutionProvider | None = None  #: None: the CPU

    @abstractmethod
    def threads_for(self, work: int, preference: Preference = "fast_single_answer") -> int: ...

    def obstacles(self, model: Model) -> list[str | None]:
        """Return for each operation why it cannot be computed; None for what ONNX Runtime computes as the HAL says,
        with these types, layouts and constant parameters.
        """
        return obstacles(model)

    def file_model(
        self,
        model: Model,
        file: ModelFile,
        pace: Callable[[], object],
        threads: ThreadRule,
        saved: Saved | None = None,
        root: NDArray[np.uint8] | None = None,
    ) -> OnnxFileModel:
        if saved is not None and root is not None:
            return OnnxFileModel(model, optimised(saved, root), threads, self.provider, is_optimised=True)
        found = taken_apart(file.data, file.external, pace)
        return OnnxFileModel(model, found, threads, self.provider, external=file.external)

    def allocate_growing(self, request: BufferRequest) -> GrowingBuffer | None:
        """Return a buffer for tensors of ONNX Runtime's own; None: for models in another form, or on a GPU."""
        ports = []
        for use in request.roles:
            if not isinstance(use.prepared, OnnxFileModel) or self.provider or use.prepared.has_packed:
                return None
            side = use.prepared.inputs if use.is_input else use.prepared.outputs
            ports.append(side[use.io_index])
        return StateBuffer(ports[0]) if len({port.type for port in ports}) == 1 else None

    def lowered(
        self, model: Model, pace: Callable[[], object], threads: ThreadRule, program: OrtProgram | None = None
    ) -> OnnxRuntimeModel:
        return OnnxRuntimeModel(model, pace, threads, self.provider, program=program)

    def restored(self, saved: Saved, root: NDArray[np.uint8], threads: ThreadRule) -> OrtProgram:
        return OrtProgram(partial(restored_program, saved, root), threads, self.provider)


class OnnxRuntimeDevice(OrtDevice):
    """Runs models with ONNX Runtime on the CPU."""

    name = "onnxruntime"
    version = f"2 (ONNX Runtime {version()})"
    type = "CPU"
    needs = Needs(read_paths=("~/.config/burst/onnxruntime.toml", *_HARDWARE))

    def __init__(self, threads: int | None = None, staged: bool | None = None) -> None:
        """`threads`: of each execution; None: as configured, else one for small models and several for large ones.

        `staged`: a model is first prepared quickly, and made faster while it serves; None: as configured, else False.

        Raise LibraryMissing, LibraryFailed; ValueError for invalid options.
        """
        found = options()
        self._threads = found.threads if threads is None else threads
        self.leaves_threads_open = self._threads is None
        self._staged = found.staged if staged is None else staged
        library()
        self_test()

    @classmethod
    def missing(cls) -> str | None:
        return missing()

    def lowered(
        self, model: Model, pace: Callable[[], object], threads: ThreadRule, program: OrtProgram | None = None
    ) -> OnnxRuntimeModel:
        kind = StagedModel if self._staged else OnnxRuntimeModel
        return kind(model, pace, threads, None, program=program)

    def restored(self, saved: Saved, root: NDArray[np.uint8], threads: ThreadRule) -> OrtProgram:
        return OrtProgram(partial(restored_program, saved, root), threads, None, is_quick=self._staged)

    def threads_for(self, work: int, preference: Preference = "fast_single_answer") -> int:
        """Return how many threads an execution of `work` products gets. Clients need processors, too.

        One for "sustained_speed": executions of a prepared model run in parallel here.
        """
        if preference == "low_power":
            return 1
        if self._threads is not None:
            return self._threads
        if work < LARGE or preference == "sustained_speed":
            return 1
        return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))


class OnnxRuntimeModel(LoweredModel[OrtProgram]):
    """A model for one or more sets of input shapes. Any number of executions run in parallel."""

    serves_all = True

    is_quick = False

    def __init__(
        self,
        model: Model,
        pace: Callable[[], object],
        threads: ThreadRule,
        provider: ExecutionProvider | None = None,
        program: OrtProgram | None = None,
    ) -> None:
        """Compile the model. Raise LibraryFailed."""
        self._threads, self._provider = threads, provider
        super().__init__(model, pace, program)
        made = self.only_program
        if made is not None and provider is None and not made.loops:
            self.threads = threads.chosen(made.work)

    def compiled(self, tensors: Tensors, pace: Callable[[], object]) -> OrtProgram:
        lower = partial(lowered, self.model, self.prepared, tensors, pace)
        return OrtProgram(lower, self._threads, self._provider, is_quick=self.is_quick)

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        options: BindOptions,
    ) -> BoundExecution:
        if any(isinstance(each, BufferArgument) for each in (*inputs, *outputs)):
            raise ValueError(
                "arguments of a model of operations lie in the CPU's memory: load the file with form='file'"
            )
        program = self.program_for(inputs, options.pace)
        return _on_cuda(program, inputs, outputs) or OnnxRuntimeExecution(
            program, inputs, outputs, options.loop_timeout
        )


def _on_cuda(
    program: OrtProgram, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]]
) -> BoundExecution | None:
    """Bind it in the GPU's memory, if the session has a lane there and the outputs fit."""
    if not program.session.lane or any(p.nbytes > outputs[p.number].nbytes for p in program.outputs):
        return None
    from driver.devices.onnxruntime.on_cuda import cuda_execution  # takes a while

    sources = [(port.name, port.type, port.shape, _bytes(inputs[port.number])) for port in program.inputs]
    targets = [(port.name, port.type, port.shape, outputs[port.number][: port.nbytes]) for port in program.outputs]
    return cuda_execution(program.session, sources, targets)


class StagedModel(OnnxRuntimeModel):
    """A model that is prepared quickly, and made faster later."""

    is_quick = True
    improves_after = 32

    def improved(self, preparation: Preparation) -> OnnxRuntimeModel | None:
        program = self.only_program
        if program is None or program.is_optimised:
            return None
        return OnnxRuntimeModel(self.model, preparation.pace, self._threads, self._provider, program=program.improved())


class OnnxRuntimeExecution(BoundExecution):
    """An execution on its memory. `copied_bytes`: arguments that are not aligned to their elements, and are copied."""

    def __init__(
        self,
        program: OrtProgram,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        loop_timeout: float,
    ) -> None:
        self.shapes = tuple(
            (port.shape, memory.nbytes >= port.nbytes) for memory, port in zip(outputs, program.outputs, strict=True)
        )
        self._binding: Any = None
        self._runs = StoppableRuns(program.loops, loop_timeout)
        self._is_long = bool(program.loops) or program.work >= LARGE
        self._provider = program.provider
        if all(is_sufficient for _, is_sufficient in self.shapes):
            sources = [_bytes(inputs[port.number]) for port in program.inputs]
            targets = [outputs[port.number][: port.nbytes] for port in program.outputs]
            self._before = [_moved(memory, port) for memory, port in zip(sources, program.inputs, strict=True)]
            self._after = [_moved(memory, port) for memory, port in zip(targets, program.outputs, strict=True)]
            self._is_in_place = any(np.may_share_memory(source, target) for source in sources for target in targets)
            self._bind(program)

    def _bind(self, program: OrtProgram) -> None:
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
        """Execute once, without the GIL. Raise OutputInsufficientSize, ExecutionFailed, LoopTimeout,
        MissedDeadlineTransient.
        """
        if self._binding is None:
            raise OutputInsufficientSize(tuple(self.shapes))
        for memory, place in self._before:
            np.copyto(place, memory)
        check("queued")
        if fault := self._runs.run(self._binding.attempt, is_long=self._is_long, may_repeat=not self._is_in_place):
            if self._provider is not None:
                self._provider.examine(fault)
            raise ExecutionFailed(0, "the model", in_words(fault))
        for memory, place in self._after:
            np.copyto(memory, place)

    def cancel(self) -> None:
        """End the run in progress before its next operation, with ExecutionFailed. Safe from any thread."""
        self._runs.cancel()

    def is_running(self) -> bool:
        return self._runs.is_running


def _bytes(array: NDArray[Any] | None) -> NDArray[np.uint8]:
    assert array is not None
    return array.reshape(-1).view(np.uint8)


def _moved(memory: NDArray[np.uint8], port: OrtPort) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Memory, and what ONNX Runtime uses for it: itself, or a copy where its elements are not aligned."""
    elements = max(1, memory.nbytes // max(1, int(np.prod(port.shape))))
    return memory, memory if memory.ctypes.data % elements == 0 else np.empty(memory.nbytes, np.uint8)


@cache
def self_test() -> None:
    """Add up products of the largest bytes: the sums are too small where 16-bit intermediates saturate. This detects,
    once, an unexpected library, or a processor on which it computes wrong results.

    Raise LibraryMissing, LibraryFailed.
    """
    for dtype in (np.uint8, np.int8):
        fault, found = _extreme_products(np.iinfo(dtype))
        if fault or not (found == _STEPS).all():
            raise LibraryFailed(f"self test: sums of {dtype.__name__} gave {fault or found} instead of {_STEPS}")


_STEPS = 100


def _extreme_products(info: np.iinfo[Any]) -> tuple[str | None, NDArray[Any]]:
    channels, writer, dtype = 64, OrtWriter(), info.dtype
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
    session = Session(model(written), writer.weights, 1)
    data, found = (np.full(channels * 16, value, dtype) for value in (info.max, 0))
    places = [(name, type_, shape, array.view(np.uint8)) for name, array in ((source, data), (result, found))]
    return session.binding(places[:1], places[1:]).run(), found
