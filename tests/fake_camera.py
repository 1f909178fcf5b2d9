"""A camera that no machine needs to have: it answers the ioctls of V4L2 as drivers on the kernel's videobuf2 do.

Its node is a FIFO, which `poll` finds readable while a frame is done. Its buffers are memfds, where real ones are
DMA-BUFs. `shoot` takes a picture: into the oldest queued buffer, or for nothing when none is queued. A frame of NM12 or
YM12 is a tuple of pieces; one of MJPG is what `fill` leaves in a buffer, as long as it says.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from contextlib import suppress
from typing import ClassVar

import numpy as np
from dma_bufs import udmabuf_on

from driver.gateways.v4l2 import video_ioctls as v4l2

# Rows of each piece of a frame as parts of its height, and bytes of a row as parts of its width.
LAYOUTS = {
    "NV12": [(3 / 2, 1)], "YU12": [(3 / 2, 1)], "RGB3": [(1, 3)], "YUYV": [(1, 2)], "GREY": [(1, 1)],
    "NM12": [(1, 1), (1 / 2, 1)], "YM12": [(1, 1), (1 / 2, 1 / 2), (1 / 2, 1 / 2)], "MJPG": [(1, 2)], "JPEG": [(1, 2)],
}  # fmt: skip


class FakeCamera:
    """`ioctl` is what a `Camera` takes. formats: by four letters; size: the first of `sizes`; gap: bytes after rows.

    refuses: errors by request; rates: that it has, None: any; dma: buffers are DMA-BUFs, by /dev/udmabuf.
    """

    def __init__(
        self, path, formats=("NV12", "RGB3"), size=(640, 480), *, sizes=None, rates=None, gap=0, planes=False,
        exports=True, refuses=None, free_running=False, most=32, card=b"a fake camera", caps=None, fill=None, dma=False,
    ):  # fmt: skip
        self.path, self.formats, self.size, self.gap = str(path), formats, size, gap
        self.sizes, self.rates, self.refuses = sizes or (size,), rates, refuses or {}
        self.type = v4l2.CAPTURE_PLANES if planes else v4l2.CAPTURE
        self.exports, self.free_running, self.most, self.card = exports, free_running, most, card
        kind = v4l2.CAP_CAPTURE_PLANES if planes else v4l2.CAP_CAPTURE
        self.caps = (kind | v4l2.CAP_STREAMING) if caps is None else caps
        self.fill, self.dma = fill or _number_everywhere, dma
        self.gone, self.calls, self.rate = 0, [], None
        self.fourcc, self.buffers, self.rooms = formats[0], [], []
        self.queued, self.done, self.number, self.streaming = deque(), deque(), 0, False
        os.mkfifo(self.path)
        self._bell = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def close(self):
        for fd in (*(fd for pieces in self.buffers for fd in pieces), self._bell):
            os.close(fd)

    @property
    def pieces(self):
        """Stride and bytes of each."""
        width, height = self.size
        strides = [(round(width * across) + self.gap, round(height * down)) for down, across in LAYOUTS[self.fourcc]]
        return [(stride, stride * rows) for stride, rows in strides]

    @property
    def waiting(self):
        """Buffers that the camera has: to fill, or filled and not taken."""
        return len(self.queued) + len(self.done)

    def shoot(self, flags=0, nbytes=None, offset=0):
        """Takes a picture; whether there was a buffer for it."""
        number, self.number = self.number, self.number + 1
        if not (self.streaming and self.queued):
            return False
        index = self.queued.popleft()
        found = self.fill(number, self.rooms[index])
        nbytes = found if nbytes is None else nbytes
        self.done.append((index, number, flags, nbytes, offset))
        os.write(self._bell, b"!")
        return True

    def unplug(self, code=errno.ENODEV):
        """From now on every call fails."""
        self.gone = code
        os.write(self._bell, b"!")

    def plug_in(self):
        """It is there again."""
        self.gone = 0
        self._hush()

    def _hush(self):
        with suppress(BlockingIOError):
            while os.read(self._bell, 1 << 16):
                pass

    def ioctl(self, fd, request, record):
        """As `fcntl.ioctl` of the camera's descriptor."""
        if self.gone:
            self._refuse(self.gone)
        self.calls.append(request)
        if request in self.refuses:
            self._refuse(self.refuses[request])
        self._NAMES[request](self, fd, record)
        return 0

    @staticmethod
    def _refuse(code):
        raise OSError(code, os.strerror(code))

    def _check(self, record):
        if record.type != self.type:
            self._refuse(errno.EINVAL)

    def _querycap(self, _, record):
        record.card, record.driver = self.card, b"fake"
        record.capabilities, record.device_caps = v4l2.CAP_DEVICE_CAPS | 0xFF, self.caps

    def _enum_fmt(self, _, record):
        self._check(record)
        if record.index >= len(self.formats):
            self._refuse(errno.EINVAL)
        record.pixelformat = v4l2.fourcc(self.formats[record.index])

    def _g_fmt(self, _, record):
        self._check(record)
        pix = record.fmt.pix_mp if self.type == v4l2.CAPTURE_PLANES else record.fmt.pix
        pix.width, pix.height = self.size
        pix.pixelformat = v4l2.fourcc(self.fourcc)
        planes = [pix]
        if self.type == v4l2.CAPTURE_PLANES:
            pix.num_planes, planes = len(self.pieces), pix.plane_fmt
        for plane, (stride, nbytes) in zip(planes, self.pieces, strict=False):
            plane.bytesperline = 0 if self.fourcc in ("MJPG", "JPEG") else stride
            plane.sizeimage = nbytes

    def _s_fmt(self, fd, record):
        self._check(record)
        pix = record.fmt.pix_mp if self.type == v4l2.CAPTURE_PLANES else record.fmt.pix
        asked, size = v4l2.letters(pix.pixelformat), (pix.width, pix.height)
        self.fourcc = asked if asked in self.formats else self.formats[0]
        self.size = size if size in self.sizes else self.sizes[0]
        self._g_fmt(fd, record)

    def _s_parm(self, _, record):
        self._check(record)
        asked = record.denominator / record.numerator
        self.rate = min(self.rates, key=lambda rate: abs(rate - asked)) if self.rates else asked
        record.capability = v4l2.CAN_SET_RATE
        record.numerator, record.denominator = 1000, round(1000 * self.rate)

    def _enum_sizes(self, _, record):
        if record.index >= len(self.sizes) or v4l2.letters(record.pixel_format) not in self.formats:
            self._refuse(errno.EINVAL)
        record.type = v4l2.DISCRETE
        record.numbers[0], record.numbers[1] = self.sizes[record.index]

    def _enum_intervals(self, _, record):
        if record.index >= len(self.rates or ()) or (record.width, record.height) not in self.sizes:
            self._refuse(errno.EINVAL)
        record.type = v4l2.DISCRETE
        record.seconds[0].numerator, record.seconds[0].denominator = 1, self.rates[record.index]

    def _reqbufs(self, _, record):
        self._check(record)
        if record.memory != v4l2.MMAP:
            self._refuse(errno.EINVAL)
        record.count = min(record.count, self.most)
        for fd in (fd for pieces in self.buffers for fd in pieces):  # of a program before this one
            os.close(fd)
        self.buffers.clear()
        self.rooms.clear()
        for _ in range(record.count):
            rooms, fds = [], []
            for _, nbytes in self.pieces:
                fd = os.memfd_create("camera", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.posix_fallocate(fd, 0, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE if self.dma else nbytes)
                rooms.append(np.frombuffer(mmap.mmap(fd, nbytes), np.uint8))
                fds.append(udmabuf_on(fd) if self.dma else fd)
                if self.dma:
                    os.close(fd)
            self.buffers.append(fds)
            self.rooms.append(rooms[0] if len(rooms) == 1 else tuple(rooms))

    def _expbuf(self, _, record):
        self._check(record)
        if not self.exports:
            self._refuse(errno.ENOTTY)
        fd = self.buffers[record.index][record.plane]
        record.fd = os.dup(fd) if self.dma else os.open(f"/proc/self/fd/{fd}", record.flags)

    def _qbuf(self, _, record):
        self._check(record)
        assert record.index not in self.queued
        self.queued.append(record.index)
        if self.free_running and self.streaming:
            self.shoot()

    def _dqbuf(self, fd, record):
        self._check(record)
        if not self.streaming:
            self._refuse(errno.EINVAL)
        if not self.done:
            self._refuse(errno.EAGAIN)
        os.read(fd, 1)
        index, number, flags, nbytes, offset = self.done.popleft()
        record.index, record.sequence, record.flags = index, number, flags
        whole = [nbytes for _, nbytes in self.pieces]
        if self.type == v4l2.CAPTURE_PLANES:
            assert record.length == len(whole)
            for plane, most in zip((v4l2.BufferPlane * len(whole)).from_address(record.m), whole, strict=True):
                plane.bytesused, plane.data_offset = most if nbytes is None else nbytes, offset
        else:
            record.bytesused = whole[0] if nbytes is None else nbytes

    def _streamon(self, _, record):
        assert isinstance(record, ctypes.c_int)
        assert record.value == self.type
        self.streaming = True
        while self.free_running and self.queued:
            self.shoot()

    def _streamoff(self, _, record):
        assert record.value == self.type
        self.streaming = False
        self.queued.clear()
        self.done.clear()
        self._hush()

    _NAMES: ClassVar = {
        v4l2.QUERYCAP: _querycap, v4l2.ENUM_FMT: _enum_fmt, v4l2.G_FMT: _g_fmt, v4l2.S_FMT: _s_fmt,
        v4l2.S_PARM: _s_parm, v4l2.REQBUFS: _reqbufs, v4l2.EXPBUF: _expbuf, v4l2.QBUF: _qbuf, v4l2.DQBUF: _dqbuf,
        v4l2.STREAMON: _streamon, v4l2.STREAMOFF: _streamoff, v4l2.ENUM_FRAMESIZES: _enum_sizes,
        v4l2.ENUM_FRAMEINTERVALS: _enum_intervals,
    }  # fmt: skip


def _number_everywhere(number, room):
    for piece in room if isinstance(room, tuple) else [room]:
        piece.fill(number % 256)
