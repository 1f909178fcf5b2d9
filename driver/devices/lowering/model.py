"""Devices and prepared models that run on a library: models are lowered, and compiled for each set of input shapes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from driver.devices.files import NOT_ALONE, file_obstacle
from driver.devices.lowering.placing import constants, prepared
from driver.interface import Device, PreparedModel
from driver.nn import ExecutionFailed
from driver.nn.file_form import FILE_OPERATIONS, file_of, is_file
from driver.nn.known import explained
from driver.nn.operation import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from driver.devices.lowering.placing import Tensors
    from driver.interface import Preparation, Saved
    from driver.nn import Model, Operand
    from driver.nn.file_form import ModelFile
    from driver.nn.plan import Prepared
    from driver.options import Preference

Shapes = Sequence[tuple[int, ...] | None]
P = TypeVar("P", bound="CompiledProgram")

_MAX_PROGRAMS = 16
"""The most sets of input shapes for which a model stays compiled."""

LEAST_WORK = 50_000
"""Multiply-adds of an execution that may gain by another number of threads."""


@dataclass(frozen=True, slots=True)
class ThreadRule:
    """The rule by which a model gets its number of threads.

    by_work: says how many an execution of so many products should have, as far as that tells. measured: what was found
    to suit the model; 0: nothing was. is_open: nobody has said how many.
    """

    by_work: Callable[[int], int]
    measured: int = 0
    is_open: bool = False

    def __call__(self, work: int) -> int:
        """Return the number for an execution of `work` products."""
        return self.measured or self.by_work(work)

    def chosen(self, work: int) -> int:
        """Return what `PreparedModel.threads` says of such a model."""
        return self(work) if self.is_open and work >= LEAST_WORK else 0


class LoweringDevice(Device, Generic[P]):
    """A device whose models are lowered, and compiled by a library for a number of threads. It may also run files that
    were made for that library as they are; then it knows the extension of files.
    """

    file_kind: str = ""  #: of the files that the library runs
    file_settings: Collection[str] = ()  #: names of the settings that a file may ask for
    leaves_threads_open = False  #: whether nobody has said in how many threads executions run: what is measured counts

    @abstractmethod
    def obstacles(self, model: Model) -> list[str | None]:
        """Return for each operation of a model without extensions why it cannot be lowered; None: it can."""

    def file_obstacle(self, model: Model, file: ModelFile) -> str | None:
        """Return why a file of its kind cannot be run, as far as that is known without the library; None: it can.

        Raise InvalidModel.
        """
        return None

    def file_model(
        self,
        model: Model,
        file: ModelFile,
        pace: Callable[[], object],
        threads: ThreadRule,
        saved: Saved | None = None,
        root: NDArray[np.uint8] | None = None,
    ) -> PreparedModel:
        """Return a model that is a file of its kind; `saved`, `root`: as in `restore`. Raise InvalidModel,
        LibraryFailed.
        """
        raise NotImplementedError

    def explain(self, model: Model) -> list[str | None]:
        if not self.file_kind:
            return explained(model, (), self.obstacles)
        if is_file(model):
            return [file_obstacle(model, {self.file_kind}, partial(self.file_obstacle, model), self.file_settings)]
        pairs = zip(model.main.operations, explained(model, (), self.obstacles), strict=True)
        return [NOT_ALONE if operation.type in FILE_OPERATIONS else reason for operation, reason in pairs]

    def supported_operations(self, model: Model) -> list[bool]:
        return [reason is None for reason in self.explain(model)]

    def _rule(self, preparation: Preparation) -> ThreadRule:
        by_work = partial(self.threads_for, preference=preparation.preference)
        is_open = self.leaves_threads_open and preparation.preference == "fast_single_answer"
        return ThreadRule(by_work, preparation.threads if is_open else 0, is_open)

    @abstractmethod
    def threads_for(self, work: int, preference: Preference = "fast_single_answer") -> int:
        """Return how many an execution of `work` products should have. Clients need processors, too."""

    @abstractmethod
    def restored(self, saved: Saved, root: NDArray[np.uint8], threads: ThreadRule) -> P:
        """Return a program that was lowered before. Raise LibraryFailed."""

    @abstractmethod
    def lowered(
        self, model: Model, pace: Callable[[], object], threads: ThreadRule, program: P | None = None
    ) -> LoweredModel[P]:
        """Return a model, with its program if there is one. Raise LibraryFailed."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepare a model. One whose inputs leave dimensions open is compiled whenever it is bound to new shapes."""
        pace, threads = preparation.pace, self._rule(preparation)
        file = file_of(model)
        return self.file_model(model, file, pace, threads) if file else self.lowered(model, pace, threads)

    def restore(
        self,
        model: Model,
        saved: Saved,
        root: NDArray[np.uint8],
        preparation: Preparation,
    ) -> PreparedModel:
        """Lowered before, so only the library has to compile it."""
        pace, threads = preparation.pace, self._rule(preparation)
        if file := file_of(model):
            return self.file_model(model, file, pace, threads, saved=saved, root=root)
        return self.lowered(model, pace, threads, self.restored(saved, root, threads))


def check_input(number: int, operand: Operand, array: NDArray[Any] | None) -> None:
    """Raise ValueError for an array that does not fit the operand."""
    if array is None:
        return
    declared = operand.dimensions
    if array.dtype.itemsize != operand.type.element_size:
        raise ValueError(f"input {number}: {array.dtype} for {operand.type.name}; give it {operand.type.dtype}")
    fits = len(declared) == array.ndim and all(d in (0, s) for d, s in zip(declared, array.shape, strict=True))
    if 0 in array.shape or (declared and not fits):
        raise ValueError(f"input {number}: dimensions {list(array.shape)} must fit {list(declared)}, and none may be 0")
    if not array.flags.c_contiguous:
        raise ValueError(f"input {number}: strides {array.strides}; it must be C-contiguous")


class CompiledProgram(Protocol):
    """A model compiled for inputs of given shapes."""

    operations: list[str]  #: by the library's names, in order

    def saved(self, root: NDArray[np.uint8]) -> Saved | None:
        """Return what a device needs to restore it; None: it is not worth keeping."""


class LoweredModel(PreparedModel, Generic[P]):
    """Compiled at once if the model tells all input shapes, else when it is bound to a new set of them."""

    def __init__(self, model: Model, pace: Callable[[], object], program: P | None = None) -> None:
        """`program`: a restored one, for the shapes that the model tells. Raise what `compiled` raises."""
        self.model, self._pace = model, pace
        self._programs: dict[tuple[tuple[int, ...] | None, ...], P] = {}
        operands = [model.main.operands[i] for i in model.main.inputs]
        shapes = tuple(operand.dimensions for operand in operands)
        self._is_known = all(operand.is_known for operand in operands)
        if program:
            self._programs[shapes] = program
        elif self._is_known:
            with suppress(ExecutionFailed):  # `bind` will raise it again
                self._program(shapes, pace)

    @cached_property
    def prepared(self) -> list[Prepared]:
        """The operations, with what is known before there are shapes."""
        return prepared(self.model.main, self._pace)

    @cached_property
    def _constants(self) -> Tensors:
        return constants(self.model.main, self._pace)

    @property
    def only_program(self) -> P | None:
        """The program of a model that tells all shapes, if it could be compiled."""
        return next(iter(self._programs.values()), None) if self._is_known else None

    @abstractmethod
    def compiled(self, tensors: Tensors, pace: Callable[[], object]) -> P:
        """Return a program for these constants and inputs, None for omitted ones. Raise ExecutionFailed,
        LibraryFailed.
        """

    def program_for(self, inputs: Sequence[NDArray[Any] | None], pace: Callable[[], object]) -> P:
        """Return the program for inputs of these shapes. Raise ValueError, and as `compiled`."""
        graph = self.model.main
        for number, (index, array) in enumerate(zip(graph.inputs, inputs, strict=True)):
            check_input(number, graph.operands[index], array)
        return self._program([None if a is None else a.shape for a in inputs], pace)

    def saved(self, root: NDArray[np.uint8]) -> Saved | None:
        """Return what `restored` takes: only of a model that tells all shapes."""
        program = self.only_program
        return program.saved(root) if program else None

    def rest(self) -> None:
        """Drop all programs but the last one; executions keep those that they are bound to."""
        for shapes in [*self._programs][:-1]:
            self._programs.pop(shapes, None)

    def operations(self) -> list[str]:
        """Return the library's operations of the program that was compiled last, in order."""
        return [name for program in [*self._programs.values()][-1:] for name in program.operations]

    def _program(self, shapes: Shapes, pace: Callable[[], object]) -> P:
        key = tuple(shapes)
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            tensors = dict(self._constants)
            for index, shape in zip(self.model.main.inputs, shapes, strict=True):
                operand = Tensor.of(self.model.main.operands[index])
                tensors[index] = None if shape is None else replace(operand, shape=shape)
            program = self._programs[key] = self.compiled(tensors, pace)
        return program
