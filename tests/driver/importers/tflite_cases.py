"""A small file for every builtin operator that is imported, and for every way of writing it that is handled apart.

CASES: name -> function that writes the graph and returns its outputs. The name begins with that of the operator.
OTHERWISE: what LiteRT does not do, or not as the schema says -> a case that it can do, and what is left to do then.
"""

import numpy as np

CASES, OTHERWISE = {}, {}
Q = {"scale": 0.05, "zero_point": 3}
U = {"scale": 0.05, "zero_point": 130}
WINDOW = {"StrideW": 1, "StrideH": 1}
FLAT = {"DilationWFactor": 1, "DilationHFactor": 1}


def case(name):
    def add(function):
        CASES[name] = function
        return function

    return add


def listed(outputs):
    return outputs if isinstance(outputs, list) else [outputs]


def simple(operator, *inputs, shape=(2, 3, 4), name="", **asked):
    """An operator on inputs given as shapes, or as (shape, dtype, {further words})."""

    def write(w):
        given = [i if isinstance(i[0], tuple) else (i, "float32", {}) for i in inputs or [(2, 3, 4)]]
        tensors = [w.input(s, d, **more) for s, d, more in given]
        return listed(w.operator(operator, tensors, shape, **asked))

    CASES[f"{operator}{name}"] = write


def fixed(operator, first, *constants, shape, name="", **asked):
    """An operator on one input and constants."""

    def write(w):
        s, d, more = first if isinstance(first[0], tuple) else (first, "float32", {})
        x = w.input(s, d, **more)
        return listed(w.operator(operator, [x, *(w.constant(c) for c in constants)], shape, **asked))

    CASES[f"{operator}{name}"] = write


S = (2, 3, 4)
POSITIVE = (S, "float32", {"low": 0.1, "high": 4})
INT = (S, "int32", {"low": -9, "high": 9})
BYTES, SIGNED, BOOLS = (S, "uint8", U), (S, "int8", Q), (S, "bool", {})
for one in ("ABS", "EXP", "FLOOR", "NEG", "SIN", "COS", "CEIL", "SQUARE", "ELU", "HARD_SWISH", "LOGISTIC", "TANH"):
    simple(one)
for one in ("RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1", "LOG_SOFTMAX"):
    simple(one)
for one in ("LOG", "SQRT", "RSQRT"):
    simple(one, POSITIVE)
simple("NEG", INT, dtype="int32", name=" int32")
simple("LOGICAL_NOT", BOOLS, dtype="bool")
for one in ("ABS", "EXP", "SQUARED_DIFFERENCE", "LOG_SOFTMAX", "RSQRT", "SQRT"):
    given = [(S, "int8", {"scale": 0.05, "zero_point": -128 if "SQRT" in one else 3, "low": -120})]
    quantised = {"dtype": "int8", "scale": 0.125, "zero_point": 127 if one == "LOG_SOFTMAX" else -20}
    quantised |= {"scale": 16 / 256} if one == "LOG_SOFTMAX" else {}
    simple(one, *given * (1 + ("DIFF" in one)), **quantised, name=" int8")
fixed(
    "MEAN", SIGNED, np.int32([0, 1]), shape=(4,), dtype="int8", scale=0.01, KeepDims=False, name=" int8 in finer steps"
)
fixed("SUM", SIGNED, np.int32([1]), shape=(2, 4), dtype="int8", scale=0.2, KeepDims=False, name=" int8")
simple("LOGISTIC", SIGNED, dtype="int8", scale=1 / 256, zero_point=-128, name=" int8")
simple("LOGISTIC", BYTES, dtype="uint8", scale=1 / 256, name=" uint8")
simple("TANH", SIGNED, dtype="int8", scale=1 / 128, name=" int8")
simple("RELU", SIGNED, dtype="int8", scale=0.03, zero_point=-128, name=" int8 to another scale")
simple("RELU6", BYTES, dtype="uint8", **U, name=" uint8")
simple("SOFTMAX", Beta=0.7)
simple("SOFTMAX", SIGNED, dtype="int8", scale=1 / 256, zero_point=-128, Beta=1.0, name=" int8")
simple("HARD_SWISH", SIGNED, dtype="int8", scale=0.04, zero_point=-20, name=" int8")
simple("LEAKY_RELU", Alpha=0.2)
simple("LEAKY_RELU", SIGNED, dtype="int8", **Q, Alpha=0.2, name=" int8")
simple("LEAKY_RELU", BYTES, dtype="uint8", **U, Alpha=-0.3, name=" uint8, a negative slope")
simple("L2_NORMALIZATION", (1, 2, 3, 4), shape=(1, 2, 3, 4))
simple("CAST", INT)
simple("CAST", dtype="int32", name=" to int32")
for one in ("ADD", "SUB", "MUL", "DIV"):
    simple(one, S, (4,))
    simple(one, S, S, FusedActivationFunction=3, name=" RELU6")
for one in ("ADD", "SUB", "MUL"):
    simple(one, SIGNED, SIGNED, dtype="int8", scale=0.2, zero_point=1, name=" int8")
    simple(one, BYTES, BYTES, dtype="uint8", scale=0.2, zero_point=99, name=" uint8")
    simple(one, INT, INT, dtype="int32", name=" int32")
for one in ("MAXIMUM", "MINIMUM"):
    simple(one, S, (4,))
    simple(one, SIGNED, SIGNED, dtype="int8", **Q, name=" int8")
simple("GELU", Approximate=True)
M = {"scale": 0.3, "zero_point": -4}
simple("BATCH_MATMUL", (2, 3, 4), (2, 4, 5), shape=(2, 3, 5))
simple("BATCH_MATMUL", (3, 4), (5, 4), shape=(3, 5), AdjY=True, name=" of two matrices")
simple("BATCH_MATMUL", (2, 3, 4, 2), (3, 2, 5), shape=(2, 3, 4, 5), name=" that is broadcast")
simple("BATCH_MATMUL", (2, 4, 3), (1, 4, 5), shape=(2, 3, 5), AdjX=True, name=" turned, with a single matrix")
fixed("BATCH_MATMUL", S, np.float32(range(40)).reshape(2, 4, 5) - 20, shape=(2, 3, 5), name=" with a constant")
simple("BATCH_MATMUL", SIGNED, ((2, 4, 5), "int8", Q), shape=(2, 3, 5), dtype="int8", **M, name=" int8")
simple("POW", POSITIVE, S)
simple("SQUARED_DIFFERENCE", S, S)
simple("ADD_N", S, S, S)
simple("FLOOR_DIV", S, POSITIVE)
simple("FLOOR_DIV", INT, (S, "int32", {"low": 1, "high": 5}), dtype="int32", name=" int32")
for one in ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"):
    simple(one, INT, INT, dtype="bool")
    simple(one, S, (4,), dtype="bool", name=" float")
for one in ("LOGICAL_AND", "LOGICAL_OR"):
    simple(one, BOOLS, BOOLS, dtype="bool")
for one in ("SELECT", "SELECT_V2"):
    simple(one, BOOLS, S, S)
simple("SELECT_V2", ((3, 1), "bool", {}), (1, 3, 4), (2, 1, 4), name=" that is broadcast")
fixed("SELECT_V2", BOOLS, np.float32(1), np.float32([[2], [3], [4]]), shape=S, name=" of constants")
fixed("BROADCAST_TO", (3, 1), np.int32(S), shape=S)
fixed("BROADCAST_TO", ((1, 4), "int32", {}), np.int32(S), shape=S, dtype="int32", name=" int32")
simple("CAST", BOOLS, name=" of truth values")
simple("CAST", dtype="bool", name=" to truth values")
simple("FLOOR_MOD", INT, (S, "int32", {"low": 1, "high": 5}), dtype="int32")
digits = np.int32(5), np.float32(2), np.float32(-1)
fixed("ONE_HOT", ((2, 3), "int32", {"low": -1, "high": 5}), *digits, shape=(2, 3, 5), Axis=-1)
fixed("ONE_HOT", ((2, 3), "int32", {"low": 0, "high": 4}), *digits, shape=(2, 5, 3), Axis=1, name=" within")
fixed("PRELU", (1, 2, 3, 4), np.float32([[[0.1, 0.2, -0.3, 0.4]]]), shape=(1, 2, 3, 4))
simple("DEQUANTIZE", SIGNED)
simple("DEQUANTIZE", BYTES, name=" uint8")
simple("QUANTIZE", dtype="int8", **Q)
simple("QUANTIZE", SIGNED, dtype="uint8", scale=0.06, zero_point=120, name=" again")

fixed("RESHAPE", S, np.int32([4, -1]), shape=(4, 6), NewShape=[4, 6])
fixed("RESHAPE", SIGNED, np.int32([24]), shape=(24,), dtype="int8", **Q, name=" int8")
simple("RESHAPE", shape=(6, 4), NewShape=[6, 4], name=" by its options")
simple("SQUEEZE", (1, 3, 1, 2), shape=(3, 1, 2), SqueezeDims=[0])
simple("SQUEEZE", (1, 3, 1, 2), shape=(3, 2), name=" of all")
fixed("EXPAND_DIMS", S, np.int32(1), shape=(2, 1, 3, 4))
fixed("EXPAND_DIMS", S, np.int64([-1]), shape=(2, 3, 4, 1), name=" 64-bit axis")
fixed("TRANSPOSE", S, np.int32([2, 0, 1]), shape=(4, 2, 3))
fixed("SLICE", S, np.int32([0, 1, 1]), np.int32([2, -1, 2]), shape=(2, 2, 2))
fixed("SLICE", S, np.int64([0, 1, 1]), np.int64([2, 2, 2]), shape=(2, 2, 2), name=" 64-bit places")
fixed("PAD", S, np.int32([[0, 0], [1, 2], [3, 0]]), shape=(2, 6, 7))
fixed("PAD", SIGNED, np.int32([[0, 0], [1, 2], [3, 0]]), shape=(2, 6, 7), dtype="int8", **Q, name=" int8")
for mode in (0, 1):
    fixed("MIRROR_PAD", S, np.int32([[0, 0], [1, 2], [3, 0]]), shape=(2, 6, 7), Mode=mode, name=f" {mode}")
fixed("MIRROR_PAD", SIGNED, np.int32([[0, 1], [0, 0], [2, 0]]), shape=(3, 3, 6), dtype="int8", **Q, name=" int8")
fixed("PADV2", S, np.int32([[0, 0], [1, 2], [3, 0]]), np.float32(1.5), shape=(2, 6, 7))
fixed("TILE", S, np.int32([1, 2, 3]), shape=(2, 6, 12))
fixed("GATHER", S, np.int32([2, 0, 1, 1]), shape=(2, 4, 4), Axis=1)
fixed("GATHER", S, np.int32(2), shape=(2, 4), Axis=-2, name=" one index")
fixed("TOPK_V2", S, np.int32(2), shape=[(2, 3, 2), (2, 3, 2)], dtype=["float32", "int32"])
fixed("SPACE_TO_BATCH_ND", (1, 4, 4, 2), np.int32([2, 2]), np.int32([[0, 0], [2, 0]]), shape=(4, 2, 3, 2))
fixed("BATCH_TO_SPACE_ND", (4, 2, 3, 2), np.int32([2, 2]), np.int32([[0, 0], [0, 0]]), shape=(1, 4, 6, 2))
fixed(
    "BATCH_TO_SPACE_ND", (4, 2, 3, 2), np.int32([2, 2]), np.int32([[1, 0], [2, 1]]), shape=(1, 3, 3, 2), name=" cropped"
)
for name, (start, masks) in {
    " of the last, which ends before it begins": (-1, {"ShrinkAxisMask": 2, "EndMask": 1}),
    " of one, with an end far behind": (1, {"ShrinkAxisMask": 3, "BeginMask": 1, "EndMask": 3}),
}.items():
    shape = (2, 4) if start == -1 else (4,)
    fixed("STRIDED_SLICE", S, np.int32([0, start]), np.int32([0, 0]), np.int32([1, 1]), shape=shape, name=name, **masks)
fixed("REVERSE_V2", S, np.int32([-1, 1]), shape=S)
simple("SPACE_TO_DEPTH", (1, 4, 4, 2), shape=(1, 2, 2, 8), BlockSize=2)
simple("DEPTH_TO_SPACE", (1, 2, 2, 8), shape=(1, 4, 4, 2), BlockSize=2)
simple("CONCATENATION", S, S, shape=(2, 6, 4), Axis=-2)
simple("CONCATENATION", S, S, shape=(2, 6, 4), Axis=-2, FusedActivationFunction=1, name=" RELU")
simple("CONCATENATION", SIGNED, SIGNED, shape=(2, 3, 8), dtype="int8", **Q, Axis=2, name=" int8")
for axis, packed in ((0, (2, 2, 3, 4)), (1, (2, 2, 3, 4)), (-1, (2, 3, 4, 2))):
    simple("PACK", S, S, shape=packed, Axis=axis, ValuesCount=2, name=f" axis {axis}")
simple("PACK", ((), "float32", {}), ((), "float32", {}), shape=(2,), Axis=0, ValuesCount=2, name=" scalars")
simple("UNPACK", shape=(2, 4), count=3, Axis=1, Num=3)
simple("UNPACK", SIGNED, shape=(2, 3), count=4, dtype="int8", **Q, Axis=-1, Num=4, name=" int8")
fixed("SPLIT_V", (2, 6, 4), np.int32([1, -1, 2]), np.int32(1), shape=[(2, 1, 4), (2, 3, 4), (2, 2, 4)], NumSplits=3)
places = np.int32([0, 2, 0]), np.int32([2, 0, 4]), np.int32([1, -1, 2])
fixed("STRIDED_SLICE", S, *places, shape=(2, 2, 2), BeginMask=4)
fixed(
    "STRIDED_SLICE",
    S,
    np.int32([0, -1]),
    np.int32([2, 3]),
    np.int32([1, 1]),
    shape=(2, 4),
    ShrinkAxisMask=2,
    name=" short",
)
fixed("FILL", ((), "float32", {}), shape=(), name="")
del CASES["FILL"]
for one in ("SUM", "REDUCE_PROD", "REDUCE_MAX", "REDUCE_MIN", "MEAN"):
    fixed(one, S, np.int32([0, -1]), shape=(1, 3, 1), KeepDims=True)
    fixed(one, S, np.int32(1), shape=(2, 4), KeepDims=False, name=" of one axis")
fixed("MEAN", S, np.int32([0, 1, 2]), shape=(), KeepDims=False, name=" of all")
fixed(
    "MEAN", SIGNED, np.int32([1]), shape=(2, 4), dtype="int8", scale=0.03, zero_point=-5, name=" int8 to another scale"
)
for one in ("REDUCE_ANY", "REDUCE_ALL"):
    fixed(one, BOOLS, np.int32([1]), shape=(2, 4), dtype="bool")
for one in ("ARG_MAX", "ARG_MIN"):
    fixed(one, S, np.int32(-1), shape=(2, 3), dtype="int32", OutputType=2)
more = {"Radius": 2, "Bias": 1.0, "Alpha": 0.5, "Beta": 0.6}
simple("LOCAL_RESPONSE_NORMALIZATION", (1, 2, 3, 8), shape=(1, 2, 3, 8), **more)
for one in ("AVERAGE_POOL_2D", "MAX_POOL_2D", "L2_POOL_2D"):
    window = {"StrideW": 2, "StrideH": 1, "FilterWidth": 3, "FilterHeight": 2, "Padding": 0}
    simple(one, (1, 6, 6, 2), shape=(1, 6, 3, 2), **window)
    if one != "L2_POOL_2D":
        simple(one, ((1, 6, 6, 2), "int8", Q), shape=(1, 6, 3, 2), dtype="int8", **Q, **window, name=" int8")
for one in ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"):
    fixed(one, (1, 3, 4, 2), np.int32([6, 6]), shape=(1, 6, 6, 2))
    fixed(one, (1, 3, 4, 2), np.int32([6, 6]), shape=(1, 6, 6, 2), HalfPixelCenters=True, name=" half pixels")
    fixed(one, (1, 3, 4, 2), np.int32([6, 6]), shape=(1, 6, 6, 2), AlignCorners=True, name=" corners")


@case("SPLIT")
def split(w):
    return w.operator("SPLIT", [w.constant(np.int32(1)), w.input((2, 6, 4))], (2, 2, 4), count=3, NumSplits=3)


@case("FILL")
def fill(w):
    x = w.input((2, 3))
    ones = w.operator("FILL", [w.constant(np.int32([2, 3])), w.constant(np.float32(1.5))], (2, 3))
    return [w.operator("ADD", [x, ones], (2, 3))]


@case("SHAPE")
def shape(w):
    x = w.input((2, 3))
    return [w.operator("CAST", [w.operator("SHAPE", [x], (2,), "int32", OutType=2)], (2,))]


@case("RANK")
def rank(w):
    x = w.input((2, 3))
    return [w.operator("CAST", [w.operator("RANK", [x], (), "int32")], ())]


@case("EMBEDDING_LOOKUP")
def embedding_lookup(w):
    return [w.operator("EMBEDDING_LOOKUP", [w.input((3,), "int32", 0, 4), w.random((5, 2))], (3, 2))]


@case("HASHTABLE_LOOKUP")
def hashtable_lookup(w):
    inputs = [w.input((4,), "int32", 0, 9), w.constant(np.int32([1, 3, 5, 7])), w.random((4, 2))]
    return w.operator("HASHTABLE_LOOKUP", inputs, [(4, 2), (4,)], ["float32", "uint8"])


@case("LSH_PROJECTION")
def lsh_projection(w):
    inputs = [w.random((3, 2)), w.input((5,), "int32"), w.random((5,), scale=1)]
    return [w.operator("LSH_PROJECTION", inputs, (6,), "int32", Type=2)]


@case("DEQUANTIZE of 16-bit weights")
def half_weights(w):
    weights = w.operator("DEQUANTIZE", [w.random((4,), "float16")], (4,))
    return [w.operator("MUL", [w.input((2, 4)), weights], (2, 4))]


def convolution(name, x, filters, result, *, operator="CONV_2D", bias=True, order=(0, 1, 2), **fields):
    """A convolution, in float32 when `fields` gives no scale."""

    def write(w):
        options, scales = dict(fields), fields.get("filter_scale", 0.02)
        dtype = options.pop("dtype", "float32")
        options.pop("filter_scale", None)
        channels = filters[3] if operator.startswith("DEPTH") else filters[0]
        if dtype == "float32":
            inputs = [w.input(x), w.random(filters), w.random((channels,))]
            inputs[2] = w.constant(np.zeros(channels, "f4")) if bias == "zeros" else inputs[2]
        else:
            q = {"scale": 0.05, "zero_point": 3 if dtype == "int8" else 120}
            per = {} if np.ndim(scales) == 0 else {"channel": 3 if operator.startswith("DEPTH") else 0}
            of_filter = {"zero_point": 0 if dtype == "int8" else 127}
            bias_scale = (np.float32(0.05) * np.float32(scales)).tolist()
            inputs = [w.input(x, dtype, **q), w.random(filters, dtype, scale=scales, **of_filter, **per)]
            values = np.zeros(channels, "i4") if bias == "zeros" else np.arange(channels, dtype="i4") * 100
            inputs.append(w.constant(values, scale=bias_scale))
            options |= {"dtype": dtype, "scale": 0.5, "zero_point": q["zero_point"]}
        chosen = [inputs[i] for i in order if bias or i < 2]
        return [w.operator(operator, chosen, result, **options)]

    CASES[f"{operator}{name}"] = write


SAME, VALID = {"Padding": 0}, {"Padding": 1}
IMAGE, FILTERS = (1, 5, 6, 3), (4, 3, 2, 3)
PER_FOUR = [0.01, 0.02, 0.03, 0.04]
convolution("", IMAGE, FILTERS, (1, 5, 6, 4), **SAME, **WINDOW, **FLAT)
convolution(
    " RELU6, strides", IMAGE, FILTERS, (1, 2, 5, 4), **VALID, StrideW=1, StrideH=2, **FLAT, FusedActivationFunction=3
)
convolution(" TANH", IMAGE, FILTERS, (1, 5, 6, 4), **SAME, **WINDOW, **FLAT, FusedActivationFunction=4)
convolution(" dilated", IMAGE, FILTERS, (1, 1, 5, 4), **VALID, **WINDOW, DilationWFactor=1, DilationHFactor=2)
for words, given in (" without bias", False), (" of zero bias", "zeros"):
    convolution(words, IMAGE, FILTERS, (1, 5, 6, 4), bias=given, **SAME, **WINDOW, **FLAT)
    convolution(f" int8{words}", IMAGE, FILTERS, (1, 5, 6, 4), dtype="int8", bias=given, **SAME, **WINDOW, **FLAT)
convolution(" in groups", (1, 5, 6, 4), (4, 3, 2, 2), (1, 5, 6, 4), **SAME, **WINDOW, **FLAT)
for kind in ("int8", "uint8"):
    convolution(f" {kind}", IMAGE, FILTERS, (1, 5, 6, 4), dtype=kind, **SAME, **WINDOW, **FLAT)
convolution(" per channel", IMAGE, FILTERS, (1, 5, 6, 4), dtype="int8", filter_scale=PER_FOUR, **SAME, **WINDOW, **FLAT)
DEEP = {"operator": "DEPTHWISE_CONV_2D", "DepthMultiplier": 2}
convolution("", (1, 5, 6, 2), (1, 3, 2, 4), (1, 5, 6, 4), **DEEP, **SAME, **WINDOW, **FLAT)
for words, given in (" without bias", False), (" of zero bias", "zeros"):
    convolution(words, (1, 5, 6, 2), (1, 3, 2, 4), (1, 5, 6, 4), **DEEP, bias=given, **SAME, **WINDOW, **FLAT)
quantised = {"dtype": "int8", "filter_scale": PER_FOUR}
convolution(" per channel", (1, 5, 6, 2), (1, 3, 2, 4), (1, 5, 6, 4), **DEEP, **quantised, **SAME, **WINDOW, **FLAT)


@case("TRANSPOSE_CONV")
def transpose_conv(w):
    inputs = [w.constant(np.int32([1, 6, 6, 2])), w.random((2, 3, 3, 4)), w.input((1, 3, 3, 4))]
    return [w.operator("TRANSPOSE_CONV", inputs, (1, 6, 6, 2), Padding=0, StrideW=2, StrideH=2)]


def dense(name, x, result, *, dtype="float32", scales=0.02, bias=True, weight_dtype=None, **options):
    """A dense layer of three units."""

    def write(w):
        size = x[-1]
        if dtype == "float32":
            weights = w.random((3, size), weight_dtype or dtype, scale=0.02 if weight_dtype else 0.5)
            inputs, asked = [w.input(x), weights, w.random((3,))], {}
        else:
            channel = {"channel": 0} if np.ndim(scales) else {}
            bias_scale = (np.float32(0.05) * np.float32(scales)).tolist()
            inputs = [w.input(x, dtype, **Q), w.random((3, size), dtype, scale=scales, **channel)]
            inputs.append(w.random((3,), "int32", scale=bias_scale))
            asked = {"dtype": dtype, "scale": 0.3, "zero_point": -4}
        return [w.operator("FULLY_CONNECTED", inputs[: 2 + bias], result, **asked, **options)]

    CASES[f"FULLY_CONNECTED{name}"] = write


dense("", (4, 8), (4, 3))
dense(" RELU", (4, 8), (4, 3), FusedActivationFunction=1)
dense(" TANH", (4, 8), (4, 3), FusedActivationFunction=4)
dense(" without bias", (4, 8), (4, 3), bias=False)
dense(" keeps dimensions", (2, 2, 8), (2, 2, 3), KeepNumDims=True)
dense(" int8", (4, 8), (4, 3), dtype="int8")
dense(" per channel", (2, 2, 8), (2, 2, 3), dtype="int8", scales=[0.01, 0.02, 0.03], KeepNumDims=True)


def recurrent(w, batch=2, size=3, units=4):
    """Weights of a plain cell, and its state."""
    return [w.random((units, size)), w.random((units, units)), w.random((units,)), w.variable((batch, units))]


@case("RNN")
def rnn(w):
    return [w.operator("RNN", [w.input((2, 3)), *recurrent(w)], (2, 4), FusedActivationFunction=4)]


@case("UNIDIRECTIONAL_SEQUENCE_RNN")
def sequence_rnn(w):
    inputs = [w.input((2, 5, 3)), *recurrent(w)]
    return [w.operator("UNIDIRECTIONAL_SEQUENCE_RNN", inputs, (2, 5, 4), FusedActivationFunction=4)]


@case("BIDIRECTIONAL_SEQUENCE_RNN")
def bidirectional_rnn(w):
    inputs = [w.input((2, 5, 3)), *recurrent(w), *recurrent(w), -1, -1, -1]
    options = {"FusedActivationFunction": 4, "MergeOutputs": True}
    return [w.operator("BIDIRECTIONAL_SEQUENCE_RNN", inputs, (2, 5, 8), **options)]


@case("SVDF")
def svdf(w):
    inputs = [w.input((2, 3)), w.random((4, 3)), w.random((4, 5)), w.random((2,)), w.variable((2, 20))]
    return [w.operator("SVDF", inputs, (2, 2), Rank=2, FusedActivationFunction=1)]


def gates(w, size=3, cells=4, *, with_input=True):
    """Weights of an LSTM, input to bias."""
    first = [] if with_input else [-1]
    of_input, of_state = ([w.random((cells, n)) for _ in range(4 - len(first))] for n in (size, cells))
    bias = [w.random((cells,)) for _ in range(4 - len(first))]
    return [*first, *of_input, *first, *of_state, -1, -1, -1, *first, *bias]


def lstm(operator, name, x, result, *, with_input=True, norm=False, **options):
    def write(w):
        states = [w.variable((2, 4)), w.variable((2, 4))]
        layer_norm = [w.random((4,), scale=1) for _ in range(4)] if norm else []
        inputs = [w.input(x), *gates(w, with_input=with_input), -1, -1, *states, *layer_norm]
        return [w.operator(operator, inputs, result, FusedActivationFunction=4, **options)]

    CASES[f"{operator}{name}"] = write


lstm("LSTM", "", (2, 3), (2, 4))
lstm("LSTM", " without input gate", (2, 3), (2, 4), with_input=False, CellClip=0.5)
lstm("UNIDIRECTIONAL_SEQUENCE_LSTM", "", (2, 5, 3), (2, 5, 4))
lstm("UNIDIRECTIONAL_SEQUENCE_LSTM", " time first, normalised", (5, 2, 3), (5, 2, 4), norm=True, TimeMajor=True)


@case("BIDIRECTIONAL_SEQUENCE_LSTM")
def bidirectional_lstm(w):
    """Time first: LiteRT puts every batch but the first in the wrong place when batches come first."""
    both = [*gates(w), -1, -1, *gates(w), -1, -1]
    inputs = [w.input((5, 2, 3)), *both, *(w.variable((2, 4)) for _ in range(4)), *[-1] * 9]
    options = {"FusedActivationFunction": 4, "MergeOutputs": True, "TimeMajor": True}
    return [w.operator("BIDIRECTIONAL_SEQUENCE_LSTM", inputs, (5, 2, 8), **options)]


@case("TRANSPOSE of more dimensions than the HAL has")
def channel_shuffle(w):
    """Channels in groups, of which two axes change places."""
    x = w.operator("RESHAPE", [w.input((2, 3, 1, 6)), w.constant(np.int32([2, 3, 1, 3, 2]))], (2, 3, 1, 3, 2))
    y = w.operator("TRANSPOSE", [x, w.constant(np.int32([0, 1, 2, 4, 3]))], (2, 3, 1, 2, 3))
    return [w.operator("RESHAPE", [y, w.constant(np.int32([2, 3, 1, 6]))], (2, 3, 1, 6))]


@case("SHAPE that a RESHAPE is told")
def computed_shape(w):
    """Put together from two of its dimensions."""
    x = w.input((2, 3, 8))
    sizes = w.operator("SHAPE", [x], (3,), "int32", OutType=2)
    places = [w.constant(np.int32([v])) for v in (0, 1, 1)]
    first = w.operator("STRIDED_SLICE", [sizes, *places], (), "int32", ShrinkAxisMask=1)
    last = w.operator("GATHER", [sizes, w.constant(np.int32(1))], (), "int32")
    double = w.operator("MUL", [last, w.constant(np.int32(2))], (), "int32")
    packed = w.operator("PACK", [first, double, w.constant(np.int32(-1))], (3,), "int32", ValuesCount=3)
    joined = w.operator("CONCATENATION", [packed, w.constant(np.int32([1]))], (4,), "int32")
    return [w.operator("RESHAPE", [x, joined], (2, 6, 4, 1))]


@case("IF")
def branch(w):
    x, flag = w.input((3,)), w.input((), "bool")
    for operator in ("ADD", "MUL"):
        g = w.graph()
        y = g.input((3,))
        g.outputs = [g.operator(operator, [y, y], (3,))]
    return [w.operator("IF", [flag, x], (3,), ThenSubgraphIndex=1, ElseSubgraphIndex=2)]


@case("WHILE")
def loop(w):
    """Doubles until ten; the body hands one value on as it is."""
    count, value = w.input((), "int32", 4, 8), w.input((3,))
    condition, body = w.graph(), w.graph()
    n, _ = condition.input((), "int32"), condition.input((3,))
    condition.outputs = [condition.operator("LESS", [n, condition.constant(np.int32(10))], (), "bool")]
    n, v = body.input((), "int32"), body.input((3,))
    body.outputs = [
        body.operator("ADD", [n, body.constant(np.int32(1))], (), "int32"),
        body.operator("ADD", [v, v], (3,)),
    ]
    outputs = [(), (3,)], ["int32", "float32"]
    return w.operator("WHILE", [count, value], *outputs, CondSubgraphIndex=1, BodySubgraphIndex=2)


@case("WHILE that hands a value on")
def loop_with_guest(w):
    count, value = w.input((), "int32", 4, 8), w.input((3,))
    condition, body = w.graph(), w.graph()
    n, _ = condition.input((), "int32"), condition.input((3,))
    condition.outputs = [condition.operator("LESS", [n, condition.constant(np.int32(10))], (), "bool")]
    n, v = body.input((), "int32"), body.input((3,))
    body.outputs = [body.operator("ADD", [n, body.constant(np.int32(1))], (), "int32"), v]
    outputs = [(), (3,)], ["int32", "float32"]
    return w.operator("WHILE", [count, value], *outputs, CondSubgraphIndex=1, BodySubgraphIndex=2)


for operator in "CONV_2D", "CONV_2D int8", "DEPTHWISE_CONV_2D":
    OTHERWISE[f"{operator} without bias"] = (f"{operator} of zero bias", np.asarray)
for operator in "CONV_2D", "FULLY_CONNECTED":
    OTHERWISE[f"{operator} TANH"] = (operator, np.tanh)
OTHERWISE["CONCATENATION RELU"] = ("CONCATENATION", lambda x: np.maximum(x, 0))


def densified(name, array, block=None):
    """A dense layer whose weights are stored sparse."""

    def write(w):
        weights = w.operator("DENSIFY", [w.sparse(array, block)], array.shape)
        return listed(w.operator("FULLY_CONNECTED", [w.input((2, array.shape[1])), weights], (2, array.shape[0])))

    CASES[name] = write


THIN = np.random.default_rng(5).normal(0, 1, (8, 12)).astype(np.float32)
THIN[np.abs(THIN) < 1] = 0
densified("DENSIFY", THIN)
BLOCKS = np.kron(THIN[:4, :3] != 0, np.ones((2, 4))).astype(np.float32) * np.arange(1, 97, dtype=np.float32).reshape(
    8, 12
)
densified("DENSIFY blocks", BLOCKS, (2, 4))
