"""The frames of a recording: a small msgpack array each, and bytes that it describes.

A frame is a head of 24 bytes, the array, the bulk. The head: the CRC-32 of all that follows but the bulk, the length of
the array, the length of the bulk, the first 8 bytes of its BLAKE3; integers of 32, 32 and 64 bits, lowest byte first.
So a reader can skip the bulk of a file of any size, allocates only a small array before it has checked the frame, and
detects where a file was truncated or changed.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterable

MAGIC = b"BURSTREC"
VERSION = 1
MOST_WORDS = 2**20
"""Bytes of a frame's array."""

_CRC, _REST = struct.Struct("<I"), struct.Struct("<IQ8s")
_HEAD_BYTES = _CRC.size + _REST.size
_UNREADABLE = (ValueError, TypeError, msgpack.UnpackException, RecursionError)


class Damaged(Exception):
    """The rest of the file cannot be read."""


class FileFrame(NamedTuple):
    """One frame, with the position of its bulk in the file."""

    words: list[Any]
    offset: int
    nbytes: int
    digest: bytes

    @property
    def end(self) -> int:
        """Offset of the next frame."""
        return self.offset + self.nbytes


def packed(words: list[Any]) -> bytes:
    """Pack the array. Raise ValueError if it is too long."""
    raw: bytes = msgpack.packb(words)
    if len(raw) > MOST_WORDS:
        raise ValueError(f"{len(raw)} bytes that describe a request; at most {MOST_WORDS} are recorded")
    return raw


def head(raw: bytes, bulk: Iterable[Any]) -> bytes:
    """Return the head of a frame with this array and bulk."""
    digest, nbytes = blake3(), 0
    for part in bulk:
        digest.update(part)
        nbytes += len(part)
    rest = _REST.pack(len(raw), nbytes, digest.digest(length=8))
    return _CRC.pack(zlib.crc32(raw, zlib.crc32(rest))) + rest


def read(fd: int, at: int, end: int) -> FileFrame:
    """Return the frame at that offset, of a file that ends at `end`. Raise Damaged."""
    if at + _HEAD_BYTES > end:
        raise Damaged("it was cut off")
    found = exactly(fd, _HEAD_BYTES, at)
    length, nbytes, digest = _REST.unpack_from(found, _CRC.size)
    offset = at + _HEAD_BYTES + length
    if length > MOST_WORDS:
        raise Damaged(f"a frame is described by {length} bytes; at most {MOST_WORDS} are allowed")
    if offset + nbytes > end:
        raise Damaged("it was cut off")
    raw = exactly(fd, length, at + _HEAD_BYTES)
    if _CRC.pack(zlib.crc32(raw, zlib.crc32(found[_CRC.size :]))) != found[: _CRC.size]:
        raise Damaged("a frame was changed")
    try:
        words = msgpack.unpackb(raw, max_ext_len=0)
    except _UNREADABLE as error:
        raise Damaged(f"a frame is no msgpack: {error}") from error
    if not isinstance(words, list):
        raise Damaged("a frame is no array")
    return FileFrame(words, offset, nbytes, digest)


def bulk_of(fd: int, frame: FileFrame) -> bytes:
    """Read the bulk of a frame. Raise Damaged."""
    found = exactly(fd, frame.nbytes, frame.offset)
    if blake3(found).digest(length=8) != frame.digest:
        raise Damaged("the data of a frame was changed")
    return found


def exactly(fd: int, nbytes: int, at: int) -> bytes:
    """Read so many bytes. Raise Damaged if there are fewer."""
    parts, missing = [], nbytes
    while missing:
        part = os.pread(fd, min(missing, 2**30), at)
        if not part:
            raise Damaged("it was cut off")
        parts.append(part)
        at, missing = at + len(part), missing - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
