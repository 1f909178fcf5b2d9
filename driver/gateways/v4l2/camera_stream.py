"""A camera's stream: the kernel's own buffers as hardware buffers, which a device process reads where they lie."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from burst.errors import Timeout
from burst.memory import HardwareBuffer, Memory, Usage
from driver.errors import CameraFailed, CameraLost
from fmq.process_bound import ProcessBound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from prometheus_client.registry import Collector

    from driver.gateways.v4l2.video_device import CameraFormat, FilledBuffer, Ioctl

SOURCES = {
    "nv12": ("NV12", "NM12"),
    "yuyv": ("YUYV",),
    "rgb": ("RGB3", "MJPG", "JPEG"),
    "yuv420": ("YU12", "YM12"),
    "gray": ("GREY", "MJPG", "JPEG"),
}
"""What a frame of each format is made of, in the order of preference; those that are copied come last."""
_RAW = ("BA81", "GBRG", "GRBG", "RGGB", "BG1", "GB1", "BA1", "RG1", "pB", "pG", "pg", "pR")  # a sensor's own values
_NUMBERS = 2**32  # after which a camera's count of frames begins again


_opening, _cameras = threading.Lock(), WeakSet["Camera"]()


class CameraFrame(ProcessBound):
    """A frame, in a buffer that the camera does not write before `release`."""

    to_send = "send a copy of its array"

    __slots__ = ("_camera", "index", "memory", "number", "seconds")

    def __init__(self, camera: Camera, filled: FilledBuffer) -> None:
        self._camera = camera
        self.index = filled.buffer  #: of its buffer in `Camera.buffers`
        self.memory: HardwareBuffer = camera.buffers[filled.buffer]
        self.number = filled.number  #: the camera's count of frames, which goes on over those that it drops
        self.seconds = filled.seconds  #: when it was taken, as of time.monotonic()

    def release(self) -> None:
        """Give the buffer back to the camera. Any thread; a second time does nothing."""
        self._camera.give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Camera(ProcessBound):
    """A V4L2 camera. Its buffers are memory that requests name as they are, so no byte of a frame is copied.

    Where the camera has only JPEG pictures, or planes in memory of their own each, frames are copied once, and counted.
    One thread takes frames; any thread may release them. The stream begins with the first frame that is asked for.
    """

    to_send = "open the camera where it is needed"

    def __init__(
        self,
        path: str = "/dev/video0",
        format: str | Sequence[str] = "nv12",  # noqa: A002 (what `Memory.from_hardware_buffer` calls it)
        width: int | None = None,
        height: int | None = None,
        *,
        fps: float | None = None,
        buffers: int = 4,
        newest: bool = False,
        ioctl: Ioctl = fcntl.ioctl,
    ) -> None:
        """Have the camera make its buffers, and export each once.

        `format`: "nv12", "yuyv", "rgb", "yuv420" or "gray"; or several, of which the first is taken that the camera
        has at that size and rate. `width`, `height`: None: as the camera is set. `fps`: None: its own rate. `newest`:
        frames that wait are given back unseen when a newer one is there. `ioctl`: calls the kernel; tests pass another.
        Raise CameraFailed, and ValueError for an argument that no camera takes.
        """
        from driver.gateways.v4l2.frame_copies import FrameCopies, are_copied
        from driver.gateways.v4l2.video_device import VideoDevice  # here: `import driver` need not wait for its records

        formats = (format,) if isinstance(format, str) else tuple(format)
        if not formats or not set(formats) <= set(SOURCES):
            raise ValueError(f"format={format!r}: one of {', '.join(SOURCES)}, or several of them")
        if fps is not None and not 0 < fps < 1e5:
            raise ValueError(f"fps={fps!r}: frames a second, more than 0; None leaves the camera's own rate")
        if not 2 <= buffers <= 32:
            raise ValueError(f"buffers={buffers!r}: 2 to 32; the camera fills one while the device reads another")
        self.path, self.newest = path, newest
        self._counts = dict.fromkeys(("frames", "missed", "skipped", "damaged", "copied_bytes"), 0)
        self._held: dict[int, CameraFrame] = {}
        self._giving = threading.Lock()
        self._last: int | None = None
        self._newest_at: float | None = None
        self._is_streaming = False
        self.buffers: tuple[HardwareBuffer, ...] = ()  #: the memory; a frame's `index` says in which it lies
        self._device = VideoDevice(path, ioctl)
        try:
            self.format, self.layout = self._agreed(formats, width, height, fps)
            count = self._device.reserve(buffers)
            self._copies: FrameCopies | None = None
            if are_copied(self.layout.fourcc):
                self._copies = FrameCopies(self._device, self.format, self.layout, count)
                self.buffers = self._copies.images
            else:
                planes = planes_of(self.format, self.layout)
                self.buffers = tuple(self._exported(index, planes) for index in range(count))
        except BaseException:
            self.close()
            raise
        with _opening:
            _cameras.add(self)

    @property
    def width(self) -> int:
        """Pixels of a row."""
        return self.layout.width

    @property
    def height(self) -> int:
        """Pixels of a column."""
        return self.layout.height

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the operand that a frame is."""
        return self.buffers[0].shape

    @property
    def is_in_place(self) -> bool:
        """True if the device reads frames where the camera wrote them.

        Not those that are decoded or put together, which `stats` counts, nor those with gaps between rows or planes,
        which the burst copies and counts.
        """
        return self._copies is None and self.buffers[0].view() is not None

    def next_frame(self, timeout: float | None = 5.0) -> CameraFrame:
        """Return the next frame, or with `newest` the newest; release it when its result is there.

        Raise Timeout, CameraLost when the camera is unplugged, and CameraFailed, also when all buffers are held.
        """
        self._start()
        end = None if timeout is None else time.monotonic() + timeout
        while (found := self._taken()) is None:
            if len(self._held) == len(self.buffers):
                raise CameraFailed(
                    f"{self.path}: no buffer left: all {len(self.buffers)} frames are held; release one, or open the "
                    f"camera with buffers={2 * len(self.buffers)}"
                )
            left = 3600.0 if end is None else end - time.monotonic()
            if left <= 0 or not (self._device.wait(left) or end is None):
                raise Timeout(f"{self.path}: no frame within {timeout} s; is the camera covered, asleep or stopped?")
        frame = self._held[found.buffer] = CameraFrame(self, found)
        return frame

    def __iter__(self) -> Iterator[CameraFrame]:
        """Frame after frame; each is released when the next one is asked for. Raise as `next_frame`."""
        while True:
            with self.next_frame() as frame:
                yield frame

    def give_back(self, frame: CameraFrame) -> None:
        """Give a buffer back, for `CameraFrame.release`."""
        with self._giving:
            if self._held.get(frame.index) is not frame:
                return
            del self._held[frame.index]
            if self._is_streaming:
                with suppress(CameraLost):  # which the next `next_frame` tells
                    self._device.queue(frame.index)

    def stats(self) -> dict[str, int]:
        """frames: taken; missed: lost in the camera, which had no free buffer; skipped: for a newer one; damaged: given
        back, because the camera said so or left them incomplete; held: not released yet; copied_bytes: what was written
        to decode frames or to put their planes together.
        """
        return {**self._counts, "held": len(self._held)}

    @property
    def age(self) -> float | None:
        """Seconds since the last frame was taken by the camera; None before the first. It grows while none comes."""
        return None if self._newest_at is None else time.monotonic() - self._newest_at

    @staticmethod
    def collector() -> Collector:
        """`stats` and `age` of all cameras that are open in this process, for a registry of prometheus_client."""
        from driver.gateways.v4l2.camera_metrics import CameraCollector

        return CameraCollector(_open_cameras)

    def close(self) -> None:
        """Stop the stream and give the camera back. Frames that are held stay readable, and are not overwritten."""
        with _opening:
            _cameras.discard(self)
        with self._giving:
            if self._is_streaming:
                self._is_streaming = False
                self._device.stop()
            self._device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        if self._device.fd < 0:
            raise CameraFailed(f"{self.path}: the camera is closed; open it again")
        if not self._is_streaming:
            for index in range(len(self.buffers)):
                self._device.queue(index)
            self._device.start()
            self._is_streaming = True

    def _taken(self) -> FilledBuffer | None:
        """Return the frames that are there now, without waiting."""
        while found := self._whole():
            for _ in self.buffers if self.newest else ():
                if not (newer := self._whole()):
                    break
                self._device.queue(found.buffer)
                self._counts["skipped"] += 1
                found = newer
            if self._copies is None or self._copies.make(found):
                self._counts["frames"] += 1
                self._counts["copied_bytes"] += self.buffers[0].nbytes if self._copies else 0
                return found
            self._reject(found)
        return None

    def _whole(self) -> FilledBuffer | None:
        """Return the oldest finished frame that is not damaged."""
        while found := self._device.dequeue():
            if self._last is not None:
                self._counts["missed"] += (found.number - self._last - 1) % _NUMBERS
            self._last, self._newest_at = found.number, found.seconds
            if not found.is_damaged and (self._copies or self._is_in_its_place(found)):
                return found
            self._reject(found)
        return None

    def _is_in_its_place(self, found: FilledBuffer) -> bool:
        return found.pieces[0].offset == 0 and found.pieces[0].end >= self.buffers[0].nbytes

    def _reject(self, found: FilledBuffer) -> None:
        self._counts["damaged"] += 1
        self._device.queue(found.buffer)

    def _agreed(
        self, formats: Sequence[str], width: int | None, height: int | None, fps: float | None
    ) -> tuple[str, CameraFormat]:
        """Agree with the camera on the first of the formats that it has, at that size and rate."""
        there, failures = self._device.formats(), []
        wanted = [(name, fourcc) for name in formats for fourcc in SOURCES[name] if fourcc in there]
        for name, fourcc in wanted:
            try:
                found = self._device.configure(fourcc, width, height)
                self._check_size(found, fourcc, width, height)
                if fps:
                    self._device.set_rate(fps, found)
            except CameraLost:
                raise
            except CameraFailed as error:
                failures.append(error)
            else:
                return name, found
        if failures:
            words = [str(error).removeprefix(f"{self.path}: ") for error in failures]
            raise CameraFailed(f"{self.path}: {'; '.join(words)}") from failures[0]
        asked = ", ".join(f"{name!r} ({' or '.join(SOURCES[name])})" for name in formats)
        raise CameraFailed(
            f"{self.path}: format={asked} is not one that the camera has: {', '.join(there) or 'none'}; "
            f"{remedy_for(there)}"
        )

    def _check_size(self, found: CameraFormat, fourcc: str, width: int | None, height: int | None) -> None:
        asked = width or found.width, height or found.height
        if found.fourcc != fourcc or (found.width, found.height) != asked:
            sizes = self._device.sizes(fourcc) or f"{found.width}x{found.height}"
            raise CameraFailed(
                f"{self.path}: the camera gives {found.fourcc} {found.width}x{found.height} and not {fourcc} "
                f"{asked[0]}x{asked[1]}; pass another width and height: it has {sizes}"
            )

    def _exported(self, index: int, planes: list[tuple[int, int]]) -> HardwareBuffer:
        fd, usage = self._device.export(index), Usage.CPU_READ | Usage.CAMERA_WRITE
        try:
            image: Any = Memory.from_hardware_buffer(
                fd, self.format, self.width, self.height, planes=planes, usage=usage
            )
        except (OSError, ValueError) as error:
            raise CameraFailed(f"{self.path}: buffer {index} cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        assert isinstance(image, HardwareBuffer)
        return image


def _open_cameras() -> list[Camera]:
    with _opening:
        return list(_cameras)


def planes_of(format: str, layout: CameraFormat) -> list[tuple[int, int]]:  # noqa: A002
    """Offset and stride of each plane, as V4L2 lays a frame out in one piece of memory."""
    pixel = {"rgb": 3, "yuyv": 2}.get(format, 1)
    stride, rows = layout.pieces[0].stride or layout.width * pixel, layout.height
    match format:
        case "nv12":
            return [(0, stride), (stride * rows, stride)]
        case "yuv420":
            half = stride // 2
            return [(0, stride), (stride * rows, half), (stride * rows + half * (rows // 2), half)]
    return [(0, stride)]


def remedy_for(there: list[str]) -> str:
    """Return what to do about a camera that has those formats, of four letters each."""
    ours = {name: [letters for letters in sources if letters in there] for name, sources in SOURCES.items()}
    if found := [f"{name!r} ({letters[0]})" for name, letters in ours.items() if letters]:
        return f"pass format={' or '.join(found)}"
    if any(letters.startswith(_RAW) for letters in there):
        return (
            "these are a sensor's raw values: read the camera through libcamera (Picamera2), and pass its buffers to "
            "Memory.from_hardware_buffer"
        )
    return "read it by FFmpeg, which converts and copies each frame"


__all__ = ["Camera", "CameraFrame"]
