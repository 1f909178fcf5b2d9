"""The conversion table: a rule per operator, each with a short function.

An operator that is not listed has no counterpart in HAL 1.3, unless all of its inputs are constant (fold.py).
"""

from dataclasses import dataclass

from . import dynamic, elements, products, recurrent, shapes, windows
from .call import Convert
from .elements import binary, formula, unary, variadic


@dataclass(frozen=True, slots=True)
class OnnxRule:
    """convert: emits the HAL operations. fuses: an activation that follows. quantised: it computes on integers too.

    weights: the input that must be constant for that.
    """

    convert: Convert
    fuses: bool = False
    quantised: bool = False
    weights: int | None = None


def _moves(convert: Convert) -> OnnxRule:
    """Return a rule for an operator that only moves elements, so it works on quantised data too."""
    return OnnxRule(convert, quantised=True)


TABLE: dict[str, OnnxRule] = {
    "Abs": OnnxRule(unary("ABS")),
    "Add": OnnxRule(binary("ADD", fuses=True), fuses=True, quantised=True),
    "And": OnnxRule(binary("LOGICAL_AND")),
    "ArgMax": OnnxRule(products.arg("ARGMAX")),
    "ArgMin": OnnxRule(products.arg("ARGMIN")),
    "AveragePool": OnnxRule(windows.average_pool, fuses=True, quantised=True),
    "BatchNormalization": OnnxRule(products.batch_norm, fuses=True),
    "Cast": OnnxRule(elements.cast),
    "Ceil": OnnxRule(unary("NEG", "FLOOR", "NEG")),
    "Celu": OnnxRule(formula(elements.celu)),
    "Clip": OnnxRule(elements.clip),
    "Concat": _moves(shapes.concat),
    "Conv": OnnxRule(windows.conv, fuses=True, quantised=True, weights=1),
    "ConvInteger": OnnxRule(dynamic.conv_integer),
    "ConvTranspose": OnnxRule(windows.conv_transpose, fuses=True, quantised=True, weights=1),
    "Cos": OnnxRule(formula(elements.cos)),
    "DepthToSpace": _moves(windows.blocks("DEPTH_TO_SPACE")),
    "Div": OnnxRule(binary("DIV", fuses=True), fuses=True),
    "Dropout": OnnxRule(shapes.dropout),
    "DynamicQuantizeLinear": OnnxRule(dynamic.dynamic_quantise),
    "Elu": OnnxRule(elements.elu),
    "Equal": OnnxRule(binary("EQUAL")),
    "Erf": OnnxRule(formula(elements.erf)),
    "Exp": OnnxRule(unary("EXP")),
    "Expand": OnnxRule(shapes.expand),
    "Flatten": _moves(shapes.flatten),
    "Floor": OnnxRule(unary("FLOOR")),
    "GRU": OnnxRule(recurrent.gru),
    "Gather": _moves(shapes.gather),
    "Gelu": OnnxRule(formula(elements.gelu)),
    "Gemm": OnnxRule(products.gemm, fuses=True, quantised=True, weights=1),
    "GlobalAveragePool": OnnxRule(windows.global_pool("MEAN"), quantised=True),
    "GlobalMaxPool": OnnxRule(windows.global_pool("REDUCE_MAX"), quantised=True),
    "Greater": OnnxRule(binary("GREATER")),
    "GreaterOrEqual": OnnxRule(binary("GREATER_EQUAL")),
    "GroupNormalization": OnnxRule(products.group_norm),
    "HardSigmoid": OnnxRule(formula(elements.hard_sigmoid)),
    "HardSwish": OnnxRule(unary("HARD_SWISH"), quantised=True),
    "Identity": OnnxRule(shapes.identity),
    "InstanceNormalization": OnnxRule(products.instance_norm, fuses=True),
    "LRN": OnnxRule(windows.local_response),
    "LSTM": OnnxRule(recurrent.lstm),
    "LayerNormalization": OnnxRule(products.layer_norm),
    "LeakyRelu": OnnxRule(elements.leaky_relu),
    "Less": OnnxRule(binary("LESS")),
    "LessOrEqual": OnnxRule(binary("LESS_EQUAL")),
    "Log": OnnxRule(unary("LOG")),
    "LogSoftmax": OnnxRule(products.softmax("LOG_SOFTMAX")),
    "MatMul": OnnxRule(products.matmul, quantised=True, weights=1),
    "MatMulInteger": OnnxRule(dynamic.matmul_integer),
    "Max": OnnxRule(variadic("MAXIMUM")),
    "MaxPool": OnnxRule(windows.max_pool, fuses=True, quantised=True),
    "Mean": OnnxRule(variadic("ADD", 0, mean=True)),
    "Min": OnnxRule(variadic("MINIMUM")),
    "Mish": OnnxRule(formula(elements.mish)),
    "Mul": OnnxRule(binary("MUL", fuses=True), fuses=True, quantised=True),
    "Neg": OnnxRule(unary("NEG")),
    "Not": OnnxRule(unary("LOGICAL_NOT")),
    "Or": OnnxRule(binary("LOGICAL_OR")),
    "PRelu": OnnxRule(binary("PRELU")),
    "Pad": OnnxRule(shapes.pad),
    "Pow": OnnxRule(elements.power),
    "RNN": OnnxRule(recurrent.rnn),
    "Reciprocal": OnnxRule(formula(elements.reciprocal)),
    "ReduceL1": OnnxRule(products.reduce("REDUCE_SUM", before="ABS")),
    "ReduceL2": OnnxRule(products.reduce("REDUCE_SUM", before="SQUARE", after="SQRT")),
    "ReduceLogSum": OnnxRule(products.reduce("REDUCE_SUM", after="LOG")),
    "ReduceMax": OnnxRule(products.reduce("REDUCE_MAX")),
    "ReduceMean": OnnxRule(products.reduce("MEAN"), quantised=True),
    "ReduceMin": OnnxRule(products.reduce("REDUCE_MIN")),
    "ReduceProd": OnnxRule(products.reduce("REDUCE_PROD")),
    "ReduceSum": OnnxRule(products.reduce("REDUCE_SUM")),
    "ReduceSumSquare": OnnxRule(products.reduce("REDUCE_SUM", before="SQUARE")),
    "Relu": OnnxRule(unary("RELU"), quantised=True),
    "Reshape": _moves(shapes.reshape),
    "Resize": _moves(windows.resize),
    "Selu": OnnxRule(formula(elements.selu)),
    "Sigmoid": OnnxRule(unary("LOGISTIC"), quantised=True),
    "Sin": OnnxRule(unary("SIN")),
    "Slice": _moves(shapes.slice_),
    "Softmax": OnnxRule(products.softmax("SOFTMAX"), quantised=True),
    "Softplus": OnnxRule(formula(elements.softplus)),
    "Softsign": OnnxRule(formula(elements.softsign)),
    "SpaceToDepth": _moves(windows.blocks("SPACE_TO_DEPTH")),
    "Split": OnnxRule(shapes.split),
    "Sqrt": OnnxRule(unary("SQRT")),
    "Squeeze": _moves(shapes.squeeze),
    "Sub": OnnxRule(binary("SUB", fuses=True), fuses=True, quantised=True),
    "Sum": OnnxRule(variadic("ADD", 0)),
    "Tanh": OnnxRule(unary("TANH"), quantised=True),
    "Tile": _moves(shapes.tile),
    "TopK": OnnxRule(products.top_k),
    "Transpose": _moves(shapes.transpose),
    "Unsqueeze": _moves(shapes.unsqueeze),
    "Upsample": _moves(windows.upsample),
    "Where": OnnxRule(elements.where),
    "Xor": OnnxRule(binary("NOT_EQUAL")),
}
