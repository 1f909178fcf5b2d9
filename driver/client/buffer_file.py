"""Files of buffers: the value of one, with what it is and the digest by which its device knows it again.

The first line is JSON: kind, dimensions, and the digest, keyed as those of the compilation cache are; the bytes of the
value follow.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from burst import InvalidArgument, Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.protocol.buffers import BufferKind

_MOST_HEAD = 4096  # bytes
_FORMAT = "burst buffer 1"


class SavedValue(NamedTuple):
    """A value of a file, not yet verified."""

    memory: Memory
    dimensions: tuple[int, ...]
    digest: bytes


def write(path: str | Path, kind: BufferKind, dimensions: Sequence[int], value: Memory, *, digest: bytes) -> None:
    """Write a value, as a whole or not at all. Raise OSError."""
    path = Path(path)
    nbytes = math.prod(dimensions) * kind.type.element_size
    head = {"format": _FORMAT, "kind": str(kind), "dimensions": list(dimensions), "digest": digest.hex()}
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(json.dumps(head).encode() + b"\n")
            file.write(value.asarray(np.uint8, nbytes).data)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def read(path: str | Path, kind: BufferKind) -> SavedValue:
    """Return the value of a file that says it is of this kind. Raise InvalidArgument, OSError."""
    with open(path, "rb") as file:
        try:
            head = json.loads(file.readline(_MOST_HEAD))
            its, dimensions, digest = head["kind"], tuple(head["dimensions"]), bytes.fromhex(head["digest"])
            is_one = head["format"] == _FORMAT and all(type(size) is int and 0 < size < 2**32 for size in dimensions)
        except (ValueError, TypeError, KeyError):
            is_one = False
        if not is_one:
            raise InvalidArgument(f"{path}: it is not the file of a buffer, or was damaged")
        if its != str(kind):
            raise InvalidArgument(f"{path}: it has a value of {its}, and the buffer takes {kind}")
        nbytes = math.prod(dimensions) * kind.type.element_size
        if os.fstat(file.fileno()).st_size - file.tell() != nbytes:
            raise InvalidArgument(f"{path}: the value of {list(dimensions)} has {nbytes} bytes, and others are there")
        memory = Memory.create(max(1, nbytes))
        if file.readinto(memory.asarray(np.uint8, nbytes).data) != nbytes:
            raise InvalidArgument(f"{path}: it has become shorter while it was read")
    return SavedValue(memory, dimensions, digest)
