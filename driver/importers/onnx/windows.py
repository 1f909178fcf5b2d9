"""Operators that slide a window over an image or a signal (convolutions, pooling), and those that resize an image.

ONNX has many rules for the source of a resized pixel; the HAL has three of them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.formats.file_bytes import Array
from driver.nn.builder import Value

from .call import Convert, OnnxCall, bias, filters, pair

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Window:
    """The geometry of a sliding window. Each pair is (height, width); pads are (before, after) for each."""

    kernel: Pair
    strides: Pair
    dilations: Pair
    pads: tuple[Pair, Pair]

    @property
    def extent(self) -> Pair:
        """Size of the dilated window."""
        (kh, kw), (dh, dw) = self.kernel, self.dilations
        return (kh - 1) * dh + 1, (kw - 1) * dw + 1


def _window(call: OnnxCall, kernel: Pair) -> Window:
    rank, node = len(call.shape(0)), call.node
    strides, dilations = (pair(node.integers(word), rank, 1, word) for word in ("strides", "dilations"))
    if min(*kernel, *strides, *dilations) < 1 or max(*kernel, *strides, *dilations) > 1 << 20:
        raise ImportFailed(f"kernel {kernel}, strides {strides} and dilations {dilations} must be in 1..2^20")
    window = Window(kernel, strides, dilations, ((0, 0), (0, 0)))
    automatic, given = node.text("auto_pad", "NOTSET"), node.integers("pads")
    if automatic.startswith("SAME"):
        pads = _same(call, window, is_upper=automatic == "SAME_UPPER")
    elif automatic == "VALID" or not given:
        pads = window.pads
    else:
        if len(given) != 2 * (rank - 2) or any(not 0 <= pad <= 1 << 20 for pad in given):
            raise ImportFailed(f"pads {given[:8]} of an input of rank {rank} must be 0 or more for each side")
        sides = [(given[i], given[i + rank - 2]) for i in range(rank - 2)]
        pads = (sides[0], sides[1]) if rank == 4 else ((0, 0), sides[0])
    return Window(kernel, strides, dilations, pads)


def _sizes(call: OnnxCall) -> Pair:
    """Height and width of input 0; 0 where unknown."""
    shape = call.shape(0)
    return (1, shape[2]) if len(shape) == 3 else (shape[2], shape[3])


def _same(call: OnnxCall, window: Window, *, is_upper: bool) -> tuple[Pair, Pair]:
    """Return SAME padding: the result has ceil(size / stride) elements."""
    if 0 in _sizes(call):
        raise call.graph.unsized("auto_pad needs a known image size")
    pads = []
    for size, stride, extent in zip(_sizes(call), window.strides, window.extent, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + extent - size, 0)
        less, more = total // 2, total - total // 2
        pads.append((less, more) if is_upper else (more, less))
    return pads[0], pads[1]


def _padded(call: OnnxCall, x: Value, window: Window, fill: float | None = None) -> tuple[Value, tuple[int, ...]]:
    """Return the image, and its padding arguments. Padding as large as the window becomes a PAD operation.

    fill: turn all padding into a PAD of this value.
    """
    (top, bottom), (left, right) = window.pads
    is_large = max(top, bottom) >= window.extent[0] or max(left, right) >= window.extent[1]
    if fill is None and not is_large:
        return x, (left, right, top, bottom)
    if any((top, bottom, left, right)):
        pads = np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32)
        x = call.graph.cast(call.graph.operation("PAD", x, pads))
    return x, (0, 0, 0, 0)


def conv(call: OnnxCall) -> None:
    """CONV_2D; DEPTHWISE_CONV_2D when each filter reads one channel, GROUPED_CONV_2D when it reads several."""
    entry, rank, groups = call.weights(1), len(call.shape(0)), call.node.integer("group", 1)
    x, array = call.image(0), _as_images(call, 1, rank)
    units, depth, *kernel = array.shape
    window = _window(call, (kernel[0], kernel[1]))
    x, (left, right, top, bottom) = _padded(call, x, window)
    channels = call.shape(0)[1]
    if groups < 1 or (channels and channels != depth * groups) or units % groups:
        raise ImportFailed(f"{units} filters of {depth} channels in {groups} groups for {channels} channels")
    (sy, sx), (dy, dx) = window.strides, window.dilations
    head, gaps = (left, right, top, bottom, sx, sy), (dx, dy) if (dx, dy) != (1, 1) else ()
    flags = (False, *gaps) if gaps else ()
    if groups > 1 and depth == 1:
        weights = filters(call, entry, array.transpose(1, 2, 3, 0), 3, x=x)
        tail = (bias(call, 2, x, weights, units=units), *head, units // groups, call.code, *flags)
        result = call.emit("DEPTHWISE_CONV_2D", x, weights, *tail)
    else:
        weights = filters(call, entry, array.transpose(0, 2, 3, 1), 0, x=x)
        tail = (bias(call, 2, x, weights, units=units), *head)
        if groups == 1:
            result = call.emit("CONV_2D", x, weights, *tail, call.code, *flags)
        elif gaps:
            raise ImportFailed("a convolution in groups of several channels has no dilation in the HAL")
        else:
            result = call.emit("GROUPED_CONV_2D", x, weights, *tail, groups, call.code, False)
    call.give(result, is_image=True, rank=rank)


def _as_images(call: OnnxCall, position: int, rank: int) -> Array:
    """Return weights of rank 4; those of signals get height 1."""
    array = call.weights(position).array
    assert array is not None
    if array.ndim != rank or rank not in (3, 4) or 0 in array.shape:
        raise ImportFailed(
            f"weights of dimensions {list(array.shape)} do not fit an input of rank {rank}; those of images have rank 4"
        )
    return array[:, :, None] if rank == 3 else array


def conv_transpose(call: OnnxCall) -> None:
    """TRANSPOSE_CONV_2D. Grouped filters become filters of all channels, zero for the channels of other groups."""
    entry, rank, groups = call.weights(1), len(call.shape(0)), call.node.integer("group", 1)
    x, array = call.image(0), _as_images(call, 1, rank)
    window = _window(call, (array.shape[2], array.shape[3]))
    if window.dilations != (1, 1):
        raise ImportFailed("a transposed convolution has no dilation in the HAL")
    if groups > 1:
        array = _spread(call, array, groups)
    units = array.shape[1]
    weights = filters(call, entry, array.transpose(1, 2, 3, 0), 0, x=x)
    (top, bottom), (left, right) = _transposed_pads(call, window)
    tail = (left, right, top, bottom, *window.strides[::-1], call.code, False)
    result = call.emit("TRANSPOSE_CONV_2D", x, weights, bias(call, 2, x, weights, units=units), *tail)
    call.give(result, is_image=True, rank=rank)


def _spread(call: OnnxCall, array: Array, groups: int) -> Array:
    channels, units, *kernel = array.shape
    if channels % groups or call.target is not None:
        raise ImportFailed(f"{channels} channels cannot be split into {groups} groups")
    call.graph.charge(array.nbytes * groups)
    result, size = np.zeros((channels, units * groups, *kernel), array.dtype), channels // groups
    for g in range(groups):
        result[g * size : (g + 1) * size, g * units : (g + 1) * units] = array[g * size : (g + 1) * size]
    return result


def _transposed_pads(call: OnnxCall, window: Window) -> tuple[Pair, Pair]:
    """Return the pixels cut off at each side; negative where the file adds pixels."""
    rank = len(call.shape(0))
    more = pair(call.node.integers("output_padding"), rank, 0, "output_padding")
    wanted, automatic = call.node.integers("output_shape"), call.node.text("auto_pad", "NOTSET")
    if not wanted and not automatic.startswith("SAME"):
        (top, bottom), (left, right) = window.pads
        return (top, bottom - more[0]), (left, right - more[1])
    sizes = _sizes(call)
    if 0 in sizes:
        raise call.graph.unsized("output_shape and auto_pad need a known image size")
    outs = [size * stride for size, stride in zip(sizes, window.strides, strict=True)]
    if wanted:
        outs = list(pair(wanted[2:] if len(wanted) == rank else wanted, rank, 1, "output_shape"))
    pads = []
    for size, stride, extent, extra, out in zip(sizes, window.strides, window.extent, more, outs, strict=True):
        total = stride * (size - 1) + extra + extent - out
        head = total // 2 if automatic == "SAME_UPPER" else total - total // 2
        pads.append((head, total - head - extra))
    return pads[0], pads[1]


def max_pool(call: OnnxCall) -> None:
    """MAX_POOL_2D."""
    if len(call.node.outputs) > 1 and call.node.outputs[1]:
        raise ImportFailed("the HAL does not return the indices of the largest elements")
    _pool(call, "MAX_POOL_2D")


def average_pool(call: OnnxCall) -> None:
    """AVERAGE_POOL_2D, after a PAD where padding counts."""
    _pool(call, "AVERAGE_POOL_2D", fill=0.0 if call.node.integer("count_include_pad") else None)


def _pool(call: OnnxCall, kind: str, fill: float | None = None) -> None:
    rank = len(call.shape(0))
    window = _window(call, pair(call.node.integers("kernel_shape"), rank, 1, "kernel_shape"))
    if window.dilations != (1, 1):
        raise ImportFailed("pooling has no dilation in the HAL")
    x, (left, right, top, bottom) = _padded(call, call.image(0), window, fill)
    (sy, sx), (kh, kw) = window.strides, window.kernel
    if call.node.integer("ceil_mode"):
        below, beside = _ceiling(call, window)
        bottom, right = bottom + below, right + beside
    result = call.emit(kind, x, left, right, top, bottom, sx, sy, kw, kh, call.code)
    call.give(result, is_image=True, rank=rank)


def _ceiling(call: OnnxCall, window: Window) -> Pair:
    """Return the padding after the padded image that makes the last, partial window count."""
    sizes, more = _sizes(call), []
    if 0 in sizes:
        raise call.graph.unsized("ceil_mode needs a known image size")
    for size, extent, stride, (head, tail) in zip(sizes, window.kernel, window.strides, window.pads, strict=True):
        count = math.ceil((size + head + tail - extent) / stride) + 1
        if (count - 1) * stride >= size + head:  # the window would begin behind the image
            count -= 1
        more.append(max((count - 1) * stride + extent - size - head - tail, 0))
    return more[0], more[1]


def global_pool(kind: str) -> Convert:
    """MEAN or REDUCE_MAX over the pixels."""

    def convert(call: OnnxCall) -> None:
        rank, keep = len(call.shape(0)), 1 if kind == "MEAN" else True
        axes = np.array([1, 2], np.int32)
        call.give(call.emit(kind, call.image(0), axes, keep), is_image=True, rank=rank)

    return convert


def local_response(call: OnnxCall) -> None:
    """LOCAL_RESPONSE_NORMALIZATION, whose alpha applies to each element instead of their mean."""
    size, node = call.node.integer("size", 1), call.node
    if size < 1 or not size % 2:
        raise ImportFailed(f"size {size} must be odd: the HAL takes as many neighbours on either side")
    factors = (node.real("bias", 1.0), node.real("alpha", 1e-4) / size, node.real("beta", 0.75))
    result = call.emit("LOCAL_RESPONSE_NORMALIZATION", call.image(0), size // 2, *factors)
    call.give(result, is_image=True, rank=len(call.shape(0)))


def blocks(kind: str) -> Convert:
    """DEPTH_TO_SPACE or SPACE_TO_DEPTH; the many channels of mode CRD are shuffled, before or after it."""

    def convert(call: OnnxCall) -> None:
        size, x = call.node.integer("blocksize"), call.image(0)
        is_deep, is_shuffled = kind == "DEPTH_TO_SPACE", call.node.text("mode", "DCR") == "CRD"
        channels = call.shape(0, 4)[1]
        if is_shuffled and (not 0 < size <= 1 << 10 or not channels or (is_deep and channels % size**2)):
            raise ImportFailed(f"mode CRD of {channels} channels and blocks of {size} x {size}")
        if is_shuffled and is_deep:
            x = call.emit("CHANNEL_SHUFFLE", x, channels // size**2, 3)
        x = call.emit(kind, x, size)
        if is_shuffled and not is_deep:
            x = call.emit("CHANNEL_SHUFFLE", x, size**2, 3)
        call.give(x, is_image=True)

    return convert


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
    _resize(call, scales, None, "asymmetric", nearest="floor")


def resize(call: OnnxCall) -> None:
    """Resize by sizes or scales; the region of interest belongs to a mode that the HAL lacks."""
    if call.opset < 11:
        _resize(call, [float(v) for v in call.constant(1).reshape(-1)], None, "asymmetric", nearest="floor")
        return
    if call.node.integers("axes") is not None or call.node.integer("antialias"):
        raise ImportFailed("axes and antialias of Resize are not supported")
    sizes = call.integers(3) if call.given(3) else None
    scales = [float(v) for v in call.constant(2).reshape(-1)] if call.given(2) and sizes is None else None
    if sizes and call.node.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise ImportFailed("keep_aspect_ratio_policy must be stretch")
    mode = call.node.text("coordinate_transformation_mode", "half_pixel")
    _resize(call, scales, sizes, mode, nearest=call.node.text("nearest_mode", "round_prefer_floor"))


def _resize(call: OnnxCall, scales: list[float] | None, sizes: list[int] | None, mode: str, nearest: str) -> None:
    shape, kind = call.shape(0), call.node.text("mode", "nearest")
    given = sizes if scales is None else scales
    if given is None or len(given) != len(shape) or len(shape) not in (3, 4) or 0 in shape[1:]:
        raise call.graph.unsized(f"{given} for an input of dimensions {list(shape)}")
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
    """Return the source pixel of each result pixel, by ONNX's rule."""
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
    """Return the source pixel of each result pixel, by the HAL's rule."""
    i = np.arange(out, dtype=np.float32)
    if mode == "align_corners" and out > 1:
        at = np.floor(i * np.float32((size - 1) / (out - 1)) + np.float32(0.5))
    else:
        at = np.floor((i + (np.float32(0.5) if mode == "half_pixel" else 0)) * np.float32(size / out))
    return np.asarray(np.clip(at, 0, size - 1), np.int32)
