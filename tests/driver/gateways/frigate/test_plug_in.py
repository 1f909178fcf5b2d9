"""examples/frigate/burst.py, as Frigate loads it."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from frigate_models import NAMES, SIZE, frame_of, rows_for, write_detector
from frigate_stand_ins import config, plug_in

import driver
from burst import BurstError
from driver.errors import DeviceFailed

PLUG_IN = Path(__file__).parents[4] / "examples/frigate/burst.py"


@pytest.fixture(scope="module")
def module():
    return plug_in(PLUG_IN, "burst_plug_in")


@pytest.fixture
def detector(module, tmp_path):
    model = write_detector(tmp_path / "yolox.onnx", "yolox")
    its = module.BurstDetector(config(model, "yolox", SIZE, device="onnxruntime"))
    yield its
    its.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_type(module, name, tmp_path):
    """The boxes of each type, from frames that Frigate has transposed, too."""
    dtype, layout = ("uint8", "nhwc") if name == "ssd" else ("float32", "nchw")
    model = write_detector(tmp_path / "model.onnx", name, dtype, layout)
    detector = module.BurstDetector(config(model, name, SIZE, device="onnxruntime"))
    for pixel in (0.0, 0.2, 1.0):
        frame = frame_of(pixel, dtype, layout)
        turned = np.ascontiguousarray(frame.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        for one in (frame, turned):
            np.testing.assert_allclose(detector.detect_raw(one), rows_for(pixel), atol=1e-6)
    detector.close()


def test_the_device_dies(detector):
    """After kill -9 of the device the next answer is right: no zeros. bench/gateways.py measures how soon it comes."""
    for n in range(30):
        if n % 10 == 5:
            with driver.connect("onnxruntime") as device:
                os.kill(device.engine_pid, signal.SIGKILL)
        found = detector.detect_raw(frame_of(n / 30))
        np.testing.assert_allclose(found, rows_for(n / 30), atol=1e-6)


@pytest.mark.parametrize("frame", [frame_of(0, "uint8"), frame_of(0, layout="nhwc"), np.zeros((1, 3, 32, 32), "f4")])
def test_wrong_frames_raise(detector, frame):
    """They are no frames in which nothing is."""
    with pytest.raises(ValueError, match="in Frigate's configuration"):
        detector.detect_raw(frame)
    np.testing.assert_allclose(detector.detect_raw(frame_of(0.5)), rows_for(0.5), atol=1e-6)


def test_a_device_that_is_gone_raises(detector):
    """What cannot be looked at raises, each time."""
    detector.close()
    for _ in range(2):
        with pytest.raises((BurstError, ValueError, RuntimeError)):
            detector.detect_raw(frame_of(0))


def test_a_model_of_another_type(module, tmp_path):
    """Is refused when Frigate begins."""
    model = write_detector(tmp_path / "m.onnx", "rfdetr")
    with pytest.raises(DeviceFailed, match="say --model-type rfdetr"):
        module.BurstDetector(config(model, "yolox", SIZE, device="onnxruntime"))
