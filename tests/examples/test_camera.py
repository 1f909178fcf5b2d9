"""examples/camera.cpp builds as its own head says, finds what is there, and survives the death of its device."""

import contextlib
import re
import signal
import subprocess

import numpy as np
import pytest
from held_processes import HeldProcess, state
from waiting import PATIENCE, until

import driver

WIDTH, HEIGHT, SIDE = 160, 120, 40
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def camera(built):
    """The program."""
    return built("camera.cpp")


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """A model file that finds pixels whose brightness is above one half: their box, score 0.9, class 3. A second
    box is none, with score 0.1.
    """
    onnx = pytest.importorskip("onnx")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    nodes, constants = [], []

    def constant(name, values):
        constants.append(onnx.numpy_helper.from_array(np.asarray(values), name))

    def node(operation, inputs, output, **attributes):
        nodes.append(helper.make_node(operation, inputs, [output], **attributes))

    constant("half", np.float32(0.5))
    constant("one", np.float32(1))
    constant("rest", np.array([[[0.9, 3]]], np.float32))
    constant("none", np.array([[[5, 5, 9, 9, 0.1, 1]]], np.float32))
    constant("form", np.array([1, 1, 1], np.int64))
    node("ReduceMean", ["image"], "gray", axes=[1], keepdims=0)
    node("Greater", ["gray", "half"], "is_bright")
    node("Cast", ["is_bright"], "bright", to=floats)
    for name, axis in [("x", 1), ("y", 2)]:
        node("ReduceMax", ["bright"], f"any_{name}", axes=[axis], keepdims=0)
        for end, last in [("first", 0), ("last", 1)]:
            node("ArgMax", [f"any_{name}"], f"{name}_{end}_i", axis=1, keepdims=1, select_last_index=last)
            node("Cast", [f"{name}_{end}_i"], f"{name}_{end}_f", to=floats)
            node("Reshape", [f"{name}_{end}_f", "form"], f"{name}_{end}")
    for name in "xy":
        node("Add", [f"{name}_last", "one"], f"{name}_end")
    node("Concat", ["x_first", "y_first", "x_end", "y_end", "rest"], "box", axis=2)
    node("Concat", ["box", "none"], "boxes", axis=1)
    graph = helper.make_graph(
        nodes,
        "brightness",
        [helper.make_tensor_value_info("image", floats, [1, 3, HEIGHT, WIDTH])],
        [helper.make_tensor_value_info("boxes", floats, [1, 2, 6])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    path = tmp_path_factory.mktemp("model") / "brightness.onnx"
    onnx.save(model, path)
    return path


def expected(n):
    """What the generated frames show, line by line."""
    for i in range(1, n + 1):
        x, y = i * 7 % (WIDTH - SIDE), i * 3 % (HEIGHT - SIDE)
        yield f"{i}: class 3 0.90 at {x} {y} {x + SIDE} {y + SIDE}"


def start(camera, detector, *arguments, **pipes):
    command = [camera, detector, WIDTH, HEIGHT, 2, *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    return subprocess.Popen([*map(str, command)], **pipes)


def ended(process, given=None):
    said, complaints = process.communicate(given, timeout=3 * PATIENCE)
    return process.returncode, said.decode().splitlines(), complaints.decode()


def test_it_finds_what_the_frames_show(camera, detector, place, tmp_path):
    """A device that it starts itself; the last frame is drawn with the box around the square."""
    status, lines, complaints = ended(start(camera, detector, "generated", 50, tmp_path / "last.ppm"))
    assert (status, complaints) == (0, "")
    assert lines[:-1] == list(expected(50))
    assert re.fullmatch(r"50 frames, \d+\.\d a second", lines[-1])
    head, pixels = (tmp_path / "last.ppm").read_bytes().split(b"\n", 1)
    assert head == b"P6 160 120 255"
    picture = np.frombuffer(pixels, np.uint8).reshape(HEIGHT, WIDTH, 3)
    x, y = 50 * 7 % (WIDTH - SIDE), 50 * 3 % (HEIGHT - SIDE)
    assert (picture[y, x : x + SIDE] == (255, 0, 0)).all()
    assert (picture[y + 1 : y + SIDE, x + 1 : x + SIDE] == 230).all()
    assert (picture == (255, 0, 0)).all(2).sum() == 4 * SIDE


def test_frames_come_through_a_pipe(camera, detector, place):
    """Raw RGB on standard input; half a frame at the end is none."""
    frames = np.zeros((3, HEIGHT, WIDTH, 3), np.uint8)
    frames[0, 10:20, 30:50] = frames[1, 90:, :5] = frames[2, :, 159:] = 255
    process = start(camera, detector, "-", 99, stdin=subprocess.PIPE)
    status, lines, complaints = ended(process, frames.tobytes() + bytes(1000))
    assert (status, complaints) == (0, "")
    boxes = [line.partition(" at ")[2] for line in lines[:-1]]
    assert boxes == ["30 10 50 20", "0 90 5 120", "159 0 160 120"]


@pytest.mark.parametrize("victim", ["engine", "service"])
def test_a_killed_device_costs_no_frame(camera, detector, place, tmp_path, victim):
    """Stopped while frames are in flight, and killed: the program says so, and every frame has its box."""
    said = tmp_path / "said"
    with driver.connect("onnxruntime") as connection, said.open("wb") as out:
        device = {name: HeldProcess(getattr(connection, f"{name}_pid")) for name in ("engine", "service")}
        process = start(camera, detector, "generated", 3000, stdout=out)
        until(lambda: said.read_text().count("\n") > 20)
        device["engine"].signal(signal.SIGSTOP)
        until(lambda: state(process.pid) == "S")
        device[victim].signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it is the victim
            device["engine"].signal(signal.SIGCONT)  # to notice that its service is gone
        process.stdout = None
        _, complaints = process.communicate(timeout=3 * PATIENCE)
        for held in device.values():
            held.end()
    assert (process.returncode, complaints) == (0, b"camera: the device died and was started again\n")
    assert said.read_text().splitlines()[:-1] == list(expected(3000))


@pytest.mark.parametrize("arguments", [[], ["generated", "x"], ["/nowhere"]], ids=str)
def test_what_cannot_be_is_told(camera, place, tmp_path, arguments):
    """A file that is no model, frames that are not there, no arguments: a reason, and status 1."""
    (tmp_path / "no.onnx").write_bytes(b"no model")
    status, lines, complaints = ended(start(camera, tmp_path / "no.onnx", *arguments))
    assert (status, lines) == (1, [])
    assert complaints.startswith("camera: ")
    assert (
        "camera: camera MODEL" in ended(subprocess.Popen([camera], stderr=subprocess.PIPE, stdout=subprocess.PIPE))[2]
    )
