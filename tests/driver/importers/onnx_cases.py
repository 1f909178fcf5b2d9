"""A small file for every ONNX operator that is imported, and for every way of writing it that is handled apart.

CASES: name -> Case. The name begins with that of the operator. An array is an input of the model, a `C` a constant.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CASES = {}
random = np.random.default_rng(20)


@dataclass
class C:
    """A constant input."""

    value: np.ndarray


@dataclass
class Case:
    """One file, what it is fed, and how far its results may be from those of onnxruntime."""

    data: bytes
    feeds: dict = field(default_factory=dict)
    tolerance: float = 2e-5


def real(*shape, low=-2.0, high=2.0):
    return random.uniform(low, high, shape).astype(np.float32)


def ints(*shape, low=-9, high=9, dtype=np.int64):
    return random.integers(low, high, shape).astype(dtype)


def model(nodes, feeds, constants, outputs, opset=17):
    """The bytes of a model. outputs: their names."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in feeds.items()
    ]
    held = [numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items()]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, results, held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made, strict_mode=True).SerializeToString()


def one(kind, *inputs, name="", outputs=1, opset=17, tolerance=2e-5, **attributes):
    """A model of one operator."""
    feeds, constants, names = {}, {}, []
    for i, value in enumerate(inputs):
        names.append("" if value is None else f"x{i}")
        if isinstance(value, C):
            constants[f"x{i}"] = np.asarray(value.value)
        elif value is not None:
            feeds[f"x{i}"] = value
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(kind, names, results, **attributes)
    CASES[kind + name] = Case(model([node], feeds, constants, results, opset), feeds, tolerance)


def I(*values):  # noqa: E743, N802 - a constant list of integers
    return C(np.array(values, np.int64))


X, POSITIVE, BOOLS = real(2, 3, 4), real(2, 3, 4, low=0.1, high=4), ints(2, 3, 4, low=0, high=2, dtype=bool)
IMAGE, SIGNAL = real(1, 4, 9, 8), real(2, 4, 11)

# ---- element by element
for kind in ("Abs", "Ceil", "Floor", "Neg", "Exp", "Sin", "Cos", "Erf", "Relu", "Sigmoid", "Tanh", "Softplus"):
    one(kind, X)
for kind in ("Softsign", "Elu", "Selu", "Celu", "HardSigmoid", "HardSwish", "LeakyRelu", "Identity", "Mish"):
    one(kind, X, opset=18)
for kind in ("Log", "Sqrt", "Reciprocal"):
    one(kind, POSITIVE)
one("Elu", X, name=" alpha", alpha=0.3)
one("Celu", X, name=" alpha", alpha=0.3)
one("HardSigmoid", X, name=" steeper", alpha=0.7, beta=0.1)
one("LeakyRelu", X, name=" steeper", alpha=0.3)
one("Gelu", X, opset=20)
one("Gelu", X, name=" by tanh", opset=20, approximate="tanh")
one("Erf", real(500, low=-6, high=6), name=" far out")
one("Dropout", X, opset=12)
one("Clip", X, C(np.float32(-0.5)), C(np.float32(1.25)))
one("Clip", X, C(np.float32(0)), C(np.float32(6)), name=" as RELU6")
one("Clip", X, C(np.float32(-1)), C(np.float32(1)), name=" as RELU1")
one("Clip", X, C(np.float32(0)), name=" below")
one("Clip", X, None, C(np.float32(0.5)), name=" above")
one("Clip", X, name=" of opset 7", opset=7, min=-0.5, max=0.25)
for kind in ("Add", "Sub", "Mul", "Div"):
    one(kind, X, POSITIVE)
    one(kind, X, C(real(4, low=0.5)), name=" a constant")
    one(kind, X, C(np.float32(1.5)), name=" a scalar")
for kind in ("Add", "Sub", "Mul"):
    one(kind, ints(2, 3, dtype=np.int32), ints(3, dtype=np.int32), name=" int32")
one("Add", ints(2, 3), I(5), name=" int64")
for kind in ("Min", "Max", "Sum", "Mean"):
    one(kind, X, real(3, 4), real(4))
    one(kind, X, name=" of one")
one("Pow", POSITIVE, X)
for exponent in (2, 3, 0.5, 1.7):
    one("Pow", POSITIVE, C(np.float32(exponent)), name=f" {exponent}")
one("PRelu", IMAGE, C(real(4, 1, 1)))
for kind in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
    one(kind, ints(2, 3, low=0, high=3), ints(2, 3, low=0, high=3))
    one(kind, X, real(4), name=" float")
for kind in ("And", "Or", "Xor"):
    one(kind, BOOLS, ints(2, 3, 4, low=0, high=2, dtype=bool))
one("Not", BOOLS)
one("Where", BOOLS, X, real(2, 3, 4))
one("Where", BOOLS, X, C(np.float32(-1e9)), name=" a scalar")
one("Where", C(np.tril(np.ones((4, 4), bool))), real(2, 4, 4), C(np.float32(-9)), name=" a mask")
one("Cast", X, name=" to int32", to=TensorProto.INT32)
one("Cast", ints(2, 3), to=TensorProto.FLOAT)
one("Cast", X, name=" to bool", to=TensorProto.BOOL)
one("Cast", BOOLS, name=" from bool", to=TensorProto.FLOAT)
one("Cast", X, name=" to float16", to=TensorProto.FLOAT16)

# ---- windows
one("Conv", IMAGE, C(real(5, 4, 3, 3)), C(real(5)))
one("Conv", IMAGE, C(real(5, 4, 3, 3)), name=" without bias", pads=[1, 0, 1, 2], strides=[2, 1])
one("Conv", IMAGE, C(real(5, 4, 3, 3)), name=" dilated", dilations=[2, 1], pads=[2, 1, 2, 1])
one("Conv", IMAGE, C(real(8, 1, 3, 3)), C(real(8)), name=" depthwise", group=4, pads=[1, 1, 1, 1])
one("Conv", IMAGE, C(real(6, 2, 3, 3)), C(real(6)), name=" in groups", group=2, pads=[1, 1, 1, 1])
one("Conv", IMAGE, C(real(5, 4, 1, 1)), name=" with a wide border", pads=[1, 2, 1, 2])
for upper in ("SAME_UPPER", "SAME_LOWER", "VALID"):
    one("Conv", IMAGE, C(real(5, 4, 4, 3)), name=f" {upper}", auto_pad=upper, strides=[2, 2])
one("Conv", SIGNAL, C(real(5, 4, 3)), C(real(5)), name=" of a signal", pads=[1, 1], strides=[2])
one("Conv", SIGNAL, C(real(4, 1, 3)), name=" of a signal, depthwise", group=4, dilations=[2])
one("ConvTranspose", IMAGE, C(real(4, 5, 3, 3)), C(real(5)))
one("ConvTranspose", IMAGE, C(real(4, 5, 3, 3)), name=" x2", strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])
one("ConvTranspose", IMAGE, C(real(4, 5, 4, 4)), name=" cropped", strides=[2, 2], pads=[1, 1, 1, 1])
one("ConvTranspose", IMAGE, C(real(4, 2, 3, 3)), C(real(4)), name=" in groups", group=2, strides=[2, 2])
one("ConvTranspose", SIGNAL, C(real(4, 5, 4)), name=" of a signal", strides=[2], pads=[1, 1])
one("ConvTranspose", IMAGE, C(real(4, 5, 3, 3)), name=" SAME_UPPER", strides=[2, 2], auto_pad="SAME_UPPER")
one("ConvTranspose", IMAGE, C(real(4, 5, 3, 3)), name=" of a given size", strides=[2, 2], output_shape=[18, 16])
for kind in ("MaxPool", "AveragePool"):
    one(kind, IMAGE, kernel_shape=[3, 2])
    one(kind, IMAGE, name=" padded", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    one(kind, IMAGE, name=" up", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    one(kind, IMAGE, name=" SAME_LOWER", kernel_shape=[4, 4], strides=[2, 2], auto_pad="SAME_LOWER")
    one(kind, SIGNAL, name=" of a signal", kernel_shape=[3], strides=[2])
one("AveragePool", IMAGE, name=" that counts paddings", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
for kind in ("GlobalAveragePool", "GlobalMaxPool"):
    one(kind, IMAGE)
    one(kind, SIGNAL, name=" of a signal")
one("LRN", IMAGE, size=3, alpha=0.3, beta=0.6, bias=1.5)
one("DepthToSpace", IMAGE, blocksize=2)
one("DepthToSpace", real(1, 12, 2, 3), name=" CRD", blocksize=2, mode="CRD")
one("SpaceToDepth", real(1, 3, 4, 6), blocksize=2)
SCALES = C(np.float32([1, 1, 2, 2]))
for mode in ("asymmetric", "half_pixel", "align_corners", "pytorch_half_pixel"):
    for way in ("nearest", "linear"):
        more = {"mode": way, "coordinate_transformation_mode": mode}
        one("Resize", IMAGE, None, SCALES, name=f" {way} {mode}", **more)
        one("Resize", IMAGE, None, None, I(1, 4, 5, 11), name=f" {way} {mode} to a size", **more)
for nearest in ("floor", "ceil", "round_prefer_ceil"):
    one("Resize", IMAGE, None, C(np.float32([1, 1, 0.5, 0.75])), name=f" {nearest}", nearest_mode=nearest)
one("Resize", SIGNAL, None, C(np.float32([1, 1, 2])), name=" of a signal", mode="linear")
one("Resize", IMAGE, SCALES, name=" of opset 10", opset=10)
one("Upsample", IMAGE, SCALES, opset=9)
one("Upsample", IMAGE, name=" of opset 7", opset=7, scales=[1.0, 1.0, 2.0, 3.0])

# ---- matrices
one("Gemm", real(3, 5), C(real(5, 4)), C(real(4)))
one("Gemm", real(3, 5), C(real(4, 5)), C(real(4)), name=" transposed", transB=1, alpha=0.5, beta=2.0)
one("Gemm", real(5, 3), C(real(5, 4)), name=" of a transposed input", transA=1)
one("Gemm", real(3, 5), C(real(5, 4)), C(real(1)), name=" with one bias")
one("MatMul", real(3, 5), C(real(5, 4)))
one("MatMul", real(2, 3, 5), C(real(5, 4)), name=" of rank 3")
one("MatMul", real(2, 3, 5), real(2, 5, 4), name=" of activations")
one("MatMul", real(2, 2, 3, 5), real(2, 1, 5, 4), name=" of heads")
one("MatMul", real(3, 5), real(5, 4), name=" of two inputs")
for kind in ("Softmax", "LogSoftmax"):
    one(kind, X)
    one(kind, X, name=" along the middle", axis=1)
    one(kind, X, name=" of opset 11", opset=11, axis=1)
one("BatchNormalization", IMAGE, *(C(real(4, low=0.5)) for _ in range(4)))
one("BatchNormalization", SIGNAL, *(C(real(4, low=0.5)) for _ in range(4)), name=" of a signal", epsilon=0.01)
one("BatchNormalization", real(3, 4), *(C(real(4, low=0.5)) for _ in range(4)), name=" of rank 2")
one("InstanceNormalization", IMAGE, C(real(4)), C(real(4)))
one("InstanceNormalization", SIGNAL, C(real(4)), C(real(4)), name=" of a signal", epsilon=0.1)
one("GroupNormalization", IMAGE, C(real(4)), C(real(4)), opset=21, num_groups=2)
one("LayerNormalization", X, C(real(4)), C(real(4)))
one("LayerNormalization", X, C(real(3, 4)), name=" over two", axis=1, epsilon=0.01)
for kind in (
    "ReduceMean",
    "ReduceSum",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
):
    axes = {} if kind == "ReduceSum" else {"axes": [1]}
    one(kind, X, *([I(1)] if kind == "ReduceSum" else []), **axes)
    one(
        kind,
        X,
        *([I(-1, 0)] if kind == "ReduceSum" else []),
        name=" apart",
        keepdims=0,
        **({"axes": [-1, 0]} if axes else {}),
    )
    one(kind, X, name=" of all", keepdims=0)
one("ReduceLogSum", POSITIVE, axes=[2])
one("ReduceMean", X, I(2), name=" of opset 18", opset=18)
for kind in ("ArgMax", "ArgMin"):
    one(kind, X, axis=1)
    one(kind, X, name=" apart", axis=-1, keepdims=0)
one("TopK", X, I(2), outputs=2)
one("TopK", X, I(3), name=" smallest", outputs=2, largest=0)

# ---- movement
one("Reshape", X, I(4, -1))
one("Reshape", X, I(0, 6, -1), name=" that keeps one")
one("Flatten", IMAGE)
one("Flatten", IMAGE, name=" at 2", axis=2)
one("Squeeze", real(1, 3, 1, 4), I(0, 2))
one("Squeeze", real(1, 3, 1, 4), name=" all")
one("Unsqueeze", X, I(0))
one("Unsqueeze", real(3, 4), name=" of opset 11", opset=11, axes=[0, 3])
one("Transpose", X, perm=[2, 0, 1])
one("Transpose", X, name=" reversed")
one("Concat", X, real(2, 2, 4), C(real(2, 1, 4)), axis=1)
one("Split", real(2, 6), axis=1, outputs=3)
one("Split", real(2, 6), I(1, 2, 3), name=" unequal", axis=-1, outputs=3)
one("Split", real(2, 6), name=" of opset 11", opset=11, axis=1, split=[4, 2], outputs=2)
one("Split", real(2, 7), name=" of opset 18", opset=18, axis=1, num_outputs=3, outputs=3)
one("Slice", X, I(0, 1), I(2, 2**62), I(1, 2))
one("Slice", X, I(-1), I(-(2**62)), I(2), I(-1), name=" backward")
one("Slice", X, I(0), I(4), I(2), I(2), name=" with a step")
one("Slice", X, I(-2), I(-1), I(2), name=" counted from the end")
one("Slice", X, name=" of opset 9", opset=9, starts=[1], ends=[3], axes=[1])
one("Gather", X, I(2, 0), axis=1)
one("Gather", X, C(np.int64(-1)), name=" of one", axis=2)
one("Gather", real(5, 3), ints(2, 2, low=0, high=5), name=" by an input")
one("Expand", real(3, 1), I(2, 3, 4))
one("Tile", X, I(1, 2, 3))
one("Pad", X, I(0, 1, 0, 1, 0, 2))
one("Pad", X, I(0, 1, 0, 1, 0, 2), C(np.float32(1.5)), name=" of a value")
one("Pad", X, I(0, 1, 2, 0, 0, 3), name=" reflected", mode="reflect")
one("Pad", X, I(1, 1, 0, 0, 0, 3), name=" of the edge", mode="edge")
one("Pad", X, name=" of opset 10", opset=10, pads=[0, 1, 0, 1, 0, 2])

# ---- recurrent
for way, count in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
    for kind, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        weights = C(real(count, gates * 5, 3)), C(real(count, gates * 5, 5)), C(real(count, 2 * gates * 5))
        outputs = 3 if kind == "LSTM" else 2
        more = {"linear_before_reset": 1} if kind == "GRU" else {}
        one(kind, real(4, 2, 3), *weights, name=f" {way}", outputs=outputs, hidden_size=5, direction=way, **more)
H = real(1, 2, 5)
one("LSTM", real(4, 2, 3), C(real(1, 20, 3)), C(real(1, 20, 5)), hidden_size=5, outputs=1)
one("LSTM", real(4, 2, 3), C(real(1, 20, 3)), C(real(1, 20, 5)), C(real(1, 40)), None, H, C(H), C(real(1, 15)),
    name=" with peepholes", hidden_size=5, outputs=3)  # fmt: skip
one("GRU", real(4, 2, 3), C(real(1, 15, 3)), C(real(1, 15, 5)), C(real(1, 30)), None, H, hidden_size=5, outputs=2)
one("RNN", real(4, 2, 3), C(real(1, 5, 3)), C(real(1, 5, 5)), hidden_size=5, outputs=2, activations=["Relu"])

# ---- branches


def branches(name, condition, feeds, constants, *nodes):
    """An If between two ways to compute on x, on a condition that `nodes` compute."""
    held = [numpy_helper.from_array(np.float32([0.5, 2, -1]), "half")]
    results = [helper.make_empty_tensor_value_info("r")]
    then = [helper.make_node("Mul", ["x", "half"], ["m"]), helper.make_node("Relu", ["m"], ["r"])]
    other = [helper.make_node("MatMul", ["x", "w"], ["r"])]
    graphs = {
        "then_branch": helper.make_graph(then, "then", [], results, held),
        "else_branch": helper.make_graph(other, "else", [], results),
    }
    choice = helper.make_node("If", [condition], ["i"], **graphs)
    end = helper.make_node("Add", ["i", "x"], ["y"])
    CASES[name] = Case(model([*nodes, choice, end], feeds, constants, ["y"]), feeds)


TWO, W3 = real(2, 3), {"w": real(3, 3)}
RANK = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Size", ["s"], ["n"])]
RANK += [helper.make_node("Equal", ["n", "two"], ["c"])]
LARGEST = [helper.make_node("ReduceMax", ["z"], ["l"], keepdims=1), helper.make_node("Less", ["l", "two"], ["c"])]
branches("If", "c", {"x": TWO}, {"two": np.int64(2), **W3}, *RANK)
branches("If of another rank", "c", {"x": TWO}, {"two": np.int64(3), **W3}, *RANK)
branches("If by values", "c", {"x": TWO, "z": real(1, 2)}, {"two": np.float32(2), **W3}, *LARGEST)
branches("If by an input", "c", {"x": TWO, "c": np.array(False)}, W3)


# ---- dynamically quantised


def dynamic(kind, name, weights, shape, zeros=None, **attributes):
    """A product of an input that DynamicQuantizeLinear quantises, as `quantize_dynamic` writes it."""
    feeds, constants = {"x": real(*shape, low=-1.0, high=3.0)}, {"w": weights, "s": np.float32(0.013)}
    names = ["q", "w", "zero"]
    if zeros is not None:
        constants["z"] = np.asarray(zeros, weights.dtype)
        names.append("z")
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node(kind, names, ["i"], **attributes),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["scale", "s"], ["both"]),
        helper.make_node("Mul", ["f", "both"], ["y"]),
    ]
    CASES[name] = Case(model(nodes, feeds, constants, ["y", "i", "scale"]), feeds, 1e-4)


B8, B6 = ints(6, 5, low=-64, high=64, dtype=np.int8), ints(5, 4, 3, 3, low=0, high=127, dtype=np.uint8)
dynamic("MatMulInteger", "DynamicQuantizeLinear", B8, (3, 6))
dynamic("MatMulInteger", "MatMulInteger", B8, (2, 3, 6), 7)
dynamic("MatMulInteger", "MatMulInteger with a zero point per unit", B8, (3, 6), ints(5, dtype=np.int8))
dynamic("ConvInteger", "ConvInteger", B6, (1, 4, 7, 7), 60, pads=[1, 1, 1, 1])
dynamic("ConvInteger", "ConvInteger depthwise", B6[:4, :1], (1, 4, 7, 7), 60, group=4, strides=[2, 2])


# ---- quantised: between DequantizeLinear and QuantizeLinear


class Quantised:
    """A model whose inputs are quantised at once, and whose result is, with a scale each."""

    def __init__(self, kind, low=-2.0, high=2.0):
        self.nodes, self.feeds, self.constants = [], {}, {}
        self._kind, self._scale = kind, (high - low) / 255
        self._zero = round(-low / self._scale) - (128 if kind == np.int8 else 0)

    def _held(self, array):
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def pair(self, name, scale=None, zero=None):
        """The value after QuantizeLinear and DequantizeLinear."""
        scale = self._held(np.float32(self._scale if scale is None else scale))
        zero = self._held(np.array(self._zero if zero is None else zero, self._kind))
        self.nodes.append(helper.make_node("QuantizeLinear", [name, scale, zero], [f"{name}_q"]))
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", scale, zero], [f"{name}_d"]))
        return f"{name}_d"

    def input(self, *shape):
        """A quantised input."""
        name = f"x{len(self.feeds)}"
        self.feeds[name] = real(*shape)
        return self.pair(name)

    def weights(self, array, scale, zero=None, axis=0):
        """A quantised constant: a scale and perhaps a zero point, or one for each channel."""
        names = [self._held(array), self._held(np.asarray(scale, np.float32))]
        names += [] if zero is None else [self._held(np.asarray(zero, array.dtype))]
        result = f"w{len(self.constants)}"
        self.nodes.append(helper.make_node("DequantizeLinear", names, [result], axis=axis))
        return result

    def constant(self, array):
        """A constant as it is."""
        return self._held(array)

    def add(self, kind, *inputs, **attributes):
        """An operator, its result quantised."""
        name = f"r{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def case(self, name, result, tolerance):
        CASES[name] = Case(model(self.nodes, self.feeds, self.constants, [result], 17), self.feeds, tolerance)


def quantised(name, write, high=8.0):
    """The case for both kinds of bytes; the result may differ by one unit."""
    for kind in (np.uint8, np.int8):
        q = Quantised(kind)
        result = write(q)
        scale = 2 * high / 255
        zero = 127 if kind == np.uint8 else -1
        q.case(f"{name} of {kind.__name__}", q.pair(result, scale, zero), scale * 1.01)


W8 = ints(5, 4, 3, 3, low=-100, high=100, dtype=np.int8)
U8 = ints(5, 4, 3, 3, low=0, high=255, dtype=np.uint8)
CHANNELS = real(5, low=0.002, high=0.02)
M8 = ints(6, 5, low=-100, high=100, dtype=np.int8)
for one_kind in ("Add", "Sub", "Mul"):
    quantised(f"{one_kind} quantised", lambda q, k=one_kind: q.add(k, q.input(1, 4, 3, 3), q.input(1, 4, 3, 3)))
for one_kind in ("Sigmoid", "Tanh", "Softmax", "HardSwish", "Relu", "LeakyRelu", "Identity"):
    quantised(f"{one_kind} quantised", lambda q, k=one_kind: q.add(k, q.input(2, 5)), high=2.0)
quantised("Conv quantised", lambda q: q.add("Conv", q.input(1, 4, 7, 7), q.weights(W8, 0.01)))
quantised("Conv with unsigned weights", lambda q: q.add("Conv", q.input(1, 4, 7, 7), q.weights(U8, 0.01, 120)))
quantised("Conv with a scale per channel", lambda q: q.add("Conv", q.input(1, 4, 7, 7), q.weights(W8, CHANNELS)))
quantised(
    "Conv quantised, with an activation",
    lambda q: q.add("Relu", q.add("Conv", q.input(1, 4, 7, 7), q.weights(W8, CHANNELS), q.constant(real(5)))),
)
quantised(
    "Conv quantised, depthwise",
    lambda q: q.add("Conv", q.input(1, 5, 7, 7), q.weights(W8[:, :1], CHANNELS), group=5, pads=[1, 1, 1, 1]),
)
quantised("MatMul quantised", lambda q: q.add("MatMul", q.input(2, 3, 6), q.weights(M8, 0.01)))
quantised("MatMul with a scale per unit", lambda q: q.add("MatMul", q.input(3, 6), q.weights(M8, CHANNELS, axis=1)))
quantised(
    "Gemm with a scale per unit",
    lambda q: q.add("Gemm", q.input(3, 6), q.weights(np.ascontiguousarray(M8.T), CHANNELS), transB=1),
)
quantised("MatMul of two inputs, quantised", lambda q: q.add("MatMul", q.input(3, 6), q.input(6, 2)), high=20.0)
quantised(
    "Conv whose zero points differ",
    lambda q: q.add("Conv", q.input(1, 4, 7, 7), q.weights(W8, CHANNELS, np.arange(5, dtype=np.int8))),
)
quantised(
    "MatMul with a scale per row", lambda q: q.add("MatMul", q.input(3, 6), q.weights(M8, real(6, low=0.01), axis=0))
)
quantised(
    "ConvTranspose with a scale per channel",
    lambda q: q.add("ConvTranspose", q.input(1, 5, 4, 4), q.weights(W8, real(4, low=0.002, high=0.02), axis=1)),
)
quantised("MaxPool quantised", lambda q: q.add("MaxPool", q.input(1, 2, 6, 6), kernel_shape=[2, 2]), high=2.0)
quantised("AveragePool quantised", lambda q: q.add("AveragePool", q.input(1, 2, 6, 6), kernel_shape=[2, 2]))
quantised("GlobalAveragePool quantised", lambda q: q.add("GlobalAveragePool", q.input(1, 2, 6, 6)))
quantised("Concat quantised", lambda q: q.add("Concat", q.input(1, 2, 3), q.input(1, 2, 3), axis=1))
quantised("Reshape quantised", lambda q: q.add("Reshape", q.input(1, 4, 3), q.constant(np.int64([3, -1]))))
quantised("Transpose quantised", lambda q: q.add("Transpose", q.input(1, 4, 3), perm=[2, 0, 1]))
quantised("Erf between, in float", lambda q: q.add("Erf", q.input(1, 4, 3)), high=2.0)
