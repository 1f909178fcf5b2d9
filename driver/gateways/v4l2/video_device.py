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
    from collections.abc import Callable, Iterator

    Ioctl = Callable[[int, int, Any], object]

PIECES = {"NM12": 2, "YM12": 3}  #: formats whose planes lie in memory of their own each
_GONE = {errno.ENODEV, errno.ENXIO}
_SAME_RATE = 0.02  # 29.97 and 30 frames a second are one rate
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC


class Piece(NamedTuple):
    """Memory of a frame. `stride`: bytes from one row of its first plane to the next; 0 where there are no rows."""

    stride: int
    nbytes: int


class CameraFormat(NamedTuple):
    """A format that the camera has agreed to."""

    fourcc: str
    width: int
    height: int
    pieces: tuple[Piece, ...]


class FilledPiece(NamedTuple):
    """The filled part of a piece: up to `end`, after bytes that are no picture."""

    end: int
    offset: int = 0


class FilledBuffer(NamedTuple):
    """A frame that the camera has finished. `number`: the camera's own count, which goes on over frames it drops."""

    buffer: int
    number: int
    seconds: float
    pieces: tuple[FilledPiece, ...]
    is_damaged: bool


def cameras(folder: Path = Path("/dev")) -> list[str]:
    """Return the paths of the video devices of this machine."""
    return sorted((str(path) for path in folder.glob("video[0-9]*")), key=lambda path: (len(path), path))


def holders(path: str, processes: Path = Path("/proc")) -> list[str]:
    """Return the processes that have a file open, as far as this account may see: "1234 (cheese)"."""
    found = []
    for folder in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(link) == path for link in (folder / "fd").iterdir()):
                found.append(f"{folder.name} ({(folder / 'comm').read_text().strip()})")
    return found


class VideoDevice:
    """A camera, open. `ioctl`: calls the kernel, with the descriptor, the request and a record."""

    def __init__(self, path: str, ioctl: Ioctl) -> None:
        """Open the camera. Raise CameraFailed for what is no camera that streams."""
        self.path, self._ioctl = path, ioctl
        self.fd = _opened(path)
        try:
            self._type = self._checked_type()
        except BaseException:
            self.close()
            raise
        self._planes = (v4l2.BufferPlane * v4l2.MOST_PLANES)()
        self._pieces = 1

    def formats(self) -> list[str]:
        """Return the formats that the camera can deliver, by four letters each."""
        records = self._listed(v4l2.ENUM_FMT, lambda n: v4l2.FormatDescription(index=n, type=self._type))
        return [v4l2.letters(record.pixelformat) for record in records]

    def sizes(self, fourcc: str) -> str:
        """Return the sizes of a format, in words; empty where the camera does not list them."""
        number, found = v4l2.fourcc(fourcc), []
        for record in self._listed(v4l2.ENUM_FRAMESIZES, lambda n: v4l2.OfferedFrameSize(index=n, pixel_format=number)):
            at = record.numbers
            if record.type != v4l2.DISCRETE:
                return f"{at[0]}x{at[3]} to {at[1]}x{at[4]}"
            found.append((at[0], at[1]))
        return ", ".join(f"{width}x{height}" for width, height in sorted(set(found)))

    def rates(self, layout: CameraFormat) -> str:
        """Return the frames a second, in words; empty where the camera does not list them."""
        how = {"pixel_format": v4l2.fourcc(layout.fourcc), "width": layout.width, "height": layout.height}
        found = set()
        for record in self._listed(v4l2.ENUM_FRAMEINTERVALS, lambda n: v4l2.FrameInterval(index=n, **how)):
            rates = [each.denominator / max(1, each.numerator) for each in record.seconds]
            if record.type != v4l2.DISCRETE:
                return f"{rates[1]:.4g} to {rates[0]:.4g}"
            found.add(rates[0])
        return ", ".join(f"{rate:.4g}" for rate in sorted(found))

    def configure(self, fourcc: str, width: int | None, height: int | None) -> CameraFormat:
        """Ask for frames of this kind; return what it will deliver. None: the size that the camera has now."""
        record = v4l2.VideoFormat(type=self._type)
        self._call(v4l2.G_FMT, record, "asking for its format")
        pix = record.fmt.pix_mp if self._type == v4l2.CAPTURE_PLANES else record.fmt.pix
        pix.width, pix.height = width or pix.width, height or pix.height
        pix.pixelformat, pix.field = v4l2.fourcc(fourcc), v4l2.PROGRESSIVE
        pieces = PIECES.get(fourcc, 1)
        if self._type == v4l2.CAPTURE_PLANES:
            pix.num_planes = pieces
        planes = pix.plane_fmt if self._type == v4l2.CAPTURE_PLANES else [pix]
        for plane in planes:
            plane.bytesperline = plane.sizeimage = 0  # the camera's choice
        self._call(v4l2.S_FMT, record, f"setting {fourcc} {pix.width}x{pix.height}")
        found = v4l2.letters(pix.pixelformat)
        there = int(pix.num_planes) if self._type == v4l2.CAPTURE_PLANES else 1
        if found == fourcc and there != pieces:
            raise CameraFailed(
                f"{self.path}: its driver lays {fourcc} out in {there} pieces of memory, where V4L2 has {pieces}; read "
                "it by FFmpeg or GStreamer, which copy each frame"
            )
        self._pieces = pieces
        parts = tuple(Piece(plane.bytesperline, plane.sizeimage) for plane in planes[:pieces])
        return CameraFormat(found, pix.width, pix.height, parts)

    def set_rate(self, fps: float, layout: CameraFormat) -> None:
        """Ask for so many frames a second; a camera that cannot be asked goes on at its own rate.

        Raise CameraFailed where it chooses another rate.
        """
        record = v4l2.StreamParameters(type=self._type, numerator=1000, denominator=round(1000 * fps))
        try:
            self._ioctl(self.fd, v4l2.S_PARM, record)
        except OSError as error:
            if error.errno in _GONE | {errno.EBUSY}:
                self._fail(error, f"setting {fps:g} frames a second")
            return
        found = record.denominator / max(1, record.numerator)
        if record.capability & v4l2.CAN_SET_RATE and abs(found - fps) > _SAME_RATE * fps:
            rates = self.rates(layout) or f"{found:.4g}"
            raise CameraFailed(
                f"{self.path}: fps={fps:g}: {layout.fourcc} {layout.width}x{layout.height} comes at {rates} frames a "
                "second; pass one of these, another format or size, or fps=None"
            )

    def reserve(self, count: int) -> int:
        """Have the camera make buffers; return how many it has made."""
        record = v4l2.BuffersWanted(count=count, type=self._type, memory=v4l2.MMAP)
        self._call(v4l2.REQBUFS, record, f"making {count} buffers")
        return int(record.count)

    def export(self, index: int, piece: int = 0) -> int:
        """Return a descriptor of a buffer's memory, for reading; the caller closes it."""
        record = v4l2.ExportedBuffer(type=self._type, index=index, plane=piece, flags=_READ_ONLY)
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
        """Give a buffer to the camera, which may write it from now on."""
        self._call(v4l2.QBUF, self._buffer(index), f"queueing buffer {index}")

    def dequeue(self) -> FilledBuffer | None:
        """Return the oldest finished frame; None: there is none yet."""
        record = self._buffer(0)
        try:
            self._ioctl(self.fd, v4l2.DQBUF, record)
        except BlockingIOError:
            return None
        except OSError as error:
            self._fail(error, "waiting for a frame")
        pieces: tuple[FilledPiece, ...] = (FilledPiece(int(record.bytesused)),)
        if self._type == v4l2.CAPTURE_PLANES:
            filled = self._planes[: self._pieces]
            pieces = tuple(FilledPiece(int(plane.bytesused), int(plane.data_offset)) for plane in filled)
        is_monotonic = record.flags & v4l2.FLAG_MONOTONIC
        seconds = record.timestamp.seconds + record.timestamp.microseconds / 1e6 if is_monotonic else time.monotonic()
        is_damaged = bool(record.flags & v4l2.FLAG_ERROR)
        return FilledBuffer(int(record.index), int(record.sequence), seconds, pieces, is_damaged=is_damaged)

    def wait(self, seconds: float) -> bool:
        """Wait for a frame or an error. Return True if `dequeue` has something to say within that time."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1e3))

    def start(self) -> None:
        """Let the camera fill buffers."""
        self._call(v4l2.STREAMON, ctypes.c_int(self._type), "starting the stream")

    def stop(self) -> None:
        """Let it fill none any more. A camera that is gone has stopped."""
        with contextlib.suppress(OSError):
            self._ioctl(self.fd, v4l2.STREAMOFF, ctypes.c_int(self._type))

    def close(self) -> None:
        """Give the camera back; exported memory stays valid until the last mapping of it goes."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _buffer(self, index: int) -> v4l2.VideoBuffer:
        record = v4l2.VideoBuffer(index=index, type=self._type, memory=v4l2.MMAP)
        if self._type == v4l2.CAPTURE_PLANES:
            record.m, record.length = ctypes.addressof(self._planes), self._pieces
        return record

    def _listed(self, request: int, record_of: Callable[[int], Any]) -> Iterator[Any]:
        """Return what the camera enumerates."""
        for n in range(256):
            record = record_of(n)
            try:
                self._ioctl(self.fd, request, record)
            except OSError as error:
                if error.errno in _GONE:
                    self._fail(error, "asking for what it has")
                return
            yield record

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
        if error.errno == errno.ENOSPC:
            raise CameraFailed(
                f"{self.path}: {what} failed (ENOSPC): its USB bus has no room for that many bytes a second; use a "
                "smaller size, fewer frames a second or a format that is decoded from MJPG, or another USB port"
            ) from error
        raise CameraFailed(f"{self.path}: {what} failed: {error.strerror} ({name}); dmesg may say why") from error


def busy(path: str, what: str) -> str:
    """Return the error that another program streams from the camera, with which one may."""
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
