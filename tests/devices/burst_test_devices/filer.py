"""A device that runs model files, each of which says in words what the runtime does to it."""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driver import Device, PreparedModel
from driver.devices.files import file_obstacle
from driver.errors import ExecutionFailed
from driver.interface import BoundExecution, CacheFiles, Needs, Saved
from driver.nn import InvalidModel
from driver.nn.file_form import FILE, file_of, is_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, Preparation
    from driver.nn import Model
    from driver.nn.file_form import ModelFile

LAST_WORDS = b"terminate called after throwing an instance of 'std::bad_alloc'\n"
_STDOUT, _STDERR = 1, 2


class Filer(Device):
    """x + 1. A file is words: "when:what", such as "load:abort" or "run:crash"; "one:crash" does so over an input of 1.

    Whatever else a file says makes it another file. Every load is counted in the file `$HOME/loads`.
    """

    name = "filer"
    version = "1"
    type = "CPU"
    slots = 8
    extensions = (FILE,)
    cache_files = CacheFiles(0, 1)
    needs = Needs(write_paths=("~/",))  # it counts in "loads"
    over_one = "one"  # what it obeys over an input of 1

    def supported_operations(self, model: Model) -> list[bool]:
        return [reason is None for reason in self.explain(model)]

    def explain(self, model: Model) -> list[str | None]:
        if not is_file(model):
            return ["it runs files alone"] * len(model.main.operations)
        return [file_obstacle(model, {"onnx"}, lambda _: None)]

    def prepare(self, model: Model, preparation: Preparation) -> FiledModel:
        file = file_of(model)
        assert file is not None
        return FiledModel(file, self.over_one)


class Second(Filer):
    """Another runtime for the same files, which obeys "twin:crash" in the place of "one:crash"."""

    over_one = "twin"


class FiledModel(PreparedModel):
    """One file."""

    serves_all = True

    def __init__(self, file: ModelFile, over_one: str) -> None:
        self._over_one = over_one
        words = [word.partition(":") for word in bytes(file.data).decode().split()]
        self._orders = {when: what for when, _, what in words}
        with Path("~/loads").expanduser().open("a") as loads:
            loads.write(".")
        obey(self._orders.get("load"))

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        options: BindOptions,
    ) -> FiledExecution:
        (x,), (y,) = inputs, outputs
        assert x is not None
        return FiledExecution(self._orders, x, y, self._over_one)

    def saved(self, root: NDArray[np.uint8]) -> Saved:
        return Saved([], [np.zeros(1, np.uint8)])


class FiledExecution(BoundExecution):
    """One execution."""

    def __init__(self, orders: dict[str, str], x: NDArray[Any], y: NDArray[Any], over_one: str) -> None:
        self._orders, self._x, self._y, self._over_one = orders, x, y, over_one
        self.shapes = [(x.shape, y.nbytes >= x.nbytes)]

    def run(self) -> None:
        x = self._x.copy()
        obey(self._orders.get("run"))
        if x.flat[0] == 1:
            obey(self._orders.get(self._over_one))
        self._y[: x.nbytes].view(np.float32)[:] = x + 1


def obey(order: str | None) -> None:
    """Does to this process what the order says."""
    match order:
        case "crash":
            ctypes.string_at(0)
        case "abort":
            os.write(_STDERR, LAST_WORDS)
            os.abort()
        case "murmur":
            os.write(_STDOUT, LAST_WORDS)
            os.abort()
        case "flood":
            for _ in range(128):
                os.write(_STDERR, b"again\n" * 10_000)
            os.write(_STDERR, b"of all that, %d bytes are kept\n" % os.fstat(_STDERR).st_size)
            os.abort()
        case "exit":
            os._exit(3)
        case "fail":
            raise ExecutionFailed(0, "the file", "it fails over this")
        case "refuse":
            raise InvalidModel("the file has no head")
        case _:
            hold(order)


def hold(order: str | None) -> None:
    """Takes what the order says: memory, threads or time."""
    match order:
        case "threads":
            for _ in range(16):
                _thread.start_new_thread(threading.Event().wait, ())  # as a runtime's: Python gives it no name
        case "take":
            taken = np.ones(1 << 30, np.uint8)
            time.sleep(30)
            del taken
        case "part":
            part = np.ones(1 << 26, np.uint8)
            while not Path("~/enough").expanduser().exists():
                time.sleep(0.01)
            del part
        case "sleep":
            time.sleep(30)
