"""What becomes of each builtin operator: one table, an entry per operator, each a short function.

An operator that is not listed has no counterpart in HAL 1.3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from driver.errors import ImportFailed
from driver.nn import Operand, OperandLifeTime, OperandType

from . import tflite_choices as choices
from . import tflite_products as products
from . import tflite_recurrent as recurrent
from . import tflite_shapes as shapes
from . import tflite_sizes as sizes
from . import tflite_windows as windows
from .tflite_call import Call
from .tflite_graph import FLOATS, QUANTISED, Ref, dequantised

Convert = Callable[[Call], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """convert: emits the HAL operations. options: the class of the operator's options, None when they say nothing."""

    convert: Convert
    options: str | None = None


def _same(kind: str, *more: float) -> Convert:
    """The same inputs, and perhaps further scalars."""

    def convert(call: Call) -> None:
        call.emit(kind, *map(call.input, range(len(call))), *more)

    return convert


def _in_floats(convert: Convert) -> Convert:
    """For quantised data between DEQUANTIZE and QUANTIZE: the HAL has it for floats only."""

    def converted(call: Call) -> None:
        call.in_floats = call.tensor(0).type in QUANTISED
        convert(call)

    return converted


def _only(types: tuple[str, ...], call: Call, reason: str) -> None:
    if call.tensor(0).type not in types and not call.in_floats:
        raise ImportFailed(f"of {call.tensor(0).type}: {reason}")


def _like(call: Call, value: float) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """A constant of one element, of the type of input 0."""
    return np.array([value], call.graph.operand(call.input(0)).type.dtype)


# ---- element by element --------------------------------------------------------------------------------------------


def _arithmetic(kind: str) -> Convert:
    def convert(call: Call) -> None:
        code, then = call.activation()
        call.emit(kind, call.input(0), call.input(1), code, to=[call.output(0, then)])

    return convert


def _div(call: Call) -> None:
    _only(FLOATS, call, "the HAL divides floats, and integers towards minus infinity only (FLOOR_DIV)")
    _arithmetic("DIV")(call)


def _floor_div(call: Call) -> None:
    x, y = call.input(0), call.input(1)
    if call.tensor(0).type == "INT32":
        call.emit("DIV", x, y, 0)
        return
    target = call.output()
    quotient = call.graph.like(target)
    call.emit("DIV", x, y, 0, to=[quotient])
    call.emit("FLOOR", quotient, to=[target])


def _floor_mod(call: Call) -> None:
    """What DIV, which rounds towards minus infinity, leaves."""
    _only(("INT32",), call, "the HAL has no remainder of floats")
    x, y = call.input(0), call.input(1)
    target = call.output()
    quotient, multiple = call.graph.like(target), call.graph.like(target)
    call.emit("DIV", x, y, 0, to=[quotient])
    call.emit("MUL", quotient, y, 0, to=[multiple])
    call.emit("SUB", x, multiple, 0, to=[target])


def _square(call: Call) -> None:
    call.emit("MUL", call.input(0), call.input(0), 0)


def _squared_difference(call: Call) -> None:
    _only((*FLOATS, "INT32"), call, "the file does not say the scale of the difference")
    target = call.output()
    difference = call.graph.like(target)
    call.emit("SUB", call.input(0), call.input(1), 0, to=[difference])
    call.emit("MUL", difference, difference, 0, to=[target])


def _add_n(call: Call) -> None:
    _only((*FLOATS, "INT32"), call, "the file does not say the scales of the partial sums")
    if len(call) < 2:
        raise ImportFailed(f"{len(call)} inputs; there have to be at least two")
    target, total = call.output(), call.input(0)
    for i in range(1, len(call)):
        result = target if i == len(call) - 1 else call.graph.like(target)
        call.emit("ADD", total, call.input(i), 0, to=[result])
        total = result


def _cos(call: Call) -> None:
    x = call.input(0)
    shifted = call.graph.like(x)
    call.emit("ADD", x, _like(call, math.pi / 2), 0, to=[shifted])
    call.emit("SIN", shifted)


def _ceil(call: Call) -> None:
    x = call.input(0)
    negative, floor = call.graph.like(x), call.graph.like(x)
    call.emit("NEG", x, to=[negative])
    call.emit("FLOOR", negative, to=[floor])
    call.emit("NEG", floor)


def _unit_relu(call: Call) -> None:
    """RELU_0_TO_1."""
    _only(FLOATS, call, "the HAL has it for floats only, as MAXIMUM and MINIMUM")
    positive = call.graph.like(call.input(0))
    call.emit("MAXIMUM", call.input(0), _like(call, 0.0), to=[positive])
    call.emit("MINIMUM", positive, _like(call, 1.0))


def _gelu(call: Call) -> None:
    """By its approximation: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))."""
    _only(FLOATS, call, "the file does not say the scales of the steps in between")
    if not call.options.Approximate():
        raise ImportFailed("the HAL has no error function; convert the model with the approximation by TANH")
    x = call.input(0)

    def step(kind: str, *arguments: Ref | float) -> Ref:
        result, operands = call.graph.like(x), [_like(call, a) if isinstance(a, float) else a for a in arguments]
        call.emit(kind, *operands, *((0,) if kind != "TANH" else ()), to=[result])
        return result

    cubic = step("MUL", step("MUL", step("MUL", x, x), x), 0.044715)
    inner = step("MUL", step("ADD", x, cubic), math.sqrt(2 / math.pi))
    call.emit("MUL", step("MUL", x, 0.5), step("ADD", step("TANH", inner), 1.0), 0)


def _leaky_relu(call: Call) -> None:
    """PRELU with one slope. A quantised one is 0 or +-1 at a scale of |slope|."""
    _only((*FLOATS, *QUANTISED), call, "the HAL has no such PRELU")
    x, slope = call.input(0), float(call.options.Alpha())
    if call.tensor(0).type not in QUANTISED:
        call.emit("PRELU", x, _like(call, slope))
        return
    zero_point = int(slope < 0)
    raw = _like(call, zero_point + (slope > 0) - (slope < 0))
    call.emit("PRELU", x, call.graph.constant(raw, scale=abs(slope) or 1.0, zero_point=zero_point))


def _quantize(call: Call) -> None:
    if call.tensor(0).type in FLOATS:
        call.emit("QUANTIZE", call.input(0))
    else:
        call.requantise(call.input(0), call.output())


def _dequantize(call: Call) -> None:
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


def _mean(call: Call) -> None:
    """MEAN; in floats when the result has steps of its own: those of the input may be much coarser."""
    x, y = call.tensor(0), call.result(0)
    call.in_floats = x.type in QUANTISED and (x.scales, x.zero_points) != (y.scales, y.zero_points)
    _reduce("MEAN", int)(call)


def _arg(kind: str) -> Convert:
    return lambda call: call.emit(kind, call.input(0), call.integer(1), to=[call.index_output()])


def _top_k(call: Call) -> None:
    call.emit("TOPK_V2", call.input(0), call.integer(1))


def _softmax(call: Call) -> None:
    call.emit("SOFTMAX", call.input(0), float(call.options.Beta()))


def _l2_normalization(call: Call) -> None:
    call.emit("L2_NORMALIZATION", call.input(0), to=[call.output(0, call.following_activation())])


def _local_response_normalization(call: Call) -> None:
    o = call.options
    call.emit("LOCAL_RESPONSE_NORMALIZATION", call.input(0), o.Radius(), o.Bias(), o.Alpha(), o.Beta())


def _lsh_projection(call: Call) -> None:
    """Sparse projections are those of HAL 1.2, which tell the hashes apart."""
    kind = {1: 3, 2: 2}.get(call.options.Type())
    if kind is None:
        raise ImportFailed(f"projection {call.options.Type()} is neither SPARSE (1) nor DENSE (2)")
    call.emit("LSH_PROJECTION", call.input(0), call.input(1), call.optional(2), kind)


# ---- control flow --------------------------------------------------------------------------------------------------


def _subgraph(call: Call, number: int) -> Ref:
    value = call.graph.refer(number)
    return call.graph.add(Operand(OperandType.SUBGRAPH, lifetime=OperandLifeTime.SUBGRAPH, value=value))


def _if(call: Call) -> None:
    branches = [_subgraph(call, i) for i in (call.options.ThenSubgraphIndex(), call.options.ElseSubgraphIndex())]
    call.emit("IF", call.input(0), *branches, *map(call.input, range(1, len(call))))


def _while(call: Call) -> None:
    graphs = [_subgraph(call, i) for i in (call.options.CondSubgraphIndex(), call.options.BodySubgraphIndex())]
    call.emit("WHILE", *graphs, *map(call.input, range(len(call))))


TABLE: dict[str, Entry] = {
    "ABS": Entry(_in_floats(_same("ABS"))),
    "ADD": Entry(_arithmetic("ADD"), "AddOptions"),
    "ADD_N": Entry(_add_n),
    "ARG_MAX": Entry(_arg("ARGMAX")),
    "ARG_MIN": Entry(_arg("ARGMIN")),
    "AVERAGE_POOL_2D": Entry(windows.pool("AVERAGE_POOL_2D"), "Pool2DOptions"),
    "BATCH_TO_SPACE_ND": Entry(shapes.batch_to_space),
    "BATCH_MATMUL": Entry(products.batch_matmul, "BatchMatMulOptions"),
    "BIDIRECTIONAL_SEQUENCE_LSTM": Entry(recurrent.bidirectional_lstm, "BidirectionalSequenceLSTMOptions"),
    "BIDIRECTIONAL_SEQUENCE_RNN": Entry(recurrent.bidirectional_rnn, "BidirectionalSequenceRNNOptions"),
    "BROADCAST_TO": Entry(choices.broadcast_to),
    "CAST": Entry(choices.cast),
    "CEIL": Entry(_in_floats(_ceil)),
    "CONCATENATION": Entry(shapes.concatenation, "ConcatenationOptions"),
    "CONV_2D": Entry(windows.conv, "Conv2DOptions"),
    "COS": Entry(_in_floats(_cos)),
    "DEPTHWISE_CONV_2D": Entry(windows.depthwise, "DepthwiseConv2DOptions"),
    "DEPTH_TO_SPACE": Entry(shapes.blocks("DEPTH_TO_SPACE"), "DepthToSpaceOptions"),
    "DEQUANTIZE": Entry(_dequantize),
    "DIV": Entry(_div, "DivOptions"),
    "ELU": Entry(_in_floats(_same("ELU", 1.0))),
    "EMBEDDING_LOOKUP": Entry(_same("EMBEDDING_LOOKUP")),
    "EQUAL": Entry(_same("EQUAL")),
    "EXP": Entry(_in_floats(_same("EXP"))),
    "EXPAND_DIMS": Entry(shapes.expand_dims),
    "FILL": Entry(shapes.fill),
    "FLOOR": Entry(_same("FLOOR")),
    "FLOOR_DIV": Entry(_floor_div),
    "FLOOR_MOD": Entry(_floor_mod),
    "FULLY_CONNECTED": Entry(windows.dense, "FullyConnectedOptions"),
    "GATHER": Entry(shapes.gather, "GatherOptions"),
    "GELU": Entry(_in_floats(_gelu), "GeluOptions"),
    "GREATER": Entry(_same("GREATER")),
    "GREATER_EQUAL": Entry(_same("GREATER_EQUAL")),
    "HARD_SWISH": Entry(_same("HARD_SWISH")),
    "HASHTABLE_LOOKUP": Entry(_same("HASHTABLE_LOOKUP")),
    "IF": Entry(_if, "IfOptions"),
    "L2_NORMALIZATION": Entry(_l2_normalization, "L2NormOptions"),
    "L2_POOL_2D": Entry(windows.pool("L2_POOL_2D"), "Pool2DOptions"),
    "LEAKY_RELU": Entry(_leaky_relu, "LeakyReluOptions"),
    "LESS": Entry(_same("LESS")),
    "LESS_EQUAL": Entry(_same("LESS_EQUAL")),
    "LOCAL_RESPONSE_NORMALIZATION": Entry(_local_response_normalization, "LocalResponseNormalizationOptions"),
    "LOG": Entry(_in_floats(_same("LOG"))),
    "LOGICAL_AND": Entry(_same("LOGICAL_AND")),
    "LOGICAL_NOT": Entry(_same("LOGICAL_NOT")),
    "LOGICAL_OR": Entry(_same("LOGICAL_OR")),
    "LOGISTIC": Entry(_same("LOGISTIC")),
    "LOG_SOFTMAX": Entry(_in_floats(_same("LOG_SOFTMAX", 1.0, -1))),
    "LSH_PROJECTION": Entry(_lsh_projection, "LSHProjectionOptions"),
    "LSTM": Entry(recurrent.lstm, "LSTMOptions"),
    "MAXIMUM": Entry(_same("MAXIMUM")),
    "MAX_POOL_2D": Entry(windows.pool("MAX_POOL_2D"), "Pool2DOptions"),
    "MEAN": Entry(_mean, "ReducerOptions"),
    "MINIMUM": Entry(_same("MINIMUM")),
    "MUL": Entry(_arithmetic("MUL"), "MulOptions"),
    "NEG": Entry(_same("NEG")),
    "NOT_EQUAL": Entry(_same("NOT_EQUAL")),
    "ONE_HOT": Entry(choices.one_hot, "OneHotOptions"),
    "PACK": Entry(shapes.pack, "PackOptions"),
    "PAD": Entry(_same("PAD")),
    "PADV2": Entry(shapes.pad_v2),
    "POW": Entry(_same("POW")),
    "PRELU": Entry(_same("PRELU")),
    "QUANTIZE": Entry(_quantize),
    "RANK": Entry(sizes.rank_of),
    "REDUCE_ALL": Entry(_reduce("REDUCE_ALL"), "ReducerOptions"),
    "REDUCE_ANY": Entry(_reduce("REDUCE_ANY"), "ReducerOptions"),
    "REDUCE_MAX": Entry(_reduce("REDUCE_MAX"), "ReducerOptions"),
    "REDUCE_MIN": Entry(_reduce("REDUCE_MIN"), "ReducerOptions"),
    "REDUCE_PROD": Entry(_reduce("REDUCE_PROD"), "ReducerOptions"),
    "RELU": Entry(_same("RELU")),
    "RELU6": Entry(_same("RELU6")),
    "RELU_0_TO_1": Entry(_in_floats(_unit_relu)),
    "RELU_N1_TO_1": Entry(_same("RELU1")),
    "RESHAPE": Entry(shapes.reshape, "ReshapeOptions"),
    "RESIZE_BILINEAR": Entry(windows.resize("RESIZE_BILINEAR"), "ResizeBilinearOptions"),
    "RESIZE_NEAREST_NEIGHBOR": Entry(windows.resize("RESIZE_NEAREST_NEIGHBOR"), "ResizeNearestNeighborOptions"),
    "REVERSE_V2": Entry(shapes.reverse),
    "RNN": Entry(recurrent.rnn, "RNNOptions"),
    "RSQRT": Entry(_in_floats(_same("RSQRT"))),
    "SELECT": Entry(choices.select),
    "SELECT_V2": Entry(choices.select),
    "SHAPE": Entry(sizes.shape),
    "SIN": Entry(_in_floats(_same("SIN"))),
    "SLICE": Entry(_same("SLICE")),
    "SOFTMAX": Entry(_softmax, "SoftmaxOptions"),
    "SPACE_TO_BATCH_ND": Entry(_same("SPACE_TO_BATCH_ND")),
    "SPACE_TO_DEPTH": Entry(shapes.blocks("SPACE_TO_DEPTH"), "SpaceToDepthOptions"),
    "SPLIT": Entry(shapes.split, "SplitOptions"),
    "SPLIT_V": Entry(shapes.split_v),
    "SQRT": Entry(_in_floats(_same("SQRT"))),
    "SQUARE": Entry(_in_floats(_square)),
    "SQUARED_DIFFERENCE": Entry(_in_floats(_squared_difference)),
    "SQUEEZE": Entry(shapes.squeeze, "SqueezeOptions"),
    "STRIDED_SLICE": Entry(shapes.strided_slice, "StridedSliceOptions"),
    "SUB": Entry(_arithmetic("SUB"), "SubOptions"),
    "SUM": Entry(_in_floats(_reduce("REDUCE_SUM")), "ReducerOptions"),
    "SVDF": Entry(recurrent.svdf, "SVDFOptions"),
    "TANH": Entry(_same("TANH")),
    "TILE": Entry(_same("TILE")),
    "TOPK_V2": Entry(_top_k),
    "TRANSPOSE": Entry(shapes.transpose),
    "TRANSPOSE_CONV": Entry(windows.transpose_conv, "TransposeConvOptions"),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": Entry(recurrent.sequence_lstm, "UnidirectionalSequenceLSTMOptions"),
    "UNIDIRECTIONAL_SEQUENCE_RNN": Entry(recurrent.sequence_rnn, "SequenceRNNOptions"),
    "UNPACK": Entry(shapes.unpack, "UnpackOptions"),
    "WHILE": Entry(_while, "WhileOptions"),
}
