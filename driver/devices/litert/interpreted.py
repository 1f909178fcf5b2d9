"""Files that LiteRT's compiled models do not take, or of which only a run knows the shapes of outputs, and files for
which a program asks for it: the interpreter of LiteRT's package for Python runs them. It copies inputs and outputs, and
cannot be stopped.

A program that asks for an interpreter gets the one that it has itself: `asked` reads the package, the number of threads
and the other options that it makes it with.
"""

from __future__ import annotations

import math
import os
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
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from driver.devices.litert.tflite_file import TfliteOutline

    Shape = tuple[int, ...]

SETTING = "interpreter"
"""The setting of a file by which it is run by an interpreter: an object with any of the options below."""
PACKAGE, RESOLVER, THREADS = "package", "resolver", "num_threads"
PACKAGES = ("ai_edge_litert.interpreter", "tflite_runtime.interpreter", "tensorflow.lite.python.interpreter")
"""The modules that have an interpreter."""
RESOLVERS = ("AUTO", "BUILTIN", "BUILTIN_REF", "BUILTIN_WITHOUT_DEFAULT_DELEGATES")
SWITCHES = (
    "experimental_disable_delegate_clustering",
    "experimental_default_delegate_latest_features",
    "experimental_compress_quantization_zero_points",
    "experimental_disable_delegate_node_fusion",
)
"""Options of an interpreter that are True or False, and have an effect on what it computes."""
MOST_THREADS_ASKED = 256
_ERRORS = (RuntimeError, ValueError, IndexError, OverflowError)
"""The exceptions of C++ that LiteRT lets out, as Python has them."""


class InterpretedProgram:
    """The file in an interpreter, which is resized for each run as needed, and the lock for taking turns.

    is_static: whether the shapes of its outputs are known before it runs.
    """

    def __init__(
        self, file: TfliteOutline, shapes: tuple[Shape, ...], threads: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """Make an interpreter for inputs of these shapes. `options`: those that a program asks for, as SETTING has
        them. Raise LibraryFailed.
        """
        self._inputs = [tensor.place for tensor in file.inputs]
        self._flags = [TYPES.get(tensor.code) == "BOOL" for tensor in file.inputs]
        self._outputs = [tensor.place for tensor in file.outputs]
        self._turn, self.is_static = threading.Lock(), file.findings.is_plain
        self._shapes: Sequence[Shape] | None = None
        try:
            asked = {THREADS: threads} if options is None else options
            self._interpreter = _interpreter(file.content, asked)
            self._resize(shapes)
        except _ERRORS as error:
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
        """Run once, after those before it, and return copies of its outputs. Raise ExecutionFailed,
        MissedDeadlineTransient.
        """
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
            except _ERRORS as error:
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
        """Have all later runs end before they begin."""
        self._is_cancelled = True


def obstacle(options: Any) -> str | None:
    """Return why no interpreter has these options, in the words of a file's setting; None: one may."""
    if not isinstance(options, dict):
        return f"its setting {SETTING!r} is {options!r:.100}, and no object"
    if unknown := options.keys() - {PACKAGE, RESOLVER, THREADS, *SWITCHES}:
        return f"its interpreter has the unknown option {min(unknown)!r:.100}"
    threads, switches = options.get(THREADS, 1), [options.get(name, False) for name in SWITCHES]
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS_ASKED:
        return f"its interpreter has {THREADS} = {threads!r:.100}: from 1 to {MOST_THREADS_ASKED}"
    if options.get(PACKAGE, PACKAGES[0]) not in PACKAGES:
        return f"its interpreter is of {options[PACKAGE]!r:.100}: choose from {', '.join(PACKAGES)}"
    if options.get(RESOLVER, RESOLVERS[0]) not in RESOLVERS:
        return f"its interpreter has the resolver {options[RESOLVER]!r:.100}: choose from {', '.join(RESOLVERS)}"
    return None if all(isinstance(each, bool) for each in switches) else "an option of its interpreter is no boolean"


def _imported(package: str) -> Any:
    """Import an interpreter's package.

    TensorFlow's import asks for a folder to write to, and for Keras's settings: an engine may do neither.
    """
    import tempfile

    tempfile.tempdir = tempfile.tempdir or "/tmp"
    os.environ.setdefault("KERAS_HOME", os.devnull)
    return import_module(package)


def _interpreter(content: bytes, options: Mapping[str, Any]) -> Any:
    # Imported only for such files: it takes longer than to load most of them.
    package = _imported(options.get(PACKAGE, PACKAGES[0]))
    more: dict[str, Any] = {name: value for name, value in options.items() if name in {THREADS, *SWITCHES}}
    if THREADS in more:  # more than processors compute nothing sooner, and use up the threads of the device's account
        more[THREADS] = min(more[THREADS], os.cpu_count() or 1)
    if RESOLVER in options:
        more["experimental_op_resolver_type"] = package.OpResolverType[options[RESOLVER]]
    return package.Interpreter(model_content=content, **more)
