"""Mutations that know how a packet, or a message, is built, so that what they make is refused late or not at all.

Most packets have their counts mended after the edits: with one element too many a packet is refused by its first check,
and the decoder never sees that element.
"""

import random
import struct

import msgpack
from wire_packets import BAD_ELEMENTS, EDGES, GOLDEN

from burst.datum import DATUM

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_EDGES_64 = [0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
_MOST_ELEMENTS = 40
# By kind: discriminators of an operand and of its dimensions, and where an operand counts its dimensions.
_OPERANDS = {"request": ({1, 3}, {2, 4}, 20), "result": ({1}, {2}, 12)}
# By kind: in the first element, where the number of elements with one of these discriminators stands.
_COUNTS = {"request": {8: {1}, 12: {3}, 16: {5, 7}}, "result": {16: {1}}}


class PacketMutator:
    """Adds, removes, replaces, duplicates and swaps elements, and lies in their numbers."""

    def __init__(self, direction, seed):
        self._random = random.Random(seed).random
        self._kind, self._size_at = direction.kind, direction.size_at
        golden = [element for one in GOLDEN if one.direction.kind == direction.kind for element in one.elements]
        self._dictionary = sorted({*golden, *BAD_ELEMENTS[direction.kind]})
        self._edits = [
            *(self._remove, self._insert, self._duplicate, self._replace, self._swap),
            *(self._lie, self._lie_long, self._flip, self._cut),
        ]

    def __call__(self, data):
        """One to three edits, in three of four cases mended, and then sometimes one lie, which is the only one."""
        elements = [data[at : at + DATUM] for at in range(0, len(data), DATUM)] or [bytes(DATUM)]
        for _ in range(1 + self._pick(3)):
            self._edits[self._pick(len(self._edits))](elements, self._pick(len(elements)))
        del elements[_MOST_ELEMENTS:]
        if self._random() < 0.75:
            self.mend(elements)
            if self._random() < 0.15:
                self._lie(elements, self._pick(len(elements)))
        return b"".join(elements)

    def mend(self, elements):
        """Makes all counts right."""
        operands, dimensions, rank_at = _OPERANDS[self._kind]
        counts, rank = dict.fromkeys(_COUNTS[self._kind], 0), 0
        for at in range(len(elements) - 1, 0, -1):
            number = elements[at][0]
            for offset, numbers in _COUNTS[self._kind].items():
                counts[offset] += number in numbers
            if number in operands:
                elements[at] = _with(elements[at], rank_at, _U32.pack(rank))
            rank = rank + 1 if number in dimensions else 0
        for offset, count in {self._size_at: len(elements), **counts}.items():
            elements[0] = _with(elements[0], offset, _U32.pack(count))

    def _pick(self, n):
        return int(self._random() * n)

    def _known(self):
        return self._dictionary[self._pick(len(self._dictionary))]

    def _remove(self, elements, at):
        if len(elements) > 1:
            del elements[at]

    def _insert(self, elements, at):
        elements.insert(at + 1, self._known())

    def _duplicate(self, elements, at):
        elements[at:at] = [elements[at]] * (1 + self._pick(4))

    def _replace(self, elements, at):
        elements[at] = self._known()

    def _swap(self, elements, at):
        other = self._pick(len(elements))
        elements[at], elements[other] = elements[other], elements[at]

    def _lie(self, elements, at):
        value = EDGES[self._pick(len(EDGES))] if self._random() < 0.7 else self._pick(12)
        elements[at] = _with(elements[at], 4 * self._pick(6), _U32.pack(value))

    def _lie_long(self, elements, at):
        elements[at] = _with(elements[at], 8 + 8 * self._pick(2), _U64.pack(_EDGES_64[self._pick(len(_EDGES_64))]))

    def _flip(self, elements, at):
        element = bytearray(elements[at])
        element[self._pick(len(element))] ^= 1 << self._pick(8)
        elements[at] = bytes(element)

    def _cut(self, elements, at):
        if self._random() < 0.1:  # most of what is cut is refused at once
            elements[at] = elements[at][: 1 + self._pick(DATUM)]


def _with(element, offset, data):
    return (element[:offset] + data + element[offset + len(data) :])[:DATUM] if len(element) == DATUM else element


_LEAVES = [None, True, False, 0, 1, 2, -1, 64, 4096, 8192, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63)]
_LEAVES += [0.0, 2.0, "", "'<u4'", b"", b"'<u4'", [], {}, [0, 0, 4096], [0, 4096, 64], [64, True], "\0", "\ud7ff"]
_LETTERS = "'\"()[]{},<>|=u8fiVMSUObaO0-9999 \\x\n"


class MessageMutator:
    """Edits the values that a message holds; bytes that are no message are left to others."""

    def __init__(self, seed):
        self._rng = random.Random(seed)

    def __call__(self, data):
        """One to three edits."""
        try:
            body = msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, msgpack.UnpackException, TypeError):
            return self._damaged(data)
        for _ in range(self._rng.randint(1, 3)):
            body = self._edited(body)
        try:
            packed = msgpack.packb(body)
        except (ValueError, OverflowError):  # a surrogate, or nested too deeply
            return data
        return self._damaged(packed) if self._rng.random() < 0.1 else packed

    def _damaged(self, data):
        at = self._rng.randrange(len(data) + 1)
        return data[:at] + self._rng.randbytes(self._rng.randint(0, 2)) + data[at + self._rng.randint(0, 2) :]

    def _edited(self, value):
        """The value with one place in it changed: the deeper, the likelier."""
        rng = self._rng
        if isinstance(value, list) and value and rng.random() < 0.8:
            at = rng.randrange(len(value))
            return [*value[:at], self._edited(value[at]), *value[at + 1 :]]
        if isinstance(value, list) and rng.random() < 0.7:
            at = rng.randint(0, len(value))
            return rng.choice([value[:at], value * 2, [*value[:at], rng.choice(_LEAVES), *value[at:]], [value]])
        if isinstance(value, str) and rng.random() < 0.8:
            at, letters = rng.randint(0, len(value)), "".join(rng.choices(_LETTERS, k=rng.randint(0, 3)))
            return value[:at] + letters + value[at + rng.randint(0, 3) :]
        if isinstance(value, int) and rng.random() < 0.5:
            return value + rng.choice([-1, 1, -64, 64, 4096])
        return rng.choice([*_LEAVES, [value], {"a": value}])
