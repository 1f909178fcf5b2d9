"""Filters, matrices and biases in the layout and types that the HAL's products take."""

from collections.abc import Sequence

import numpy as np

from driver.errors import ImportFailed
from driver.importers.file_bytes import Array
from driver.nn import OperandType
from driver.nn.builder import Value

from .call import OnnxCall
from .graph import ValueEntry, dequantised

_SIGNED, _UNSIGNED = OperandType.TENSOR_QUANT8_ASYMM_SIGNED, OperandType.TENSOR_QUANT8_ASYMM
MIDDLE = 128


def filters(call: OnnxCall, entry: ValueEntry, array: Array, channel: int, x: Value) -> Value:
    """Add the weights `entry`, rearranged as `array`, for data of the type of `x`.

    channel: the dimension that per-channel scales belong to. 8-bit weights are converted to the type of the data,
    unless they have a scale per channel; the numbers that they stand for stay the same.
    """
    graph = call.graph
    if not x.operand.type.is_quantised:
        if array is entry.array:
            return graph.plain(entry)
        graph.charge(array.nbytes)
        return graph.builder.constant(np.ascontiguousarray(array), dtype=x.operand.type)
    if entry.type not in ("INT8", "UINT8"):
        raise ImportFailed(f"weights {entry} of a quantised operator must be 8-bit integers")
    graph.charge(array.nbytes)
    zero_points, is_signed = entry.zero_points or (0,), entry.type == "INT8"
    if len(entry.scales) > 1:
        if any(zero_point != (0 if is_signed else MIDDLE) for zero_point in zero_points):
            raise ImportFailed(f"weights {entry} have a zero point per channel; the HAL has none for weights")
        quant = (entry.scales, channel)
        return graph.builder.constant(_with_sign(array, is_signed, wanted=True), channel_quant=quant)
    wanted = x.operand.type == _SIGNED
    shift = 0 if wanted == is_signed else -MIDDLE if wanted else MIDDLE
    kind = _SIGNED if wanted else _UNSIGNED
    data = _with_sign(array, is_signed, wanted=wanted)
    return graph.builder.constant(data, dtype=kind, scale=entry.scales[0], zero_point=zero_points[0] + shift)


def _with_sign(array: Array, is_signed: bool, *, wanted: bool) -> Array:
    array = np.ascontiguousarray(array)
    return array if is_signed == wanted else (array.view(np.uint8) ^ 0x80).view(np.int8 if wanted else np.uint8)


def bias(call: OnnxCall, position: int, x: Value, weights: Value, units: int, factor: float = 1.0) -> Value:
    """Input `position` times `factor` as a bias: zeros when absent, integers for quantised products."""
    graph = call.graph
    graph.charge(4 * units)
    if not x.operand.type.is_quantised:
        if not call.given(position):
            return graph.builder.constant(np.zeros(units, x.operand.type.dtype))
        entry = call.weights(position)
        assert entry.array is not None
        if factor == 1.0 and entry.shape == (units,):
            return graph.plain(entry)
        return graph.builder.constant(_row(entry.array, units) * x.operand.type.dtype.type(factor))
    numbers = _row(_real(call, position), units).astype(np.float64) if call.given(position) else np.zeros(units)
    channels = weights.operand.channel_quant
    scales = np.float64(x.operand.scale) * np.array(channels[0] if channels else weights.operand.scale)
    steps = np.clip(np.rint(numbers * factor / scales), -(2**31), 2**31 - 1).astype(np.int32)
    return graph.builder.constant(steps, scale=0.0 if channels else float(scales))


def _real(call: OnnxCall, position: int) -> Array:
    entry = call.weights(position)
    assert entry.array is not None
    return dequantised(entry) if entry.scales else entry.array


def _row(array: Array, units: int) -> Array:
    """One bias per unit."""
    if array.size not in (1, units):
        raise ImportFailed(f"a bias of dimensions {list(array.shape)} does not fit {units} units")
    return np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (units,)))


def pair(values: Sequence[int] | None, rank: int, default: int, what: str) -> tuple[int, int]:
    """Values for height and width, from an attribute with one value per dimension of an image or signal."""
    values = [default] * (rank - 2) if not values else list(values)
    if rank not in (3, 4) or len(values) != rank - 2 or any(not 0 <= v < 2**31 for v in values):
        raise ImportFailed(f"{what} {values[:8]} for an input of rank {rank}; an image takes 2 values, a signal 1")
    return (default, values[0]) if rank == 3 else (values[0], values[1])
