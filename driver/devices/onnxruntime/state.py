"""State that grows: buffers whose values are tensors of ONNX Runtime's own, and executions that follow them.

A run reads the values that the buffers have at that moment, and its outputs become the values of those that it writes:
nothing is copied, and nothing is bound to an address. No run changes a value that another one has made, so several
buffers may have the same.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

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
    from driver.devices.onnxruntime.library import Place, Rebinder


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


class StateInput:
    """An input whose value is a buffer's, bound anew before each run. `binding`: ONNX Runtime's own."""

    def __init__(self, name: str, buffer: StateBuffer, binding: Any) -> None:
        self._bind, self._name, self._buffer = binding.bind_ortvalue_input, name, buffer

    def __call__(self) -> None:
        self._bind(self._name, self._buffer.tensor[0])


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
        rooms: list[Any] = [in_state(output) or output for output in outputs]
        self._targets = list(zip(owner.outputs, owner.places, rooms, strict=True))
        self._before: list[Callable[[], object]] = []
        self._addresses: set[int] = set()
        sources = [self._source(port, a) for port, a in zip(owner.inputs, inputs, strict=True) if a is not None]
        names = [port.name for port in owner.outputs]
        self._binding = owner.session.binding(sources, list(dict.fromkeys(names)))
        self.shapes = tuple(((), False) for _ in outputs)

    def _source(self, port: OnnxFilePort, given: Any) -> Place | Rebinder:
        if buffer := in_state(given):
            return partial(StateInput, port.name, buffer)
        place, fill = source_of(given, port.dtype)
        self._addresses.add(place.ctypes.data)
        if fill is not None:
            self._before.append(fill)
            self.copied_bytes += place.nbytes
            self.checked_bytes += place.nbytes if port.chooses else 0
        return port.name, port.type, given.shape, place

    def run(self) -> None:
        """Execute once, without the GIL. Raise OutputInsufficientSize, ExecutionFailed, LoopTimeout,
        MissedDeadlineTransient.
        """
        for copy in self._before:
            copy()
        check("queued")
        began = time.perf_counter()
        fault = self._runs.run(self._binding.attempt, is_long=self._owner.is_long)
        if fault:
            raise ExecutionFailed(0, "the file", in_words(fault))
        self._owner.took(time.perf_counter() - began)
        self._hand_over()

    def _hand_over(self) -> None:
        """Give each output to its buffer, or copy it to its memory: all, if there is room for all."""
        results, shapes, values, fit = self._binding.results(), [], [], True
        for port, place, room in self._targets:
            value = results[place]
            shape = tuple(value.shape())
            nbytes = port.nbytes(shape)
            fits = type(room) is StateBuffer or nbytes <= room.nbytes
            fit = fit and fits
            shapes.append((shape, fits))
            values.append((value, nbytes))
        self.shapes = tuple(shapes)
        if not fit:
            raise OutputInsufficientSize(self.shapes)
        taken = self._addresses
        for (port, _, room), (value, nbytes), (shape, _) in zip(self._targets, values, shapes, strict=True):
            if type(room) is StateBuffer:
                is_input = value.data_ptr() in taken
                room.tensor = self._copy(port, value, shape) if is_input else value, nbytes
            elif nbytes:
                np.copyto(room[:nbytes], tensor_bytes(value, nbytes))

    @staticmethod
    def _copy(port: OnnxFilePort, value: Any, shape: tuple[int, ...]) -> Any:
        """Return a copy of an input that lies in memory, where the next run may find another value."""
        copied = StateBuffer(port)
        copied.reshape(shape)
        copied.copy_from(tensor_bytes(value, copied.nbytes))
        return copied.tensor[0]

    def cancel(self) -> None:
        """End the run in progress before its next operation, with ExecutionFailed. Safe from any thread."""
        self._runs.cancel()
