"""The devices `torch-cuda` and `jax-cuda` with frameworks that are played, on the tests' libcuda.so.1.

What they load adds 1 to its only input, of float32. PyTorch is played whole, and takes any .pt2 file; of JAX, what it
would do on a GPU: compile, run on a stream of its own, take and give arrays by DLPack.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from burst_test_devices.gpu import PTX, CudaAdd
from driver.devices import jax, jax_cuda, torch, torch_cuda
from driver.devices.cuda import jax_program, torch_graphs, torch_program
from driver.devices.cuda.context import cuda_context
from driver.devices.cuda.driver_api import ffi, missing_cuda
from driver.devices.cuda.gpu_tensor import CUDA, GpuTensor, borrowed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.devices.cuda.context import CudaContext

_PLACE = CUDA, 0


class PlayedGpu:
    """Memory and the kernel of a framework."""

    def __init__(self, context: CudaContext) -> None:
        self.context, self._kernel = context, context.kernel(PTX, "add_scalar")
        self._kept = deque[object](maxlen=256)  # what work in streams may still use

    def incremented(self, source: GpuTensor, stream: int) -> GpuTensor:
        """x + 1, by a kernel on a stream."""
        found = self.allocated(source)
        self.increment(source, found, stream)
        return found

    def allocated(self, like: GpuTensor) -> GpuTensor:
        """Memory for another one."""
        memory = self.context.allocate(max(1, like.nbytes))
        return GpuTensor(memory, memory.address, like.dtype, like.shape, device=_PLACE)

    def increment(self, source: GpuTensor, found: GpuTensor, stream: int) -> None:
        """The kernel, on a stream."""
        self._kept.append((source, found))
        n = source.nbytes // 4
        values = [("uint64_t *", source.address), ("uint64_t *", found.address), ("float *", 1.0), ("uint32_t *", n)]
        arguments = [ffi.new(*value) for value in values]
        pointers = ffi.new("void *[]", [ffi.cast("void *", each) for each in arguments])
        sizes = (-(-n // 256), 1, 1, 256, 1, 1, 0)
        self.context.call("cuLaunchKernel", self._kernel.handle, *sizes, _stream(stream), pointers, ffi.NULL)


def _stream(address: int) -> Any:
    return ffi.cast("CUstream", address)


@cache
def played_gpu() -> PlayedGpu:
    """That of this process."""
    return PlayedGpu(cuda_context())


# ---- PyTorch


class PlayedTensor:
    """A tensor on the GPU."""

    def __init__(self, played: PlayedTorch, tensor: GpuTensor) -> None:
        self._played, self.tensor, self.shape = played, tensor, tensor.shape
        self.is_cuda = not played.returns_cpu

    def view(self, dtype: Any) -> PlayedTensor:
        """The same bytes, as other elements."""
        its = self.tensor
        return PlayedTensor(self._played, GpuTensor(its, its.address, dtype, its.shape, device=_PLACE))

    def copy_(self, found: PlayedTensor, *, non_blocking: bool) -> None:
        """Copied on the current stream."""
        assert non_blocking
        target, source = self.tensor, found.tensor

        def copy(stream: int) -> None:
            its = target.address, source.address, source.nbytes, _stream(stream)
            played_gpu().context.call("cuMemcpyDtoDAsync_v2", *its)

        self._played.add(copy)


class PlayedPool(list[GpuTensor]):
    """Memory of graphs, whose users are counted as PyTorch does."""

    users: int | None = None

    def enter(self) -> None:
        """Not once all others have left."""
        if self.users == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.users = (self.users or 0) + 1

    def leave(self) -> None:
        """Its graph has gone."""
        self.users = (self.users or 0) - 1


class PlayedGraph:
    """`torch.cuda.CUDAGraph`: calls, which are made again on the stream of a replay. Graphs of one pool have the same
    memory, as in PyTorch once what they have computed is free.
    """

    def __init__(self, played: PlayedTorch) -> None:
        self._played, self.calls = played, list[Any]()
        self.memory: deque[GpuTensor] = deque()

    def capture_begin(self, *, pool: PlayedPool, capture_error_mode: str) -> None:
        """What its stream is told is not done."""
        assert capture_error_mode == "thread_local"
        pool.enter()
        weakref.finalize(self, pool.leave)
        self.pool, self.stream, self.is_broken = pool, self._played.current, False
        self.memory = deque(pool)
        assert self._played.recordings.setdefault(self.stream, self) is self

    def capture_end(self) -> None:
        """Ends it; raises what cudaStreamEndCapture would."""
        assert self._played.recordings.pop(self._played.current) is self
        if self.is_broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._played.said.setdefault("pools", []).append(self.pool)
        self._played.said["recorded"] = self._played.said.get("recorded", 0) + 1

    def replay(self) -> None:
        """On the current stream."""
        if self._played.fails_to_launch:
            raise RuntimeError("CUDA error: out of memory")
        self._played.said["replayed"] = self._played.said.get("replayed", 0) + 1
        for call in self.calls:
            call(self._played.current)

    def taken(self, like: GpuTensor) -> GpuTensor:
        """Memory of the pool."""
        if not self.memory:
            self.memory.append(played_gpu().allocated(like))
            self.pool.append(self.memory[0])
        return self.memory.popleft()


class PlayedTorch:
    """The module `torch`, as far as the device uses it; `said`: what it was told, by name."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.recordings: dict[int, PlayedGraph] = {}  #: by stream
        self.waits = self.fails_to_launch = False  #: programs ask the GPU for values; replays fail
        self.returns_cpu = False  #: programs return memory of the CPU
        self.__version__ = "2.14.0+cu130"
        self._thread = threading.local()
        self.backends = SimpleNamespace(
            cuda=SimpleNamespace(matmul=SimpleNamespace()), cudnn=SimpleNamespace(benchmark=True)
        )
        self.cuda = SimpleNamespace(
            ExternalStream=lambda address, device: SimpleNamespace(address=address, device=device),
            stream=self._on,
            CUDAGraph=lambda: PlayedGraph(self),
            graph_pool_handle=PlayedPool,
            set_per_process_memory_fraction=lambda *told: self.said.update(memory=told),
        )
        passes = SimpleNamespace(move_to_device_pass=self._moved)
        self.export = SimpleNamespace(load=self._loaded, passes=passes)
        self.utils = SimpleNamespace(
            _pytree=SimpleNamespace(tree_unflatten=lambda given, spec: (given, {}), tree_leaves=lambda found: [found])
        )
        self.inference_mode = nullcontext

    @property
    def current(self) -> int:
        """The stream of this thread."""
        return int(getattr(self._thread, "stream", 0))

    def add(self, work: Callable[[int], None]) -> None:
        """Done on the current stream, or recorded."""
        graph = self.recordings.get(self.current)
        if graph:
            graph.calls.append(work)
        else:
            work(self.current)

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
        before, self._thread.stream = self.current, stream.address
        yield
        self._thread.stream = before

    def _loaded(self, file: Any) -> Any:
        self.said["bytes"] = len(file.read())
        graph = SimpleNamespace(modules=list)
        return SimpleNamespace(graph_module=graph, call_spec=SimpleNamespace(in_spec=None), module=lambda: self._added)

    def _moved(self, program: Any, place: str) -> Any:
        self.said["place"] = place
        return program

    def _added(self, given: PlayedTensor) -> PlayedTensor:
        graph, source = self.recordings.get(self.current), given.tensor
        if graph and self.waits:
            graph.is_broken = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        found = graph.taken(source) if graph else played_gpu().allocated(source)
        self.add(lambda stream: played_gpu().increment(source, found, stream))
        return PlayedTensor(self, found)


PLAYED = PlayedTorch()


class PlayedTorchCuda(torch_cuda.TorchCudaDevice):
    """The device `torch-cuda` on a played PyTorch."""

    name, version, needs = "PlayedTorchCuda", "1", CudaAdd.needs

    def configure(self) -> None:
        for module in (torch, torch_cuda, torch_graphs, torch_program):
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
        context = played_gpu().context
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
        return played_gpu().context.stream()

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
        return [PlayedArray(self._played, played_gpu().incremented(given.tensor, self._played.stream.address))]


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
