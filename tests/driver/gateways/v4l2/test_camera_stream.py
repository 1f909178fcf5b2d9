"""`driver.Camera`: frames in the camera's own buffers, what is refused, and what is counted."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import burst
import driver
from driver.gateways.v4l2 import video_device
from driver.gateways.v4l2 import video_ioctls as v4l2


def opened(fake, **how):
    return driver.Camera(fake.path, ioctl=fake.ioctl, **how)


def shoot(fake, times=1, **how):
    for _ in range(times):
        assert fake.shoot(**how)


def values(frames):
    return [int(frame.memory.asarray()[0]) for frame in frames]


class TestFrames:
    @pytest.mark.parametrize("planes", [False, True], ids=["one API", "the other API"])
    @pytest.mark.parametrize(
        ("pixels", "shape"),
        [
            ("nv12", (1, 720, 640, 1)),
            ("rgb", (1, 480, 640, 3)),
            ("yuv420", (1, 720, 640, 1)),
            ("gray", (1, 480, 640, 1)),
        ],
    )
    def test_a_frame_is_an_operand_in_place(self, fake, pixels, shape, planes):
        """Each format, by both of V4L2's interfaces, is an image of its shape in the camera's memory, read-only."""
        with opened(source := fake(formats=("NV12", "RGB3", "YU12", "GREY"), planes=planes), format=pixels) as camera:
            assert (camera.shape, camera.is_in_place, len(camera.buffers)) == (shape, True, 4)
            assert source.queued == source.done  # nothing runs before a frame is asked for
            feeder = threading.Thread(target=_feed, args=(source, 1))
            feeder.start()
            frame = camera.next_frame()
            feeder.join()
            assert frame.memory is camera.buffers[frame.index]
            assert frame.memory.read().shape == shape
            source.rooms[frame.index][0] = 99
            assert frame.memory.asarray()[0] == 99
            assert not frame.memory.asarray().flags.writeable

    def test_rows_with_gaps(self, fake):
        """Gaps after rows are known from the camera's stride; such a frame says that it is not in place."""
        with opened(fake(gap=64)) as camera:
            assert not camera.is_in_place
            assert camera.buffers[0].planes == ((0, 704), (704 * 480, 704))

    def test_buffers_go_round(self, started):
        """A frame is released when the next one is asked for, so any number of frames come from four buffers."""
        source, camera = started()
        seen = []
        for frame in camera:
            seen.append((frame.number, values([frame])[0]))
            if len(seen) == 11:
                break
            shoot(source)
        assert seen == [(n, n) for n in range(11)]
        assert camera.stats() == {"frames": 11, "missed": 0, "skipped": 0, "damaged": 0, "held": 0}

    def test_a_held_frame_is_not_overwritten(self, started):
        """The camera has only the other buffers until a frame is released; a second release does nothing."""
        source, camera = started(first=4)
        frames = [camera.next_frame() for _ in range(4)]
        assert not source.shoot()
        assert values(frames) == [0, 1, 2, 3]
        frames[1].release()
        frames[1].release()
        shoot(source)
        newer = camera.next_frame()
        assert (newer.index, newer.number) == (frames[1].index, 5)
        frames[1].release()  # of the frame before: the buffer is another frame's by now
        assert camera.stats() == {"frames": 5, "missed": 1, "skipped": 0, "damaged": 0, "held": 4}

    def test_all_frames_held(self, started):
        """Without a buffer no frame can come: that is said at once, and a release mends it."""
        source, camera = started(first=4)
        frames = [camera.next_frame() for _ in range(4)]
        with pytest.raises(driver.CameraFailed, match=r"no buffer left: all 4 frames are held; .* buffers=8"):
            camera.next_frame()
        frames[0].release()
        shoot(source)
        assert camera.next_frame().index == frames[0].index

    def test_the_newest_frame(self, started):
        """With `newest`, frames that waited go back unseen, and are counted."""
        source, camera = started(first=3, newest=True)
        assert camera.next_frame().number == 2
        assert camera.stats() == {"frames": 1, "missed": 0, "skipped": 2, "damaged": 0, "held": 1}
        shoot(source, 3)
        assert camera.next_frame().number == 5

    @pytest.mark.parametrize("wrong", [{"flags": v4l2.FLAG_ERROR}, {"nbytes": 1000}])
    def test_a_damaged_frame_is_no_frame(self, started, wrong):
        """What the camera marks, or leaves incomplete, is given back, counted, and never seen."""
        source, camera = started(first=0)
        shoot(source, **wrong)
        shoot(source)
        assert camera.next_frame().number == 1
        assert camera.stats()["damaged"] == 1

    def test_planes_that_begin_elsewhere(self, started):
        """A frame that does not begin where the buffer does is none that can be used in place."""
        source, camera = started(first=0, fake_how={"planes": True})
        shoot(source, offset=64)
        shoot(source)
        assert camera.next_frame().number == 1

    def test_a_count_that_begins_again(self, started):
        """After 2**32 - 1 comes 0: no frame is missed."""
        source, camera = started(first=0)
        source.number = 2**32 - 1
        shoot(source)
        source.number = 0
        shoot(source)
        assert [camera.next_frame().number for _ in range(2)] == [2**32 - 1, 0]
        assert camera.stats()["missed"] == 0

    def test_no_frame_in_time(self, started):
        """A camera that delivers nothing is a Timeout, and can be asked again."""
        source, camera = started(first=0)
        with pytest.raises(burst.Timeout, match=r"no frame within 0\.01 s"):
            camera.next_frame(timeout=0.01)
        shoot(source)
        assert camera.next_frame().number == 0

    def test_what_the_camera_is_asked_for(self, fake):
        """Rate and number of buffers; a camera may make fewer buffers."""
        with opened(source := fake(most=3), fps=25, buffers=8) as camera:
            assert source.rate == 25
            assert len(camera.buffers) == 3

    def test_closing(self, started):
        """The stream stops, no descriptor is left, held frames can still be read, and the camera is closed."""
        source, camera = started()
        frame = camera.next_frame()
        camera.close()
        assert not source.streaming
        assert values([frame]) == [0]
        frame.release()
        with pytest.raises(driver.CameraFailed, match="closed; open it again"):
            camera.next_frame()

    def test_metrics_by_camera(self, started):
        """Each count is a line that Prometheus reads, with the camera's path."""
        source, camera = started(first=2)
        camera.next_frame()
        lines = camera.metrics().splitlines()
        assert f'burst_camera_frames_total{{camera="{source.path}"}} 1' in lines
        assert f'burst_camera_held{{camera="{source.path}"}} 1' in lines
        assert len(lines) == len(camera.stats())


@pytest.fixture
def started(fake):
    """A fake whose stream runs, with so many frames taken, and the camera."""
    cameras = []

    def start(first=1, fake_how=None, **how):
        source = fake(**fake_how or {})
        camera = opened(source, **how)
        cameras.append(camera)
        with pytest.raises(burst.Timeout):
            camera.next_frame(timeout=0)
        shoot(source, first)
        return source, camera

    yield start
    for camera in cameras:
        camera.close()


def _feed(source, times):
    while times:
        times -= source.shoot()


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("how", "asked", "words"),
        [
            ({"formats": ("YUYV", "MJPG")}, {}, r"format='nv12' \(NV12\) .* has: YUYV, MJPG; read it by FFmpeg"),
            ({"formats": ("RGB3", "YUYV")}, {}, r"has: RGB3, YUYV; pass format='rgb'"),
            ({"formats": ("NV12",)}, {"format": "rgb"}, r"format='rgb' \(RGB3\) .* has: NV12; pass format='nv12'"),
            ({"exports": False}, {}, r"does not export buffers \(VIDIOC_EXPBUF\); read it by FFmpeg"),
            ({"busy": True}, {}, r"is busy: setting NV12 640x480 was refused \(EBUSY\); end the program"),
            ({"caps": v4l2.CAP_STREAMING}, {}, r"a fake camera captures no video"),
            ({"caps": v4l2.CAP_CAPTURE}, {}, r"has no buffers, only read\(\)"),
            (
                {},
                {"width": 1920, "height": 1080},
                r"gives NV12 640x480 and not NV12 1920x1080; pass width=640, height=480",
            ),
        ],
    )
    def test_a_camera_that_cannot(self, fake, how, asked, words):
        """The message names the camera, what it has and the remedy; no descriptor is left."""
        source = fake(**how)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(driver.CameraFailed, match=words) as caught:
            opened(source, **asked)
        assert source.path in str(caught.value)
        assert len(os.listdir("/proc/self/fd")) <= before + 2 * len(source.buffers)

    @pytest.mark.parametrize("asked", [{"format": "mjpeg"}, {"buffers": 1}, {"buffers": 33}])
    def test_arguments_that_no_camera_takes(self, fake, asked):
        """They are named, before the camera is opened."""
        ((name, value),) = asked.items()
        source = fake()
        with pytest.raises(ValueError, match=f"{name}={value!r}: "):
            opened(source, **asked)
        assert not source.calls

    def test_what_is_no_camera(self, tmp_path):
        """A file, a device of another kind and nothing at all: by the kernel's own ioctl."""
        (tmp_path / "file").write_bytes(b"frames")
        for path in (tmp_path / "file", Path("/dev/null")):
            with pytest.raises(driver.CameraFailed, match=rf"{path}: no V4L2 device"):
                driver.Camera(str(path))
        with pytest.raises(driver.CameraFailed, match="nothing: no such camera"):
            driver.Camera(str(tmp_path / "nothing"))

    def test_who_holds_a_camera(self, tmp_path):
        """Processes are found by what they have open."""
        with (tmp_path / "node").open("w"):
            assert any(holder.startswith(f"{os.getpid()} (") for holder in video_device.holders(f"{tmp_path}/node"))
        assert video_device.holders(f"{tmp_path}/node") == []


class TestUnplugged:
    @pytest.mark.parametrize("code", [errno.ENODEV, errno.EIO])
    def test_amid_a_stream(self, started, code):
        """A wait ends at once with an error that names the camera; frames taken before are whole; all ends cleanly."""
        source, camera = started(first=2)
        frames = [camera.next_frame() for _ in range(2)]
        if code == errno.EIO:
            os.unlink(source.path)  # its node is gone, too
        source.unplug(code)
        with pytest.raises(driver.CameraLost, match=rf"{source.path} was unplugged: waiting for a frame failed"):
            camera.next_frame()
        assert values(frames) == [0, 1]
        for frame in frames:
            frame.release()
        camera.close()

    def test_an_error_of_a_camera_that_is_there(self, started):
        """EIO alone is no unplugging."""
        source, camera = started()
        source.unplug(errno.EIO)
        with pytest.raises(driver.CameraFailed, match=r"waiting for a frame failed: .*EIO") as caught:
            camera.next_frame()
        assert not isinstance(caught.value, driver.CameraLost)

    def test_before_it_is_opened(self, fake):
        """Opening says so, too."""
        source = fake()
        source.unplug()
        with pytest.raises(driver.CameraLost, match="asking what it is failed"):
            opened(source)


def first_byte(camera):
    """A model that says the largest byte of a frame."""
    m = driver.ModelBuilder()
    x = m.input("quant8_asymm", camera.shape, scale=1.0, zero_point=0)
    rows, columns = camera.shape[1:3]
    m.output(m.operation("MAX_POOL_2D", x, 0, 0, 0, 0, columns, rows, columns, rows, 0))
    return m.build()


def requests_for(camera):
    results = driver.Memory.create(len(camera.buffers))
    return [
        burst.Request(
            (burst.RequestArgument(),), (burst.RequestArgument(pool=1, offset=n, length=1),), (frame, results)
        )
        for n, frame in enumerate(camera.buffers)
    ]


class TestOnADevice:
    def test_nothing_is_copied(self, connect, fake):
        """Thirty frames of 1080p go through a burst: each answer is its frame's, and no byte of bulk is copied."""
        source = fake(size=(1920, 1080), free_running=True)
        with opened(source) as camera, connect().prepare(first_byte(camera)) as model, model.burst() as fast:
            requests, seen = requests_for(camera), []
            for frame in camera:
                seen.append(fast.execute(requests[frame.index], timeout=20).outputs[0].item())
                if len(seen) == 30:
                    break
            assert seen == list(range(30))
            assert fast.stats()["copied_bytes"]["bulk"] == 0
            assert fast.stats()["runs"]["plain"] == 0

    def test_gaps_are_copied_and_counted(self, connect, fake):
        """A camera that pads its rows still gives right answers, and the copies are counted."""
        with (
            opened(source := fake(gap=64, free_running=True, fill=_without_the_gaps)) as camera,
            connect().prepare(first_byte(camera)) as model,
            model.burst() as fast,
        ):
            with camera.next_frame() as frame:
                assert fast.execute(requests_for(camera)[frame.index]).outputs[0].item() == 1
            assert fast.stats()["copied_bytes"]["bulk"] == 640 * 720
        assert source.number

    def test_a_device_that_is_killed(self, home, fake, process):
        """kill -9 amid the stream: every frame before and after it has its own answer, and none is lost."""
        source = fake(free_running=True)
        with (
            opened(source) as camera,
            driver.connect("reference") as device,
            device.prepare(first_byte(camera)) as model,
            model.burst(recover=True) as fast,
        ):
            requests, seen = requests_for(camera), []
            for frame in camera:
                if len(seen) == 10:
                    engine = process(device.engine_pid)
                    engine.kill()
                    assert engine.has_ended()
                result = fast.execute(requests[frame.index], timeout=20)
                result.raise_for_status()
                seen.append((frame.number, result.outputs[0].item()))
                if len(seen) == 20:
                    break
            assert seen == [(n, n) for n in range(20)]
            assert camera.stats()["missed"] == 0


def _without_the_gaps(number, room):
    """The padding has larger values than the picture."""
    rows = room.reshape(-1, 704)
    rows[:, :640], rows[:, 640:] = number + 1, 200


@pytest.mark.skipif(not video_device.cameras(), reason="no /dev/video*: load vivid (modprobe vivid) or v4l2loopback")
def test_a_real_node():
    """A camera of this machine: ten frames of a format that it has, without gaps in time; or the reason why not."""
    failures = []
    for path in video_device.cameras():
        for pixels in ("nv12", "rgb", "yuv420", "gray"):
            try:
                with driver.Camera(path, pixels) as camera:
                    frames = [frame.number for frame, _ in zip(camera, range(10), strict=False)]
                    assert np.all(np.diff(frames) > 0)
                    assert camera.stats()["frames"] >= 10
                    return
            except (driver.CameraFailed, burst.Timeout) as error:
                failures.append(str(error))
    pytest.skip("; ".join(failures))
