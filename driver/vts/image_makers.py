"""Random calls of each operation on images, and of the dense layer; see `makers`."""

from functools import partial
from typing import Any

from driver.nn import Value
from driver.nn.operation import LETTERS

from .makers import BYTES, INT, Maker
from .sketch import Sketch, types_of

_PER_CHANNEL = LETTERS["P"]


def _image(s: Sketch, name: str) -> tuple[Value, bool, tuple[int, int, int]]:
    """An image, whether its channels come first, and its height, width and channels."""
    x = s.tensor(types_of(name), (4,), shape=s.image)
    nchw = s.flag()
    _, a, b, c = x.operand.dimensions
    return x, nchw, (b, c, a) if nchw else (a, b, c)


def _geometry(s: Sketch, kernel: tuple[int, int], first: bool = True) -> list[int]:
    """Paddings, implicit or explicit, and strides: width before height."""
    h, w = kernel
    strides = [s.integer(1, 2), s.integer(1, 2)]
    if s.flag():
        return [s.integer(0, w - 1), s.integer(0, w - 1), s.integer(0, h - 1), s.integer(0, h - 1), *strides]
    return [s.integer(1, 2), *strides]


def _pool(s: Sketch, name: str) -> None:
    x, nchw, (h, w, _) = _image(s, name)
    kernel = (s.integer(1, min(3, h)), s.integer(1, min(3, w)))
    window = [*_geometry(s, kernel), kernel[1], kernel[0]]
    s.add(name, x, *window, s.integer(0, 3), nchw, level="relaxed")


def _weights(
    s: Sketch, x: Value, shape: tuple[int, ...], channel: int, *, per_channel: bool = True
) -> tuple[list[Value], float]:
    """A filter and a bias for the input, and the lower limit for the scale of the result."""
    kind, scale, n = x.operand.type, x.operand.scale, shape[channel]
    if kind not in BYTES:
        return [s.fresh(kind, shape), s.fresh(kind, (n,))], 0.0
    if per_channel and s.flag():
        scales = [(0.5, 0.25, 0.125)[i % 3] for i in range(n)]
        weights = s.fresh(_PER_CHANNEL, shape, channel_quant=(scales, channel))
        return [weights, s.fresh(INT, (n,), scale=0.0)], scale * 0.5
    weights = s.fresh(kind, shape, scale=0.25, zero_point=100)
    return [weights, s.fresh(INT, (n,), scale=scale * 0.25)], scale * 0.25


def _kernel(s: Sketch, h: int, w: int) -> tuple[tuple[int, int], list[int], tuple[int, int]]:
    """Extent of a filter that fits into the image, its dilations (width first), and its extent when dilated."""
    kh, kw = s.integer(1, min(3, h)), s.integer(1, min(3, w))
    dh = s.integer(1, min(2, (h - 1) // (kh - 1))) if kh > 1 else 1
    dw = s.integer(1, min(2, (w - 1) // (kw - 1))) if kw > 1 else 1
    return (kh, kw), [dw, dh], ((kh - 1) * dh + 1, (kw - 1) * dw + 1)


def _convolution(s: Sketch, name: str) -> None:
    x, nchw, (h, w, c) = _image(s, name)
    kernel, dilations, extent = _kernel(s, h, w)
    weights, above = _weights(s, x, (s.integer(1, 3), *kernel, c), 0)
    asked = s.result(name, x.operand.type, above)
    s.add(name, x, *weights, *_geometry(s, extent), s.integer(0, 3), nchw, *dilations, level="conv", **asked)


def _depthwise(s: Sketch, name: str) -> None:
    x, nchw, (h, w, c) = _image(s, name)
    kernel, dilations, extent = _kernel(s, h, w)
    multiplier = s.integer(1, 2)
    weights, above = _weights(s, x, (1, *kernel, c * multiplier), 3)
    asked = s.result(name, x.operand.type, above)
    geometry = [*_geometry(s, extent), multiplier]
    s.add(name, x, *weights, *geometry, s.integer(0, 3), nchw, *dilations, level="conv", **asked)


def _grouped(s: Sketch, name: str) -> None:
    x, nchw, (h, w, c) = _image(s, name)
    kernel = (s.integer(1, min(3, h)), s.integer(1, min(3, w)))
    groups = s.choice([n for n in range(1, c + 1) if c % n == 0])
    weights, above = _weights(s, x, (groups * s.integer(1, 2), *kernel, c // groups), 0)
    asked = s.result(name, x.operand.type, above)
    s.add(name, x, *weights, *_geometry(s, kernel), groups, s.integer(0, 3), nchw, level="conv", **asked)


def _transposed(s: Sketch, name: str) -> None:
    x, nchw, (_, _, c) = _image(s, name)
    kernel = (s.integer(1, 3), s.integer(1, 3))
    weights, above = _weights(s, x, (s.integer(1, 3), *kernel, c), 0)
    asked = s.result(name, x.operand.type, above)
    strides = [s.integer(1, 2), s.integer(1, 2)]
    s.add(name, x, *weights, 0, 0, 0, 0, *strides, s.integer(0, 3), nchw, level="conv", **asked)


def _dense(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), (2, 3, 4))
    weights, above = _weights(s, x, (s.integer(1, 4), x.operand.dimensions[-1]), 0, per_channel=False)
    s.add(name, x, *weights, s.integer(0, 3), level="conv", **s.result(name, x.operand.type, above))


def _resize(level: str, s: Sketch, name: str) -> None:
    x, nchw, _ = _image(s, name)
    size: list[Any] = [s.integer(1, 6), s.integer(1, 6)]
    if s.flag():
        size = [float(s.integer(1, 2)), float(s.integer(1, 2))]
    s.add(name, x, *size, nchw, *s.choice(((), (False, False), (True, False), (False, True))), level=level)


IMAGE_MAKERS: dict[str, Maker] = {
    **dict.fromkeys(("AVERAGE_POOL_2D", "MAX_POOL_2D", "L2_POOL_2D"), _pool),
    "CONV_2D": _convolution,
    "DEPTHWISE_CONV_2D": _depthwise,
    "GROUPED_CONV_2D": _grouped,
    "TRANSPOSE_CONV_2D": _transposed,
    "FULLY_CONNECTED": _dense,
    "RESIZE_BILINEAR": partial(_resize, "relaxed"),
    "RESIZE_NEAREST_NEIGHBOR": partial(_resize, "strict"),
}
