"""Model files that a framework runs on an NVIDIA GPU: PyTorch or JAX, between the copies of a lane.

The framework gets the memory of arguments by DLPack, and adds its kernels to a stream without waiting for them. What it
returns is copied on the GPU to where the client wants it, as frameworks allocate what they return; the lane answers
when that is there. Files whose outputs have open sizes are run as on the CPU, with copies by the framework.

None of this has run on a GPU yet: tests play the frameworks, on a CUDA that is none.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from burst import ResourceExhaustedTransient
from driver.devices.cuda.driver_api import ffi
from driver.devices.cuda.gpu_tensor import CUDA, GpuTensor
from driver.devices.cuda.lane import GpuExecution
from driver.devices.file_device import FileModel
from driver.devices.files import checked_input
from driver.devices.gpu_place import GpuPlace, checked_gpu_input, places_of
from driver.devices.lowering.errors import in_words
from driver.errors import ExecutionFailed
from driver.interface import BufferArgument
from driver.options import PRIORITIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from driver.devices.cuda.context import CudaEvent, CudaStream
    from driver.devices.cuda.lane import CudaGpu, CudaLane, GpuArgument
    from driver.devices.file_device import FilePort
    from driver.devices.gpu_place import Room
    from driver.interface import BindOptions, BoundExecution

    Shape = tuple[int, ...]

_NO_MEMORY = re.compile(r"[Oo]ut of memory|OUT_OF_MEMORY|RESOURCE_EXHAUSTED")
_LEGACY_STREAM = 1
"""CUDA's handle of the default stream, which DLPack's `stream=None` means."""


class CudaFileModel(FileModel):
    """A file on a GPU: the first base of a framework's class. Each priority has three streams of its own."""

    gpu: CudaGpu

    def on_lane(self, lane: CudaLane, inputs: Sequence[Room], outputs: Sequence[Room]) -> BoundExecution:
        """Return an execution in the GPU's memory. Raise CudaFailed, ValueError."""
        raise NotImplementedError

    @cached_property
    def _lanes(self) -> dict[str, CudaLane]:
        return {}

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | BufferArgument | None],
        outputs: Sequence[NDArray[np.uint8] | BufferArgument],
        options: BindOptions,
    ) -> BoundExecution:
        """Bind it in the GPU's memory, if its outputs have known sizes. Raise CudaFailed, ValueError."""
        if not self.is_static:
            if any(isinstance(each, BufferArgument) for each in (*inputs, *outputs)):
                raise ValueError("the file has outputs of open sizes: give arguments in memory of the CPU")
            return self.execution(cast("Any", inputs), cast("Any", outputs))
        given = [_given(n, *pair) for n, pair in enumerate(zip(self.inputs, inputs, strict=True))]
        lane = self._lanes.get(options.priority)
        if lane is None:
            made = self.gpu.lane(-PRIORITIES.index(options.priority))
            lane = self._lanes.setdefault(options.priority, made)
        return self.on_lane(lane, given, places_of(outputs))


def _given(number: int, port: FilePort, given: NDArray[Any] | BufferArgument | None) -> Room:
    where = f"input {number} ({port.name})"
    if isinstance(given, BufferArgument):
        found = checked_gpu_input(where, given, port.size, chooses=port.chooses)
        if found.address % port.size:
            raise ValueError(f"{where}: its offset {given.offset} is no multiple of {port.size}")
        return found
    return cast("NDArray[np.uint8]", checked_input(where, "a model file", given, port.stored))


class FrameworkExecution(GpuExecution):
    """A run of a file on memory of the GPU. A subclass says in `compute` what it adds to the lane's stream."""

    def __init__(self, lane: CudaLane, model: FileModel, inputs: Sequence[Room], outputs: Sequence[Room]) -> None:
        """Take memory of the GPU. Raise CudaFailed."""
        known = [port.static_shape or () for port in model.outputs]
        sizes = [port.nbytes(shape) for port, shape in zip(model.outputs, known, strict=True)]
        self.shapes = tuple((s, n <= room.nbytes) for s, n, room in zip(known, sizes, outputs, strict=True))
        super().__init__(
            lane,
            [(_memory(place), place.nbytes) for place in inputs],
            [(_memory(place), min(n, place.nbytes)) for n, place in zip(sizes, outputs, strict=True)],
        )
        self._kept_model = model  # whose weights the kernels read
        self.ready = lane.gpu.context.event()  #: what the stream of a framework waits for, once it is recorded

    def tensor(self, argument: GpuArgument, dtype: DTypeLike, shape: Shape) -> LaneTensor:
        """Return an argument as a framework reads it."""
        owner = argument.memory or argument.buffer  # not this execution, which may keep what the framework makes of it
        found = LaneTensor(owner, argument.address, dtype, shape, device=(CUDA, self._lane.gpu.context.ordinal))
        found.ready = self.ready
        return found

    def compute(self, stream: CudaStream) -> None:
        """Add the kernels, and the copies of what they return. Raise what the framework raises."""
        raise NotImplementedError

    def check_result(self, number: int, shape: Sequence[int]) -> None:
        """Raise ExecutionFailed unless a result has the shape that the file says."""
        if tuple(shape) != self.shapes[number][0]:
            said, found = [*self.shapes[number][0]], [*shape]
            raise ExecutionFailed(0, "the file", f"output {number} has the sizes {found}, and its file says {said}")

    def work(self, stream: CudaStream) -> None:
        try:
            self.compute(stream)
        except (ExecutionFailed, ResourceExhaustedTransient):
            raise
        except Exception as error:  # frameworks share no class of errors
            stream.is_done()  # raises CudaFailed of a lost context, of which the framework tells in words of its own
            if _NO_MEMORY.search(str(error)):
                raise ResourceExhaustedTransient(f"the GPU has no memory left: {in_words(error)}") from error
            raise ExecutionFailed(0, "the file", in_words(error)) from error


def _memory(place: Room) -> NDArray[np.uint8] | BufferArgument:
    return place.argument if isinstance(place, GpuPlace) else place


class LaneTensor(GpuTensor):
    """A tensor that is ready when an event has passed: the stream of what takes it waits for that."""

    ready: CudaEvent

    def __dlpack__(self, *, stream: int | None = None, **more: Any) -> object:
        if stream == -1:  # DLPack: the consumer does not wait
            self.ready.synchronize()
        else:
            handle = ffi.cast("CUstream", stream or _LEGACY_STREAM)
            self.ready.context.call("cuStreamWaitEvent", handle, self.ready.handle, 0)
        return super().__dlpack__(stream=stream, **more)
