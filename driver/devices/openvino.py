"""Runs .onnx and .tflite files with OpenVINO, as they are. It has no operation of the HAL."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from driver.devices.file_device import FileDevice, FileExecution, FileModel, FilePort, check_ports, placed
from driver.devices.lowering.errors import LibraryFailed, in_words
from driver.devices.onnxruntime.onnx_file import check_places
from driver.devices.stoppable import Attempt
from driver.interface import CacheFiles, Needs, Saved
from driver.nn import InvalidModel
from driver.plugins import version_of

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

    from driver.devices.file_device import Inputs, Outputs, Shape
    from driver.interface import Preparation
    from driver.nn import Model
    from driver.nn.file_form import ModelFile

_WORDS = {f"{word[0]}{bits}": f"{word}{bits}" for word in ("float", "int", "uint") for bits in (8, 16, 32, 64)}
_DTYPES = {"boolean": "bool", "bf16": "bfloat16", **_WORDS}


@cache
def _openvino() -> Any:
    """OpenVINO's module. Its converter of models stays out: that reports each import to Intel, from a thread."""
    sys.modules.setdefault("openvino.tools.ovc", cast("ModuleType", None))
    return import_module("openvino")


_core = cache(lambda: _openvino().Core())


class OpenVinoDevice(FileDevice):
    """Runs model files on the CPU."""

    name, version, type = "openvino", f"1 (OpenVINO {version_of('openvino')})", "CPU"
    library, file_kinds, cache_files = "openvino", ("onnx", "tflite"), CacheFiles(1, 0)
    needs = Needs(
        read_paths=("/sys/devices", "/sys/fs/cgroup", "/sys/kernel/mm", "/proc/meminfo"),
        write_paths=("/tmp",),
    )

    def __init__(self) -> None:
        _openvino()  # before the device forks: each trial of a file has it then

    def file_model(self, model: Model, file: ModelFile, preparation: Preparation) -> OpenVinoModel:
        """Compile a file. Raise InvalidModel, LibraryFailed."""
        options = _options(preparation)
        try:
            return OpenVinoModel(model, _core().compile_model(_read(model, file), "CPU", options), preparation)
        except RuntimeError as error:
            raise LibraryFailed(f"OpenVINO rejected the file: {in_words(error)}") from error

    def restore(self, model: Model, saved: Saved, root: object, preparation: Preparation) -> OpenVinoModel:
        options = _options(preparation)
        try:
            compiled = _core().import_model(bytes(saved.model[0]), "CPU", options)
            return OpenVinoModel(model, compiled, preparation)
        except RuntimeError as error:
            raise LibraryFailed(f"OpenVINO rejected what it had compiled: {in_words(error)}") from error


def _threads(preparation: Preparation) -> int:
    """Return how many threads executions have: what was measured, else half of the processors, as clients need some."""
    if preparation.preference == "low_power":
        return 1
    measured = preparation.threads if _is_open(preparation) else 0
    return measured or max(1, (os.cpu_count() or 1) // 2)


def _is_open(preparation: Preparation) -> bool:
    return preparation.preference == "fast_single_answer"


def _options(preparation: Preparation) -> dict[str, Any]:
    threads = _threads(preparation)
    streams = threads if preparation.preference == "sustained_speed" else 1
    exact = {"EXECUTION_MODE_HINT": "ACCURACY", "ENABLE_CPU_PINNING": False}
    return {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams, **exact}


def _read(model: Model, file: ModelFile) -> Any:
    """OpenVINO's model, for inputs of the sizes that `model` says. OpenVINO reads files by their paths.

    Raise InvalidModel, RuntimeError.
    """
    if file.kind == "onnx":
        check_places(file.data, file.external)
    with placed(file) as path:
        found = _core().read_model(path)
    if found.get_variables():
        raise InvalidModel("the file has variables, which keep values between runs; the device openvino keeps none")
    inputs, outputs = _ports(found)
    check_ports(model, inputs, outputs)
    said = [model.main.operands[i].dimensions for i in model.main.inputs]
    is_open = [n for n, port in enumerate(inputs) if said[n] and port.static_shape is None]
    found.reshape({n: [size or -1 for size in said[n]] for n in is_open})
    return found


def _ports(model: Any) -> tuple[list[FilePort], list[FilePort]]:
    return [*map(_port, model.inputs)], [*map(_port, model.outputs)]


def _port(port: Any) -> FilePort:
    shape, dtype = port.partial_shape, port.element_type.get_type_name()
    sizes = tuple(d.get_length() if d.is_static else None for d in shape) if shape.rank.is_static else None
    return FilePort(port.any_name if port.names else "", _DTYPES.get(dtype, dtype), sizes)


def _are_written(compiled: Any) -> list[bool]:
    """Return True if each output is computed. One that is an input is not: OpenVINO would take memory that it is given
    for the input's, and compute all else from that.
    """
    nodes = [result.input_value(0).get_node() for result in compiled.get_runtime_model().get_results()]
    return [node.get_rt_info()["layerType"].astype(str) != "Input" for node in nodes]


class OpenVinoModel(FileModel):
    """A compiled file. Any number of executions run in parallel."""

    serves_all = True

    def __init__(self, model: Model, compiled: Any, preparation: Preparation) -> None:
        self.compiled, self.threads = compiled, _threads(preparation) if _is_open(preparation) else 0
        super().__init__(model, *_ports(compiled))
        self.is_written = _are_written(compiled)

    def execution(self, inputs: Inputs, outputs: Outputs) -> OpenVinoExecution:
        return OpenVinoExecution(self, inputs, outputs)

    def saved(self, root: NDArray[np.uint8]) -> Saved:
        return Saved([self.compiled.export_model().getvalue()])


class OpenVinoExecution(FileExecution):
    """A request to OpenVINO."""

    def __init__(self, model: OpenVinoModel, inputs: Inputs, outputs: Outputs) -> None:
        super().__init__(model, inputs, outputs)
        self._request, openvino = model.compiled.create_infer_request(), _openvino()
        for ports, places, give in (
            (model.compiled.inputs, self.sources, self._request.set_input_tensor),
            (model.compiled.outputs, self.targets, self._request.set_output_tensor),
        ):
            for n, (port, place) in enumerate(zip(ports, places, strict=True)):
                if place is not None:
                    shape, memory = place
                    give(n, openvino.Tensor(memory, openvino.Shape(shape), port.element_type))

    def begin(self) -> Attempt:
        return Attempt(self._infer, self._request.cancel)

    def _infer(self) -> str | None:
        try:
            self._request.start_async()  # `infer` cannot be cancelled
            self._request.wait()
        except RuntimeError as error:
            return str(error)
        return None

    def result(self, number: int) -> tuple[Shape, NDArray[np.uint8]]:
        tensor = self._request.get_output_tensor(number)
        return tuple(tensor.shape), tensor.data.reshape(-1).view(np.uint8)
