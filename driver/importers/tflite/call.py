"""One operator of a .tflite file, during conversion to operations of the HAL.

A function of the table takes a `TfliteCall` and emits operations:

    def _square(call: TfliteCall) -> None:
        call.emit("MUL", call.input(0), call.input(0), 0)

Arguments of `emit` are references to operands, numbers (INT32, FLOAT32 or BOOL scalars), arrays (constants) or None (an
omitted tensor). Where the HAL fixes the scale of a result and the file has another one, the result is requantised.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from driver.errors import ImportFailed, InvalidModel
from driver.formats.file_bytes import Array
from driver.nn import OPERATIONS, Operand, OperandLifeTime, OperandType, Operation
from driver.nn.builder import output_dimensions
from driver.nn.calls import check_call, match_signature
from driver.nn.operation import OperationType
from driver.nn.operation import Tensor as Shaped
from driver.nn.types import Dimensions

from .file import Operator, TfliteTensor
from .graph import FLOATS, QUANTISED, Ref, TfliteGraph

_HALF = np.array([1 << 16], np.int32)
_ACTIVATIONS = {1: "RELU", 2: "RELU1", 3: "RELU6", 4: "TANH"}


class TfliteCall:
    """One operator and the graph under construction."""

    def __init__(self, graph: TfliteGraph, operator: Operator, options: Any) -> None:
        self.graph, self.operator, self.options = graph, operator, options
        self.in_floats = False  #: its quantised inputs and outputs are computed as float32
        self._after: list[tuple[str, Ref, Ref]] = []

    def __len__(self) -> int:
        return len(self.operator.inputs)

    def given(self, position: int) -> bool:
        """Return True if the operator has an input at `position`."""
        return position < len(self) and self.operator.inputs[position] != -1

    def number(self, position: int) -> int:
        """Tensor number of input `position`."""
        if not self.given(position):
            raise ImportFailed(f"input {position} is missing")
        self.graph.check(self.operator.inputs[position])
        return self.operator.inputs[position]

    def tensor(self, position: int) -> TfliteTensor:
        """Input `position` as the file describes it."""
        return self.graph.source.tensor(self.number(position))

    def result(self, position: int) -> TfliteTensor:
        """Output `position` as the file describes it."""
        if position >= len(self.operator.outputs):
            raise ImportFailed(f"output {position} is missing")
        return self.graph.source.tensor(self.operator.outputs[position])

    def input(self, position: int) -> Ref:
        """Return the operand of input `position`."""
        is_quantised = self.in_floats and self.tensor(position).type in QUANTISED
        if is_quantised and self.tensor(position).data is not None:
            return self.graph.floats(self.number(position))
        x = self.graph.read(self.number(position))
        return self.float32_like(x, "DEQUANTIZE") if is_quantised else x

    def optional(self, position: int) -> Ref | None:
        """Return the operand of an input that may be omitted."""
        return self.input(position) if self.given(position) else None

    def weights(self, position: int, x: int = 0) -> Ref:
        """Input `position`, in float32 when input `x` is; the file may store such weights in a smaller type."""
        is_float = self.tensor(x).type == "FLOAT32"
        return self.graph.floats(self.number(position)) if is_float else self.input(position)

    def optional_weights(self, position: int) -> Ref | None:
        """Return weights that may be omitted."""
        return self.weights(position) if self.given(position) else None

    def output(self, position: int = 0, then: str | None = None) -> Ref:
        """Return the operand to write output `position` to. then: an operation to apply to it afterwards."""
        target = self.graph.write(self.result(position).index)
        if self.in_floats and self.result(position).type in QUANTISED:
            self._after.append(("QUANTIZE", self.float32_like(target), target))
            return self._after[-1][1]
        if then is None:
            return target
        if then == "TANH" and self.result(position).type not in FLOATS:
            raise ImportFailed("TANH is fused into it, and the file does not have the scale of the intermediate result")
        before = self.graph.like(target)
        self._after.append((then, before, target))
        return before

    def finish(self) -> None:
        """Emit the deferred operations."""
        for kind, before, target in self._after:
            self.emit(kind, before, to=[target])

    def values(self, position: int) -> Array:
        """Return the values of input `position`, which must be constant because the HAL needs them at compile time."""
        number = self.number(position)
        info = self.graph.source.tensor(number)
        if info.data is None and not (info.is_empty and not self.graph.is_computed(number)):
            raise ImportFailed(f"input {position}, {info}, must be a constant")
        return np.zeros(0, np.int32) if info.data is None else info.data

    def value(self, position: int) -> Any:
        """Return a constant input as one number."""
        values = self.values(position)
        if values.size != 1:
            raise ImportFailed(f"input {position} has {values.size} values; expected one")
        return values.reshape(-1)[0].item()

    def integers(self, position: int) -> list[int]:
        """Return a constant input, or one computed from known dimensions, as a list of integers."""
        sizes = self.graph.sizes.get(self.number(position), (None,))
        if None not in sizes:
            return [size for size in sizes if size is not None]
        if self.tensor(position).type not in ("INT32", "INT64"):
            raise ImportFailed(f"input {position}, {self.tensor(position)}, must hold integers")
        return [int(v) for v in self.values(position).reshape(-1)]

    def integer(self, position: int) -> int:
        """Return a constant input as one integer."""
        values = self.integers(position)
        if len(values) != 1:
            raise ImportFailed(f"input {position} has {len(values)} values; expected one")
        return values[0]

    def rank(self, position: int) -> int:
        """Return the rank of input `position`, which must be known."""
        shape = self.tensor(position).shape
        if shape is None:
            raise ImportFailed(f"input {position}, {self.tensor(position)}, must have a known rank")
        return len(shape)

    def shape(self, position: int, rank: int | None = None) -> Dimensions:
        """Return the dimensions of input `position`, all of which must be known. rank: how many there must be."""
        shape = self._known(self.tensor(position))
        if rank not in (None, len(shape)):
            raise ImportFailed(f"input {position} has dimensions {list(shape)}; expected {rank}")
        return shape

    def result_shape(self, position: int = 0) -> Dimensions:
        """Return the dimensions of output `position`, all of which must be known."""
        return self._known(self.result(position))

    def _known(self, info: TfliteTensor) -> Dimensions:
        if info.shape is None or 0 in info.shape:
            raise self.graph.unsized(f"{info}: all of its sizes must be known")
        return info.shape

    def activation(self) -> tuple[int, str | None]:
        """Return the fused activation: the HAL's code for it, and the operation to apply afterwards if it has no
        code.
        """
        code = self.options.FusedActivationFunction()
        if code in (0, 1, 2, 3):
            return code, None
        return 0, self.following_activation()

    def following_activation(self) -> str | None:
        """Return the fused activation as an operation of its own."""
        code = self.options.FusedActivationFunction()
        if code and code not in _ACTIVATIONS:
            raise ImportFailed(f"fused activation {code} has no counterpart in the HAL")
        return _ACTIVATIONS.get(code)

    def temporary(self, ref: Ref, dimensions: Sequence[int]) -> Ref:
        """Return a temporary like `ref`, with other dimensions."""
        return self.graph.like(ref, dimensions=tuple(dimensions))

    def zeros(self, count: int, like: Ref) -> Array:
        """`count` zeros for an input that the file omits, of the type for data like `like`."""
        self.graph.source.file.bytes.makes.charge(4 * count)
        kind = self.graph.operand(like).type
        return np.zeros(count, np.int32 if kind.is_quantised else kind.dtype)

    def reshape(self, source: Ref, shape: Sequence[int], target: Ref | None = None) -> Ref:
        """Reshape `source`; one dimension may be unknown (0)."""
        if list(shape).count(0) > 1 or any(d >= 2**31 for d in shape):
            raise self.graph.unsized(f"in {list(shape)}, more than one size is open, or one does not fit into 32 bits")
        result = self.temporary(source, shape) if target is None else target
        self.move("RESHAPE", source, np.array([d or -1 for d in shape] or [1], np.int32), to=result)
        return result

    def move(self, kind: str, source: Ref, *arguments: Any, to: Ref) -> None:
        """Emit an operation that the HAL has for floats and 8-bit integers only, and that moves elements.

        Booleans are moved as 0 and 1. 32-bit integers are moved as two halves of 16 bits, which are exact as floats.
        """
        held = self.graph.operand(source).type
        if held == OperandType.TENSOR_BOOL8:
            moved = self.float32_like(to)
            self.emit(kind, self.numbers(source), *arguments, to=[moved])
            self.emit("NOT_EQUAL", moved, np.zeros(1, np.float32), to=[to])
        elif held == OperandType.TENSOR_INT32:
            halves = []
            for half in self.halves(source):
                moved = self.float32_like(to)
                self.emit(kind, half, *arguments, to=[moved])
                halves.append(moved)
            self.join_halves(halves[0], halves[1], to)
        else:
            self.emit(kind, source, *arguments, to=[to])

    def numbers(self, source: Ref) -> Ref:
        """Return booleans as 1 and 0, in float32."""
        dims = self.graph.operand(source).dimensions
        if not dims or 0 in dims:
            raise self.graph.unsized(
                f"booleans of dimensions {list(dims)} become numbers only when all sizes are known"
            )
        self.graph.source.file.bytes.makes.charge(8 * math.prod(dims))
        result = self.float32_like(source)
        self.emit("SELECT", source, np.ones(dims, np.float32), np.zeros(dims, np.float32), to=[result])
        return result

    def halves(self, source: Ref) -> tuple[Ref, Ref]:
        """Return the high and the low 16 bits of integers, as floats."""
        high, above, low = (self.graph.like(source) for _ in range(3))
        self.emit("DIV", source, _HALF, 0, to=[high])  # rounds towards minus infinity: the low half is never negative
        self.emit("MUL", high, _HALF, 0, to=[above])
        self.emit("SUB", source, above, 0, to=[low])
        floats = self.float32_like(source), self.float32_like(source)
        for half, result in zip((high, low), floats, strict=True):
            self.emit("CAST", half, to=[result])
        return floats

    def join_halves(self, high: Ref, low: Ref, target: Ref) -> None:
        """Join integers of two halves."""
        whole, above, rest = (self.graph.like(target) for _ in range(3))
        self.emit("CAST", high, to=[whole])
        self.emit("MUL", whole, _HALF, 0, to=[above])
        self.emit("CAST", low, to=[rest])
        self.emit("ADD", above, rest, 0, to=[target])

    def emit(self, kind: str, *arguments: Any, to: Sequence[Ref] | None = None) -> None:
        """Add an operation. to: the operands that it writes, by default the operator's own outputs."""
        outputs = [self.output(i) for i in range(len(self.operator.outputs))] if to is None else list(to)
        inputs = [self._argument(kind, arguments, argument) for argument in arguments]
        if kind not in OPERATIONS:
            raise ImportFailed(f"the operation {kind} does not exist")
        before = [self._with_native_scale(kind, inputs, i, ref) for i, ref in enumerate(outputs)]
        self._append(kind, inputs, before)
        for ref, wanted in zip(before, outputs, strict=True):
            if ref != wanted:
                self.requantise(ref, wanted)

    def requantise(self, source: Ref, target: Ref) -> None:
        """Convert quantised data to another scale and zero point."""
        self._append("QUANTIZE", [self.float32_like(source, "DEQUANTIZE")], [target])

    def float32_like(self, ref: Ref, kind: str | None = None) -> Ref:
        """Return a float32 temporary like `ref`. kind: the operation that fills it from `ref`."""
        real = self.graph.like(ref, type=OperandType.TENSOR_FLOAT32, scale=0.0, zero_point=0)
        if kind is not None:
            self._append(kind, [ref], [real])
        return real

    def _append(self, kind: str, inputs: Sequence[Ref], outputs: Sequence[Ref]) -> None:
        operation = Operation(kind, [r.index for r in inputs], [r.index for r in outputs])
        try:
            check_call(OPERATIONS[kind], [*map(self.graph.operand, inputs)], [*map(self.graph.operand, outputs)])
            self._infer(OPERATIONS[kind], inputs, outputs)
        except (InvalidModel, ValueError) as error:
            raise ImportFailed(f"{kind}: {error}") from None
        self.graph.operations.append(operation)

    def _infer(self, kind: OperationType, inputs: Sequence[Ref], outputs: Sequence[Ref]) -> None:
        """Give the results their dimensions, where the file leaves them open or the caller changed those of inputs."""
        before, after = ([self.graph.operand(ref) for ref in refs] for refs in (inputs, outputs))
        is_open = any(not o.dimensions or 0 in o.dimensions for o in after)
        if kind.name in ("IF", "WHILE") or not (is_open or self.graph.is_resized):
            return
        shapes = output_dimensions(kind, match_signature(kind, before)[1], before, after)
        for ref, own, found in zip(outputs, after, shapes, strict=True):
            if not found or len(own.dimensions) not in (0, len(found)):
                continue
            pairs = [*zip(own.dimensions or found, found, strict=True)]
            resized = tuple((new or old) if self.graph.is_resized else (old or new) for old, new in pairs)
            if resized != own.dimensions:
                self.graph.resize(ref, resized)

    def _argument(self, kind: str, arguments: Sequence[Any], argument: Any) -> Ref:
        if isinstance(argument, Ref):
            return argument
        first = arguments[0]
        is_half = isinstance(first, Ref) and self.graph.operand(first).type == OperandType.TENSOR_FLOAT16
        if argument is None:
            omitted = OperandType.TENSOR_FLOAT16 if is_half else OperandType.TENSOR_FLOAT32
            return self.graph.add(Operand(omitted, lifetime=OperandLifeTime.NO_VALUE))
        return self.graph.constant(argument, OperandType.FLOAT16 if is_half and isinstance(argument, float) else None)

    def _with_native_scale(self, kind: str, inputs: Sequence[Ref], number: int, wanted: Ref) -> Ref:
        """Return an operand like `wanted` with the scale and zero point that the operation produces for output
        `number`.
        """
        operand = self.graph.operand(wanted)
        if not operand.type.is_quantised:
            return wanted
        signature, _ = match_signature(OPERATIONS[kind], [self.graph.operand(ref) for ref in inputs])
        source, result = _shaped(self.graph.operand(inputs[signature.of])), _shaped(operand)
        scale, zero_point = OPERATIONS[kind].quantise(number, source, result)
        if (np.float32(scale), zero_point) == (np.float32(operand.scale), operand.zero_point) or not scale > 0:
            return wanted
        return self.graph.like(wanted, scale=scale, zero_point=zero_point)


def _shaped(operand: Operand) -> Shaped:
    return Shaped(operand.base_type, operand.dimensions, operand.scale, operand.zero_point)


def axis_of(axis: int, rank: int) -> int:
    """Normalise an axis to an index from the front."""
    if not -rank <= axis < rank:
        raise ImportFailed(f"axis {axis} must be in {-rank}..{rank - 1}")
    return axis % rank
