"""Functions of JAX's on a GPU.

JAX has streams of its own, and takes and gives arrays by DLPack: its stream waits for the lane's copies in, and the
lane's stream waits for what JAX computes (`stream` of `__dlpack__`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.cuda.frameworks import CudaFileModel, FrameworkExecution
from driver.devices.cuda.gpu_tensor import CUDA, borrowed
from driver.devices.jax import JaxModel, jax_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.devices.cuda.context import CudaStream
    from driver.devices.cuda.lane import CudaGpu, CudaLane
    from driver.devices.gpu_place import Room
    from driver.interface import BoundExecution
    from driver.nn import Model


class JaxCudaModel(CudaFileModel, JaxModel):
    """A function that is compiled for a GPU."""

    platform = "cuda"
    bools = np.dtype(np.uint8)  # a byte from another process may have any value

    def __init__(self, gpu: CudaGpu, model: Model, exported: Any) -> None:
        """Compile it. Raise InvalidModel, and what JAX raises."""
        self.gpu = gpu
        super().__init__(model, exported)

    def on_lane(self, lane: CudaLane, inputs: Sequence[Room], outputs: Sequence[Room]) -> BoundExecution:
        return JaxCudaExecution(lane, self, inputs, outputs)


class JaxCudaExecution(FrameworkExecution):
    """A call of a function between the copies of a lane."""

    def __init__(self, lane: CudaLane, model: JaxCudaModel, inputs: Sequence[Room], outputs: Sequence[Room]) -> None:
        """Take memory of the GPU. Raise CudaFailed."""
        super().__init__(lane, model, inputs, outputs)
        self._call = model.run
        rows = zip(self.inputs, model.dtypes, [place.shape for place in inputs], strict=True)
        self._tensors = [self.tensor(*row) for row in rows]
        self._last: object = None

    def compute(self, stream: CudaStream) -> None:
        stream.record(self.ready)
        given = [jax_module("cuda").dlpack.from_dlpack(tensor) for tensor in self._tensors]
        found = self._call(*given)
        place = CUDA, stream.context.ordinal
        for number, (result, output) in enumerate(zip(found, self.outputs, strict=True)):
            self.check_result(number, result.shape)
            with borrowed(result, place, stream.address) as there:
                stream.copy_across(output.address, there.address, min(there.nbytes, output.nbytes))
        self._last = given, found  # until the next run: the stream has yet to copy them
