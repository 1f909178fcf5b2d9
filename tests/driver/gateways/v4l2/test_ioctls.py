"""The records and numbers of V4L2 are those of this machine's kernel headers."""

import ctypes
import shutil
import subprocess

import pytest

from driver.gateways.v4l2 import video_ioctls as v4l2

RECORDS = {
    "v4l2_capability": (v4l2.Capability, ["card", "capabilities", "device_caps"]),
    "v4l2_fmtdesc": (v4l2.FormatDescription, ["index", "type", "pixelformat"]),
    "v4l2_pix_format": (v4l2.PixelFormat, ["width", "pixelformat", "field", "bytesperline", "sizeimage"]),
    "v4l2_plane_pix_format": (v4l2.PlanePixelFormat, ["sizeimage", "bytesperline"]),
    "v4l2_pix_format_mplane": (v4l2.PixelFormatPlanes, ["width", "pixelformat", "plane_fmt", "num_planes"]),
    "v4l2_format": (v4l2.VideoFormat, ["type", "fmt"]),
    "v4l2_requestbuffers": (v4l2.BuffersWanted, ["count", "type", "memory"]),
    "v4l2_plane": (v4l2.BufferPlane, ["bytesused", "length", "m", "data_offset"]),
    "v4l2_buffer": (
        v4l2.VideoBuffer,
        ["index", "type", "bytesused", "flags", "timestamp", "sequence", "memory", "m", "length", "request_fd"],
    ),
    "v4l2_exportbuffer": (v4l2.ExportedBuffer, ["type", "index", "plane", "flags", "fd"]),
    "v4l2_streamparm": (v4l2.StreamParameters, ["type"]),
    "v4l2_frmsizeenum": (v4l2.OfferedFrameSize, ["index", "pixel_format", "type"]),
    "v4l2_frmivalenum": (v4l2.FrameInterval, ["index", "pixel_format", "width", "height", "type"]),
}
NUMBERS = {
    "VIDIOC_QUERYCAP": v4l2.QUERYCAP, "VIDIOC_ENUM_FMT": v4l2.ENUM_FMT, "VIDIOC_G_FMT": v4l2.G_FMT,
    "VIDIOC_S_FMT": v4l2.S_FMT, "VIDIOC_REQBUFS": v4l2.REQBUFS, "VIDIOC_QBUF": v4l2.QBUF,
    "VIDIOC_EXPBUF": v4l2.EXPBUF, "VIDIOC_DQBUF": v4l2.DQBUF, "VIDIOC_STREAMON": v4l2.STREAMON,
    "VIDIOC_STREAMOFF": v4l2.STREAMOFF, "VIDIOC_S_PARM": v4l2.S_PARM,
    "VIDIOC_ENUM_FRAMESIZES": v4l2.ENUM_FRAMESIZES, "VIDIOC_ENUM_FRAMEINTERVALS": v4l2.ENUM_FRAMEINTERVALS,
    "V4L2_FRMSIZE_TYPE_DISCRETE": v4l2.DISCRETE, "V4L2_FRMIVAL_TYPE_DISCRETE": v4l2.DISCRETE,
    "V4L2_CAP_TIMEPERFRAME": v4l2.CAN_SET_RATE,
    "offsetof(struct v4l2_frmsizeenum, discrete.width)": v4l2.OfferedFrameSize.numbers.offset,
    "offsetof(struct v4l2_frmsizeenum, stepwise.max_width) - 4": v4l2.OfferedFrameSize.numbers.offset,
    "offsetof(struct v4l2_frmsizeenum, stepwise.min_height) - 12": v4l2.OfferedFrameSize.numbers.offset,
    "offsetof(struct v4l2_frmsizeenum, stepwise.max_height) - 16": v4l2.OfferedFrameSize.numbers.offset,
    "offsetof(struct v4l2_frmivalenum, discrete.numerator)": v4l2.FrameInterval.seconds.offset,
    "offsetof(struct v4l2_frmivalenum, stepwise.max) - 8": v4l2.FrameInterval.seconds.offset,
    "offsetof(struct v4l2_streamparm, parm.capture.capability)": v4l2.StreamParameters.capability.offset,
    "V4L2_BUF_TYPE_VIDEO_CAPTURE": v4l2.CAPTURE, "V4L2_BUF_TYPE_VIDEO_CAPTURE_MPLANE": v4l2.CAPTURE_PLANES,
    "V4L2_MEMORY_MMAP": v4l2.MMAP, "V4L2_CAP_VIDEO_CAPTURE": v4l2.CAP_CAPTURE,
    "V4L2_CAP_VIDEO_CAPTURE_MPLANE": v4l2.CAP_CAPTURE_PLANES, "V4L2_CAP_STREAMING": v4l2.CAP_STREAMING,
    "V4L2_CAP_DEVICE_CAPS": v4l2.CAP_DEVICE_CAPS, "V4L2_BUF_FLAG_ERROR": v4l2.FLAG_ERROR,
    "V4L2_BUF_FLAG_TIMESTAMP_MONOTONIC": v4l2.FLAG_MONOTONIC, "V4L2_FIELD_NONE": v4l2.PROGRESSIVE,
    "VIDEO_MAX_PLANES": v4l2.MOST_PLANES,
    "V4L2_PIX_FMT_NV12": v4l2.fourcc("NV12"), "V4L2_PIX_FMT_RGB24": v4l2.fourcc("RGB3"),
    "V4L2_PIX_FMT_YUV420": v4l2.fourcc("YU12"), "V4L2_PIX_FMT_GREY": v4l2.fourcc("GREY"),
    "V4L2_PIX_FMT_YUYV": v4l2.fourcc("YUYV"), "V4L2_PIX_FMT_MJPEG": v4l2.fourcc("MJPG"),
    "V4L2_PIX_FMT_JPEG": v4l2.fourcc("JPEG"), "V4L2_PIX_FMT_NV12M": v4l2.fourcc("NM12"),
    "V4L2_PIX_FMT_YUV420M": v4l2.fourcc("YM12"),
    "offsetof(struct v4l2_streamparm, parm.capture.timeperframe)": v4l2.StreamParameters.numerator.offset,
}  # fmt: skip


def test_records_and_numbers_are_the_kernels(tmp_path):
    """Sizes, places of members, request numbers and constants: what a C compiler says of <linux/videodev2.h>."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    wanted = dict(NUMBERS)
    for name, (record, members) in RECORDS.items():
        wanted[f"sizeof(struct {name})"] = ctypes.sizeof(record)
        wanted |= {f"offsetof(struct {name}, {m})": getattr(record, m).offset for m in members}
    lines = "".join(f'    printf("%llu\\n", (unsigned long long)({text}));\n' for text in wanted)
    source = tmp_path / "numbers.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <linux/videodev2.h>\nint main(void) {\n" + lines + "}\n"
    )
    subprocess.run([compiler, source, "-o", tmp_path / "numbers"], check=True)
    found = subprocess.run([tmp_path / "numbers"], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(wanted, map(int, found), strict=True)) == wanted
