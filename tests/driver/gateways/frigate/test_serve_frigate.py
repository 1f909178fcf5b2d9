"""`burst serve DEVICE --frigate ADDRESS --model FILE --model-type TYPE` as a command."""

import os
import signal
import subprocess

import numpy as np
import pytest
from frigate_models import Asker, command, frame_of, rows_for, serving, write_detector


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    its = tmp_path_factory.mktemp("frigate")
    write_detector(its / "ssd.onnx", "ssd", "uint8", "nhwc")
    write_detector(its / "yolox.onnx", "yolox")
    return its


def said(folder, address, model, model_type, *more):
    words = command("onnxruntime", address, folder / model, model_type, *more)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.integration
@pytest.mark.parametrize("address", ["ipc://{}/end", "tcp://127.0.0.1:*"])
def test_from_the_beginning_to_the_end(folder, address):
    """It says where it listens, answers, and ends on SIGTERM with 0; its socket goes with it."""
    with serving("onnxruntime", address.format(folder), folder / "ssd.onnx", "ssd") as (process, told):
        with Asker(told["frigate"]) as asker:
            found = asker.look(frame_of(0.2, "uint8", "nhwc"), "ssd")
            np.testing.assert_allclose(found, rows_for(0.2), atol=1e-6)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not (folder / "end").exists()


@pytest.mark.integration
def test_the_socket_is_the_accounts_own(folder):
    """Other accounts cannot open it, root excepted."""
    with serving("onnxruntime", f"ipc://{folder}/own", folder / "ssd.onnx", "ssd"):
        assert os.stat(folder / "own").st_mode & 0o777 == 0o700


@pytest.mark.integration
def test_an_address_that_is_taken(folder):
    """The server that has it keeps it: ZeroMQ alone would give its path away."""
    address = f"ipc://{folder}/taken"
    with serving("onnxruntime", address, folder / "ssd.onnx", "ssd") as (_, told):
        assert "something is there already" in said(folder, address, "yolox.onnx", "yolox")
        with Asker(told["frigate"]) as asker:
            assert asker.look(frame_of(0, "uint8", "nhwc"), "ssd").shape == (20, 6)
    with serving("onnxruntime", "tcp://127.0.0.1:*", folder / "ssd.onnx", "ssd") as (_, told):
        assert "use another address" in said(folder, told["frigate"], "yolox.onnx", "yolox")


@pytest.mark.integration
def test_a_socket_that_a_killed_server_left(folder):
    """Is taken over."""
    address = f"ipc://{folder}/left"
    with serving("onnxruntime", address, folder / "ssd.onnx", "ssd") as (process, _):
        process.kill()
        process.wait()
        assert (folder / "left").exists()
    with serving("onnxruntime", address, folder / "ssd.onnx", "ssd"), Asker(address) as asker:
        assert asker.look(frame_of(0, "uint8", "nhwc"), "ssd").shape == (20, 6)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("ipc://{}/x", "yolox.onnx", "yolo-generic"), "say --model-type yolox"),
        (("ipc://{}/x", "yolox.onnx", "yolo"), "there are ssd, yolonas, yolo-generic"),
        (("ipc://{}/x", "none.onnx", "ssd"), "there is no such file"),
        (("ipc://{}/none/x", "ssd.onnx", "ssd"), "No such file or directory"),
        (("ipc://relative", "ssd.onnx", "ssd"), "is absolute"),
        (("/tmp/x", "ssd.onnx", "ssd"), "give ipc:///PATH"),
        (("udp://127.0.0.1:5", "ssd.onnx", "ssd"), "give ipc:///PATH"),
        (("ipc://{}/x", "ssd.onnx", "ssd", "--group", "users"), "--frigate serves a gateway"),
        (("ipc://{}/x", "ssd.onnx", "ssd", "--oip", ":0"), "--frigate and --oip are of different gateways"),
    ],
)
def test_what_cannot_be_served(folder, words, told):
    """It says what is wrong and what to do, and exits with 2; no socket is left."""
    address, *more = words
    assert told in said(folder, address.format(folder), *more)
    assert not (folder / "x").exists()


@pytest.mark.integration
@pytest.mark.parametrize("words", [["--frigate", "ipc:///x"], ["--model", "m.onnx"], ["--model-type", "ssd"]])
def test_options_that_go_together(words):
    """One of them alone says what the others are."""
    full = command("onnxruntime", "", "", "")
    done = subprocess.run([*full[: full.index("--frigate")], *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "go together" in " ".join(done.stderr.split())
