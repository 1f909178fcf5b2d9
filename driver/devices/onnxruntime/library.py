"""ONNX Runtime, by its Python API: sessions made of bytes, and runs on memory that is there already."""

from __future__ import annotations

import importlib.metadata
import os
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from driver.devices.lowering.errors import LibraryFailed, LibraryMissing
from driver.devices.onnxruntime.writer import TYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

OLDEST = (1, 20)

_REMEDY = "pip install 'burst-engine[onnxruntime]'"
_ERRORS = 3  # of the log's severities
_PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
PROVIDERS = tuple(_PROVIDERS)
"""What runs the kernels, as the options name it. CUDA leaves to the CPU what it has no kernel for."""

_ENTRIES = {
    # It takes what lies between bytes for integer kernels, of which some round otherwise, and SOFTMAX's overflows.
    "session.disable_quant_qdq": "1",
    # Threads that wait by turning round take the processor from clients and from other devices.
    "session.intra_op.allow_spinning": "0",
}


def version() -> str:
    """Of the library that is installed; its code is not loaded."""
    for wheel in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


@cache
def library() -> Any:
    """ONNX Runtime's module. Raises LibraryMissing."""
    found = version()
    if found == "none" or tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise LibraryMissing(f"onnxruntime: version {found} is installed, and {needed} or later is needed; {_REMEDY}")
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # it is looked at when the library is loaded
    try:
        return import_module("onnxruntime")
    except ImportError as error:
        raise LibraryMissing(f"onnxruntime {found} cannot be loaded: {error}; {_REMEDY}") from error


def require_provider(provider: str) -> None:
    """Raises LibraryMissing unless ONNX Runtime was built with it."""
    wanted, available = _PROVIDERS[provider][0], library().get_available_providers()
    if wanted not in available:
        raise LibraryMissing(
            f"provider {provider!r}: onnxruntime {version()} has {', '.join(available)}, not {wanted}; "
            "pip install onnxruntime-gpu in its place, or leave out the provider"
        )


def run_options() -> Any:
    """What lets others end a run: `terminate` is looked at between operations. A run with one takes 50 us longer."""
    return library().RunOptions()


class Session:
    """A model made ready to run, in any number of threads at once."""

    def __init__(
        self,
        model: bytes,
        weights: Sequence[tuple[str, NDArray[Any]]] = (),
        threads: int = 1,
        provider: str = "cpu",
        *,
        is_quick: bool = False,
    ) -> None:
        """`weights`: constants that are no part of the model's bytes, by their names. `is_quick`: made in a third of
        the time, and slower to run: weights are not laid out anew. Raises LibraryFailed.
        """
        ort = library()
        options = ort.SessionOptions()
        if is_quick:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.log_severity_level, options.intra_op_num_threads = _ERRORS, threads
        options.inter_op_num_threads = 1
        for name, value in _ENTRIES.items():
            options.add_session_config_entry(name, value)
        values = [ort.OrtValue.ortvalue_from_numpy(array) for _, array in weights]
        self._kept = weights, values  # which the session goes on reading
        if weights:
            options.add_external_initializers([name for name, _ in weights], values)
        try:
            self._session = ort.InferenceSession(model, options, providers=_PROVIDERS[provider])
        except Exception as error:  # its errors share no other class
            raise LibraryFailed(f"a model was refused: {error}") from error

    def binding(self, inputs: Sequence[Place], outputs: Sequence[Place]) -> Binding:
        """A run on that memory."""
        return Binding(self._session, inputs, outputs)


Place = tuple[str, str, tuple[int, ...], "NDArray[np.uint8]"]
"""Name, ONNX type, dimensions and memory of an input or output."""


class Binding:
    """A session and the memory that it reads and writes. One thread runs it at a time."""

    def __init__(self, session: Any, inputs: Sequence[Place], outputs: Sequence[Place]) -> None:
        self._session, self._binding = session, session.io_binding()
        self._kept = inputs, outputs
        for places, bind in ((inputs, self._binding.bind_input), (outputs, self._binding.bind_output)):
            for name, type_, shape, memory in places:
                bind(name, "cpu", 0, TYPES[type_], shape, memory.ctypes.data)

    def run(self, options: Any = None) -> str | None:
        """Executes once, without Python's lock. What went wrong, if something did; `options`: a RunOptions."""
        try:
            self._session.run_with_iobinding(self._binding, options)
        except Exception as error:  # noqa: BLE001 - its errors share no other class
            return str(error)
        return None
