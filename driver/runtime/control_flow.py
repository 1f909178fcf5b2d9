"""IF and WHILE without a device that has them: this process decides which graph runs, on the device that has that.

Each graph that they refer to is prepared once, like a model of its own, whole or in steps, with control flow inside it
again. The results are those of the whole operation: a graph is given the values, and its results are handed on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from burst import (
    ErrorStatus,
    GeneralFailure,
    HardwareBuffer,
    Memory,
    MissedDeadlineTransient,
    OutputShape,
    Result,
    Timing,
)
from burst.messages import Cause
from driver.client.layout import nbytes
from driver.deadlines import check
from driver.engine.binding import loop_timeout_of
from driver.nn import OperandLifeTime
from driver.runtime.launched import total_of
from driver.runtime.performed import PerformedHere, check_wanted
from driver.runtime.plan import PreparedStep, begun, free_everywhere
from driver.runtime.values import PartOfModel, StepValue, Temporaries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from driver.client.executor import Executor
    from driver.client.job import Job
    from driver.nn import Model, Operand


class Graphs:
    """The graphs of a model that run apart: the executor of each, and the prepared steps that it has."""

    def __init__(self) -> None:
        self.executors: dict[int, Executor] = {}
        self.steps: dict[int, Sequence[PreparedStep]] = {}

    def add(self, number: int, executor: Executor, steps: Sequence[PreparedStep]) -> None:
        """Keep a graph, by its number among the model's referenced ones."""
        self.executors[number], self.steps[number] = executor, steps

    def free_memory(self, memory: Memory) -> None:
        """Let the devices of all graphs unmap it."""
        free_everywhere(memory, self.executors.values())

    def close(self) -> None:
        """Free all graphs, once, however many operations refer to them."""
        executors, self.executors = self.executors, {}
        for executor in executors.values():
            executor.close()


class ControlFlow(PerformedHere):
    """A model of one IF or WHILE, of which this process executes nothing but the decision."""

    def __init__(self, model: Model, graphs: Graphs) -> None:
        """Use `graphs`, which may be others' too."""
        super().__init__(model)
        self.graphs, graph = graphs, model.main
        (self._operation,) = graph.operations
        self._is_loop = self._operation.type == "WHILE"
        self._operands = graph.operands
        its = [graph.operands[i] for i in self._operation.inputs]
        self.numbers = [operand.value for operand in its if operand.lifetime == OperandLifeTime.SUBGRAPH]
        parts = {n: PartOfModel(graphs.executors[n].model, graphs.executors[n].perform) for n in self.numbers}
        self._first, self._second = (parts[n] for n in self.numbers)
        self._constants = _constants(dict(zip(self._operation.inputs, its, strict=True)))

    def _perform(self, job: Job) -> Result:
        graph, request = self.model.main, job.request
        values = self._constants | {
            i: StepValue.of(a, request.pools, self._operands[i])
            for i, a in zip(graph.inputs, request.inputs, strict=True)
        }
        written = {
            i: StepValue.of(a, request.pools, self._operands[i])
            for i, a in zip(graph.outputs, request.outputs, strict=True)
        }
        scope = Temporaries(self.rooms)
        places = [written.get(i) for i in self._operation.outputs]
        if self._is_loop:
            result, found = self._loop(job, [values[i] for i in self._operation.inputs[2:]], places)
        else:
            is_true = _is_true(values[self._operation.inputs[0]])
            branch = self._first if is_true else self._second
            result, found = branch.run(job, [values[i] for i in self._operation.inputs[3:]], places, scope)
        if result.status:
            return result
        made = dict(zip(self._operation.outputs, found, strict=True))
        shapes = tuple(OutputShape(made[i].shape, not made[i].is_elsewhere) for i in graph.outputs)
        scope.end()
        is_fit = all(shape.is_sufficient for shape in shapes)
        status = ErrorStatus.NONE if is_fit else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        return Result(status, output_shapes=shapes, timing=result.timing)

    def _loop(
        self, job: Job, state: list[StepValue], places: Sequence[StepValue | None]
    ) -> tuple[Result, list[StepValue]]:
        """Execute a WHILE: its last state, or the first one when there was no round, is copied to the places."""
        timeout, begin, spent = loop_timeout_of(job.request), time.monotonic(), list[Timing]()
        before = Temporaries(self.rooms)  # where the state lies
        while True:
            scope = Temporaries(self.rooms)
            check_wanted()
            job.wait.check("executing")
            result, (flag,) = self._first.run(job, state, [None], scope)
            spent.append(result.timing)
            if result.status or not _is_true(flag):
                break
            check("executing", job.wait.by)
            if time.monotonic() - begin > timeout:
                words = f"a WHILE took longer than its loop timeout of {timeout} s"
                raise MissedDeadlineTransient(words, cause=Cause("executing"))
            result, made = self._second.run(job, state, [None] * len(self._second.outputs), scope)
            spent.append(result.timing)
            if result.status:
                break
            state = [*made, *state[len(made) :]]
            before.end()
            before = scope
        found = list(state[: len(places)])
        if not result.status:
            found = [self._given(n, value, place) for n, (value, place) in enumerate(zip(found, places, strict=True))]
            before.end()
            scope.end()
        result = begun(result) if len(spent) > 1 else result
        return result._replace(timing=total_of(spent)), found

    def _given(self, n: int, value: StepValue, place: StepValue | None) -> StepValue:
        """Return the place with the value copied to it; the value where it is if there is too little room."""
        size = nbytes(self._operands[self._operation.outputs[n]], value.shape)
        if place is None or (place.length < size and not isinstance(place.pool, HardwareBuffer)):
            return value._replace(is_elsewhere=True)
        if isinstance(place.pool, HardwareBuffer):
            raise GeneralFailure("the last state of a WHILE cannot be copied to an image in this process")
        with value.accessed(size) as source, place.accessed(size, writes=True) as target:
            target[:] = source
        return place._replace(shape=value.shape)

    def free_memory(self, memory: Memory) -> None:
        """Let the devices of the graphs unmap it."""
        self.graphs.free_memory(memory)

    def _free(self) -> None:
        """Free the graphs, also those of other operations of the same model."""
        self.rooms.clear()
        self.graphs.close()


def _constants(operands: Mapping[int, Operand]) -> dict[int, StepValue]:
    """Return the values that the model has itself, in memory that devices map, and those that it omits."""
    found = {}
    for i, operand in operands.items():
        if operand.lifetime == OperandLifeTime.NO_VALUE:
            found[i] = StepValue(None)
        elif operand.lifetime.is_constant:
            data = np.ascontiguousarray(operand.value).reshape(-1).view(np.uint8)
            memory = Memory.create(max(1, data.nbytes))
            memory.asarray(np.uint8, data.nbytes)[:] = data
            found[i] = StepValue(memory, 0, data.nbytes, operand.dimensions)
    return found


def _is_true(flag: StepValue) -> bool:
    with flag.accessed(1) as view:
        return bool(view[0])


def inner_steps(step: PreparedStep) -> Iterator[PreparedStep]:
    """Return the steps of the graphs that an IF or WHILE of this step refers to, with those inside of them."""
    waiting = [step]
    while waiting:
        prepared = waiting.pop().model.prepared
        if isinstance(prepared, ControlFlow):
            its = [each for n in dict.fromkeys(prepared.numbers) for each in prepared.graphs.steps[n]]
            waiting += its
            yield from its
