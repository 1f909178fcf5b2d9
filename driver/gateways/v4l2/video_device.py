"""One open V4L2 device: each call of the kernel that capturing needs, and what its errors mean."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from driver.errors import CameraFailed, CameraLost
from driver.gateways.v4l2 import video_ioctls as v4l2

if TYPE_CHECKING:
    from collections.abc import Callable

    Ioctl = Callable[[int, int, Any], object]

_GONE = {errno.ENODEV, errno.ENXIO}
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC


class CameraFormat(NamedTuple):
    """What the camera has agreed to. `stride`: bytes from one row of the first plane to the next."""

    fourcc: str
    width: int
    height: int
    stride: int
    nbytes: int


class FilledBuffer(NamedTuple):
    """A frame that the camera has finished. `number`: the camera's own count, which goes on over frames it drops."""

    buffer: int
    number: int
    seconds: float
    nbytes: int
    is_damaged: bool


def cameras(folder: Path = Path("/dev")) -> list[str]:
    """Paths of the video devices of this machine."""
    return sorted((str(path) for path in folder.glob("video[0-9]*")), key=lambda path: (len(path), path))


def holders(path: str, processes: Path = Path("/proc")) -> list[str]:
    """Processes that have a file open, as far as this account may see: "1234 (cheese)"."""
    found = []
    for folder in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(link) == path for link in (folder / "fd").iterdir()):
                found.append(f"{folder.name} ({(folder / 'comm').read_text().strip()})")
    return found


class VideoDevice:
    """A camera, open. `ioctl`: calls the kernel, with the descriptor, the request and a record."""

    def __init__(self, path: str, ioctl: Ioctl) -> None:
        """Raises CameraFailed for what is no camera that streams."""
        self.path, self._ioctl = path, ioctl
        self.fd = _opened(path)
        try:
            self._type = self._checked_type()
        except BaseException:
            self.close()
            raise
        self._planes = (v4l2.BufferPlane * v4l2.MOST_PLANES)()

    def formats(self) -> list[str]:
        """What the camera can deliver, by four letters each."""
        found: list[str] = []
        while len(found) < 256:
            record = v4l2.FormatDescription(index=len(found), type=self._type)
            try:
                self._ioctl(self.fd, v4l2.ENUM_FMT, record)
            except OSError as error:
                if error.errno in _GONE:
                    self._fail(error, "asking for its formats")
                break
            found.append(v4l2.letters(record.pixelformat))
        return found

    def configure(self, fourcc: str, width: int | None, height: int | None) -> CameraFormat:
        """Asks for frames of this kind; None: the size that the camera has now. What it will deliver."""
        record = v4l2.VideoFormat(type=self._type)
        self._call(v4l2.G_FMT, record, "asking for its format")
        pix = record.fmt.pix_mp if self._type == v4l2.CAPTURE_PLANES else record.fmt.pix
        pix.width, pix.height = width or pix.width, height or pix.height
        pix.pixelformat, pix.field = v4l2.fourcc(fourcc), v4l2.PROGRESSIVE
        if self._type == v4l2.CAPTURE_PLANES:
            pix.num_planes = 1
        for plane in pix.plane_fmt if self._type == v4l2.CAPTURE_PLANES else [pix]:
            plane.bytesperline = plane.sizeimage = 0  # the camera's choice
        self._call(v4l2.S_FMT, record, f"setting {fourcc} {pix.width}x{pix.height}")
        if self._type == v4l2.CAPTURE_PLANES and pix.num_planes != 1:
            raise CameraFailed(f"{self.path}: {pix.num_planes} planes in memory of their own each; one is needed")
        plane = pix.plane_fmt[0] if self._type == v4l2.CAPTURE_PLANES else pix
        found = v4l2.letters(pix.pixelformat)
        return CameraFormat(found, pix.width, pix.height, plane.bytesperline, plane.sizeimage)

    def set_rate(self, fps: float) -> None:
        """Asks for so many frames a second; a camera that cannot be asked goes on at its own rate."""
        record = v4l2.StreamParameters(type=self._type, numerator=1000, denominator=round(1000 * fps))
        with contextlib.suppress(OSError):
            self._ioctl(self.fd, v4l2.S_PARM, record)

    def reserve(self, count: int) -> int:
        """Has the camera make buffers; how many it has made."""
        record = v4l2.BuffersWanted(count=count, type=self._type, memory=v4l2.MMAP)
        self._call(v4l2.REQBUFS, record, f"making {count} buffers")
        return int(record.count)

    def export(self, index: int) -> int:
        """A descriptor of a buffer's memory, for reading; the caller closes it."""
        record = v4l2.ExportedBuffer(type=self._type, index=index, flags=_READ_ONLY)
        try:
            self._ioctl(self.fd, v4l2.EXPBUF, record)
        except OSError as error:
            if error.errno not in {errno.ENOTTY, errno.EINVAL}:
                self._fail(error, f"exporting buffer {index}")
            raise CameraFailed(
                f"{self.path}: its driver does not export buffers (VIDIOC_EXPBUF); read it by FFmpeg or GStreamer, "
                "which copy each frame"
            ) from error
        return int(record.fd)

    def queue(self, index: int) -> None:
        """Gives a buffer to the camera, which may write it from now on."""
        self._call(v4l2.QBUF, self._buffer(index), f"queueing buffer {index}")

    def dequeue(self) -> FilledBuffer | None:
        """The oldest finished frame; None: there is none yet."""
        record = self._buffer(0)
        try:
            self._ioctl(self.fd, v4l2.DQBUF, record)
        except BlockingIOError:
            return None
        except OSError as error:
            self._fail(error, "waiting for a frame")
        nbytes, offset = int(record.bytesused), 0
        if self._type == v4l2.CAPTURE_PLANES:
            nbytes, offset = int(self._planes[0].bytesused), int(self._planes[0].data_offset)
        is_monotonic = record.flags & v4l2.FLAG_MONOTONIC
        seconds = record.timestamp.seconds + record.timestamp.microseconds / 1e6 if is_monotonic else time.monotonic()
        is_damaged = bool(record.flags & v4l2.FLAG_ERROR) or offset != 0
        return FilledBuffer(int(record.index), int(record.sequence), seconds, nbytes, is_damaged)

    def wait(self, seconds: float) -> bool:
        """Whether `dequeue` has something to say within that time: a frame or an error."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1e3))

    def start(self) -> None:
        """The camera begins to fill buffers."""
        self._call(v4l2.STREAMON, ctypes.c_int(self._type), "starting the stream")

    def stop(self) -> None:
        """It fills none any more. A camera that is gone has stopped."""
        with contextlib.suppress(OSError):
            self._ioctl(self.fd, v4l2.STREAMOFF, ctypes.c_int(self._type))

    def close(self) -> None:
        """Gives the camera back; exported memory stays valid until the last mapping of it goes."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _buffer(self, index: int) -> v4l2.VideoBuffer:
        record = v4l2.VideoBuffer(index=index, type=self._type, memory=v4l2.MMAP)
        if self._type == v4l2.CAPTURE_PLANES:
            record.m, record.length = ctypes.addressof(self._planes), 1
        return record

    def _checked_type(self) -> int:
        record = v4l2.Capability()
        try:
            self._ioctl(self.fd, v4l2.QUERYCAP, record)
        except OSError as error:
            if error.errno in _GONE:
                self._fail(error, "asking what it is")
            raise CameraFailed(f"{self.path}: no V4L2 device ({error.strerror}); {_remedy()}") from error
        can = record.device_caps if record.capabilities & v4l2.CAP_DEVICE_CAPS else record.capabilities
        name = record.card.decode(errors="replace")
        if not can & (v4l2.CAP_CAPTURE | v4l2.CAP_CAPTURE_PLANES):
            raise CameraFailed(f"{self.path}: {name} captures no video (it may be a camera's metadata); {_remedy()}")
        if not can & v4l2.CAP_STREAMING:
            raise CameraFailed(f"{self.path}: {name} has no buffers, only read(); read it by FFmpeg, which copies")
        return v4l2.CAPTURE if can & v4l2.CAP_CAPTURE else v4l2.CAPTURE_PLANES

    def _call(self, request: int, record: Any, what: str) -> None:
        try:
            self._ioctl(self.fd, request, record)
        except OSError as error:
            self._fail(error, what)

    def _fail(self, error: OSError, what: str) -> NoReturn:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        if error.errno in _GONE or (error.errno == errno.EIO and not Path(self.path).exists()):
            raise CameraLost(
                f"{self.path} was unplugged: {what} failed ({name}); plug it in and open it again"
            ) from error
        if error.errno == errno.EBUSY:
            raise CameraFailed(busy(self.path, what)) from error
        raise CameraFailed(f"{self.path}: {what} failed: {error.strerror} ({name}); dmesg may say why") from error


def busy(path: str, what: str) -> str:
    """That another program streams from the camera, and which one may."""
    mine = str(os.getpid())
    others = [holder for holder in holders(path) if holder.split()[0] != mine]
    return f"{path} is busy: {what} was refused (EBUSY); end the program that uses it: " + (
        f"process {', '.join(others)}" if others else f"fuser {path}"
    )


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CameraFailed(f"{path}: no such camera; {_remedy()}") from error
    except PermissionError as error:
        raise CameraFailed(
            f"{path}: permission denied; add the account to the group video, and log in again"
        ) from error
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise CameraFailed(busy(path, "opening it")) from error
        raise CameraFailed(f"{path}: cannot be opened: {error.strerror}; {_remedy()}") from error


def _remedy() -> str:
    there = cameras()
    return f"pass one of {', '.join(there)}" if there else "this machine has no /dev/video*"
