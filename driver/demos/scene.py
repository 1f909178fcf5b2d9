"""A camera that needs no camera: a generated street of moving shapes, with the truth about them.

Every frame is drawn straight into the array it is given (a burst's input, say). Behind the objects two coloured
textures and two pools of light glide over each other, so that the background never repeats; over everything lies sensor
noise.

All layers are uint8 and their ranges are chosen so that no sum can leave 0..255: three additions per frame, no
clipping, no conversion. Noise is stored modulo 256, where adding 251 takes 5 away.
"""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from driver.demos.boxes import Box

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("disc", "square", "triangle", "ring", "star", "cross")
ROAM = (128, 192)  # rows and columns that a background layer may wander
NOISE_LIMIT = 20
FLOOR, CEILING = NOISE_LIMIT, 255 - NOISE_LIMIT  # what lies under the noise stays within these
VISIBLE_ENOUGH = 0.5  # of an object's area; an object hidden further is not part of the truth


def _half_planes(u: np.ndarray, v: np.ndarray, corners: int, inner: float) -> np.ndarray:
    """Distance to a regular polygon whose sides lie `inner` from its middle."""
    sides = [2 * math.pi * k / corners for k in range(corners)]
    return np.max([math.cos(a) * u + math.sin(a) * v for a in sides], axis=0) - inner


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    sector = math.pi / 5
    angle = np.abs((np.arctan2(v, u) + sector) % (2 * sector) - sector)
    radius = np.hypot(u, v)
    inner = 0.42
    dx, dy = inner * math.cos(sector) - 1, inner * math.sin(sector)
    return (dy * (radius * np.cos(angle) - 1) - dx * radius * np.sin(angle)) / math.hypot(dx, dy)


def _cross(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    u, v = np.abs(u), np.abs(v)
    return np.minimum(np.maximum(u - 0.95, v - 0.3), np.maximum(u - 0.3, v - 0.95))


# Signed distance (negative inside) to the outline of each shape, in units of its radius.
OUTLINES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "disc": lambda u, v: np.hypot(u, v) - 0.9,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) - 0.72,
    "triangle": lambda u, v: _half_planes(u, v, 3, 0.5),
    "ring": lambda u, v: np.abs(np.hypot(u, v) - 0.7) - 0.22,
    "star": _star,
    "cross": _cross,
}


@dataclass
class Thing:
    """One moving object; `rest` counts the frames until it appears, `life` those until it vanishes."""

    name: str
    x: float
    y: float
    dx: float
    dy: float
    radius: float
    angle: float
    spin: float
    pulse: float
    colour: np.ndarray
    soft: float
    rest: int
    life: int

    def step(self, width: int, height: int) -> None:
        """Move one frame on and bounce off the frame's edges."""
        if self.rest > 0:
            self.rest -= 1
            return
        self.life -= 1
        self.x, self.dx = _bounce(self.x + self.dx, self.dx, self.radius * 0.8, width)
        self.y, self.dy = _bounce(self.y + self.dy, self.dy, self.radius * 0.8, height)
        self.angle += self.spin
        self.pulse += 0.06

    def cover(self, width: int, height: int) -> tuple[slice, slice, np.ndarray]:
        """Return the rows and columns that the object touches, and how opaque it is on each pixel there."""
        radius = self.radius * (1 + 0.08 * math.sin(self.pulse))
        reach = radius + self.soft + 1
        rows = slice(max(int(self.y - reach), 0), min(int(self.y + reach) + 1, height))
        columns = slice(max(int(self.x - reach), 0), min(int(self.x + reach) + 1, width))
        y = (np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] + 0.5 - self.y) / radius
        x = (np.arange(columns.start, columns.stop, dtype=np.float32)[None, :] + 0.5 - self.x) / radius
        sin, cos = math.sin(self.angle), math.cos(self.angle)
        distance = OUTLINES[self.name](cos * x + sin * y, cos * y - sin * x)
        return rows, columns, np.clip(0.5 - distance * (radius / self.soft), 0, 1)


def _bounce(at: float, speed: float, margin: float, size: int) -> tuple[float, float]:
    if at < margin:
        return margin, abs(speed)
    if at > size - margin:
        return size - margin, -abs(speed)
    return at, speed


class Scene:
    """An endless film, the same for the same seed."""

    def __init__(self, seed: int, width: int = 640, height: int = 480) -> None:
        self.width, self.height = width, height
        self.frame = 0
        self._random = np.random.default_rng(seed)
        size = height + ROAM[0], width + ROAM[1]
        self._layers = [
            _texture(self._random, size, FLOOR, 125),
            _texture(self._random, size, 0, 65),
            _light(self._random, size, 45),
        ]
        grain = self._random.normal(0, self._random.uniform(2, 7), (*size, 3))
        self._noise = np.clip(np.rint(grain), -NOISE_LIMIT, NOISE_LIMIT).astype(np.int8).view(np.uint8)
        self._paths = self._random.uniform(0.002, 0.012, (len(self._layers), 2))
        self._phases = self._random.uniform(0, 2 * math.pi, (len(self._layers), 2))
        self._owner = np.zeros((height, width), np.uint8)
        self._things = [self._thing(first=True) for _ in range(self._random.integers(5, 9))]

    def advance(self, frames: int = 1) -> None:
        """Let time pass without drawing: what a camera does while no program reads it."""
        for _ in range(frames):
            self.frame += 1
            for i, thing in enumerate(self._things):
                thing.step(self.width, self.height)
                if thing.life <= 0:
                    self._things[i] = self._thing()

    def render(self, out: np.ndarray) -> list[Box]:
        """Draw the next frame into `out`, uint8 [height, width, 3], and return the boxes of the objects one can see."""
        if out.shape != (self.height, self.width, 3) or out.dtype != np.uint8:
            raise ValueError(f"out is {out.dtype} {out.shape}; pass uint8 {(self.height, self.width, 3)}")
        self.advance()
        first, *others = (self._window(layer, i) for i, layer in enumerate(self._layers))
        np.add(first, others[0], out=out)
        np.add(out, others[1], out=out)
        self._owner[...] = 0
        drawn = [self._draw(out, i, thing) for i, thing in enumerate(self._things, 1) if thing.rest == 0]
        np.add(out, self._grain(), out=out)
        return [box for i, area, box in drawn if self._seen(i, box) > VISIBLE_ENOUGH * area]

    def _thing(self, first: bool = False) -> Thing:
        pick = self._random.uniform
        radius = pick(26, 62)
        heading, speed = pick(0, 2 * math.pi), pick(0.5, 5)
        colour = 255 * np.array(colorsys.hsv_to_rgb(pick(0, 1), pick(0.45, 1), pick(0.35, 1)), np.float32)
        return Thing(
            name=NAMES[self._random.integers(len(NAMES))],
            x=pick(radius, self.width - radius),
            y=pick(radius, self.height - radius),
            dx=speed * math.cos(heading),
            dy=speed * math.sin(heading),
            radius=radius,
            angle=pick(0, 2 * math.pi),
            spin=pick(-0.05, 0.05),
            pulse=pick(0, 2 * math.pi),
            colour=colour,
            soft=pick(1.2, 3),
            rest=0 if first else int(pick(0, 60)),
            life=int(pick(100, 500)),
        )

    def _window(self, layer: np.ndarray, i: int) -> np.ndarray:
        """Return the part of a background layer that is in view now."""
        swing = np.sin(self._phases[i] + self.frame * self._paths[i])
        row, column = ((0.5 + 0.5 * swing) * ROAM).astype(int)
        return layer[row : row + self.height, column : column + self.width]

    def _grain(self) -> np.ndarray:
        row, column = self._random.integers(ROAM)
        return self._noise[row : row + self.height, column : column + self.width]

    def _draw(self, out: np.ndarray, i: int, thing: Thing) -> tuple[int, int, Box]:
        """Blend one object into the frame; return its number, its area within the frame and its box."""
        rows, columns, opaque = thing.cover(self.width, self.height)
        height = np.linspace(1, -1, opaque.shape[0], dtype=np.float32)[:, None, None]
        lit = 1 + 0.15 * height + 0.12 * math.sin(0.013 * self.frame)
        colour = np.clip(thing.colour * lit, FLOOR, CEILING)
        patch = out[rows, columns]
        patch[...] = patch + opaque[:, :, None] * (colour - patch)
        solid = opaque > 0.5
        self._owner[rows, columns][solid] = i
        across, down = np.flatnonzero(solid.any(axis=0)), np.flatnonzero(solid.any(axis=1))
        box = Box(
            thing.name,
            columns.start + int(across[0]),
            rows.start + int(down[0]),
            columns.start + int(across[-1]) + 1,
            y1=rows.start + int(down[-1]) + 1,
        )
        return i, int(np.count_nonzero(solid)), box

    def _seen(self, i: int, box: Box) -> int:
        """Count the pixels of object `i` that no later object hides."""
        return int(np.count_nonzero(self._owner[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)] == i))


def _enlarge(grid: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Linear interpolation of [h, w, channels] to size, as one matrix product per axis."""

    def weights(few: int, many: int) -> np.ndarray:
        at = np.linspace(0, few - 1, many, dtype=np.float32)[:, None]
        return np.maximum(1 - np.abs(at - np.arange(few, dtype=np.float32)), 0)

    tall = np.tensordot(weights(grid.shape[0], size[0]), grid, (1, 0))
    return np.einsum("xw,ywc->yxc", weights(grid.shape[1], size[1]), tall, optimize=True)


def _texture(random: np.random.Generator, size: tuple[int, int], low: float, high: float) -> np.ndarray:
    """Cloudy, tinted noise of four sizes of grain, crossed by soft stripes."""
    image = np.zeros((*size, 3), np.float32)
    for cells, strength in ((4, 1.0), (12, 0.6), (40, 0.35), (110, 0.25)):
        brightness = random.random((cells * 3 // 4, cells, 1), np.float32)
        tint = random.random((cells * 3 // 4, cells, 3), np.float32)
        image += strength * _enlarge(brightness + 0.35 * tint, size)
    y, x = np.ogrid[: size[0], : size[1]]
    angle, pitch = random.uniform(0, math.pi), random.uniform(25, 120)
    stripes = np.sin((math.cos(angle) * x + math.sin(angle) * y) * (2 * math.pi / pitch))
    image += random.uniform(0, 0.35) * np.tanh(3 * stripes)[:, :, None].astype(np.float32)
    image -= image.min()
    return (low + image * ((high - low) / image.max())).astype(np.uint8)


def _light(random: np.random.Generator, size: tuple[int, int], high: float) -> np.ndarray:
    """Make two soft pools of light."""
    y, x = np.ogrid[: size[0], : size[1]]
    pools = np.zeros(size, np.float32)
    for _ in range(2):
        row, column, width = random.uniform(0, size[0]), random.uniform(0, size[1]), random.uniform(150, 400)
        pools += np.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * width**2)).astype(np.float32)
    return np.repeat((pools * (high / pools.max())).astype(np.uint8)[:, :, None], 3, axis=2)
