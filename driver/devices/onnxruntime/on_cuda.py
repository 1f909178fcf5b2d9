"""Sessions of ONNX Runtime on CUDA, whose inputs and outputs lie in the GPU's memory.

A session gets the compute stream of a lane (`driver.devices.cuda.lane`). Its runs only add kernels to that stream and
return, so a burst's listener takes the next request while the GPU works. With the option `graphs`, ONNX Runtime records
the kernels of a run once for each bound request, and later runs are one call of CUDA's.

None of this has run on a GPU yet: the option is off by default for that reason.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from driver.devices.cuda.context import cuda_context
from driver.devices.cuda.lane import CudaGpu, GpuExecution
from driver.devices.gpu_place import GpuPlace
from driver.devices.onnxruntime.library import library
from driver.errors import ExecutionFailed
from driver.formats.onnx_schema import TYPES

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from driver.devices.cuda.context import CudaStream
    from driver.devices.cuda.lane import CudaLane
    from driver.devices.onnxruntime.library import Place, Session
    from driver.interface import BufferArgument

MOST_GRAPHS = 8
"""Bound requests of a session whose kernels are recorded: ONNX Runtime keeps each recording as long as the session."""


class OrtLanes:
    """Makes lanes on one GPU for the sessions of a device. One for each process."""

    def __init__(self, ordinal: int, give_up: Callable[[str], object], *, has_graphs: bool) -> None:
        """`give_up`: as of `CudaGpu`."""
        self._ordinal, self._give_up, self._has_graphs = ordinal, give_up, has_graphs
        self._gpu: CudaGpu | None = None

    def time_work(self, until: float) -> bool:
        """Note its work, as `Device.time_work` says."""
        if self._gpu is not None:
            self._gpu.clock.run_until(until)
        return self._gpu is not None

    def lane(self) -> OrtLane:
        """Return a lane for one session. Raise CudaMissing, CudaFailed."""
        if self._gpu is None:
            self._gpu = CudaGpu(cuda_context(self._ordinal), self._give_up)
        return OrtLane(self._gpu.lane(), has_graphs=self._has_graphs)


class OrtLane:
    """The resources that a session has on its GPU."""

    def __init__(self, lane: CudaLane, *, has_graphs: bool) -> None:
        self.lane, self._has_graphs, self._numbers = lane, has_graphs, itertools.count(1)

    @property
    def lock(self) -> threading.Lock:
        """The lock of the lane."""
        return self.lane.lock

    def provider_options(self) -> dict[str, str]:
        """Return the options for the provider, when the session is made."""
        found = {"user_compute_stream": str(self.lane.compute.address), "has_user_compute_stream": "1"}
        return found | ({"enable_cuda_graph": "1"} if self._has_graphs else {})

    def run_options(self) -> Any:
        """Return the options of one bound request: its runs return while the GPU works, and have a recording of their
        own.
        """
        options = library().RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if self._has_graphs:
            number = next(self._numbers)
            options.add_run_config_entry("gpu_graph_id", str(number if number <= MOST_GRAPHS else -1))
        return options


class OrtCudaExecution(GpuExecution):
    """A run of a session on its memory in the GPU's, for inputs and outputs whose shapes are known."""

    def __init__(self, session: Any, on: OrtLane, inputs: Sequence[Place], outputs: Sequence[Place]) -> None:
        """`session`: ONNX Runtime's own. Raise CudaFailed."""
        super().__init__(
            on.lane,
            [(_given(memory), memory.nbytes) for *_, memory in inputs],
            [(_given(memory), memory.nbytes) for *_, memory in outputs],
        )
        self.shapes = tuple((shape, True) for _, _, shape, _ in outputs)
        binding, number = session.io_binding(), on.lane.gpu.context.ordinal
        for places, arguments, bind in (
            (inputs, self.inputs, binding.bind_input),
            (outputs, self.outputs, binding.bind_output),
        ):
            for (name, type_, shape, _), argument in zip(places, arguments, strict=True):
                bind(name, "cuda", number, TYPES[type_], shape, argument.address)
        self._kept = session, binding
        # What the two classes wrap, as in `Binding`.
        self._session, self._binding, self._options = session._sess, binding._iobinding, on.run_options()
        self._kept_last = on.lane  # Python drops attributes in this order: a session uses its stream when it ends

    def work(self, stream: CudaStream) -> None:
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # its errors share no other class
            stream.is_done()  # raises CudaFailed of a lost context, of which ONNX Runtime tells in words of its own
            raise ExecutionFailed(0, "the model", str(error)) from error


def _given(memory: NDArray[np.uint8] | GpuPlace) -> NDArray[np.uint8] | BufferArgument:
    return memory.argument if isinstance(memory, GpuPlace) else memory


def cuda_execution(session: Session, inputs: Sequence[Place], outputs: Sequence[Place]) -> OrtCudaExecution:
    """Return an execution of a session that has a lane, in the GPU's memory, between these. Raise CudaFailed."""
    assert isinstance(session.lane, OrtLane)
    return OrtCudaExecution(session.session, session.lane, inputs, outputs)
