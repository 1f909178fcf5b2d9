"""Mutants of real model files, which exporters have written, edited as a damaged or hostile file would differ. A number
names the same mutant in every process.
"""

from __future__ import annotations

import importlib
import io
import json
import random
import sys
import zipfile
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

IMPORTERS = Path(__file__).parents[1] / "driver/importers"
sys.path.insert(0, str(IMPORTERS))

import fuzz_onnx  # noqa: E402 (their folder was just added)
import fuzz_tflite  # noqa: E402
import numpy as np  # noqa: E402
from google.protobuf.message import DecodeError  # noqa: E402
from header_files import apart_onnx  # noqa: E402

import driver  # noqa: E402
from driver.nn import InvalidModel  # noqa: E402
from driver.nn.file_form import ModelFile, model_of_file  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from driver.nn import Model, Operand

FOLDERS = {"onnx": "onnx_models", "tflite": "vendor", "jax": "jax_files", "pt2": "pt2_files"}
BESIDE = {"weights/all.bin": np.arange(64, dtype=np.uint8)}
"""What comes along with every .onnx file, whether it names it or not."""
REFUSED = {"complex.jax"}
"""Files that no model can be made of."""
_DAMAGED = 0.1  # the share of mutants of archives of which any byte may be another


class RealFile(NamedTuple):
    """A file that is whole, and the inputs and outputs that a client says of its mutants, whatever became of theirs."""

    name: str
    data: bytes
    ports: tuple[Sequence[Operand], Sequence[Operand]]
    where: tuple[object, ...]  #: of the mutator: where it edits


def read_ports(kind: str, data: bytes) -> tuple[Sequence[Operand], Sequence[Operand]]:
    """The inputs and outputs as the importer reads them. Raises ImportFailed, InvalidModel."""
    header = importlib.import_module(f"driver.importers.{kind}.header").read_header(memoryview(data))
    if header.refusals:
        raise driver.ImportFailed(header.refusals[0].reason)
    return [t.operand() for t in header.inputs], [t.operand() for t in header.outputs]


class RealMutants:
    """The mutants of all real files of a kind, by their numbers."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self._seed = kind, seed
        files = {path.name: path.read_bytes() for path in sorted((IMPORTERS / FOLDERS[kind]).glob(f"*.{kind}"))}
        if kind == "onnx":
            files["weights in another file"] = apart_onnx()
        self._onnx = fuzz_onnx.Mutator(seed)
        self._words = fuzz_tflite.Mutator(seed, list(files.values()), where=_words_of)
        rows = ((name, data) for name, data in files.items() if name not in REFUSED)
        self.files = [RealFile(name, data, read_ports(kind, data), _where(kind, data)) for name, data in rows]
        # Large ones take longer, and have as many fields.
        self._weights = [len(file.data) ** -0.5 for file in self.files]

    def mutant(self, number: int) -> tuple[RealFile, bytes]:
        """That mutant, and the file that it was."""
        pick = random.Random(f"{self._seed} {number}")
        (file,) = pick.choices(self.files, self._weights)
        while True:
            try:
                return file, self._edited(file, pick)
            except (DecodeError, ValueError, TypeError):  # protocol buffers refuse the edit
                continue

    def _edited(self, file: RealFile, pick: random.Random) -> bytes:
        match self.kind:
            case "onnx":
                return self._onnx.edited(file.data, pick, *file.where)
            case "pt2":
                return self._edited_archive(file, pick)
        places, known = file.where
        return self._words.edited(file.data, places, pick, known)

    def _edited_archive(self, file: RealFile, pick: random.Random) -> bytes:
        """One member, or one value of what it says, is another, with the right checksum. Or the archive is damaged."""
        (members,) = file.where
        if pick.random() < _DAMAGED:
            return self._words.edited(file.data, _words_of(file.data), pick)
        members = dict(members)
        name = pick.choices([*members], [len(data) for data in members.values()])[0]
        members[name] = (_edited_json if name.endswith(".json") else self._edited_member)(members[name], pick)
        return _archive(members)

    def _edited_member(self, data: bytes, pick: random.Random) -> bytes:
        return self._words.edited(data, _words_of(data), pick)

    def model(self, number: int) -> Model:
        """That mutant as a client without manners sends it: where the importer refuses it, as what it was before."""
        file, data = self.mutant(number)
        try:
            ports = read_ports(self.kind, data)
        except (driver.ImportFailed, InvalidModel):
            ports = file.ports
        beside = BESIDE if self.kind == "onnx" else {}
        return model_of_file(ModelFile(self.kind, np.frombuffer(data, np.uint8), beside), *ports)


def _where(kind: str, data: bytes) -> tuple[object, ...]:
    match kind:
        case "onnx":
            return (fuzz_onnx.places(data),)
        case "tflite":
            return fuzz_tflite.places(data), fuzz_tflite.numbers(data)
        case "pt2":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return ({name: archive.read(name) for name in archive.namelist()},)
    return _words_of(data), ()


def _words_of(data: bytes) -> Sequence[int]:
    return range(0, max(len(data), 4), 4)


def _archive(members: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return made.getvalue()


def _edited_json(data: bytes, pick: random.Random) -> bytes:
    """One to three values are others, are missing, or are there twice."""
    tree = json.loads(data)
    for _ in range(pick.choice((1, 1, 2, 3))):
        places = [*_places([tree])]
        values = [within[key] for within, key in places]
        within, key = pick.choice(places[1:] or places)
        match pick.randrange(4):
            case 0:
                del within[key]
            case 1 if isinstance(within, list):
                within.insert(key, within[key])
            case 2:
                within[key] = deepcopy(pick.choice(values))
            case _:
                within[key] = pick.choice((*fuzz_tflite.EDGES, -1, 0.5, "", None, [], {}, True))
    return json.dumps(tree).encode()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each list or object of a tree that has something, and each key of it."""
    for key, value in [
        *(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
    ]:
        yield tree, key
        yield from _places(value)
