"""Random calls of each operation that are valid and can be computed.

A maker takes a sketch and the name of an operation, draws operands and parameters, and adds the operation.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from driver.nn import OperandType, Value
from driver.nn.operation import LETTERS
from driver.nn.types import Dimensions

from .sketch import LONGEST, RANKS, Sketch, types_of

Maker = Callable[[Sketch, str], None]
FLOATS, BYTES = (LETTERS["f"], LETTERS["h"]), (LETTERS["q"], LETTERS["s"])
BOOL, INT = LETTERS["b"], LETTERS["i"]


def _shape(value: Value) -> Dimensions:
    return value.operand.dimensions


def _type(value: Value) -> OperandType:
    return value.operand.base_type


def _indices(values: Any) -> Any:
    return np.array(values, np.int32)


def _unary(level: str, exact: bool, s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), exact=exact)
    s.add(name, x, level=level, **s.result(name, _type(x)))


def _positive(s: Sketch, name: str) -> None:
    """Add a function that is defined, and numerically stable, only above 0."""
    kind = s.choice(types_of(name))
    s.add(name, s.fresh(kind, s.shape(s.choice(RANKS)), low=0.25, high=2.0), level="relaxed")


def _broadcastable(s: Sketch, x: Value, *, exact: bool = False) -> Value:
    """Return another operand of the type of `x` that broadcasts with it: trailing dimensions, equal or 1."""
    shape = _shape(x)

    def drawn() -> Dimensions:
        return tuple(1 if s.flag() else d for d in shape[s.integer(0, len(shape) - 1) :])

    def fits(other: Dimensions) -> bool:
        return len(other) <= len(shape) and all(d in {1, e} for d, e in zip(other[::-1], shape[::-1], strict=False))

    return s.tensor([_type(x)], exact=exact, fits=fits, shape=drawn)


def _arithmetic(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    y = _broadcastable(s, x)
    activation = 0 if _type(x) == INT else s.integer(0, 3)
    above = x.operand.scale * y.operand.scale if name == "MUL" else 0.0
    s.add(name, x, y, activation, level="medium", **s.result(name, _type(x), above))


def _by_small(s: Sketch, name: str) -> None:
    """MUL and DIV: int32 must not overflow, and divisors must not be close to 0."""
    x = s.tensor(types_of(name), exact=name == "DIV")
    if _type(x) in BYTES:
        y = _broadcastable(s, x)
        asked = s.result(name, _type(x), x.operand.scale * y.operand.scale)
        s.add(name, x, y, s.integer(0, 3), level="medium", **asked)
        return
    y = s.fresh(_type(x), tuple(1 if s.flag() else d for d in _shape(x)), low=0.5, high=1.5)
    activation = 0 if _type(x) == INT else s.integer(0, 3)
    s.add(name, x, y, activation, level="relaxed" if name == "DIV" else "medium")


def _binary(level: str, exact: bool, s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), exact=exact)
    y = _broadcastable(s, x, exact=exact)
    kind = BOOL if exact else _type(x)
    s.add(name, x, y, level=level, **s.result(name, kind))


def _power(s: Sketch, name: str) -> None:
    kind, shape = s.choice(types_of(name)), s.shape(s.choice(RANKS))
    s.add(name, s.fresh(kind, shape, low=0.25, high=2.0), s.fresh(kind, shape), level="relaxed")


def _elu(s: Sketch, name: str) -> None:
    s.add(name, s.tensor(types_of(name)), s.choice((1.0, 0.5)), level="relaxed")


def _select(s: Sketch, name: str) -> None:
    x = s.tensor([t for t in (*FLOATS, *BYTES, INT) if t in types_of(name)])

    def like(kind: OperandType, *, exact: bool) -> Value:
        return s.tensor([kind], (len(_shape(x)),), exact=exact, fits=lambda d: d == _shape(x), shape=lambda: _shape(x))

    s.add(name, like(BOOL, exact=True), x, like(_type(x), exact=False), level="medium", **s.result(name, _type(x)))


def _reduction(level: str, s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    axes = [s.axis(len(_shape(x))) for _ in range(s.integer(1, 2))]
    keep = s.flag()
    s.add(name, x, _indices(axes), int(keep) if name == "MEAN" else keep, level=level)


def _arg(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), exact=True)
    s.add(name, x, s.axis(len(_shape(x))))


def _reshape(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    shape = _shape(x)
    targets = (
        [-1],
        list(shape[::-1]),
        [1, *shape][-4:] if shape[0] == 1 or len(shape) < 4 else [-1, 1],
        [shape[0], -1],
    )
    s.add(name, x, _indices(s.choice(targets)))


def _squeeze(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), fits=lambda d: 1 in d, shape=lambda: (1, *s.shape(s.integer(1, 3))))
    ones = [i for i, d in enumerate(_shape(x)) if d == 1]
    s.add(name, x, None if s.flag() else _indices([s.choice(ones)]))


def _expand(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), (1, 2, 3))
    s.add(name, x, s.axis(len(_shape(x)) + 1))


def _transpose(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    left = list(range(len(_shape(x))))
    s.add(name, x, _indices([left.pop(s.integer(0, len(left) - 1)) for _ in _shape(x)]))


def _concatenation(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    shape, axis = _shape(x), s.integer(0, len(_shape(x)) - 1)

    def fits(other: Dimensions) -> bool:
        return len(other) == len(shape) and all(
            a == b for k, (a, b) in enumerate(zip(other, shape, strict=True)) if k != axis
        )

    def drawn() -> Dimensions:
        return (*shape[:axis], s.integer(1, LONGEST), *shape[axis + 1 :])

    others = [s.tensor([_type(x)], fits=fits, shape=drawn) for _ in range(s.integer(0, 2))]
    level = "medium" if _type(x) in BYTES else "strict"
    s.add(name, x, *others, axis, level=level, **s.result(name, _type(x)))


def _split(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    axis = s.axis(len(_shape(x)))
    size = _shape(x)[axis]
    count = s.choice([n for n in range(1, size + 1) if size % n == 0])
    s.add(name, x, axis, count, outputs=count)


def _slice(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    begins = [s.integer(0, d - 1) for d in _shape(x)]
    sizes = [s.choice((-1, s.integer(1, d - b))) for b, d in zip(begins, _shape(x), strict=True)]
    s.add(name, x, _indices(begins), _indices(sizes))


def _strided_slice(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    strides = [s.choice((1, 2, -1, -2)) for _ in _shape(x)]
    first = [s.integer(0, d - 1) for d in _shape(x)]
    begins = [f if stride > 0 else d - 1 - f for f, d, stride in zip(first, _shape(x), strides, strict=True)]
    ends = [d if stride > 0 else -d - 1 for d, stride in zip(_shape(x), strides, strict=True)]
    masks = (s.integer(0, 3), s.integer(0, 3), 0)
    s.add(name, x, _indices(begins), _indices(ends), _indices(strides), *masks)


def _gather(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), (1, 2, 3))
    axis = s.axis(len(_shape(x)))
    picked = [s.integer(0, _shape(x)[axis] - 1) for _ in range(s.integer(1, 3))]
    s.add(name, x, axis, _indices([picked] if s.flag() else picked))


def _embedding(s: Sketch, name: str) -> None:
    x = s.tensor([t for t in (*FLOATS, *BYTES, INT) if t in types_of(name)], (2, 3, 4))
    s.add(name, _indices([s.integer(0, _shape(x)[0] - 1) for _ in range(s.integer(1, 3))]), x)


def _small(shape: Dimensions) -> bool:
    return math.prod(shape) <= 1024


def _tile(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), fits=_small)
    s.add(name, x, _indices([s.integer(1, 2) for _ in _shape(x)]))


def _paddings(s: Sketch, x: Value) -> Any:
    return _indices([[s.integer(0, 2), s.integer(0, 2)] for _ in _shape(x)])


def _pad(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), fits=_small)
    s.add(name, x, _paddings(s, x))


def _pad_v2(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), fits=_small)
    s.add(name, x, _paddings(s, x), s.integer(0, 5) if _type(x) in BYTES else float(s.integer(0, 5)))


def _shuffle(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    axis = s.axis(len(_shape(x)))
    size = _shape(x)[axis]
    s.add(name, x, s.choice([n for n in range(1, size + 1) if size % n == 0]), axis)


def _depth_to_space(s: Sketch, name: str) -> None:
    x = s.fresh(s.choice(types_of(name)), (1, s.integer(1, 3), s.integer(1, 3), 4 * s.integer(1, 2)))
    s.add(name, x, 2)


def _space_to_depth(s: Sketch, name: str) -> None:
    x = s.fresh(s.choice(types_of(name)), (1, 2 * s.integer(1, 2), 2 * s.integer(1, 2), s.integer(1, 3)))
    s.add(name, x, 2)


def _batch_to_space(s: Sketch, name: str) -> None:
    b = (s.integer(1, 2), s.integer(1, 2))
    x = s.fresh(
        s.choice(types_of(name)), (b[0] * b[1] * s.integer(1, 2), s.integer(1, 3), s.integer(1, 3), s.integer(1, 2))
    )
    s.add(name, x, _indices(b))


def _space_to_batch(s: Sketch, name: str) -> None:
    x = s.fresh(s.choice(types_of(name)), (s.integer(1, 2), 2 * s.integer(1, 2), 2 * s.integer(1, 2), s.integer(1, 2)))
    s.add(name, x, _indices((2, s.integer(1, 2))), _indices([[s.flag() * 2, 0], [0, s.flag() * 2]]))


def _top(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), exact=True)
    s.add(name, x, s.integer(1, _shape(x)[-1]))


def _fill(s: Sketch, name: str) -> None:
    s.add(name, _indices(s.shape(s.integer(1, 3))), s.choice((1.5, 7)))


def _rank(s: Sketch, name: str) -> None:
    s.add(name, s.tensor(types_of(name)))


def _quantize(s: Sketch, name: str) -> None:
    x, kind = s.tensor(types_of(name)), s.choice(BYTES)
    s.add(name, x, dtype=kind, level="medium", **s.quantisation(kind))


def _dequantize(s: Sketch, name: str) -> None:
    s.add(name, s.tensor([t for t in types_of(name) if t in BYTES], exact=True), dtype=s.choice(FLOATS), level="medium")


def _cast(s: Sketch, name: str) -> None:
    kinds = (*FLOATS, INT, LETTERS["q"])
    x, kind = s.tensor(kinds, exact=True), s.choice(kinds)
    s.add(name, x, dtype=kind, **s.quantisation(kind))


def _softmax(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    beta, axis = s.choice((1.0, 0.5)), s.axis(len(_shape(x)))
    s.add(name, x, beta, axis, level="relaxed")


def _normalise(s: Sketch, name: str) -> None:
    """L2_NORMALIZATION is discontinuous at 0, so it gets exact operands only."""
    x = s.tensor(types_of(name), exact=True)
    s.add(name, x, s.axis(len(_shape(x))), level="relaxed")


def _local_response(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name))
    s.add(name, x, s.integer(0, 2), 1.0, 0.5, s.choice((1.0, 0.5)), s.axis(len(_shape(x))), level="relaxed")


def _instance(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), (4,), exact=True)
    s.add(name, x, 1.0, 0.5, 0.5, s.flag(), level="relaxed")


MAKERS: dict[str, Maker] = {
    **dict.fromkeys(("RELU", "RELU1", "RELU6", "ABS", "NEG"), partial(_unary, "medium", False)),
    **dict.fromkeys(("LOGISTIC", "TANH", "SIN", "HARD_SWISH"), partial(_unary, "relaxed", False)),
    **dict.fromkeys(("LOGICAL_NOT", "FLOOR"), partial(_unary, "strict", True)),
    "EXP": partial(_unary, "relaxed", True),
    **dict.fromkeys(("LOG", "SQRT", "RSQRT"), _positive),
    "ELU": _elu,
    **dict.fromkeys(("ADD", "SUB"), _arithmetic),
    **dict.fromkeys(("MUL", "DIV"), _by_small),
    **dict.fromkeys(("MAXIMUM", "MINIMUM", "PRELU"), partial(_binary, "medium", False)),
    **dict.fromkeys(
        ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL", "LOGICAL_AND", "LOGICAL_OR"),
        partial(_binary, "strict", True),
    ),
    "POW": _power,
    "SELECT": _select,
    **dict.fromkeys(("REDUCE_MAX", "REDUCE_MIN", "REDUCE_ALL", "REDUCE_ANY"), partial(_reduction, "strict")),
    **dict.fromkeys(("MEAN", "REDUCE_SUM", "REDUCE_PROD"), partial(_reduction, "relaxed")),
    **dict.fromkeys(("ARGMAX", "ARGMIN"), _arg),
    "RESHAPE": _reshape,
    "SQUEEZE": _squeeze,
    "EXPAND_DIMS": _expand,
    "TRANSPOSE": _transpose,
    "CONCATENATION": _concatenation,
    "SPLIT": _split,
    "SLICE": _slice,
    "STRIDED_SLICE": _strided_slice,
    "GATHER": _gather,
    "EMBEDDING_LOOKUP": _embedding,
    "TILE": _tile,
    "PAD": _pad,
    "PAD_V2": _pad_v2,
    "CHANNEL_SHUFFLE": _shuffle,
    "DEPTH_TO_SPACE": _depth_to_space,
    "SPACE_TO_DEPTH": _space_to_depth,
    "BATCH_TO_SPACE_ND": _batch_to_space,
    "SPACE_TO_BATCH_ND": _space_to_batch,
    "TOPK_V2": _top,
    "FILL": _fill,
    "RANK": _rank,
    "QUANTIZE": _quantize,
    "DEQUANTIZE": _dequantize,
    "CAST": _cast,
    **dict.fromkeys(("SOFTMAX", "LOG_SOFTMAX"), _softmax),
    "L2_NORMALIZATION": _normalise,
    "LOCAL_RESPONSE_NORMALIZATION": _local_response,
    "INSTANCE_NORMALIZATION": _instance,
}
"""The operations on tensors of any kind; those on images are in `IMAGE_MAKERS`."""


# ---- images, and the dense layer -------------------------------------------------------------------------------------

_PER_CHANNEL = LETTERS["P"]


def _image(s: Sketch, name: str) -> tuple[Value, bool, tuple[int, int, int]]:
    """Return an image, whether its channels come first, and its height, width and channels."""
    x = s.tensor(types_of(name), (4,), shape=s.image)
    nchw = s.flag()
    _, a, b, c = x.operand.dimensions
    return x, nchw, (b, c, a) if nchw else (a, b, c)


def _geometry(s: Sketch, kernel: tuple[int, int], first: bool = True) -> list[int]:
    """Return paddings, implicit or explicit, and strides: width before height."""
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
    """Return a filter and a bias for the input, and the lower limit for the scale of the result."""
    kind, scale, n = x.operand.base_type, x.operand.scale, shape[channel]
    if kind not in BYTES:
        return [s.fresh(kind, shape), s.fresh(kind, (n,))], 0.0
    if per_channel and s.flag():
        scales = [(0.5, 0.25, 0.125)[i % 3] for i in range(n)]
        weights = s.fresh(_PER_CHANNEL, shape, channel_quant=(scales, channel))
        return [weights, s.fresh(INT, (n,), scale=0.0)], scale * 0.5
    weights = s.fresh(kind, shape, scale=0.25, zero_point=100)
    return [weights, s.fresh(INT, (n,), scale=scale * 0.25)], scale * 0.25


def _kernel(s: Sketch, h: int, w: int) -> tuple[tuple[int, int], list[int], tuple[int, int]]:
    """Return a fitting filter's extent, its dilations (width first), and its extent when dilated."""
    kh, kw = s.integer(1, min(3, h)), s.integer(1, min(3, w))
    dh = s.integer(1, min(2, (h - 1) // (kh - 1))) if kh > 1 else 1
    dw = s.integer(1, min(2, (w - 1) // (kw - 1))) if kw > 1 else 1
    return (kh, kw), [dw, dh], ((kh - 1) * dh + 1, (kw - 1) * dw + 1)


def _convolution(s: Sketch, name: str) -> None:
    x, nchw, (h, w, c) = _image(s, name)
    kernel, dilations, extent = _kernel(s, h, w)
    weights, above = _weights(s, x, (s.integer(1, 3), *kernel, c), 0)
    asked = s.result(name, x.operand.base_type, above)
    s.add(name, x, *weights, *_geometry(s, extent), s.integer(0, 3), nchw, *dilations, level="conv", **asked)


def _depthwise(s: Sketch, name: str) -> None:
    x, nchw, (h, w, c) = _image(s, name)
    kernel, dilations, extent = _kernel(s, h, w)
    multiplier = s.integer(1, 2)
    weights, above = _weights(s, x, (1, *kernel, c * multiplier), 3)
    asked = s.result(name, x.operand.base_type, above)
    geometry = [*_geometry(s, extent), multiplier]
    s.add(name, x, *weights, *geometry, s.integer(0, 3), nchw, *dilations, level="conv", **asked)


def _grouped(s: Sketch, name: str) -> None:
    x, nchw, (h, w, c) = _image(s, name)
    kernel = (s.integer(1, min(3, h)), s.integer(1, min(3, w)))
    groups = s.choice([n for n in range(1, c + 1) if c % n == 0])
    weights, above = _weights(s, x, (groups * s.integer(1, 2), *kernel, c // groups), 0)
    asked = s.result(name, x.operand.base_type, above)
    s.add(name, x, *weights, *_geometry(s, kernel), groups, s.integer(0, 3), nchw, level="conv", **asked)


def _transposed(s: Sketch, name: str) -> None:
    x, nchw, (_, _, c) = _image(s, name)
    kernel = (s.integer(1, 3), s.integer(1, 3))
    weights, above = _weights(s, x, (s.integer(1, 3), *kernel, c), 0)
    asked = s.result(name, x.operand.base_type, above)
    strides = [s.integer(1, 2), s.integer(1, 2)]
    s.add(name, x, *weights, 0, 0, 0, 0, *strides, s.integer(0, 3), nchw, level="conv", **asked)


def _dense(s: Sketch, name: str) -> None:
    x = s.tensor(types_of(name), (2, 3, 4))
    weights, above = _weights(s, x, (s.integer(1, 4), x.operand.dimensions[-1]), 0, per_channel=False)
    s.add(name, x, *weights, s.integer(0, 3), level="conv", **s.result(name, x.operand.base_type, above))


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
