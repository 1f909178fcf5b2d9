"""The header of an .onnx file: its inputs and outputs, and where weights outside of it lie.

Of a node no more is read than whether it may name another file. Of an initializer, its name and its place.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from driver.errors import ImportFailed
from driver.formats.onnx_schema import DTYPES, FIELDS, TYPES, tensors
from driver.formats.protobuf import ProtoBytes, ProtoMessage
from driver.importers.header import ExternalRange, Header, HeaderTensor
from driver.importers.obstacle import Obstacle

from .file import declared_sizes, external_range, type_name

_M, _G, _N, _A, _T = (FIELDS[f"{name}Proto"] for name in ("Model", "Graph", "Node", "Attribute", "Tensor"))
_INFO, _TYPE, _ENTRY = (FIELDS[name] for name in ("ValueInfoProto", "TypeProto", "StringStringEntryProto"))
_TENSOR_TYPE = FIELDS["TypeProto.Tensor"]
_SEQUENCE, _MAP, _OPTIONAL = (FIELDS[f"TypeProto.{name}"] for name in ("Sequence", "Map", "Optional"))
_SPARSE, _FUNCTION = FIELDS["SparseTensorProto"], FIELDS["FunctionProto"]
_DEEPEST_TYPE = 4
_IN_PACKED = {*TYPES, "STRING"} - {"BFLOAT16"}
"""Elements that packed values are made of."""
_KINDS = {
    "opaque_type": "an opaque value",
    "sparse_tensor_type": "a sparse tensor",
    "sequence_type": "a sequence of these elements",
    "map_type": "a map of these elements",
    "optional_type": "an optional value of these elements",
}
_REMEDY = "export the model without it, or cut the graph there (onnx.utils.extract_model)"
_LOCATION = b"\n\x08location"  # the key of an entry that names a file
_LONGEST_LABELS = 1 << 20
# A quoted text, as Python and JSON write it, and whether it is a key. One that does not end goes up to the end of all:
# so no character is read twice, whatever they are.
_QUOTED = re.compile(r"""(?:'((?:[^'\\]|\\.)*)'?|"((?:[^"\\]|\\.)*)"?)(\s*:)?""", re.DOTALL)
_OPTIONAL_SINCE, _MOST_OPTIONAL = 4, 16
"""The first IR version in which inputs may have a value in the file, and the most that do: an exporter that lists
weights among the inputs lists all of them.
"""


def read_header(data: memoryview) -> Header:
    """Read the header. Raise ImportFailed for a damaged one."""
    wire = ProtoBytes(data)
    model = ProtoMessage(wire)
    graph = model.message(_M["graph"])
    if graph is None:
        raise ImportFailed("not an .onnx file, or damaged: it has no graph")
    names, ranges = set[str](), list[ExternalRange]()
    for tensor in _constants(graph):
        names.add(tensor.text(_T["name"]))
        ranges += _range(tensor)
    functions = (span for function in model.messages(_M["functions"]) for span in function.spans(_FUNCTION["node"]))
    for span in (*graph.spans(_G["node"]), *functions):
        if _LOCATION in bytes(data[slice(*span)]):
            for tensor in tensors(ProtoMessage(wire, *span), "NodeProto"):
                ranges += _range(tensor)
    listed = [(info.text(_INFO["name"]) in names, info) for info in graph.messages(_G["input"])]
    inputs = [_declared(info, "input") for has_value, info in listed if not has_value]
    defaults = [_declared(info, "input") for has_value, info in listed if has_value]
    if model.integer(_M["ir_version"]) >= _OPTIONAL_SINCE and len(defaults) <= _MOST_OPTIONAL:
        inputs += [replace(t, extra={**t.extra, "optional": True}) for t in defaults if t.refusal is None]
    outputs = [_declared(info, "output") for info in graph.messages(_G["output"])]
    if not outputs:
        raise ImportFailed("the graph has no output")
    if labels := _labels(model):
        outputs[0] = replace(outputs[0], extra={**outputs[0].extra, "labels": labels})
    return Header(tuple(inputs), tuple(outputs), tuple(ranges))


def as_first(data: memoryview, name: str) -> NoReturn:
    """Raise ImportFailed: a signature is what .tflite files have."""
    del data
    raise ImportFailed(f"signature={name[:64]!r}: an .onnx file has one entry, without a name", remedy="leave it out")


def _declared(info: ProtoMessage, word: str) -> HeaderTensor:
    """Return an input or an output."""
    name, kind = info.text(_INFO["name"]), info.message(_INFO["type"])
    where = f"{word} {name[:64]!r}"
    tensor = kind.message(_TYPE["tensor_type"]) if kind is not None else None
    number = tensor.integer(_TENSOR_TYPE["elem_type"]) if tensor is not None else 0
    if kind is not None and number not in DTYPES and (word := _word(kind, 0)):
        shape = None if tensor is None else declared_sizes(tensor, where).shape
        return HeaderTensor(name, "packed", shape, extra={"type": word})
    if tensor is None or number not in DTYPES:
        reason, remedy = _refusal(kind, number)
        return HeaderTensor(name, "", None, refusal=Obstacle(None, None, (name,), f"{where} {reason}", remedy=remedy))
    sizes = declared_sizes(tensor, where)
    extra = {"dims": tuple(symbol or None for symbol in sizes.symbols)} if any(sizes.symbols) else {}
    return HeaderTensor(name, DTYPES[number], sizes.shape, extra=extra)


def _word(kind: ProtoMessage | None, depth: int) -> str:
    """Return a type in ONNX's words, as ONNX Runtime writes it; "" for one that is not carried."""
    if kind is None or depth > _DEEPEST_TYPE:
        return ""
    if tensor := kind.message(_TYPE["tensor_type"]):
        element = _element(tensor.integer(_TENSOR_TYPE["elem_type"]))
        return element and f"tensor({element})"
    if table := kind.message(_TYPE["map_type"]):
        key, value = _element(table.integer(_MAP["key_type"])), _word(table.message(_MAP["value_type"]), depth + 1)
        return f"map({key},{value})" if key and value else ""
    for word, field, its in (("seq", "sequence_type", _SEQUENCE), ("optional", "optional_type", _OPTIONAL)):
        if outer := kind.message(_TYPE[field]):
            inner = _word(outer.message(its["elem_type"]), depth + 1)
            return inner and f"{word}({inner})"
    return ""


def _element(number: int) -> str:
    name = type_name(number)
    return name.lower() if name in _IN_PACKED else ""


def _refusal(kind: ProtoMessage | None, number: int) -> tuple[str, str]:
    """Return why a type is not carried, and the remedy. number: of the element type; 0 where there is none."""
    found = [text for field, text in _KINDS.items() if kind is not None and kind.has(_TYPE[field])]
    if found:
        return f"is {found[0]}, and the file form carries none", _REMEDY
    if not number:
        return "has no type in the file", "add it with onnx.shape_inference.infer_shapes(model)"
    return f"has elements of {type_name(number)}, which numpy has not, nor the file form", _REMEDY


# ---- weights in other files


def _constants(graph: ProtoMessage) -> Iterator[ProtoMessage]:
    """Yield the initializers of a graph; of sparse ones the values, which carry the name, and the indices."""
    yield from graph.messages(_G["initializer"])
    for sparse in graph.messages(_G["sparse_initializer"]):
        yield from tensors(sparse, "SparseTensorProto")


def _range(tensor: ProtoMessage) -> Iterator[ExternalRange]:
    if tensor.integer(_T["data_location"]) == 1:
        yield external_range(tensor)


# ---- labels


def _labels(model: ProtoMessage) -> list[str]:
    """Return the names of classes, where the exporter left them: `names` of ultralytics, {0: 'person', 1:
    'bicycle'}.
    """
    for entry in model.messages(_M["metadata_props"]):
        if entry.text(_ENTRY["key"]) in ("names", "labels", "classes"):
            text = entry.text(_ENTRY["value"])[:_LONGEST_LABELS]
            found = [single or double for single, double, is_key in _QUOTED.findall(text) if not is_key]
            return [re.sub(r"\\(.)", r"\1", label) for label in found]
    return []
