"""The device, its prepared models, and executions bound to their memory."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.config import configured
from driver.devices.device_options import configuration_of
from driver.devices.litert import interpreted
from driver.devices.litert.execution import LiteRtExecution
from driver.devices.litert.file_model import LiteRtFileModel, findings
from driver.devices.litert.flatbuffer import FlatbufferWriter
from driver.devices.litert.library import Compiled, TensorBuffers, library
from driver.devices.litert.packed import Packing
from driver.devices.litert.program import LiteRtProgram, lowered, obstacles, restored
from driver.devices.litert.quiet import without_info_lines
from driver.devices.litert.tflite_file import TfliteOutline
from driver.devices.litert.weights import aligned
from driver.devices.litert.wheel import VERSION, missing
from driver.devices.lowering.errors import LibraryFailed
from driver.devices.lowering.model import LoweredModel, LoweringDevice, ThreadRule
from driver.interface import CacheFiles, Needs
from driver.nn import InvalidModel
from driver.nn.file_form import FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.devices.lowering.placing import Tensors
    from driver.interface import BindOptions, Saved
    from driver.nn import Model
    from driver.nn.file_form import ModelFile
    from driver.options import Preference

LARGE = 20_000_000
"""Executions with as many multiply-adds or more get more than one thread."""

MOST_THREADS = 4

_MOST_OPTION = 2**31 - 1


def configuration() -> Path:
    """Return the file with the device's options; not the environment, which the first client would set for all
    others.
    """
    return configuration_of("litert")


def _configured() -> dict[str, Any]:
    """Return the options in the configuration file. Raise ValueError."""
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
    version = f"3 (LiteRT {VERSION})"
    type = "CPU"
    extensions = (FILE,)
    file_kind = "tflite"
    file_settings = (interpreted.SETTING,)
    needs = Needs(read_paths=("~/.config/burst/litert.toml", "/sys/devices/system/cpu", "/proc/cpuinfo"))
    cache_files = CacheFiles(2, 0)  #: the description of a program, and its flatbuffer

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: of each execution; None: as configured, else one for small models and several for large ones.

        Raise LibraryMissing, LibraryFailed; ValueError for invalid options.
        """
        options = _configured()
        self._threads = options.get("threads") if threads is None else threads
        self.leaves_threads_open = self._threads is None
        self._packing = Packing()
        with without_info_lines():
            _self_test()

    @classmethod
    def missing(cls) -> str | None:
        return missing()

    def obstacles(self, model: Model) -> list[str | None]:
        """Return for each operation why it cannot be computed; None for what TFLite computes exactly, with these types,
        layouts and constant parameters.
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
    ) -> LiteRtFileModel:
        del pace, root
        found, knows_shapes = findings(saved) if saved else (None, None)
        source = TfliteOutline(file.data, found)
        asked = file.settings.get(interpreted.SETTING)
        if obstacle := self.file_obstacle(model, file):
            raise InvalidModel(obstacle)
        return LiteRtFileModel(model, source, threads, self._packing, knows_shapes=knows_shapes, interpreter=asked)

    def file_obstacle(self, model: Model, file: ModelFile) -> str | None:
        return interpreted.obstacle(file.settings.get(interpreted.SETTING, {}))

    def lowered(
        self,
        model: Model,
        pace: Callable[[], object],
        threads: ThreadRule,
        program: LiteRtProgram | None = None,
    ) -> LiteRtModel:
        return LiteRtModel(model, pace, threads, self._packing, program=program)

    def restored(self, saved: Saved, root: NDArray[np.uint8], threads: ThreadRule) -> LiteRtProgram:
        return LiteRtProgram(*restored(saved, root), threads, self._packing.compiled)

    def threads_for(self, work: int, preference: Preference = "fast_single_answer") -> int:
        """Return how many threads an execution of `work` products gets. A client that does not wait needs a processor,
        too.

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
        threads: ThreadRule,
        packing: Packing,
        program: LiteRtProgram | None = None,
    ) -> None:
        """Compile the model. Raise LibraryFailed."""
        self._threads, self._packing = threads, packing
        self.copied_weights = 0  #: bytes that were copied when it was compiled last; all others stayed where they were
        super().__init__(model, pace, program)
        made = self.only_program
        if made is not None and not any(segment.loops for segment in made.segments):
            self.threads = threads.chosen(made.description.products)

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
        options: BindOptions,
    ) -> LiteRtExecution:
        return LiteRtExecution(self.program_for(inputs, options.pace), inputs, outputs, options.loop_timeout)


@cache
def _self_test() -> None:
    """Run one operation, from a flatbuffer to its result: a library with another ABI than expected fails here, once.

    Raise LibraryMissing, LibraryFailed.
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
