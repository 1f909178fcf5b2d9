"""A device on CUDA that adds a number to float32 tensors, by a kernel in PTX: all of its work is the GPU's.

`CudaAdd` has two slots, so two requests are on the GPU at a time. What else it is asked for the reference refuses here.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.cuda.context import cuda_context
from driver.devices.cuda.device_buffers import GPU_KINDS, GpuMemory
from driver.devices.cuda.driver_api import ffi, missing_cuda
from driver.devices.cuda.lane import CudaGpu, GpuExecution
from driver.devices.nvidia import cuda_needs, library_path
from driver.devices.reference import ReferenceDevice
from driver.interface import Needs, PreparedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.devices.cuda.context import CudaKernel, CudaStream
    from driver.devices.cuda.lane import CudaLane
    from driver.interface import BindOptions, BufferRequest, DriverBuffer, MemoryHandle, Preparation
    from driver.nn import Model

PTX = b"""
.version 7.0
.target sm_50
.address_size 64
.visible .entry add_scalar(
    .param .u64 from, .param .u64 to, .param .f32 value, .param .u32 n
)
{
    .reg .pred %p<2>;
    .reg .f32 %f<4>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    ld.param.f32 %f1, [value];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra done;
    mul.wide.u32 %rd3, %r5, 4;
    cvta.to.global.u64 %rd4, %rd1;
    cvta.to.global.u64 %rd5, %rd2;
    add.s64 %rd6, %rd4, %rd3;
    add.s64 %rd7, %rd5, %rd3;
    ld.global.f32 %f2, [%rd6];
    add.f32 %f3, %f2, %f1;
    st.global.f32 [%rd7], %f3;
done:
    ret;
}
"""
ENDLESS = (
    PTX.split(b"{")[0]
    + b"""{
    .reg .f32 %f<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [from];
    cvta.to.global.u64 %rd2, %rd1;
again:
    ld.volatile.global.f32 %f1, [%rd2];
    bra again;
}
"""
)
"""The same kernel, but that it never ends. The tests' libcuda.so.1 knows kernels by their names, so there it ends."""
_BLOCK = 256


def _needs() -> Needs:
    """The library of tests also writes, beside itself."""
    found = cuda_needs()
    return found._replace(write_paths=(*found.write_paths, str(Path(library_path()).absolute().parent)))


class CudaAdd(ReferenceDevice):
    """x + a constant, with the activation NONE."""

    name, version, type = "CudaAdd", "1", "GPU"
    slots = 2
    needs = _needs()
    image = PTX
    own_memory_kinds = GPU_KINDS

    @cached_property
    def gpu(self) -> CudaGpu:
        """Of the engine, once it is needed. Raises CudaMissing, CudaFailed."""
        return CudaGpu(cuda_context(), lambda words: self.give_up and self.give_up(words))

    @cached_property
    def memory(self) -> GpuMemory:
        """For buffers and pools of clients."""
        return GpuMemory(self.gpu.context)

    @classmethod
    def missing(cls) -> str | None:
        return missing_cuda()

    def supported_operations(self, model: Model) -> list[bool]:
        graph = model.main
        return [
            operation.type == "ADD"
            and graph.operands[operation.inputs[0]].type.name == "TENSOR_FLOAT32"
            and graph.operands[operation.inputs[1]].value is not None
            for operation in graph.operations
        ]

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Raises CudaMissing, CudaFailed."""
        return CudaAddModel(self.gpu, model, self.image)

    def time_work(self, until: float) -> bool:
        self.gpu.clock.run_until(until)
        return True

    def allocate(self, request: BufferRequest) -> DriverBuffer | None:
        return self.memory.allocate(request)

    def map_memory(self, handle: MemoryHandle) -> DriverBuffer:
        return self.memory.map_memory(handle)


class CudaEndless(CudaAdd):
    """Its kernel never ends, on a GPU."""

    name, image = "CudaEndless", ENDLESS


class CudaAddModel(PreparedModel):
    """One kernel and one lane, for all clients."""

    serves_all = True

    def __init__(self, gpu: CudaGpu, model: Model, image: bytes) -> None:
        graph = model.main
        value: Any = graph.operands[graph.operations[0].inputs[1]].value
        self.value, self.lane = float(np.asarray(value).reshape(-1)[0]), gpu.lane()
        self.kernel: CudaKernel = gpu.context.kernel(image, "add_scalar")

    def bind(
        self, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
    ) -> CudaAddition:
        return CudaAddition(self.lane, self.kernel, self.value, inputs[0], outputs[0])


class CudaAddition(GpuExecution):
    """One addition on its memory."""

    def __init__(self, lane: CudaLane, kernel: CudaKernel, value: float, source: Any, target: Any) -> None:
        shape = source.dimensions if hasattr(source, "dimensions") else source.shape
        self._n = int(np.prod(shape))
        super().__init__(lane, [(source, 4 * self._n)], [(target, 4 * self._n)])
        self.shapes = ((shape, target.nbytes is None or target.nbytes >= 4 * self._n),)
        self._kernel = kernel
        self._arguments = [
            ffi.new("uint64_t *", self.inputs[0].address),
            ffi.new("uint64_t *", self.outputs[0].address),
            ffi.new("float *", value),
            ffi.new("uint32_t *", self._n),
        ]

    def work(self, stream: CudaStream) -> None:
        stream.launch(self._kernel, [-(-self._n // _BLOCK)], [_BLOCK], self._arguments)
