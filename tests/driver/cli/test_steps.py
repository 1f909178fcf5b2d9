"""`burst run` on frames and blocks: one execution for each, with states from one to the next."""

import sys
import wave
from pathlib import Path

import av
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "importers"))

from header_files import onnx_file

FLOAT = TensorProto.FLOAT


@pytest.fixture
def sound(tmp_path):
    """Ten samples of 0.25, at 100 Hz."""
    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 100, 10, "NONE", ""))
        file.writeframes(np.full(10, 8192, "<i2").tobytes())
    return path


@pytest.fixture
def mean(tmp_path):
    """A network of one number: the mean of an image whose height and width are open."""
    nodes = [helper.make_node("GlobalAveragePool", ["image"], ["y"])]
    path = tmp_path / "mean.onnx"
    path.write_bytes(onnx_file({"image": (FLOAT, ["batch", 3, "h", "w"])}, {"y": (FLOAT, None)}, nodes))
    return path


@pytest.fixture
def clip(tmp_path):
    """Four frames of 64 x 32, each lighter than the one before, ten in a second."""
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        for level in (0, 60, 120, 180):
            frame = av.VideoFrame.from_ndarray(np.full((32, 64, 3), level, np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


@pytest.mark.parametrize("form", ["file", "operations"])
def test_a_sound_in_blocks(command, counter, sound, tmp_path, form):
    """The state that is recognised goes from block to block, in both forms and on both paths; all results are kept."""
    words = ("run", counter, "--input", f"x={sound}", "--block", 4, "--form", form, "--output", tmp_path / "o.npz")
    found = command(*words, *(["--plain"] if form == "file" else ["--device", "cpu"]), "--json").json()
    assert (found["form"], found["states"]) == (form, {"hn": "h"})
    rows = [(row["block"], row["second"], row["y"]) for row in found["steps"]]
    assert rows == [(0, 0, [1.0]), (1, 0.04, [2.0]), (2, 0.08, [2.5])]
    assert [given["shape"] for given in found["inputs"]] == [[1, 4], [1, 1]]
    with np.load(tmp_path / "o.npz") as kept:
        assert kept["y"].tolist() == [[[1]], [[2]], [[2.5]]]
        assert kept["hn"].shape == (3, 1, 1)


def test_states_are_said(command, counter, sound):
    """With each block, and how to do without: --state none leaves the input as it was."""
    words = ("run", counter, "--input", f"x={sound}", "--block", 5)
    shown = command(*words).out
    assert "state: output hn is the next input h" in shown
    assert "block 1 at 0.050 s: y 2.5; " in shown
    assert "1 block through a burst: p50" in shown
    without = command(*words, "--state", "none", "--input", "h=0", "--json").json()
    assert [row["y"] for row in without["steps"]] == [[1.25], [1.25]]


class TestStream:
    """`burst run --stream`: the device repeats the execution on what it leaves."""

    @pytest.fixture
    def steps(self, tmp_path):
        """value = step + 1, and whether that is at least the limit."""
        nodes = [
            helper.make_node("Add", ["step", "one"], ["value"]),
            helper.make_node("GreaterOrEqual", ["value", "limit"], ["done"]),
        ]
        inputs, outputs = ({name: (FLOAT, [1]) for name in names} for names in (("step", "limit"), ("value",)))
        model = onnx.load_from_string(onnx_file(inputs, outputs | {"done": (TensorProto.BOOL, [1])}, nodes))
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "one"))
        (tmp_path / "steps.onnx").write_bytes(model.SerializeToString())
        return ["run", tmp_path / "steps.onnx", "--stream", "--input", "step=0", "--input", "limit=3"]

    @pytest.mark.parametrize("device", ["onnxruntime", "cpu"])
    def test_until(self, command, steps, tmp_path, device):
        """The step that makes the output true is the last one; values that stay on the device are not shown."""
        form = ["--form", "operations"] if device == "cpu" else []
        fed = ["--device", device, *form, "--state", "value=step", "--until", "done", "--output", tmp_path / "o.npz"]
        found = command(*steps, *fed, "--json").json()
        assert [(row["step"], row["done"]) for row in found["steps"]] == [(0, [0]), (1, [0]), (2, [1])]
        assert (found["unit"], found["runs"]) == ("step", 2)
        assert not any("value" in row for row in found["steps"])
        with np.load(tmp_path / "o.npz") as kept:
            assert kept["done"].tolist() == [[0], [0], [1]]
            assert "value" not in kept

    def test_a_count(self, command, steps):
        """`--frames` says how many; each is a line."""
        shown = command(*steps, "--state", "value=step", "--frames", 2).out
        assert "step 1 at " in shown
        assert "step 2 at " not in shown

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ([], "no output is fed back; pass --state"),
            (["--state", "value=step", "--until", "dnoe"], "there is no output 'dnoe'"),
            (["--state", "value=step", "--until", "value=x"], "--until value=x: pass OUTPUT, or"),
            (["--state", "value=step", "--plain"], "--plain: a stream has a burst"),
        ],
    )
    def test_what_is_no_stream(self, command, steps, words, told):
        """It is told before anything runs."""
        assert told in " ".join(command(*steps, *words, ends=2).err.split())


@pytest.mark.parametrize("fit", ["letterbox", "stretch"])
def test_a_video_frame_by_frame(command, mean, clip, fit):
    """Each frame with its time; the open sizes are the video's, or --shape's."""
    found = command("run", mean, "--input", clip, "--fit", fit, "--json").json()
    assert found["inputs"][0]["shape"] == [1, 3, 32, 64]
    assert [(row["frame"], row["second"]) for row in found["steps"]] == [(0, 0), (1, 0.1), (2, 0.2), (3, 0.3)]
    levels = [row["y"]["max"] if isinstance(row["y"], dict) else row["y"][0] for row in found["steps"]]
    assert np.allclose(np.multiply(levels, 255), [0, 60, 120, 180], atol=6)
    words = ("run", mean, "--input", clip, "--fit", fit, "--frames", 2, "--shape", "1x3x64x64")
    shown = command(*words).out
    assert ("letterboxed to 64 x 64" in shown) == (fit == "letterbox")
    assert "frame 1 at 0.100 s" in shown
    assert "frame 2" not in shown


def test_what_is_no_video_is_told(command, mean, tmp_path):
    """A file of which nothing can be read, a stream that does not answer, a sound; with what could be."""
    text = tmp_path / "notes.mp4"
    text.write_text("no video")
    for word in (text, "tcp://127.0.0.1:9"):
        told = command("run", mean, "--input", word, ends=2).err
        assert f"--input {word}: not a readable image or video" in told
        assert "videos, cameras and streams that FFmpeg opens" in told


def test_open_sizes_come_from_the_image(command, mean, tmp_path):
    """And when they were wrong for the network, the error says which were chosen, and the option for others."""
    Image.new("RGB", (40, 20)).save(tmp_path / "i.png")
    found = command("run", mean, "--input", tmp_path / "i.png", "--runs", 1, "--json").json()
    assert found["inputs"][0]["shape"] == [1, 3, 32, 64]
    told = command("run", mean, ends=2).err
    assert "input 'image' is float32 ? x 3 x ? x ?; give its open sizes, as in --shape image=1x3x320x320" in told


def test_sizes_that_the_network_cannot_take(command, tmp_path):
    """The runtime's words, the sizes that were chosen, and the option for others."""
    model = onnx.load_from_string(onnx_file({"x": (FLOAT, ["batch", 3, "h", "w"])}, {"y": (FLOAT, None)}, []))
    model.graph.node.append(helper.make_node("Reshape", ["x", "s"], ["y"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 7]), "s"))
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    Image.new("RGB", (32, 32)).save(tmp_path / "i.png")
    told = " ".join(command("run", tmp_path / "net.onnx", "--input", tmp_path / "i.png", ends=1).err.split())
    assert "'x' was given as 1 x 3 x 32 x 32: pass the right ones with --shape" in told
