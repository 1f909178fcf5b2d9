"""A model on frames, in place and copied, without GStreamer."""

import os
import signal
from collections import deque
from contextlib import ExitStack
from itertools import count

import numpy as np
import pytest
from brightness_model import write_brightness

from burst import BurstError, ErrorStatus, Memory, OutputShape, Result, Timeout
from driver.gateways.gstreamer.frame_layout import FrameLayout, layout_of
from driver.gateways.gstreamer.frame_model import FrameModel, FrameOptions
from driver.importers import load


@pytest.fixture
def frames(place, tmp_path):
    """Makes a model of one kind, configured for its size."""
    made = []

    def make(width=64, height=48, timeout=5.0, **kind):
        path = write_brightness(tmp_path / "net.onnx", width, height, **kind)
        made.append(FrameModel(FrameOptions(str(path), threshold=0.0, timeout=timeout)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def snow(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 200 + seed, shape, np.uint8)


def score(found):
    assert found.corners.tolist() == [[0.125, 0.25, 0.5, 0.75]]
    return found.scores.item()


def test_in_place(frames):
    """Frames in memory of others, at an offset, each with its own answer; nothing is copied."""
    model = frames()
    model.configure(64, 48, [192], [0])
    memory = Memory.create(2 * 9216 + 64)
    for seed, offset in enumerate((64, 64 + 9216)):
        frame = snow(9216, seed=seed)
        memory.asarray()[offset : offset + 9216] = frame
        found = score(model.detect_in_place(memory.fd, offset, offset + 9216))
        assert found == pytest.approx(frame.mean() / 255, abs=1e-4)
    assert model.burst.stats()["copied_bytes"]["bulk"] == 0


def test_a_descriptor_number_that_comes_to_mean_other_memory(frames):
    """GStreamer closes descriptors when a pool ends: the next frame under the same number is another frame."""
    model = frames()
    model.configure(64, 48, [192], [0])
    scores = []
    for seed in range(3):
        memory = Memory.create(9216)
        memory.asarray()[:] = snow(9216, seed=seed)
        fd = os.dup2(memory.fd, 200)
        scores.append((score(model.detect_in_place(fd, 0, 9216)), memory.asarray().mean() / 255))
    os.close(200)
    for found, true in scores:
        assert found == pytest.approx(true, abs=1e-4)


def test_more_memories_than_are_kept(frames):
    """A source with a new memory for each frame costs a bounded number of descriptors."""
    model = frames()
    model.configure(64, 48, [192], [0])
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(150):
        memory = Memory.create(9216)
        memory.asarray()[:] = seed
        assert score(model.detect_in_place(memory.fd, 0, 9216)) == pytest.approx(seed / 255, abs=1e-4)
        memory.close()
    assert len(os.listdir("/proc/self/fd")) < before + 80


@pytest.mark.integration
@pytest.mark.parametrize("kind", [{}, {"planar": True}, {"dtype": "FLOAT"}, {"dtype": "FLOAT", "planar": True}])
def test_copied(frames, kind):
    """Rows and planes with gaps, bytes and floats: the same answers."""
    model = frames(**kind)
    stride, planes = (80, 3) if "planar" in kind else (200, 1)
    offsets = [n * stride * 48 for n in range(planes)]
    model.configure(64, 48, [stride] * planes, offsets)
    assert not model.may_be_in_place
    data = snow(planes, 48, stride)
    wanted = data[:, :, : 64 if planes == 3 else 192].mean() / 255
    assert score(model.detect_in_copy(data.tobytes())) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.integration
def test_a_device_that_is_killed(frames, place):
    """By kill -9 between two frames and amid them: the next answer is right."""
    model = frames()
    model.configure(64, 48, [192], [0])
    memory = Memory.create(9216)
    for seed in range(4):
        memory.asarray()[:] = snow(9216, seed=seed)
        for process in place.held():
            with process:
                process.kill()
        found = score(model.detect_in_place(memory.fd, 0, 9216))
        assert found == pytest.approx(memory.asarray().mean() / 255, abs=1e-4)


def test_a_device_that_is_stopped(frames, place):
    """A frame has no answer then, and the end is not held up; the device serves others when it goes on."""
    model = frames(timeout=0.2)
    model.configure(64, 48, [192], [0])
    with ExitStack() as stack:
        for process in place.held():
            stack.enter_context(process)
            process.kill(signal.SIGSTOP)
            stack.callback(process.kill, signal.SIGCONT)
        frames_of_nothing = (model.detect_in_copy(bytes(9216)) for _ in count())
        with pytest.raises(Timeout, match=r"within 0\.2 s"):
            deque(frames_of_nothing, maxlen=0)  # the signal takes effect a moment later
        model.close()
    other = frames()
    other.configure(64, 48, [192], [0])
    assert score(other.detect_in_copy(b"\xff" * 9216)) == pytest.approx(1)


def test_another_size(frames):
    """A model of open size goes on with frames of the new size; one of a size says which it wants."""
    model = frames("w", "h")
    memory = Memory.create(9216)
    memory.asarray()[:] = snow(9216)
    for width, height in ((64, 48), (32, 16)):
        model.configure(width, height, [3 * width], [0])
        nbytes = 3 * width * height
        true = memory.asarray()[:nbytes].mean() / 255
        assert score(model.detect_in_place(memory.fd, 0, nbytes)) == pytest.approx(true, abs=1e-4)
    with pytest.raises(ValueError, match="width=32: the model takes 64; put videoscale before burstinfer"):
        frames().configure(32, 48, [96], [0])


def test_outputs_that_need_more_room(frames, monkeypatch):
    """They get it once, within the time of the frame: the second try ends when the first would have."""
    model = frames()
    model.configure(64, 48, [192], [0])
    memory, jobs = Memory.create(9216), []

    def perform(job):
        jobs.append(job)
        shapes = tuple(OutputShape(shape, is_sufficient=False) for shape in ([1, 9, 4], [1, 9], [1, 9], [1]))
        return Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (), shapes)

    monkeypatch.setattr(model.burst, "perform", perform)
    with pytest.raises(BurstError):
        model.detect_in_place(memory.fd, 0, 9216)
    first, second = jobs
    assert first.wait == second.wait
    assert second.request.outputs[0].length >= 9 * 4 * 4 > first.request.outputs[0].length


def test_memory_that_is_too_small(frames):
    """A frame that ends behind its memory is an error, not an answer."""
    model = frames()
    model.configure(64, 48, [192], [0])
    memory = Memory.create(4096)
    with pytest.raises((BurstError, ValueError, OSError)):
        model.detect_in_place(memory.fd, 0, 9216)
    with pytest.raises(ValueError, match="a frame of 100 bytes has no 9216 bytes at 0"):
        model.detect_in_copy(bytes(100))


def test_layouts(tmp_path):
    """Caps by what the model takes."""
    layout = layout_of(load(write_brightness(tmp_path / "a.onnx", planar=True)))
    assert layout == FrameLayout(np.dtype(np.uint8), 3, is_planar=True, width=64, height=48)
    assert layout.caps == "video/x-raw,format=RGBP,width=(int)64,height=(int)48"
    layout = layout_of(load(write_brightness(tmp_path / "b.onnx", "w", "h", dtype="FLOAT")))
    assert layout.caps == "video/x-raw,format=RGB,width=(int)[1,32767],height=(int)[1,32767]"
    assert not layout.takes_bytes
    with pytest.raises(ValueError, match="model is not set"):
        FrameModel(FrameOptions(""))
