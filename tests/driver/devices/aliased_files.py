"""Files of two kinds whose outputs are something else as well: an input, a constant, another output, a value inside."""

import numpy as np
import onnx
from onnx import helper
from onnx_files import value, written
from tflite_writer import Writer

node, SHAPE = helper.make_node, (4, 300)
TURNED, FLAT = SHAPE[::-1], (1200,)
CONSTANT = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
X = ("x", "float32", SHAPE)


def branch(nodes, result, shape=SHAPE, constants=None):
    """A graph within a node; `result`: the name of its only output."""
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    return helper.make_graph(nodes, result, [], [value(result, "float32", shape)], tensors)


def choice(then, other):
    """The nodes of an If whose condition is that x adds up to something."""
    total = [node("ReduceSum", ["x"], ["total"], keepdims=0), node("Cast", ["total"], ["is"], to=onnx.TensorProto.BOOL)]
    return [*total, node("If", ["is"], ["y"], then_branch=then, else_branch=other)]


NEGATIVE = branch([node("Neg", ["x"], ["b"])], "b")
STEP = helper.make_graph(
    [node("Identity", ["go"], ["went"]), node("Identity", ["v"], ["w"])],
    "step",
    [value("i", "int64", ()), value("go", "bool", ()), value("v", "float32", SHAPE)],
    [value("went", "bool", ()), value("w", "float32", SHAPE)],
)


def y(shape=SHAPE, dtype="float32"):
    """The output of that name."""
    return "y", dtype, shape


def file(nodes, outputs, constants=None, inputs=(X,)):
    """The bytes of a file."""
    return written(nodes, inputs, outputs, constants or {})


NEG, W = node("Neg", ["x"], ["y"]), {"w": CONSTANT}
ONNX_FILES = {
    "an input": file([NEG], [X, y()]),
    "nothing but an input": file([], [X]),
    "inputs crosswise": file([], [("b", "float32", SHAPE), X], inputs=[X, ("b", "float32", SHAPE)]),
    "an input of another size": file([], [("x", "float32", ("n", 300))], inputs=[("x", "float32", ("n", 300))]),
    "flags that are an input": file([], [("x", "bool", SHAPE)], inputs=[("x", "bool", SHAPE)]),
    "a copy of an input": file([node("Identity", ["x"], ["y"])], [y()]),
    "two copies of an input": file([node("Identity", ["x"], [n]) for n in "yz"], [y(), ("z", "float32", SHAPE)]),
    "a constant": file([NEG], [("w", "float32", SHAPE), y()], W),
    "a copy of a constant": file([node("Identity", ["w"], ["z"]), NEG], [("z", "float32", SHAPE), y()], W),
    "computed of a constant": file([node("Abs", ["w"], ["z"]), NEG], [("z", "float32", SHAPE), y()], W),
    "another output": file([NEG, node("Identity", ["y"], ["z"])], [y(), ("z", "float32", SHAPE)]),
    "the same output again": file([NEG], [y(), y()]),
    "a value inside": file([NEG, node("Abs", ["y"], ["z"])], [("z", "float32", SHAPE), y()]),
    "an input in another shape": file([node("Reshape", ["x", "s"], ["y"])], [y(FLAT)], {"s": np.array(FLAT)}),
    "an output in another shape": file(
        [node("Neg", ["x"], ["z"]), node("Reshape", ["z", "s"], ["y"])],
        [y(FLAT), ("z", "float32", SHAPE)],
        {"s": np.array(FLAT)},
    ),
    "turned twice": file([node("Transpose", ["x"], ["t"]), node("Transpose", ["t"], ["y"])], [y()]),
    "a constant that is turned": file(
        [node("Transpose", ["x"], ["t"]), node("Add", ["t", "w"], ["a"]), node("Transpose", ["a"], ["y"])],
        [y(), ("w", "float32", TURNED)],
        {"w": CONSTANT.reshape(TURNED)},
    ),
    "what does nothing": file(
        [node("Dropout", ["x"], ["y", "mask"]), node("Cast", ["x"], ["z"], to=1), node("Concat", ["x"], ["c"], axis=0)],
        [y(), ("mask", "bool", SHAPE), ("z", "float32", SHAPE), ("c", "float32", SHAPE)],
    ),
    "of a branch, an input": file(choice(branch([node("Identity", ["x"], ["a"])], "a"), NEGATIVE), [y()]),
    "of a branch, its constant": file(choice(branch([], "a", constants={"a": CONSTANT}), NEGATIVE), [y()]),
    "of a branch, of another size": file(
        choice(branch([node("Abs", ["x"], ["a"])], "a"), branch([node("Slice", ["x", "o", "e"], ["b"])], "b", (1, 5))),
        [y(None)],
        {"o": np.array([0, 0]), "e": np.array([1, 5])},
    ),
    "of a loop that does not run": file(
        [node("Loop", ["k", "t", "x"], ["y"], body=STEP)], [y()], {"k": np.array(0), "t": np.array(True)}
    ),
    "of a loop that changes nothing": file(
        [node("Loop", ["k", "t", "x"], ["y"], body=STEP)], [y()], {"k": np.array(3), "t": np.array(True)}
    ),
    "nothing at all": file(
        [node("Slice", ["x", "o", "o"], ["y"])], [y((0, 300))], {"o": np.array([0]), "e": np.array([0])}
    ),
    "as many as there are": file([node("NonZero", ["x"], ["y"])], [y((2, "n"), "int64")]),
}


def tflite(make):
    """The bytes of a file, and arrays for its inputs. `make`: of a writer and an input, the outputs."""
    w = Writer()
    return w.file(make(w, w.input(SHAPE))), w.feeds


def numbers(*values):
    """An array of int32."""
    return np.array(values, np.int32)


def beside(operator, shape, *inputs, dtype="float32", **options):
    """What an operator gives that reads constants alone, or only the shape of x (None), and -x."""

    def make(w, x):
        given = [x if value is None else w.constant(value) for value in inputs]
        return [w.operator(operator, given, shape, dtype, **options), w.operator("NEG", [x], SHAPE)]

    return tflite(make)


def of(operator, shape, *constants, **options):
    """What an operator gives that moves no element of x."""
    return tflite(lambda w, x: [w.operator(operator, [x, *map(w.constant, constants)], shape, **options)])


def negative(w, x):
    """-x."""
    return w.operator("NEG", [x], SHAPE)


def reshaped(w, x):
    """x in another shape."""
    return w.operator("RESHAPE", [x, w.constant(numbers(*FLAT))], FLAT)


def with_inside(w, x):
    """What is computed of a value, and the value."""
    inside = negative(w, x)
    return [w.operator("ABS", [inside], SHAPE), inside, reshaped(w, inside)]


TFLITE_FILES = {
    "an input": tflite(lambda w, x: [x, negative(w, x)]),
    "nothing but an input": tflite(lambda w, x: [x]),
    "the same output again": tflite(lambda w, x: [negative(w, x)] * 2),
    "a constant": tflite(lambda w, x: [w.constant(CONSTANT), negative(w, x)]),
    "computed of a constant": beside("NEG", SHAPE, CONSTANT),
    "computed of two constants": beside("ADD", SHAPE, CONSTANT, CONSTANT, FusedActivationFunction=0),
    "a constant in another shape": beside("RESHAPE", FLAT, CONSTANT, numbers(*FLAT)),
    "a constant that is turned": beside("TRANSPOSE", TURNED, CONSTANT, numbers(1, 0)),
    "an input in another shape": tflite(lambda w, x: [reshaped(w, x)]),
    "a value inside": tflite(with_inside),
    "one more axis": of("EXPAND_DIMS", (1, *SHAPE), np.array(0, np.int32)),
    "cast to what it is": of("CAST", SHAPE, InDataType=0, OutDataType=0),
    "joined with nothing": of("CONCATENATION", SHAPE, Axis=0, FusedActivationFunction=0),
    "padded with nothing": of("PAD", SHAPE, numbers(0, 0, 0, 0).reshape(2, 2)),
    "all of an input": of("SLICE", SHAPE, numbers(0, 0), numbers(*SHAPE)),
    "broadcast to what it is": of("BROADCAST_TO", SHAPE, numbers(*SHAPE)),
    "a shape": beside("SHAPE", (2,), None, dtype="int32", OutType=2),
    "a rank": beside("RANK", (), None, dtype="int32"),
    "filled": beside("FILL", SHAPE, numbers(*SHAPE), np.float32(3)),
    "counted": beside("RANGE", (9,), *map(np.float32, (0, 9, 1))),
    "zeros": beside("ZEROS_LIKE", SHAPE, None),
}
