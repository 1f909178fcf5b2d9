"""The devices `torch-cuda` and `jax-cuda` with frameworks that are played, on the tests' libcuda.so.1.

What they load adds 1 to its only input, of float32. PyTorch is played whole, and takes any .pt2 file; of JAX, what it
would do on a GPU: compile, run on a stream of its own, take and give arrays by DLPack.
"""

from __future__ import annotations

import importlib
from collections import deque
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from burst_test_devices.gpu import PTX, CudaAdd
from driver.devices import jax, jax_cuda, torch, torch_cuda
from driver.devices.cuda import jax_program, torch_program
from driver.devices.cuda.context import cuda_context
from driver.devices.cuda.driver_api import ffi, missing_cuda
from driver.devices.cuda.gpu_tensor import CUDA, GpuTensor, borrowed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.devices.cuda.context import CudaContext

_PLACE = CUDA, 0


class PlayedGpu:
    """Memory and the kernel of a framework."""

    def __init__(self, context: CudaContext) -> None:
        self.context, self._kernel = context, context.kernel(PTX, "add_scalar")
        self._kept = deque[object](maxlen=256)  # what work in streams may still use

    def incremented(self, source: GpuTensor, stream: int) -> GpuTensor:
        """x + 1, by a kernel on a stream."""
        memory = self.context.allocate(max(1, source.nbytes))
        found = GpuTensor(memory, memory.address, source.dtype, source.shape, device=_PLACE)
        self._kept.append((source, found))
        n = source.nbytes // 4
        values = [("uint64_t *", source.address), ("uint64_t *", found.address), ("float *", 1.0), ("uint32_t *", n)]
        arguments = [ffi.new(*value) for value in values]
        pointers = ffi.new("void *[]", [ffi.cast("void *", each) for each in arguments])
        sizes = (-(-n // 256), 1, 1, 256, 1, 1, 0)
        self.context.call("cuLaunchKernel", self._kernel.handle, *sizes, _stream(stream), pointers, ffi.NULL)
        return found


def _stream(address: int) -> Any:
    return ffi.cast("CUstream", address)


@cache
def _gpu() -> PlayedGpu:
    return PlayedGpu(cuda_context())


# ---- PyTorch


class PlayedTensor:
    """A tensor on the GPU."""

    def __init__(self, played: PlayedTorch, tensor: GpuTensor) -> None:
        self._played, self.tensor, self.shape = played, tensor, tensor.shape

    def view(self, dtype: Any) -> PlayedTensor:
        """The same bytes, as other elements."""
        its = self.tensor
        return PlayedTensor(self._played, GpuTensor(its, its.address, dtype, its.shape, device=_PLACE))

    def copy_(self, found: PlayedTensor, *, non_blocking: bool) -> None:
        """Copied on the current stream."""
        assert non_blocking
        target, source = self.tensor, found.tensor
        where = _stream(self._played.current)
        _gpu().context.call("cuMemcpyDtoDAsync_v2", target.address, source.address, source.nbytes, where)


class PlayedTorch:
    """The module `torch`, as far as the device uses it; `said`: what it was told, by name."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.current = 0  # the stream of this thread
        self.backends = SimpleNamespace(
            cuda=SimpleNamespace(matmul=SimpleNamespace()), cudnn=SimpleNamespace(benchmark=True)
        )
        self.cuda = SimpleNamespace(
            ExternalStream=lambda address, device: SimpleNamespace(address=address, device=device),
            stream=self._on,
            set_per_process_memory_fraction=lambda *told: self.said.update(memory=told),
        )
        passes = SimpleNamespace(move_to_device_pass=self._moved)
        self.export = SimpleNamespace(load=self._loaded, passes=passes)
        self.utils = SimpleNamespace(
            _pytree=SimpleNamespace(tree_unflatten=lambda given, spec: (given, {}), tree_leaves=lambda found: [found])
        )
        self.inference_mode = nullcontext

    def __getattr__(self, name: str) -> Any:
        return np.dtype(name)  # torch.float32 and the like

    def use_deterministic_algorithms(self, mode: bool) -> None:
        """Noted."""
        self.said["deterministic"] = mode

    def from_dlpack(self, source: GpuTensor) -> PlayedTensor:
        """As its consumer sees it: only what the capsule says."""
        with borrowed(source, _PLACE, self.current or 1) as found:
            return PlayedTensor(self, GpuTensor(source, found.address, source.dtype, found.shape, device=_PLACE))

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.address
        yield
        self.current = before

    def _loaded(self, file: Any) -> Any:
        self.said["bytes"] = len(file.read())
        graph = SimpleNamespace(modules=list)
        return SimpleNamespace(graph_module=graph, call_spec=SimpleNamespace(in_spec=None), module=lambda: self._added)

    def _moved(self, program: Any, place: str) -> Any:
        self.said["place"] = place
        return program

    def _added(self, given: PlayedTensor) -> PlayedTensor:
        return PlayedTensor(self, _gpu().incremented(given.tensor, self.current))


PLAYED = PlayedTorch()


class PlayedTorchCuda(torch_cuda.TorchCudaDevice):
    """The device `torch-cuda` on a played PyTorch."""

    name, version, needs = "PlayedTorchCuda", "1", CudaAdd.needs

    def configure(self) -> None:
        for module in (torch, torch_cuda, torch_program):
            module.torch_module = lambda: PLAYED  # type: ignore[attr-defined]
        super().configure()

    @classmethod
    def missing(cls) -> str | None:
        return missing_cuda()


# ---- JAX


class PlayedArray:
    """An array of JAX on the GPU, which is there when JAX's stream comes to it."""

    def __init__(self, played: PlayedJax, tensor: GpuTensor) -> None:
        self._played, self.tensor, self.shape = played, tensor, tensor.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return _PLACE

    def __dlpack__(self, *, stream: int) -> object:
        context = _gpu().context
        context.call("cuStreamWaitEvent", _stream(stream), self._played.stream.record().handle, 0)
        return self.tensor.__dlpack__()


class PlayedJax:
    """The module `jax`: the real one, without what takes a GPU."""

    def __init__(self) -> None:
        self._jax = importlib.import_module("jax")
        importlib.import_module("jax.export")
        self.dlpack = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jax, name)

    @cached_property
    def stream(self) -> Any:
        """JAX's own, for all that it computes."""
        return _gpu().context.stream()

    def from_dlpack(self, source: Any) -> PlayedArray:
        """JAX's stream waits for what makes it."""
        with borrowed(source, _PLACE, self.stream.address) as found:
            return PlayedArray(self, GpuTensor(source, found.address, source.dtype, found.shape, device=_PLACE))

    def jit(self, function: Any) -> Any:
        """What `lower` and `compile` give."""

        def lower(*structs: Any) -> Any:
            info = self._jax.eval_shape(function, *structs)
            return SimpleNamespace(compile=lambda: PlayedProgram(self), out_info=info)

        return SimpleNamespace(lower=lower)


class PlayedProgram:
    """A compiled function."""

    def __init__(self, played: PlayedJax) -> None:
        self._played = played

    def __call__(self, given: PlayedArray) -> list[PlayedArray]:
        return [PlayedArray(self._played, _gpu().incremented(given.tensor, self._played.stream.address))]


class PlayedJaxCuda(jax_cuda.JaxCudaDevice):
    """The device `jax-cuda` on a JAX whose GPU is played."""

    name, version, needs = (
        "PlayedJaxCuda",
        "1",
        CudaAdd.needs._replace(read_paths=(*CudaAdd.needs.read_paths, *jax.JaxDevice.needs.read_paths)),
    )

    def configure(self) -> None:
        played = PlayedJax()
        for module in (jax, jax_cuda, jax_program):
            module.jax_module = lambda platform="cpu": played  # type: ignore[attr-defined]
        super().configure()

    @classmethod
    def missing(cls) -> str | None:
        return missing_cuda()
