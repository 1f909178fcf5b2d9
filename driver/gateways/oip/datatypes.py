"""The protocol's tensor types, and where the values of each lie in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.gateways.refusal import invalid
from driver.nn.file_form import PACKED
from driver.nn.tensors import TEXTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.nn import Operand


class Datatype(NamedTuple):
    """One of the protocol's tensor types.

    contents: the field of InferTensorContents that has values of it, or "" where only raw bytes can.
    """

    name: str
    dtype: np.dtype[Any]
    contents: str
    in_config: str

    @property
    def is_bits(self) -> bool:
        """True if `dtype` holds the bits of values that numpy does not know."""
        return self.name == "BF16"


def _known() -> dict[str, Datatype]:
    rows = (
        ("BOOL", np.bool_, "bool_contents", "TYPE_BOOL"),
        ("UINT8", np.uint8, "uint_contents", "TYPE_UINT8"),
        ("UINT16", np.uint16, "uint_contents", "TYPE_UINT16"),
        ("UINT32", np.uint32, "uint_contents", "TYPE_UINT32"),
        ("UINT64", np.uint64, "uint64_contents", "TYPE_UINT64"),
        ("INT8", np.int8, "int_contents", "TYPE_INT8"),
        ("INT16", np.int16, "int_contents", "TYPE_INT16"),
        ("INT32", np.int32, "int_contents", "TYPE_INT32"),
        ("INT64", np.int64, "int64_contents", "TYPE_INT64"),
        ("FP16", np.float16, "", "TYPE_FP16"),
        ("FP32", np.float32, "fp32_contents", "TYPE_FP32"),
        ("FP64", np.float64, "fp64_contents", "TYPE_FP64"),
        ("BF16", np.uint16, "", "TYPE_BF16"),
        ("BYTES", np.object_, "bytes_contents", "TYPE_STRING"),
    )
    return {name: Datatype(name, np.dtype(dtype), contents, word) for name, dtype, contents, word in rows}


DATATYPES = _known()
"""By name."""
STRINGS = DATATYPES["BYTES"]
"""What tensors of texts have, and the classification of an output."""
_OF_DTYPES = {each.dtype: each for each in DATATYPES.values() if not each.is_bits}


def datatype_of(operand: Operand) -> Datatype:
    """Return the protocol's name for what an input or output of a model holds. Raise Refusal."""
    if "BFLOAT16" in operand.type.name:
        return DATATYPES["BF16"]
    if operand.type == PACKED:
        if operand.extra["type"] == TEXTS:
            return STRINGS
        name, kind = operand.extra["name"], operand.extra["type"]
        raise invalid(
            f"{name!r:.80} is {kind}, which has no name in the Open Inference Protocol: "
            "export the model without it (skl2onnx: options={'zipmap': False})"
        )
    found = _OF_DTYPES.get(np.dtype(operand.type.dtype))
    if found is None:
        raise invalid(f"tensors of {operand.type.name} have no name in the Open Inference Protocol")
    return found


def values_as(kind: Datatype, values: Sequence[Any], what: str) -> NDArray[Any]:
    """Return an array of the values that stand in a message, checked. Raise Refusal."""
    if kind.is_bits or not kind.contents:
        raise invalid(f"{what}: {kind.name} travels as raw bytes, and not as values; send it in binary form")
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):  # lists of different lengths
        array = None
    if array is None or (array.size and not _fit(array, kind.dtype)):
        raise invalid(f"{what}: its values are not all of type {kind.name}")
    with np.errstate(over="ignore"):  # a float that is too large becomes infinite, as in a message
        return array.astype(kind.dtype)


def _fit(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if array.dtype.kind not in _TAKES[dtype.kind]:
        return False
    if dtype.kind == "b":
        return array.dtype.kind == "b" or bool(np.isin(array, (0, 1)).all())
    if dtype.kind in "iu":
        room = np.iinfo(dtype)
        return room.min <= int(array.min()) and int(array.max()) <= room.max
    return True


_TAKES = {"b": "biu", "i": "iu", "u": "iu", "f": "iuf"}
"""Kind of a tensor's dtype -> kinds that values in a message may have."""
