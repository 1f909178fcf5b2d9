"""Texts, sequences and maps as bytes, and bytes that a hostile process has written."""

import random

import numpy as np
import pytest

from driver.protocol.packed_values import most_bytes, pack, room_for, unpack

NUMBERS = [np.dtype(f"<{kind}") for kind in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")]
VALUES = [
    None,
    [],
    {},
    np.array(["", "a", "é😀", "with\0zero", "x" * 5000], object),
    np.array("alone", object),
    np.empty((2, 0, 3), object),
    np.array([[True], [False]]),
    *(np.array([[0, 1], [2, 3]], dtype) for dtype in NUMBERS),
    [np.arange(3.0), np.array(["x"], object), [None]],
    {"a": 0.5, "": -1.0},
    {3: "x", -4: "y"},
    [{1: 2}, {1: 3}],
]


def memory(data):
    return np.frombuffer(data, np.uint8)


def same(a, b):
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tolist()) == (b.dtype, b.shape, b.tolist())
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_a_value_comes_back(value):
    """With its types, shapes and bits, whatever follows it in memory; its size was foretold."""
    data = pack(value)
    assert same(unpack(memory(data + b"\xff" * 9)), value)
    assert len(data) % 8 == 0
    assert len(data) <= most_bytes(value) <= room_for(most_bytes(value))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1, "a"], object), "1 is no text"),
        ({"a": 1, 2: 3}, "keys of a map"),
        ({"a": [1]}, "keys of a map"),
        ({2**70: 1}, "64 bits"),
        (object(), "object is no text, array, list or dict"),
        (np.array(["\ud800"], object), "surrogates"),
        (np.zeros(2, complex), "ndarray is no text"),
    ],
)
def test_what_is_no_value(value, words):
    """The error says what it is."""
    with pytest.raises(ValueError, match=words):
        pack(value)


def head(kind, *shape):
    return np.array([kind, len(shape)], "<u4").tobytes() + np.array(shape, "<u8").tobytes()


def whole(value):
    return len(value).to_bytes(8, "little") + value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bytes(64), "holds no value: none was given"),
        (b"\1\0\0", "says that it has 1 bytes"),
        (whole(b"\0" * 8)[:-1], "says that it has 8 bytes, in a memory of 15"),
        (whole(head(0)), "kind 0"),
        (whole(head(99, 1)), "kind 99"),
        (whole(head(4, *[1] * 40)), "rank 40"),
        (whole(head(1) + bytes(8)), "8 bytes behind its value"),
        (whole(head(1)[:4]), "ends within a value"),
        (whole(head(2, 2**62)), "ends within a value"),
        (whole(head(4, 2**40)), "ends within a value"),
        (whole(head(4, 2**62, 2**62) + bytes(64)), "ends within a value"),
        (whole(head(26, 2**60)), "ends within a value"),
        (whole(head(4, 1) + (100).to_bytes(4, "little") + b"abc\0"), "ends within a value"),
        (whole(head(4, 1) + (2).to_bytes(4, "little") + b"\xff\xfe\0\0"), "utf-8"),
        (whole(head(3, 2) + head(1) + head(1)), "without 2 keys and values"),
        (whole(head(2, 1) * 20), "in more than 8 others"),
    ],
)
def test_bytes_that_hold_no_value(data, words):
    """Every length is checked before it is used, and nothing is made that the bytes could not fill."""
    with pytest.raises(ValueError, match=words):
        unpack(memory(data))


def test_damaged_bytes_are_refused_or_are_another_value():
    """Nothing but ValueError comes of any change."""
    data, chance = pack([{"a": 1.0}, np.array(["a", "é😀", ""], object), np.ones((2, 2), np.float16)]), random.Random(7)
    refused = 0
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            unpack(memory(bytes(changed)))
        except ValueError:
            refused += 1
    assert refused > 1000
