"""Programs of PyTorch's on a GPU.

PyTorch computes on the stream of a lane (`torch.cuda.ExternalStream`), in the context that the whole process has.
Arguments are tensors by DLPack; results are copied on the stream, as PyTorch allocates what a program returns. A
request that comes again and again is a CUDA graph (`torch_graphs`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.cuda.frameworks import CudaFileModel, FrameworkExecution
from driver.devices.cuda.torch_graphs import LaneGraphs, PlanGraph, obstacle_to_graphs
from driver.devices.torch import TorchModel, torch_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.devices.cuda.context import CudaStream
    from driver.devices.cuda.lane import CudaGpu, CudaLane, GpuArgument
    from driver.devices.file_device import FilePort
    from driver.devices.gpu_place import Room
    from driver.interface import BoundExecution
    from driver.nn import Model

_log = logging.getLogger(__name__)


class TorchCudaModel(CudaFileModel, TorchModel):
    """A program whose weights are on a GPU, once for all clients that have equal files."""

    def __init__(
        self,
        gpu: CudaGpu,
        model: Model,
        program: Any,
        *,
        inputs: Sequence[FilePort],
        outputs: Sequence[FilePort],
        has_graphs: bool,
    ) -> None:
        """Move it there. Raise InvalidModel, and what PyTorch raises."""
        self.gpu, self.place = gpu, f"cuda:{gpu.context.ordinal}"
        passes = torch_module().export.passes
        super().__init__(model, passes.move_to_device_pass(program, self.place), inputs, outputs)
        self._graphs: dict[CudaLane, LaneGraphs] | None = {} if has_graphs else None
        if has_graphs and self.is_static and (why := obstacle_to_graphs(program)):
            _log.warning("a program runs without CUDA graphs: %s", why)
            self._graphs = None

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the outputs on the CPU, of inputs on the CPU. Raise what PyTorch raises."""
        return [found.cpu() for found in super().__call__([tensor.to(self.place) for tensor in tensors])]

    def compute(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the outputs, of inputs on the GPU. Raise what PyTorch raises."""
        return super().__call__(tensors)

    def on_lane(self, lane: CudaLane, inputs: Sequence[Room], outputs: Sequence[Room]) -> BoundExecution:
        return TorchCudaExecution(lane, self, inputs, outputs)

    def graphs_on(self, lane: CudaLane) -> LaneGraphs | None:
        """Return what graphs on a lane share; None: there are none. Raise CudaFailed, and what PyTorch raises."""
        if self._graphs is None:
            return None
        return self._graphs.get(lane) or self._graphs.setdefault(lane, LaneGraphs(lane, self.place))


class TorchCudaExecution(FrameworkExecution):
    """A call of a program on the lane's stream."""

    def __init__(self, lane: CudaLane, model: TorchCudaModel, inputs: Sequence[Room], outputs: Sequence[Room]) -> None:
        """Take memory of the GPU, and make tensors of it. Raise CudaFailed."""
        super().__init__(lane, model, inputs, outputs)
        self._call = model.compute
        self._stream = torch_module().cuda.ExternalStream(lane.compute.address, device=model.place)
        shapes = [place.shape for place in inputs]
        rows = zip(model.outputs, self.shapes, self.outputs, strict=True)
        with torch_module().cuda.stream(self._stream):
            self._tensors = [self._tensor(*each) for each in zip(model.inputs, shapes, self.inputs, strict=True)]
            self._targets: list[Any] = [self._tensor(port, s, its) if fits else None for port, (s, fits), its in rows]
        self._bools = [port.dtype == "bool" for port in model.inputs]
        self._graph = PlanGraph(model.graphs_on(lane))

    def _tensor(self, port: FilePort, shape: tuple[int, ...], argument: GpuArgument) -> Any:
        torch = torch_module()
        raw = torch.from_dlpack(self.tensor(argument, np.dtype(f"i{port.size}"), shape))
        return raw.view(getattr(torch, port.dtype))

    def compute(self, stream: CudaStream) -> None:
        with torch_module().cuda.stream(self._stream):
            self._graph.run(self._add)

    def prepare_next(self) -> None:
        self._graph.record(self._add)

    def _add(self) -> None:
        """Add all to the current stream."""
        pairs = zip(self._tensors, self._bools, strict=True)  # a byte from another process may have any value
        given = [tensor.view(torch_module().uint8).ne(0) if is_bool else tensor for tensor, is_bool in pairs]
        for number, found in enumerate(self._call(given)):
            self.check_result(number, found.shape)
            if not found.is_cuda:
                self._graph.refuse("the program returns memory of the CPU")
            self._targets[number].copy_(found, non_blocking=True)
