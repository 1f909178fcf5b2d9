"""Devices that run models by an execution provider of ONNX Runtime: one class, and a line for each provider.

What a provider has no kernel for, ONNX Runtime runs on the CPU. A device here does not claim that: an operation is
supported if the provider runs all nodes that it becomes, and a file if the provider runs all but arithmetic of shapes
and indices. The option `cpu_nodes` allows the rest.
"""

from __future__ import annotations

import json
import os
import select
import signal
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import DeviceUnavailable
from driver.devices.cuda_memory import CudaMemoryDevice
from driver.devices.lowering.errors import LibraryFailed
from driver.devices.onnxruntime import vulkan
from driver.devices.onnxruntime.device import OrtDevice
from driver.devices.onnxruntime.file_model import OnnxFileModel
from driver.devices.onnxruntime.library import Session, library
from driver.devices.onnxruntime.program import obstacles
from driver.devices.onnxruntime.providers import PROVIDERS, ExecutionProvider, OrtProvider
from driver.devices.onnxruntime.writer import OrtWriter, model
from driver.errors import signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from driver.devices.cuda.context import CudaContext
    from driver.devices.device_options import Value
    from driver.devices.lowering.model import ThreadRule
    from driver.devices.onnxruntime.program import Weights
    from driver.interface import PreparedModel, Saved
    from driver.nn import Model, Operation
    from driver.nn.file_form import ModelFile
    from driver.options import Preference

_MOST_TRIALS = 4096
_PATIENCE = 60.0  # seconds that a driver may take to begin


class OrtProviderDevice(OrtDevice):
    """Runs models with one of `PROVIDERS`."""

    kind: OrtProvider
    looks_again_after = 5.0
    asked_apart = True  # whether an operation has a kernel is found out by the provider, which takes a GPU for that

    def __init_subclass__(cls, device: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.kind = kind = PROVIDERS[device]
        cls.name, cls.version, cls.slots = kind.device, kind.version, kind.slots
        cls.type = "CPU" if kind.driver else "GPU"
        cls.needs = kind.all_needs

    def __init__(self, **options: Value) -> None:
        """`options`: those of the provider in the table; what is not given is as configured.

        Takes no GPU: a service has an instance, too. Raise LibraryMissing; ValueError for invalid options.
        """
        self.provider: ExecutionProvider = ExecutionProvider(self.kind, self.kind.chosen(options))
        self.provider.give_up = self._lose
        library()
        self._trials: dict[object, str | None] = {}
        found = self._look = _looked(self.provider)
        self.type = "CPU" if found.is_software else "GPU"
        if found.fault:
            self.report("offline", found.fault)
        else:
            self.report("available", found.words)

    def _lose(self, words: str) -> None:
        if self.give_up is not None:
            self.give_up(words)

    def time_work(self, until: float) -> bool:
        return self.provider.time_work(until)

    @classmethod
    def missing(cls) -> str | None:
        lacks = cls.kind.missing()
        return lacks[0] if lacks else None

    @classmethod
    def remedy(cls) -> str | None:
        lacks = cls.kind.missing()
        return lacks[1] if lacks else None

    def threads_for(self, work: int, preference: Preference = "fast_single_answer") -> int:
        """Return one, which waits for the provider."""
        return 1

    def obstacles(self, model: Model) -> list[str | None]:
        """Return for each operation why it cannot be computed; None for what ONNX Runtime computes as the HAL says, and
        the provider has kernels for.
        """
        self._check_available()
        found = obstacles(model, self._trial)
        return [why or self._inexact(model, op) for why, op in zip(found, model.main.operations, strict=True)]

    def _check_available(self) -> None:
        if not self.status.takes_work:
            raise DeviceUnavailable(f"device {self.name!r} is {self.status}")

    def _inexact(self, model: Model, operation: Operation) -> str | None:
        """Return why the provider computes it worse than the HAL allows, or its hardware not at all."""
        if lacks := self._lacking(model, (*operation.inputs, *operation.outputs)):
            return lacks
        bound = self.kind.inexact.get(operation.type)
        if bound is None or model.relaxed:
            return None
        return f"{self.kind.title} computes it {bound}; a model that is relaxed allows that"

    def file_obstacle(self, model: Model, file: ModelFile) -> str | None:
        self._check_available()
        return self._lacking(model, (*model.main.inputs, *model.main.outputs))

    def _lacking(self, model: Model, operands: Iterable[int]) -> str | None:
        """Return why it cannot compute with the types of these operands; None: it can."""
        lacks = self.kind.lacks | ({"float16"} if self._look.lacks_half else frozenset())
        found = sorted(lacks & {model.main.operands[i].type.dtype.name for i in operands})
        return f"what the device runs on has no {found[0]}: {self._look.words}" if found else None

    def file_model(
        self,
        model: Model,
        file: ModelFile,
        pace: Callable[[], object],
        threads: ThreadRule,
        saved: Saved | None = None,
        root: NDArray[np.uint8] | None = None,
    ) -> OnnxFileModel:
        found = super().file_model(model, file, pace, threads, saved=saved, root=root)
        if found.has_half and self._look.lacks_half:
            raise LibraryFailed(f"the file has float16, which what the device runs on has not: {self._look.words}")
        return found

    def _trial(self, graph: bytes, weights: Weights) -> str | None:
        key = (graph, tuple((name, array.dtype.str, array.shape) for name, array in weights))
        if key not in self._trials:
            if len(self._trials) >= _MOST_TRIALS:
                self._trials.clear()
            try:
                self.provider.check(Session(graph, weights, 1, self.provider).on_cpu)
            except LibraryFailed as error:
                self._trials[key] = str(error)
            else:
                self._trials[key] = None
        return self._trials[key]


class OrtWebGpuDevice(OrtProviderDevice, device="onnxruntime-webgpu"):
    """Every GPU with a Vulkan driver."""


class OrtCudaDevice(CudaMemoryDevice, OrtProviderDevice, device="onnxruntime-cuda"):
    """NVIDIA's GPUs. Buffers and pools of clients may lie in their memory, for models that are files."""

    @property
    def context(self) -> CudaContext:
        """That of the GPU that the provider runs on. Raises LibraryMissing, LibraryFailed."""
        from driver.devices.cuda.context import cuda_context

        return cuda_context(self.provider.ordinal)

    def computes_there(self, prepared: PreparedModel) -> bool:
        """Return True for files: ONNX Runtime copies the arguments of models of operations."""
        return isinstance(prepared, OnnxFileModel)


class OrtTensorRtRtxDevice(OrtProviderDevice, device="onnxruntime-tensorrt-rtx"):
    """NVIDIA's GPUs from Turing on, by kernels that are compiled for each model."""


class _Look(NamedTuple):
    """The findings about a provider's hardware. fault: why it does not work; "": it does."""

    fault: str
    words: str = ""
    is_software: bool = False
    lacks_half: bool = False  #: whether it computes no float16


_looks: dict[tuple[str, str], _Look] = {}


def _looked(provider: ExecutionProvider) -> _Look:
    """Look once for a process: later, the hardware may be in use by it."""
    key = provider.kind.device, repr(provider)
    if key not in _looks:
        _looks[key] = _look_apart(provider)
    return _looks[key]


def _look_apart(provider: ExecutionProvider) -> _Look:
    """Look in a process that is thrown away: drivers of GPUs keep threads, do not survive a fork, and may crash."""
    readable, writable = os.pipe2(os.O_CLOEXEC)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child calls nothing that other threads may hold
        pid = os.fork()
    if not pid:
        try:
            os.write(writable, json.dumps(_look(provider)).encode())
        finally:
            os._exit(0)
    os.close(writable)
    try:
        is_answered = bool(select.select([readable], [], [], _PATIENCE)[0])
        answer = os.read(readable, 1 << 16) if is_answered else b""
    finally:
        os.close(readable)
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if answer:
        return _Look(*json.loads(answer))
    if not is_answered:
        return _Look(f"{provider.kind.title} did not begin within {_PATIENCE:g} s: look into the kernel's log (dmesg)")
    return _Look(f"{provider.kind.title} ended its process with {signal_name(-code)}: install another driver")


def _look(provider: ExecutionProvider) -> _Look:
    title = provider.kind.title
    provider.set_environment()
    try:
        found = vulkan.adapters() if provider.kind.uses_vulkan else []
    except OSError as error:
        return _Look(f"{title} finds no GPU: {error}; see `burst doctor`")
    if provider.kind.uses_vulkan and not found:
        return _Look(f"{title} finds no GPU: Vulkan has no adapter; see `burst doctor`")
    is_software = bool(found) and all(adapter.is_software for adapter in found)
    names = ", ".join(f"{adapter.name} ({adapter.kind})" for adapter in found)
    try:
        _self_test(provider)
    except Exception as error:  # noqa: BLE001 (a driver may fail in any way, and that is the answer)
        here = f"; Vulkan has {names}" if names else ""
        return _Look(f"{title} does not work here: {error}{here}", is_software=is_software)
    return _Look("", f"by {names}" if names else "", is_software, lacks_half=not _computes_half(provider))


def _self_test(provider: ExecutionProvider) -> None:
    """Multiply matrices of small whole numbers. Raise LibraryMissing, LibraryFailed."""
    size, writer = 32, OrtWriter()
    source, shape = writer.names.new(), (size, size)
    numbers = (np.arange(size * size, dtype=np.float32) % 13).reshape(shape)
    (result,) = writer.node("MatMul", [source, writer.constant(numbers)])
    found = _run(provider, writer, (source, "FLOAT", numbers), (result, "FLOAT", np.zeros(shape, np.float32)))
    if not (found == numbers @ numbers).all():
        raise LibraryFailed("self test: a product of matrices is wrong; update the driver")


def _computes_half(provider: ExecutionProvider) -> bool:
    writer, ones = OrtWriter(), np.ones(8, np.float16)
    source = writer.names.new()
    (result,) = writer.node("Add", [source, source])
    try:
        found = _run(provider, writer, (source, "FLOAT16", ones), (result, "FLOAT16", np.zeros(8, np.float16)))
    except LibraryFailed:
        return False
    return bool((found == 2).all())


_Tensor = tuple[str, str, "NDArray[Any]"]


def _run(provider: ExecutionProvider, writer: OrtWriter, source: _Tensor, target: _Tensor) -> NDArray[Any]:
    """Return the target, after a run of the graph. Raise LibraryMissing, LibraryFailed."""
    ends = [(name, type_, array.shape, array.reshape(-1).view(np.uint8)) for name, type_, array in (source, target)]
    graph = writer.graph([ends[0][:3]], [ends[1][:2]])
    session = Session(model(graph), writer.weights, 1, provider)
    provider.check(session.on_cpu)
    if fault := session.binding(ends[:1], ends[1:]).run():
        raise LibraryFailed(f"self test: {fault}")
    return target[2]
