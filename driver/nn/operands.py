"""The rules that an operand has to keep by itself: dimensions, quantisation, lifetime and value.

And Python and numpy values as operands: what a builder makes of a dtype name, an array, a list or a number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import InvalidModel, did_you_mean
from .extension import ExtensionType
from .model import Operand
from .operation import ANY_RANK
from .types import MAX_BYTES, ZERO_POINTS, OperandLifeTime, OperandType, byte_size

_L, _T = OperandLifeTime, OperandType
SMALLEST_SCALE = float(np.finfo(np.float32).smallest_subnormal)
LARGEST_SCALE = float(np.finfo(np.float32).max)


def operand_fault(operand: Operand, referenced: int) -> str | None:
    """Return what is wrong with an operand by itself, or None. `referenced` subgraphs exist."""
    return (
        _rank_fault(operand.dimensions)
        or _dimensions_fault(operand)
        or _size_fault(operand)
        or _quantisation_fault(operand)
        or _channel_fault(operand)
        or _value_fault(operand, referenced)
        or _extension_fault(operand)
    )


def _dimensions_fault(operand: Operand) -> str | None:
    dimensions = list(operand.dimensions)
    if operand.type == _T.OEM and not operand.lifetime.is_constant and operand.lifetime != _L.NO_VALUE:
        return "an OEM scalar has no size of its own: it can only be constant; TENSOR_OEM_BYTE can be anything"
    if operand.type.is_scalar and dimensions:
        return f"a scalar has no dimensions, not {dimensions}"
    if operand.lifetime.is_constant and not operand.type.is_scalar and not dimensions:
        return "a constant tensor needs a rank of at least 1"
    return None


def _size_fault(operand: Operand) -> str | None:
    """Return what is wrong with an operand's size: the HAL counts bytes in 32 bits, and numpy has a largest rank."""
    dimensions = list(operand.dimensions)
    if any(not 0 <= d < 2**32 for d in dimensions):
        return f"dimensions {dimensions} have to be in 0..2^32-1"
    size = byte_size(operand.type, dimensions)
    return f"dimensions {dimensions} need {size} bytes, larger than 4 GiB" if size > MAX_BYTES else None


def check_rank(dimensions: Sequence[int]) -> None:
    """Raise InvalidModel if a tensor cannot have so many dimensions."""
    if reason := _rank_fault(dimensions):
        raise InvalidModel(reason)


def _rank_fault(dimensions: Sequence[int]) -> str | None:
    return f"rank {len(dimensions)}; at most {ANY_RANK[-1]} is supported" if len(dimensions) > ANY_RANK[-1] else None


def _quantisation_fault(operand: Operand) -> str | None:
    scale, zero_point = operand.scale, operand.zero_point
    if operand.type in ZERO_POINTS:
        first, last = ZERO_POINTS[operand.type]
        if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            return f"scale {scale} has to be above 0 and a finite float32"
        if not first <= zero_point <= last:
            return f"zero point {zero_point} has to be in {first}..{last}"
        return None
    if operand.type == _T.TENSOR_INT32:
        if not 0 <= scale <= LARGEST_SCALE:
            return f"scale {scale} has to be at least 0 and a finite float32"
    elif scale != 0:
        return f"scale {scale} has to be 0"
    return f"zero point {zero_point} has to be 0" if zero_point else None


def _channel_fault(operand: Operand) -> str | None:
    if operand.type != _T.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        return "only TENSOR_QUANT8_SYMM_PER_CHANNEL has channel_quant" if operand.channel_quant is not None else None
    if operand.channel_quant is None:
        return "channel_quant is missing"
    scales, channel = operand.channel_quant
    if not 0 <= channel < len(operand.dimensions):
        return f"channel dimension {channel} has to be below the rank {len(operand.dimensions)}"
    if operand.dimensions[channel] == 0 or operand.dimensions[channel] != len(scales):
        return f"{len(scales)} scales for {operand.dimensions[channel]} channels"
    fine = all(SMALLEST_SCALE <= s <= LARGEST_SCALE for s in scales)
    return None if fine else "every channel scale has to be above 0 and a finite float32"


def _extension_fault(operand: Operand) -> str | None:
    if operand.extension_params is None or isinstance(operand.type, ExtensionType):
        return None
    return "extension_params belong to operands whose type is an extension's"


def _value_fault(operand: Operand, referenced: int) -> str | None:
    lifetime, value = operand.lifetime, operand.value
    if (operand.type == _T.SUBGRAPH) != (lifetime == _L.SUBGRAPH):
        return f"lifetime {lifetime.name} does not belong to type {operand.type.name}"
    if lifetime == _L.SUBGRAPH:
        known = isinstance(value, int) and 0 <= value < referenced
        return None if known else f"subgraph {value!r} is not one of the {referenced} referenced subgraphs"
    if not lifetime.is_constant:
        return f"an operand of lifetime {lifetime.name} has no value" if value is not None else None
    return _constant_fault(operand)


def _constant_fault(operand: Operand) -> str | None:
    value, dtype = operand.value, operand.type.dtype
    if not isinstance(value, np.ndarray | np.generic):
        return f"the value of a constant has to be an ndarray, not {type(value).__name__}"
    if value.dtype not in (dtype, np.dtype(np.uint8)) and not (value.dtype == np.bool_ and dtype.itemsize == 1):
        return f"the value has dtype {value.dtype}; convert it to {dtype}"
    size = byte_size(operand.type, operand.dimensions)
    if operand.type == _T.OEM:
        return None
    return None if value.nbytes == size else f"the value has {value.nbytes} bytes, the dimensions need {size}"


_SHORT_NAMES = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "int32": OperandType.TENSOR_INT32,
    "quant8_asymm": OperandType.TENSOR_QUANT8_ASYMM,
    "quant8_asymm_signed": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    "bool8": OperandType.TENSOR_BOOL8,
}
_BY_DTYPE = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "int32": OperandType.TENSOR_INT32,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    "bool": OperandType.TENSOR_BOOL8,
    "uint16": OperandType.TENSOR_QUANT16_ASYMM,
    "int16": OperandType.TENSOR_QUANT16_SYMM,
}
_SCALAR_OF = {
    OperandType.TENSOR_FLOAT32: OperandType.FLOAT32,
    OperandType.TENSOR_FLOAT16: OperandType.FLOAT16,
    OperandType.TENSOR_INT32: OperandType.INT32,
    OperandType.TENSOR_BOOL8: OperandType.BOOL,
}


def operand_type(dtype: Any) -> OperandType:
    """Return the operand type meant by a short name, a HAL name or a numpy dtype."""
    if isinstance(dtype, OperandType):
        return dtype
    if isinstance(dtype, str) and (dtype in _SHORT_NAMES or dtype in OperandType.__members__):
        return _SHORT_NAMES[dtype] if dtype in _SHORT_NAMES else OperandType[dtype]
    try:
        return _BY_DTYPE[np.dtype(dtype).name]
    except (TypeError, KeyError):
        hint = did_you_mean(str(dtype), (*_SHORT_NAMES, *OperandType.__members__))
        names = ", ".join(_SHORT_NAMES)
        raise InvalidModel(f"dtype {dtype!r} is not one of {names}, nor a HAL type name{hint}") from None


def constant_operand(
    array: Any,
    dtype: Any = None,
    *,
    scale: float = 0.0,
    zero_point: int = 0,
    channel_quant: tuple[Sequence[float], int] | None = None,
) -> Operand:
    """Return a constant from an array, a list or a number; a scalar when it has no dimensions."""
    value = as_array(array)
    if dtype is not None:
        kind = operand_type(dtype)
    elif channel_quant is not None:
        kind = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
    elif value.dtype.name in _BY_DTYPE:
        kind = _BY_DTYPE[value.dtype.name]
    else:
        raise InvalidModel(f"an array of {value.dtype} has no HAL type; convert it with .astype, or name a dtype")
    if not value.ndim:
        kind = _SCALAR_OF.get(kind, kind)
    if kind.is_quantised and not scale > 0:
        raise InvalidModel(f"a {kind.name} constant needs a scale above 0; make it with constant(array, scale=...)")
    value = value.astype(kind.dtype, copy=False)
    lifetime = OperandLifeTime.CONSTANT_COPY
    return checked(
        Operand(kind, value.shape, scale, zero_point, lifetime=lifetime, value=value, channel_quant=channel_quant)
    )


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """`value` as an array: integers with the 32 bits of the HAL, and floats too unless they came as an array."""
    is_array = isinstance(value, np.ndarray | np.generic)
    try:
        array = np.asarray(value)
    except ValueError:
        raise InvalidModel(f"{value!r} is neither a value of this builder nor an array, list or number") from None
    if array.dtype == np.int64:
        if array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
            raise InvalidModel(f"{value!r} does not fit into 32 bits")
        return array.astype(np.int32)
    if array.dtype.kind not in "fbiu":
        raise InvalidModel(f"{value!r} is neither a value of this builder nor an array, list or number")
    return array if is_array or array.dtype.kind != "f" else array.astype(np.float32)


def checked(operand: Operand) -> Operand:
    """`operand` itself; `InvalidModel` when it breaks a rule that concerns it alone."""
    if reason := operand_fault(operand, referenced=0):
        raise InvalidModel(f"{operand.type.name}: {reason}")
    return operand
