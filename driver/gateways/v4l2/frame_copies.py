"""Frames that no device can read where the camera writes them: JPEG pictures, and planes in memory of their own each.

Each is written once, into an image in shared memory: decoded, or its planes put together. These bytes are counted.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from burst.memory import HardwareBuffer, Memory, Usage
from burst_engine.names import install_command
from driver.errors import CameraFailed
from driver.gateways.v4l2.video_device import PIECES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst.memory import HardwareBufferBlob
    from driver.gateways.v4l2.video_device import CameraFormat, FilledBuffer, Piece, VideoDevice

COMPRESSED = {"MJPG", "JPEG"}
_COLOURS = {"rgb": "RGB", "gray": "GRAY"}
_SCAN, _END = b"\xff\xda", b"\xff\xd9"  # where a picture's pixels begin, and what follows them


def are_copied(fourcc: str) -> bool:
    """Return True if frames of that format cannot be used where they lie."""
    return fourcc in COMPRESSED or fourcc in PIECES


class FrameCopies:
    """Images in memory of their own, one for each of a camera's buffers."""

    def __init__(self, device: VideoDevice, pixels: str, layout: CameraFormat, count: int) -> None:
        """Map the camera's buffers. Raise CameraFailed, also without the library that decodes."""
        self._layout = layout
        self._jpeg = _decoder(device.path, pixels, layout.fourcc) if layout.fourcc in COMPRESSED else None
        self._colours = _COLOURS.get(pixels, "")
        self.images = tuple(HardwareBuffer.allocate(pixels, layout.width, layout.height) for _ in range(count))
        self._pieces = [
            [_mapped(device, index, n, piece) for n, piece in enumerate(layout.pieces)] for index in range(count)
        ]

    def make(self, filled: FilledBuffer) -> bool:
        """Copy a frame to the image of its buffer. Return True if it was whole."""
        image, pieces = self.images[filled.buffer], self._pieces[filled.buffer]
        if any(not part.offset <= part.end <= piece.nbytes for part, piece in zip(filled.pieces, pieces, strict=True)):
            return False
        for piece in pieces:
            if piece.needs_sync:
                piece.begin(writes=False)
        try:
            parts = [piece.asarray()[at.offset : at.end] for piece, at in zip(pieces, filled.pieces, strict=True)]
            return self._decoded(image, parts[0]) if self._jpeg else self._joined(image, parts)
        finally:
            for piece in pieces:
                if piece.needs_sync:
                    piece.end(writes=False)

    def _decoded(self, image: HardwareBuffer, data: Any) -> bool:
        """Return it decoded. Frames of which a part was lost on the way have no end; small faults within are drawn as
        they are.
        """
        assert self._jpeg
        text = data.tobytes()  # a tenth of a picture, and no camera can change it while it is read
        if text.rfind(_END) <= text.find(_SCAN):
            return False
        view = image.view()
        assert view is not None
        try:
            if self._jpeg.decode_jpeg_header(text, strict=False)[:2] != view.shape[1:3]:
                return False
            self._jpeg.decode_jpeg(text, self._colours, buffer=view[0], strict=False)
        except ValueError:
            return False
        return True

    def _joined(self, image: HardwareBuffer, parts: Sequence[Any]) -> bool:
        """Return it joined: each part is a plane, whose rows may have gaps."""
        for n, (part, piece) in enumerate(zip(parts, self._layout.pieces, strict=True)):
            plane = image.plane(n)
            rows, columns, channels = plane.shape
            stride = piece.stride or columns * channels
            if stride * (rows - 1) + columns * channels > part.size:
                return False
            plane[...] = np.ndarray(plane.shape, np.uint8, part, 0, (stride, channels, 1))
        return True


def _mapped(device: VideoDevice, index: int, n: int, piece: Piece) -> HardwareBufferBlob:
    fd = device.export(index, n)
    try:
        found: Any = Memory.from_hardware_buffer(fd, "blob", piece.nbytes, usage=Usage.CPU_READ | Usage.CAMERA_WRITE)
    except (OSError, ValueError) as error:
        raise CameraFailed(f"{device.path}: buffer {index} cannot be mapped: {error}") from error
    finally:
        os.close(fd)
    return found  # type: ignore[no-any-return]


def _decoder(path: str, pixels: str, fourcc: str) -> Any:
    try:
        import simplejpeg
    except ModuleNotFoundError as error:
        raise CameraFailed(
            f"{path}: format={pixels!r} is decoded from {fourcc}, which needs simplejpeg: {install_command('camera')}"
        ) from error
    return simplejpeg
