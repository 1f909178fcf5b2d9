"""Devices that are broken on purpose, each in one way: the kit has to find out which.

Run `burst vts burst_test_devices.broken:WrongResults`. Some reach into the service or the engine that
runs them, because those check on a device's behalf what the kit wants to see unchecked. `broken_caches` has those that
are wrong about their cache files.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import signal
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.devices.reference import ReferenceDevice
from driver.interface import BoundExecution, PreparedModel
from driver.nn import OPERATIONS, Interpreter, OperandType
from driver.nn import Bound as NumpyBound
from driver.protocol.model_codec import decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from burst.wire import RequestPacket
    from driver.interface import BindOptions, Preparation
    from driver.nn import Model
    from driver.nn.interpreter import DynamicBound

    Inputs = Sequence[NDArray[Any] | None]
    Outputs = Sequence[NDArray[Any]]
    Shapes = Sequence[tuple[tuple[int, ...], bool]]


class _Bound(BoundExecution):
    """An execution that does as another one does, for subclasses that do not quite."""

    def __init__(self, bound: BoundExecution, inputs: Inputs, outputs: Outputs) -> None:
        self.bound, self.inputs, self.outputs = bound, inputs, outputs
        self.shapes = self.shapes_of(bound)

    def run(self) -> None:
        try:
            self.bound.run()
        finally:
            self.shapes = self.shapes_of(self.bound)

    def shapes_of(self, bound: BoundExecution) -> Shapes:
        return bound.shapes


class _Prepared(PreparedModel):
    """A model whose executions are of a given class."""

    def __init__(self, prepared: PreparedModel, kind: type[_Bound]) -> None:
        self.prepared, self.kind, self.is_static = prepared, kind, prepared.is_static

    def bind(self, inputs: Inputs, outputs: Outputs, options: BindOptions) -> BoundExecution:
        return self.kind(self.prepared.bind(inputs, outputs, options), inputs, outputs)


class _Executing(ReferenceDevice):
    """A device whose executions are of its class `kind`."""

    kind: type[_Bound] = _Bound

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference, but for its executions."""
        return _Prepared(super().prepare(model, preparation), self.kind)


class _Wrong(_Bound):
    def run(self) -> None:
        super().run()
        for output in self.outputs:
            np.bitwise_xor(output[:4], 0x55, out=output[:4])


class WrongResults(_Executing):
    """The first four bytes of each output are wrong."""

    kind = _Wrong


class _Turned(_Bound):
    def shapes_of(self, bound: BoundExecution) -> Shapes:
        return [(dimensions[::-1], enough) for dimensions, enough in bound.shapes]


class WrongShapes(_Executing):
    """Says of each output that its dimensions are the other way round."""

    kind = _Turned


class Generous(ReferenceDevice):
    """Says that there is room for every output, and writes what fits."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Computes in memory of its own."""
        return _Cutting(model)


class _Cutting(PreparedModel):
    is_static = False

    def __init__(self, model: Model) -> None:
        self._interpreter = Interpreter(model)

    def bind(self, inputs: Inputs, outputs: Outputs, options: BindOptions) -> BoundExecution:
        return _CutBound(self._interpreter.bind(inputs, None, options.pace, options.loop_timeout), outputs)


class _CutBound(BoundExecution):
    def __init__(self, bound: NumpyBound | DynamicBound, outputs: Outputs) -> None:
        self._bound, self._outputs = bound, outputs
        self.shapes = []

    def run(self) -> None:
        self._bound.run()
        self.shapes = [(tensor.shape, True) for tensor in self._bound.results]
        for tensor, output in zip(self._bound.results, self._outputs, strict=True):
            found = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)[: len(output)]
            output[: len(found)] = found


class Liar(ReferenceDevice):
    """Promises everything, and cannot prepare a MUL."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Breaks its promise."""
        if any(operation.type == "MUL" for operation in model.main.operations):
            raise RuntimeError("this device multiplies nothing")
        return super().prepare(model, preparation)


class Uncoupled(ReferenceDevice):
    """Supports unsigned quantised data, and not its signed twin."""

    def supported_operations(self, model: Model) -> list[bool]:
        """True for models without signed data."""
        signed = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
        return [all(operand.type != signed for operand in model.main.operands)] * len(model.main.operations)


class Mortal(_Executing):
    """Dies of SIGSEGV when it executes a TANH, and is well otherwise."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Only a TANH is deadly."""
        is_deadly = any(operation.type == "TANH" for operation in model.main.operations)
        return _Prepared(super().prepare(model, preparation), _Crash if is_deadly else _Bound)


class _Crash(_Bound):
    def run(self) -> None:
        signal.raise_signal(signal.SIGSEGV)


class Nameless(ReferenceDevice):
    """Has no version, is of no type, and does not count operations."""

    name, version, type = "", "", "TPU"

    def supported_operations(self, model: Model) -> list[bool]:
        """One answer too many."""
        return [*super().supported_operations(model), True]


class Credulous(ReferenceDevice):
    """Takes every model for valid."""

    def __init__(self) -> None:
        if service := sys.modules.get("driver.service.validation"):
            service.decode_valid = decode  # type: ignore[attr-defined]

    def supported_operations(self, model: Model) -> list[bool]:
        """Without a look at it."""
        return [operation.type in OPERATIONS for operation in model.main.operations]


class Circular(Credulous):
    """Takes every model for valid, and does not follow its subgraphs round."""

    def __init__(self) -> None:
        super().__init__()
        from driver.nn import known

        vars(known)["TopologicalSorter"] = lambda refers: SimpleNamespace(static_order=lambda: list(refers))


class Careless(ReferenceDevice):
    """Takes requests with any number of arguments."""

    def __init__(self) -> None:
        import driver.engine.binding as module

        module._check_counts = lambda *_: None

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Makes up what is missing."""
        return _Filling(model, super().prepare(model, preparation))


class _Filling(PreparedModel):
    def __init__(self, model: Model, prepared: PreparedModel) -> None:
        self._model, self._prepared, self.is_static = model, prepared, prepared.is_static

    def bind(self, inputs: Inputs, outputs: Outputs, options: BindOptions) -> BoundExecution:
        graph = self._model.main
        operands = [graph.operands[i] for i in graph.inputs[len(inputs) :]]
        given = [*inputs, *(np.zeros(o.dimensions, o.type.dtype) for o in operands)]
        spare = [_room(graph.operands[i].dimensions) for i in graph.outputs[len(outputs) :]]
        return self._prepared.bind(given, [*outputs, *spare], options)


def _room(dimensions: Sequence[int]) -> NDArray[Any]:
    return np.zeros(8 * math.prod(dimensions), np.uint8)


_nothing = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lambda _: 0)


class _Empty(_Bound):
    native = ctypes.cast(_nothing, ctypes.c_void_p).value or 0, 0


class Lazy(_Executing):
    """Brings a C function along, which requests that are known call on every path, and which computes nothing."""

    kind = _Empty


class _Scribbling(_Bound):
    def run(self) -> None:
        super().run()
        for output in self.outputs:
            if output.ctypes.data % mmap.PAGESIZE:
                ctypes.memset(output.ctypes.data - 1, 0, 1)


class Scribbler(_Executing):
    """Writes a byte before each output that does not begin a page."""

    kind = _Scribbling


class Racy(ReferenceDevice):
    """All executions of a model compute in the same memory, and take a millisecond to copy it."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """With one memory for all its outputs."""
        return _Sharing(super().prepare(model, preparation))


class _Sharing(PreparedModel):
    def __init__(self, prepared: PreparedModel) -> None:
        self._prepared, self.is_static = prepared, prepared.is_static
        self._memory: dict[tuple[int, int], NDArray[Any]] = {}

    def bind(self, inputs: Inputs, outputs: Outputs, options: BindOptions) -> BoundExecution:
        shared = [self._memory.setdefault((n, len(o)), np.zeros_like(o)) for n, o in enumerate(outputs)]
        return _Late(self._prepared.bind(inputs, shared, options), shared, outputs)


class _Late(BoundExecution):
    def __init__(self, bound: BoundExecution, shared: Outputs, outputs: Outputs) -> None:
        self._bound, self._shared, self._outputs = bound, shared, outputs
        self.shapes = bound.shapes

    def run(self) -> None:
        self._bound.run()
        self.shapes = self._bound.shapes
        time.sleep(1e-3)
        for shared, output in zip(self._shared, self._outputs, strict=True):
            np.copyto(output, shared)


class Gullible(ReferenceDevice):
    """Takes a packet of a burst that it cannot read for the one before."""

    def __init__(self) -> None:
        import burst.server
        from burst import Malformed
        from burst.wire import decode_request

        last: list[RequestPacket] = []

        def guess(raw: bytes, version: int) -> RequestPacket:
            try:
                last[:] = [decode_request(raw, version)]
            except Malformed:
                if not last:
                    raise
            return last[0]

        vars(burst.server)["decode_request"] = guess


class Boastful(ReferenceDevice):
    """Says on the plain path that its executions take longer on the device than in the driver."""

    def __init__(self) -> None:
        import driver.engine.lane

        module: Any = driver.engine.lane
        from burst import Timing

        encode = module.encode_outcome
        module.encode_outcome = lambda result, *more: encode(
            result._replace(timing=result.timing if result.status else Timing(3, 2)), *more
        )


class Hanging(_Executing):
    """Never comes back from executing a TANH."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Only a TANH takes for ever."""
        hangs = any(operation.type == "TANH" for operation in model.main.operations)
        return _Prepared(super().prepare(model, preparation), _Wait if hangs else _Bound)


class _Wait(_Bound):
    def run(self) -> None:
        signal.pause()
