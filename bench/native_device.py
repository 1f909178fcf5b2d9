"""A device whose prepared model is one C function: what the listener's own work costs, without Python's.

Its binding offers `native`, (address of `int32_t f(void *context)`, address of the context), which a listener calls
without Python and without the GIL. `run` calls the same function, so it works where a listener does not know `native`.
It runs models of one ADD of two float32 tensors of the same shape, and is named "native_device:Native".
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from driver.devices.reference import ReferenceDevice
from driver.engine import latency as latency_hint
from driver.engine import process
from driver.errors import OutputInsufficientSize
from driver.interface import BoundExecution, Needs, PreparedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, Preparation
    from driver.nn import Model

SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
typedef struct { const float *a, *b; float *sum; size_t n; } Add;
int32_t add(void *context) {
    const Add *it = context;
    for (size_t i = 0; i < it->n; i++) it->sum[i] = it->a[i] + it->b[i];
    return 0;
}
"""


class Context(ctypes.Structure):
    """`Add` of the source."""

    _fields_ = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("n", ctypes.c_size_t),
    ]


def compiled(text: str = SOURCE) -> Any:
    """The function `add` of a source. Nothing stays on the disk: what is mapped lives on."""
    with tempfile.TemporaryDirectory(prefix="native-") as folder:
        source, library = Path(folder, "add.c"), Path(folder, "add.so")
        source.write_text(text)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).add
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int32
    return function


class Native(ReferenceDevice):
    """Compiles its function with its first model."""

    needs = Needs(write_paths=("/tmp",), system_calls=("execve",))  # it compiles its function
    name = "native"
    version = "1"
    source = SOURCE
    is_native = True  #: without it, the listener's thread calls the function through Python
    _add: Any = None

    def supported_operations(self, model: Model) -> list[bool]:
        """True for an ADD that is the whole model."""
        operands, operations = model.main.operands, model.main.operations
        return [
            len(operations) == 1
            and operation.type == "ADD"
            and len({(operands[i].type, operands[i].dimensions) for i in model.main.inputs}) == 1
            and [i for i in operation.inputs[:2] if i in model.main.inputs] == list(model.main.inputs)
            and operands[model.main.inputs[0]].type.dtype == "float32"
            and not np.any(operands[operation.inputs[2]].value)
            for operation in operations
        ]

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """The reference's, for the shapes; and the function."""
        self._add = self._add or compiled(self.source)
        return _Prepared(super().prepare(model, preparation), self._add, self.is_native)


class _Prepared(PreparedModel):
    def __init__(self, reference: PreparedModel, function: Any, is_native: bool) -> None:
        self._reference, self._function, self._is_native = reference, function, is_native

    def bind(
        self, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
    ) -> BoundExecution:
        shapes = self._reference.bind(inputs, outputs, options).shapes
        return _Bound(shapes, self._function, inputs, outputs, self._is_native)


class _Bound(BoundExecution):
    """`native`: (function, context); the context lives as long as this does."""

    def __init__(self, shapes: Any, function: Any, inputs: Any, outputs: Any, is_native: bool) -> None:
        if not all(is_sufficient for _, is_sufficient in shapes):
            raise OutputInsufficientSize(shapes)
        a, b = inputs
        self.shapes = shapes
        self._arrays = a, b, outputs[0]  # what the addresses in the context point to
        self._context = Context(*(array.ctypes.data for array in self._arrays), a.size)
        where = ctypes.addressof(self._context)
        if is_native:
            self.native = ctypes.cast(function, ctypes.c_void_p).value, where
        self.run = partial(function, where)


# ---- spinning


SPINNING_SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
#include <time.h>
typedef struct { const float *a, *b; float *sum; size_t n; } Add;
static volatile double sink;
static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
int32_t add(void *context) {
    const Add *it = context;
    uint64_t end = now() + (uint64_t)(it->a[0] * 1e3);
    double x = 1;
    while (it->a[0] > 0 && now() < end)
        for (int i = 0; i < 50; i++) x = x * 1.0000001 + 1e-9;
    sink = x;
    it->sum[0] = it->a[0];
    return 0;
}
"""


class Spinning(Native):
    """The listener calls the C function."""

    name = "spinning"
    source = SPINNING_SOURCE


class SpinningInPython(Spinning):
    """Python calls it, through ctypes."""

    name = "spinning-python"
    is_native = False


def _give(parts: Iterable[str]) -> None:
    """Have this engine's open bursts get these parts of the hint."""
    vars(process)["LatencyHint"] = partial(latency_hint.LatencyHint, parts=frozenset(parts))


class Asking(Spinning):
    """It does for open bursts what its name says, and no more."""

    parts: ClassVar[set[str]] = set()
    latency = latency_hint.MOST_LATENCY

    def __init__(self) -> None:
        _give(self.parts)
        latency_hint.MOST_LATENCY = self.latency
        super().__init__()


class AskingForNothing(Asking):
    """No hint."""


class AskingForIdleStates(Asking):
    """As devices do."""

    parts: ClassVar[set[str]] = {"idle states"}


class AskingForPolling(AskingForIdleStates):
    """No idle state at all, which devices do not ask for."""

    latency = 0


class AskingForClock(Asking):
    """Threads are clamped."""

    parts: ClassVar[set[str]] = {"clock"}


class AskingForAll(Asking):
    """The whole hint."""

    parts: ClassVar[set[str]] = {"idle states", "clock", "arenas"}


class Trimming(ReferenceDevice):
    """The reference device, but that the C library gives memory back while a burst is open."""

    name = "trimming"

    def __init__(self) -> None:
        _give(latency_hint.PARTS - {"arenas"})
        super().__init__()


def work_of(microseconds: float) -> Callable[[], int]:
    """The same function with memory of its own, called through ctypes, as a program calls its own runtime."""
    arrays = np.array([[microseconds, 0, 0, 0]], np.float32), np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32)
    context = Context(*(array.ctypes.data for array in arrays), 4)
    function = compiled(SPINNING_SOURCE)
    call = partial(function, ctypes.addressof(context))
    call.keeps = arrays, context  # type: ignore[attr-defined]
    return call
