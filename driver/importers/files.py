"""A model file by its suffix."""

import importlib
import mmap
import os
from pathlib import Path

from driver.errors import ImportFailed
from driver.nn import Model

READERS = {".tflite": "tflite"}
"""Suffix -> module of this package with `read(data) -> Model`, and the extra that installs what it needs."""


def load(path: str | os.PathLike[str]) -> Model:
    """The model in the file at `path`, whose suffix names its format.

    The file is mapped, not read: constants are views of it, so leave it as it is while the model is in use. Operands
    that have a name in the file carry it as `extra["name"]`.

    Raises `ImportFailed` when the file is damaged, or holds what the HAL cannot say: the operator and the reason are
    named. `OSError` when it cannot be opened.
    """
    file = Path(path)
    if file.suffix not in READERS:
        raise ImportFailed(f"{file.name!r} has the suffix {file.suffix!r}; known are {', '.join(READERS)}")
    extra = READERS[file.suffix]
    try:
        reader = importlib.import_module(f"driver.importers.{extra}")
    except ModuleNotFoundError as error:
        missing = f"a {file.suffix} file needs the package {error.name!r}; install burst-engine[{extra}]"
        raise ImportFailed(missing) from None
    with file.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size == 0:
            raise ImportFailed(f"{file.name!r} is empty")
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    model: Model = reader.read(memoryview(data))
    return model
