"""The conversion table: a rule per builtin operator, each with a short function.

An operator that is not listed has no counterpart in HAL 1.3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from driver.errors import ImportFailed
from driver.nn import Operand, OperandLifeTime, OperandType

from . import operators, shapes
from .call import TfliteCall
from .graph import FLOATS, QUANTISED, Ref, dequantised

Convert = Callable[[TfliteCall], None]


@dataclass(frozen=True, slots=True)
class TfliteRule:
    """convert: emits the HAL operations. options: class of its options; None when none matter."""

    convert: Convert
    options: str | None = None


def _same(kind: str, *more: float) -> Convert:
    """Return an operation with the same inputs, plus constant scalars."""

    def convert(call: TfliteCall) -> None:
        call.emit(kind, *map(call.input, range(len(call))), *more)

    return convert


def _in_floats(convert: Convert) -> Convert:
    """Wrap the operation in DEQUANTIZE and QUANTIZE for quantised data: the HAL has it for floats only."""

    def converted(call: TfliteCall) -> None:
        call.in_floats = call.tensor(0).type in QUANTISED
        convert(call)

    return converted


def _only(types: tuple[str, ...], call: TfliteCall, reason: str) -> None:
    if call.tensor(0).type not in types and not call.in_floats:
        raise ImportFailed(f"{call.tensor(0).type}: {reason}")


def _scalar_like(call: TfliteCall, value: float) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """Return a constant of one element, of the type of input 0."""
    return np.array([value], call.graph.operand(call.input(0)).type.dtype)


# ---- element by element --------------------------------------------------------------------------------------------


def _arithmetic(kind: str) -> Convert:
    def convert(call: TfliteCall) -> None:
        code, then = call.activation()
        call.emit(kind, call.input(0), call.input(1), code, to=[call.output(0, then)])

    return convert


def _div(call: TfliteCall) -> None:
    _only(FLOATS, call, "the HAL divides floats, and integers towards minus infinity only (FLOOR_DIV)")
    _arithmetic("DIV")(call)


def _floor_div(call: TfliteCall) -> None:
    x, y = call.input(0), call.input(1)
    if call.tensor(0).type == "INT32":
        call.emit("DIV", x, y, 0)
        return
    target = call.output()
    quotient = call.graph.like(target)
    call.emit("DIV", x, y, 0, to=[quotient])
    call.emit("FLOOR", quotient, to=[target])


def _floor_mod(call: TfliteCall) -> None:
    """Remainder of DIV, which rounds towards minus infinity."""
    _only(("INT32",), call, "the HAL has no remainder of floats")
    x, y = call.input(0), call.input(1)
    target = call.output()
    quotient, multiple = call.graph.like(target), call.graph.like(target)
    call.emit("DIV", x, y, 0, to=[quotient])
    call.emit("MUL", quotient, y, 0, to=[multiple])
    call.emit("SUB", x, multiple, 0, to=[target])


def _square(call: TfliteCall) -> None:
    call.emit("MUL", call.input(0), call.input(0), 0)


def _squared_difference(call: TfliteCall) -> None:
    _only((*FLOATS, "INT32"), call, "the file does not say the scale of the difference")
    target = call.output()
    difference = call.graph.like(target)
    call.emit("SUB", call.input(0), call.input(1), 0, to=[difference])
    call.emit("MUL", difference, difference, 0, to=[target])


def _add_n(call: TfliteCall) -> None:
    _only((*FLOATS, "INT32"), call, "the file does not say the scales of the partial sums")
    if len(call) < 2:
        raise ImportFailed(f"{len(call)} inputs; expected at least two")
    target, total = call.output(), call.input(0)
    for i in range(1, len(call)):
        result = target if i == len(call) - 1 else call.graph.like(target)
        call.emit("ADD", total, call.input(i), 0, to=[result])
        total = result


def _cos(call: TfliteCall) -> None:
    x = call.input(0)
    shifted = call.graph.like(x)
    call.emit("ADD", x, _scalar_like(call, math.pi / 2), 0, to=[shifted])
    call.emit("SIN", shifted)


def _ceil(call: TfliteCall) -> None:
    x = call.input(0)
    negative, floor = call.graph.like(x), call.graph.like(x)
    call.emit("NEG", x, to=[negative])
    call.emit("FLOOR", negative, to=[floor])
    call.emit("NEG", floor)


def _unit_relu(call: TfliteCall) -> None:
    """RELU_0_TO_1."""
    _only(FLOATS, call, "the HAL has it for floats only, as MAXIMUM and MINIMUM")
    positive = call.graph.like(call.input(0))
    call.emit("MAXIMUM", call.input(0), _scalar_like(call, 0.0), to=[positive])
    call.emit("MINIMUM", positive, _scalar_like(call, 1.0))


def _gelu(call: TfliteCall) -> None:
    """GELU by its approximation: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))."""
    _only(FLOATS, call, "the file does not say the scales of the steps in between")
    if not call.options.Approximate():
        raise ImportFailed("the HAL has no error function; convert the model with the TANH approximation")
    x = call.input(0)

    def step(kind: str, *arguments: Ref | float) -> Ref:
        result, operands = call.graph.like(x), [_scalar_like(call, a) if isinstance(a, float) else a for a in arguments]
        call.emit(kind, *operands, *((0,) if kind != "TANH" else ()), to=[result])
        return result

    cubic = step("MUL", step("MUL", step("MUL", x, x), x), 0.044715)
    inner = step("MUL", step("ADD", x, cubic), math.sqrt(2 / math.pi))
    call.emit("MUL", step("MUL", x, 0.5), step("ADD", step("TANH", inner), 1.0), 0)


def _leaky_relu(call: TfliteCall) -> None:
    """PRELU with one slope. A quantised slope is 0 or +-1 at scale |slope|."""
    _only((*FLOATS, *QUANTISED), call, "the HAL has no such PRELU")
    x, slope = call.input(0), float(call.options.Alpha())
    if call.tensor(0).type not in QUANTISED:
        call.emit("PRELU", x, _scalar_like(call, slope))
        return
    zero_point = int(slope < 0)
    raw = _scalar_like(call, zero_point + (slope > 0) - (slope < 0))
    call.emit("PRELU", x, call.graph.constant(raw, scale=abs(slope) or 1.0, zero_point=zero_point))


def _quantize(call: TfliteCall) -> None:
    if call.tensor(0).type in FLOATS:
        call.emit("QUANTIZE", call.input(0))
    else:
        call.requantise(call.input(0), call.output())


def _densify(call: TfliteCall) -> None:
    """DENSIFY: its result is a constant, which is dense as soon as it is read."""
    call.values(0)
    call.graph.same(call.result(0).index, call.tensor(0))


def _dequantize(call: TfliteCall) -> None:
    """16-bit weights become 32-bit constants: the HAL computes with those."""
    source = call.tensor(0)
    if source.type == "FLOAT16" and source.data is not None:
        call.graph.source.file.bytes.makes.charge(4 * source.data.size)
        call.graph.define(call.result(0).index, dequantised(source))
    else:
        call.emit("CAST" if source.type == "FLOAT16" else "DEQUANTIZE", call.input(0))


# ---- along axes ----------------------------------------------------------------------------------------------------


def _reduce(kind: str, keep: Callable[[int], int] = bool) -> Convert:
    return lambda call: call.emit(kind, call.input(0), call.input(1), keep(call.options.KeepDims()))


def _mean(call: TfliteCall) -> None:
    """MEAN; in floats when the result has its own scale: the input's may be much coarser."""
    x, y = call.tensor(0), call.result(0)
    call.in_floats = x.type in QUANTISED and (x.scales, x.zero_points) != (y.scales, y.zero_points)
    _reduce("MEAN", int)(call)


def _arg(kind: str) -> Convert:
    return lambda call: call.emit(kind, call.input(0), call.integer(1))


def _top_k(call: TfliteCall) -> None:
    """TOPK_V2. Of equal elements the HAL takes the last first, and TFLite the first: so their order is turned before,
    and the indices after.
    """
    shape, values, indices = call.shape(0), call.output(0), call.output(1)
    if not shape:
        raise ImportFailed(f"{call.tensor(0)} is a scalar; the HAL takes one dimension at least")
    size, turned, found = shape[-1], call.graph.like(call.input(0)), call.graph.like(indices)
    call.graph.source.file.bytes.makes.charge(4 * size)
    call.emit("GATHER", call.input(0), len(shape) - 1, np.arange(size, dtype=np.int32)[::-1], to=[turned])
    call.emit("TOPK_V2", turned, call.integer(1), to=[values, found])
    call.emit("SUB", np.array([size - 1], np.int32), found, 0, to=[indices])


def _softmax(call: TfliteCall) -> None:
    call.emit("SOFTMAX", call.input(0), float(call.options.Beta()))


def _l2_normalization(call: TfliteCall) -> None:
    call.emit("L2_NORMALIZATION", call.input(0), to=[call.output(0, call.following_activation())])


def _local_response_normalization(call: TfliteCall) -> None:
    o = call.options
    call.emit("LOCAL_RESPONSE_NORMALIZATION", call.input(0), o.Radius(), o.Bias(), o.Alpha(), o.Beta())


def _lsh_projection(call: TfliteCall) -> None:
    """LSH_PROJECTION; SPARSE is that of HAL 1.2."""
    kind = {1: 3, 2: 2}.get(call.options.Type())
    if kind is None:
        raise ImportFailed(f"projection {call.options.Type()} is neither SPARSE (1) nor DENSE (2)")
    call.emit("LSH_PROJECTION", call.input(0), call.input(1), call.optional(2), kind)


# ---- control flow --------------------------------------------------------------------------------------------------


def _subgraph(call: TfliteCall, number: int) -> Ref:
    value = call.graph.refer(number)
    return call.graph.add(Operand(OperandType.SUBGRAPH, lifetime=OperandLifeTime.SUBGRAPH, value=value))


def _if(call: TfliteCall) -> None:
    branches = [_subgraph(call, i) for i in (call.options.ThenSubgraphIndex(), call.options.ElseSubgraphIndex())]
    call.emit("IF", call.input(0), *branches, *map(call.input, range(1, len(call))))


def _while(call: TfliteCall) -> None:
    graphs = [_subgraph(call, i) for i in (call.options.CondSubgraphIndex(), call.options.BodySubgraphIndex())]
    call.emit("WHILE", *graphs, *map(call.input, range(len(call))))


TABLE: dict[str, TfliteRule] = {
    "ABS": TfliteRule(_in_floats(_same("ABS"))),
    "ADD": TfliteRule(_arithmetic("ADD"), "AddOptions"),
    "ADD_N": TfliteRule(_add_n),
    "ARG_MAX": TfliteRule(_arg("ARGMAX")),
    "ARG_MIN": TfliteRule(_arg("ARGMIN")),
    "AVERAGE_POOL_2D": TfliteRule(operators.pool("AVERAGE_POOL_2D"), "Pool2DOptions"),
    "BATCH_TO_SPACE_ND": TfliteRule(shapes.batch_to_space),
    "BATCH_MATMUL": TfliteRule(operators.batch_matmul, "BatchMatMulOptions"),
    "BIDIRECTIONAL_SEQUENCE_LSTM": TfliteRule(operators.bidirectional_lstm, "BidirectionalSequenceLSTMOptions"),
    "BIDIRECTIONAL_SEQUENCE_RNN": TfliteRule(operators.bidirectional_rnn, "BidirectionalSequenceRNNOptions"),
    "BROADCAST_TO": TfliteRule(operators.broadcast_to),
    "CAST": TfliteRule(operators.cast),
    "CEIL": TfliteRule(_in_floats(_ceil)),
    "CONCATENATION": TfliteRule(shapes.concatenation, "ConcatenationOptions"),
    "CONV_2D": TfliteRule(operators.conv, "Conv2DOptions"),
    "COS": TfliteRule(_in_floats(_cos)),
    "DENSIFY": TfliteRule(_densify),
    "DEPTHWISE_CONV_2D": TfliteRule(operators.depthwise, "DepthwiseConv2DOptions"),
    "DEPTH_TO_SPACE": TfliteRule(shapes.blocks("DEPTH_TO_SPACE"), "DepthToSpaceOptions"),
    "DEQUANTIZE": TfliteRule(_dequantize),
    "DIV": TfliteRule(_div, "DivOptions"),
    "ELU": TfliteRule(_in_floats(_same("ELU", 1.0))),
    "EMBEDDING_LOOKUP": TfliteRule(_same("EMBEDDING_LOOKUP")),
    "EQUAL": TfliteRule(_same("EQUAL")),
    "EXP": TfliteRule(_in_floats(_same("EXP"))),
    "EXPAND_DIMS": TfliteRule(shapes.expand_dims),
    "FILL": TfliteRule(shapes.fill),
    "FLOOR": TfliteRule(_same("FLOOR")),
    "FLOOR_DIV": TfliteRule(_floor_div),
    "FLOOR_MOD": TfliteRule(_floor_mod),
    "FULLY_CONNECTED": TfliteRule(operators.dense, "FullyConnectedOptions"),
    "GATHER": TfliteRule(shapes.gather, "GatherOptions"),
    "GELU": TfliteRule(_in_floats(_gelu), "GeluOptions"),
    "GREATER": TfliteRule(_same("GREATER")),
    "GREATER_EQUAL": TfliteRule(_same("GREATER_EQUAL")),
    "HARD_SWISH": TfliteRule(_same("HARD_SWISH")),
    "HASHTABLE_LOOKUP": TfliteRule(_same("HASHTABLE_LOOKUP")),
    "IF": TfliteRule(_if, "IfOptions"),
    "L2_NORMALIZATION": TfliteRule(_l2_normalization, "L2NormOptions"),
    "L2_POOL_2D": TfliteRule(operators.pool("L2_POOL_2D"), "Pool2DOptions"),
    "LEAKY_RELU": TfliteRule(_leaky_relu, "LeakyReluOptions"),
    "LESS": TfliteRule(_same("LESS")),
    "LESS_EQUAL": TfliteRule(_same("LESS_EQUAL")),
    "LOCAL_RESPONSE_NORMALIZATION": TfliteRule(_local_response_normalization, "LocalResponseNormalizationOptions"),
    "LOG": TfliteRule(_in_floats(_same("LOG"))),
    "LOGICAL_AND": TfliteRule(_same("LOGICAL_AND")),
    "LOGICAL_NOT": TfliteRule(_same("LOGICAL_NOT")),
    "LOGICAL_OR": TfliteRule(_same("LOGICAL_OR")),
    "LOGISTIC": TfliteRule(_same("LOGISTIC")),
    "LOG_SOFTMAX": TfliteRule(_in_floats(_same("LOG_SOFTMAX", 1.0, -1))),
    "LSH_PROJECTION": TfliteRule(_lsh_projection, "LSHProjectionOptions"),
    "LSTM": TfliteRule(operators.lstm, "LSTMOptions"),
    "MAXIMUM": TfliteRule(_same("MAXIMUM")),
    "MAX_POOL_2D": TfliteRule(operators.pool("MAX_POOL_2D"), "Pool2DOptions"),
    "MEAN": TfliteRule(_mean, "ReducerOptions"),
    "MINIMUM": TfliteRule(_same("MINIMUM")),
    "MIRROR_PAD": TfliteRule(shapes.mirror_pad, "MirrorPadOptions"),
    "MUL": TfliteRule(_arithmetic("MUL"), "MulOptions"),
    "NEG": TfliteRule(_same("NEG")),
    "NOT_EQUAL": TfliteRule(_same("NOT_EQUAL")),
    "ONE_HOT": TfliteRule(operators.one_hot, "OneHotOptions"),
    "PACK": TfliteRule(shapes.pack, "PackOptions"),
    "PAD": TfliteRule(shapes.pad),
    "PADV2": TfliteRule(shapes.pad_v2),
    "POW": TfliteRule(_same("POW")),
    "PRELU": TfliteRule(_same("PRELU")),
    "QUANTIZE": TfliteRule(_quantize),
    "RANK": TfliteRule(shapes.rank_of),
    "REDUCE_ALL": TfliteRule(_reduce("REDUCE_ALL"), "ReducerOptions"),
    "REDUCE_ANY": TfliteRule(_reduce("REDUCE_ANY"), "ReducerOptions"),
    "REDUCE_MAX": TfliteRule(_reduce("REDUCE_MAX"), "ReducerOptions"),
    "REDUCE_MIN": TfliteRule(_reduce("REDUCE_MIN"), "ReducerOptions"),
    "REDUCE_PROD": TfliteRule(_reduce("REDUCE_PROD"), "ReducerOptions"),
    "RELU": TfliteRule(_same("RELU")),
    "RELU6": TfliteRule(_same("RELU6")),
    "RELU_0_TO_1": TfliteRule(_in_floats(_unit_relu)),
    "RELU_N1_TO_1": TfliteRule(_same("RELU1")),
    "RESHAPE": TfliteRule(shapes.reshape, "ReshapeOptions"),
    "RESIZE_BILINEAR": TfliteRule(operators.resize("RESIZE_BILINEAR"), "ResizeBilinearOptions"),
    "RESIZE_NEAREST_NEIGHBOR": TfliteRule(operators.resize("RESIZE_NEAREST_NEIGHBOR"), "ResizeNearestNeighborOptions"),
    "REVERSE_V2": TfliteRule(shapes.reverse),
    "RNN": TfliteRule(operators.one_state("RNN", "FusedActivationFunction"), "RNNOptions"),
    "RSQRT": TfliteRule(_in_floats(_same("RSQRT"))),
    "SELECT": TfliteRule(operators.select),
    "SELECT_V2": TfliteRule(operators.select),
    "SHAPE": TfliteRule(shapes.shape),
    "SIN": TfliteRule(_in_floats(_same("SIN"))),
    "SLICE": TfliteRule(shapes.slice_),
    "SOFTMAX": TfliteRule(_softmax, "SoftmaxOptions"),
    "SPACE_TO_BATCH_ND": TfliteRule(_same("SPACE_TO_BATCH_ND")),
    "SPACE_TO_DEPTH": TfliteRule(shapes.blocks("SPACE_TO_DEPTH"), "SpaceToDepthOptions"),
    "SPLIT": TfliteRule(shapes.split, "SplitOptions"),
    "SPLIT_V": TfliteRule(shapes.split_v),
    "SQRT": TfliteRule(_in_floats(_same("SQRT"))),
    "SQUARE": TfliteRule(_in_floats(_square)),
    "SQUARED_DIFFERENCE": TfliteRule(_in_floats(_squared_difference)),
    "SQUEEZE": TfliteRule(shapes.squeeze, "SqueezeOptions"),
    "STRIDED_SLICE": TfliteRule(shapes.strided_slice, "StridedSliceOptions"),
    "SUB": TfliteRule(_arithmetic("SUB"), "SubOptions"),
    "SUM": TfliteRule(_in_floats(_reduce("REDUCE_SUM")), "ReducerOptions"),
    "SVDF": TfliteRule(operators.one_state("SVDF", "Rank", "FusedActivationFunction"), "SVDFOptions"),
    "TANH": TfliteRule(_same("TANH")),
    "TILE": TfliteRule(shapes.tile),
    "TOPK_V2": TfliteRule(_top_k),
    "TRANSPOSE": TfliteRule(shapes.transpose),
    "TRANSPOSE_CONV": TfliteRule(operators.transpose_conv, "TransposeConvOptions"),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": TfliteRule(operators.sequence_lstm, "UnidirectionalSequenceLSTMOptions"),
    "UNIDIRECTIONAL_SEQUENCE_RNN": TfliteRule(
        operators.one_state("UNIDIRECTIONAL_SEQUENCE_RNN", "FusedActivationFunction", "TimeMajor", result_first=True),
        "SequenceRNNOptions",
    ),
    "UNPACK": TfliteRule(shapes.unpack, "UnpackOptions"),
    "WHILE": TfliteRule(_while, "WhileOptions"),
}
