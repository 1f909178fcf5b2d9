"""Models that are .tflite files: LiteRT runs them as they are, on clients' memory.

A file is compiled for each set of input shapes. LiteRT's compiled models run on clients' memory, and can be stopped.
What they do not take, its interpreter runs (interpreted.py), and a file for which a program asks for that.

The state of a file with variables belongs to the prepared model, whose executions take turns.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from burst._core import ffi, lib
from driver.devices.files import CHOOSING, checked_input
from driver.devices.litert.execution import LiteRtExecution, address
from driver.devices.litert.interpreted import InterpretedExecution, InterpretedProgram
from driver.devices.litert.library import MOST_DIMENSIONS, CompiledFile, TensorBuffers, status_text
from driver.devices.litert.program import LiteRtPort, Segment
from driver.devices.litert.tflite_file import TYPES, UNKNOWN, Findings
from driver.devices.litert.weights import aligned
from driver.devices.lowering.errors import LibraryFailed
from driver.interface import BoundExecution, PreparedModel, Saved
from driver.nn import InvalidModel
from driver.nn.file_form import tensor_type

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from driver.devices.litert.packed import Packing
    from driver.devices.litert.tflite_file import DeclaredTensor, FileImage, TfliteOutline
    from driver.devices.lowering.model import ThreadRule
    from driver.interface import BindOptions
    from driver.nn import Model, Operand

    Shape = tuple[int, ...]

_MOST_PROGRAMS = 16
"""The most sets of input shapes for which a file stays compiled."""


class LiteRtFilePort(NamedTuple):
    """An input or output of the file."""

    number: int
    name: str
    type: str
    stored: np.dtype[Any]  #: of an element in memory

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.stored.itemsize

    def bound(self, shape: Shape) -> LiteRtPort:
        """Return it with the shape that it has in a run."""
        nbytes = self.size * math.prod(shape)
        return LiteRtPort(self.number, self.type, shape, nbytes, copied=self.type.lower() in CHOOSING)


class LiteRtFileModel(PreparedModel):
    """A file made ready to run. Its executions take turns."""

    def __init__(
        self,
        model: Model,
        file: TfliteOutline,
        threads: ThreadRule,
        packing: Packing,
        *,
        knows_shapes: bool | None = None,
        interpreter: Mapping[str, Any] | None = None,
    ) -> None:
        """`knows_shapes`: whether all shapes are known before a run, as `saved` has kept it. `interpreter`: options of
        the one that is to run it. Raise InvalidModel, LibraryFailed.
        """
        self._interpreter = interpreter
        self._file, self._threads, self._packing = file, threads(file.findings.work), packing
        if interpreter is None and not (file.findings.has_state or file.findings.loops):
            self.threads = threads.chosen(file.findings.work)
        self._knows_shapes, graph = knows_shapes, model.main
        operands = [graph.operands[i] for i in graph.inputs]
        self.inputs = _ports("input", file.inputs, operands, is_resized=interpreter is not None)
        self.outputs = _ports("output", file.outputs, [graph.operands[i] for i in graph.outputs])
        self._programs: dict[tuple[Shape, ...], FileProgram | InterpretedProgram] = {}
        self._is_open = not all(operand.is_known for operand in operands)
        self.serves_all = interpreter is not None and not file.findings.has_state
        self.is_static = file.findings.is_plain and not self._keeps_interpreter
        if self._is_open:
            self._verify()
        else:
            self.is_static = self._program(tuple(operand.dimensions for operand in operands)).is_static

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | None],
        outputs: Sequence[NDArray[Any]],
        options: BindOptions,
    ) -> BoundExecution:
        given = [_checked(port, array) for port, array in zip(self.inputs, inputs, strict=True)]
        program = self._program(tuple(array.shape for array in given))
        if isinstance(program, FileProgram):
            return LiteRtFileExecution(program, given, outputs, options.loop_timeout)
        return InterpretedExecution(program, given, outputs)

    @property
    def _keeps_interpreter(self) -> bool:
        """True if one interpreter runs it with inputs of any shapes, because it keeps a state."""
        return self._is_open and self._file.findings.has_state

    def _program(self, shapes: tuple[Shape, ...]) -> FileProgram | InterpretedProgram:
        key = () if self._keeps_interpreter else shapes
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            program = self._programs[key] = self._made(shapes)
        return program

    def _made(self, shapes: tuple[Shape, ...]) -> FileProgram | InterpretedProgram:
        if self._interpreter is not None:
            return InterpretedProgram(self._file, shapes, self._threads, self._interpreter)
        if not self._keeps_interpreter and self._is_known(shapes):
            compiled = partial(self._packing.compiled_as, CompiledFile, threads=self._threads)
            with suppress(LibraryFailed):  # the interpreter may take it all the same, and else it says why not
                return FileProgram(self._file, self.inputs, self.outputs, shapes, compiled=compiled)
        return InterpretedProgram(self._file, shapes, self._threads)

    def _verify(self) -> None:
        """Let LiteRT verify all tables of the file. Raise LibraryFailed."""
        shapes = tuple(tensor.shape for tensor in self._file.inputs)
        try:
            CompiledFile.verify(self._file.image(shapes))
        except LibraryFailed:
            InterpretedProgram(self._file, shapes, self._threads)  # which says what is wrong
            raise

    def _is_known(self, shapes: tuple[Shape, ...]) -> bool:
        """Return True if the shapes of all tensors are known before a run with inputs of these shapes, none of them
        empty.
        """
        if not self._file.findings.gives_what_it_makes or any(0 in shape for shape in shapes):
            return False
        if self._file.findings.is_plain:
            return True
        if self._knows_shapes is not None:
            return self._knows_shapes
        try:
            asked = CompiledFile(self._file.image(shapes, is_asked=True), 1)
            return asked.shapes(1) != [UNKNOWN]
        except LibraryFailed:
            return False

    def saved(self, root: NDArray[np.uint8]) -> Saved | None:
        """Return what has been found out about the file. The file itself is read where it lies, and compiled anew."""
        del root
        if self._is_open:
            return None
        return Saved([msgpack.packb([self._file.findings, self.is_static]), b""])

    def rest(self) -> None:
        """Drop all programs but the last one; executions keep those that they are bound to."""
        for shapes in [*self._programs][:-1]:
            self._programs.pop(shapes, None)


def findings(saved: Saved) -> tuple[Findings, bool]:
    """Return what `LiteRtFileModel.saved` has saved: findings, and True if all shapes are known before a run."""
    found, knows_shapes = msgpack.unpackb(saved.model[0])
    return Findings(*found), knows_shapes


class FileProgram:
    """The file compiled for inputs of given shapes, as executions need it, and the lock for taking turns."""

    is_static = True

    def __init__(
        self,
        file: TfliteOutline,
        inputs: Sequence[LiteRtFilePort],
        outputs: Sequence[LiteRtFilePort],
        shapes: Sequence[Shape],
        compiled: Callable[[FileImage], CompiledFile],
    ) -> None:
        """Compile the file for these shapes. Raise LibraryFailed."""
        self.compiled = compiled(file.image(shapes))
        self.shapes = self.compiled.shapes(len(outputs))
        self.inputs = [port.bound(shape) for port, shape in zip(inputs, shapes, strict=True)]
        self.outputs = [port.bound(shape) for port, shape in zip(outputs, self.shapes, strict=True)]
        count = len(inputs)
        self.segments = [Segment([*range(count)], [*range(count, count + len(outputs))], file.findings.loops)]
        self.between, self.turn = TensorBuffers([]), ffi.new("burst_turn *")
        lib.burst_turn_init(self.turn)
        self.compiled.ask(address(ffi.addressof(lib, "burst_foreign_ends")), address(self.turn))


class LiteRtFileExecution(LiteRtExecution):
    """An execution on its memory. Flags are normalised first: a byte from another process may have any value."""

    what = "the file"

    def __init__(
        self,
        program: FileProgram,
        inputs: Sequence[NDArray[Any]],
        outputs: Sequence[NDArray[Any]],
        loop_timeout: float,
    ) -> None:
        self._compiled = program.compiled
        pairs = zip(program.inputs, inputs, strict=True)
        flags = {port.number: array for port, array in pairs if port.type == "BOOL"}
        given = [aligned(a.nbytes).reshape(a.shape) if n in flags else a for n, a in enumerate(inputs)]
        self._flags = [(array.view(np.uint8), given[n].view(np.bool_)) for n, array in flags.items()]
        super().__init__(program, given, outputs, loop_timeout)
        if flags:
            self.native = None

    def run(self) -> None:
        """Run as LiteRtExecution does."""
        for source, target in self._flags:
            np.not_equal(source, 0, target)
        super().run()

    def fault(self, status: int) -> str:
        """Return what the runtime has said, or else the status."""
        return self._compiled.told() or status_text(status)


def _ports(
    what: str, found: Sequence[DeclaredTensor], operands: Sequence[Operand], *, is_resized: bool = False
) -> list[LiteRtFilePort]:
    """Return the inputs or outputs of the file, which have to be those of the model. `is_resized`: whatever their
    sizes. Raise InvalidModel.
    """
    if len(found) != len(operands):
        raise InvalidModel(f"the model has {len(operands)} {what}s, and its .tflite file has {len(found)}")
    is_free = is_resized or what == "output"
    return [
        _port(f"{what} {n} ({t.name[:64]})", (n, t), o, is_free=is_free)
        for n, (t, o) in enumerate(zip(found, operands, strict=True))
    ]


def _port(where: str, place: tuple[int, DeclaredTensor], operand: Operand, *, is_free: bool) -> LiteRtFilePort:
    number, tensor = place
    if tensor.code not in TYPES:
        carried = ", ".join(sorted(map(str.lower, TYPES.values())))
        raise InvalidModel(f"{where}: elements of type {tensor.code} are not carried; {carried} are")
    type_ = TYPES[tensor.code]
    stored = tensor_type(type_.lower(), None).dtype
    if operand.type.dtype != stored:
        raise InvalidModel(f"{where}: the model says {operand.type.name}, but the file has {type_.lower()}")
    declared, own = operand.dimensions, tensor.signature
    if len(declared) > MOST_DIMENSIONS or len(own) > MOST_DIMENSIONS:
        raise InvalidModel(f"{where}: {max(len(declared), len(own))} dimensions; LiteRT has at most {MOST_DIMENSIONS}")
    if not (is_free or not declared or not own) and (
        len(own) != len(declared) or any(s > 0 and d not in {0, s} for s, d in zip(own, declared, strict=True))
    ):
        raise InvalidModel(f"{where}: the model says {list(declared)}, but the file has {list(own)}")
    return LiteRtFilePort(number, tensor.name, type_, stored)


def _checked(port: LiteRtFilePort, array: NDArray[Any] | None) -> NDArray[Any]:
    where = f"input {port.number} ({port.name[:64]})"
    given = checked_input(where, "a .tflite file", array, port.stored)
    if given.ndim > MOST_DIMENSIONS:
        raise ValueError(f"{where}: {given.ndim} dimensions; LiteRT has at most {MOST_DIMENSIONS}")
    return given
