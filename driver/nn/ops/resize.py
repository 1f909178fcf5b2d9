"""Images in another size: whole (RESIZE_BILINEAR, RESIZE_NEAREST_NEIGHBOR), or regions of interest of one.

Whole images are gathered from a table of positions, rows first, then columns. ROI_ALIGN averages samples, ROI_POOLING
takes maxima; both work on one axis after the other, first on the one that leaves less to do for the other.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ..blocks import ELEMENTS, Look, copied, each, pieces, product, reduce, take
from ..model import Operand
from ..operation import Array, Call, OperationType, Signature, Tensor, same_as_input
from ..types import Dimensions, OperandType
from .boxes import expect_batches, expect_eighths, expect_rank, expect_shape, private, reals
from .real import accumulator, activation_bounds, load, round_to, store
from .sums import strips
from .window import NHWC_FROM_NCHW, image_shape, input_image, output_image, stored_shape


def _extent(call: Call, index: int, size: int) -> int:
    """Return the output extent that input `index` asks for: itself when it is an integer, else a factor."""
    if call.tensor(index).type == OperandType.INT32:
        extent = call.integer(index)
    else:
        factor = call.real(index)
        extent = math.floor(np.float32(size) * np.float32(factor)) if math.isfinite(factor) else 0
    if extent < 1:
        raise ValueError(f"output extent {extent} has to be above 0")
    return extent


def _shape(call: Call) -> tuple[Dimensions]:
    nchw = call.flag(3)
    if call.flag(4) and call.flag(5):
        raise ValueError("align corners and half pixel centres exclude each other")
    n, h, w, c = image_shape(call.shape(0), nchw)
    if h < 1 or w < 1:
        raise ValueError(f"an image of {h} x {w} pixels cannot be resized")
    return (stored_shape(n, _extent(call, 2, h), _extent(call, 1, w), c, nchw=nchw),)


def _size_gate(inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> int:
    """Return the HAL version: before 1.2 sizes were no factors."""
    return 0 if inputs[1].type == OperandType.INT32 else 2


def _scale(size: int, out: int, align: bool) -> np.float32:
    """Source positions per output position."""
    return np.float32((size - 1) / (out - 1) if align and out > 1 else size / out)


def neighbours(size: int, out: int, align: bool, half_pixel: bool) -> tuple[Array, Array, Array]:
    """Return, for every output position, the two source positions around it and the weight of the second."""
    centre = np.float32(0.5 if half_pixel else 0.0)
    position = (np.arange(out, dtype=np.float32) + centre) * _scale(size, out, align) - centre
    low = np.maximum(np.floor(position), 0).astype(np.intp)
    high = np.ceil(position).astype(np.intp) if half_pixel else low + 1
    low = np.minimum(low, size - 1)
    return low, np.clip(high, 0, size - 1), (position - low).astype(np.float32)


def _bilinear(call: Call) -> None:
    nchw, align, half_pixel = call.flag(3), call.flag(4), call.flag(5)
    view, out = output_image(call, nchw), call.outputs[0]
    image = load(call, 0, NHWC_FROM_NCHW if nchw else None)
    result = accumulator(call, view)
    (batch, h, w, c), (height, width) = image.shape, view.shape[1:3]
    down, across = neighbours(h, height, align, half_pixel), neighbours(w, width, align, half_pixel)
    weights = np.repeat(across[2], c).reshape(width, c)
    for n, rows in strips(batch, height, max(w, width) * c * image.itemsize):
        part = result[n, rows]
        lines = call.shared("lines", (len(part), part.shape[1], w, c), np.float32)
        low, high, weight = (array[rows] for array in down)
        _interpolate(call, image[n], 1, (low, high, weight[:, None, None]), result=lines)
        _interpolate(call, lines, 2, (*across[:2], weights), result=part)
        if out.type.is_quantised:
            round_to(call, part, view[n, rows], out.zero_point, bounds=activation_bounds(0, out))
        else:
            store(call, part, part if result is view else view[n, rows], 0)


def _interpolate(call: Call, source: Array, axis: int, neighbours: tuple[Array, Array, Array], result: Array) -> None:
    low, high, weight = neighbours
    upper = call.shared("upper", result.shape, np.float32)
    call.step(np.take, source, low, axis=axis, out=result, mode="clip")
    call.step(np.take, source, high, axis=axis, out=upper, mode="clip")
    call.step(np.subtract, upper, result, upper)
    call.step(np.multiply, upper, weight, upper)
    call.step(np.add, result, upper, result)


def nearest_indices(size: int, out: int, align: bool, half_pixel: bool) -> Array:
    """Return for every output position the source position that it copies."""
    centre = np.float32(0.5 if half_pixel else 0.0)
    position = (np.arange(out, dtype=np.float32) + centre) * _scale(size, out, align)
    nearest = np.floor(position + np.float32(0.5) if align else position)
    indices: Array = np.clip(nearest, 0, size - 1).astype(np.intp)
    return indices


def _nearest(call: Call) -> None:
    nchw, align, half_pixel = call.flag(3), call.flag(4), call.flag(5)
    view, image = output_image(call, nchw), input_image(call, nchw)
    n, h, w, c = image.shape
    rows = call.scratch((n, view.shape[1], w, c), image.dtype)
    call.step(np.take, image, nearest_indices(h, view.shape[1], align, half_pixel), axis=1, out=rows, mode="clip")
    call.step(np.take, rows, nearest_indices(w, view.shape[2], align, half_pixel), axis=2, out=view, mode="clip")


def _signatures(types: str, layout: str, tails: tuple[tuple[int, str], ...]) -> tuple[Signature, ...]:
    """Return signatures with the output extents, and with factors."""
    return tuple(Signature(types, f"T {sizes} {layout}", tails=tails, ranks=(4,)) for sizes in ("2*INT32", "2*S"))


_FLAGS = ((3, "BOOL"), (3, "BOOL"))


MAX_SAMPLES = 1 << 16
"""Samples of one bin along one axis, above which a model is refused rather than computed for hours."""

_BLOCK = 32
"""Bins that share a matrix of weights: so many that a matrix product pays, so few that most weights are not zero."""

Band = tuple[slice, slice, Array]
"""Bins, the pixels that they see, and the weights [bins, pixels]."""

Bins = tuple[Array, Array]
"""The first pixel of each bin, and the one behind its last; a bin that ends where it begins is empty."""

Resample = Callable[[Array], Array]
"""From [k, pixels, m] to [k, bins, m]."""


def _regions_shape(call: Call) -> Sequence[Dimensions]:
    nchw = call.flag(len(call.inputs) - 1)
    image, (n, _) = image_shape(call.shape(0), nchw), expect_rank(call, 1, 2)
    expect_shape(call, 1, n, 4)
    expect_shape(call, 2, n)
    expect_eighths(call, 1)
    if 0 in image:
        raise ValueError(f"input 0 has dimensions {list(call.shape(0))}; only the regions may be none")
    height, width = call.integer(3), call.integer(4)
    ratios = call.real(5), call.real(6)
    if height < 1 or width < 1 or not all(ratio > 0 for ratio in ratios):
        raise ValueError(f"output extents {height} x {width} and ratios {ratios} have to be above 0")
    return [stored_shape(n, height, width, image[3], nchw=nchw)]


def _align_shape(call: Call) -> Sequence[Dimensions]:
    samples = call.integer(7), call.integer(8)
    if not all(0 <= count <= MAX_SAMPLES for count in samples):
        raise ValueError(f"samples {samples} have to be in 0..{MAX_SAMPLES}")
    return _regions_shape(call)


def _reader(call: Call, image: Dimensions, *, rounded: bool) -> Callable[[], tuple[Array, Array]]:
    """Return a function that reads the regions anew in every run: see `_read`."""
    ratios = np.array([call.real(6), call.real(5)] * 2, np.float32)
    return partial(_read, call.tensor(1), call.tensor(2), ratios, image, rounded)


def _read(rois: Tensor, batch: Tensor, ratios: Array, image: Dimensions, rounded: bool) -> tuple[Array, Array]:
    """Batch indices [n] and corners x1, y1, x2, y2 [n, 4] in pixels of the features, checked."""
    of, corners = private(batch), reals(rois.data, rois) / ratios
    if rounded:
        wide = corners.astype(np.float64)
        corners = np.trunc(wide + np.copysign(0.5, wide)).astype(np.float32)
    batches, height, width, _ = image
    expect_batches(of, batches)
    low, high = corners[:, :2], corners[:, 2:]
    if not ((low >= 0) & (low <= high) & (high <= (width, height))).all():
        raise ValueError(f"a region does not lie, from its first to its last corner, in {height} x {width} pixels")
    return of, corners


def _resampled(look: Look, pixels: Array, rows: Resample, columns: Resample, out: Array) -> None:
    """Resample `pixels` [height, width, channels] on both axes into `out`."""
    height, width, channels = pixels.shape
    if out.shape[0] * width <= height * out.shape[1]:
        fewer = rows(pixels.reshape(1, height, -1)).reshape(out.shape[0], width, channels)
        each(look, np.copyto, out, columns(fewer))
    else:
        fewer = columns(pixels)
        each(look, np.copyto, out, rows(fewer.reshape(1, height, -1)).reshape(out.shape))


def _sampling(
    look: Look, start: float, stop: float, out: int, samples: int, *, size: int
) -> tuple[int, slice, list[Band]]:
    """Return the samples of a bin, the pixels that a region sees on one axis, and how each bin weighs those."""
    step = max(np.float32(stop) - np.float32(start), np.float32(1)) / np.float32(out)
    count = samples or math.ceil(step)
    within = (step / np.float32(count)) * (np.arange(count, dtype=np.float32) + np.float32(0.5))
    first = min(int(start + within[0]), size - 1)
    bands = []
    for low in range(0, out, _BLOCK):
        look()
        bins = np.arange(low, min(low + _BLOCK, out), dtype=np.float32)
        bands.append(_band(start + step * bins[:, None] + within, low, first, size))
    return count, slice(first, first + bands[-1][1].stop), bands


def _band(positions: Array, bin_: int, first: int, size: int) -> Band:
    """Return the weights of bins from `bin_` on, which average the image of `size` pixels at `positions` [bins,
    samples].

    Pixels are counted from `first`.
    """
    low = np.minimum(positions.astype(np.intp), size - 1)
    share = np.where(low == size - 1, np.float32(0), positions - low)
    high = np.minimum(low + 1, size - 1)
    bins, count = positions.shape
    begin, end = int(low[0, 0]), int(high[-1, -1]) + 1
    cell = np.arange(bins)[:, None] * (end - begin) - begin
    weights = np.bincount((cell + low).ravel(), (1 - share).ravel(), bins * (end - begin))
    weights += np.bincount((cell + high).ravel(), share.ravel(), bins * (end - begin))
    matrix = (weights / count).astype(np.float32).reshape(bins, -1)
    return slice(bin_, bin_ + bins), slice(begin - first, end - first), matrix


def _average(look: Look, bands: Sequence[Band], out: int, pixels: Array) -> Array:
    averages = np.empty((pixels.shape[0], out, pixels.shape[2]), np.float32)
    for bins, seen, weights in bands:
        look()
        product(look, weights, pixels[:, seen], averages[:, bins])
    return averages


def _average_apart(look: Look, bands: Sequence[Band], out: int, pixels: Array) -> Array:
    """Average as `_average` does, where a pixel that is no finite number reaches only the bins that see it."""
    averages = np.zeros((pixels.shape[0], out, pixels.shape[2]), np.float32)
    for bins, seen, weights in bands:
        for pixel, column in enumerate(weights.T, seen.start):
            look()
            for bin_ in np.flatnonzero(column):
                each(look, _add_share, averages[:, bin_ + bins.start], column[bin_], pixels[:, pixel])
    return averages


def _add_share(total: Array, share: np.float32, pixel: Array) -> None:
    np.add(total, share * pixel, total)


def _align(
    look: Look,
    image: Array,
    read: Callable[[], tuple[Array, Array]],
    samples: tuple[int, int],
    ratio: float,
    out: Array,
) -> None:
    """`ratio`: of the features' scale to that of the output, 0 for floats."""
    _, height, width, _ = image.shape
    for region, b, (x1, y1, x2, y2) in zip(out, *read(), strict=True):
        down, rows, row_bands = _sampling(look, y1, y2, out.shape[1], samples=samples[0], size=height)
        across, columns, column_bands = _sampling(look, x1, x2, out.shape[2], samples=samples[1], size=width)
        if ratio >= 255 * down * across:  # as in the HAL, whose multiplier would not fit
            raise ValueError(
                f"the features' scale is {ratio} times that of the output; it has to be below 255 a sample"
            )
        pixels = copied(look, image[b, rows, columns])
        for average in (_average, _average_apart):
            down_and_across = (
                partial(average, look, row_bands, region.shape[0]),
                partial(average, look, column_bands, region.shape[1]),
            )
            _resampled(look, pixels, *down_and_across, region)
            if _is_finite(look, region):
                break


def _is_finite(look: Look, array: Array) -> bool:
    for piece in pieces(array.shape, ELEMENTS):
        look()
        if not np.isfinite(array[piece]).all():
            return False
    return True


def _build_align(call: Call) -> None:
    nchw, features = call.flag(9), call.tensor(0)
    view, image = output_image(call, nchw), load(call, 0, NHWC_FROM_NCHW if nchw else None)
    ratio = features.scale / call.outputs[0].scale if features.type.is_quantised else 0.0
    result = accumulator(call, view)
    read = _reader(call, image.shape, rounded=False)
    call.step(_align, call.look, image, read, (call.integer(7), call.integer(8)), ratio, result)
    store(call, result, view, 0, factor=ratio)


def _bins(start: float, stop: float, out: int, size: int) -> tuple[slice, Bins]:
    """Return the pixels that a region sees on one axis of `size`, and its bins, counted from the first of them."""
    step = max(np.float32(stop) - np.float32(start) + np.float32(1), np.float32(1)) / np.float32(out)
    edges = np.float32(start) + step * np.arange(out + 1, dtype=np.float32)
    first, last = (np.minimum(edge, size).astype(np.intp) for edge in (np.floor(edges[:-1]), np.ceil(edges[1:])))
    begin = min(int(first[0]), size - 1)
    return slice(begin, max(int(last[-1]), begin + 1)), (first - begin, last - begin)


def _highest(look: Look, bins: Bins, empty: float, pixels: Array) -> Array:
    """Return the maximum of each bin, `empty` where it has no pixel."""
    first, stop = bins
    last, widest = np.maximum(stop - 1, 0), int((stop - first).max())
    pixels = pixels if pixels.flags.c_contiguous else copied(look, pixels)
    highest = np.empty((pixels.shape[0], len(first), pixels.shape[2]), pixels.dtype)
    take(look, pixels, np.minimum(first, last), 1, out=highest)
    if len(first) < widest:
        for bin_ in np.flatnonzero(stop > first):
            look()
            reduce(look, np.maximum, pixels[:, first[bin_] : stop[bin_]], (1,), out=highest[:, bin_, None])
    else:
        for tap in range(1, widest):
            look()
            other = np.empty_like(highest)
            take(look, pixels, np.minimum(first + tap, last), 1, out=other)
            each(look, np.maximum, highest, other, out=highest)
    highest[:, first >= stop] = empty
    return highest


def _pool(look: Look, image: Array, read: Callable[[], tuple[Array, Array]], empty: float, out: Array) -> None:
    _, height, width, _ = image.shape
    for region, b, (x1, y1, x2, y2) in zip(out, *read(), strict=True):
        rows, row_bins = _bins(y1, y2, out.shape[1], height)
        columns, column_bins = _bins(x1, x2, out.shape[2], width)
        highest = partial(_highest, look, row_bins, empty), partial(_highest, look, column_bins, empty)
        look()
        _resampled(look, image[b, rows, columns], *highest, region)


def _build_pool(call: Call) -> None:
    nchw, features = call.flag(7), call.tensor(0)
    image = features.data.transpose(NHWC_FROM_NCHW) if nchw else features.data
    read, view = _reader(call, image.shape, rounded=True), output_image(call, nchw)
    call.step(_pool, call.look, image, read, features.zero_point, view)


OPERATIONS = (
    OperationType(
        "RESIZE_BILINEAR",
        23,
        _signatures("f0 h2 q2 s3", "", ((2, "BOOL"), *_FLAGS)),
        _shape,
        build=_bilinear,
        quantisation=same_as_input,
        takes_empty=True,
        gate=_size_gate,
    ),
    OperationType(
        "RESIZE_NEAREST_NEIGHBOR",
        94,
        _signatures("f2 h2 q2 s3", "BOOL", _FLAGS),
        _shape,
        build=_nearest,
        quantisation=same_as_input,
        takes_empty=True,
    ),
    OperationType(
        "ROI_ALIGN",
        81,
        (
            Signature("f2 h2", "T T i INT32 INT32 2*S INT32 INT32 BOOL", ranks=(4,)),
            Signature("q2 s3", "T W i INT32 INT32 2*S INT32 INT32 BOOL", ranks=(4,)),
        ),
        _align_shape,
        build=_build_align,
        takes_empty=True,
    ),
    OperationType(
        "ROI_POOLING",
        82,
        (
            Signature("f2 h2", "T T i INT32 INT32 2*S BOOL", ranks=(4,)),
            Signature("q2 s3", "T W i INT32 INT32 2*S BOOL", ranks=(4,)),
        ),
        _regions_shape,
        build=_build_pool,
        quantisation=same_as_input,
    ),
)
