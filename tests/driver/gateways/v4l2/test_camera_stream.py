"""`driver.Camera`: frames in the camera's own buffers, what is refused, and what is counted."""

import errno
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import burst
import driver
from driver.gateways.v4l2 import video_device
from driver.gateways.v4l2 import video_ioctls as v4l2
from driver.gateways.v4l2.camera_stream import SOURCES


def opened(fake, **how):
    return driver.Camera(fake.path, ioctl=fake.ioctl, **how)


def shoot(fake, times=1, **how):
    for _ in range(times):
        assert fake.shoot(**how)


def counts(**others):
    return dict.fromkeys(("frames", "missed", "skipped", "damaged", "copied_bytes", "held"), 0) | others


def values(frames):
    return [int(frame.memory.asarray()[0]) for frame in frames]


class TestFrames:
    @pytest.mark.parametrize("planes", [False, True], ids=["one API", "the other API"])
    @pytest.mark.parametrize(
        ("pixels", "shape"),
        [
            ("nv12", (1, 720, 640, 1)),
            ("rgb", (1, 480, 640, 3)),
            ("yuyv", (1, 480, 640, 2)),
            ("yuv420", (1, 720, 640, 1)),
            ("gray", (1, 480, 640, 1)),
        ],
    )
    def test_a_frame_is_an_operand_in_place(self, fake, pixels, shape, planes):
        """Each format, by both of V4L2's interfaces, is an image of its shape in the camera's memory, read-only."""
        with opened(
            source := fake(formats=("NV12", "RGB3", "YU12", "GREY", "YUYV"), planes=planes), format=pixels
        ) as camera:
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
        assert camera.stats() == counts(frames=11)

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
        assert camera.stats() == counts(frames=5, missed=1, held=4)

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
        assert camera.stats() == counts(frames=1, skipped=2, held=1)
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

    @pytest.mark.parametrize("fps", [29.97, 15])
    def test_a_rate_that_the_camera_has(self, fake, fps):
        """Rates that differ by the television's thousandth are one."""
        with opened(source := fake(rates=(30, 15)), fps=fps):
            assert source.rate == round(fps)

    def test_a_size_of_several(self, fake):
        """The size that is asked for, and without one the camera's own."""
        with opened(source := fake(sizes=((640, 480), (1280, 720))), width=1280, height=720) as camera:
            assert camera.shape == (1, 1080, 1280, 1)
        assert source.size == (1280, 720)

    @pytest.mark.parametrize(
        ("how", "asked", "taken"),
        [
            ({"formats": ("MJPG", "YUYV")}, ("nv12", "yuyv", "rgb"), "yuyv"),
            ({"formats": ("YUYV", "NV12")}, ("nv12", "yuyv"), "nv12"),
            ({"formats": ("GREY",)}, ["rgb", "gray"], "gray"),
        ],
    )
    def test_the_first_of_several_formats(self, fake, how, asked, taken):
        """What the camera has, in the order of the program."""
        with opened(fake(**how), format=asked) as camera:
            assert camera.format == taken

    def test_a_format_that_has_the_rate(self, fake):
        """A webcam has 30 frames a second only as JPEG: then these are taken."""

        class Webcam:
            def __init__(self, fake):
                self.fake = fake

            def ioctl(self, fd, request, record):
                self.fake.rates = (30,) if self.fake.fourcc == "MJPG" else (5,)
                return self.fake.ioctl(fd, request, record)

        source = fake(formats=("YUYV", "MJPG"))
        with driver.Camera(source.path, ("yuyv", "rgb"), fps=30, ioctl=Webcam(source).ioctl) as camera:
            assert (camera.format, camera.layout.fourcc) == ("rgb", "MJPG")
        with pytest.raises(driver.CameraFailed, match=r"fps=25: YUYV .* comes at 5 .*; fps=25: MJPG .* comes at 30"):
            driver.Camera(source.path, ("yuyv", "rgb"), fps=25, ioctl=Webcam(source).ioctl)

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
            (
                {"formats": ("YUYV", "MJPG")},
                {},
                r"format='nv12' \(NV12 or NM12\) .*: YUYV, MJPG; pass format='yuyv' \(YUYV\) or 'rgb' \(MJPG\)",
            ),
            ({"formats": ("RGB3", "H264")}, {}, r"has: RGB3, H264; pass format='rgb' \(RGB3\)$"),
            (
                {"formats": ("NV12",)},
                {"format": "rgb"},
                r"format='rgb' \(RGB3 or MJPG or JPEG\) .* has: NV12; pass format='nv12'",
            ),
            ({"formats": ("GREY",)}, {"format": "yuyv"}, r"format='yuyv' \(YUYV\) .* has: GREY; pass format='gray'"),
            ({"formats": ("H264",)}, {}, r"has: H264; read it by FFmpeg, which converts and copies each frame"),
            ({"formats": ("RG10", "pRAA")}, {}, r"these are a sensor's raw values: read the camera through libcamera"),
            ({"exports": False}, {}, r"does not export buffers \(VIDIOC_EXPBUF\); read it by FFmpeg"),
            *(
                ({"refuses": {request: errno.EBUSY}}, {"fps": 30}, rf"is busy: {what} was refused \(EBUSY\); end the")
                for request, what in (
                    (v4l2.S_FMT, "setting NV12 640x480"),
                    (v4l2.S_PARM, "setting 30 frames a second"),
                    (v4l2.REQBUFS, "making 4 buffers"),
                )
            ),
            ({"caps": v4l2.CAP_STREAMING}, {}, r"a fake camera captures no video"),
            ({"caps": v4l2.CAP_CAPTURE}, {}, r"has no buffers, only read\(\)"),
            (
                {},
                {"width": 1920, "height": 1080},
                r"gives NV12 640x480 and not NV12 1920x1080; pass another width and height: it has 640x480$",
            ),
            (
                {"sizes": ((1280, 720), (640, 480), (320, 240))},
                {"width": 641, "height": 480},
                r"gives NV12 1280x720 and not NV12 641x480; .* it has 320x240, 640x480, 1280x720$",
            ),
            (
                {"rates": (30, 15)},
                {"fps": 25},
                r"fps=25: NV12 640x480 comes at 15, 30 frames a second; pass one of these",
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

    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (errno.EBUSY, r"is busy: starting the stream was refused \(EBUSY\); end the program that uses it"),
            (errno.ENOSPC, r"starting the stream failed \(ENOSPC\): its USB bus has no room .* or another USB port"),
        ],
    )
    def test_a_stream_that_does_not_start(self, fake, code, words):
        """Another program's stream, and a bus that is full, are known only when frames are asked for."""
        with (
            opened(fake(refuses={v4l2.STREAMON: code})) as camera,
            pytest.raises(driver.CameraFailed, match=words),
        ):
            camera.next_frame()

    def test_a_camera_that_cannot_be_asked_for_its_rate(self, fake):
        """It goes on at its own."""
        with opened(source := fake(refuses={v4l2.S_PARM: errno.ENOTTY}, free_running=True), fps=25) as camera:
            assert camera.next_frame().number == 0
        assert source.rate is None

    @pytest.mark.parametrize(
        "asked",
        [
            {"format": "mjpeg"},
            {"format": ()},
            {"format": ("rgb", "mjpeg")},
            {"buffers": 1},
            {"buffers": 33},
            {"fps": 0},
        ],
    )
    def test_arguments_that_no_camera_takes(self, fake, asked):
        """They are named, before the camera is opened."""
        ((name, value),) = asked.items()
        source = fake()
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: ")):
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
    """A model that says the largest byte of each channel of a frame."""
    m = driver.ModelBuilder()
    x = m.input("quant8_asymm", camera.shape, scale=1.0, zero_point=0)
    rows, columns = camera.shape[1:3]
    m.output(m.operation("MAX_POOL_2D", x, 0, 0, 0, 0, columns, rows, columns, rows, 0))
    return m.build()


def requests_for(camera):
    size = camera.shape[3]
    results = driver.Memory.create(size * len(camera.buffers))
    return [
        burst.Request(
            (burst.RequestArgument(),), (burst.RequestArgument(pool=1, offset=n * size, length=size),), (frame, results)
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
            assert camera.stats() == counts(frames=20)
            assert source.waiting == len(camera.buffers)  # none was lost to the camera


def _without_the_gaps(number, room):
    """The padding has larger values than the picture."""
    rows = room.reshape(-1, 704)
    rows[:, :640], rows[:, 640:] = number + 1, 200


@pytest.mark.skipif(not os.path.exists("/dev/udmabuf"), reason="no /dev/udmabuf: CONFIG_UDMABUF of the kernel")
@pytest.mark.parametrize("gap", [0, 64])
def test_frames_in_dma_bufs_of_the_kernel(connect, fake, gap):
    """Buffers that are real DMA-BUFs, by udmabuf: each answer is its frame's, and only gaps are copied."""
    source = fake(dma=True, gap=gap, free_running=True, fill=_without_the_gaps if gap else None)
    with opened(source) as camera, connect().prepare(first_byte(camera)) as model, model.burst() as fast:
        assert camera.buffers[0].needs_sync
        requests = requests_for(camera)
        for frame in camera:
            answer = fast.execute(requests[frame.index], timeout=20).outputs[0].item()
            assert answer == frame.number + bool(gap)
            if frame.number == 9:
                break
        assert fast.stats()["copied_bytes"]["bulk"] == (10 * 640 * 720 if gap else 0)


@pytest.mark.skipif(not video_device.cameras(), reason="no /dev/video*: load vivid (modprobe vivid)")
@pytest.mark.parametrize("pixels", SOURCES)
def test_a_real_node(connect, pixels):
    """A camera of this machine: ten frames of the format go through a device in order, or the reason why not."""
    failures = []
    for path in video_device.cameras():
        try:
            with (
                driver.Camera(path, pixels) as camera,
                connect().prepare(first_byte(camera)) as model,
                model.burst() as fast,
            ):
                requests, numbers = requests_for(camera), []
                for frame in camera:
                    answer = fast.execute(requests[frame.index], timeout=20).outputs[0]
                    assert (answer.reshape(-1) == frame.memory.read().max(axis=(0, 1, 2))).all()
                    numbers.append(frame.number)
                    if len(numbers) == 10:
                        break
                assert np.all(np.diff(numbers) > 0)
                assert (fast.stats()["copied_bytes"]["bulk"] == 0) == (camera.buffers[0].view() is not None)
                return
        except (driver.CameraFailed, burst.Timeout) as error:
            failures.append(str(error))
    pytest.skip("; ".join(failures))
