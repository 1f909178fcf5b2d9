"""Load a model file, as it is or as operations of the HAL; its suffix names the format.

load(path)
  sealed copy     the file is read once, into memory that no process can write any more; programs.py makes that of a
                  function that JAX or PyTorch has exported in this process
  read_header     names, types and sizes of inputs and outputs (onnx/header.py, tflite/header.py)
  external        files beside an .onnx file that hold its weights are copied in the same way
  model_of_file   one operation, which is the file; its `portable` form is imported on demand
"""

import importlib.util
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from burst_engine.names import install_command
from driver.devices.files import CONVERTED, RUNTIMES
from driver.errors import ImportFailed, InvalidModel
from driver.formats.file_bytes import Array
from driver.importers.external import copy_external
from driver.importers.header import Header
from driver.importers.obstacle import Obstacle, Shapes, failure, named_sizes
from driver.importers.programs import exported_file
from driver.importers.sealed_files import open_file, rewritten, sealed
from driver.nn import Model, validate
from driver.nn.errors import did_you_mean
from driver.nn.file_form import ModelFile, model_of_file
from driver.nn.model import check_model

READERS = {".tflite": "tflite", ".onnx": "onnx", ".jax": "jax", ".pt2": "pt2"}
"""Suffix -> package of the format, and the extra that installs what its reader requires."""
Form = Literal["auto", "file", "operations"]
_FORMS = ("auto", "file", "operations")
_PACKAGES = {"onnxruntime": "onnxruntime", "litert": "ai_edge_litert", "jax": "jax", "torch": "torch"}
"""The package in which that runtime is."""
_MOST_TOLD = 3
"""Inputs and outputs that one message says are not carried."""
_ZIP = b"PK\x03\x04"
_OTHER_FORMATS = {
    b"version https://git-lfs": ("a pointer of Git LFS", "fetch the file with `git lfs pull`"),
    b"\x1f\x8b": ("compressed with gzip", "unpack it first"),
    _ZIP: ("a ZIP archive", "unpack it, and load a model in it"),
    b"\x89HDF": ("an HDF5 file", "convert it to .tflite or .onnx"),
    b"<!DOCTYPE": ("a web page", "download the file itself"),
    b"<html": ("a web page", "download the file itself"),
}
"""First bytes -> what it is, and the remedy."""


def load(
    path: str | os.PathLike[str] | object,
    shapes: Shapes | None = None,
    form: Form = "auto",
    *,
    signature: str | None = None,
    optional: bool = True,
) -> Model:
    """Load the model file at `path`, whose suffix names the format, or what JAX or PyTorch has exported.

    Args:
        path: of an .onnx, .tflite, .jax or .pt2 file; or a `jax.export.Exported` or `torch.export.ExportedProgram`, of
            which the model is independent.
        shapes: sizes of inputs by name, such as {"images": (1, 3, 320, 320)}; None for a size that stays open.
        form: "file" is one operation that is the file; ONNX Runtime or LiteRT runs it as it is. "operations" are those
            of the HAL, which every device can take. "auto" is both: each device gets the form that it runs, and the
            second is made when it is needed. Where the file's own runtime is not installed, "auto" is "operations". A
            .jax or .pt2 file has the form "file" alone.
        signature: the entry of a .tflite file that has several, by its name; None: its first subgraph.
            `model.signatures` are all, its own first. Each model has its own state, if the file keeps one.
        optional: whether inputs for which an .onnx file has a value are the last ones of the model in file form, which
            `run` and bursts may leave out.

    The file is copied, and may change afterwards; so are the files beside it that hold weights. Inputs and outputs have
    their name in the file as `extra["name"]`, and as `extra["labels"]` the names of classes where the file tells them.

    Raise `ImportFailed` when the file is damaged, changes while it is loaded, holds what the form cannot express, or
    has no inputs of such names and shapes; the message says which, and what helps. Raise `OSError` when the file
    cannot be opened, `ResourceExhaustedPersistent` when it does not fit into memory.
    """
    if form not in _FORMS:
        raise ImportFailed(f"form={form!r:.80}: choose from {', '.join(_FORMS)}{did_you_mean(str(form), _FORMS)}")
    source, shapes = _source(path, signature), named_sizes(shapes)
    kind = source.kind
    may_convert = form == "auto" and kind in CONVERTED
    if form == "operations" or (may_convert and not runs_files(kind)):
        return source.operations(shapes)
    header = source.header.with_shapes(shapes)
    header = header if optional else header.without_optional()
    if header.refusals:
        return source.instead(header, shapes, form)
    return source.model(header, Once(partial(source.operations, shapes)) if may_convert else None)


def read_header(path: str | os.PathLike[str], signature: str | None = None) -> Header:
    """Return what the header of a model file says of its inputs and outputs. Raise ImportFailed, OSError."""
    return _read(Path(path), kind_of(path), signature, None)[1]


def kind_of(path: str | os.PathLike[str]) -> str:
    """Return the kind of a model file, by its suffix: "onnx" or "tflite". Raise ImportFailed for any other."""
    file = Path(path)
    kind = READERS.get(file.suffix.lower())
    if kind is None:
        raise ImportFailed(f"{file.name!r} has the suffix {file.suffix!r}; supported are {', '.join(READERS)}")
    return kind


@cache
def runs_files(kind: str) -> bool:
    """Return True if the runtime that files of this kind were made for is installed here. No code of it is imported."""
    return importlib.util.find_spec(_PACKAGES[RUNTIMES[kind]]) is not None


class ModelSource:
    """A model file and the files beside it, copied into memory that no process can write any more."""

    def __init__(self, file: Path, kind: str, signature: str | None = None, data: Array | None = None) -> None:
        """Read the file and its header. `data`: its bytes, where they are in memory. Raise ImportFailed, OSError."""
        self.name, self.kind = file.name, kind
        self.data, self.header = _read(file, kind, signature, data)
        self.data, self.external = copy_external(file, self.data, self.header.external)

    def model(self, header: Header, portable: Callable[[], Model] | None = None) -> Model:
        """Return the file form. Raise ImportFailed."""
        inputs, outputs = ([tensor.operand() for tensor in side] for side in (header.inputs, header.outputs))
        try:
            file = ModelFile(self.kind, self.data, self.external)
            model = replace(
                model_of_file(file, inputs, outputs, portable), signatures=header.signatures, name=self.name
            )
            validate(model)
        except InvalidModel as error:
            raise ImportFailed(f"{self.name!r}: {error}") from None
        return model

    def operations(self, shapes: Shapes | None) -> Model:
        """Return the operations form. Raise ImportFailed with the first obstacle."""
        model, obstacles = self.converted(shapes)
        if model is None:
            raise failure(obstacles)
        return replace(model, signatures=self.header.signatures, name=self.name)

    def converted(self, shapes: Shapes | None) -> tuple[Model | None, list[Obstacle]]:
        """Return the operations form, or None and all obstacles."""
        shapes, beside = self.header.own_names(shapes), [self.external] if self.kind == "onnx" else []
        try:
            found: tuple[Model | None, list[Obstacle]] = _reader(self.kind).convert(self.data.data, *beside, shapes)
        except ImportFailed as error:
            return None, [Obstacle.of(error, error.operator, error.index)]
        return found

    def instead(self, header: Header, shapes: Shapes, form: Form) -> Model:
        """Return the operations form, where the file form cannot carry an input or output. Raise ImportFailed."""
        refusals = header.refusals
        more = f", and {len(refusals) - _MOST_TOLD} more" if len(refusals) > _MOST_TOLD else ""
        told, remedy = "; ".join(each.reason for each in refusals[:_MOST_TOLD]) + more, refusals[0].remedy
        if form == "file":
            raise ImportFailed(told, remedy=remedy)
        try:
            return self.operations(shapes)
        except ImportFailed as error:
            raise ImportFailed(f"{told}; nor can it become operations of the HAL: {error}", remedy=remedy) from None


def loaded(model: object) -> Model:
    """Return the model; the path of a file is loaded. Raise TypeError for anything else, and what `load` raises."""
    if isinstance(model, str | os.PathLike):
        return load(model)
    check_model(model)
    return cast("Model", model)


class Once:
    """Calls a function at most once, whichever thread asks first; all get its result, or its error."""

    def __init__(self, make: Callable[[], Model]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: Model | None = None
        self._error: Exception | None = None

    def __call__(self) -> Model:
        with self._lock:
            if self._made is None and self._error is None:
                try:
                    self._made = self._make()
                except ImportFailed as error:
                    self._error = error
            if self._made is None:
                assert self._error is not None
                raise self._error.with_traceback(None)
            return self._made

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the lock."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


def _reader(kind: str) -> ModuleType:
    """Return the package that makes operations of a file. Raise ImportFailed where it lacks what it needs, or there is
    none.
    """
    if kind not in CONVERTED:
        remedy = f'keep form="auto": the device {RUNTIMES[kind]} runs the file as it is'
        raise ImportFailed(f"a .{kind} file does not become operations of the HAL", remedy=remedy)
    try:
        return importlib.import_module(f"driver.importers.{kind}.reader")
    except ModuleNotFoundError as error:
        missing = f"a .{kind} file needs the package {error.name!r}; {install_command(kind)}"
        raise ImportFailed(missing) from None


def _source(path: object, signature: str | None) -> ModelSource:
    exported = exported_file(path)
    if exported is not None:
        return ModelSource(Path(exported.name), exported.kind, signature, exported.data)
    file = Path(cast("str", path))
    return ModelSource(file, kind_of(file), signature)


def _read(file: Path, kind: str, signature: str | None, data: Array | None) -> tuple[Array, Header]:
    """Return a copy of a file that no process can write any more, with that signature as its first, and its header."""
    if data is None:
        with open_file(file) as opened:
            data = sealed(opened, file.name)
    try:
        _refuse_other_formats(bytes(data[:256]), kind)
        reader = importlib.import_module(f"driver.importers.{kind}.header")
        if signature is not None:
            data = rewritten(data, reader.as_first(data.data, signature))
        header: Header = reader.read_header(data.data)
    except ImportFailed as error:
        remedy = error.remedy or "fetch it again, or export it again"
        raise ImportFailed(f"{file.name!r}: {error.reason}", remedy=remedy) from None
    return data, header


def _is_text(begin: bytes) -> bool:
    return all(byte >= 0x20 or byte in b"\t\r\n\f" for byte in begin) and begin.isascii()


def _refuse_other_formats(begin: bytes, kind: str) -> None:
    """Raise `ImportFailed` for what often has the name of a model file, and is none."""
    for magic, (what, remedy) in _OTHER_FORMATS.items():
        if begin.startswith(magic) and not (kind == "pt2" and magic == _ZIP):
            raise ImportFailed(f"it is {what}, not a model", remedy=remedy)
    if kind == "onnx" and begin[4:8] == b"TFL3":
        raise ImportFailed("it is a .tflite file", remedy="rename it")
    if _is_text(begin):
        raise ImportFailed("it is text, not a model")
