"""`burst serve litert --frigate ADDRESS --model FILE.tflite --model-type ssd`, on a file like Frigate's own."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from frigate_models import Asker, rows_for, serving
from frigate_ssd import frame_of_bytes, write_ssd

import driver

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from ai_edge_litert.interpreter import Interpreter

CLIENT = """
import sys
from frigate_models import *
from frigate_ssd import *
with Asker(sys.argv[1]) as asker:
    said = json.loads(asker.ask({"model_request": True, "model_name": "ssd.tflite"})[0])
    assert said["model_available"] and said["model_loaded"], said
    for n in range(int(sys.argv[2])):
        frame = frame_of_bytes(n / 10 % 1)
        np.testing.assert_allclose(asker.look(frame, "ssd"), rows_for(frame.flat[0] / 255), atol=1e-6)
print("right")
"""


def client(address, frames):
    """A process that looks at so many frames, and compares what is found."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", CLIENT, address, str(frames)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def frigates_own(path, frame):
    """What Frigate's cpu detector makes of the four outputs of LiteRT, in their order."""
    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], frame)
    interpreter.invoke()
    boxes, kinds, scores, count = (interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details())
    rows = np.zeros((20, 6), np.float32)
    for n in range(int(count[0])):
        if scores[0, n] >= 0.4:
            rows[n] = [kinds[0, n], scores[0, n], *boxes[0, n]]
    return rows


@pytest.mark.integration
@pytest.mark.parametrize("has_shapes", [True, False])
def test_the_boxes_that_frigate_itself_would_find(tmp_path, has_shapes):
    """Bit for bit, whether or not the file says the shapes of what TFLite_Detection_PostProcess makes."""
    model, address = write_ssd(tmp_path / "ssd.tflite", has_shapes), f"ipc://{tmp_path}/zmq_detector"
    with serving("litert", address, model, "ssd") as (process, _), Asker(address) as asker:
        assert stat.S_ISSOCK(os.stat(tmp_path / "zmq_detector").st_mode)
        for pixel in (0.0, 0.3, 1.0):
            frame = frame_of_bytes(pixel)
            found = asker.look(frame, "ssd")
            np.testing.assert_array_equal(found, frigates_own(model, frame))
            np.testing.assert_allclose(found, rows_for(frame.flat[0] / 255), atol=1e-6)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.integration
def test_kills_among_the_frames_of_four_clients(tmp_path):
    """Four processes look at frames while the device is killed twice: each answer is right."""
    model, address = write_ssd(tmp_path / "ssd.tflite"), f"ipc://{tmp_path}/zmq_detector"
    with serving("litert", address, model, "ssd"), Asker(address) as asker:
        clients = [client(address, 150) for _ in range(4)]
        for _ in range(2):
            asker.look(frame_of_bytes(0.5), "ssd")
            with driver.connect("litert") as device:
                os.kill(device.engine_pid, signal.SIGKILL)
        assert [each.communicate(timeout=120)[0] for each in clients] == ["right\n"] * 4


@pytest.mark.integration
def test_frames_for_another_model(tmp_path):
    """Are refused with what to change in Frigate's configuration."""
    model, address = write_ssd(tmp_path / "ssd.tflite"), f"ipc://{tmp_path}/s"
    with serving("litert", address, model, "ssd"), Asker(address) as asker:
        frame = frame_of_bytes(0)
        assert "set model.input_dtype to int" in asker.look(frame.astype(np.float32), "ssd")
        assert "model.input_tensor to nhwc" in asker.look(frame.transpose(0, 3, 1, 2), "ssd")
        assert "set model.width to 300" in asker.look(np.zeros((1, 320, 320, 3), np.uint8), "ssd")
