"""Files of TensorFlow Lite that leave sizes open, compute shapes, and move integers; and all obstacles of a file."""

import re

import numpy as np
import pytest
from tflite_writer import Writer

import driver
from driver.importers.tflite import reader as importer
from driver.nn import OperandType

litert = pytest.importorskip("ai_edge_litert.interpreter", reason="no ai-edge-litert to compare with")


def own(data, feeds):
    """What LiteRT gives for the file, its inputs resized to those of the feeds."""
    interpreter = litert.Interpreter(model_content=data, num_threads=1)
    details = interpreter.get_input_details()
    for detail, feed in zip(details, feeds, strict=True):
        interpreter.resize_tensor_input(detail["index"], feed.shape)
    interpreter.allocate_tensors()
    for detail, feed in zip(details, feeds, strict=True):
        interpreter.set_tensor(detail["index"], feed)
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


@pytest.fixture
def agrees(run):
    """Import the file with these shapes, and compare every result with LiteRT's."""

    def agrees(data, feeds, shapes=None):
        model = importer.read(memoryview(data), shapes)
        for result, wanted in zip(run(model, feeds), own(data, feeds), strict=True):
            np.testing.assert_allclose(result, wanted.reshape(result.shape), rtol=1e-5, atol=1e-6)
        return model

    return agrees


def floats(*shape):
    return np.random.default_rng(3).uniform(-2, 2, shape).astype(np.float32)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def signal():
    """A file whose results are all as long as its input, which is open."""
    w = Writer()
    x = w.input((1, 4), signature=[-1, -1], name="sound")
    wide = w.operator("EXPAND_DIMS", [x, w.constant(np.int32(1))], (1, 1, 4), signature=[-1, 1, -1])
    turned = w.operator("TRANSPOSE", [wide, w.constant(np.int32([0, 2, 1]))], (1, 4, 1), signature=[-1, -1, 1])
    sums = w.operator("BATCH_MATMUL", [turned, w.random((1, 3))], (1, 4, 3), signature=[-1, -1, 3])
    both = w.operator("PACK", [sums, sums], (2, 1, 4, 3), signature=[2, -1, -1, 3], ValuesCount=2)
    return w.file([both])


def test_sizes_that_are_given_reach_every_operator(agrees):
    """The file declares -1 for all results; they follow from the inputs."""
    model = agrees(signal(), [floats(2, 5)], {"sound": (2, 5)})
    assert [model.main.operands[i].dimensions for i in model.main.outputs] == [(2, 2, 5, 3)]


def test_an_open_size_that_is_needed_is_refused_with_the_remedy():
    """The tensor, its dimensions, and shapes= that can be pasted."""
    with pytest.raises(driver.ImportFailed) as caught:
        importer.read(memoryview(signal()))
    assert caught.value.operator == "BATCH_MATMUL"
    assert "FLOAT32 [0, 0, 1]" in caught.value.reason
    assert caught.value.remedy == "fix its sizes with, for example, shapes={'sound': (1, 512)}"


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"image": (1, 2)}, "names 'image', which is not an input; the inputs are 'sound' [?, ?]"),
        ({"sound": (1, 2, 3)}, "has 3 dimensions; the input is [?, ?]"),
    ],
)
def test_wrong_sizes_are_answered_with_the_right_ones(shapes, reason):
    """A wrong name, and a wrong rank."""
    with pytest.raises(driver.ImportFailed, match=re.escape(reason)):
        importer.read(memoryview(signal()), shapes)


def test_a_size_that_the_file_fixes_cannot_be_changed():
    """The message has the one of the file."""
    w = Writer()
    data = w.file([w.operator("ABS", [w.input((2, 3))], (2, 3))])
    with pytest.raises(driver.ImportFailed, match=re.escape("dimension 1 is 3 in the file; the input is [2, 3]")):
        importer.read(memoryview(data), {"t0": (2, 4)})


def test_shapes_are_computed_at_load_time(agrees):
    """Rows times columns, halved, minus one and so on: integers that are known when the sizes are."""
    w = Writer()
    x = w.input((1, 4), signature=[-1, -1])
    sizes = w.operator("SHAPE", [x], (2,), "int32", OutType=2)
    count = w.operator("REDUCE_PROD", [sizes, w.constant(np.int32([0]))], (1,), "int32", KeepDims=True)
    half = w.operator("FLOOR_DIV", [count, w.constant(np.int32([2]))], (1,), "int32")
    less = w.operator("SUB", [half, w.constant(np.int32([-1]))], (1,), "int32")
    one = w.operator("SUB", [less, half], (1,), "int32")
    shape = w.operator("CONCATENATION", [half, one, w.constant(np.int32([2]))], (3,), "int32")
    y = w.operator("RESHAPE", [x, shape], (2, 1, 2), signature=[-1, -1, 2])
    scalar = w.operator("SQUEEZE", [count], (), "int32", SqueezeDims=[0])
    steps = w.operator(
        "RANGE", [w.constant(np.int32(0)), scalar, w.constant(np.int32(2))], (2,), "int32", signature=[-1]
    )
    agrees(w.file([y, steps]), [floats(2, 6)], {"t0": (2, 6)})


# ---- integers and booleans -------------------------------------------------------------------------------------------

NUMBERS = np.int32([[-(2**31), 2**31 - 1, -1], [2**24 + 1, 0, 65536]])


def test_integers_are_moved_exactly(agrees):
    """RESHAPE, TRANSPOSE, PAD, CONCATENATION, SQUEEZE and PACK keep all 32 bits."""
    w = Writer()
    x = w.input((2, 3), "int32")
    a = w.operator("RESHAPE", [x, w.constant(np.int32([3, 2]))], (3, 2), "int32")
    b = w.operator("TRANSPOSE", [a, w.constant(np.int32([1, 0]))], (2, 3), "int32")
    c = w.operator("PAD", [b, w.constant(np.int32([[0, 0], [1, 0]]))], (2, 4), "int32")
    d = w.operator("CONCATENATION", [c, x], (2, 7), "int32", Axis=1)
    e = w.operator("PACK", [d, d], (2, 2, 7), "int32", ValuesCount=2)
    f = w.operator("EXPAND_DIMS", [e, w.constant(np.int32(1))], (2, 1, 2, 7), "int32")
    y = w.operator("SQUEEZE", [f], (2, 2, 7), "int32", SqueezeDims=[1])
    agrees(w.file([y]), [NUMBERS])


def test_integers_of_64_bits(agrees):
    """They are computed in the 32 bits that the HAL has, inputs and outputs too."""
    w = Writer()
    x = w.input((2, 3), "int64")
    a = w.operator("RESHAPE", [x, w.constant(np.int32([6]))], (6,), "int64")
    y = w.operator("SLICE", [a, w.constant(np.int32([1])), w.constant(np.int32([4]))], (4,), "int64")
    model = agrees(w.file([y]), [NUMBERS.astype(np.int64)])
    assert {model.main.operands[i].type for i in (*model.main.inputs, *model.main.outputs)} == {
        OperandType.TENSOR_INT32
    }


def test_booleans_are_moved(agrees):
    """As 0 and 1."""
    w = Writer()
    x = w.input((2, 3), "bool")
    a = w.operator("RESHAPE", [x, w.constant(np.int32([3, 2]))], (3, 2), "bool")
    b = w.operator("EXPAND_DIMS", [a, w.constant(np.int32(0))], (1, 3, 2), "bool")
    c = w.operator("CONCATENATION", [b, b], (2, 3, 2), "bool")
    y = w.operator("SLICE", [c, w.constant(np.int32([1, 0, 0])), w.constant(np.int32([1, 2, 2]))], (1, 2, 2), "bool")
    agrees(w.file([y]), [np.array([[True, False, True], [True, True, False]])])


# ---- what differs from the HAL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(2, 0, 3, 1, 4), (4, 3, 2, 1, 0), (1, 0, 3, 2, 4)])
def test_five_dimensions_that_are_all_apart(agrees, order):
    """Transposed in several steps."""
    w = Writer()
    x = w.input((6, 4, 5, 6))
    shape = (2, 3, 4, 5, 6)
    wide = w.operator("RESHAPE", [x, w.constant(np.int32(shape))], shape)
    turned = w.operator("TRANSPOSE", [wide, w.constant(np.int32(order))], tuple(shape[i] for i in order))
    agrees(w.file([w.operator("RESHAPE", [turned, w.constant(np.int32([24, 30]))], (24, 30))]), [floats(6, 4, 5, 6)])


def test_of_equal_elements_the_first_is_taken(agrees):
    """By TOPK_V2; the HAL takes the last."""
    w = Writer()
    found = w.operator("TOPK_V2", [w.input((2, 6)), w.constant(np.int32(4))], [(2, 4), (2, 4)], ["float32", "int32"])
    agrees(w.file(list(found)), [np.float32([[1, 2, 2, 0, 2, 0], [0, 0, 0, 0, 0, 0]])])


# ---- all obstacles ---------------------------------------------------------------------------------------------------


def test_every_obstacle_is_named_once():
    """Two operators without a counterpart, and not the one that reads a constant that the first would have given."""
    w = Writer()
    x = w.input((2, 3))
    sizes = w.operator("UNIQUE", [w.constant(np.int32([3, 2]))], [(2,), (2,)], ["int32", "int32"])[0]
    y = w.operator("RESHAPE", [x, sizes], (3, 2))
    z = w.operator("CUMSUM", [y, w.constant(np.int32(0))], (3, 2))
    data = memoryview(w.file([w.operator("EXP", [z], (3, 2)), w.operator("SIGN", [z], (3, 2))]))
    found = importer.convert(data, None)[1]
    assert [(o.operator, o.number) for o in found] == [("UNIQUE", 0), ("CUMSUM", 2), ("SIGN", 4)]
    assert found[1].tensors == ("t4", "t5", "t6")
    assert "'t4', FLOAT32 [3, 2]" in found[1].reason
    with pytest.raises(driver.ImportFailed, match=re.escape("(and 2 more obstacles)")):
        importer.read(data)


def test_obstacles_stop_somewhere():
    """A file of 10,000 operators that are none does not fill the memory with messages."""
    w = Writer()
    x = w.input((2,))
    for _ in range(10_000):
        y = w.operator("SIGN", [x], (2,))
    assert len(importer.convert(memoryview(w.file([y])), None)[1]) == 256


@pytest.mark.parametrize("mutate", ["order", "segments", "indices", "values"])
def test_damaged_sparsity(mutate):
    """Levels, segments, indices and values that do not fit are refused."""
    w = Writer()
    weights = w.sparse(np.float32([[0, 1], [2, 0]]))
    order, blocks, levels = w.tensors[weights]["sparsity"]
    (segments, indices) = levels[1]
    damaged = {
        "order": ([0, 0], blocks, levels),
        "segments": (order, blocks, [levels[0], (segments[:-1], indices)]),
        "indices": (order, blocks, [levels[0], (segments, indices + 7)]),
        "values": (order, blocks, [levels[0], (segments * 0, indices[:0])]),
    }
    w.tensors[weights]["sparsity"] = damaged[mutate]
    data = w.file([w.operator("FULLY_CONNECTED", [w.input((2, 2)), w.operator("DENSIFY", [weights], (2, 2))], (2, 2))])
    with pytest.raises(driver.ImportFailed, match="sparse tensor"):
        importer.read(memoryview(data))
