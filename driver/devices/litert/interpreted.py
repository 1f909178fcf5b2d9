"""Files that LiteRT's compiled models do not take, or of which only a run knows the shapes of outputs: the interpreter
of LiteRT's package for Python runs them. It copies inputs and outputs, and cannot be stopped.
"""

from __future__ import annotations

import math
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.deadlines import check
from driver.devices.litert.tflite_file import TYPES
from driver.devices.lowering.errors import LibraryFailed, in_words
from driver.errors import ExecutionFailed, OutputInsufficientSize
from driver.interface import BoundExecution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.devices.litert.tflite_file import TfliteOutline

    Shape = tuple[int, ...]


class InterpretedProgram:
    """The file in an interpreter, which is resized for each run as needed, and the lock for taking turns.

    is_static: whether the shapes of its outputs are known before it runs.
    """

    def __init__(self, file: TfliteOutline, shapes: tuple[Shape, ...], threads: int) -> None:
        """Make interpreters for inputs of these shapes. Raises LibraryFailed."""
        self._inputs = [tensor.place for tensor in file.inputs]
        self._flags = [TYPES.get(tensor.code) == "BOOL" for tensor in file.inputs]
        self._outputs = [tensor.place for tensor in file.outputs]
        self._turn, self.is_static = threading.Lock(), file.findings.is_plain
        self._shapes: Sequence[Shape] | None = None
        try:
            self._interpreter = _interpreter(model_content=file.data.tobytes(), num_threads=threads)
            self._resize(shapes)
        except (RuntimeError, ValueError) as error:
            raise LibraryFailed(f"LiteRT rejected the file: {in_words(error)}") from None

    def told(self) -> list[tuple[Shape, int]]:
        """Shape and bytes of each output, for the shapes of inputs that it has now."""
        found = [(tuple(told["shape"].tolist()), told["dtype"]) for told in self._interpreter.get_output_details()]
        return [(shape, math.prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in found]

    def _resize(self, shapes: Sequence[Shape]) -> None:
        self._shapes = None
        for index, shape in zip(self._inputs, shapes, strict=True):
            self._interpreter.resize_tensor_input(index, shape)
        self._interpreter.allocate_tensors()
        self._shapes = shapes

    def run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """One run, after those before it: copies of its outputs. Raises ExecutionFailed, MissedDeadlineTransient."""
        with self._turn:
            check("queued")
            try:
                shapes = tuple(array.shape for array in inputs)
                if shapes != self._shapes:
                    self._resize(shapes)
                for index, array, is_flag in zip(self._inputs, inputs, self._flags, strict=True):
                    self._interpreter.set_tensor(index, array.view(np.uint8) != 0 if is_flag else array)
                self._interpreter.invoke()
                return [self._output(n) for n in range(len(self._outputs))]
            except (RuntimeError, ValueError) as error:
                raise ExecutionFailed(0, "the file", in_words(error)) from None

    def _output(self, number: int) -> NDArray[Any]:
        try:
            found: NDArray[Any] = self._interpreter.get_tensor(self._outputs[number])
        except ValueError:  # of what has no elements, but memory
            told = self._interpreter.get_output_details()[number]
            found = np.empty(told["shape"], told["dtype"])
            if found.size:
                raise
        return found


class InterpretedExecution(BoundExecution):
    """An execution, all of whose arguments are copied."""

    def __init__(
        self,
        program: InterpretedProgram,
        inputs: Sequence[NDArray[Any]],
        outputs: Sequence[NDArray[Any]],
    ) -> None:
        self._program, self._inputs, self._outputs, self._is_cancelled = program, inputs, outputs, False
        self.copied_bytes = sum(array.nbytes for array in inputs)
        known = program.told() if program.is_static else [((), 0) for _ in outputs]
        self.shapes = shapes = tuple((s, nbytes <= m.nbytes) for (s, nbytes), m in zip(known, outputs, strict=True))
        self._is_short = not all(is_sufficient for _, is_sufficient in shapes)

    def run(self) -> None:
        """Run as LiteRtExecution does, but that nothing ends it midway."""
        if self._is_short:
            raise OutputInsufficientSize(tuple(self.shapes))
        if self._is_cancelled:
            raise ExecutionFailed(0, "the file", "it was cancelled")
        found = self._program.run(self._inputs)
        self.shapes = shapes = tuple(
            (array.shape, array.nbytes <= memory.nbytes) for array, memory in zip(found, self._outputs, strict=True)
        )
        if not all(is_sufficient for _, is_sufficient in shapes):
            raise OutputInsufficientSize(shapes)
        for array, memory in zip(found, self._outputs, strict=True):
            memory[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def cancel(self) -> None:
        """All later runs end before they begin."""
        self._is_cancelled = True


def _interpreter(**options: Any) -> Any:
    # Imported only for such files: it takes longer than to load most of them.
    return import_module("ai_edge_litert.interpreter").Interpreter(**options)
