"""Puts drop-ins in the place of runtimes' classes when a program imports them.

This file imports the standard library alone, and is executed by itself at the start of every Python below `burst
exec`: a program that imports no runtime pays a finder that looks at names.

  BURST_EXEC         the version of Burst that started the program, and what is replaced: "0.3.0 onnxruntime,litert"
  BURST_EXEC_DEVICE  the device to use; unset: the one of the runtime
"""

from __future__ import annotations

import gc
import importlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

SWITCH, DEVICE = "BURST_EXEC", "BURST_EXEC_DEVICE"
_LITERT = "litert", "driver.dropin.litert"
DROPINS = {
    "onnxruntime": ("onnxruntime", "driver.dropin.onnxruntime"),
    "ai_edge_litert.interpreter": _LITERT,
    "tflite_runtime.interpreter": _LITERT,
    "tensorflow.lite.python.interpreter": _LITERT,
}
"""Module that a program imports -> the name for `--only`, and the drop-in whose `replace` is called with it."""


class DropinFinder:
    """A finder that lets the others find a runtime, and has its classes replaced once it is loaded."""

    def __init__(self, version: str, wanted: Sequence[str]) -> None:
        self._version, self._wanted = version, wanted
        self._at_work: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the real module, with a loader that replaces afterwards; None for any other name."""
        if name not in DROPINS or DROPINS[name][0] not in self._wanted or name in self._at_work:
            return None
        self._at_work.add(name)
        try:
            spec = _found_by_others(self, name, path, target)
        finally:
            self._at_work.discard(name)
        if spec is None or spec.loader is None:
            return spec
        if lack := _lack_of(self._version):
            print(f"burst exec: {name} runs in this process: {lack}", file=sys.stderr)
        else:
            spec.loader = ReplacingLoader(spec.loader, DROPINS[name][1])  # type: ignore[assignment]
        return spec


def _found_by_others(
    finder: DropinFinder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for other in sys.meta_path:
        if other is not finder:
            spec = other.find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


def _lack_of(version: str) -> str:
    """Return why this Python's Burst is not the one that started the program; "" if it is."""
    try:
        from fmq.version import __version__ as own  # with fmq: only where a runtime is imported
    except ImportError:
        return f"{sys.executable} has no Burst, and {version} started the program"
    return "" if own == version else f"{sys.executable} has Burst {own}, and {version} started the program"


class ReplacingLoader:
    """A loader that does what the real one does, and then replaces classes. It is the real one in all else."""

    def __init__(self, real: Any, dropin: str) -> None:
        self._real, self._dropin = real, dropin

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return what the real loader makes."""
        return self._real.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and replace its classes; where that fails, the program has the real ones."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        collects = gc.isenabled()
        gc.disable()  # what is imported stays: looking for garbage in it is a fifth of the time
        try:
            importlib.import_module(self._dropin).replace(module)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program runs
            print(
                f"burst exec: {module.__name__} runs in this process: {type(error).__name__}: {error}", file=sys.stderr
            )
        finally:
            if collects:
                gc.enable()


def install() -> None:
    """Install the finder, if this Python is below `burst exec`."""
    import os

    version, _, wanted = os.environ.get(SWITCH, "").partition(" ")
    if version:
        sys.meta_path.insert(0, DropinFinder(version, wanted.split(",")))
