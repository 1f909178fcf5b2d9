"""Python and numpy values as operands: what a builder makes of a dtype name, an array, a list or a number."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import InvalidModel, did_you_mean
from .model import Operand
from .operands import operand_fault
from .types import OperandLifeTime, OperandType

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
    """The operand type meant by a short name, a HAL name or a numpy dtype."""
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
    """A constant from an array, a list or a number; a scalar when it has no dimensions."""
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
    return checked(Operand(kind, value.shape, scale, zero_point, lifetime, value, channel_quant))


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
