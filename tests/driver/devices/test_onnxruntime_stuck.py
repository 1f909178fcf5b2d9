"""Runs of .onnx files that go on and on: their clients' deadlines hold, and other clients of the device go on."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_files import file_model, value, written

import driver
from burst import MissedDeadlinePersistent, MissedDeadlineTransient, Timeout

pytestmark = pytest.mark.integration

pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

node = helper.make_node
X = np.ones(4, np.float32)


def neg():
    return written([node("Neg", ["x"], ["y"])], [("x", "float32", [4])], [("y", "float32", [4])])


def huge_conv():
    """One operation that takes many seconds: a kernel of 256 x 256 on an image of 1024 x 1024."""
    sides = [("x", "float32", [1, 1, 1024, 1024]), ("w", "float32", [1, 1, 256, 256])]
    return written([node("Conv", ["x", "w"], ["y"])], sides, [("y", "float32", [1, 1, 769, 769])])


def endless_loop():
    """y = x + 1 + 1 + … while k."""
    body = helper.make_graph(
        [node("Identity", ["k"], ["again"]), node("Add", ["a", "one"], ["b"])],
        "body",
        [value("i", "int64", []), value("k", "bool", []), value("a", "float32", [4])],
        [value("again", "bool", []), value("b", "float32", [4])],
        [helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])],
    )
    loop = node("Loop", ["", "k", "x"], ["y"], body=body)
    return written([loop], [("k", "bool", []), ("x", "float32", [4])], [("y", "float32", [4])])


CASES = {
    "huge Conv": (huge_conv, [np.zeros((1, 1, 1024, 1024), np.float32), np.zeros((1, 1, 256, 256), np.float32)], True),
    "endless Loop": (endless_loop, [np.array(True), X], False),
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", CASES)
def test_a_run_without_end(process, name):
    """A Loop ends at its deadline. One Conv cannot be stopped: the engine ends a second later, and others recover."""
    make, feeds, ends_engine = CASES[name]
    with (
        driver.connect("onnxruntime") as device,
        driver.connect("onnxruntime") as other,
        other.prepare(file_model(neg())) as neighbour,
        neighbour.burst(recover=True) as burst,
        device.prepare(file_model(make())) as prepared,
    ):
        engine = process(device.engine_pid)
        assert (burst.run(X).outputs[0] == -1).all()
        with pytest.raises((MissedDeadlinePersistent, MissedDeadlineTransient, Timeout)):
            prepared.run(*feeds, timeout=0.5)
        assert engine.has_ended(5.0 if ends_engine else 2.5) == ends_engine
        for n in range(3):
            assert (burst.run(X * n).outputs[0] == -n).all()
