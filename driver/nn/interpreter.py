"""Runs a model on numpy: the definition of every operation, and a useful speed besides.

    Interpreter(model)            once per model: kernels chosen, constant weights transformed
      .bind(inputs, outputs)      once per set of buffers: shapes computed, temporaries allocated, steps built
        .run()                    once per execution: calls the steps

A model is *static* when no shape and no parameter of its operations depends on values that are only known when it runs;
its steps are built by `bind`. The others compute shapes and build steps while they run, operation by operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .calls import match_signature
from .errors import ExecutionFailed, OutputInsufficientSize, OutputShapes
from .model import Model, Operand, Operation
from .operation import LOOP_TIMEOUT, MAX_BYTES, Array, Call, OperationType, Step, Tensor, steers
from .ops import OPERATIONS
from .types import Dimensions, OperandLifeTime, byte_size

_REFUSALS = (ValueError, ArithmeticError, LookupError, MemoryError)
"""What shape functions, kernel builders and numpy raise for values that cannot be computed."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """One operation of the model with all that is known about it before there is any input."""

    index: int
    operation: Operation
    kind: OperationType
    of: int
    slots: tuple[str, ...]
    packed: dict[int, Array]

    def failure(self, error: Exception) -> ExecutionFailed:
        """`error` with the operation that met it."""
        return ExecutionFailed(self.index, self.kind.name, str(error) or type(error).__name__)


class Interpreter:
    """A model made ready to run.

    model: one that `validate` accepted; it is not validated again.
    pace: called after every operation that was prepared, so that a caller with latency to protect can let others run.
    is_static: whether `bind` can build all steps.

    Any number of threads may bind, and run their bindings, at the same time.
    """

    def __init__(
        self, model: Model, pace: Callable[[], Any] | None = None, *, graphs: "dict[int, Interpreter] | None" = None
    ) -> None:
        """`graphs`: subgraphs that were made ready before, by their numbers."""
        self.model = model
        self.is_static = True
        self.constants: dict[int, Tensor] = {}
        self.prepared: list[_Prepared] = []
        self._operands = model.main.operands
        self._graphs: dict[int, Interpreter] = {} if graphs is None else graphs
        for index, operation in enumerate(model.main.operations):
            self.prepared.append(self._prepare(index, operation))
            if pace is not None:
                pace()

    def bind(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array] | None = None,
        pace: Callable[[], Any] | None = None,
        loop_timeout: float = LOOP_TIMEOUT,
    ) -> "Bound | DynamicBound":
        """Tie the model to buffers.

        inputs: arrays of the operands' dtypes and dimensions, None where omitted.
        outputs: writable 1-D uint8 arrays of any length and alignment, apart from each other and from the inputs; what
            they hold beyond the result is left alone. None: the binding's own memory, its `results`.
        pace: called after every operation that was bound.
        loop_timeout: seconds that a WHILE may take.

        Raises `ExecutionFailed` when an operation cannot be computed whatever values the inputs will hold, `ValueError`
        for arrays that do not fit the model.
        """
        frame = partial(_Frame, self, tuple(inputs), outputs, loop_timeout)
        return Bound(self.prepared, frame(), pace) if self.is_static else DynamicBound(self.prepared, frame)

    def _prepare(self, index: int, operation: Operation) -> _Prepared:
        kind = OPERATIONS[operation.type]
        operands = [self._operands[i] for i in operation.inputs]
        signature, slots = match_signature(kind, operands)
        self.is_static = self.is_static and not kind.is_dynamic
        for slot, index_, operand in zip(slots, operation.inputs, operands, strict=True):
            if operand.lifetime.is_constant and index_ not in self.constants:
                self.constants[index_] = Tensor.of(operand)
            if operand.lifetime == OperandLifeTime.SUBGRAPH:
                self.constants[index_] = Tensor(operand.type, (), graph=self._graph(operand.value))
            elif steers(slot):
                self._steer(index_, operand)
        return _Prepared(index, operation, kind, signature.of, slots, self._packed(kind, operation))

    def _graph(self, number: int) -> "Interpreter":
        """A subgraph, made ready once however often the model refers to it."""
        if number not in self._graphs:
            model = replace(self.model, main=self.model.referenced[number])
            self._graphs[number] = Interpreter(model, graphs=self._graphs)
        return self._graphs[number]

    def _packed(self, kind: OperationType, operation: Operation) -> dict[int, Array]:
        """The constant inputs that `kind` wants transformed; none when they make no sense, as the shapes will tell."""
        constants = {i: self.constants[operation.inputs[i]] for i in kind.pack if operation.inputs[i] in self.constants}
        try:
            return {i: kind.pack[i](tensor) for i, tensor in constants.items()}
        except _REFUSALS:
            return {}

    def _steer(self, index: int, operand: Operand) -> None:
        """Note what an operand that steers an operation means for the model."""
        if operand.lifetime.is_constant:
            self.constants[index].keep_values()
        elif operand.lifetime != OperandLifeTime.NO_VALUE:
            self.is_static = False


class _Frame:
    """The tensors of one binding or one dynamic run, filled in operation by operation."""

    def __init__(
        self,
        interpreter: Interpreter,
        inputs: Sequence[Array | None],
        buffers: Sequence[Array] | None,
        loop_timeout: float,
    ) -> None:
        graph = interpreter.model.main
        self._operands, self._outputs, self._loop_timeout = graph.operands, graph.outputs, loop_timeout
        self._buffers = {} if buffers is None else dict(zip(graph.outputs, buffers, strict=True))
        self.tensors: dict[int, Tensor | None] = dict(interpreter.constants)
        for index, array in zip(graph.inputs, inputs, strict=True):
            self.tensors[index] = None if array is None else _input(self._operands[index], array)

    def place(self, prepared: _Prepared) -> list[Step]:
        """Compute the output shapes of one operation, give it output arrays and build its steps."""
        try:
            with np.errstate(all="ignore"):
                return self._place(prepared)
        except _REFUSALS as error:
            raise prepared.failure(error) from error

    def _place(self, prepared: _Prepared) -> list[Step]:
        kind, operation = prepared.kind, prepared.operation
        inputs = [self._read(i, slot, kind) for slot, i in zip(prepared.slots, operation.inputs, strict=True)]
        outputs = [Tensor.of(self._operands[i]) for i in operation.outputs]
        call = Call(inputs, outputs, prepared.packed, loop_timeout=self._loop_timeout)
        shapes, source = kind.shape(call), inputs[prepared.of]
        if len(shapes) != len(outputs):
            raise ValueError(f"{len(outputs)} outputs are declared; it has {len(shapes)}")
        for number, (index, tensor, shape) in enumerate(zip(operation.outputs, outputs, shapes, strict=True)):
            self._define(index, tensor, shape)
            if source is not None:
                self._quantise(index, tensor, kind.quantise(number, source, tensor))
            self.tensors[index] = tensor
        if all(0 not in tensor.shape for tensor in call.outputs):
            kind.build(call)
        return call.steps

    def _read(self, index: int, slot: str, kind: OperationType) -> Tensor | None:
        tensor = self.tensors.get(index)
        if tensor is None:
            if not slot.endswith("?"):
                raise ValueError(f"operand {index} is omitted but needed")
            return None
        if 0 in tensor.shape and not kind.takes_empty and not steers(slot):
            raise ValueError(
                f"operand {index} has dimensions {list(tensor.shape)}, and the operation takes no empty tensor"
            )
        if steers(slot) and tensor.values is None:
            tensor = replace(tensor)
            tensor.keep_values()
        return tensor

    def _define(self, index: int, tensor: Tensor, shape: Dimensions) -> None:
        declared = self._operands[index].dimensions
        if declared and (
            len(declared) != len(shape) or any(d not in (0, s) for d, s in zip(declared, shape, strict=True))
        ):
            raise ValueError(f"output operand {index} is declared {list(declared)} but has dimensions {list(shape)}")
        size = byte_size(tensor.type, shape)
        if size > MAX_BYTES:
            raise ValueError(f"output operand {index} with dimensions {list(shape)} is larger than 4 GiB")
        tensor.shape = tuple(shape)
        buffer = self._buffers.get(index)
        if buffer is None or buffer.nbytes < size:
            tensor.array = np.empty(shape, tensor.type.dtype)
        else:
            tensor.array = buffer[:size].view(tensor.type.dtype).reshape(shape)

    def _quantise(self, index: int, tensor: Tensor, found: tuple[float, int]) -> None:
        scale, zero_point = found
        is_output = self._operands[index].lifetime == OperandLifeTime.SUBGRAPH_OUTPUT
        if is_output and (scale, zero_point) != (tensor.scale, tensor.zero_point):
            raise ValueError(f"output operand {index} has to have scale {scale} and zero point {zero_point}")
        tensor.scale, tensor.zero_point = scale, zero_point

    def results(self) -> list[Tensor]:
        """The outputs."""
        return [tensor for index in self._outputs if (tensor := self.tensors[index]) is not None]

    def shapes(self) -> OutputShapes:
        """Dimensions of every output so far, and whether its buffer is large enough; unknown sizes count as 0."""
        result = []
        for index, buffer in self._buffers.items():
            tensor = self.tensors.get(index)
            dimensions = tensor.shape if tensor is not None else self._operands[index].dimensions
            result.append((dimensions, buffer.nbytes >= byte_size(self._operands[index].type, dimensions)))
        return tuple(result)


def _input(operand: Operand, array: Array) -> Tensor:
    tensor, declared, dtype = Tensor.of(operand), operand.dimensions, operand.type.dtype
    if array.dtype.itemsize != dtype.itemsize:
        raise ValueError(f"input {operand.type.name} got an array of {array.dtype}; give it one of {dtype}")
    if operand.type.is_scalar or declared:
        matches = [d in (0, s) for d, s in zip(declared, array.shape, strict=False)]
        if array.ndim != len(declared) or not all(matches):
            raise ValueError(f"input declared {list(declared)} got an array of dimensions {list(array.shape)}")
    tensor.array, tensor.shape = array if array.dtype == dtype else array.view(dtype), array.shape
    return tensor


class Bound:
    """A static model tied to its buffers.

    run: call it to execute the model once, in one thread at a time; it raises `OutputInsufficientSize` or
        `ExecutionFailed`. A model of one ufunc call, such as ADD, has this call itself as `run`, without a Python frame
        around it: a thread that wants no floating point warnings from it calls `np.seterr(all="ignore")` once.
    shapes: (dimensions, is_sufficient) per output.
    results: the outputs as tensors.
    """

    __slots__ = ("results", "run", "shapes")

    def __init__(self, prepared: Sequence[_Prepared], frame: _Frame, pace: Callable[[], Any] | None) -> None:
        self.run = self._bind(prepared, frame, pace)
        self.shapes, self.results = frame.shapes(), frame.results()

    @staticmethod
    def _bind(prepared: Sequence[_Prepared], frame: _Frame, pace: Callable[[], Any] | None) -> Callable[[], Any]:
        steps: list[Step] = []
        owners: list[_Prepared] = []
        for operation in prepared:
            placed = frame.place(operation)
            steps += placed
            owners += [operation] * len(placed)
            if pace is not None:
                pace()
        if not all(enough for _, enough in frame.shapes()):
            return partial(_refuse, frame.shapes())
        if len(steps) == 1 and isinstance(steps[0].func, np.ufunc):
            return steps[0]  # cannot fail, so that nothing has to stand around it
        return partial(_run_steps, steps, owners)


class DynamicBound:
    """As `Bound`, of a model whose shapes depend on its inputs' values: `shapes` and `results` are exact after a run.

    `run` is a method, because one that is kept in an attribute would be a cycle that only the garbage collector ends.
    """

    __slots__ = ("_frame", "_prepared", "results", "shapes")

    def __init__(self, prepared: Sequence[_Prepared], frame: Callable[[], _Frame]) -> None:
        self._prepared, self._frame = prepared, frame
        self.shapes: OutputShapes = frame().shapes()
        self.results: list[Tensor] = []

    def run(self) -> None:
        """Executes the model once."""
        frame = self._frame()
        for operation in self._prepared:
            steps = frame.place(operation)
            _run_steps(steps, [operation] * len(steps))
        self.shapes, self.results = frame.shapes(), frame.results()
        if not all(enough for _, enough in self.shapes):
            _refuse(self.shapes)


def _run_steps(steps: Sequence[Step], owners: Sequence[_Prepared]) -> None:
    """Call `steps` in order; `owners` are the operations they belong to."""
    done = 0
    try:
        with np.errstate(all="ignore"):
            for step in steps:
                step()
                done += 1
    except _REFUSALS as error:
        raise owners[done].failure(error) from error


def _refuse(shapes: OutputShapes) -> None:
    raise OutputInsufficientSize(shapes)
