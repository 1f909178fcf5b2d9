"""The camera demo on a camera that delivers nv12: nothing is copied, and what is found is what is there."""

import json

import av
import numpy as np
import pytest
from click.testing import CliRunner
from fake_camera import FakeCamera

import driver
from driver.cli.command import burst
from driver.demos import camera_buffers
from driver.demos.boxes import Agreement
from driver.demos.detector import build_model, decode
from driver.demos.scene import Scene


def nv12(picture):
    """The same picture as cameras with a processor of their own deliver it."""
    return av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="nv12")


class Film:
    """What the fake camera films: the generated scene, and the true boxes of each frame."""

    def __init__(self):
        self.scene, self.picture, self.truth = Scene(0, 640, 480), np.zeros((480, 640, 3), np.uint8), []

    def __call__(self, _, room):
        self.truth.append(self.scene.render(self.picture))
        luma, chroma = nv12(self.picture).planes
        room[: 640 * 480] = np.frombuffer(luma, np.uint8).reshape(480, -1)[:, :640].reshape(-1)
        room[640 * 480 :] = np.frombuffer(chroma, np.uint8).reshape(240, -1)[:, :640].reshape(-1)


@pytest.fixture
def film(tmp_path, monkeypatch):
    """`--source CAMERA` opens a fake that films the scene."""
    film = Film()
    film.camera = FakeCamera(tmp_path / "video0", free_running=True, fill=film)
    monkeypatch.setattr(camera_buffers, "open_camera", lambda spec, fps, size: film.open(size))
    film.open = lambda size: driver.Camera(film.camera.path, "nv12", *size, ioctl=film.camera.ioctl)
    yield film
    film.camera.close()


def demo(film, tmp_path, *more):
    arguments = ("--source", film.camera.path, "--json", "--out", tmp_path / "out", *more)
    return CliRunner().invoke(burst, ["demo", "camera", *map(str, arguments)])


def test_the_demo_runs_on_the_cameras_buffers(film, tmp_path):
    """`burst demo camera --source` copies no byte of a frame, writes its film and says where frames lay."""
    done = demo(film, tmp_path, "--frames", 8)
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["source"] == f"{film.camera.path}, in the camera's buffers"
    assert (summary["frames"], summary["copied_frame_bytes"]) == (8, 0)
    assert summary["runs"] == {"burst": 28, "plain": 0, "warm_up": 20}
    with av.open(str(tmp_path / "out/camera.mp4")) as opened:
        assert sum(1 for _ in opened.decode(video=0)) == 8


def test_a_camera_that_is_unplugged_ends_the_demo(film, tmp_path):
    """What was seen before is reported, and the message names the camera."""
    fill, seen = film.camera.fill, []

    def filled(number, room):
        fill(number, room)
        seen.append(number)
        if number == 6:
            film.camera.unplug()

    film.camera.fill = filled
    done = demo(film, tmp_path, "--no-video")
    assert done.exit_code == 0, done.stderr
    assert f"{film.camera.path} was unplugged" in done.stderr.replace("\n", "")
    assert 1 <= json.loads(done.stdout)["frames"] <= 6


def test_a_camera_without_nv12_is_read_by_ffmpeg(tmp_path, monkeypatch):
    """The reason is said, and the source is opened as before."""
    refused = FakeCamera(tmp_path / "video0", formats=("YUYV",))

    def refuse(*_):
        return driver.Camera(refused.path, ioctl=refused.ioctl)

    monkeypatch.setattr(camera_buffers, "open_camera", refuse)
    arguments = ["demo", "camera", "--source", "scene", "--frames", "1", "--no-video", "--json", "--out", tmp_path]
    done = CliRunner().invoke(burst, list(map(str, arguments)))
    refused.close()
    assert done.exit_code == 0, done.stderr
    assert "not without a copy" in done.stderr
    assert "YUYV" in done.stderr


def test_what_is_found_is_what_is_there(film, connect):
    """From nv12 the network finds what it finds in RGB: at least nine of ten objects, with few false alarms."""
    with film.open((640, 480)) as camera, connect().prepare(build_model(pixels="nv12")) as model:
        agreement = Agreement()
        for frame, _ in zip(camera, range(20), strict=False):
            agreement.count(decode(model.run(frame.memory.read())), film.truth[frame.number])
    summary = agreement.summary()
    assert summary["precision"] > 0.9, summary
    assert summary["recall"] > 0.8, summary


def test_frames_that_are_no_whole_cells(connect):
    """1080 rows are 67 cells and 8 rows that are not looked at."""
    with connect().prepare(build_model(1920, 1080, pixels="nv12")) as model:
        heat, edges = model.run(np.full((1, 1620, 1920, 1), 128, np.uint8))
        assert (heat.shape, edges.shape) == ((1, 67, 120, heat.shape[3]), (1, 67, 120, 4))
