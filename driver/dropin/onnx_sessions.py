"""The files of ONNX Runtime's sessions: models for a device, and graphs without weights that say what they are."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import Memory
from driver.devices.onnxruntime.onnx_file import without_weights
from driver.dropin.not_on_device import NotOnDevice
from driver.dropin.ort_values import NUMPY_TYPES
from driver.errors import ImportFailed
from driver.importers.external import copy_external
from driver.importers.onnx.header import read_header
from driver.nn import InvalidModel, validate
from driver.nn.file_form import ModelFile, file_of, model_of_file

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from driver.devices.onnxruntime.session_settings import SessionSettings
    from driver.nn import Model

_real: Any = import_module("onnxruntime")
_SEED = b"\x0a\x04seed"  # the name of an attribute
_RANDOM = ["Bernoulli", "Dropout", "Multinomial"]
_RANDOM += ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
_OP_TYPE = b"\x22"  # the tag of a node's field in the file


def model_name(source: object) -> str:
    """Return the name under which a session is counted, and its model runs."""
    if isinstance(source, str | os.PathLike):
        return os.fsdecode(os.path.basename(os.fspath(source))) or "?"
    return f"a model of {len(source)} bytes" if isinstance(source, bytes) else "?"


def model_of(source: str | bytes | os.PathLike[str], settings: SessionSettings) -> Model:
    """Return the model of a session, with what it is told. Raise NotOnDevice for what is no .onnx file, or holds what
    does not travel.
    """
    if not isinstance(source, str | bytes | os.PathLike):
        raise NotOnDevice("it is neither a path nor bytes")
    try:
        data = _frozen(source, settings.encoded())
        header = read_header(data.data)
        if header.external and isinstance(source, bytes):
            raise NotOnDevice("its weights lie in other files, and its bytes do not say where", "open it by its path")
        folder = Path("." if isinstance(source, bytes) else os.fsdecode(source))
        data, external = copy_external(folder, data, header.external)
        if header.refusals:
            raise NotOnDevice(header.refusals[0].reason, header.refusals[0].remedy or "")
        inputs, outputs = ([tensor.operand() for tensor in side] for side in (header.inputs, header.outputs))
        model = model_of_file(ModelFile("onnx", data, external), inputs, outputs)
        model = replace(model, name=model_name(source))
        validate(model)
    except (ImportFailed, InvalidModel, OSError) as error:  # the real class says so in its own words
        raise NotOnDevice(f"the file cannot be sent to a device: {error}") from error
    return model


def _frozen(source: str | bytes | os.PathLike[str], settings: bytes) -> NDArray[np.uint8]:
    """Return the bytes of a file, with settings behind them, in memory that no process can write any more."""

    def fill(room: NDArray[np.uint8]) -> None:
        room[size:] = np.frombuffer(settings, np.uint8)
        if isinstance(source, bytes):
            room[:size] = np.frombuffer(source, np.uint8)
            return
        with open(source, "rb", buffering=0) as file:
            at = 0
            while at < size and (count := file.readinto(room[at:size].data)):
                at += count
        if at < size:
            raise OSError("it became shorter while it was read")

    size = len(source) if isinstance(source, bytes) else os.stat(source).st_size
    return Memory.frozen_by(size + len(settings), fill).asarray()


def bare_session(model: Model, settings: SessionSettings, given: Any) -> tuple[bytes, Any, object]:
    """Return the graph of a model, options with which ONNX Runtime makes a session of it that is never run, and what
    has to live as long as that session.

    Its weights are zeros that no step of that touches. `given`: the session's own options, or None. Raise NotOnDevice
    for one that draws random numbers from a seed of its own.
    """
    file = file_of(model)
    assert file is not None
    own = file.data[: file.data.size - len(settings.encoded())]
    split, options = without_weights(own, file.external), _real.SessionOptions()
    draws = any(_OP_TYPE + bytes([len(name)]) + name.encode() in split.graph for name in _RANDOM)
    if draws and _SEED in split.graph:
        raise NotOnDevice(
            "it draws random numbers from a seed, and a device's come from one stream for all its sessions"
        )
    options.graph_optimization_level = _real.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")
    if given is not None:
        options.log_severity_level = given.log_severity_level
        for by, add in (
            ("name", options.add_free_dimension_override_by_name),
            ("denotation", options.add_free_dimension_override_by_denotation),
        ):
            for name, size in given.dimensions(by).items():
                add(name, size)
    values = [_real.OrtValue.ortvalue_from_numpy(array) for _, array in split.weights]
    names = [name for name, _ in split.weights]
    if names:
        options.add_external_initializers(names, values)
    for name, value in zip(names, values, strict=True):
        options.add_initializer(name, value)
    _add_files(options, file.external)  # small weights are not taken out of them
    return split.graph, options, (values, file.external)


def _add_files(options: Any, external: Mapping[str, NDArray[np.uint8]]) -> None:
    """Let a session of a model's bytes read its other files in memory."""
    if external:
        names, contents = list(external), list(external.values())
        options.add_external_initializers_from_files_in_memory(names, contents, [each.nbytes for each in contents])


def frozen_source(model: Model, settings: SessionSettings, options: Any) -> tuple[bytes, Any]:
    """Return the bytes of a model's file as they were when it was read, and options that have its other files.

    `options`: the program's, which are changed; or None.
    """
    file = file_of(model)
    assert file is not None
    if file.external:
        options = options or _real.SessionOptions()
        _add_files(options, file.external)
    return file.data[: file.data.size - len(settings.encoded())].tobytes(), options


class NumpyTypes:
    """The dtypes of a session's inputs: what ONNX Runtime takes without a word, the device takes, too."""

    def __init__(self, inputs: Sequence[Any], scalars: Collection[str]) -> None:
        """`scalars`: inputs whose rank is 0."""
        self._dtypes = {each.name: np.dtype(NUMPY_TYPES[each.type]) for each in inputs if each.type in NUMPY_TYPES}
        self._count, self._scalars = len(inputs), frozenset(scalars)
        self._texts = {each.name for each in inputs if each.type == "tensor(string)"}

    @property
    def is_numeric(self) -> bool:
        """True if all are tensors of numbers."""
        return self._count == len(self._dtypes)

    def checked(self, names: Sequence[str], feed: Mapping[str, Any]) -> list[Any]:
        """Return the arrays of a feed in the order of these names; None for one that is left out.

        Raise NotOnDevice for what ONNX Runtime is to judge.
        """
        arrays = [self._array(name, feed.get(name)) for name in names]
        if len(feed) != sum(array is not None for array in arrays):
            raise NotOnDevice("an input is given that is none of the file's")
        for name, array in zip(names, arrays, strict=True):
            if array is None:
                continue
            is_usual = type(array) is np.ndarray and (
                array.dtype == self._dtypes.get(name) or (name in self._texts and array.dtype.kind in "OU")
            )
            if not is_usual:
                raise NotOnDevice(f"the input {name!r} is no numpy array of the file's type")
            if array.ndim and name in self._scalars:  # ONNX Runtime takes it, and its outputs have other shapes
                raise NotOnDevice(f"the input {name!r} has dimensions, and none in the file")
        return arrays

    def _array(self, name: str, given: Any) -> Any:
        """Return the array that ONNX Runtime makes of a list of numbers of the file's kind, else what is given."""
        dtype = self._dtypes.get(name)
        if type(given) is not list or dtype is None:
            return given
        try:
            found = np.array(given)
        except ValueError:  # rows of several lengths
            return given
        array = found.astype(dtype) if found.dtype.kind == dtype.kind else None
        return array if array is not None and (array == found).all() else given
