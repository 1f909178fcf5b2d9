"""Booleans are numpy's in every array that a client gives and gets; a byte in memory may have any value."""

from functools import partial

import numpy as np
import pytest

import driver
from driver.client.workspace import InputSet, OutputSet, Workspace
from driver.vts.file_models import Network, NetworkPort, NetworkStep

MASK = np.array([True, False, True])
BYTES = np.array([2, 0, 255], np.uint8)


def negation():
    """Of the HAL's operations."""
    m = driver.ModelBuilder()
    m.output(m.operation("LOGICAL_NOT", m.input("bool8", (3,))))
    return m.build()


def file(kind):
    return Network(
        (NetworkPort("x", "bool", (3,)),), (NetworkPort("y", "bool", (3,)),), (NetworkStep("NOT", ("x",), "y"),)
    ).model(kind)


MODELS = {
    "reference": negation,
    "litert": negation,
    "onnxruntime": negation,
    "a .tflite file": partial(file, "tflite"),
    "a .onnx file": partial(file, "onnx"),
    "a .onnx file in openvino": partial(file, "onnx"),
}
DEVICES = {"a .tflite file": "litert", "a .onnx file": "onnxruntime", "a .onnx file in openvino": "openvino"}
PACKAGES = {"litert": "ai_edge_litert", "onnxruntime": "onnxruntime", "openvino": "openvino", "reference": "driver"}


@pytest.fixture(params=MODELS)
def prepared(request, home):
    name = DEVICES.get(request.param, request.param)
    pytest.importorskip(PACKAGES[name], reason=f"no device {name}")
    with driver.connect(name) as device, device.prepare(MODELS[request.param]()) as found:
        yield found


def same(array, expected):
    assert (array.dtype, array.tolist()) == (np.bool_, expected.tolist())


def test_every_way_in_and_out(prepared):
    """In what a model says, in a burst's own arrays, and in results of each path; masks mask."""
    assert [tensor.dtype for tensor in (*prepared.model.inputs, *prepared.model.outputs)] == [np.bool_] * 2
    same(prepared.run(MASK)[0], ~MASK)
    with prepared.burst() as burst:
        burst.inputs[0][:] = MASK
        for _ in range(3):  # the last ones in one C call each
            same(burst.run().outputs[0], ~MASK)
        same(burst.submit(MASK).result().outputs[0], ~MASK)
        assert np.arange(3)[burst.run(MASK).outputs[0]].tolist() == [1]


def test_bytes_of_any_value(prepared):
    """Every byte but 0 is True, in an array of bytes and in shared memory; what comes back is 0 or 1."""
    same(prepared.run(BYTES)[0], ~MASK)
    workspace = Workspace(InputSet(prepared.model, ((3,),)), OutputSet(prepared.model))
    workspace.inputs.arrays[0].view(np.uint8)[:] = BYTES
    (found,) = prepared.execute(workspace.request).outputs
    same(found, ~MASK)
    assert found.view(np.uint8).max() == 1


def test_what_a_boolean_input_takes(device):
    """Booleans, bytes, and integers that are 0 or 1; another number is named."""
    with device.prepare(negation()) as prepared:
        for given in (MASK.tolist(), [1, 0, 1], MASK.astype(np.int64)):
            same(prepared.run(given)[0], ~MASK)
        with pytest.raises(ValueError, match=r"input 0 holds 300; the model takes bool, from 0 to 1"):
            prepared.run(np.array([0, 300, 1]))
        with pytest.raises(ValueError, match=r"has dtype float32; the model takes bool"):
            prepared.run(np.ones(3, np.float32))


def test_a_byte_that_a_device_has_not_made_0_or_1():
    """numpy's masks and conditions take it for True: a device cannot lead them out of an array."""
    for size in (3, 64, 1000, 100001):
        bytes_ = np.resize(np.array([0, 2, 255, 1], np.uint8), size)
        mask, wanted = bytes_.view(np.bool_), np.flatnonzero(bytes_)
        assert np.array_equal(np.arange(size)[mask], wanted)
        assert np.array_equal(np.flatnonzero(mask), wanted)
        assert mask.sum() == np.count_nonzero(mask) == wanted.size
        assert np.array_equal(np.where(mask, 1, 0), ~~mask)
        assert np.array_equal(~mask, bytes_ == 0)
