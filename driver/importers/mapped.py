"""A file as memory, without reading it."""

import mmap
import os
from pathlib import Path

from driver.errors import ImportFailed


def mapped(file: Path) -> memoryview:
    """The bytes of a file, mapped to be read only; `ImportFailed` when there are none."""
    with file.open("rb") as opened:
        return mapped_descriptor(opened.fileno(), file.name)


def mapped_descriptor(descriptor: int, name: str) -> memoryview:
    """The same of an open file, which may be closed then."""
    if os.fstat(descriptor).st_size == 0:
        raise ImportFailed(f"{name!r} is empty")
    return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
