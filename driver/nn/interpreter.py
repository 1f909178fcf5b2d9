"""Runs a model on numpy: the definition of every operation, and a useful speed besides.

    Interpreter(model)            once per model: constant weights transformed, shapes computed, temporaries laid out
      .bind(inputs, outputs)      once per set of buffers: memory allocated, steps built
        .run()                    once per execution: calls the steps

A model is *static* when no shape and no parameter of its operations depends on values that are only known when it runs.
The others compute shapes and build steps while they run, operation by operation.
"""

import operator
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from . import arena
from .blocks import Look, look_nowhere
from .calls import match_signature
from .errors import ExecutionFailed, OutputInsufficientSize, OutputShapes
from .model import Model, Operand, Operation, Subgraph
from .operation import LOOP_TIMEOUT, Array, Call, OperationType, Step, Tensor, steers
from .ops import OPERATIONS
from .plan import REFUSALS, Prepared, StaticPlan, Tensors, guarded, output_shapes
from .types import Dimensions, OperandLifeTime, byte_size

_MAX_PLANS = 16
"""Sets of input shapes that a model's plans are kept for."""

_AT_LEAST, _OFTEN = 1 << 12, 1 << 14
"""The work that an operation counts as, however small it is; and the work after which there is a look between two."""


class Interpreter:
    """A model made ready to run.

    model: one that `validate` accepted; it is not validated again.
    pace: called after every operation that was prepared, so that a caller with latency to protect can let others run.
    is_static: whether `bind` can build all steps.

    Any number of threads may bind, and run their bindings, at the same time.
    """

    def __init__(
        self,
        model: Model,
        pace: Callable[[], Any] | None = None,
        graphs: "dict[int, Interpreter] | None" = None,
    ) -> None:
        """`graphs`: for a subgraph: those of its model that were made ready, by their numbers."""
        self.model, self.is_subgraph = model, graphs is not None
        self.is_static = True
        self.constants: Tensors = {}
        self._plans: dict[tuple[Dimensions | None, ...], StaticPlan] = {}
        self.prepared: list[Prepared] = []
        self._operands = model.main.operands
        self._graphs: dict[int, Interpreter] = {} if graphs is None else graphs
        for index, operation in enumerate(model.main.operations):
            self.prepared.append(self._prepare(index, operation))
            if pace is not None:
                pace()
        self._declared = {i: Tensor.of(self._operands[i]) for i in model.main.inputs}
        self._plan_ahead(pace)

    def bind(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array] | None = None,
        pace: Callable[[], Any] | None = None,
        loop_timeout: float = LOOP_TIMEOUT,
        look: Look = look_nowhere,
    ) -> "Bound | DynamicBound":
        """Tie the model to buffers.

        inputs: arrays of the operands' dtypes and dimensions, None where omitted.
        outputs: writable 1-D uint8 arrays of any length and alignment, apart from each other and from the inputs; what
            they hold beyond the result is left alone. None: the binding's own memory, its `results`.
        pace: called after every operation that was bound.
        loop_timeout: seconds that a WHILE may take.
        look: called every few milliseconds while the model runs, between operations and inside of long ones, in the
            thread that runs it. What it raises ends the execution. It is not called for a model of one short call.

        Raise `ExecutionFailed` when an operation cannot be computed whatever values the inputs will hold, `ValueError`
        for arrays that do not fit the model.
        """
        arrays = dict(zip(self.model.main.inputs, inputs, strict=True))
        tensors = {i: None if a is None else _input(self._declared[i], a) for i, a in arrays.items()}
        buffers = {} if outputs is None else dict(zip(self.model.main.outputs, outputs, strict=True))
        if self.is_static:
            return Bound(self, self._plan_for(tensors, pace), tensors, buffers, pace=pace, look=look)
        return DynamicBound(self, tensors, buffers, loop_timeout, look=look)

    def _plan_for(self, inputs: Tensors, pace: Callable[[], Any] | None) -> StaticPlan:
        """Return the plan for inputs of these shapes."""
        key = tuple([None if tensor is None else tensor.shape for tensor in inputs.values()])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            shapes = {i: None if t is None else replace(t, array=None) for i, t in inputs.items()}
            tensors = self.constants | shapes
            plan = self._plans[key] = StaticPlan(self.prepared, self.model.main, tensors, pace or _at_once)
        return plan

    def _plan_ahead(self, pace: Callable[[], Any] | None) -> None:
        """Make the plan that will be needed, if the model tells all shapes. What cannot be computed, `bind` refuses."""
        inputs: Tensors = dict(self._declared)
        is_known = all(t and (t.type.is_scalar or (t.shape and 0 not in t.shape)) for t in inputs.values())
        if self.is_static and is_known:
            with suppress(ExecutionFailed):
                self._plan_for(inputs, pace)

    def _prepare(self, index: int, operation: Operation) -> Prepared:
        kind = OPERATIONS[operation.type]
        operands = [self._operands[i] for i in operation.inputs]
        signature, slots = match_signature(kind, operands)
        self.is_static = self.is_static and not kind.is_dynamic
        for slot, index_, operand in zip(slots, operation.inputs, operands, strict=True):
            if operand.lifetime.is_constant and index_ not in self.constants:
                self.constants[index_] = Tensor.of(operand)
            if operand.lifetime == OperandLifeTime.SUBGRAPH:
                self.constants[index_] = Tensor(operand.base_type, (), graph=self._graph(operand.value))
            elif steers(slot):
                self._steer(index_, operand)
        return Prepared(index, operation, kind, signature.of, slots=slots, packed=self._packed(kind, operation))

    def _graph(self, number: int) -> "Interpreter":
        """Return a subgraph, made ready once however often the model refers to it."""
        if number not in self._graphs:
            model = replace(self.model, main=self.model.referenced[number])
            self._graphs[number] = Interpreter(model, graphs=self._graphs)
        return self._graphs[number]

    def _packed(self, kind: OperationType, operation: Operation) -> dict[int, Array]:
        """Return the constant inputs that `kind` wants transformed; none when they make no sense, as the shapes will
        tell.
        """
        constants = {i: self.constants.get(operation.inputs[i]) for i in kind.pack if i < len(operation.inputs)}
        try:
            return {i: kind.pack[i](tensor) for i, tensor in constants.items() if tensor is not None}
        except REFUSALS:
            return {}

    def _steer(self, index: int, operand: Operand) -> None:
        """Note what an operand that steers an operation means for the model."""
        if operand.lifetime.is_constant:
            tensor = self.constants[index]
            assert tensor is not None
            tensor.keep_values()
        elif operand.lifetime != OperandLifeTime.NO_VALUE:
            self.is_static = False


def _at_once() -> None:
    """Return without a pause."""


def _input(its: Tensor, array: Array) -> Tensor:
    """Return an input as its operand declares it, with this array. Raise ValueError for one that does not fit."""
    declared, dtype = its.shape, its.type.stored_dtype
    if array.dtype.itemsize != dtype.itemsize:
        raise ValueError(f"input {its.type.name} got an array of {array.dtype}; give it one of {dtype}")
    if array.shape != declared and (its.type.is_scalar or declared):
        matches = [d in (0, s) for d, s in zip(declared, array.shape, strict=False)]
        if array.ndim != len(declared) or not all(matches):
            raise ValueError(f"input declared {list(declared)} got an array of dimensions {list(array.shape)}")
    return replace(its, array=array if array.dtype == dtype else array.view(dtype), shape=array.shape)


def _results(graph: Subgraph, tensors: Tensors) -> list[Tensor]:
    return [tensor for i in graph.outputs if (tensor := tensors[i]) is not None]


def _output(tensor: Tensor, buffer: Array | None) -> Array:
    """Return the array of an output in its buffer; in memory of its own if there is none, or it does not suffice.

    That is counted before it is taken: its size may come from the value of an input. Raise as `arena.memory`.
    """
    size = byte_size(tensor.type, tensor.shape)
    if buffer is None or buffer.nbytes < size:
        buffer = arena.memory(size)
    return buffer[:size].view(tensor.type.stored_dtype).reshape(tensor.shape)


class Bound:
    """A static model tied to its buffers.

    run: call it to execute the model once, in one thread at a time; it raises `OutputInsufficientSize` or
        `ExecutionFailed`. A model of one ufunc call, such as ADD, has this call itself as `run`, without a Python frame
        around it: a thread that wants no floating point warnings from it calls `np.seterr(all="ignore")` once.
    shapes: (dimensions, is_sufficient) per output.
    results: the outputs as tensors.
    """

    __slots__ = ("results", "run", "shapes")

    def __init__(
        self,
        interpreter: Interpreter,
        plan: StaticPlan,
        tensors: Tensors,
        buffers: dict[int, Array],
        pace: Callable[[], Any] | None,
        look: Look,
    ) -> None:
        graph = interpreter.model.main
        self.shapes = output_shapes(graph.outputs, buffers, graph.operands, plan.tensors)
        self.results: list[Tensor] = []
        self.run: Callable[[], Any] = partial(_refuse, self.shapes)
        if all(enough for _, enough in self.shapes):
            tensors = interpreter.constants | tensors
            self.run = _bound(interpreter, plan, tensors, buffers, pace=pace, look=look)
            self.results = _results(graph, tensors)


def _bound(
    interpreter: Interpreter,
    plan: StaticPlan,
    tensors: Tensors,
    buffers: dict[int, Array],
    pace: Callable[[], Any] | None,
    look: Look,
) -> Callable[[], Any]:
    """Return the steps of all operations as one call; add their results to `tensors`."""
    steps: list[Step] = []
    owners: list[Prepared] = []
    scratch, block = arena.Scratch(), _block(interpreter.prepared[0], plan.nbytes)
    work = _OFTEN if interpreter.is_subgraph else 0
    for prepared in interpreter.prepared:
        scratch.begin()
        call = Call([], packed=prepared.packed, memory=scratch, look=look, work=work)
        if work >= _OFTEN:
            call.add_look()
        guarded(prepared, partial(_build, prepared, call, plan, block, tensors=tensors, buffers=buffers))
        steps += call.steps
        owners += [prepared] * len(call.steps)
        work = call.work + _AT_LEAST
        if pace is not None:
            pace()
    if len(steps) == 1 and isinstance(steps[0].func, np.ufunc):
        return steps[0]  # cannot fail, so that nothing has to stand around it
    return partial(_run_steps, steps, owners)


def _block(first: Prepared, nbytes: int) -> Array:
    """Memory for the temporaries. Raise ExecutionFailed."""
    try:
        return arena.memory(nbytes)
    except MemoryError:
        raise first.failure(MemoryError(f"{nbytes} bytes for temporaries are not to be had")) from None


def _build(
    prepared: Prepared, call: Call, plan: StaticPlan, block: Array, *, tensors: Tensors, buffers: dict[int, Array]
) -> None:
    """Give one operation its inputs, and its outputs their places, and build its kernel."""
    call.outputs = [_planned(plan, i, block, buffers) for i in prepared.operation.outputs]
    tensors.update(zip(prepared.operation.outputs, call.outputs, strict=True))
    call.inputs = prepared.inputs(tensors)
    prepared.build(call)


def _planned(plan: StaticPlan, index: int, block: Array, buffers: dict[int, Array]) -> Tensor:
    """Return an output of an operation, in its place."""
    tensor = plan.tensors[index]
    assert tensor is not None
    buffer = block[plan.places[index] :] if index in plan.places else buffers.get(index)
    return replace(tensor, array=_output(tensor, buffer))


class DynamicBound:
    """A `Bound` of a model whose shapes depend on its inputs' values: `shapes` and `results` are exact after a run.

    `run` is a method, because one that is kept in an attribute would be a cycle that only the garbage collector ends.
    """

    __slots__ = ("_buffers", "_inputs", "_interpreter", "_look", "_loop_timeout", "results", "shapes")

    def __init__(
        self, interpreter: Interpreter, inputs: Tensors, buffers: dict[int, Array], loop_timeout: float, look: Look
    ) -> None:
        self._interpreter, self._inputs, self._buffers = interpreter, inputs, buffers
        self._loop_timeout, self._look = loop_timeout, look
        self.results: list[Tensor] = []
        self.shapes = self._shapes(inputs)

    def run(self) -> None:
        """Execute the model once. Ends at an operation whose output does not fit its buffer."""
        tensors = self._interpreter.constants | self._inputs
        scratch, look = arena.Scratch(), self._look
        for prepared in self._interpreter.prepared:
            look()
            scratch.begin()
            call = Call([], packed=prepared.packed, memory=scratch, loop_timeout=self._loop_timeout, look=look)
            guarded(prepared, partial(self._place, prepared, call, tensors))
            _run_steps(call.steps, [prepared] * len(call.steps))
        self.shapes = self._shapes(tensors)
        self.results = _results(self._interpreter.model.main, tensors)

    def _place(self, prepared: Prepared, call: Call, tensors: Tensors) -> None:
        operands, written = self._interpreter.model.main.operands, prepared.operation.outputs
        call.inputs, call.outputs = prepared.inputs(tensors), [Tensor.of(operands[i]) for i in written]
        prepared.place(call, operands)
        tensors.update(zip(written, call.outputs, strict=True))
        self.shapes = self._shapes(tensors)
        if not all(enough for _, enough in self.shapes):
            _refuse(self.shapes)
        for index, tensor in zip(written, call.outputs, strict=True):
            tensor.array = _output(tensor, self._buffers.get(index))
        prepared.build(call)

    def _shapes(self, tensors: Tensors) -> OutputShapes:
        graph = self._interpreter.model.main
        return output_shapes(graph.outputs, self._buffers, graph.operands, tensors)


def _run_steps(steps: Sequence[Step], owners: Sequence[Prepared]) -> None:
    """Call `steps` in order; `owners` are the operations they belong to."""
    left = iter(steps)
    try:
        with np.errstate(all="ignore"):
            deque(map(operator.call, left), maxlen=0)  # a loop without a line of Python
    except REFUSALS as error:
        raise owners[len(steps) - operator.length_hint(left) - 1].failure(error) from error


def _refuse(shapes: OutputShapes) -> None:
    raise OutputInsufficientSize(shapes)
