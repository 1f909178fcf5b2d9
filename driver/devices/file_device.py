"""Base classes of devices that run model files as they are, and nothing else.

A device is three short classes: `FileDevice` makes a `FileModel`, that makes `FileExecution`s, and these run the file.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.deadlines import check
from driver.devices.files import CHOOSING, NOT_ALONE, checked_input, file_obstacle, packed_obstacle, source_of
from driver.devices.lowering.errors import in_words
from driver.devices.stoppable import StoppableRuns
from driver.interface import BoundExecution, Device, PreparedModel
from driver.nn import ExecutionFailed, InvalidModel, OutputInsufficientSize
from driver.nn.file_form import FILE, FILE_OPERATIONS, file_of, is_file, tensor_type

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from driver.devices.stoppable import Attempt
    from driver.interface import BindOptions, Preparation
    from driver.nn import Model, Operand
    from driver.nn.file_form import ModelFile

    Shape = tuple[int, ...]
    Inputs = Sequence[NDArray[Any] | None]
    Outputs = Sequence[NDArray[np.uint8]]


@contextmanager
def placed(file: ModelFile) -> Iterator[Path]:
    """Yield a path of the file, for a runtime that reads files by their paths; the files beside it are beside it. It is
    valid within the context; pages that the runtime has mapped stay. Raise InvalidModel where their names contradict.
    """
    with TemporaryDirectory(prefix="burst-") as folder, open(os.memfd_create("model"), "wb") as opened:
        path = Path(folder, f"{Path(folder).name}.{file.kind}")
        opened.write(file.data.data)
        opened.flush()
        path.symlink_to(f"/proc/self/fd/{opened.fileno()}")
        for name, data in file.external.items():
            try:
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                with open(Path(folder, name), "xb") as beside:
                    beside.write(data.data)
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise InvalidModel(f"{name!r:.100} cannot be the name of a further file: {error.strerror}") from None
        yield path


class FileDevice(Device):
    """Runs model files as they are, and no operation of the HAL."""

    extensions = (FILE,)
    file_kinds: Collection[str]  #: of files that it runs: "onnx", "tflite"

    @abstractmethod
    def file_model(self, model: Model, file: ModelFile, preparation: Preparation) -> PreparedModel:
        """Return the file, ready to run. Raise InvalidModel, DriverError."""

    def file_obstacle(self, file: ModelFile) -> str | None:
        """Return why it cannot run a file of its kinds, as far as that is known without loading it. Raise
        InvalidModel.
        """
        return None

    def explain(self, model: Model) -> list[str | None]:
        if is_file(model):
            return [packed_obstacle(model) or file_obstacle(model, self.file_kinds, self.file_obstacle)]
        other = f"the device {self.name} runs model files, and no operations"
        return [NOT_ALONE if operation.type in FILE_OPERATIONS else other for operation in model.main.operations]

    def supported_operations(self, model: Model) -> list[bool]:
        return [reason is None for reason in self.explain(model)]

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        file = file_of(model)
        if file is None:
            raise InvalidModel(f"the device {self.name} runs model files, and nothing else")
        return self.file_model(model, file, preparation)


class FilePort(NamedTuple):
    """An input or output of a file.

    dtype: by name, as `driver.nn.file_form.tensor_type` takes it. shape: None where the rank is open, and in it for a
    size that is.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None

    @property
    def stored(self) -> np.dtype[Any]:
        """The numpy dtype of an element in memory: uint16 for bfloat16. Raises InvalidModel."""
        return tensor_type(self.dtype, None).dtype

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.stored.itemsize

    @property
    def static_shape(self) -> Shape | None:
        """The shape; None where it is not known before a run."""
        return None if self.shape is None or None in self.shape else self.shape  # type: ignore[return-value]

    @property
    def chooses(self) -> bool:
        """True if its values may choose an address, a size or a branch: they are in private memory during a run."""
        return self.dtype in CHOOSING

    def nbytes(self, shape: Shape) -> int:
        """Return the bytes of a tensor with this shape."""
        return self.size * math.prod(shape)

    def shape_in(self, operand: Operand) -> Shape | None:
        """Return the shape that every run has, by the file or by the operand of a model; None where it is open."""
        said = tuple(operand.dimensions)
        return said if self.static_shape is None and said and 0 not in said else self.static_shape

    def accepts(self, dimensions: Sequence[int]) -> bool:
        """Return True if a model may say these dimensions of it; 0 is open."""
        if not dimensions or self.shape is None:
            return True
        pairs = zip(dimensions, self.shape, strict=False)
        return len(dimensions) == len(self.shape) and all(not a or b is None or a == b for a, b in pairs)


def check_ports(model: Model, inputs: Sequence[FilePort], outputs: Sequence[FilePort]) -> None:
    """Raise InvalidModel unless the inputs and outputs of a model are those of its file, apart from shapes of outputs:
    files say wrong ones.
    """
    graph = model.main
    for what, ports, numbers in (("input", inputs, graph.inputs), ("output", outputs, graph.outputs)):
        if len(ports) != len(numbers):
            raise InvalidModel(f"the model has {len(numbers)} {what}s, and its file has {len(ports)}")
        for n, (port, operand) in enumerate(zip(ports, [graph.operands[i] for i in numbers], strict=True)):
            said, own = operand.type.name, port.dtype
            if operand.type.dtype == port.stored:
                said, own = str(list(operand.dimensions)), str(port.shape and list(port.shape))
                if what == "output" or port.accepts(operand.dimensions):
                    continue
            raise InvalidModel(f"{what} {n} ({port.name}): the model says {said}, but the file has {own}")


class FileModel(PreparedModel):
    """A file, ready to run.

    is_written: for each output whether the runtime writes it to memory that it is given; else it is copied.
    """

    def __init__(self, model: Model, inputs: Sequence[FilePort], outputs: Sequence[FilePort]) -> None:
        """Check the ports, as `check_ports` does. Raise InvalidModel."""
        check_ports(model, inputs, outputs)
        self.inputs, self.outputs = inputs, outputs
        self.is_static = all(port.static_shape is not None for port in outputs)
        self.is_written: Sequence[bool] = [True] * len(outputs)

    @abstractmethod
    def execution(self, inputs: Inputs, outputs: Outputs) -> FileExecution:
        """Bound to its memory. Raise ValueError."""

    def bind(self, inputs: Inputs, outputs: Outputs, options: BindOptions) -> BoundExecution:
        return self.execution(inputs, outputs)


class FileExecution(BoundExecution):
    """An execution of a file on its memory. A subclass gives `sources` and `targets` to its runtime, and says in
    `begin` and `result` how that runs.

    sources: shape and bytes of each input, as the runtime should read it. targets: the same for each output that the
    runtime should write where the client wants it; None for one that is copied from `result` after each run.
    copied_bytes: of arguments that are not aligned to their elements, that overlap, or that choose, which are the
    `checked_bytes`.
    """

    def __init__(self, model: FileModel, inputs: Inputs, outputs: Outputs) -> None:
        """Take the arguments of `PreparedModel.bind`. Raise ValueError."""
        self._is_static, self._outputs = model.is_static, outputs
        self._before: list[Callable[[], object]] = []
        pairs = zip(model.inputs, inputs, strict=True)
        self.sources = [self._source(number, port, array) for number, (port, array) in enumerate(pairs)]
        self._is_apart = not any(np.may_share_memory(a, b) for _, a in self.sources for b in outputs)
        rows = zip(model.outputs, outputs, model.is_written, strict=True)
        self.targets = [self._target(*row) for row in rows]
        self.shapes = tuple(_expected(*pair) for pair in zip(model.outputs, outputs, strict=True))
        self._runs = StoppableRuns(0, 0.0)

    @abstractmethod
    def begin(self) -> Attempt:
        """Begin one run."""

    @abstractmethod
    def result(self, number: int) -> tuple[Shape, NDArray[np.uint8]]:
        """Shape and bytes of an output after a run."""

    def _source(self, number: int, port: FilePort, array: NDArray[Any] | None) -> tuple[Shape, NDArray[np.uint8]]:
        given = checked_input(f"input {number} ({port.name})", "a model file", array, port.stored)
        place, fill = source_of(given, port.dtype)
        if fill is not None:
            self._before.append(fill)
            self._count(port, place.nbytes)
        return given.shape, place

    def _target(
        self, port: FilePort, memory: NDArray[np.uint8], is_written: bool
    ) -> tuple[Shape, NDArray[np.uint8]] | None:
        shape = port.static_shape
        if shape is None:
            return None
        nbytes = port.nbytes(shape)
        is_usable = nbytes <= memory.nbytes and memory.ctypes.data % port.size == 0
        if self._is_apart and is_written and not port.chooses and is_usable:
            return shape, memory[:nbytes]
        self._count(port, nbytes)
        return None

    def _count(self, port: FilePort, nbytes: int) -> None:
        self.copied_bytes += nbytes
        self.checked_bytes += nbytes if port.chooses else 0

    def run(self) -> None:
        """Execute once. Raise OutputInsufficientSize, ExecutionFailed, MissedDeadlineTransient."""
        if self._is_static:
            self._require_room()
        for fill in self._before:
            fill()
        check("queued")
        if fault := self._runs.run(self.begin, is_long=True):
            raise ExecutionFailed(0, "the file", in_words(fault))
        pairs = zip(self.targets, self.shapes, strict=True)
        self.shapes = tuple(self._copied(n) if target is None else known for n, (target, known) in enumerate(pairs))
        self._require_room()

    def _copied(self, number: int) -> tuple[Shape, bool]:
        shape, found = self.result(number)
        memory = self._outputs[number]
        if found.nbytes <= memory.nbytes:
            np.copyto(memory[: found.nbytes], found)
        return shape, found.nbytes <= memory.nbytes

    def _require_room(self) -> None:
        if not all(is_sufficient for _, is_sufficient in self.shapes):
            raise OutputInsufficientSize(tuple(self.shapes))

    def cancel(self) -> None:
        """End the run in progress, and all later ones, with ExecutionFailed. From any thread."""
        self._runs.cancel()


def _expected(port: FilePort, memory: NDArray[np.uint8]) -> tuple[Shape, bool]:
    shape = port.static_shape
    return shape or (), shape is not None and port.nbytes(shape) <= memory.nbytes
