"""Read untrusted protocol buffers without unpacking them.

The wire format is a sequence of fields: a number and a type, then an integer, four or eight bytes, or a counted run of
bytes. A `ProtoMessage` is one such sequence, scanned once. The content of a field is read on demand, so weights stay
where they are. Every length is checked against the message around it. The number of fields is limited, because a field
of two bytes in the file can take a hundred in memory.

    graph = ProtoMessage(ProtoBytes(data), 0, len(data)).message(7)
    for node in graph.messages(1):
        inputs = node.texts(1)
"""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from driver.errors import ImportFailed
from driver.importers.file_bytes import Array, FileBytes

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_LONGEST_VARINT = 10
_MOST_FIELDS = 1 << 19
_F32 = struct.Struct("<f")
Span = tuple[int, int]


class ProtoBytes(FileBytes):
    """The bytes of the file, and a budget of fields."""

    def __init__(self, data: memoryview) -> None:
        super().__init__(data)
        self._fields = _MOST_FIELDS

    def count(self) -> None:
        """Charge one field to the budget."""
        self._fields -= 1
        if self._fields < 0:
            raise ImportFailed(f"damaged, or too large: it has more than {_MOST_FIELDS} fields")

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Read the unsigned integer at `at`; returns it and the position behind it."""
        value = 0
        for shift in range(min(end - at, _LONGEST_VARINT)):
            byte = self.data[at + shift]
            value |= (byte & 0x7F) << 7 * shift
            if byte < 0x80:
                return value & (2**64 - 1), at + shift + 1
        raise ImportFailed(f"damaged: the integer at {at} has no end")


class ProtoMessage:
    """One message: the bytes from `start` to `end`."""

    __slots__ = ("_fields", "wire")

    def __init__(self, wire: ProtoBytes, start: int = 0, end: int | None = None) -> None:
        self.wire = wire
        self._fields: dict[int, list[tuple[int, Any]]] = {}
        at, end = start, len(wire.data) if end is None else end
        while at < end:
            wire.count()
            tag, at = wire.varint(at, end)
            value, at = self._value(tag & 7, at, end)
            self._fields.setdefault(tag >> 3, []).append((tag & 7, value))

    def _value(self, kind: int, at: int, end: int) -> tuple[Any, int]:
        if kind == _VARINT:
            return self.wire.varint(at, end)
        if kind == _BYTES:
            length, at = self.wire.varint(at, end)
        elif kind in (_FOUR, _EIGHT):
            length = 4 if kind == _FOUR else 8
        else:
            raise ImportFailed(f"damaged: field of unknown type {kind} at {at}")
        if at + length > end:
            raise ImportFailed(f"damaged: {length} bytes at {at} lie outside of their message")
        return (at, at + length), at + length

    def _of(self, number: int, *kinds: int) -> Iterator[tuple[int, Any]]:
        for kind, value in self._fields.get(number, ()):
            if kind not in kinds:
                raise ImportFailed(f"damaged: field {number} has type {kind}")
            yield kind, value

    def has(self, number: int) -> bool:
        """Whether the message has field `number`."""
        return number in self._fields

    def spans(self, number: int) -> list[Span]:
        """Start and end of the bytes of each field `number`."""
        return [value for _, value in self._of(number, _BYTES)]

    def texts(self, number: int) -> list[str]:
        """Each field `number` as a string."""
        return [self._text(span) for span in self.spans(number)]

    def text(self, number: int) -> str:
        """The last field `number` as a string; empty when absent."""
        spans = self.spans(number)
        return self._text(spans[-1]) if spans else ""

    def _text(self, span: Span) -> str:
        self.wire.reads.charge(span[1] - span[0])
        return bytes(self.wire.data[slice(*span)]).decode("utf-8", "replace")

    def messages(self, number: int) -> Iterator["ProtoMessage"]:
        """Each field `number` as a message."""
        return (ProtoMessage(self.wire, *span) for span in self.spans(number))

    def message(self, number: int) -> "ProtoMessage | None":
        """The last field `number` as a message; None when absent."""
        spans = self.spans(number)
        return ProtoMessage(self.wire, *spans[-1]) if spans else None

    def integer(self, number: int, default: int = 0) -> int:
        """The last field `number` as a signed integer."""
        values = [value for _, value in self._of(number, _VARINT)]
        return _signed(values[-1]) if values else default

    def real(self, number: int) -> float:
        """The last field `number` as a float32."""
        spans = [value for _, value in self._of(number, _FOUR)]
        return float(_F32.unpack(self.wire.data[slice(*spans[-1])])[0]) if spans else 0.0

    def integers(self, number: int) -> Array:
        """All fields `number` as integers, whether single or packed."""
        parts: list[Array] = []
        for kind, value in self._of(number, _VARINT, _BYTES):
            parts.append(np.array([_signed(value)], np.int64) if kind == _VARINT else self._packed(value))
        return np.concatenate(parts) if len(parts) > 1 else (parts or [np.zeros(0, np.int64)])[0]

    def reals(self, number: int, dtype: str = "<f4") -> Array:
        """All fields `number` as floats of 32 or 64 bits."""
        kind, size = (_FOUR if dtype == "<f4" else _EIGHT), np.dtype(dtype).itemsize
        parts = []
        for _, (start, end) in self._of(number, kind, _BYTES):
            if (end - start) % size:
                raise ImportFailed(f"damaged: {end - start} bytes at {start} do not hold whole numbers of {size} bytes")
            parts.append(self.wire.part(start, end - start).view(dtype))
        return np.concatenate(parts) if len(parts) > 1 else (parts or [np.zeros(0, dtype)])[0]

    def _packed(self, span: Span) -> Array:
        """Decode a run of packed varints (one to ten bytes each), vectorised."""
        data = self.wire.part(span[0], span[1] - span[0])
        self.wire.makes.charge(data.size)
        stops = np.flatnonzero(data < 0x80) + 1
        if (stops[-1] if stops.size else 0) != data.size:
            raise ImportFailed(f"damaged: the last integer at {span[0]} has no end")
        starts = np.concatenate(([0], stops[:-1])) if stops.size else stops
        lengths, values = stops - starts, np.zeros(stops.size, np.uint64)
        if lengths.size and lengths.max() > _LONGEST_VARINT:
            raise ImportFailed(f"damaged: an integer at {span[0]} has no end")
        for place in range(int(lengths.max(initial=0))):
            reaching = np.flatnonzero(lengths > place)
            values[reaching] |= (data[starts[reaching] + place] & np.uint64(0x7F)) << np.uint64(7 * place)
        return values.view(np.int64)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
