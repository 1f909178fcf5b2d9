"""Mutants of real model files: .onnx and .tflite files that exporters have written, edited as a damaged or hostile file
would differ. A number names the same mutant in every process.
"""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
    from collections.abc import Sequence

    from driver.nn import Model, Operand

FOLDERS = {"onnx": "onnx_models", "tflite": "vendor"}
BESIDE = {"weights/all.bin": np.arange(64, dtype=np.uint8)}
"""What comes along with every .onnx file, whether it names it or not."""


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
            self._mutator, self._where = fuzz_onnx.Mutator(seed), lambda data: (fuzz_onnx.places(data),)
        else:
            self._mutator = fuzz_tflite.Mutator(seed, list(files.values()))
            self._where = lambda data: (fuzz_tflite.places(data), fuzz_tflite.numbers(data))
        rows = files.items()
        self.files = [RealFile(name, data, read_ports(kind, data), self._where(data)) for name, data in rows]
        self._weights = [
            len(file.data) ** -0.5 for file in self.files
        ]  # large ones take longer, and have as many fields

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
        if self.kind == "onnx":
            return self._mutator.edited(file.data, pick, *file.where)
        places, known = file.where
        return self._mutator.edited(file.data, places, pick, known)

    def model(self, number: int) -> Model:
        """That mutant as a client without manners sends it: where the importer refuses it, as what it was before."""
        file, data = self.mutant(number)
        try:
            ports = read_ports(self.kind, data)
        except (driver.ImportFailed, InvalidModel):
            ports = file.ports
        beside = BESIDE if self.kind == "onnx" else {}
        return model_of_file(ModelFile(self.kind, np.frombuffer(data, np.uint8), beside), *ports)
