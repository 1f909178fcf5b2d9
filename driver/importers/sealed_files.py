"""Model files in memory: opened safely, and copied once into memory that no process can write."""

import os
import stat
from collections.abc import Sequence
from io import FileIO
from pathlib import Path, PurePosixPath

import numpy as np

from burst.memory import Memory
from driver.errors import ImportFailed
from driver.formats.file_bytes import Array

_DEEPEST = 8
"""Limit for the folders between a model and a file that it names."""
_COPY = "copy the file itself beside the model"


def open_file(file: Path) -> FileIO:
    """Open a file for reading. Raise OSError; ImportFailed for what is not a regular file."""
    if "\0" in str(file):
        raise ImportFailed(f"{str(file)!r:.80} has a null character, and is no name of a file")
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb", buffering=0)
    os.close(descriptor)
    raise ImportFailed(f"{file.name!r} is not a regular file")


def sealed(file: FileIO, name: str, parts: Sequence[tuple[int, int]] | None = None) -> Array:
    """Copy an open file, or `parts` of it one behind the other, into memory that no process can write any more.

    The file may be closed, and change, afterwards. Raise ImportFailed when it is empty, cannot be read, or changes
    meanwhile; ResourceExhaustedPersistent.
    """
    if os.fstat(file.fileno()).st_size == 0:
        raise ImportFailed(f"{name!r} is empty")
    try:
        return Memory.frozen_file(file, parts).asarray()
    except OSError as error:
        raise ImportFailed(f"{name!r} cannot be read: {error.strerror}; load it again") from None


def rewritten(data: Array, changes: Sequence[tuple[int, bytes]]) -> Array:
    """Return the bytes with others in these places, in memory that no process can write; `data` itself if none differs.

    Raise ResourceExhaustedPersistent.
    """
    if all(data[at : at + len(new)].tobytes() == new for at, new in changes):
        return data

    def fill(room: Array) -> None:
        room[:] = data
        for at, new in changes:
            room[at : at + len(new)] = np.frombuffer(new, np.uint8)

    return Memory.frozen_by(data.size, fill).asarray()


def open_beside(model: Path, name: str) -> FileIO:
    """Open a file that the model at that path names: a regular one, below the folder of the model.

    Symbolic links may lead to it, as in the cache of a hub, if it really lies below the folder in which the model
    really lies, or below the one through which the model is named. Raise ImportFailed for any other. A name with a
    part "*" is none of a file: ONNX Runtime takes one of them as an address in its own memory.
    """
    parts, where = PurePosixPath(name).parts, f"its weights lie in {name[:64]!r}"
    if not 0 < len(parts) <= _DEEPEST or {"..", "/", "//", "*"} & {*parts} or "\0" in name:
        raise ImportFailed(f"{where}, which is not a file below the folder of the model")
    folders = [os.path.realpath(model.parent), os.path.dirname(os.path.realpath(model))]
    try:
        found = os.open(model.parent / name, os.O_PATH | os.O_CLOEXEC)
        try:  # what was found is opened only if it is what it has to be
            link = f"/proc/self/fd/{found}"
            place = Path(os.readlink(link))
            if not any(place.is_relative_to(folder) for folder in folders):
                raise ImportFailed(f"{where}, which is a link out of the folder of the model", remedy=_COPY)
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise ImportFailed(f"{where}, which is not a regular file")
            return open(os.open(link, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0)
        finally:
            os.close(found)
    except OSError as error:
        raise ImportFailed(f"{where}, which cannot be opened: {error.strerror}") from None
