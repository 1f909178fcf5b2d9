"""Protocol buffers: an untrusted message is read without unpacking it, and a new one is written.

The wire format is a sequence of fields: a number and a type, then an integer, four or eight bytes, or a counted run of
bytes. A `ProtoMessage` is one such sequence, scanned once. The content of a field is read on demand, so weights stay
where they are. Every length is checked against the message around it. The number of fields is limited, because a field
of two bytes in the file can take a hundred in memory.

    graph = ProtoMessage(ProtoBytes(data)).message(7)
    for node in graph.messages(1):
        inputs = node.texts(1)
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from driver.formats.file_bytes import Array, DamagedFile, FileBytes

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_SIZES = {_EIGHT: 8, _FOUR: 4}
_LONGEST_VARINT = 10
_HIGHEST_TAG = 2**32 - 1
_MOST_FIELDS = 1 << 19
_F32 = struct.Struct("<f")
Span = tuple[int, int]


class Field(NamedTuple):
    """A field where it lies in the file."""

    number: int
    kind: int
    tag: int  #: where it begins
    start: int  #: where its content begins
    end: int
    value: int  #: of an integer


class ProtoBytes(FileBytes):
    """The bytes of the file, and a budget of fields."""

    def __init__(self, data: memoryview, subject: str = "", most_fields: int = _MOST_FIELDS) -> None:
        super().__init__(data, subject)
        self._most = self._left = most_fields

    def fields(self, at: int, end: int) -> Iterator[Field]:
        """Scan the message from `at` to `end`."""
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise DamagedFile(f"{self._subject}damaged, or too large: it has more than {self._most} fields")
            begin = at
            tag, start = self.varint(at, end)
            if tag > _HIGHEST_TAG:  # other readers drop the upper bits: a field that they see would be hidden from us
                raise self.damaged(f"the field at {begin} has a number of more than 29 bits")
            kind, value = tag & 7, 0
            if kind == _VARINT:
                value, at = self.varint(start, end)
            elif kind == _BYTES:
                length, start = self.varint(start, end)
                at = start + length
            elif kind in _SIZES:
                at = start + _SIZES[kind]
            else:
                raise self.damaged(f"field of unknown type {kind} at {start}")
            if at > end:
                raise self.damaged(f"{at - start} bytes at {start} lie outside of their message")
            yield Field(tag >> 3, kind, begin, start, end=at, value=value)

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Read the unsigned integer at `at`; return it and the position behind it."""
        if at < end and (byte := self.data[at]) < 0x80:  # most are short
            return byte, at + 1
        value = 0
        for shift in range(min(end - at, _LONGEST_VARINT)):
            byte = self.data[at + shift]
            value |= (byte & 0x7F) << 7 * shift
            if byte < 0x80:
                return value & (2**64 - 1), at + shift + 1
        raise self.damaged(f"the integer at {at} has no end")


class ProtoMessage:
    """One message: the bytes from `start` to `end`."""

    __slots__ = ("_fields", "wire")

    def __init__(self, wire: ProtoBytes, start: int = 0, end: int | None = None) -> None:
        self.wire = wire
        self._fields: dict[int, list[Field]] = {}
        for field in wire.fields(start, len(wire.data) if end is None else end):
            self._fields.setdefault(field.number, []).append(field)

    def _of(self, number: int, *kinds: int) -> list[Field]:
        found = self._fields.get(number, [])
        for field in found:
            if field.kind not in kinds:
                raise self.wire.damaged(f"field {number} has type {field.kind}")
        return found

    def has(self, number: int) -> bool:
        """Return True if the message has field `number`."""
        return number in self._fields

    def spans(self, number: int) -> list[Span]:
        """Start and end of the bytes of each field `number`."""
        return [(field.start, field.end) for field in self._of(number, _BYTES)]

    def texts(self, number: int) -> list[str]:
        """Return each field `number` as a string."""
        return [self._text(span) for span in self.spans(number)]

    def text(self, number: int) -> str:
        """Return the last field `number` as a string; empty when absent."""
        spans = self.spans(number)
        return self._text(spans[-1]) if spans else ""

    def _text(self, span: Span) -> str:
        self.wire.reads.charge(span[1] - span[0])
        return bytes(self.wire.data[slice(*span)]).decode("utf-8", "replace")

    def messages(self, number: int) -> Iterator[ProtoMessage]:
        """Return each field `number` as a message."""
        return (ProtoMessage(self.wire, *span) for span in self.spans(number))

    def message(self, number: int) -> ProtoMessage | None:
        """Return the last field `number` as a message; None when absent."""
        spans = self.spans(number)
        return ProtoMessage(self.wire, *spans[-1]) if spans else None

    def integer(self, number: int, default: int = 0) -> int:
        """Return the last field `number` as a signed integer."""
        found = self._of(number, _VARINT)
        return _signed(found[-1].value) if found else default

    def real(self, number: int) -> float:
        """Return the last field `number` as a float32."""
        found = self._of(number, _FOUR)
        return float(self.wire.unpack(_F32, found[-1].start)) if found else 0.0

    def integers(self, number: int) -> Array:
        """Return all fields `number` as integers, whether single or packed."""
        found = self._of(number, _VARINT, _BYTES)
        if all(field.kind == _VARINT for field in found):
            return np.array([_signed(field.value) for field in found], np.int64)
        parts = [self._some(field) for field in found]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def reals(self, number: int, dtype: str = "<f4") -> Array:
        """Return all fields `number` as floats of 32 or 64 bits."""
        kind, size = (_FOUR if dtype == "<f4" else _EIGHT), np.dtype(dtype).itemsize
        parts = []
        for field in self._of(number, kind, _BYTES):
            start, nbytes = field.start, field.end - field.start
            if nbytes % size:
                raise self.wire.damaged(f"{nbytes} bytes at {start} do not hold whole numbers of {size} bytes")
            parts.append(self.wire.part(start, nbytes).view(dtype))
        return np.concatenate(parts) if len(parts) > 1 else (parts or [np.zeros(0, dtype)])[0]

    def _some(self, field: Field) -> Array:
        """Decode one integer, or a run of packed ones (one to ten bytes each), vectorised."""
        if field.kind == _VARINT:
            return np.array([_signed(field.value)], np.int64)
        start = field.start
        data = self.wire.part(start, field.end - start)
        self.wire.makes.charge(data.size)
        stops = np.flatnonzero(data < 0x80) + 1
        if (stops[-1] if stops.size else 0) != data.size:
            raise self.wire.damaged(f"the last integer at {start} has no end")
        starts = np.concatenate(([0], stops[:-1])) if stops.size else stops
        lengths, values = stops - starts, np.zeros(stops.size, np.uint64)
        if lengths.size and lengths.max() > _LONGEST_VARINT:
            raise self.wire.damaged(f"an integer at {start} has no end")
        for place in range(int(lengths.max(initial=0))):
            reaching = np.flatnonzero(lengths > place)
            values[reaching] |= (data[starts[reaching] + place] & np.uint64(0x7F)) << np.uint64(7 * place)
        return values.view(np.int64)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


class ProtoWriter:
    """Fields in the order in which they were added."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self.nbytes = 0

    def integer(self, field: int, value: int) -> ProtoWriter:
        """Append a number of up to 64 bits."""
        return self._add(_encoded(field << 3) + _encoded(value))

    def real(self, field: int, value: float) -> ProtoWriter:
        """Append a float32."""
        return self._add(_encoded(field << 3 | 5) + struct.pack("<f", value))

    def text(self, field: int, value: str) -> ProtoWriter:
        """Append a string."""
        return self.data(field, value.encode())

    def data(self, field: int, value: bytes) -> ProtoWriter:
        """Add bytes."""
        return self._add(_encoded(field << 3 | 2) + _encoded(len(value)))._add(value)

    def message(self, field: int, value: ProtoWriter) -> ProtoWriter:
        """Append a message within."""
        return self._add(_encoded(field << 3 | 2) + _encoded(value.nbytes)).fields(value)

    def fields(self, of: ProtoWriter) -> ProtoWriter:
        """Add those of another message."""
        self._chunks += of._chunks
        self.nbytes += of.nbytes
        return self

    def encoded(self, fields: bytes) -> ProtoWriter:
        """Add the fields of another message, as they are there."""
        return self._add(fields)

    def _add(self, chunk: bytes) -> ProtoWriter:
        self._chunks.append(chunk)
        self.nbytes += len(chunk)
        return self

    def joined(self) -> bytes:
        """Return all of it."""
        return b"".join(self._chunks)


def _encoded(value: int) -> bytes:
    value &= 2**64 - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
