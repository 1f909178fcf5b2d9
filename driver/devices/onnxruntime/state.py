"""State that grows: buffers whose values are tensors of ONNX Runtime's own, and executions that follow them.

A run reads the values that the buffers have at that moment, and its outputs become the values of those that it writes:
nothing is copied, and nothing is bound to an address. One call gives a run all of its inputs, and has all outputs. No
run changes a value that another one has made, so several buffers may have the same.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import OutputShape
from burst._core import ffi
from driver.deadlines import check
from driver.devices.files import source_of
from driver.devices.lowering.errors import in_words
from driver.devices.onnxruntime.library import library
from driver.devices.stoppable import StoppableRuns
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.formats.onnx_schema import TYPES
from driver.interface import BoundExecution, BufferArgument, DriverBuffer, GrowingBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.devices.onnxruntime.file_model import OnnxFileModel, OnnxFilePort


class StateBuffer(GrowingBuffer):
    """A buffer for inputs and outputs of one ONNX type."""

    in_place = True  # a run takes the new value when it is over

    def __init__(self, port: OnnxFilePort) -> None:
        """Begin without a value. `port`: an input or output that the buffer is for."""
        self._port = port
        self.tensor: tuple[Any, int] = None, 0  #: ONNX Runtime's value and its bytes, which change together

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # follows the value
        """The bytes of the value."""
        return self.tensor[1]

    def reshape(self, dimensions: tuple[int, ...]) -> None:
        found = library().OrtValue.ortvalue_from_shape_and_type(dimensions, TYPES[self._port.type])
        self.tensor = found._ortvalue, self._port.nbytes(dimensions)

    def drop(self) -> None:
        self.tensor = None, 0

    def array(self) -> NDArray[np.uint8]:
        return tensor_bytes(*self.tensor)

    def copy_from(self, source: NDArray[np.uint8]) -> None:
        np.copyto(self.array(), source)

    def copy_to(self, target: NDArray[np.uint8]) -> None:
        np.copyto(target, self.array())

    def copy_across(self, source: DriverBuffer) -> bool:
        if not isinstance(source, StateBuffer):
            return False
        self.tensor = source.tensor
        return True


def in_state(argument: object) -> StateBuffer | None:
    """Return the buffer if an argument lies in one that grows."""
    buffer = argument.buffer if isinstance(argument, BufferArgument) else None
    return buffer if isinstance(buffer, StateBuffer) else None


def tensor_bytes(value: Any, nbytes: int) -> NDArray[np.uint8]:
    """Return the bytes of a tensor of ONNX Runtime's. They live as long as the value."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(ffi.buffer(ffi.cast("char *", value.data_ptr()), nbytes), np.uint8)


class StateExecution(BoundExecution):
    """An execution on buffers that grow, and on memory. ONNX Runtime allocates all outputs, in each run.

    copied_bytes: of arguments that are not aligned to their elements, and of indices, sizes and conditions, which are
    the `checked_bytes`; outputs that lie in memory are copied, too, but their sizes are not known before.
    """

    is_static = False

    def __init__(
        self, owner: OnnxFileModel, inputs: Sequence[Any], outputs: Sequence[Any], loop_timeout: float
    ) -> None:
        """Bind what lies in memory. `inputs`: of the owner's `given`. Raise ValueError."""
        self._owner, self._runs = owner, StoppableRuns(owner.loops, loop_timeout)
        if any(isinstance(each, BufferArgument) and in_state(each) is None for each in (*inputs, *outputs)):
            raise ValueError(
                "a state that grows and memory of a GPU do not go together: use buffers of fixed dimensions"
            )
        self._before: list[Callable[[], object]] = []
        self._lent: dict[int, set[int]] = {}  # addresses of inputs in memory, by their bytes
        self._in_memory: dict[str, Any] = {}  # values that never change
        self._kept: list[Any] = []  # with their memory
        self._names: list[str] = []
        self._read: list[StateBuffer] = []
        for port, given in zip(owner.inputs, inputs, strict=True):
            if buffer := in_state(given):
                self._names.append(port.name)
                self._read.append(buffer)
            elif given is not None:
                self._use_memory(port, given)
        written = [(n, in_state(output), output) for n, output in enumerate(outputs)]
        self._written = [(n, buffer) for n, buffer, _ in written if buffer]
        self._rooms: list[tuple[int, NDArray[np.uint8]]] = [(n, room) for n, buffer, room in written if not buffer]
        self._element_sizes = [port.size for port in owner.outputs]
        self._values = owner.session.on_values(list(dict.fromkeys(port.name for port in owner.outputs)))
        self.shapes: tuple[OutputShape, ...] = (OutputShape(is_sufficient=False),) * len(outputs)

    def _use_memory(self, port: OnnxFilePort, given: NDArray[Any]) -> None:
        """Have runs read an input in its memory, or in a copy."""
        place, fill = source_of(given, port.dtype)
        self._lent.setdefault(place.nbytes, set()).add(place.ctypes.data)
        if fill is not None:
            self._before.append(fill)
            self.copied_bytes += place.nbytes
            self.checked_bytes += place.nbytes if port.chooses else 0
        array = place.view(given.dtype).reshape(given.shape)
        value = library().OrtValue.ortvalue_from_numpy_with_onnx_type(array, TYPES[port.type])
        self._in_memory[port.name] = value._ortvalue
        self._kept.append(value)

    def run(self) -> None:
        """Execute once, without the GIL. Raise OutputInsufficientSize, ExecutionFailed, LoopTimeout,
        MissedDeadlineTransient.
        """
        for copy in self._before:
            copy()
        check("queued")
        began, values = time.perf_counter(), self._values
        given = [buffer.tensor[0] for buffer in self._read]
        if None in given:  # ONNX Runtime would crash
            raise ExecutionFailed(0, "the file", "a buffer that it reads has lost its value")
        values.given = self._in_memory | dict(zip(self._names, given, strict=True))
        fault = self._runs.run(values.attempt, is_long=self._owner.is_long)
        found = values.taken()
        if fault:
            raise ExecutionFailed(0, "the file", in_words(fault))
        self._owner.took(time.perf_counter() - began)
        self._hand_over([found[place] for place in self._owner.places])

    def _hand_over(self, values: list[Any]) -> None:
        """Give each output to its buffer, or copy it to its memory: all, if there is room for all."""
        shapes = [tuple(value.shape()) for value in values]
        sizes = [size * math.prod(shape) for size, shape in zip(self._element_sizes, shapes, strict=True)]
        lacking = {n for n, room in self._rooms if sizes[n] > room.nbytes}
        if lacking:
            self.shapes = tuple(OutputShape(shape, n not in lacking) for n, shape in enumerate(shapes))
            raise OutputInsufficientSize(self.shapes)
        made = {shape: OutputShape(shape) for shape in dict.fromkeys(shapes)}  # often one for all
        self.shapes = tuple([made[shape] for shape in shapes])
        for n, buffer in self._written:
            value, nbytes = values[n], sizes[n]
            if nbytes in self._lent and value.data_ptr() in self._lent[nbytes]:
                value = self._copy(n, value, shapes[n])
            buffer.tensor = value, nbytes
        for n, room in self._rooms:
            if sizes[n]:
                np.copyto(room[: sizes[n]], tensor_bytes(values[n], sizes[n]))

    def _copy(self, output: int, value: Any, shape: tuple[int, ...]) -> Any:
        """Return a copy of an input that lies in memory, where the next run may find another value."""
        copied = StateBuffer(self._owner.outputs[output])
        copied.reshape(shape)
        copied.copy_from(tensor_bytes(value, copied.nbytes))
        return copied.tensor[0]

    def cancel(self) -> None:
        """End the run in progress before its next operation, with ExecutionFailed. Safe from any thread."""
        self._runs.cancel()
