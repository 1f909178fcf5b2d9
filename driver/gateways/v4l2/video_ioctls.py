"""Records and numbers of <linux/videodev2.h> for capturing: a test compares them with what a C compiler makes of it.

They are our own because linuxpy, which has them all, is under the GPL.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int32, c_long, c_uint8, c_uint16, c_uint32, c_uint64

CAPTURE, CAPTURE_PLANES = 1, 9  # types of a buffer: V4L2_BUF_TYPE_VIDEO_CAPTURE and ..._MPLANE
MMAP = 1  # V4L2_MEMORY_MMAP
CAP_CAPTURE, CAP_CAPTURE_PLANES, CAP_STREAMING, CAP_DEVICE_CAPS = 0x1, 0x1000, 0x04000000, 0x80000000
FLAG_ERROR, FLAG_MONOTONIC = 0x40, 0x2000  # of a buffer
ANY_FIELD, PROGRESSIVE = 0, 1
MOST_PLANES = 8
DISCRETE = 1  # of sizes and intervals: each is listed
CAN_SET_RATE = 0x1000  # V4L2_CAP_TIMEPERFRAME

u32 = c_uint32


class Capability(ctypes.Structure):
    """struct v4l2_capability."""

    _fields_ = (
        ("driver", c_char * 16),
        ("card", c_char * 32),
        ("bus_info", c_char * 32),
        ("version", u32),
        ("capabilities", u32),
        ("device_caps", u32),
        ("reserved", u32 * 3),
    )


class FormatDescription(ctypes.Structure):
    """struct v4l2_fmtdesc."""

    _fields_ = (
        ("index", u32),
        ("type", u32),
        ("flags", u32),
        ("description", c_char * 32),
        ("pixelformat", u32),
        ("mbus_code", u32),
        ("reserved", u32 * 3),
    )


class PixelFormat(ctypes.Structure):
    """struct v4l2_pix_format."""

    _fields_ = tuple(
        (name, u32)
        for name in (
            *("width", "height", "pixelformat", "field", "bytesperline", "sizeimage", "colorspace"),
            *("priv", "flags", "ycbcr_enc", "quantization", "xfer_func"),
        )
    )


class PlanePixelFormat(ctypes.Structure):
    """struct v4l2_plane_pix_format."""

    _pack_ = 1
    _fields_ = (("sizeimage", u32), ("bytesperline", u32), ("reserved", c_uint16 * 6))


class PixelFormatPlanes(ctypes.Structure):
    """struct v4l2_pix_format_mplane."""

    _pack_ = 1
    _fields_ = (
        *((name, u32) for name in ("width", "height", "pixelformat", "field", "colorspace")),
        ("plane_fmt", PlanePixelFormat * MOST_PLANES),
        *((name, c_uint8) for name in ("num_planes", "flags", "ycbcr_enc", "quantization", "xfer_func")),
        ("reserved", c_uint8 * 7),
    )


class _FormatUnion(ctypes.Union):
    _fields_ = (
        ("pix", PixelFormat),
        ("pix_mp", PixelFormatPlanes),
        ("raw", c_uint8 * 200),
        ("aligned", c_uint64),  # another member of the kernel's union has pointers
    )


class VideoFormat(ctypes.Structure):
    """struct v4l2_format."""

    _fields_ = (("type", u32), ("fmt", _FormatUnion))


class BuffersWanted(ctypes.Structure):
    """struct v4l2_requestbuffers."""

    _fields_ = (
        *((name, u32) for name in ("count", "type", "memory", "capabilities")),
        ("flags", c_uint8),
        ("reserved", c_uint8 * 3),
    )


class _Time(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("microseconds", c_long))


class BufferPlane(ctypes.Structure):
    """struct v4l2_plane."""

    _fields_ = (
        ("bytesused", u32),
        ("length", u32),
        ("m", ctypes.c_ulong),
        ("data_offset", u32),
        ("reserved", u32 * 11),
    )


class VideoBuffer(ctypes.Structure):
    """struct v4l2_buffer. `m`: an offset, or the address of the planes."""

    _fields_ = (
        *((name, u32) for name in ("index", "type", "bytesused", "flags", "field")),
        ("timestamp", _Time),
        ("timecode", c_uint8 * 16),
        ("sequence", u32),
        ("memory", u32),
        ("m", ctypes.c_ulong),
        ("length", u32),
        ("reserved2", u32),
        ("request_fd", c_int32),
    )


class ExportedBuffer(ctypes.Structure):
    """struct v4l2_exportbuffer."""

    _fields_ = (
        *((name, u32) for name in ("type", "index", "plane", "flags")),
        ("fd", c_int32),
        ("reserved", u32 * 11),
    )


class StreamParameters(ctypes.Structure):
    """struct v4l2_streamparm, with its capture part."""

    _fields_ = (
        *((name, u32) for name in ("type", "capability", "capturemode", "numerator", "denominator")),
        ("rest", u32 * 46),
    )


class _Fraction(ctypes.Structure):
    _fields_ = (("numerator", u32), ("denominator", u32))


class OfferedFrameSize(ctypes.Structure):
    """struct v4l2_frmsizeenum. `numbers`: width, height; or of either the least, the most and the step."""

    _fields_ = (
        *((name, u32) for name in ("index", "pixel_format", "type")),
        ("numbers", u32 * 6),
        ("reserved", u32 * 2),
    )


class FrameInterval(ctypes.Structure):
    """struct v4l2_frmivalenum. `seconds`: of a frame; or the least, the most and the step."""

    _fields_ = (
        *((name, u32) for name in ("index", "pixel_format", "width", "height", "type")),
        ("seconds", _Fraction * 3),
        ("reserved", u32 * 2),
    )


_WRITE, _READ = 1, 2


def _number(direction: int, nr: int, record: type[ctypes.Structure | ctypes.c_int]) -> int:
    return direction << 30 | ctypes.sizeof(record) << 16 | ord("V") << 8 | nr


QUERYCAP = _number(_READ, 0, Capability)
ENUM_FMT = _number(_READ | _WRITE, 2, FormatDescription)
G_FMT = _number(_READ | _WRITE, 4, VideoFormat)
S_FMT = _number(_READ | _WRITE, 5, VideoFormat)
REQBUFS = _number(_READ | _WRITE, 8, BuffersWanted)
QBUF = _number(_READ | _WRITE, 15, VideoBuffer)
EXPBUF = _number(_READ | _WRITE, 16, ExportedBuffer)
DQBUF = _number(_READ | _WRITE, 17, VideoBuffer)
STREAMON = _number(_WRITE, 18, ctypes.c_int)
STREAMOFF = _number(_WRITE, 19, ctypes.c_int)
S_PARM = _number(_READ | _WRITE, 22, StreamParameters)
ENUM_FRAMESIZES = _number(_READ | _WRITE, 74, OfferedFrameSize)
ENUM_FRAMEINTERVALS = _number(_READ | _WRITE, 75, FrameInterval)


def fourcc(name: str) -> int:
    """Return the number of a format of four letters."""
    return int.from_bytes(name.encode(), "little")


def letters(number: int) -> str:
    """Return the four letters of a format."""
    return number.to_bytes(4, "little").decode("ascii", "replace").strip()
