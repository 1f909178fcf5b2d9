"""ONNX's messages: the numbers of their fields, the element types, and where tensors are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.formats.protobuf import ProtoBytes, ProtoMessage

FIELDS: dict[str, dict[str, int]] = {
    "ModelProto": {
        "ir_version": 1,
        "graph": 7,
        "opset_import": 8,
        "metadata_props": 14,
        "training_info": 20,
        "functions": 25,
    },
    "OperatorSetIdProto": {"domain": 1, "version": 2},
    "GraphProto": {"node": 1, "initializer": 5, "input": 11, "output": 12, "value_info": 13, "sparse_initializer": 15},
    "NodeProto": {"input": 1, "output": 2, "op_type": 4, "attribute": 5, "domain": 7},
    "AttributeProto": {
        "name": 1,
        "f": 2,
        "i": 3,
        "s": 4,
        "t": 5,
        "g": 6,
        "floats": 7,
        "ints": 8,
        "strings": 9,
        "tensors": 10,
        "graphs": 11,
        "sparse_tensor": 22,
        "sparse_tensors": 23,
    },
    "ValueInfoProto": {"name": 1, "type": 2},
    "TypeProto": {
        "tensor_type": 1,
        "sequence_type": 4,
        "map_type": 5,
        "opaque_type": 7,
        "sparse_tensor_type": 8,
        "optional_type": 9,
    },
    "TypeProto.Tensor": {"elem_type": 1, "shape": 2},
    "TensorShapeProto": {"dim": 1},
    "TensorShapeProto.Dimension": {"dim_value": 1, "dim_param": 2},
    "StringStringEntryProto": {"key": 1, "value": 2},
    "TensorProto": {
        "dims": 1,
        "data_type": 2,
        "float_data": 4,
        "int32_data": 5,
        "int64_data": 7,
        "name": 8,
        "raw_data": 9,
        "double_data": 10,
        "uint64_data": 11,
        "external_data": 13,
        "data_location": 14,
    },
    "SparseTensorProto": {"values": 1, "indices": 2},
    "FunctionProto": {"node": 7, "attribute_proto": 11},
    "TrainingInfoProto": {"initialization": 1, "algorithm": 2},
    "TypeProto.Sequence": {"elem_type": 1},
    "TypeProto.Map": {"key_type": 1, "value_type": 2},
    "TypeProto.Optional": {"elem_type": 1},
}
"""Field numbers of the schema, for the fields that are read."""
TYPE_NAMES = (
    *("UNDEFINED", "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64"),
    *("STRING", "BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64", "COMPLEX64", "COMPLEX128"),
    *("BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "UINT4", "INT4", "FLOAT4E2M1"),
    *("FLOAT8E8M0", "UINT2", "INT2", "FLOAT6E2M3", "FLOAT6E3M2"),
)
"""Names of all element types of ONNX, by their numbers."""
_NUMPY = {"FLOAT": "float32", "DOUBLE": "float64"}
_CARRIED: tuple[int, ...] = (*range(1, 8), *range(9, 14), 16)
DTYPES = {number: _NUMPY.get(TYPE_NAMES[number], TYPE_NAMES[number].lower()) for number in _CARRIED}
"""Element types that are carried, by their numbers: numpy's names, or "bfloat16"."""
TYPES = {TYPE_NAMES[number]: number for number in DTYPES}
"""The same types: their numbers, by ONNX's names."""
ELEMENTS: dict[str, np.dtype[Any]] = {
    TYPE_NAMES[number]: np.dtype(word) for number, word in DTYPES.items() if word != "bfloat16"
}
"""Element types that numpy has, by ONNX's names."""

_HOLDERS = {
    "ModelProto": {"graph": "GraphProto", "training_info": "TrainingInfoProto", "functions": "FunctionProto"},
    "TrainingInfoProto": {"initialization": "GraphProto", "algorithm": "GraphProto"},
    "GraphProto": {"node": "NodeProto", "initializer": "TensorProto", "sparse_initializer": "SparseTensorProto"},
    "FunctionProto": {"node": "NodeProto", "attribute_proto": "AttributeProto"},
    "NodeProto": {"attribute": "AttributeProto"},
    "AttributeProto": {
        **dict.fromkeys(("t", "tensors"), "TensorProto"),
        **dict.fromkeys(("g", "graphs"), "GraphProto"),
        **dict.fromkeys(("sparse_tensor", "sparse_tensors"), "SparseTensorProto"),
    },
    "SparseTensorProto": {"values": "TensorProto", "indices": "TensorProto"},
    "TensorProto": {},
}
PARTS = {kind: {FIELDS[kind][field]: part for field, part in held.items()} for kind, held in _HOLDERS.items()}
"""Message -> its fields in which tensors may be, and what message each is."""
_DEEPEST = 64
"""Limit for graphs in graphs; each lies three messages deeper: in an attribute of a node."""


def element_dtype(number: int) -> np.dtype[Any] | None:
    """Return numpy's dtype of an element type; None if it has none."""
    return ELEMENTS.get(TYPE_NAMES[number]) if 0 <= number < len(TYPE_NAMES) else None


def check_depth(wire: ProtoBytes, depth: int) -> None:
    """Raise DamagedFile for messages that are nested too deeply."""
    if depth > 3 * _DEEPEST:
        raise wire.damaged(f"it has graphs in more than {_DEEPEST} other graphs")


def tensors(message: ProtoMessage, kind: str, depth: int = 0) -> Iterator[ProtoMessage]:
    """Find all tensors in a message, whatever graphs they are in. kind: the name of the message in the schema."""
    check_depth(message.wire, depth)
    if kind == "TensorProto":
        yield message
    for number, part in PARTS[kind].items():
        for inner in message.messages(number):
            yield from tensors(inner, part, depth + 1)
