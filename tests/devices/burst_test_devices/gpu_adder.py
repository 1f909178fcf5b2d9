"""A device on CUDA that adds a number to a tensor: x + c, by the kernel `add_scalar` of the tests' libcuda.so.1.

That library lies in BURST_RUNTIME_DIR. What lies in memory of the GPU is used there; arrays are copied in and out.
"""

from __future__ import annotations

import math
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burst_test_devices import runtime_folder
from driver.devices.cuda.context import CudaContext
from driver.devices.cuda.device_buffers import GPU_KINDS, GpuBuffer, GpuMemory
from driver.devices.cuda.driver_api import CudaLibrary, ffi
from driver.devices.reference import ReferenceDevice
from driver.errors import OutputInsufficientSize
from driver.interface import BoundExecution, BufferArgument, DriverBuffer, PreparedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, BufferRequest, MemoryHandle, Preparation
    from driver.nn import Model

    Argument = NDArray[Any] | BufferArgument | None

PTX = b".visible .entry add_scalar(\n"


class GpuAdder(ReferenceDevice):
    """Adds a constant of one element."""

    name = "gpu-adder"
    version = "1"
    type = "GPU"
    own_memory_kinds = GPU_KINDS
    needs = runtime_folder.needs()

    def supported_operations(self, model: Model) -> list[bool]:
        """True for an ADD of one float that is the whole model."""
        operands, operations = model.main.operands, model.main.operations
        return [
            len(operations) == 1 and operation.type == "ADD" and np.size(operands[operation.inputs[1]].value) == 1
            for operation in operations
        ]

    @cached_property
    def context(self) -> CudaContext:
        """Of this engine, once it is needed."""
        return CudaContext(CudaLibrary(str(Path(os.environ["BURST_RUNTIME_DIR"], "libcuda.so.1"))), 0)

    @cached_property
    def memory(self) -> GpuMemory:
        """For buffers and pools."""
        return GpuMemory(self.context)

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Loads the kernel."""
        return GpuAdderModel(model, self.context)

    def allocate(self, request: BufferRequest) -> DriverBuffer | None:
        return self.memory.allocate(request)

    def map_memory(self, handle: MemoryHandle) -> NDArray[np.uint8] | DriverBuffer:
        return self.memory.map_memory(handle)


class GpuAdderModel(PreparedModel):
    """One kernel."""

    def __init__(self, model: Model, context: CudaContext) -> None:
        main = model.main
        self._value = float(np.asarray(main.operands[main.operations[0].inputs[1]].value).item())
        self._context, self._kernel = context, context.kernel(PTX, "add_scalar")

    def bind(self, inputs: Sequence[Argument], outputs: Sequence[Argument], options: BindOptions) -> BoundExecution:
        return GpuAdderExecution(self._context, self._kernel, self._value, inputs[0], outputs[0])


class GpuAdderExecution(BoundExecution):
    """A launch, with copies before and after it of what lies in the CPU's memory."""

    def __init__(self, context: CudaContext, kernel: Any, value: float, source: Argument, target: Argument) -> None:
        assert source is not None
        assert target is not None
        shape = source.dimensions if isinstance(source, BufferArgument) else source.shape
        nbytes = 4 * math.prod(shape)
        self._nbytes, self._kernel, self._stream = nbytes, kernel, context.stream()
        self._source, self._target = source, target
        self._from, self._to = (self._address(context, argument) for argument in (source, target))
        self._arguments = [
            ffi.new(type_, its)
            for type_, its in (
                ("uint64_t *", self._from[0]),
                ("uint64_t *", self._to[0]),
                ("float *", value),
                ("uint32_t *", nbytes // 4),
            )
        ]
        room = target.nbytes  # None: the buffer was allocated for it
        self.shapes = [(shape, room is None or room >= nbytes)]

    def _address(self, context: CudaContext, argument: Argument) -> tuple[int, Any]:
        """On the GPU, and what keeps it."""
        if isinstance(argument, BufferArgument):
            assert isinstance(argument.buffer, GpuBuffer)
            return argument.buffer.address + argument.offset, argument.buffer
        memory = context.allocate(max(4, self._nbytes))
        return memory.address, memory

    def run(self) -> None:
        if not self.shapes[0][1]:
            raise OutputInsufficientSize(tuple(self.shapes))
        stream, nbytes = self._stream, self._nbytes
        if isinstance(self._source, np.ndarray):
            stream.copy_in(self._from[0], self._source.ctypes.data, nbytes)
        stream.launch(self._kernel, [1], [256], self._arguments)
        if isinstance(self._target, np.ndarray):
            stream.copy_out(self._target.ctypes.data, self._to[0], nbytes)
        stream.synchronize()
