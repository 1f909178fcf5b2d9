"""What becomes of each operator: one table, an entry per operator, each a short function.

An operator that is not listed has no counterpart in HAL 1.3, unless all of its inputs are constant (onnx_fold.py).
"""

from dataclasses import dataclass

from . import onnx_elements as elements
from . import onnx_products as products
from . import onnx_recurrent as recurrent
from . import onnx_resize as resizing
from . import onnx_shapes as shapes
from . import onnx_windows as windows
from .onnx_elements import Convert, arithmetic, binary, formula, unary, variadic


@dataclass(frozen=True, slots=True)
class Entry:
    """convert: emits the HAL operations. fuses: an activation that follows. quantised: it computes on integers too.

    weights: which input has to be constant for that.
    """

    convert: Convert
    fuses: bool = False
    quantised: bool = False
    weights: int | None = None


def _moves(convert: Convert) -> Entry:
    """What only moves elements does so with integers as well."""
    return Entry(convert, quantised=True)


TABLE: dict[str, Entry] = {
    "Abs": Entry(unary("ABS")),
    "Add": Entry(arithmetic("ADD"), fuses=True, quantised=True),
    "And": Entry(binary("LOGICAL_AND")),
    "ArgMax": Entry(products.arg("ARGMAX")),
    "ArgMin": Entry(products.arg("ARGMIN")),
    "AveragePool": Entry(windows.average_pool, fuses=True, quantised=True),
    "BatchNormalization": Entry(products.batch_norm, fuses=True),
    "Cast": Entry(elements.cast),
    "Ceil": Entry(unary("NEG", "FLOOR", "NEG")),
    "Celu": Entry(formula(elements.celu)),
    "Clip": Entry(elements.clip),
    "Concat": _moves(shapes.concat),
    "Conv": Entry(windows.conv, fuses=True, quantised=True, weights=1),
    "ConvTranspose": Entry(windows.conv_transpose, fuses=True, quantised=True, weights=1),
    "Cos": Entry(formula(elements.cos)),
    "DepthToSpace": _moves(windows.blocks("DEPTH_TO_SPACE")),
    "Div": Entry(arithmetic("DIV"), fuses=True),
    "Dropout": Entry(shapes.same),
    "Elu": Entry(elements.elu),
    "Equal": Entry(binary("EQUAL")),
    "Erf": Entry(formula(elements.erf)),
    "Exp": Entry(unary("EXP")),
    "Expand": Entry(shapes.expand),
    "Flatten": _moves(shapes.flatten),
    "Floor": Entry(unary("FLOOR")),
    "GRU": Entry(recurrent.gru),
    "Gather": _moves(shapes.gather),
    "Gelu": Entry(formula(elements.gelu)),
    "Gemm": Entry(products.gemm, fuses=True, quantised=True, weights=1),
    "GlobalAveragePool": Entry(windows.global_pool("MEAN"), quantised=True),
    "GlobalMaxPool": Entry(windows.global_pool("REDUCE_MAX"), quantised=True),
    "Greater": Entry(binary("GREATER")),
    "GreaterOrEqual": Entry(binary("GREATER_EQUAL")),
    "GroupNormalization": Entry(products.group_norm),
    "HardSigmoid": Entry(formula(elements.hard_sigmoid)),
    "HardSwish": Entry(unary("HARD_SWISH"), quantised=True),
    "Identity": Entry(shapes.same),
    "InstanceNormalization": Entry(products.instance_norm, fuses=True),
    "LRN": Entry(windows.local_response),
    "LSTM": Entry(recurrent.lstm),
    "LayerNormalization": Entry(products.layer_norm),
    "LeakyRelu": Entry(elements.leaky_relu),
    "Less": Entry(binary("LESS")),
    "LessOrEqual": Entry(binary("LESS_EQUAL")),
    "Log": Entry(unary("LOG")),
    "LogSoftmax": Entry(products.softmax("LOG_SOFTMAX")),
    "MatMul": Entry(products.matmul, quantised=True, weights=1),
    "Max": Entry(variadic("MAXIMUM")),
    "MaxPool": Entry(windows.max_pool, fuses=True, quantised=True),
    "Mean": Entry(variadic("ADD", 0, mean=True)),
    "Min": Entry(variadic("MINIMUM")),
    "Mish": Entry(formula(elements.mish)),
    "Mul": Entry(arithmetic("MUL"), fuses=True, quantised=True),
    "Neg": Entry(unary("NEG")),
    "Not": Entry(unary("LOGICAL_NOT")),
    "Or": Entry(binary("LOGICAL_OR")),
    "PRelu": Entry(binary("PRELU")),
    "Pad": Entry(shapes.pad),
    "Pow": Entry(elements.power),
    "RNN": Entry(recurrent.rnn),
    "Reciprocal": Entry(formula(elements.reciprocal)),
    "ReduceL1": Entry(products.reduce("REDUCE_SUM", before="ABS")),
    "ReduceL2": Entry(products.reduce("REDUCE_SUM", before="SQUARE", after="SQRT")),
    "ReduceLogSum": Entry(products.reduce("REDUCE_SUM", after="LOG")),
    "ReduceMax": Entry(products.reduce("REDUCE_MAX")),
    "ReduceMean": Entry(products.reduce("MEAN"), quantised=True),
    "ReduceMin": Entry(products.reduce("REDUCE_MIN")),
    "ReduceProd": Entry(products.reduce("REDUCE_PROD")),
    "ReduceSum": Entry(products.reduce("REDUCE_SUM")),
    "ReduceSumSquare": Entry(products.reduce("REDUCE_SUM", before="SQUARE")),
    "Relu": Entry(unary("RELU"), quantised=True),
    "Reshape": _moves(shapes.reshape),
    "Resize": _moves(resizing.resize),
    "Selu": Entry(formula(elements.selu)),
    "Sigmoid": Entry(unary("LOGISTIC"), quantised=True),
    "Sin": Entry(unary("SIN")),
    "Slice": _moves(shapes.slice_),
    "Softmax": Entry(products.softmax("SOFTMAX"), quantised=True),
    "Softplus": Entry(formula(elements.softplus)),
    "Softsign": Entry(formula(elements.softsign)),
    "SpaceToDepth": _moves(windows.blocks("SPACE_TO_DEPTH")),
    "Split": Entry(shapes.split),
    "Sqrt": Entry(unary("SQRT")),
    "Squeeze": _moves(shapes.squeeze),
    "Sub": Entry(arithmetic("SUB"), fuses=True, quantised=True),
    "Sum": Entry(variadic("ADD", 0)),
    "Tanh": Entry(unary("TANH"), quantised=True),
    "Tile": _moves(shapes.tile),
    "TopK": Entry(products.top_k),
    "Transpose": _moves(shapes.transpose),
    "Unsqueeze": _moves(shapes.unsqueeze),
    "Upsample": _moves(resizing.upsample),
    "Where": Entry(elements.where),
    "Xor": Entry(binary("NOT_EQUAL")),
}
