"""What devices that run model files as they are have in common."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from driver.nn import InvalidModel
from driver.nn.file_form import PACKED, file_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from driver.nn import Model
    from driver.nn.file_form import ModelFile

RUNTIMES = {"onnx": "onnxruntime", "tflite": "litert", "jax": "jax", "pt2": "torch"}
"""Kind of file -> the device with the runtime that it was made for."""

CONVERTED = frozenset({"onnx", "tflite"})
"""Kinds of file that operations of the HAL can be made of, too."""

CHOOSING = frozenset({"bool", "int32", "int64", "uint32", "uint64"})
"""Types of indices, sizes and conditions. An operator checks them before it uses them, and no client may change them in
between, so they are in private memory during a run. All else is used where it lies.
"""

NOT_ALONE = "a model file is a whole model: it cannot be one of several operations"


def file_obstacle(
    model: Model, kinds: Collection[str], obstacle: Callable[[ModelFile], str | None], settings: Collection[str] = ()
) -> str | None:
    """Return why a device cannot run a model for which `is_file` holds; None: it can. `obstacle` judges files of
    `kinds`. `settings`: those that the device has for a file.
    """
    try:
        file = file_of(model)
        assert file is not None
        if file.kind not in kinds:
            return f"it is a .{file.kind} file, which needs the device {RUNTIMES[file.kind]}"
        if unknown := sorted(file.settings.keys() - {*settings}):
            return f"it asks for the setting {unknown[0]!r:.100}, which this device does not have"
        return obstacle(file)
    except InvalidModel as error:
        return str(error)


def packed_obstacle(model: Model) -> str | None:
    """Return why a device that takes tensors of numbers cannot run a model; None: it can."""
    for word, numbers in (("input", model.main.inputs), ("output", model.main.outputs)):
        for n, number in enumerate(numbers):
            if model.main.operands[number].type == PACKED:
                return f"{word} {n} is no tensor of numbers: the device {RUNTIMES['onnx']} alone runs such files"
    return None


def checked_input(where: str, file: str, array: NDArray[Any] | None, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the array, if a runtime can read it as elements of `dtype`. `where`, `file`: the input and the file, in
    words.

    Raise ValueError.
    """
    if array is None:
        raise ValueError(
            f"{where}: no input of {file} may be omitted; give an array, or its sizes by burst(input_shapes=…)"
        )
    if not array.flags.c_contiguous or array.itemsize != dtype.itemsize:
        raise ValueError(f"{where}: {array.dtype} with strides {array.strides}; give a C-contiguous array of {dtype}")
    return array


def source_of(array: NDArray[Any], dtype: str) -> tuple[NDArray[np.uint8], Callable[[], object] | None]:
    """Return the memory in which a runtime reads an input, and what fills it before each run; None: it is the client's
    own.

    A copy where elements are not aligned, and where they choose (`CHOOSING`). `dtype`: by name.
    """
    memory = array.reshape(-1).view(np.uint8)
    if dtype not in CHOOSING and memory.ctypes.data % array.itemsize == 0:
        return memory, None
    place = np.empty(memory.nbytes, np.uint8)
    if dtype == "bool":  # a byte from another process may have any value
        return place, partial(np.not_equal, memory, 0, place.view(np.bool_))
    return place, partial(np.copyto, place, memory)


def file_digest(file: ModelFile) -> bytes:
    """32 bytes that name the contents of a file, of those beside it, and its settings."""
    hasher = blake3()
    hasher.update(file.kind.encode())
    for name, data in (("", file.data), *file.external.items()):
        encoded = name.encode()
        hasher.update(b"%d %d " % (len(encoded), data.nbytes) + encoded)
        hasher.update(data.data)
    if file.settings:
        hasher.update(json.dumps(file.settings, sort_keys=True).encode())
    return hasher.digest()
