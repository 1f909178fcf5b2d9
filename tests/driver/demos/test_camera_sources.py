"""The camera demo's inputs and outputs: its clock, video files, and what it draws and writes."""

import av
import numpy as np
import pytest
from rich.console import Console

from driver.demos import camera_sources
from driver.demos.boxes import Agreement, Box
from driver.demos.camera_report import draw_frame, facts_of
from driver.demos.camera_sources import Clock, open_source
from driver.demos.drawing import Film, annotate
from driver.demos.latencies import (
    Latencies,
    ProcessCost,
    TimedCall,
    latency_table,
    percentiles,
    summary_table,
)
from driver.demos.latency_picture import draw_latencies

COLOURS = ((200, 30, 30), (30, 200, 30), (30, 30, 200))


class FakeTime:
    """A monotonic clock that only sleeping and working move."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def fake_time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(camera_sources, "time", fake)
    return fake


@pytest.fixture
def film(tmp_path):
    """Return a video file of three frames of 320x240, each of one colour."""
    with Film(tmp_path, 320, 240, 10) as film:
        for colour in COLOURS:
            film.add(np.full((240, 320, 3), colour, np.uint8))
    return tmp_path / Film.NAME


def test_clock_keeps_the_schedule(fake_time):
    """Who is fast enough gets every frame when it is due and none is dropped."""
    clock, due = Clock(fps=10), []
    for _ in range(4):
        clock.tick()
        due.append(fake_time.now - 1000)
        fake_time.now += 0.05
    assert due == pytest.approx([0, 0.1, 0.2, 0.3])
    assert clock.dropped == 0


def test_clock_counts_missed_slots(fake_time):
    """A frame whose whole slot passed during other work is dropped; one that merely starts late is not."""
    clock = Clock(fps=10)
    clock.tick()
    fake_time.now += 0.15  # the frame of slot 1 waits in the camera's buffer
    assert clock.tick() == 0
    fake_time.now += 0.26  # at 0.41: slots 2 and 3 have passed
    assert clock.tick() == 2
    assert clock.dropped == 2


def test_clock_without_schedule_never_waits(fake_time):
    """With fps 0 nothing is dropped and nobody sleeps."""
    clock = Clock(fps=0)
    assert [clock.tick() for _ in range(3)] == [0, 0, 0]
    assert fake_time.now == 1000


def test_clock_says_what_is_left(fake_time):
    """Seconds until the next frame is due, 0 when it is; whoever waits for it by himself may be early."""
    clock = Clock(fps=10, sleep=lambda seconds: None)
    clock.tick()
    assert clock.left() == pytest.approx(0.1)
    fake_time.now += 0.04
    assert clock.left() == pytest.approx(0.06)
    clock.tick()
    assert fake_time.now == 1000.04
    fake_time.now += 1
    assert clock.left() == 0


@pytest.mark.parametrize("size", [(320, 240), (1280, 720)])
def test_any_size_can_be_asked_for(film, size):
    """The scene is drawn, and a film scaled, to that size."""
    frame = np.zeros((size[1], size[0], 3), np.uint8)
    for spec in ("scene", str(film)):
        source = open_source(spec, 0, 30, size)
        source.read(frame)
        source.close()
        assert frame.any()
        frame[...] = 0


def test_video_is_scaled_into_the_frame_and_starts_over(film):
    """A file's frames arrive in order in 640x480 RGB, and after the last comes the first again."""
    source, frame, seen = open_source(str(film), 0, 30), np.empty((480, 640, 3), np.uint8), []
    for _ in range(5):
        assert source.read(frame) is None
        seen.append(frame.mean(axis=(0, 1)).argmax())
    source.close()
    assert seen == [0, 1, 2, 0, 1]


def test_video_skips_dropped_frames(film):
    """A dropped frame of a file is not shown later."""
    source, frame = open_source(str(film), 0, 30), np.empty((480, 640, 3), np.uint8)
    source.skip(2)
    source.read(frame)
    source.close()
    assert frame[0, 0].argmax() == 2


def test_missing_file_is_refused(tmp_path):
    """A path that does not exist is refused with the argument, its value and what to pass instead."""
    with pytest.raises(ValueError, match=r"--source .*nothing\.mp4: no such file or camera; pass 'scene'"):
        open_source(str(tmp_path / "nothing.mp4"), 0, 30)


def test_text_file_is_refused(tmp_path):
    """A file that is no video is refused the same way."""
    (tmp_path / "notes.txt").write_text("no frames here")
    with pytest.raises(ValueError, match=r"--source .*notes\.txt: cannot be opened as a video .*; pass 'scene'"):
        open_source(str(tmp_path / "notes.txt"), 0, 30)


def test_device_that_is_no_camera_is_refused():
    """A character device that is no V4L2 camera is refused the same way."""
    with pytest.raises(ValueError, match=r"--source /dev/null: cannot be opened as a video .*; pass 'scene'"):
        open_source("/dev/null", 0, 30)


def test_annotating_leaves_the_frame_alone():
    """Boxes are drawn on a copy, at any place, even partly or wholly at the frame's edge."""
    frame = np.zeros((480, 640, 3), np.uint8)
    boxes = [Box("disc", 0, 0, 50, 40), Box("star", 600, 450, 640, 480), Box("ring", 639.6, 2, 640, 9)]
    picture = annotate(frame, boxes, "caption")
    assert not frame.any()
    assert picture[20, 0].any()
    assert picture[460, 639].any()


def latencies(count, device=2000.0):
    filled = Latencies()
    for i in range(count):
        filled.add(TimedCall((device + 10 + i) / 1e6, device))
    return filled


def test_percentiles_are_measured_values():
    """The percentiles of 1,000 calls are the 500th, the 990th and the 999th fastest."""
    np.testing.assert_array_equal(percentiles(np.arange(1, 1001)), [500, 990, 999])


def test_what_another_process_costs():
    """The median over the last 300 calls of what lies around the device; nothing is known without its times."""
    cost = ProcessCost()
    cost.add(TimedCall(0.002, None))
    assert cost.milliseconds is None
    assert "does not report" in cost.text
    for around in [*[900] * 400, *[200] * 151, *[100] * 149]:  # microseconds
        cost.add(TimedCall((3000 + around) / 1e6, 3000))
    assert cost.milliseconds == pytest.approx(0.2)
    assert "0.200 ms a call: the median of the last 300 calls" in cost.text


def test_tables_split_the_time():
    """The closing tables name frames, drops, precision and recall, and split a call into the device and the rest."""
    agreement = Agreement(hits=90, false_alarms=10, misses=30)
    facts = {"source": "[/scene]", "device": "reference", "frames": 1000, "dropped": 7, "copied_frame_bytes": 0}
    runs = {"burst": 1020, "plain": 0, "warm_up": 20}
    console = Console(width=100)
    with console.capture() as capture:
        console.print(summary_table(facts_of({**facts, "runs": runs, "objects": agreement.summary()}), []))
        console.print(latency_table({"burst": latencies(1000), "plain RPC": latencies(1000)}))
    text = capture.get()
    assert "[/scene]" in text  # a name is not markup
    assert "1000 processed, 7 dropped" in text
    assert "0.900" in text
    assert "0.750" in text
    assert "2.509" in text  # whole call, p50
    assert "0.509" in text  # around the device, p50


@pytest.mark.integration
@pytest.mark.parametrize("device", [2000.0, None])
def test_pictures_are_written(tmp_path, device):
    """Both pictures come out as PNG files, also for a device that does not measure its time."""
    unmeasured = Latencies()
    unmeasured.add(TimedCall(0.002, device))
    draw_latencies(tmp_path / "latency.png", {"burst": unmeasured, "plain RPC": unmeasured}, "scene")
    draw_frame(tmp_path / "frame.png", np.zeros((480, 640, 3), np.uint8), [Box("disc", 1, 2, 30, 40)], None)
    for name in ("latency.png", "frame.png"):
        with av.open(str(tmp_path / name)) as picture:
            assert next(picture.decode(video=0)).width > 640
