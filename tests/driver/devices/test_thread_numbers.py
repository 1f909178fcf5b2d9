"""Devices that choose their own number of threads: which models leave it open, and that what was measured is obeyed."""

import numpy as np
import pytest
from onnx import helper
from onnx_files import file_model, written

import driver
from driver.devices.litert import LiteRtDevice
from driver.devices.onnxruntime import OnnxRuntimeDevice
from driver.devices.onnxruntime.session_settings import SessionSettings
from driver.interface import BindOptions, Preparation

DEVICES = [LiteRtDevice, OnnxRuntimeDevice]
X = np.random.default_rng(0).standard_normal((4, 256), np.float32)
W = np.random.default_rng(1).standard_normal((256, 256), np.float32)


def operations(width=256):
    """A model of operations: a product with a square matrix."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (4, width))
    builder.output(builder.operation("FULLY_CONNECTED", x, W[:width, :width], np.zeros(width, np.float32), 0))
    return builder.build()


def onnx(settings=b"", width=256):
    """The same as a file, with settings that a program has asked for."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    ports = [("x", "float32", (4, width))], [("y", "float32", (4, width))]
    return file_model(written([node], *ports, {"w": W[:width, :width]}) + settings)


def results(prepared):
    found = np.zeros(X.nbytes, np.uint8)
    prepared.bind([X], [found], BindOptions()).run()
    return found.tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_that_nobody_has_said_is_open(device):
    """What was measured takes the place of what the device thinks of the model's size, with the same bits."""
    usual, other = (device().prepare(operations(), Preparation(threads=n)) for n in (0, 2))
    assert (usual.threads, other.threads) == (1, 2)
    assert results(usual) == results(other)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_said_wins(device):
    """An option of the device, and a preference that says how many; nothing else is measured then."""
    said = device(threads=1).prepare(operations(), Preparation(threads=2))
    assert said.threads == 0
    for preference in ("low_power", "sustained_speed"):
        assert device().prepare(operations(), Preparation(preference, threads=2)).threads == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_model_has_no_choice(device):
    """It has no parts that are worth a thread, and keeps its native runs."""
    assert device().prepare(operations(16), Preparation()).threads == 0


def test_files():
    """A program's own number wins below `burst exec`; where it says none, a session has one for each core at first."""
    device = OnnxRuntimeDevice()
    prepared = [device.prepare(onnx(), Preparation(threads=n)) for n in (0, 1, 2)]
    assert [each.threads for each in prepared] == [1, 1, 2]
    assert len({results(each) for each in prepared}) == 1
    asked = SessionSettings(threads=2).encoded()
    assert device.prepare(onnx(asked), Preparation(threads=1)).threads == 0
    default = SessionSettings().encoded()
    assert device.prepare(onnx(default), Preparation(threads=1)).threads == 1
    assert device.prepare(onnx(default), Preparation()).threads >= 1
