"""A small fully convolutional detector: the network, and what its answers mean.

The camera frame goes in as it is (TENSOR_QUANT8_ASYMM, 640x480 RGB). The first operation takes every fourth pixel of
every fourth row; the rest is an hourglass of 3x3 convolutions that ends in a grid of 40x30 cells of 16x16 pixels. For
each cell the network says how much it looks like the middle of an object of each class, and how far away the object's
left, upper, right and lower edges are, in cells.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import driver
from driver.demos.boxes import Box, overlap
from driver.demos.scene import NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.resources.abc import Traversable

WEIGHTS = files("driver.demos") / "detector.npz"
FRAME = (1, 480, 640, 3)
STRIDE = 4  # of the subsampling at the entrance
CELL = 16
GRID = (FRAME[1] // CELL, FRAME[2] // CELL)


def outputs_of(width: int, height: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that come out for a frame, float32: the heat by class, and the distances to the edges."""
    grid = height // CELL, width // CELL
    return (1, *grid, len(NAMES)), (1, *grid, 4)


OUTPUTS = outputs_of(FRAME[2], FRAME[1])

SAME = 1  # padding schemes and fused activations, as the HAL numbers them
NONE, RELU = 0, 1
FROM_YUV = np.array(((1.164, 0, 1.596), (1.164, -0.392, -0.813), (1.164, 2.017, 0)), np.float32)


def build_model(
    width: int = FRAME[2],
    height: int = FRAME[1],
    weights: Traversable = WEIGHTS,
    pixels: Literal["rgb", "nv12", "yuyv"] = "rgb",
) -> driver.Model:
    """Spell the network out for a driver, for frames of that size: all of it is convolution, so any size will do.

    It was trained on objects of 50 to 120 pixels, and finds those of that size best. Frames of "nv12" and "yuyv"
    are converted in the network; what they have beyond whole cells, on the right and below, is not looked at.
    """
    if width <= 0 or height <= 0 or (pixels == "rgb" and (width % CELL or height % CELL)):
        raise ValueError(
            f"width={width!r}, height={height!r}: both in whole cells of {CELL} pixels, such as 640 and 480"
        )
    with weights.open("rb") as opened, np.load(opened) as file:
        layers = {name: file[name] for name in file.files if name.endswith((".filter", ".bias"))}
    m = driver.ModelBuilder()

    def conv(x: Any, name: str, stride: int = 1, activation: int = RELU) -> Any:
        kernel, bias = layers[name + ".filter"], layers[name + ".bias"]
        return m.operation("CONV_2D", x, kernel, bias, SAME, stride, stride, activation)

    entrance = {"rgb": _rgb_entrance, "nv12": _nv12_entrance, "yuyv": _yuyv_entrance}[pixels]
    fine = conv(conv(conv(entrance(m, width, height), "stem", 2), "down", 2), "fine")
    coarse = conv(fine, "coarse", 2)
    coarse = m.operation("ADD", coarse, conv(conv(coarse, "wide1"), "wide2", activation=NONE), RELU)
    lift, across, down = conv(coarse, "lift", activation=NONE), width // CELL, height // CELL
    lifted = m.operation("RESIZE_BILINEAR", lift, across, down, False, False, True)
    joined = conv(m.operation("ADD", fine, lifted, RELU), "join")
    m.output(m.operation("LOGISTIC", conv(joined, "classes", activation=NONE)))
    m.output(conv(joined, "edges", activation=NONE))
    return m.build()


def _every(m: driver.ModelBuilder, x: Any, begin: Sequence[int], end: Sequence[int], steps: Sequence[int]) -> Any:
    """Return a part of an image, with `steps` between its rows and columns."""
    parts = (np.array(part, np.int32) for part in (begin, end, steps))
    return m.operation("STRIDED_SLICE", x, *parts, 0, 0, 0)


def _rgb_entrance(m: driver.ModelBuilder, width: int, height: int) -> Any:
    shape = (1, height, width, 3)
    frame = m.input("quant8_asymm", shape, scale=1 / 255, zero_point=0)
    return m.operation("DEQUANTIZE", _every(m, frame, (0, 0, 0, 0), shape, steps=(1, STRIDE, STRIDE, 1)))


def _nv12_entrance(m: driver.ModelBuilder, width: int, height: int) -> Any:
    """Return the pixels of an image in YUV: only those that are looked at are converted."""
    across, down, half = width // CELL * CELL, height // CELL * CELL, STRIDE // 2
    frame = m.input("quant8_asymm", (1, height * 3 // 2, width, 1), scale=1 / 255, zero_point=0)
    luma = _every(m, frame, (0, 0, 0, 0), (1, down, across, 1), steps=(1, STRIDE, STRIDE, 1))
    rows = _every(m, frame, (0, height, 0, 0), (1, height + down // 2, width, 1), steps=(1, half, 1, 1))
    pairs = m.operation("RESHAPE", rows, np.array((1, down // STRIDE, width // 2, 2), np.int32))
    chroma = _every(m, pairs, (0, 0, 0, 0), (1, down // STRIDE, across // 2, 2), steps=(1, 1, half, 1))
    return _converted(m, luma, chroma)


def _yuyv_entrance(m: driver.ModelBuilder, width: int, height: int) -> Any:
    """Return pairs of pixels: Y and U of the even ones that are looked at, and V of their neighbours."""
    end = height // CELL * CELL, width // CELL * CELL
    frame = m.input("quant8_asymm", (1, height, width, 2), scale=1 / 255, zero_point=0)
    first = _every(m, frame, (0, 0, 0, 0), (1, *end, 2), steps=(1, STRIDE, STRIDE, 1))
    second = _every(m, frame, (0, 0, 1, 1), (1, *end, 2), steps=(1, STRIDE, STRIDE, 1))
    return _converted(m, first, second)


def _converted(m: driver.ModelBuilder, *parts: Any) -> Any:
    """RGB of Y, U and V in limited range (BT.601)."""
    yuv = m.operation("DEQUANTIZE", m.operation("CONCATENATION", *parts, 3, scale=1 / 255, zero_point=0))
    bias = -FROM_YUV @ np.array((16, 128, 128), np.float32) / 255
    rgb = m.operation("CONV_2D", yuv, FROM_YUV.reshape(3, 1, 1, 3), bias.astype(np.float32), SAME, 1, 1, RELU)
    return m.operation("MINIMUM", rgb, np.ones((1, 1, 1, 1), np.float32))


def decode(outputs: Sequence[np.ndarray], at_least: float = 0.35, most_shared: float = 0.5) -> list[Box]:
    """Turn the network's two outputs into boxes, the surest first.

    A cell is an object's middle if its heat for some class is `at_least` and no neighbour's is higher. Of boxes of one
    class that share more than `most_shared` of their union only the surest stays; boxes of different classes may share
    half of the rest on top.
    """
    heat, edges = outputs[0][0], outputs[1][0]
    rows, columns, kinds = np.nonzero((heat >= at_least) & (heat == _neighbourhood(heat)))
    if not len(rows):
        return []
    scores = heat[rows, columns, kinds]
    middle = (np.stack([columns, rows], axis=1) + 0.5) * CELL
    reach = edges[rows, columns] * CELL
    corners = np.concatenate([middle - reach[:, :2], middle + reach[:, 2:]], axis=1)
    np.clip(corners, 0, (heat.shape[1] * CELL, heat.shape[0] * CELL) * 2, out=corners)
    order = np.argsort(-scores, kind="stable")
    kept = order[_survivors(corners[order], kinds[order], most_shared)]
    found = zip(kinds[kept].tolist(), corners[kept].tolist(), scores[kept].tolist(), strict=True)
    return [Box(NAMES[kind], x0, y0, x1, y1=y1, score=score) for kind, (x0, y0, x1, y1), score in found]


def _neighbourhood(heat: np.ndarray) -> np.ndarray:
    """Return the highest heat within one cell of each cell."""
    edge = np.pad(heat, ((1, 1), (1, 1), (0, 0)))
    down = np.maximum(np.maximum(edge[:-2], edge[1:-1]), edge[2:])
    return np.maximum(np.maximum(down[:, :-2], down[:, 1:-1]), down[:, 2:])


def _survivors(corners: np.ndarray, kinds: np.ndarray, most_shared: float) -> np.ndarray:
    """Return the positions of the boxes (surest first) that no surer box suppresses."""
    limit = np.where(kinds[:, None] == kinds[None, :], most_shared, (1 + most_shared) / 2)
    rival = np.triu(overlap(corners, corners) > limit, k=1)
    alive = np.ones(len(corners), bool)
    for i in np.flatnonzero(rival.any(axis=1)):
        if alive[i]:
            alive &= ~rival[i]
    return np.flatnonzero(alive)
