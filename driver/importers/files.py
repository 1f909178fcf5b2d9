"""Load a model file with the reader for its suffix."""

import importlib
import os
from pathlib import Path

from driver.errors import ImportFailed
from driver.nn import Model

READERS = {".tflite": "tflite", ".onnx": "onnx"}
"""Suffix -> package with `load(file) -> Model`. The extra of that name installs its requirements; .onnx has none."""


def load(path: str | os.PathLike[str]) -> Model:
    """Load the model file at `path`; its suffix names the format.

    The file is mapped, not read. Constants are views of it, so do not change the file while the model is in use.
    Operands that have a name in the file carry it as `extra["name"]`.

    Raises `ImportFailed` when the file is damaged or holds something that the HAL cannot express; the message names
    the operator and the reason. Raises `OSError` when the file cannot be opened.
    """
    file = Path(path)
    if file.suffix not in READERS:
        raise ImportFailed(f"{file.name!r} has the suffix {file.suffix!r}; supported are {', '.join(READERS)}")
    extra = READERS[file.suffix]
    try:
        reader = importlib.import_module(f"driver.importers.{extra}")
    except ModuleNotFoundError as error:
        missing = f"a {file.suffix} file needs the package {error.name!r}; install burst-engine[{extra}]"
        raise ImportFailed(missing) from None
    model: Model = reader.load(file)
    return model
