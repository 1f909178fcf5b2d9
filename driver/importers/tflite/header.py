"""The header of a .tflite file: inputs and outputs of its first subgraph, their names, quantisation and labels.

The tables are read here without the generated accessors of the package `tflite`, whose import takes
longer than loading a file of any usual size; so this needs no package.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Any

from driver.errors import ImportFailed
from driver.formats.file_bytes import FileBytes
from driver.formats.flatbuffer import U8, U32, FlatTable, root
from driver.formats.tflite_schema import DTYPES, FIELDS, IDENTIFIER, TYPE_NAMES, VERSION
from driver.importers.header import HIGHEST_RANK, Header, HeaderTensor
from driver.importers.obstacle import Obstacle
from driver.nn.errors import did_you_mean

_MODEL, _SUBGRAPH, _TENSOR, _QUANTISATION, _SIGNATURE, _NAMED, _METADATA, _BUFFER = (
    FIELDS[name]
    for name in (
        *("Model", "SubGraph", "Tensor", "QuantizationParameters"),
        *("SignatureDef", "TensorMap", "Metadata", "Buffer"),
    )
)
_SHOWN = 64
"""Characters of a name that an error message shows."""
_MOST_TENSORS = 1 << 12
"""Limit for inputs, and for outputs."""
_REMEDY = "export the model with a function around it that has only tensors of those"


def read_header(data: memoryview) -> Header:
    """Read the header. Raise ImportFailed for a damaged one."""
    if bytes(data[4:8]) != IDENTIFIER:
        raise ImportFailed("not a .tflite file: bytes 4 to 7 are not TFL3")
    wire = FileBytes(data)
    model = root(wire)
    if (version := model.number(_MODEL["version"], U32)) != VERSION:
        raise ImportFailed(f"schema version {version}; only {VERSION} is supported")
    main = model.tables(_MODEL["subgraphs"])[0]
    tensors, labels = main.tables(_SUBGRAPH["tensors"]), _Labels(wire, model)
    found: dict[str, tuple[HeaderTensor, ...]] = {}
    for word in ("input", "output"):
        listed = main.array(_SUBGRAPH[f"{word}s"], "<i4")
        if listed.size > _MOST_TENSORS:
            raise ImportFailed(f"{listed.size} {word}s; the limit is {_MOST_TENSORS}")
        names = _signature(model, f"{word}s")
        found[word] = tuple(
            _declared(tensors[index], f"{word} {place}", names.get(index), labels.of(f"{word}s", place))
            for place, index in enumerate(listed.tolist())
        )
    if not found["output"]:
        raise ImportFailed("its first subgraph has no output")
    known = _signatures(model)
    own = next((name for name, number in known if number == 0), None)
    others = [name for name, _ in known if name != own]
    return Header(found["input"], found["output"], (), (*([] if own is None else [own]), *others), signature=own)


def _signatures(model: FlatTable) -> list[tuple[str, int]]:
    """Return the names and subgraphs of all signatures, in the file's order."""
    key, number = _SIGNATURE["signature_key"], _SIGNATURE["subgraph_index"]
    return [(each.text(key), each.number(number, U32)) for each in model.tables(_MODEL["signature_defs"])]


def as_first(data: memoryview, name: str) -> list[tuple[int, bytes]]:
    """Return what to write where, to make that signature the first one, and of the first subgraph. Raise ImportFailed.

    It changes places with the first one. Its subgraph takes the first place of the subgraphs, beside its own: branches
    and loops go on finding theirs by their numbers.
    """
    wire = FileBytes(data)
    model = root(wire)
    known = [key for key, _ in _signatures(model)]
    if name not in known:
        remedy = f"choose from {', '.join(known)}{did_you_mean(name, known)}" if known else "it has none: leave it out"
        raise ImportFailed(f"there is no signature {name[:_SHOWN]!r}", remedy=remedy)
    signatures, subgraphs = model.tables(_MODEL["signature_defs"]), model.tables(_MODEL["subgraphs"])
    place, chosen = known.index(name), signatures[known.index(name)]
    number = chosen.number(_SIGNATURE["subgraph_index"], U32)
    (first, was), (own, target) = signatures.entry(0), signatures.entry(place)
    at, graph = subgraphs.entry(0)[0], subgraphs.entry(number)[1]
    moves = [(first, target), (own, was), (at, graph)]
    changes = [(entry, U32.pack(end - entry)) for entry, end in moves if end > entry]  # tables lie behind their lists
    if number:
        changes.append((chosen.place(_SIGNATURE["subgraph_index"]), U32.pack(0)))
    return changes


def _signature(model: FlatTable, word: str) -> dict[int, str]:
    """Return the names in the first signature of the first subgraph, by tensor."""
    for signature in model.tables(_MODEL["signature_defs"]):
        if signature.number(_SIGNATURE["subgraph_index"], U32) == 0:
            entries = signature.tables(_SIGNATURE[word])
            return {e.number(_NAMED["tensor_index"], U32): e.text(_NAMED["name"]) for e in entries}
    return {}


def _declared(tensor: FlatTable, where: str, name: str | None, labels: list[str]) -> HeaderTensor:
    own, number = tensor.text(_TENSOR["name"]), tensor.number(_TENSOR["type"], U8)
    where = f"{where} ({(name or own)[:64]!r})"
    if number not in DTYPES:
        named = TYPE_NAMES[number] if number < len(TYPE_NAMES) else f"type {number} of the schema"
        reason = f"{where} has elements of {named}, which the file form does not carry"
        return HeaderTensor(name or own, "", None, refusal=Obstacle(None, None, (name or own,), reason, remedy=_REMEDY))
    shape = tensor.array(_TENSOR["shape"], "<i4")
    signature = tensor.array(_TENSOR["shape_signature"], "<i4")
    dims = [max(size, 0) for size in (signature if signature.size else shape)[: HIGHEST_RANK + 1].tolist()]
    if len(dims) > HIGHEST_RANK:
        raise ImportFailed(f"{where} has more than {HIGHEST_RANK} dimensions")
    is_ranked = bool(dims) or where.startswith("input") or bool(tensor.number(_TENSOR["has_rank"], U8))
    extra: dict[str, Any] = {"tensor": own} if name is not None else {}
    if labels:
        extra["labels"] = labels
    scale, zero_point = _quantisation(tensor)
    return HeaderTensor(
        name or own, DTYPES[number], tuple(dims) if is_ranked else None, scale, zero_point=zero_point, extra=extra
    )


def _quantisation(tensor: FlatTable) -> tuple[float, int]:
    """Scale and zero point of all elements; (0, 0) where there are none, or several."""
    table = tensor.table(_TENSOR["quantization"])
    if table is None:
        return 0.0, 0
    scales, zeros = table.array(_QUANTISATION["scale"], "<f4"), table.array(_QUANTISATION["zero_point"], "<i8")
    if scales.size != 1 or zeros.size > 1:
        return 0.0, 0
    return float(scales[0]), int(zeros[0]) if zeros.size else 0


# ---- labels ----------------------------------------------------------------------------------------------------------
# TFLite's metadata is a flatbuffer in a buffer of the model. The files that it names are in a zip archive at the end.

METADATA_FIELDS: dict[str, dict[str, int]] = {
    "ModelMetadata": {"subgraph_metadata": 3},
    "SubGraphMetadata": {"inputs": 2, "outputs": 3},
    "TensorMetadata": {"associated_files": 6},
    "AssociatedFile": {"name": 0, "type": 2},
}
_MODEL_DATA, _SUBGRAPH_DATA, _TENSOR_DATA, _FILE = METADATA_FIELDS.values()
_METADATA_NAME, _METADATA_IDENTIFIER = "TFLITE_METADATA", b"M001"
_LABEL_FILES = (2, 3)  # TENSOR_AXIS_LABELS, TENSOR_VALUE_LABELS
_MOST_LABEL_BYTES, _MOST_FILES = 1 << 20, 64
_DIRECTORY_END, _DIRECTORY_ENTRY, _LOCAL_FILE = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_END = struct.Struct("<4s4HIIH")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_LONGEST_COMMENT = 1 << 16


class _Labels:
    """Labels of inputs and outputs. Metadata that is damaged is ignored: runtimes do not read it."""

    def __init__(self, wire: FileBytes, model: FlatTable) -> None:
        self._wire, self._read, self._left = wire, dict[str, list[str]](), _MOST_LABEL_BYTES
        try:
            self._main = self._metadata(model)
            self._files = dict(_zipped(wire)) if self._main is not None else {}
        except ImportFailed:
            self._main, self._files = None, {}

    def _metadata(self, model: FlatTable) -> FlatTable | None:
        for entry in model.tables(_MODEL["metadata"]):
            if entry.text(_METADATA["name"]) == _METADATA_NAME:
                buffer = model.tables(_MODEL["buffers"])[entry.number(_METADATA["buffer"], U32)]
                data = buffer.array(_BUFFER["data"], "u1")
                if data[4:8].tobytes() != _METADATA_IDENTIFIER:
                    return None
                graphs = root(FileBytes(data.data)).tables(_MODEL_DATA["subgraph_metadata"])
                return graphs[0] if len(graphs) else None
        return None

    def of(self, word: str, place: int) -> list[str]:
        """Return the labels of an input or output; empty when it has none."""
        if self._main is None or not self._files:
            return []
        try:
            tensors = self._main.tables(_SUBGRAPH_DATA[word])
            for file in tensors[place].tables(_TENSOR_DATA["associated_files"]) if place < len(tensors) else ():
                name = file.text(_FILE["name"])
                if file.number(_FILE["type"], U8) in _LABEL_FILES and name in self._files:
                    if name not in self._read:
                        self._read[name] = self._lines(*self._files[name])
                    return self._read[name]
        except (ImportFailed, zlib.error):
            pass
        return []

    def _lines(self, start: int, packed: int, method: int) -> list[str]:
        signature, *_, name, more = _LOCAL.unpack(self._wire.part(start, _LOCAL.size).data)
        if signature != _LOCAL_FILE:
            return []
        data = self._wire.part(start + _LOCAL.size + name + more, min(packed, self._left)).tobytes()
        if method and self._left:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, self._left)
        self._left -= len(data)
        return data.decode("utf-8", "replace").splitlines()


def _zipped(wire: FileBytes) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the files of the archive at the end: name, and (start, packed bytes, method: 0 stored or 8 deflated)."""
    size = len(wire.data)
    tail = bytes(wire.data[max(0, size - _END.size - _LONGEST_COMMENT) :])
    at = tail.rfind(_DIRECTORY_END)
    if at < 0 or len(tail) - at < _END.size:
        return
    _, _, _, _, count, nbytes, offset, _ = _END.unpack_from(tail, at)
    start = size - len(tail) + at - nbytes
    before = start - offset  # bytes of the model, where offsets count from the archive's own beginning
    for _ in range(min(count, _MOST_FILES)):
        entry = _ENTRY.unpack(wire.part(start, _ENTRY.size).data)
        signature, method, packed, (name, more, comment), local = entry[0], entry[4], entry[8], entry[10:13], entry[16]
        if signature != _DIRECTORY_ENTRY:
            return
        if method in (0, 8):
            words = wire.part(start + _ENTRY.size, name).tobytes().decode("utf-8", "replace")
            yield words, (before + local, packed, method)
        start += _ENTRY.size + name + more + comment
