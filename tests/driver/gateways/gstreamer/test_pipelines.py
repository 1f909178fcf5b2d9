"""The element `burstinfer` in real pipelines, in the Python that GStreamer's packages are for."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from brightness_model import write_brightness

from driver.gateways.gstreamer.plugin_folder import FOLDER

pytestmark = pytest.mark.integration
PROGRAM = Path(__file__).parents[2] / "gstreamer_program.py"
SYSTEM_PYTHON = "/usr/bin/python3"
LIVE = (
    "videotestsrc is-live=true pattern=snow num-buffers={} ! video/x-raw,framerate=30/1 ! videoconvert ! videoscale !"
)


@pytest.fixture(scope="module")
def gst(tmp_path_factory):
    """An environment as docs/howto/gstreamer.md makes it with this one's packages, which are of the same Python."""
    assert shutil.which("gst-launch-1.0"), "GStreamer is missing: `make integration` as root installs it"
    folder = tmp_path_factory.mktemp("gstreamer")
    version = [SYSTEM_PYTHON, "-c", "import sys; print(*sys.version_info[:2])"]
    found = subprocess.run(version, capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(n) for n in sys.version_info[:2]], f"these tests need a .venv of {SYSTEM_PYTHON}'s version"
    venv = folder / "venv"
    make = [SYSTEM_PYTHON, "-m", "venv", "--system-site-packages", "--without-pip", venv]
    subprocess.run(make, check=True)
    own = next(venv.glob("lib/python*/site-packages"))
    shared = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    (own / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    return {
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
        "GST_PLUGIN_PATH": str(FOLDER),
        "GST_REGISTRY": str(folder / "registry.bin"),
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_brightness(folder / "bytes.onnx")
    write_brightness(folder / "floats.onnx", dtype="FLOAT")
    write_brightness(folder / "planar.onnx", planar=True)
    write_brightness(folder / "odd.onnx", width=65, height=49)
    write_brightness(folder / "open.onnx", width="w", height="h")
    (folder / "labels.txt").write_text("dog\ncat\n")
    return folder


@contextmanager
def playing(gst, pipeline, *changes):
    """The lines that the program tells, as they come."""
    command = ["python3", "-W", "ignore", PROGRAM, pipeline, *map(str, changes)]
    with ExitStack() as stack:
        player = stack.enter_context(
            subprocess.Popen(
                command, env=os.environ | gst, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/"
            )
        )
        stack.callback(player.kill)
        yield (json.loads(line) for line in player.stdout)


def played(gst, pipeline, *changes):
    with playing(gst, pipeline, *changes) as lines:
        return Told(lines)


class Told:
    """All that a program tells."""

    def __init__(self, lines):
        lines = list(lines)
        self.frames = [line for line in lines if "frame" in line]
        self.warnings = [line["warning"] for line in lines if "warning" in line]
        self.errors = [line["error"] for line in lines if "error" in line]
        self.end = lines[-1]["end"]


def assert_right(frame, width=64, height=48):
    """The answer follows from the frame: its score is the mean of its bytes."""
    ((x, y, w, h, figures),) = frame["regions"]
    assert [x, y, w, h] == [width // 8, height // 4, round(width / 2) - width // 8, round(height * 3 / 4) - height // 4]
    assert figures["confidence"] == pytest.approx(frame["mean"] / 255, abs=1e-4)
    assert figures["label_id"] == 1
    assert (figures["x_min"], figures["y_min"], figures["x_max"], figures["y_max"]) == (0.125, 0.25, 0.5, 0.75)
    if frame["objects"] is not None:
        assert frame["objects"] == [[figures["label"], x, y, w, h, pytest.approx(figures["confidence"])]]


def test_gst_launch_runs_it(gst, place, models):
    """The pipeline of docs/howto/gstreamer.md, by the command that people know, and metadata on each frame."""
    command = (
        f"gst-launch-1.0 -v videotestsrc num-buffers=5 ! videoconvert ! videoscale ! "
        f"burstinfer model={models}/bytes.onnx threshold=0.1 ! fakesink silent=false"
    )
    ran = subprocess.run(command.split(), env=os.environ | gst, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("meta: GstVideoRegionOfInterestMeta") == 5


@pytest.mark.parametrize("model", ["bytes", "planar"])
def test_frames_are_used_where_they_lie(gst, place, models, model):
    """Each frame has its own answer, in both orders of channels, and none was copied."""
    end = f"burstinfer name=i threshold=0 model={models}/{model}.onnx labels={models}/labels.txt ! fakesink"
    told = played(gst, f"videotestsrc pattern=snow num-buffers=20 ! videoconvert ! videoscale ! {end}")
    assert len(told.frames) == 20
    for frame in told.frames:
        assert_right(frame)
        assert frame["regions"][0][4]["label"] == "cat"
    assert told.end == {"frames": 20, "copies": 0, "dropped": 0}
    assert len({frame["mean"] for frame in told.frames}) > 10  # so an answer of another frame is seen


def test_analytics(gst, place, models):
    """Where GStreamer has GstAnalytics, each region is an object detection of it as well."""
    end = f"burstinfer name=i threshold=0 model={models}/bytes.onnx labels={models}/labels.txt ! fakesink"
    told = played(gst, f"videotestsrc pattern=snow num-buffers=5 ! videoconvert ! videoscale ! {end}")
    assert len(told.frames) == 5
    if told.frames[0]["objects"] is None:
        pytest.skip("GstAnalytics came with GStreamer 1.24 (Debian 13: gir1.2-gst-plugins-bad-1.0)")
    for frame in told.frames:
        assert [found[0] for found in frame["objects"]] == ["cat"]
        assert_right(frame)


@pytest.mark.parametrize(("model", "before", "size"), [
    ("floats", "", (64, 48)),  # the model does not take bytes
    ("odd", "", (65, 49)),  # rows have gaps
    ("bytes", "identity drop-allocation=true !", (64, 48)),  # our memory was not offered
])  # fmt: skip
def test_other_frames_are_copied_and_counted(gst, place, models, model, before, size):
    """What cannot be used where it lies has the right answer as well, and each copy counts."""
    pipeline = (
        f"videotestsrc pattern=snow num-buffers=5 ! videoconvert ! videoscale ! {before} "
        f"burstinfer name=i threshold=0 model={models}/{model}.onnx ! fakesink"
    )
    told = played(gst, pipeline)
    assert told.end == {"frames": 5, "copies": 5, "dropped": 0}
    for frame in told.frames:
        if model != "odd":  # the program's mean counts the gaps, too
            assert_right(frame, *size)
        assert len(frame["regions"]) == 1


def test_a_device_that_is_killed(gst, place, models):
    """All its processes, by kill -9 amid the stream: what comes out has the right answer, and goes on."""
    pipeline = f"{LIVE.format(90)} burstinfer name=i threshold=0 model={models}/bytes.onnx ! fakesink sync=false"
    seen, kills = [], 0
    with playing(gst, pipeline) as lines:
        for line in lines:
            seen.append(line)
            if line.get("frame") in (20, 50):
                for process in place.held():
                    with process:
                        process.kill()
                        kills += 1
    told = Told(seen)
    assert kills >= 2
    assert not told.errors
    assert told.end["frames"] == len(told.frames)
    assert told.end["frames"] + told.end["dropped"] == 90
    assert told.end["dropped"] == len(told.warnings)
    assert told.end["frames"] >= 60
    for frame in told.frames:
        assert_right(frame)


def test_a_device_that_hangs(gst, place, models):
    """Frames without an answer are dropped with a warning each, never sent on as if nothing were in them."""
    pipeline = (
        f"{LIVE.format(90)} burstinfer name=i threshold=0 timeout=0.1 model={models}/bytes.onnx ! fakesink sync=false"
    )
    seen, stopped = [], []
    with playing(gst, pipeline) as lines:
        for line in lines:
            seen.append(line)
            if line.get("frame") == 20:
                stopped = place.held()
                for process in stopped:
                    process.kill(signal.SIGSTOP)
            elif stopped and sum("warning" in each for each in seen) == 2:
                while stopped:
                    with stopped.pop() as process:
                        process.kill(signal.SIGCONT)
    told = Told(seen)
    assert len(told.warnings) >= 2
    assert all("had no answer from the device, and was dropped" in text for text in told.warnings)
    assert told.end["dropped"] == len(told.warnings)
    assert told.end["frames"] == len(told.frames) == 90 - told.end["dropped"]  # it went on
    for frame in told.frames:
        assert_right(frame)


def test_a_device_that_hangs_does_not_hold_up_the_end(gst, place, models):
    """A pipeline comes to its end, and its program to its own, while the device is still stopped."""
    pipeline = (
        f"{LIVE.format(30)} burstinfer name=i threshold=0 timeout=0.1 model={models}/bytes.onnx ! fakesink sync=false"
    )
    seen = []
    with ExitStack() as stack, playing(gst, pipeline) as lines:
        for line in lines:
            seen.append(line)
            if line.get("frame") == 20:
                for process in place.held():
                    stack.enter_context(process)
                    process.kill(signal.SIGSTOP)
                    stack.callback(process.kill, signal.SIGCONT)
    told = Told(seen)
    assert not told.errors
    assert told.end["dropped"] >= 1
    assert told.end["frames"] + told.end["dropped"] <= 30


def test_too_many_failures_end_the_stream(gst, place, models):
    """As an error of the element, after as many frames without an answer as were allowed."""
    pipeline = f"{LIVE.format(300)} burstinfer name=i timeout=0.1 max-failures=3 model={models}/bytes.onnx ! fakesink"
    with playing(gst, pipeline) as lines, ExitStack() as stack:
        seen, stopped = [], []
        for line in lines:
            seen.append(line)
            if line.get("frame") == 5:
                stopped = [stack.enter_context(process) for process in place.held()]
                for process in stopped:
                    process.kill(signal.SIGSTOP)
            elif "error" in line:
                for process in stopped:
                    process.kill(signal.SIGCONT)
    told = Told(seen)
    assert len(told.warnings) == 2
    assert "3 frames, one after the other, had no answer" in told.errors[0]


def test_another_size_amid_the_stream(gst, place, models):
    """A model that takes any size gets frames of the new one, in place, with the right answer each."""
    pipeline = (
        "videotestsrc pattern=snow num-buffers=30 ! capsfilter name=c caps=video/x-raw,width=64,height=48 "
        f"! videoconvert ! burstinfer name=i threshold=0 model={models}/open.onnx ! fakesink"
    )
    told = played(gst, pipeline, 10, "video/x-raw,width=128,height=96", 20, "video/x-raw,width=32,height=16")
    sizes = [tuple(frame["size"]) for frame in told.frames]
    assert list(dict.fromkeys(sizes)) == [(64, 48), (128, 96), (32, 16)]
    assert told.end == {"frames": 30, "copies": 0, "dropped": 0}
    for frame in told.frames:
        assert_right(frame, *frame["size"])


def test_another_size_before_videoscale(gst, place, models):
    """A model of one size goes on when the source changes its size."""
    pipeline = (
        "videotestsrc pattern=snow num-buffers=20 ! capsfilter name=c caps=video/x-raw,width=320,height=240 "
        f"! videoconvert ! videoscale ! burstinfer name=i threshold=0 model={models}/bytes.onnx ! fakesink"
    )
    told = played(gst, pipeline, 10, "video/x-raw,width=640,height=480")
    assert (len(told.frames), told.errors) == (20, [])
    for frame in told.frames:
        assert_right(frame)


@pytest.mark.parametrize(("properties", "why"), [
    ("model=/nowhere/net.onnx", "model=/nowhere/net.onnx: there is no such file; give its path"),
    ("model={models}/labels.txt", "'labels.txt' has the suffix '.txt'; supported are .tflite, .onnx"),
    ("", "model is not set; give the path"),
    ("model={models}/bytes.onnx model-type=yolox", "yolox one of (1, cells, 5 + classes); say model-type=ssd"),
    ("model={models}/bytes.onnx model-type=yolov1", "model-type=yolov1: there are ssd, yolonas, "),
    ("model={models}/bytes.onnx device=none-such", "device=none-such: "),
    ("model={models}/bytes.onnx labels=/nowhere/labels.txt", "labels=/nowhere/labels.txt: there is no such file"),
    ("model={models}/bytes.onnx labels={models}/bytes.onnx", "bytes.onnx: it is not text in UTF-8"),
])  # fmt: skip
def test_what_is_set_wrongly(gst, place, models, properties, why):
    """Is an error of the element that says what, before the first frame."""
    end = f"burstinfer name=i {properties.format(models=models)} ! fakesink"
    told = played(gst, f"videotestsrc num-buffers=5 ! videoconvert ! videoscale ! {end}")
    assert told.frames == []
    assert why in told.errors[0]


@pytest.mark.parametrize("wrong", ["threshold=1.5", "timeout=0", "scale=inf", "max-failures=0"])
def test_a_number_out_of_range(gst, place, models, wrong):
    """GStreamer names the property and the value, and the pipeline goes on with what it had."""
    command = f"gst-launch-1.0 videotestsrc num-buffers=1 ! burstinfer model={models}/open.onnx {wrong} ! fakesink"
    ran = subprocess.run(command.split(), env=os.environ | gst, capture_output=True, text=True, timeout=60, check=False)
    name, value = wrong.split("=")
    assert re.search(rf'value "{value}[.0]*" .* out of range for property \'{name}\'', ran.stderr), ran.stderr


def test_what_is_known_of_it(gst):
    """gst-inspect-1.0 says of each property what it is, in which unit, and its default."""
    ran = subprocess.run(
        ["gst-inspect-1.0", "burstinfer"], env=os.environ | gst, capture_output=True, text=True, timeout=60, check=True
    )
    said = dict(re.findall(r"^  (\S+) +: (.*\n(?: {20,}.*\n)+)", ran.stdout, re.MULTILINE))
    assert {"model", "device", "model-type", "labels", "application", "frames", "copies", "dropped"} < set(said)
    assert "Seconds" in said["timeout"]
    assert re.search(r"Range: +0.001 - +3600 Default: +5 ", said["timeout"])
    assert re.search(r"Range: +0 - +1 Default: +0.5 ", said["threshold"])


def test_two_cameras_share_a_model(gst, place, models):
    """Two elements in one program with the same model, each with the answers to its own frames, on one device."""
    source = "videotestsrc pattern={} num-buffers=20 ! videoconvert ! videoscale !"
    element = f"burstinfer threshold=0 model={models}/bytes.onnx"
    pipelines = f"{source.format('snow')} {element} name=i ! fakesink {source.format('black')} {element} ! fakesink"
    told = played(gst, pipelines)
    assert len(told.frames) == 20
    for frame in told.frames:
        assert_right(frame)
    assert np.mean([frame["mean"] for frame in told.frames]) > 50


def test_burst_top_knows_the_cameras(gst, place, models):
    """Elements are told apart by their names, or by what they say: the name of each camera is at its burst."""
    source = "videotestsrc is-live=true ! videoconvert ! videoscale !"
    element = f"burstinfer threshold=0 model={models}/bytes.onnx"
    pipelines = f"{source} {element} name=i ! fakesink {source} {element} application=door ! fakesink"
    top = [sys.executable, "-m", "driver.cli", "top", "--json", "--count", "1", "--every", "0.1"]
    with playing(gst, pipelines) as lines:
        for line in lines:
            assert "error" not in line
            found = json.loads(subprocess.run(top, capture_output=True, timeout=60, check=True).stdout)["bursts"]
            if len(found) == 2:
                break
    assert {burst["application"] for burst in found} == {"i", "door"}


def test_the_bench_runs(gst):
    """bench/gateways.py gstreamer gets to its end, and says what it found."""
    bench = Path(__file__).parents[4] / "bench/gateways.py"
    python = shutil.which("python3", path=gst["PATH"])
    command = [python, bench, "gstreamer", "--quick", "--pairs", "1"]
    ran = subprocess.run(command, env=os.environ | gst, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1080p30: 30 frames a second held" in ran.stdout
