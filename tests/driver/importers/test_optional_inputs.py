"""Inputs for which an .onnx file has a value: they are given, or left out, as in ONNX Runtime in this process."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import burst
import driver

F = TensorProto.FLOAT


def written(path, size=4, ir_version=9, weights=0):
    """(x * scale + w) - bias, where scale and bias have values in the file. weights: further such inputs."""
    value, from_array = helper.make_tensor_value_info, numpy_helper.from_array
    steps = [("Mul", "x", "scale", "a"), ("Add", "a", "w", "b"), ("Sub", "b", "bias", "y")]
    held = {"scale": np.float32(2), "bias": np.arange(size, dtype=np.float32), "w": np.ones(size, np.float32)}
    held |= {f"weight{n}": np.ones(size, np.float32) for n in range(weights)}
    inputs = [value("scale", F, []), value("x", F, ["n", size]), value("bias", F, [size])]
    graph = helper.make_graph(
        [helper.make_node(kind, [a, b], [y]) for kind, a, b, y in steps],
        "g",
        inputs + [value(f"weight{n}", F, [size]) for n in range(weights)],
        [value("y", F, ["n", size])],
        [from_array(array, name) for name, array in held.items()],
    )
    opset = [helper.make_opsetid("", 18)]
    path.write_bytes(helper.make_model(graph, opset_imports=opset, ir_version=ir_version).SerializeToString())
    return path


@pytest.mark.parametrize("size", [4, 4096])
def test_they_are_given_or_left_out(tmp_path, home, size):
    """By name and by position, with run and in a burst whose requests differ; also when it comes from the cache."""
    ort = pytest.importorskip("onnxruntime", reason="no onnxruntime")
    path = written(tmp_path / "net.onnx", size)
    session, model = ort.InferenceSession(str(path)), driver.load(path)
    assert [(t.name, t.optional) for t in model.inputs] == [("x", False), ("scale", True), ("bias", True)]
    x = np.random.default_rng(1).standard_normal((3, size)).astype(np.float32)
    scale, bias = np.array(5, np.float32), np.full(size, 7, np.float32)
    rows = [
        {"x": x},
        {"x": x, "scale": scale},
        {"x": x, "bias": bias},
        {"x": x, "scale": scale, "bias": bias},
        {"x": x},
    ]
    wanted = [session.run(None, feeds)[0] for feeds in rows]
    for _ in range(2):
        with driver.compile(model, ["onnxruntime"], cache_dir=tmp_path / "cache") as compiled:
            for feeds, expected in zip(rows, wanted, strict=True):
                np.testing.assert_array_equal(compiled.run(feeds)[0], expected)
            np.testing.assert_array_equal(compiled.run(x)[0], wanted[0])
            np.testing.assert_array_equal(compiled.run(x, scale)[0], wanted[1])
            with compiled.burst(input_shapes={"x": x.shape}) as burst:
                assert burst.inputs[1:] == (None, None)
                for feeds, expected in zip(rows, wanted, strict=True):
                    np.testing.assert_array_equal(burst.run(feeds).outputs[0], expected)
                np.testing.assert_array_equal(burst.run(x).outputs[0], wanted[0])


def test_without_them(tmp_path, home):
    """Where they are not wanted, in operations form, and where an exporter lists weights among the inputs."""
    path = written(tmp_path / "net.onnx")
    for model in (
        driver.load(path, optional=False),
        driver.load(path, {"x": (2, 4)}, "operations"),
        driver.load(written(tmp_path / "old.onnx", ir_version=3)),
        driver.load(written(tmp_path / "weights.onnx", weights=20)),
    ):
        assert [tensor.name for tensor in model.inputs] == ["x"]
    x = np.ones((2, 4), np.float32)
    with driver.compile(driver.load(path, optional=False)) as compiled:
        np.testing.assert_array_equal(compiled.run(x)[0], x * 2 + 1 - np.arange(4, dtype=np.float32))


def test_the_check_says_which(tmp_path, home):
    """And what is missing when another input is left out is told by its name."""
    path = written(tmp_path / "net.onnx")
    assert driver.check(path).offers == (
        "input scale: float32 [], which may be left out",
        "input bias: float32 [4], which may be left out",
    )
    pytest.importorskip("onnxruntime", reason="no onnxruntime")
    with (
        driver.compile(driver.load(path), ["onnxruntime"]) as compiled,
        pytest.raises(burst.InvalidArgument, match=r"input 0 \(x\): no input of an .onnx file may be omitted"),
    ):
        compiled.run(scale=np.float32(1))
