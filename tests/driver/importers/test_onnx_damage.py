"""Files that are damaged, or made to do harm: refused, at once and in little memory."""

import random
from functools import partial
from pathlib import Path

import fuzz_onnx
import numpy as np
import pytest
import stress
from fuzzer_runs import finds_nothing
from onnx import TensorProto, helper
from onnx_cases import CASES
from refusals import refused

import driver
from driver.importers.onnx import graph as onnx_graph
from driver.importers.onnx import reader as onnx

PROGRAM = Path(fuzz_onnx.__file__)
refuse = partial(refused, onnx.read)


def test_mutants_find_nothing(tmp_path):
    """Two thousand: refused with ImportFailed or valid, none slow; some of both."""
    count, accepted = finds_nothing(PROGRAM, tmp_path, 2000, seed=1, patience=90)
    assert count == 2000
    assert 20 < accepted < 1000


@pytest.mark.stress
def test_a_million_mutants_find_nothing(tmp_path, tally):
    """The same with a million, or as many as the budget allows, from another seed each time."""
    seed, times = random.randrange(1, 2**31), stress.times(1_000_000)
    count, accepted = finds_nothing(PROGRAM, tmp_path, times, seed, patience=3600)
    tally("mutants of .onnx", count)
    assert count == times
    assert accepted > stress.times(1000)


@pytest.mark.parametrize("name", ["Conv", "LSTM", "Resize nearest asymmetric", "Gemm with a scale per unit of int8"])
def test_a_truncated_file_never_does_harm(name):
    """Cut after any byte, it is refused, or is the model that its first fields say; its weights are never short."""
    data = CASES[name].data
    for length in range(len(data)):
        fuzz_onnx.accepts(data[:length])


@pytest.mark.parametrize("data", [b"\x3a", b"\x3a\xff\xff\xff\xff\x0f", b"\x3a" + b"\xff" * 12, b"\x3b\x3c", bytes(64)])
def test_what_is_no_protocol_buffer(data):
    """Too short, of lengths that lead outside, or of integers without end."""
    refuse(data, "damaged")


def test_an_empty_file(tmp_path):
    """It cannot be mapped; that is said as of any other damage."""
    (tmp_path / "model.onnx").touch()
    with pytest.raises(driver.ImportFailed, match="empty"):
        driver.load(tmp_path / "model.onnx")


def field(number, data):
    """One field of a protocol buffer."""
    length, size = b"", len(data)
    while size >= 128:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


OPSET = field(8, b"\x10\x11")


@pytest.mark.integration
def test_millions_of_empty_operators():
    """Two bytes each; as objects they would take a hundred times as much."""
    data = OPSET + field(7, field(1, b"") * 2_000_000)
    with pytest.raises(driver.ImportFailed, match="more than 524288 fields"):
        onnx.read(memoryview(data))


def test_messages_within_messages():
    """Only those that have a meaning are entered, so depth costs nothing."""
    inner = b""
    for _ in range(20_000):
        inner = field(6, inner[-4000:])
    refuse(OPSET + field(7, field(1, field(5, inner))), "has no result")


def test_many_operators():
    """Their number is limited, whatever they do."""
    nodes = field(1, field(1, b"x") + field(2, b"y") + field(4, b"Abs")) * 20_000
    refuse(OPSET + field(7, nodes), "more than 16384 operators", room=1 << 25)


def model(nodes, dims, constants):
    """A file whose tensors claim what they like."""
    tensors = [helper.make_tensor(name, TensorProto.INT64, [len(v)], v) for name, v in constants.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)]
    outputs = [helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


@pytest.mark.parametrize("kind", ["ConstantOfShape", "Expand", "Range"])
def test_a_constant_of_a_billion_elements(kind):
    """What a few bytes ask for is not made."""
    constants = {"s": [2**15, 2**15]} if kind != "Range" else {"a": [0], "b": [2**30], "c": [1]}
    first = {"ConstantOfShape": ["s"], "Expand": ["one", "s"], "Range": ["a", "b", "c"]}[kind]
    nodes = [helper.make_node(kind, first, ["c0"]), helper.make_node("Cast", ["c0"], ["c1"], to=1)]
    nodes.append(helper.make_node("Add", ["x", "c1"], ["y"]))
    refuse(model(nodes, [1], constants | {"one": [1]}), "elements computed")


def test_constants_that_double_again_and_again():
    """Each step is small, and all of them together are charged."""
    nodes = [helper.make_node("Concat", [f"c{i}", f"c{i}"], [f"c{i + 1}"], axis=0) for i in range(40)]
    nodes.append(helper.make_node("Reshape", ["x", "c40"], ["y"]))
    refuse(model(nodes, [4], {"c0": [1]}))


def test_a_filter_that_is_used_a_thousand_times():
    """It is copied into another order each time, but not for ever."""
    nodes = [helper.make_node("Conv", [f"x{i}" if i else "x", "w"], [f"x{i + 1}"]) for i in range(1000)]
    nodes.append(helper.make_node("Abs", ["x1000"], ["y"]))
    weights = helper.make_tensor("w", TensorProto.FLOAT, [64, 64, 1, 1], np.zeros(4096, np.float32))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64, 4, 4])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_empty_tensor_value_info("y")], [weights])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    refuse(made.SerializeToString(), "repeatedly", room=1 << 24)


def test_weights_without_elements():
    """They may claim any number of units, and get no biases for them."""
    weights = helper.make_tensor("w", TensorProto.FLOAT, [2**40, 0], b"", raw=True)
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_empty_tensor_value_info("y")], [weights])
    refuse(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


@pytest.mark.integration
def test_operators_that_become_many_operations(monkeypatch):
    """A GRU is taken apart into its steps, and the operations of a model are counted: a thousand here, not 32,768."""
    monkeypatch.setattr(onnx_graph, "_MOST_OPERATIONS", 1000)
    arrays = {"w": np.zeros((1, 3, 1), np.float32), "r": np.zeros((1, 3, 1), np.float32)}
    nodes = [helper.make_node("GRU", ["x", "w", "r"], [f"y{i}"], hidden_size=1) for i in range(2000)]
    tensors = [helper.make_tensor(name, TensorProto.FLOAT, a.shape, a) for name, a in arrays.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [128, 1, 1])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_empty_tensor_value_info("y0")], tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    refuse(made.SerializeToString(), "more than 1000 operations", room=1 << 23)


def test_names_that_refer_to_what_comes_later():
    """Operators are read in the order of the file."""
    nodes = [helper.make_node("Abs", ["z"], ["y"]), helper.make_node("Abs", ["x"], ["z"])]
    refuse(model(nodes, [1], {}), "nothing gives 'z' a value")


def test_a_name_that_is_given_twice():
    """A value is computed once."""
    nodes = [helper.make_node("Abs", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])]
    refuse(model(nodes, [1], {}), "has a value already")
