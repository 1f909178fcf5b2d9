"""A camera that no machine needs to have: it answers the ioctls of V4L2 as drivers on the kernel's videobuf2 do.

Its node is a FIFO, which `poll` finds readable while a frame is done. Its buffers are memfds, where real ones are
DMA-BUFs. `shoot` takes a picture: into the oldest queued buffer, or for nothing when none is queued.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from typing import ClassVar

import numpy as np

from driver.gateways.v4l2 import video_ioctls as v4l2


class FakeCamera:
    """`ioctl` is what a `Camera` takes. formats: by four letters; size: the only one; gap: bytes after each row."""

    def __init__(
        self, path, formats=("NV12", "RGB3"), size=(640, 480), *, gap=0, planes=False, exports=True, busy=False,
        free_running=False, most=32, card=b"a fake camera", caps=None, fill=None,
    ):  # fmt: skip
        self.path, self.formats, self.size, self.gap = str(path), formats, size, gap
        self.type = v4l2.CAPTURE_PLANES if planes else v4l2.CAPTURE
        self.exports, self.busy, self.free_running, self.most, self.card = exports, busy, free_running, most, card
        kind = v4l2.CAP_CAPTURE_PLANES if planes else v4l2.CAP_CAPTURE
        self.caps = (kind | v4l2.CAP_STREAMING) if caps is None else caps
        self.fill = fill or (lambda number, room: room.fill(number % 256))
        self.gone, self.calls, self.rate = 0, [], None
        self.fourcc, self.buffers, self.rooms = formats[0], [], []
        self.queued, self.done, self.number, self.streaming = deque(), deque(), 0, False
        os.mkfifo(self.path)
        self._bell = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def close(self):
        for fd in (*self.buffers, self._bell):
            os.close(fd)

    @property
    def stride(self):
        return self.size[0] * (3 if self.fourcc == "RGB3" else 1) + self.gap

    @property
    def nbytes(self):
        return self.stride * self.size[1] * 3 // (2 if self.fourcc in ("NV12", "YU12") else 3)

    def shoot(self, flags=0, nbytes=None, offset=0):
        """Takes a picture; whether there was a buffer for it."""
        number, self.number = self.number, self.number + 1
        if not (self.streaming and self.queued):
            return False
        index = self.queued.popleft()
        self.fill(number, self.rooms[index])
        self.done.append((index, number, flags, self.nbytes if nbytes is None else nbytes, offset))
        os.write(self._bell, b"!")
        return True

    def unplug(self, code=errno.ENODEV):
        """From now on every call fails."""
        self.gone = code
        os.write(self._bell, b"!")

    def ioctl(self, fd, request, record):
        """As `fcntl.ioctl` of the camera's descriptor."""
        if self.gone:
            self._refuse(self.gone)
        self.calls.append(request)
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
        plane = pix
        if self.type == v4l2.CAPTURE_PLANES:
            pix.num_planes, plane = 1, pix.plane_fmt[0]
        plane.bytesperline, plane.sizeimage = self.stride, self.nbytes

    def _s_fmt(self, fd, record):
        self._check(record)
        if self.busy:
            self._refuse(errno.EBUSY)
        pix = record.fmt.pix_mp if self.type == v4l2.CAPTURE_PLANES else record.fmt.pix
        asked = v4l2.letters(pix.pixelformat)
        self.fourcc = asked if asked in self.formats else self.formats[0]
        self._g_fmt(fd, record)

    def _s_parm(self, _, record):
        self._check(record)
        self.rate = record.denominator / record.numerator

    def _reqbufs(self, _, record):
        self._check(record)
        if record.memory != v4l2.MMAP:
            self._refuse(errno.EINVAL)
        record.count = min(record.count, self.most)
        for _ in range(record.count):
            self.buffers.append(os.memfd_create("camera", os.MFD_CLOEXEC))
            os.posix_fallocate(self.buffers[-1], 0, self.nbytes)
            self.rooms.append(np.frombuffer(mmap.mmap(self.buffers[-1], self.nbytes), np.uint8))

    def _expbuf(self, _, record):
        self._check(record)
        if not self.exports:
            self._refuse(errno.ENOTTY)
        record.fd = os.open(f"/proc/self/fd/{self.buffers[record.index]}", record.flags)

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
        if self.type == v4l2.CAPTURE_PLANES:
            assert record.length == 1
            plane = v4l2.BufferPlane.from_address(record.m)
            plane.bytesused, plane.data_offset = nbytes, offset
        else:
            record.bytesused = nbytes

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

    _NAMES: ClassVar = {
        v4l2.QUERYCAP: _querycap, v4l2.ENUM_FMT: _enum_fmt, v4l2.G_FMT: _g_fmt, v4l2.S_FMT: _s_fmt,
        v4l2.S_PARM: _s_parm, v4l2.REQBUFS: _reqbufs, v4l2.EXPBUF: _expbuf, v4l2.QBUF: _qbuf, v4l2.DQBUF: _dqbuf,
        v4l2.STREAMON: _streamon, v4l2.STREAMOFF: _streamoff,
    }  # fmt: skip
