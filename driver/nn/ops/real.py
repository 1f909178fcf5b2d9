"""Between stored numbers and the real numbers that kernels compute with.

float32 is computed in place. float16 is widened to float32. Quantised values lose their zero point on the way in; on
the way out they are scaled, rounded half away from zero and clamped in float64, exact enough to be the definition.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from ..operation import Array, Call, Tensor

STEEP = 1e30
"""Makes at least a half of every number that a half could round to anything but 0."""
SMALL = 1 << 12
"""Elements up to which two plain calls are quicker than `ndarray.clip`, which begins with some Python."""

Bounds = tuple[float | None, float | None]

_ACTIVATIONS: dict[int, Bounds] = {0: (None, None), 1: (0.0, None), 2: (-1.0, 1.0), 3: (0.0, 6.0)}


def load(call: Call, index: int, axes: Sequence[int] | None = None, dtype: DTypeLike = np.float32) -> Array:
    """Input `index` as floats, its axes permuted: real values, or raw values minus the zero point when quantised."""
    tensor = call.tensor(index)
    view = tensor.data if axes is None else tensor.data.transpose(axes)
    if view.dtype == dtype:
        return view
    wide: Array = np.empty(view.shape, dtype) if tensor.fixed else call.scratch(view.shape, dtype)
    if tensor.fixed:
        np.subtract(view, float(tensor.zero_point), out=wide, dtype=dtype, casting="unsafe")
    else:
        call.step(np.copyto, wide, view, casting="unsafe")
        if tensor.zero_point:  # quicker than both at once, which numpy does piece by piece
            call.step(np.subtract, wide, float(tensor.zero_point), wide)
    return wide


def activation_bounds(code: int, tensor: Tensor | None = None) -> Bounds:
    """Return the range of a fused activation; for a quantised `tensor` in its raw values and always closed."""
    if code not in _ACTIVATIONS:
        raise ValueError(f"fused activation {code} does not exist; use 0 (NONE), 1 (RELU), 2 (RELU1) or 3 (RELU6)")
    low, high = _ACTIVATIONS[code]
    if tensor is None or not tensor.type.is_quantised:
        return low, high
    info = np.iinfo(tensor.type.dtype)
    first, last = (None if b is None else float(quantise(np.float64(b), tensor)) for b in (low, high))
    return (info.min if first is None else first), (info.max if last is None else last)


def quantise(real: Array | np.float64, tensor: Tensor) -> Array:
    """Raw values of `real` in the type and parameters of `tensor`, as a new float64 array."""
    info = np.iinfo(tensor.type.dtype)
    scaled = np.asarray(real, np.float64) / tensor.scale
    rounded: Array = np.trunc(scaled + np.copysign(0.5, scaled)) + tensor.zero_point
    return rounded.clip(info.min, info.max)


def clamp(call: Call, array: Array, bounds: Bounds) -> None:
    """Clamp `array` in place."""
    low, high = bounds
    if high is not None and array.size > SMALL:
        call.step(array.clip, low, high, array)
        return
    if low is not None:
        call.step(np.maximum, array, low, out=array)
    if high is not None:
        call.step(np.minimum, array, high, out=array)


def accumulator(call: Call, view: Array, dtype: DTypeLike = np.float32) -> Array:
    """Return where a kernel may gather the result for `view`: the view itself when it is the right kind of array."""
    if view.dtype == dtype and view.flags.c_contiguous and view.flags.aligned:
        return view
    return call.scratch(view.shape, dtype)


def store(call: Call, result: Array, view: Array, code: int, *, factor: float | Array = 1.0) -> None:
    """Finish `result` into `view`, which shows output 0: fused activation, then the stored form.

    Quantised: view = clamp(zero point + round(result * factor)), and `result` may be overwritten; else factor is not
    looked at.
    """
    tensor = call.outputs[0]
    bounds = activation_bounds(code, tensor)
    if tensor.type.is_quantised:
        round_to(call, _scaled(call, result, factor), view, tensor.zero_point, bounds=bounds)
        return
    clamp(call, result, bounds)
    if result is not view:
        call.step(np.copyto, view, result, casting="unsafe")


def _scaled(call: Call, result: Array, factor: float | Array) -> Array:
    """Return result * factor in float64; in place when `result` is float64."""
    if isinstance(factor, float) and factor == 1.0:
        return result
    wide = result if result.dtype == np.float64 else call.shared("wide", result.shape, np.float64)
    call.step(np.multiply, result, factor, wide)
    return wide


def round_to(call: Call, steps: Array, view: Array, zero_point: int, bounds: Bounds) -> None:
    """Round `steps` above the zero point half away from zero and store them in `view`; `steps` are overwritten.

    bounds: of the stored values, closed.
    """
    low, high = bounds
    assert low is not None
    assert high is not None
    if low >= max(zero_point, 0):
        # Nothing negative stays in bounds: rounding half up is the same, and the type cuts fractions off.
        call.step(np.add, steps, zero_point + 0.5, steps)
        clamp(call, steps, bounds)
        call.step(np.copyto, view, steps, casting="unsafe")
        return
    half = call.shared("half", steps.shape, steps.dtype)
    call.step(np.multiply, steps, STEEP, half)
    call.step(half.clip, -0.5, 0.5, half)  # quicker than copysign
    call.step(np.add, steps, half, steps)
    clamp(call, steps, (low - zero_point, high - zero_point))
    whole = call.shared("whole", steps.shape, np.int16 if view.itemsize == 1 else np.int32)
    call.step(np.copyto, whole, steps, casting="unsafe")
    call.step(np.add, whole, whole.dtype.type(zero_point), view, casting="unsafe")


def table(tensor: Tensor, dtype: DTypeLike = np.float64) -> Array:
    """Return the real value of each of the 256 bytes that an 8-bit tensor may hold, in the order of the unsigned
    byte.
    """
    raw = np.arange(256, dtype=np.uint8).view(tensor.type.dtype)
    return ((raw.astype(np.float64) - tensor.zero_point) * tensor.scale).astype(dtype)


def look_up(call: Call, source: Tensor, entries: Array, view: Array) -> None:
    """Write `entries[byte]` for every byte of the 8-bit `source` to `view`."""
    call.step(np.take, entries, source.data.view(np.uint8), out=view, mode="clip")


def requantise_table(source: Tensor, target: Tensor) -> Array:
    """Return the entries that turn bytes of `source` into the type and parameters of `target`."""
    return quantise(table(source), target).astype(target.type.dtype)
