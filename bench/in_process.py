"""A model run by LiteRT in this process: the C calls that the litert device makes, and nothing around them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.litert import cuts
from driver.devices.litert.library import Compiled, TensorBuffers, library
from driver.devices.litert.program import LiteRtProgram, lowered
from driver.devices.litert.weights import aligned
from driver.devices.lowering.placing import constants, prepared
from driver.nn.operation import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from driver import Model
    from driver.devices.litert.program import LiteRtPort


class _Alone(Compiled):
    """Nothing ends its runs early, so it does not look for a request to end."""

    def ask(self, *_: Any) -> None:
        pass


class InProcess:
    """A compiled model with memory of its own."""

    def __init__(self, model: Model, threads: Callable[[int], int]) -> None:
        """`threads`: as `LiteRtDevice.threads_for`, how many for so much work. Raises LibraryMissing, LibraryFailed."""
        cuts.SEGMENT = 1 << 60  # in one piece, as a program calls LiteRT; the device is another process
        graph = model.main
        tensors = {**constants(graph), **{i: Tensor.of(graph.operands[i]) for i in graph.inputs}}
        program = LiteRtProgram(*lowered(model, prepared(graph), tensors, lambda: None), threads, _Alone)
        self.inputs = [_memory(port, graph.operands[graph.inputs[port.number]].type.dtype) for port in program.inputs]
        self.outputs = [
            _memory(port, graph.operands[graph.outputs[port.number]].type.dtype) for port in program.outputs
        ]
        self._program, self.threads = program, program.threads
        self._sources, self._targets = _buffers(program.inputs, self.inputs), _buffers(program.outputs, self.outputs)
        call: Any = library().LiteRtRunCompiledModel
        self._call: Callable[[], int] = partial(
            call,
            program.compiled.handle,
            0,
            len(self._sources),
            self._sources.handles,
            len(self._targets),
            self._targets.handles,
        )

    def run(self) -> int:
        """Executes once; 0 when it went well. A method, as what holds it holds the model and its memory, too."""
        return self._call()


def _memory(port: LiteRtPort, dtype: np.dtype[Any]) -> NDArray[Any]:
    return aligned(port.nbytes).view(dtype).reshape(port.shape)


def _buffers(ports: list[LiteRtPort], arrays: list[NDArray[Any]]) -> TensorBuffers:
    """What the library calls the memory of `arrays`."""
    raw = [array.reshape(-1).view(np.uint8) for array in arrays]
    return TensorBuffers([(port.type, port.shape, memory) for port, memory in zip(ports, raw, strict=True)])
