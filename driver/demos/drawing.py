"""Boxes and words drawn on frames; the film made of them and the picture of one of them."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from driver.demos.recordings import private
from driver.demos.scene import NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import driver
    from driver.demos.boxes import Box

# Okabe and Ito's colours, which colour-blind people can tell apart.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#CC79A7", "#D55E00")
COLOURS = {name: np.frombuffer(bytes.fromhex(c[1:]), np.uint8) for name, c in zip(NAMES, PALETTE, strict=True)}
FONT = ImageFont.load_default(14)  # pillow's own, the same on every machine
LINE = math.ceil(FONT.getbbox("|gj")[3])  # the height of one
DARK, WHITE = np.full(3, 24, np.uint8), np.full(3, 255, np.uint8)


@lru_cache(512)
def letters(text: str) -> np.ndarray:
    """Return how much ink is on each pixel of a line of text, uint8 [rows, columns]."""
    image = Image.new("L", (math.ceil(FONT.getlength(text)), LINE))
    ImageDraw.Draw(image).text((0, 0), text, 255, FONT)
    return np.asarray(image)


def write(frame: np.ndarray, text: str, at: tuple[float, float], ink: np.ndarray, paper: np.ndarray) -> None:
    """Write a line of text on paper of its own, whose upper left corner comes as close to `at` as the frame allows."""
    mask = np.pad(letters(text), ((3, 3), (4, 4)))[..., None].astype(np.uint16)
    x = max(0, min(round(at[0]), frame.shape[1] - mask.shape[1]))
    y = max(0, min(round(at[1]), frame.shape[0] - mask.shape[0]))
    patch = frame[y : y + mask.shape[0], x : x + mask.shape[1]]
    patch[...] = ((mask * ink + (255 - mask) * paper) // 255)[: patch.shape[0], : patch.shape[1]]


def outline(frame: np.ndarray, box: Box, colour: np.ndarray, thick: int) -> None:
    """Draw the frame of a box, its outer edge on the box's edge."""
    x0, y0, x1, y1 = (round(edge) for edge in box.corners)
    frame[y0 : y0 + thick, x0:x1] = frame[max(y1 - thick, 0) : y1, x0:x1] = colour
    frame[y0:y1, x0 : x0 + thick] = frame[y0:y1, max(x1 - thick, 0) : x1] = colour


def annotate(frame: np.ndarray, found: Sequence[Box], caption: str) -> np.ndarray:
    """Return a copy of the frame with what was found drawn on it: the frame itself belongs to the burst."""
    picture = frame.copy()
    for box in reversed(found):
        outline(picture, box, DARK, 4)
        outline(picture, box, COLOURS[box.name], 3)
    for box in reversed(found):
        write(picture, f"{box.name} {box.score:.0%}", (box.x0, box.y0 - 19), DARK, paper=COLOURS[box.name])
    write(picture, caption, (0, picture.shape[0]), WHITE, paper=DARK)
    return picture


def picture(image: driver.HardwareBuffer) -> np.ndarray:
    """Return a copy in RGB of what a camera wrote."""
    if image.format == "rgb":
        return image.read()[0].copy()
    planes = image.read()[0]
    name, planes = ("nv12", planes[:, :, 0]) if image.format == "nv12" else ("yuyv422", planes)
    return np.asarray(av.VideoFrame.from_ndarray(planes, format=name).to_ndarray(format="rgb24"))


class Film:
    """The annotated video: H.264 in an MP4 file, encoded on one thread."""

    NAME = "camera.mp4"

    def __init__(self, folder: Path, width: int, height: int, fps: float) -> None:
        self._container = av.open(str(private(folder / self.NAME)), "w")
        self._stream = self._container.add_stream("libx264", rate=Fraction(fps or 30).limit_denominator(1000))
        self._stream.width, self._stream.height = width, height
        self._stream.pix_fmt = "yuv420p"
        self._stream.thread_count = 1
        self._stream.options = {"preset": "ultrafast", "crf": "26"}

    def add(self, picture: np.ndarray) -> None:
        """Append one picture."""
        self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()
