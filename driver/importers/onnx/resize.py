"""Resize and Upsample: ONNX has many rules for the source of a pixel; the HAL has three of them."""

import math
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.importers.file_bytes import Array
from driver.nn.builder import Value

from .call import OnnxCall

_MODES = ("asymmetric", "align_corners", "half_pixel")
_ROUNDINGS: dict[str, Any] = {
    "round_prefer_floor": lambda v: np.ceil(v - 0.5),
    "round_prefer_ceil": lambda v: np.floor(v + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
_LARGEST = 1 << 14
"""Limit of pixels per side."""


def upsample(call: OnnxCall) -> None:
    """Upsample: Resize with the oldest of the modes."""
    scales = [float(v) for v in call.constant(1).reshape(-1)] if call.given(1) else call.node.reals("scales")
    _resize(call, scales, None, "asymmetric", "floor")


def resize(call: OnnxCall) -> None:
    """Resize by sizes or scales; the region of interest belongs to a mode that the HAL lacks."""
    if call.opset < 11:
        _resize(call, [float(v) for v in call.constant(1).reshape(-1)], None, "asymmetric", "floor")
        return
    if call.node.integers("axes") is not None or call.node.integer("antialias"):
        raise ImportFailed("axes and antialias of Resize are not supported")
    sizes = call.integers(3) if call.given(3) else None
    scales = [float(v) for v in call.constant(2).reshape(-1)] if call.given(2) and sizes is None else None
    if sizes and call.node.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise ImportFailed("keep_aspect_ratio_policy must be stretch")
    mode = call.node.text("coordinate_transformation_mode", "half_pixel")
    _resize(call, scales, sizes, mode, call.node.text("nearest_mode", "round_prefer_floor"))


def _resize(call: OnnxCall, scales: list[float] | None, sizes: list[int] | None, mode: str, nearest: str) -> None:
    shape, kind = call.shape(0), call.node.text("mode", "nearest")
    given = sizes if scales is None else scales
    if given is None or len(given) != len(shape) or len(shape) not in (3, 4) or 0 in shape[1:]:
        raise ImportFailed(f"{given} for an input of dimensions {list(shape)}; {call.graph.shape_hint()}")
    if scales is not None:
        if not all(math.isfinite(s) and 0 < s <= _LARGEST for s in scales):
            raise ImportFailed(f"scales {scales} must be above 0")
        sizes = [math.floor(d * s) for d, s in zip(shape, scales, strict=True)]
    assert sizes is not None
    factors = scales or [out / (d or 1) for d, out in zip(shape, sizes, strict=True)]
    if (shape[0] and sizes[0] != shape[0]) or sizes[1] != shape[1] or (factors[:2] != [1.0, 1.0] and shape[0]):
        raise ImportFailed(f"it resizes other dimensions than height and width: {list(shape)} to {sizes}")
    outs = [1, *sizes[2:]] if len(shape) == 3 else sizes[2:]
    ratios = [1.0, *factors[2:]] if len(shape) == 3 else factors[2:]
    if any(not 0 < out <= _LARGEST for out in outs):
        raise ImportFailed(f"size {outs} must be in 1..{_LARGEST}")
    step = {"nearest": _nearest, "linear": _linear}.get(kind)
    if step is None:
        raise ImportFailed(f"mode {kind!r}; the HAL has nearest and linear")
    result = step(call, outs, ratios, mode, nearest)
    call.give(result, is_image=True, rank=len(shape))


def _linear(call: OnnxCall, outs: list[int], ratios: list[float], mode: str, _: str) -> Value:
    x = call.image(0)
    sides = list(zip(x.operand.dimensions[1:3], outs, ratios, strict=True))
    if mode == "pytorch_half_pixel" and all(out > 1 or size == 1 for size, out, _ in sides):
        mode = "half_pixel"
    if mode not in _MODES:
        raise ImportFailed(f"coordinate_transformation_mode {mode!r}; the HAL has {', '.join(_MODES)}")
    if mode != "align_corners" and any(abs(size * ratio - out) > 1e-3 for size, out, ratio in sides):
        raise ImportFailed(f"scales {ratios} do not give whole sizes, and the HAL derives its scales from sizes")
    flags = (mode == "align_corners", mode == "half_pixel")
    tail = (outs[1], outs[0], False, *(flags if any(flags) else ()))
    return call.graph.cast(call.emit("RESIZE_BILINEAR", x, *tail))


def _nearest(call: OnnxCall, outs: list[int], ratios: list[float], mode: str, nearest: str) -> Value:
    """RESIZE_NEAREST_NEIGHBOR where it takes the same pixels, else a GATHER of the rows and one of the columns."""
    x = call.image(0)
    sizes = x.operand.dimensions[1:3]
    sides = list(zip(sizes, outs, ratios, strict=True))
    wanted = [_indices(*side, mode, nearest) for side in sides]
    for name in _MODES:
        if all(np.array_equal(_of_hal(*side[:2], name), w) for side, w in zip(sides, wanted, strict=True)):
            flags = (name == "align_corners", name == "half_pixel")
            tail = (outs[1], outs[0], False, *(flags if any(flags) else ()))
            return call.graph.cast(call.emit("RESIZE_NEAREST_NEIGHBOR", x, *tail))
    for axis, (size, out, indices) in enumerate(zip(sizes, outs, wanted, strict=True), start=1):
        if size != out or not np.array_equal(indices, np.arange(out)):
            x = call.graph.cast(call.emit("GATHER", x, axis, indices))
    return x


def _indices(size: int, out: int, ratio: float, mode: str, nearest: str) -> Array:
    """The source pixel of each result pixel, by ONNX's rule."""
    i = np.arange(out, dtype=np.float64)
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and out > 1):
        at = (i + 0.5) / ratio - 0.5
    elif mode == "pytorch_half_pixel":
        at = i * 0
    elif mode == "asymmetric":
        at = i / ratio
    elif mode == "align_corners":
        at = i * (size - 1) / (out - 1) if out > 1 else i * 0
    else:
        raise ImportFailed(f"coordinate_transformation_mode {mode!r} has no counterpart in the HAL")
    if nearest not in _ROUNDINGS:
        raise ImportFailed(f"nearest_mode {nearest!r} is unknown")
    return np.asarray(np.clip(_ROUNDINGS[nearest](at), 0, size - 1), np.int32)


def _of_hal(size: int, out: int, mode: str) -> Array:
    """The same by the HAL's rule."""
    i = np.arange(out, dtype=np.float32)
    if mode == "align_corners" and out > 1:
        at = np.floor(i * np.float32((size - 1) / (out - 1)) + np.float32(0.5))
    else:
        at = np.floor((i + (np.float32(0.5) if mode == "half_pixel" else 0)) * np.float32(size / out))
    return np.asarray(np.clip(at, 0, size - 1), np.int32)
