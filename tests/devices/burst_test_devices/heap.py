"""A DSP with a heap of its own. Its buffers hold their elements in reverse order, and it adds them as they lie.

Memory of its own kind, "com.example.heap", is a memfd that begins with a header. What the engine calls is written down,
a line of JSON each, in "heard" in BURST_RUNTIME_DIR.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import stat
import struct
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from burst import Memory, ResourceExhaustedTransient
from burst_test_devices import runtime_folder
from burst_test_devices.listening import note
from driver.devices.reference import ReferenceDevice
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.interface import BoundExecution, BufferArgument, DriverBuffer, PreparedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, BufferRequest, MemoryHandle, Preparation
    from driver.nn import Model

    Argument = NDArray[Any] | BufferArgument | None

KIND = "com.example.heap"
HEADER = struct.Struct("<4sI56x")  # a magic, and whether the elements lie in reverse order
MAGIC = b"HEAP"

_SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
typedef struct { const float *first; ptrdiff_t step; } Vector;
typedef struct { Vector a, b, sum; size_t n; } Add;
int32_t add(void *context) {
    const Add *it = context;
    float *sum = (float *)it->sum.first;
    for (ptrdiff_t i = 0; i < (ptrdiff_t)it->n; i++)
        sum[i * it->sum.step] = it->a.first[i * it->a.step] + it->b.first[i * it->b.step];
    return 0;
}
"""


class _Vector(ctypes.Structure):
    _fields_ = [("first", ctypes.c_void_p), ("step", ctypes.c_ssize_t)]


class _Add(ctypes.Structure):
    _fields_ = [("a", _Vector), ("b", _Vector), ("sum", _Vector), ("n", ctypes.c_size_t)]


def _compiled() -> Any:
    """Nothing stays on the disk: what is mapped lives on."""
    with tempfile.TemporaryDirectory(prefix="dsp-") as folder:
        source, library = Path(folder, "add.c"), Path(folder, "add.so")
        source.write_text(_SOURCE)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).add
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int32
    return function


def _trouble() -> str:
    """What the file "trouble" in BURST_RUNTIME_DIR says."""
    path = Path(os.environ["BURST_RUNTIME_DIR"], "trouble")
    return path.read_text() if path.exists() else ""


class HeapBuffer(DriverBuffer):
    """Elements in reverse order."""

    def __init__(self, number: int, itemsize: int, memory: NDArray[np.uint8]) -> None:
        self.number, self.nbytes, self._itemsize = number, memory.nbytes, itemsize
        self.memory = memory

    def copy_from(self, source: NDArray[np.uint8]) -> None:
        note("copy_from", buffer=self.number)
        self._elements()[...] = source.reshape(-1, self._itemsize)

    def copy_to(self, target: NDArray[np.uint8]) -> None:
        note("copy_to", buffer=self.number)
        target.reshape(-1, self._itemsize)[...] = self._elements()

    def close(self) -> None:
        note("close", buffer=self.number)

    def _elements(self) -> NDArray[np.uint8]:
        return self.memory.reshape(-1, self._itemsize)[::-1]


class Dsp(ReferenceDevice):
    """Adds two tensors of float32 of one shape."""

    name = "dsp"
    version = "1"
    own_memory_kinds = frozenset({KIND})
    needs = runtime_folder.needs("execve", write=("/tmp",))  # it compiles its function
    _add: Any = None
    _buffers = 0

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
        """Compiles the function with its first model."""
        self._add = self._add or _compiled()
        return DspModel(model, self._add)

    def allocate(self, request: BufferRequest) -> DriverBuffer | None:
        """From the heap."""
        roles = [[use.is_input, use.io_index, use.frequency] for use in request.roles]
        assert all(isinstance(use.prepared, DspModel) for use in request.roles)
        self._buffers += 1
        note("allocate", buffer=self._buffers, type=request.type.name, dimensions=request.dimensions, roles=roles)
        return HeapBuffer(self._buffers, request.type.element_size, np.zeros(request.nbytes, np.uint8))

    def map_memory(self, handle: MemoryHandle) -> NDArray[np.uint8] | DriverBuffer:
        """A memfd with a header; the fields are the offset of the bytes."""
        if len(handle.fields) != 1:
            raise ValueError(f"fields={handle.fields}: the offset of the bytes, and nothing else")
        (start,) = handle.fields
        status = os.fstat(handle.fd)
        if not stat.S_ISREG(status.st_mode) or not HEADER.size <= start <= status.st_size - handle.nbytes:
            raise ValueError(f"{handle.nbytes} bytes at {start} are not behind the header of a heap")
        mapped = Memory.from_fd(handle.fd, start + handle.nbytes)  # reads as zeros where its client truncates it
        mapped.close()
        memory = mapped.asarray()
        magic, is_reversed = HEADER.unpack(memory[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise ValueError("the memory does not begin with the header of a heap")
        note("map", nbytes=handle.nbytes)
        if not is_reversed:
            return memory[start:]
        self._buffers += 1
        return HeapBuffer(self._buffers, 4, memory[start:])


class DspModel(PreparedModel):
    """One C function."""

    def __init__(self, model: Model, function: Any) -> None:
        main = model.main
        self._dimensions, self._function = main.operands[main.outputs[0]].dimensions, function

    def bind(self, inputs: Sequence[Argument], outputs: Sequence[Argument], options: BindOptions) -> BoundExecution:
        given = next((each for each in inputs if each is not None), None)
        assert given is not None
        return DspExecution(
            given[1] if isinstance(given, BufferArgument) else given.shape, self._function, (*inputs, *outputs)
        )


class DspExecution(BoundExecution):
    """Adds what lies in arrays and in buffers, each where it lies."""

    def __init__(self, shape: tuple[int, ...], function: Any, arguments: Sequence[Argument]) -> None:
        count = math.prod(shape)
        self._vectors = [_vector(each, count) for each in arguments]
        if any(vector is None for vector in self._vectors[:-1]):
            raise ValueError(f"an input has fewer than {count} elements")
        is_sufficient = self._vectors[-1] is not None
        self.shapes = [(shape, is_sufficient)]
        self._kept = arguments, function
        if is_sufficient:
            self._context = _Add(*self._vectors, count)
            where = ctypes.addressof(self._context)
            self.native = ctypes.cast(function, ctypes.c_void_p).value or 0, where
        self._function = function

    def run(self) -> None:
        if not self.shapes[0][1]:
            raise OutputInsufficientSize(tuple(self.shapes))
        note("run")
        self._function(ctypes.addressof(self._context))

    def __del__(self) -> None:
        buffers = [each.buffer for each in self._kept[0] if isinstance(each, BufferArgument)]
        note("unbind", buffers=[buffer.number for buffer in buffers if isinstance(buffer, HeapBuffer)])


def _vector(argument: Argument, count: int) -> _Vector | None:
    """Where its elements lie; None: there are fewer."""
    if isinstance(argument, BufferArgument):
        assert isinstance(argument.buffer, HeapBuffer)
        memory = argument.buffer.memory
        return None if memory.nbytes < 4 * count else _Vector(memory.ctypes.data + memory.nbytes - 4, -1)
    assert argument is not None
    return _Vector(argument.ctypes.data, 1) if argument.nbytes >= 4 * count else None


class Troubled(Dsp):
    """The same, but for what the file "trouble" says at each call. It executes in Python alone."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the other."""
        return _TroubledModel(super().prepare(model, preparation))

    def allocate(self, request: BufferRequest) -> DriverBuffer | None:
        """From the heap, or not."""
        trouble = _trouble()
        if trouble == "allocate hangs":
            threading.Event().wait()
        if trouble == "allocate is late":
            Path(os.environ["BURST_RUNTIME_DIR"], "go on").read_bytes()  # a pipe of the test's
        if trouble == "allocate raises":
            raise OSError("the heap is on fire")
        if trouble == "allocate raises ValueError":
            raise ValueError("the heap takes no such thing")
        if trouble == "allocate refuses":
            raise ResourceExhaustedTransient("the heap is full")
        if trouble == "allocate returns None":
            return None
        if trouble == "allocate returns nonsense":
            return 42  # type: ignore[return-value]
        found = super().allocate(request)
        assert isinstance(found, HeapBuffer)
        if trouble.startswith("nbytes "):
            found.nbytes = json.loads(trouble.removeprefix("nbytes "))
        return TroubledBuffer(found.number, request.type.element_size, found.memory, found.nbytes)

    def map_memory(self, handle: MemoryHandle) -> NDArray[np.uint8] | DriverBuffer:
        """Maps, or not."""
        trouble = _trouble()
        if trouble == "map raises":
            raise KeyError("no such heap")
        if trouble == "map returns nonsense":
            return np.zeros((2, 2), np.float32)
        return super().map_memory(handle)


class _TroubledModel(DspModel):
    def __init__(self, inner: PreparedModel) -> None:
        self._inner = inner

    def bind(self, inputs: Sequence[Argument], outputs: Sequence[Argument], options: BindOptions) -> BoundExecution:
        bound = cast("DspModel", self._inner).bind(inputs, outputs, options)
        bound.native = None
        run = bound.run
        bound.run = lambda: _failed_run() if _trouble() == "run fails" else run()
        return bound


def _failed_run() -> None:
    raise ExecutionFailed(0, "ADD", "the heap is on fire")


class TroubledBuffer(HeapBuffer):
    """A buffer that may do as the file says."""

    def __init__(self, number: int, itemsize: int, memory: NDArray[np.uint8], nbytes: int) -> None:
        super().__init__(number, itemsize, memory)
        self.nbytes = nbytes

    def copy_from(self, source: NDArray[np.uint8]) -> None:
        _copy_trouble("copy_from")
        super().copy_from(source)

    def copy_to(self, target: NDArray[np.uint8]) -> None:
        _copy_trouble("copy_to")
        super().copy_to(target)

    def close(self) -> None:
        super().close()
        if _trouble() == "close raises":
            raise OSError("the heap is on fire")


def _copy_trouble(method: str) -> None:
    if _trouble() == f"{method} hangs":
        threading.Event().wait()
    if _trouble() == f"{method} raises":
        raise OSError("the heap is on fire")


class Misnamed(Dsp):
    """Calls its kind of memory as one that all devices know."""

    own_memory_kinds = frozenset({"ashmem"})
