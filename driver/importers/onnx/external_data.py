"""Weights in other files than the .onnx file: opened only below its folder, and never through a symbolic link."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from driver.errors import ImportFailed
from driver.importers.file_bytes import Array, ByteBudget, map_descriptor

_MOST_FILES = 256
_DEEPEST = 8


class ExternalData:
    """The files of one folder, each mapped on first use. makes: a budget that grows with their size."""

    def __init__(self, folder: Path | None, makes: ByteBudget) -> None:
        self._folder, self._makes = folder, makes
        self._files: dict[str, Array] = {}

    def part(self, words: Mapping[str, str]) -> Array:
        """The bytes that `location`, `offset` and `length` name."""
        name = words.get("location", "")
        data = self._file(name)
        start = _number(words.get("offset", "0"))
        length = _number(words["length"]) if "length" in words else data.size - start
        if start > data.size or length < 0 or length > data.size - start:
            raise ImportFailed(f"{length} bytes at {start} lie outside the {data.size} bytes of {name[:64]!r}")
        return data[start : start + length]

    def _file(self, name: str) -> Array:
        if name not in self._files:
            if len(self._files) >= _MOST_FILES:
                raise ImportFailed(f"its weights lie in more than {_MOST_FILES} files")
            self._files[name] = self._open(name)
            self._makes.extend(8 * self._files[name].size)
        return self._files[name]

    def _open(self, name: str) -> Array:
        parts = PurePosixPath(name).parts
        if self._folder is None or not 0 < len(parts) <= _DEEPEST or ".." in parts or parts[0] == "/" or "\0" in name:
            raise ImportFailed(f"its weights lie in {name[:64]!r}, which is not a file below the folder of the model")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        opened = [os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        try:
            for part in parts:
                opened.append(os.open(part, flags, dir_fd=opened[-1]))
            if not stat.S_ISREG(os.fstat(opened[-1]).st_mode):
                raise ImportFailed(f"its weights lie in {name[:64]!r}, which is not a regular file")
            return np.frombuffer(map_descriptor(opened[-1], name[:64]), np.uint8)
        except OSError as error:
            raise ImportFailed(f"its weights lie in {name[:64]!r}, which cannot be opened: {error.strerror}") from None
        finally:
            for descriptor in opened:
                os.close(descriptor)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ImportFailed(f"damaged: {text[:32]!r} is not an offset or length")
    return int(text)
