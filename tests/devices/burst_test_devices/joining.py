"""A device that says which rows it has computed together, and waits while the test wants it to."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burst_test_devices import runtime_folder
from driver import Device, PreparedModel
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.interface import BoundExecution
from driver.nn.file_form import FILE, is_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, Preparation
    from driver.nn import Model

POISON, CRUMB = -7.0, -8.0


class Together(Device):
    """x + 1 of a file with inputs [rows, length], the first of which counts; one output for each output of the file.

    Each run adds a line to "runs" in BURST_RUNTIME_DIR, with the first number of each row, and waits while the file
    "hold" with the first of these in its name is there. A run with POISON in it fails. One with CRUMB has an
    output with a row less.
    """

    name = "together"
    version = "1"
    type = "CPU"
    slots = 4
    extensions = (FILE,)
    needs = runtime_folder.needs()

    def supported_operations(self, model: Model) -> list[bool]:
        return [is_file(model)] * len(model.main.operations)

    def prepare(self, model: Model, preparation: Preparation) -> TogetherModel:
        return TogetherModel()


class TogetherModel(PreparedModel):
    """Any file."""

    serves_all = True
    is_static = False

    def bind(
        self, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
    ) -> TogetherExecution:
        x, *_ = inputs
        assert x is not None
        return TogetherExecution(x, outputs)


class TogetherExecution(BoundExecution):
    """One execution."""

    def __init__(self, x: NDArray[Any], outputs: Sequence[NDArray[Any]]) -> None:
        self._x, self._outputs, self._is_cancelled = x, outputs, False
        self.shapes = [(x.shape, x.nbytes <= output.nbytes) for output in outputs]

    def run(self) -> None:
        x, folder = self._x.copy(), Path(os.environ["BURST_RUNTIME_DIR"])
        with (folder / "runs").open("a") as runs:
            runs.write(" ".join(f"{row[0]:g}" for row in x) + "\n")
        while (folder / f"hold{x.flat[0]:g}").exists() and not self._is_cancelled:
            time.sleep(0.001)
        if POISON in x or self._is_cancelled:
            raise ExecutionFailed(0, "together", "poison, or nobody wants it")
        result = x[1:] + 1 if CRUMB in x else x + 1
        self.shapes = [(result.shape, result.nbytes <= output.nbytes) for output in self._outputs]
        if not all(suffices for _, suffices in self.shapes):
            raise OutputInsufficientSize(tuple(self.shapes))
        for output in self._outputs:
            output[: result.nbytes].view(np.float32)[:] = result.reshape(-1)

    def cancel(self) -> None:
        self._is_cancelled = True
