"""`burst serve DEVICE --frigate ADDRESS`, asked as Frigate's detector asks."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from frigate_models import Asker, frame_of, rows_for, serving, write_detector
from frigate_ssd import write_ssd

import driver

RECORDED = Path(__file__).parent / "recorded.json"
EXCHANGES = json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A yolo-generic model on ONNX Runtime."""
    folder = tmp_path_factory.mktemp("door")
    model = write_detector(folder / "yolo.onnx", "yolo-generic")
    address = f"ipc://{folder}/s"
    with serving("onnxruntime", address, model, "yolo-generic", "--metrics", "127.0.0.1:0") as (process, said):
        assert said["frigate"] == address
        yield SimpleNamespace(address=address, metrics=said["metrics"], folder=folder, process=process)


@pytest.fixture
def asker(server):
    with Asker(server.address) as its:
        yield its


def assert_seen(asker, pixel=0.5):
    np.testing.assert_allclose(asker.look(frame_of(pixel)), rows_for(pixel), atol=1e-6)


@pytest.mark.integration
@pytest.mark.parametrize("name", sorted(EXCHANGES))
def test_recorded_exchanges(name, tmp_path):
    """What Frigate's own module sent gets, byte for byte, what was answered when it was recorded."""
    its = EXCHANGES[name]
    if its["device"] == "litert":
        model = write_ssd(tmp_path / its["model"])
    else:
        model = write_detector(tmp_path / its["model"], its["model_type"], its["dtype"], its["layout"])
    address = f"ipc://{tmp_path}/s"
    with serving(its["device"], address, model, its["model_type"]), Asker(address) as asker:
        for exchange in its["exchanges"]:
            sent, answered = ([zlib.decompress(base64.b64decode(p)) for p in exchange[way]] for way in ("sent", "got"))
            assert asker.ask(*sent) == answered


def test_frames(asker):
    """Each frame gets the boxes that are in it; the model is there, whatever else is asked."""
    (said,) = asker.ask({"model_request": True, "model_name": "yolo.onnx"})
    assert json.loads(said) == {"model_available": True, "model_loaded": True, "model_name": "yolo.onnx"}
    for n in range(20):
        assert_seen(asker, n / 20)


class TestRefused:
    """An answer without rows, which says why; the next frame is seen."""

    @pytest.mark.parametrize(
        ("frame", "told"),
        [
            (frame_of(0, "uint8"), "set model.input_dtype to float"),
            (frame_of(0, layout="nhwc"), "model.input_tensor to nchw"),
            (np.zeros((1, 3, 1000, 1000), np.float32), "set model.width to 64"),
        ],
    )
    def test_wrong_frames(self, asker, frame, told):
        """Of another type, layout or size."""
        assert told in asker.look(frame)
        assert_seen(asker)

    @pytest.mark.parametrize(
        ("parts", "told"),
        [
            ([b"\xff"], "not valid JSON"),
            ([b"{}"], "shape None"),
            ([b" " * 5000], "a header of 5000 bytes"),
            ([{"shape": [1, 3, 64, 64], "dtype": "float32"}], "without its bytes"),
            ([{"shape": [1, 3, 64, 64], "dtype": "float32"}, bytes(4 * 3 * 64 * 64), b""], "of more parts"),
            ([{"shape": [1, 3, 64, 64], "dtype": "float32"}, b"12", b""], "a frame of 2 bytes"),
            ([{"shape": [1, 3, 64, 64], "dtype": "float32"}, b"1234"], "a frame of 4 bytes"),
        ],
    )
    def test_malformed_messages(self, asker, parts, told):
        """Headers that are none, parts that are missing, too many or too short."""
        head, body = asker.ask(*parts)
        assert told in json.loads(head)["error"]
        assert body == b""
        assert_seen(asker)

    def test_another_model_type(self, asker):
        """Frigate says in each frame which type it is configured for."""
        assert "set model.model_type to yolo-generic" in asker.look(frame_of(0), "yolox")
        assert_seen(asker)

    def test_another_model(self, asker, server):
        """A detector that is configured for another file gets no boxes of this one; the other detectors do."""
        (said,) = asker.ask({"model_request": True, "model_name": "other.onnx"})
        assert "model.path the same file name" in json.loads(said)["error"]
        assert "'other.onnx'" in asker.look(frame_of(0))
        with Asker(server.address) as other:
            assert_seen(other)
        asker.ask({"model_request": True, "model_name": "yolo.onnx"})
        assert_seen(asker)

    def test_a_model_file(self, asker):
        """Is not taken, and the detector is told so."""
        (said,) = asker.ask({"model_data": True, "model_name": "yolo.onnx"}, b"a model")
        assert json.loads(said)["model_loaded"] is False
        assert_seen(asker)

    def test_no_place_for_an_answer(self, asker, server):
        """A message of no REQ socket is dropped, and the others are answered."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(server.address)
            for parts in ([b""], [b"x"], [b"x", b"y"], [b"", b"{}"]):
                dealer.send_multipart(parts)
            assert dealer.poll(30_000)  # the last one is what a REQ socket sends
            assert json.loads(dealer.recv_multipart()[1])["shape"] == [0, 6]
        assert_seen(asker)

    def test_too_large(self, asker):
        """However large it is, what is refused is told, and the next frame is seen."""
        large = bytes(80 << 20)
        assert json.loads(asker.ask({"model_data": True, "model_name": "yolo.onnx"}, large)[0])["model_saved"] is False
        head, _ = asker.ask({"shape": [1, 3, 64, 64], "dtype": "float32"}, large)
        assert "a frame of 83886080 bytes" in json.loads(head)["error"]
        assert_seen(asker)


@pytest.mark.integration
def test_detectors_that_vanish(asker, server):
    """kill -9 of detectors between question and answer: the others go on, and no answer goes astray."""
    program = (
        "import sys, os, signal\nfrom frigate_models import *\n"
        "a = Asker(sys.argv[1]); f = frame_of(0.9)\n"
        "a.look(f)\nh = json.dumps({'shape': list(f.shape), 'dtype': 'float32'}).encode()\n"
        "a.socket.send_multipart([h, f.tobytes()]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, server.address]
    many = [subprocess.Popen(command, env=environment) for _ in range(4)]
    while any(one.poll() is None for one in many):
        assert_seen(asker, 0.1)
    assert {one.returncode for one in many} == {-signal.SIGKILL}
    assert_seen(asker, 0.2)


def test_many_detectors(server):
    """Eight at once: each gets the boxes of its own frames."""
    wrong = []

    def ask(number):
        try:
            with Asker(server.address) as its:
                for n in range(25):
                    assert_seen(its, (number * 25 + n) / 200)
        except BaseException as error:  # noqa: BLE001 (told by the main thread)
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


def test_the_device_dies(asker):
    """kill -9 of the device, three times among frames: each gets its own boxes, and none gets zeros."""
    for n in range(60):
        if n % 20 == 10:
            with driver.connect("onnxruntime") as device:
                os.kill(device.engine_pid, signal.SIGKILL)
        assert_seen(asker, n / 60)


def test_metrics(asker, server):
    """Frames by what became of them, and how long their answers took, by the detector's name in Frigate."""
    import urllib.request

    program = "import sys; from frigate_models import *\nwith Asker(sys.argv[1]) as a: print(len(a.look(frame_of(0))))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = ["frigate.detector:garden", "-c", program, server.address]  # as Frigate calls its process
    done = subprocess.run(command, executable=sys.executable, env=environment, capture_output=True, check=True)
    assert done.stdout == b"20\n"
    asker.look(frame_of(0, "uint8"))
    with urllib.request.urlopen(server.metrics, timeout=20) as answer:
        text = answer.read().decode()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def figure(name, detector, more=""):
        return figures[f'{name}{{detector="{detector}",{more}model="yolo.onnx"}}']

    assert figures['burst_frigate_frames_total{detector="garden",model="yolo.onnx",outcome="answered"}'] == "1.0"
    assert float(figures['burst_frigate_frames_total{detector="local",model="yolo.onnx",outcome="wrong_frame"}']) >= 1
    assert figure("burst_frigate_seconds_bucket", "garden", 'le="+Inf",') == "1.0"
    assert float(figure("burst_frigate_seconds_sum", "garden")) > 0
    assert float(figures["burst_frigate_connections"]) >= 1
    assert figures["burst_frigate_connections_refused_total"] == "0.0"
