"""A model file by its suffix."""

import importlib
import os
from pathlib import Path

from driver.errors import ImportFailed
from driver.nn import Model

READERS = {".tflite": "tflite", ".onnx": "onnx"}
"""Suffix -> module of this package with `load(file) -> Model`, and the extra for what it needs; .onnx needs nothing."""


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
    model: Model = reader.load(file)
    return model
