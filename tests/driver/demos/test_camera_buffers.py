"""The camera demo on a camera: frames are read where they lie, in the terminal and on the page, and what is found is
what is there.
"""

import asyncio
import json
import os
import re
import signal

import aiohttp
import av
import numpy as np
import pytest
import simplejpeg
from click.testing import CliRunner
from fake_camera import FakeCamera
from waiting import PATIENCE

import driver
from burst import Timeout
from driver.cli.command import burst
from driver.demos import camera_sources
from driver.demos.boxes import Agreement
from driver.demos.camera_sources import CameraClock, CameraSource, open_source
from driver.demos.detector import build_model, decode
from driver.demos.drawing import picture
from driver.demos.scene import Scene
from driver.demos.web.camera import CameraShow
from driver.demos.web.server import Server

pytestmark = pytest.mark.integration

FOURCC = {"nv12": "NV12", "yuyv": "YUYV", "rgb": "MJPG"}


def fill_with(picture, fourcc, room):
    """The same picture as cameras deliver it; how many bytes it has where that varies."""
    if fourcc == "MJPG":
        data = np.frombuffer(simplejpeg.encode_jpeg(picture, 90, colorsubsampling="422"), np.uint8)
        room[: len(data)] = data
        return len(data)
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
    room[:] = frame.to_ndarray(format={"NV12": "nv12", "YUYV": "yuyv422"}[fourcc]).reshape(-1)
    return None


class Film:
    """What the fake camera films: the generated scene, and the true boxes of each frame."""

    def __init__(self, path, formats=("NV12",), **how):
        self.scene, self.picture, self.truth = Scene(0, 640, 480), np.zeros((480, 640, 3), np.uint8), []
        self.camera = FakeCamera(path, formats=formats, free_running=True, fill=self.fill, **how)

    def fill(self, _, room):
        self.truth.append(self.scene.render(self.picture))
        return fill_with(self.picture, self.camera.fourcc, room)

    def open(self, formats=camera_sources.FORMATS, size=(640, 480), **how):
        return driver.Camera(self.camera.path, formats, *size, ioctl=self.camera.ioctl, **how)


@pytest.fixture
def filming(tmp_path, monkeypatch):
    """Makes fakes that film the scene, of which the last is what `--source CAMERA` opens."""
    films = []

    def film(*formats, **how):
        films.append(Film(tmp_path / f"video{len(films)}", formats or ("NV12",), **how))
        return films[-1]

    monkeypatch.setattr(camera_sources, "is_camera", lambda path: True)
    monkeypatch.setattr(camera_sources, "open_camera", lambda spec, fps, size: films[-1].open(size=size))
    yield film
    for film in films:
        film.camera.close()


@pytest.fixture
def film(filming):
    """One that delivers nv12."""
    return filming()


def demo(film, tmp_path, *more):
    arguments = ("--source", film.camera.path, "--json", "--out", tmp_path / "out", *more)
    return CliRunner().invoke(burst, ["demo", "camera", *map(str, arguments)])


@pytest.mark.parametrize(
    ("formats", "how"),
    [
        pytest.param(("MJPG", "YUYV", "NV12"), "nv12, in the camera's buffers", marks=pytest.mark.integration),
        (("MJPG", "YUYV"), "yuyv, in the camera's buffers"),
        pytest.param(("MJPG",), "rgb, made of MJPG, one copy", marks=pytest.mark.integration),
    ],
)
def test_the_demo_runs_on_the_cameras_buffers(filming, tmp_path, formats, how):
    """`burst demo camera --source` takes what the camera has; the burst copies nothing; a film is written."""
    film = filming(*formats)
    done = demo(film, tmp_path, "--frames", 8)
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["source"] == f"{film.camera.path}, {how}"
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


def test_a_camera_that_is_refused_is_read_by_ffmpeg(filming, tmp_path, monkeypatch):
    """The name of the source says which camera and why; what FFmpeg cannot read either has both reasons."""
    film = filming("H264")

    def refused(*_):
        raise ValueError("nothing can be decoded")

    monkeypatch.setattr(camera_sources, "VideoSource", refused)
    with pytest.raises(
        ValueError, match=r"cannot be opened as a video \(.*has: H264; read it by FFmpeg.*; nor by FFmpeg"
    ):
        open_source(film.camera.path, 0, 30)
    monkeypatch.setattr(camera_sources, "VideoSource", lambda *_: camera_sources.SceneSource(0))
    name = open_source(film.camera.path, 0, 30).name
    assert name.startswith(f"{film.camera.path}, read and copied by FFmpeg, because {film.camera.path}: format='nv12'")
    assert "H264" in name


@pytest.mark.parametrize("pixels", FOURCC)
def test_what_is_found_is_what_is_there(filming, connect, pixels):
    """From each format the network finds what it finds in RGB: nine of ten objects, with few false alarms."""
    film = filming(FOURCC[pixels])
    with film.open(pixels) as camera, connect().prepare(build_model(pixels=pixels)) as model:
        agreement = Agreement()
        for frame, _ in zip(camera, range(20), strict=False):
            agreement.count(decode(model.run(frame.memory.read())), film.truth[frame.number])
    summary = agreement.summary()
    assert summary["precision"] > 0.9, summary
    assert summary["recall"] > 0.8, summary


@pytest.mark.parametrize("pixels", FOURCC)
def test_a_picture_of_a_buffer(filming, pixels):
    """What is shown is what was filmed, as far as a film keeps colours."""
    film = filming(FOURCC[pixels])
    with film.open(pixels) as camera:
        frame, expected = camera.next_frame(), np.zeros((480, 640, 3), np.uint8)
        Scene(0, 640, 480).render(expected)
        assert np.abs(picture(frame.memory).astype(int) - expected).mean() < 4


@pytest.mark.parametrize("pixels", ["nv12", "yuyv"])
def test_frames_that_are_no_whole_cells(connect, pixels):
    """1080 rows are 67 cells and 8 rows that are not looked at."""
    with connect().prepare(build_model(1920, 1080, pixels=pixels)) as model:
        shape = {"nv12": (1, 1620, 1920, 1), "yuyv": (1, 1080, 1920, 2)}[pixels]
        heat, edges = model.run(np.full(shape, 128, np.uint8))
        assert (heat.shape, edges.shape) == ((1, 67, 120, heat.shape[3]), (1, 67, 120, 4))


def test_frames_that_were_not_read_are_counted(filming):
    """By the camera's own numbers, from the first frame after the clock began."""
    film = filming()
    film.camera.free_running = False
    source = CameraSource(film.open(newest=True))
    with pytest.raises(Timeout, match="no frame within"):
        source.camera.next_frame(timeout=0)
    for _ in range(3):
        film.camera.shoot()
    source.read(None)
    clock = CameraClock(source)
    film.camera.shoot()
    source.read(None)
    assert clock.dropped == 0
    assert [film.camera.shoot() for _ in range(4)] == [True, True, True, False]  # one buffer is held
    source.read(None)
    assert clock.dropped == 2
    film.camera.shoot()
    source.read(None)
    assert clock.dropped == 3
    source.close()


def test_a_rate_that_the_camera_lacks(tmp_path, monkeypatch):
    """It runs at its own; one that it has in another format is worth the decoding."""
    opened = []

    def camera(path, formats, width, height, **how):
        opened.append(how.get("fps"))
        if how.get("fps") == 25:
            raise driver.CameraFailed("fps=25")

    monkeypatch.setattr(camera_sources.driver, "Camera", camera)
    camera_sources.open_camera("/dev/video0", 25, (640, 480))
    camera_sources.open_camera("/dev/video0", 30, (640, 480))
    camera_sources.open_camera("/dev/video0", 0, (640, 480))
    assert opened == [25, None, 30, None]


class TestPage:
    """`burst demo camera --web --source /dev/video0`."""

    def shown(self, film, tmp_path, check, fps=30):
        """Runs check(viewer) with a page that is open."""

        async def run():
            show = CameraShow(film.camera.path, 0, fps, "reference", tmp_path)
            server = Server(show, port=0)
            origin = "/".join(server.url.split("/")[:3])
            async with (
                server.running(),
                aiohttp.ClientSession() as session,
                session.ws_connect(server.url + "stream", origin=origin) as viewer,
            ):
                await asyncio.wait_for(check(viewer), PATIENCE)

        asyncio.run(run())

    async def received(self, viewer, kind):
        while True:
            message = json.loads(await viewer.receive_str())
            shot = await viewer.receive_bytes() if message.get("has_picture") else None
            if message["type"] == "update":
                await viewer.send_json({"drawn": True})
            if message["type"] == kind:
                return message, shot

    @pytest.mark.parametrize(
        "formats",
        [
            pytest.param(("NV12",), marks=pytest.mark.integration),
            ("YUYV", "MJPG"),
            pytest.param(("MJPG",), marks=pytest.mark.integration),
        ],
    )
    def test_frames_come_from_the_cameras_buffers(self, home, filming, tmp_path, formats):
        """The page names the way, shows pictures and boxes on both paths, and offers no depth: one frame at a time."""
        film = filming(*formats)

        async def check(viewer):
            hello, _ = await self.received(viewer, "hello")
            assert hello["source"].startswith(f"{film.camera.path}, ")
            assert "depth" not in {setting["name"] for setting in hello["settings"]}
            for _ in range(5):
                update, shot = await self.received(viewer, "update")
                assert shot.startswith(b"\xff\xd8")
                assert update["size"] == [640, 480]
                assert set(update["points"][-1]["calls"]) == {"burst", "plain RPC"}
            assert update["found"]
            assert re.fullmatch(r"\d+ taken, 0 missed, \d+ skipped, 0 damaged, the last \d+ ms ago", update["camera"])

        self.shown(film, tmp_path, check)

    def test_a_device_that_is_killed(self, home, film, tmp_path):
        """kill -9: the page says so, frames go on, and the camera has all its buffers but the one that is shown."""

        async def check(viewer):
            while not (place := (await self.received(viewer, "state"))[0]["place"]):
                pass
            await self.received(viewer, "update")
            os.kill(place["engine"], signal.SIGKILL)
            while not (await self.received(viewer, "state"))[0]["deaths"]:
                pass
            for _ in range(10):
                await self.received(viewer, "update")

        self.shown(film, tmp_path, check)
        assert film.camera.waiting == 0  # the stream was stopped, which gives all buffers back to the program
        assert not film.camera.streaming

    def test_a_camera_that_is_unplugged_and_plugged_in(self, home, film, tmp_path):
        """The page says that it is gone, and goes on when it is back."""

        async def check(viewer):
            await self.received(viewer, "update")
            os.rename(film.camera.path, f"{film.camera.path} in the drawer")
            film.camera.unplug()
            while "was unplugged" not in (await self.received(viewer, "state"))[0]["notice"]:
                pass
            film.camera.plug_in()
            os.rename(f"{film.camera.path} in the drawer", film.camera.path)
            await self.received(viewer, "update")
            await self.received(viewer, "update")

        self.shown(film, tmp_path, check)
