"""With the module of Frigate's zmq detector itself, and its own reading of outputs, from a checkout at FRIGATE_SOURCE.

    FRIGATE_SOURCE=~/frigate make integration

Without one nothing can be tried here: Frigate is not on PyPI, and nothing of it is copied into this repository.
"""

import importlib.util
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import zmq
from frigate_models import NAMES, SIZE, frame_of, frigate_source, outputs_for, rows_for, serving, write_detector
from frigate_stand_ins import plug_in, with_contexts, zmq_config

import driver
from driver.gateways.frigate import FrameDetector

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not frigate_source(), reason="FRIGATE_SOURCE names no checkout of Frigate"),
]


@pytest.fixture(scope="module")
def module():
    return plug_in(Path(frigate_source()) / "frigate/detectors/plugins/zmq_ipc.py", "zmq_ipc")


@pytest.fixture
def detector_of(module, tmp_path):
    """Makes a server, and the real detector before it."""
    servers, contexts = [], []

    def make_context():
        contexts.append(zmq.Context())
        return contexts[-1]

    with_contexts(module, make_context)

    def make(model_type, dtype="float32", layout="nchw", file="m.onnx", said=None):
        model = write_detector(tmp_path / "m.onnx", model_type, dtype, layout)
        server = serving("onnxruntime", f"ipc://{tmp_path}/s", model, model_type)
        server.__enter__()
        servers.append(server)
        options = zmq_config(f"ipc://{tmp_path}/s", tmp_path / file, said or model_type, SIZE)
        return module.ZmqIpcDetector(options)

    yield make
    for context in contexts:
        context.destroy(linger=0)
    for server in servers:
        server.__exit__(None, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_boxes(detector_of, name):
    """The real detector reads the boxes that are in its frames."""
    detector = detector_of(name)
    for pixel in (0.0, 0.5, 1.0):
        np.testing.assert_allclose(detector.detect_raw(frame_of(pixel)), rows_for(pixel), atol=1e-6)


def test_errors_are_no_zeros(detector_of):
    """What the real detector reads of a refusal has no rows, and cannot be copied where Frigate puts twenty."""
    detector = detector_of("yolox")
    for frame in (frame_of(0, "uint8"), frame_of(0, layout="nhwc")):
        found = detector.detect_raw(frame)
        assert found.shape == (0, 6)
        with pytest.raises(ValueError, match="broadcast"):
            np.zeros((20, 6), np.float32)[:] = found[:]
    np.testing.assert_allclose(detector.detect_raw(frame_of(0.5)), rows_for(0.5), atol=1e-6)


@pytest.mark.parametrize("wrong", [{"file": "other.onnx"}, {"said": "yolo-generic"}])
def test_another_model(detector_of, wrong):
    """A detector that is configured for another file or type reads refusals, and no boxes."""
    assert detector_of("yolox", **wrong).detect_raw(frame_of(0)).shape == (0, 6)


def test_the_device_dies(detector_of):
    """kill -9 of the device among the real detector's frames: each gets its boxes."""
    detector = detector_of("yolo-generic")
    for n in range(20):
        if n == 10:
            with driver.connect("onnxruntime") as device:
                os.kill(device.engine_pid, signal.SIGKILL)
        np.testing.assert_allclose(detector.detect_raw(frame_of(n / 20)), rows_for(n / 20), atol=1e-6)


def test_outputs_mean_what_they_mean_to_frigate(tmp_path):
    """Frigate's own functions for ONNX models read the same rows from the same outputs."""
    if importlib.util.find_spec("onnxruntime") is None:
        pytest.fail("Frigate's functions need onnxruntime")
    theirs = plug_in(Path(frigate_source()) / "frigate/util/model.py", "frigate_model_util")
    shape = (1, 3, SIZE, SIZE)
    read = {
        "yolo-generic": lambda outputs: theirs.post_process_yolo(outputs, SIZE, SIZE),
        "rfdetr": theirs.post_process_rfdetr,
        "dfine": lambda outputs: theirs.post_process_dfine([o[0] for o in outputs], SIZE, SIZE),
    }
    for name, function in read.items():
        detector = FrameDetector(write_detector(tmp_path / f"{name}.onnx", name), name)
        outputs = outputs_for(name, 0.5)
        np.testing.assert_allclose(detector.rows(outputs, shape), function([o.copy() for o in outputs]), atol=1e-5)
    anchors = np.random.default_rng(3).random((3, 85)).astype(np.float32) * 0.3
    grids = [np.zeros((1, 255, SIZE // s, SIZE // s), np.float32) for s in (8, 16, 32)]
    for grid, values in zip(grids, anchors, strict=True):
        values[4:6] = 0.9
        grid[0, :85, 0, 0] = values
    outputs = {f"grid{n}": (grid, 0) for n, grid in enumerate(grids)}
    write_detector(tmp_path / "grids.onnx", "yolo-generic", outputs=outputs)
    detector = FrameDetector(tmp_path / "grids.onnx", "yolo-generic")
    ours, its = detector.rows(grids, shape), theirs.post_process_yolo(grids, SIZE, SIZE)
    assert np.count_nonzero(ours[:, 1]) == np.count_nonzero(its[:, 1]) > 0
    np.testing.assert_allclose(np.clip(ours, 0, 1), np.clip(its, 0, 1), atol=1e-5)
