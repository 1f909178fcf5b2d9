"""Frames that are copied: decoded from JPEG, or put together from planes in memory of their own each."""

import io
import subprocess
import sys

import accounts
import numpy as np
import pytest
from PIL import Image

import burst
import driver

SIZE = 64, 48


def opened(fake, **how):
    return driver.Camera(fake.path, ioctl=fake.ioctl, **how)


def picture(number):
    """A colour for each number, which JPEG keeps."""
    return np.full((SIZE[1], SIZE[0], 3), (50 + 10 * number, 200 - 10 * number, 100), np.uint8)


def jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95, subsampling="4:2:2")
    return file.getvalue()


def without_tables(data):
    """As cameras leave them out: the Huffman tables are those of the standard."""
    kept, at = bytearray(data[:2]), 2
    while data[at + 1] != 0xDA:
        length = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] != 0xC4:
            kept += data[at : at + length]
        at += length
    return bytes(kept) + data[at:]


class Jpegs:
    """Fills buffers with the picture of a number; `change` is done to its bytes."""

    def __init__(self, change=bytes):
        self.change = change

    def __call__(self, number, room):
        data = self.change(jpeg(picture(number)))
        room[: len(data)] = np.frombuffer(data, np.uint8)
        room[len(data) :] = 0x55  # what the buffer held before
        return len(data)


@pytest.fixture
def webcam(fake):
    """A camera as most on USB are."""

    def make(**how):
        return fake(**{"formats": ("YUYV", "MJPG"), "size": SIZE, "fill": Jpegs(), "free_running": True} | how)

    return make


def near(image, pixels):
    return np.abs(image.astype(int) - pixels).max() < 8


class TestJpeg:
    @pytest.mark.parametrize("change", [bytes, without_tables, lambda data: data + bytes(99)], ids=["", "DHT", "end"])
    def test_a_picture_is_decoded_into_shared_memory(self, webcam, change):
        """Whole files, those without Huffman tables and those with bytes behind them; what was written is counted."""
        with opened(webcam(fill=Jpegs(change)), format="rgb") as camera:
            assert (camera.shape, camera.is_in_place) == ((1, 48, 64, 3), False)
            for frame in camera:
                assert near(frame.memory.read()[0], picture(frame.number))
                if frame.number == 6:
                    break
            assert camera.stats()["copied_bytes"] == 7 * 64 * 48 * 3

    def test_gray_is_decoded_too(self, webcam):
        """Where only brightness counts, a third of the bytes."""
        with opened(webcam(), format="gray") as camera:
            frame = camera.next_frame()
            brightness = np.asarray(Image.fromarray(picture(0)).convert("L"))
            assert near(frame.memory.read()[0, :, :, 0], brightness)

    def test_rgb_of_the_camera_itself_comes_first(self, webcam):
        """Nothing is decoded where the camera has the format."""
        with opened(webcam(formats=("MJPG", "RGB3"), fill=None), format="rgb") as camera:
            assert camera.is_in_place
            assert camera.layout.fourcc == "RGB3"

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data[: len(data) * 2 // 3],
            lambda data: b"",
            lambda data: b"no picture at all",
            lambda data: jpeg(np.zeros((8, 8, 3), np.uint8)),
            lambda data: data[:20] + data[-2:],
        ],
        ids=["cut off", "empty", "nonsense", "another size", "no header"],
    )
    def test_a_broken_picture_is_no_frame(self, webcam, change):
        """It is counted, its buffer goes back, and the next whole one is the next frame."""
        source = webcam(free_running=False)
        with opened(source, format="rgb") as camera:
            with pytest.raises(burst.Timeout):
                camera.next_frame(timeout=0)
            source.fill.change = change
            source.shoot()
            source.fill.change = bytes
            source.shoot()
            frame = camera.next_frame()
            assert near(frame.memory.read()[0], picture(1))
            assert (camera.stats()["damaged"], camera.stats()["held"]) == (1, 1)
            frame.release()
            assert source.waiting == len(camera.buffers)

    def test_only_the_newest_is_decoded(self, webcam):
        """With `newest`, what waited costs nothing."""
        with opened(webcam(), format="rgb", newest=True) as camera:
            frame = camera.next_frame()
            assert near(frame.memory.read()[0], picture(frame.number))
            assert camera.stats()["skipped"] == frame.number > 0
            assert camera.stats()["copied_bytes"] == frame.memory.nbytes

    def test_a_held_frame_stays(self, webcam):
        """Each buffer has an image of its own, which is not written before the frame is released."""
        with opened(webcam(), format="rgb") as camera:
            frames = [camera.next_frame() for _ in camera.buffers]
            assert [near(frame.memory.read()[0], picture(frame.number)) for frame in frames] == [True] * 4
            with pytest.raises(driver.CameraFailed, match="no buffer left"):
                camera.next_frame()

    def test_without_its_library(self, webcam, monkeypatch):
        """The extra is named; formats that need no library are not held up by it."""
        monkeypatch.setitem(sys.modules, "simplejpeg", None)
        with pytest.raises(driver.CameraFailed, match=r"decoded from MJPG, which needs simplejpeg: .*\[camera\]"):
            opened(webcam(), format="rgb")
        with opened(webcam(fill=None), format="yuyv") as camera:
            assert camera.is_in_place

    def test_a_device_takes_them(self, webcam, connect):
        """Frames go through a burst as any image does: each answer is its frame's, and the burst copies nothing."""
        m = driver.ModelBuilder()
        x = m.input("quant8_asymm", (1, 48, 64, 3), scale=1.0, zero_point=0)
        m.output(m.operation("MAX_POOL_2D", x, 0, 0, 0, 0, 64, 48, 64, 48, 0))
        with (
            opened(webcam(), format="rgb") as camera,
            connect().prepare(m.build()) as model,
            model.burst() as fast,
        ):
            results = driver.Memory.create(3)
            output = burst.RequestArgument(pool=1, length=3)
            requests = [burst.Request((burst.RequestArgument(),), (output,), (b, results)) for b in camera.buffers]
            for frame in camera:
                answer = fast.execute(requests[frame.index], timeout=20).outputs[0]
                assert near(answer.reshape(3), picture(frame.number)[0, 0])
                if frame.number == 9:
                    break
            assert fast.stats()["copied_bytes"]["bulk"] == 0


def planes_of_number(number, room):
    for n, piece in enumerate(room):
        piece[:] = 10 * n + number


class TestPlanesOfTheirOwn:
    @pytest.mark.parametrize("gap", [0, 32])
    @pytest.mark.parametrize(("format_", "fourcc", "planes"), [("nv12", "NM12", 2), ("yuv420", "YM12", 3)])
    def test_planes_are_put_together(self, fake, format_, fourcc, planes, gap):
        """Planes in memory of their own each, with and without gaps between rows, become one image; it is counted."""
        source = fake(formats=(fourcc,), size=SIZE, planes=True, gap=gap, fill=planes_of_number, free_running=True)
        with opened(source, format=format_) as camera:
            assert (camera.shape, camera.is_in_place) == ((1, 72, 64, 1), False)
            for frame in camera:
                found = [set(frame.memory.plane(n).ravel().tolist()) for n in range(planes)]
                assert found == [{10 * n + frame.number} for n in range(planes)]
                if frame.number == 5:
                    break
            assert camera.stats()["copied_bytes"] == 6 * 64 * 72

    def test_planes_that_begin_later(self, fake):
        """What the camera writes before a plane is left out."""

        def fill(number, room):
            for piece in room:
                piece[:] = 7
                piece[:16] = 99

        source = fake(formats=("NM12",), size=SIZE, planes=True, gap=32, fill=fill)
        with opened(source) as camera:
            with pytest.raises(burst.Timeout):
                camera.next_frame(timeout=0)
            source.shoot(offset=16)
            assert set(camera.next_frame().memory.asarray().tolist()) == {7}

    def test_a_plane_that_is_not_whole(self, fake):
        """It is no frame."""
        source = fake(formats=("NM12",), size=SIZE, planes=True)
        with opened(source) as camera:
            with pytest.raises(burst.Timeout):
                camera.next_frame(timeout=0)
            source.shoot(nbytes=1000)
            source.shoot()
            assert camera.next_frame().number == 1
            assert camera.stats()["damaged"] == 1

    def test_one_piece_where_there_should_be_two(self, fake):
        """A driver that contradicts V4L2 is refused."""
        with pytest.raises(driver.CameraFailed, match=r"lays NM12 out in 1 pieces of memory, where V4L2 has 2"):
            opened(fake(formats=("NM12",), size=SIZE))

    def test_one_piece_comes_first(self, fake):
        """A camera that has both is used in place."""
        with opened(fake(formats=("NM12", "NV12"), planes=True)) as camera:
            assert (camera.layout.fourcc, camera.is_in_place) == ("NV12", True)


def test_an_account_that_may_not_open_it(fake, tmp_path):
    """The group that opens cameras is named: as another account sees it."""
    if accounts.missing():
        pytest.skip(accounts.missing())
    node = tmp_path / "node"
    node.touch(0o600)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    code = "import driver, sys\ntry: driver.Camera(sys.argv[1])\nexcept driver.CameraFailed as error: print(error)"
    command = accounts.python_as(65534, (), code, node)
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{node}: permission denied; add the account to the group video, and log in again\n"
