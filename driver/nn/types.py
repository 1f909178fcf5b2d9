"""Operand types and lifetimes of the HAL 1.0-1.3, and what follows from a type alone."""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from .errors import InvalidModel, did_you_mean
from .extension import ExtensionType, stored_dtype

Dimensions = tuple[int, ...]
MAX_BYTES = 2**32 - 1
"""Largest operand: the HAL counts bytes in 32 bits."""
LAST_BASE_CODE = 0xFFFF
"""Types and operations with codes above it belong to extensions."""


class OperandType(IntEnum):
    """Type of an operand, by its HAL name and value.

    Attributes:
        dtype: the numpy dtype of an array of this type.
        stored_dtype: the dtype that a device reads: of booleans their bytes, uint8. Another process may write any value
            there, and numpy's bool assumes 0 or 1.
        element_size: bytes of one stored element; 0 for SUBGRAPH and OEM, which have no stored form.
        is_scalar: True for the types whose operands have no dimensions.
        is_quantised: True for the types that must have a scale above 0.
        since: the HAL version 1.x that introduced the type, as x.
    """

    dtype: np.dtype[Any]
    stored_dtype: np.dtype[Any]
    element_size: int
    is_scalar: bool
    is_quantised: bool
    since: int

    FLOAT32 = 0
    INT32 = 1
    UINT32 = 2
    TENSOR_FLOAT32 = 3
    TENSOR_INT32 = 4
    TENSOR_QUANT8_ASYMM = 5
    BOOL = 6
    TENSOR_QUANT16_SYMM = 7
    TENSOR_FLOAT16 = 8
    TENSOR_BOOL8 = 9
    FLOAT16 = 10
    TENSOR_QUANT8_SYMM_PER_CHANNEL = 11
    TENSOR_QUANT16_ASYMM = 12
    TENSOR_QUANT8_SYMM = 13
    TENSOR_QUANT8_ASYMM_SIGNED = 14
    SUBGRAPH = 15
    OEM = 10000
    TENSOR_OEM_BYTE = 10001

    @classmethod
    def parse(cls, name: "str | int | OperandType | ExtensionType") -> "OperandType | ExtensionType":
        """Return the type called `name` in the HAL, or the extension's that is given; `InvalidModel` when there is
        none.
        """
        if isinstance(name, ExtensionType):
            return name
        try:
            return cls[name] if isinstance(name, str) else cls(name)
        except (KeyError, ValueError):
            if isinstance(name, int) and name > LAST_BASE_CODE:
                raise InvalidModel(
                    f"operand type {name} belongs to an extension; give the ExtensionType, as operand_type_of does"
                ) from None
            hint = did_you_mean(name, cls.__members__) if isinstance(name, str) else ""
            raise InvalidModel(f"{name!r} is no operand type of the HAL{hint}") from None


_SCALARS = frozenset(OperandType[name] for name in ("FLOAT32", "INT32", "UINT32", "BOOL", "FLOAT16", "SUBGRAPH", "OEM"))
_DTYPES: dict[OperandType, np.dtype[Any]] = {
    OperandType.FLOAT32: np.dtype(np.float32),
    OperandType.INT32: np.dtype(np.int32),
    OperandType.UINT32: np.dtype(np.uint32),
    OperandType.TENSOR_FLOAT32: np.dtype(np.float32),
    OperandType.TENSOR_INT32: np.dtype(np.int32),
    OperandType.TENSOR_QUANT8_ASYMM: np.dtype(np.uint8),
    OperandType.BOOL: np.dtype(np.bool_),
    OperandType.TENSOR_QUANT16_SYMM: np.dtype(np.int16),
    OperandType.TENSOR_FLOAT16: np.dtype(np.float16),
    OperandType.TENSOR_BOOL8: np.dtype(np.bool_),
    OperandType.FLOAT16: np.dtype(np.float16),
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: np.dtype(np.int8),
    OperandType.TENSOR_QUANT16_ASYMM: np.dtype(np.uint16),
    OperandType.TENSOR_QUANT8_SYMM: np.dtype(np.int8),
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: np.dtype(np.int8),
    OperandType.SUBGRAPH: np.dtype(np.uint8),
    OperandType.OEM: np.dtype(np.uint8),
    OperandType.TENSOR_OEM_BYTE: np.dtype(np.uint8),
}
ZERO_POINTS = {
    OperandType.TENSOR_QUANT8_ASYMM: (0, 255),
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: (-128, 127),
    OperandType.TENSOR_QUANT8_SYMM: (0, 0),
    OperandType.TENSOR_QUANT16_SYMM: (0, 0),
    OperandType.TENSOR_QUANT16_ASYMM: (0, 65535),
}
"""The zero points each quantised type may have, first and last."""
_SINCE_3 = OperandType.TENSOR_QUANT8_ASYMM_SIGNED, OperandType.SUBGRAPH

for _type in OperandType:
    _type.dtype, _type.stored_dtype = _DTYPES[_type], stored_dtype(_DTYPES[_type])
    _type.element_size = 0 if _type in (OperandType.SUBGRAPH, OperandType.OEM) else _type.dtype.itemsize
    _type.is_scalar, _type.is_quantised = _type in _SCALARS, _type in ZERO_POINTS
    _is_from_2 = OperandType.BOOL <= _type <= OperandType.TENSOR_QUANT8_SYMM
    _type.since = 3 if _type in _SINCE_3 else 2 if _is_from_2 else 0


class OperandLifeTime(IntEnum):
    """Who provides an operand, by its HAL 1.3 name and value.

    Attributes:
        is_constant: True for both kinds of constants.
        is_written: True for the operands that an operation of the subgraph computes.
    """

    is_constant: bool
    is_written: bool

    TEMPORARY_VARIABLE = 0
    SUBGRAPH_INPUT = 1
    SUBGRAPH_OUTPUT = 2
    CONSTANT_COPY = 3
    CONSTANT_REFERENCE = 4
    NO_VALUE = 5
    SUBGRAPH = 6

    @classmethod
    def parse(cls, name: "str | int | OperandLifeTime") -> "OperandLifeTime":
        """Return the lifetime called `name` in the HAL or in conformance files; `InvalidModel` when there is none."""
        try:
            return cls[_LIFETIME_ALIASES.get(name, name)] if isinstance(name, str) else cls(name)
        except (KeyError, ValueError):
            known = (*cls.__members__, *_LIFETIME_ALIASES)
            hint = did_you_mean(name, known) if isinstance(name, str) else ""
            raise InvalidModel(f"{name!r} is no operand lifetime of the HAL{hint}") from None


for _life in OperandLifeTime:
    _life.is_constant = _life in (OperandLifeTime.CONSTANT_COPY, OperandLifeTime.CONSTANT_REFERENCE)
    _life.is_written = _life in (OperandLifeTime.TEMPORARY_VARIABLE, OperandLifeTime.SUBGRAPH_OUTPUT)
_LIFETIME_ALIASES = {
    "INPUT": "SUBGRAPH_INPUT",
    "OUTPUT": "SUBGRAPH_OUTPUT",
    "TEMPORARY": "TEMPORARY_VARIABLE",
    "CONSTANT": "CONSTANT_COPY",
    "MODEL_INPUT": "SUBGRAPH_INPUT",
    "MODEL_OUTPUT": "SUBGRAPH_OUTPUT",
}


def combine_dimensions(a: Sequence[int], b: Sequence[int]) -> Dimensions | None:
    """Return what two partly known descriptions of one tensor say together; None when they contradict each other.

    An empty description is an unknown rank, a 0 an unknown dimension.
    """
    if not a or not b or a == b:
        return tuple(a or b)
    if len(a) != len(b) or any(x and y and x != y for x, y in zip(a, b, strict=True)):
        return None
    return tuple(x or y for x, y in zip(a, b, strict=True))


def byte_size(type: OperandType | ExtensionType, dimensions: Sequence[int]) -> int:  # noqa: A002 - the HAL's word
    """Return the bytes of an operand of this type and these dimensions."""
    return type.element_size * math.prod(dimensions)
