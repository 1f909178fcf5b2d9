"""Values that are no tensors of numbers, as bytes: texts, sequences, maps, and what may be absent.

An input or output of type PACKED (`driver.nn.file_form`) is a tensor of bytes, of one open dimension, to all that moves
requests: so its size is open as that of any such tensor, and grows in the same way. These bytes hold one value and say
themselves where it ends; what follows is room. All numbers are little-endian.

    packed     u64 bytes of the value (0: none was given), value
    value      u32 kind, u32 rank, u64 sizes[rank], contents, zeros up to a multiple of 8 bytes
    kind       contents
    1 absent   none; rank 0
    2 sequence its values, one after the other; rank 1
    3 map      two values: its keys and what they map to, each a tensor of that many elements; rank 1
    4 texts    u32 lengths in bytes[elements], and the bytes: UTF-8
    16 and up  the elements of a tensor of numbers, in C order: bool, int8, int16, int32, int64, uint8, uint16, uint32,
               uint64, float16, float32, float64

In Python a value is None, a list, a dict, an array of str objects, or an array of numbers: what ONNX Runtime's own
`run` takes and gives. Bytes of another process are copied before `unpack` looks at them.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ABSENT, _SEQUENCE, _MAP, _TEXTS, _NUMBERS = 1, 2, 3, 4, 16
_DTYPES = [np.dtype("bool")] + [
    np.dtype(f"<{letter}{size}") for letter, sizes in (("i", (1, 2, 4, 8)), ("u", (1, 2, 4, 8)), ("f", (2, 4, 8)))
    for size in sizes
]  # fmt: skip
_SIZE, _UNIT = 8, 8  # bytes: of what says how long the value is; of which each value is a multiple
_LONGEST_TEXT, _LONGEST_CHARACTER = 2**32 - 1, 4
_MOST_RANK, _DEEPEST = 32, 8
_SMALLEST = 4096  # bytes of room


def pack(value: Any) -> bytes:
    """Return the bytes of a value. Raise ValueError for what is no such value, and for texts that are not Unicode."""
    parts: list[bytes] = []
    _pack(value, parts)
    data = b"".join(parts)
    return len(data).to_bytes(_SIZE, "little") + data


def most_bytes(value: Any) -> int:
    """Return at least as many bytes as `pack` makes of a value, without encoding a text."""
    match value:
        case dict():
            return 128 + sum(map(most_bytes, (*value, *value.values())))
        case list() | tuple():
            return 64 + sum(map(most_bytes, value))
        case str():
            return 4 + _LONGEST_CHARACTER * len(value)
        case np.ndarray() if value.dtype == object:
            return 32 + _UNIT * value.ndim + sum(map(most_bytes, value.reshape(-1).tolist()))
        case np.ndarray():
            return 32 + _UNIT * value.ndim + value.nbytes
    return 32


def room_for(nbytes: int) -> int:
    """Return the bytes that an argument gets for a value of so many: the next power of two, so that values of about the
    same size make the same request.
    """
    return max(_SMALLEST, 1 << (nbytes - 1).bit_length())


def unpack(memory: NDArray[np.uint8]) -> Any:
    """Return the value in that memory, which another process may write meanwhile. Raise ValueError for what is
    none.
    """
    nbytes = int.from_bytes(memory[:_SIZE].tobytes(), "little")
    if not nbytes:
        raise ValueError("holds no value: none was given")
    if nbytes > memory.nbytes - _SIZE:
        raise ValueError(f"says that it has {nbytes} bytes, in a memory of {memory.nbytes}")
    reader = _ValueReader(memory[_SIZE : _SIZE + nbytes].tobytes())
    value = reader.value(0)
    reader.check_end()
    return value


def _pack(value: Any, parts: list[bytes]) -> None:
    match value:
        case None:
            _head(_ABSENT, (), parts)
        case dict():
            _head(_MAP, (len(value),), parts)
            for side in (list(value), list(value.values())):
                _pack(_column(side), parts)
        case list() | tuple():
            _head(_SEQUENCE, (len(value),), parts)
            for each in value:
                _pack(each, parts)
        case np.ndarray() if value.dtype == object:
            _head(_TEXTS, value.shape, parts)
            _contents(_texts(value.reshape(-1).tolist()), parts)
        case np.ndarray() | np.generic() if value.dtype.newbyteorder("<") in _DTYPES:
            dtype = value.dtype.newbyteorder("<")
            _head(_NUMBERS + _DTYPES.index(dtype), value.shape, parts)
            _contents([np.ascontiguousarray(value, dtype).tobytes()], parts)
        case _:
            raise ValueError(f"{type(value).__name__} is no text, array, list or dict")


def _head(kind: int, shape: Sequence[int], parts: list[bytes]) -> None:
    parts.append(np.array([kind, len(shape)], "<u4").tobytes() + np.array(shape, "<u8").tobytes())


def _contents(found: list[bytes], parts: list[bytes]) -> None:
    parts += found
    parts.append(bytes(-sum(map(len, found)) % _UNIT))


def _texts(texts: list[Any]) -> list[bytes]:
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{text!r:.40} is no text")  # noqa: TRY004 (each value that does not fit is one)
    encoded = [text.encode() for text in texts]
    lengths = list(map(len, encoded))
    if lengths and max(lengths) > _LONGEST_TEXT:
        raise ValueError(f"a text has {max(lengths)} bytes; {_LONGEST_TEXT} is the most")
    return [np.array(lengths, "<u4").tobytes(), *encoded]


def _column(values: list[Any]) -> NDArray[Any]:
    """Return the keys of a map, or its values: str, int or float, all of one kind. Raise ValueError."""
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    if all(isinstance(value, str) for value in plain):
        return np.array(plain, object)
    if all(type(value) is int for value in plain):
        try:
            return np.array(plain, np.int64)
        except OverflowError:
            raise ValueError("the integers of a map have 64 bits") from None
    if all(type(value) in {int, float} for value in plain):
        return np.array(plain, np.float64)
    raise ValueError("the keys of a map are all str or all int, and so are its values, or numbers")


class _ValueReader:
    """Reads values out of private memory. Every size is checked against the bytes that are left before it is used."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def value(self, depth: int) -> Any:
        """Return the next value. Raise ValueError."""
        if depth > _DEEPEST:
            raise ValueError(f"has values in more than {_DEEPEST} others")
        kind, rank = np.frombuffer(self._take(8), "<u4").tolist()
        if rank > _MOST_RANK:
            raise ValueError(f"has a value of rank {rank}")
        shape = np.frombuffer(self._take(8 * rank), "<u8").tolist()
        if kind == _ABSENT and not rank:
            return None
        if kind == _SEQUENCE and rank == 1:
            self._require(8 * shape[0])
            return [self.value(depth + 1) for _ in range(shape[0])]
        if kind == _MAP and rank == 1:
            return self._map(*shape)
        if kind == _TEXTS:
            return self._texts(math.prod(shape)).reshape(shape)
        if not _NUMBERS <= kind < _NUMBERS + len(_DTYPES):
            raise ValueError(f"has a value of kind {kind} and rank {rank}, which is none")
        return self._numbers(_DTYPES[kind - _NUMBERS], math.prod(shape)).reshape(shape)

    def check_end(self) -> None:
        """Raise ValueError unless all was read."""
        if self._at != len(self._data):
            raise ValueError(f"has {len(self._data) - self._at} bytes behind its value")

    def _map(self, count: int) -> dict[Any, Any]:
        keys, values = self.value(_DEEPEST), self.value(_DEEPEST)
        if not all(isinstance(side, np.ndarray) and side.shape == (count,) for side in (keys, values)):
            raise ValueError(f"has a map without {count} keys and values")
        return dict(zip(keys.tolist(), values.tolist(), strict=True))

    def _texts(self, count: int) -> NDArray[Any]:
        begin = self._at
        lengths = np.frombuffer(self._take(4 * count), "<u4").tolist()
        text = self._take(sum(lengths))
        found = np.empty(count, object)
        found[:] = [text[first:last].decode() for first, last in pairwise(accumulate(lengths, initial=0))]
        self._skip(begin)
        return found

    def _numbers(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        begin = self._at
        found = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        self._skip(begin)
        if dtype == np.bool_:  # numpy assumes 0 or 1
            return np.not_equal(found.view(np.uint8), 0)
        return found.copy()  # which its owner may write

    def _take(self, count: int) -> bytes:
        self._require(count)
        self._at += count
        return self._data[self._at - count : self._at]

    def _skip(self, begin: int) -> None:
        self._take((begin - self._at) % _UNIT)

    def _require(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise ValueError("ends within a value")
