"""Where the data of a model in several steps lies: one memory for inputs and what goes between steps, one for outputs.

What one step writes, the next one reads where it is. So a step's request names the same two pools as every other, and
differs in what it takes from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst import GeneralFailure, Request
from driver.client.buffers import Buffers, Outputs
from driver.client.workspace import InputSet
from driver.nn import Model, Subgraph, combine_dimensions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from burst import Memory, OutputShape, RequestArgument
    from driver.nn import Operand
    from driver.runtime.partition import Step


def between(model: Model, steps: Sequence[Step]) -> tuple[int, ...]:
    """The operands that steps hand to each other, without the model's own outputs."""
    return tuple(sorted({i for step in steps for i in step.outputs}.difference(model.main.outputs)))


def with_temporaries(model: Model, temporaries: Sequence[int]) -> Model:
    """A record that lays `temporaries` out behind the inputs, where a `Buffers` or `InputSet` is made of it."""
    graph = model.main
    return Model(Subgraph(graph.operands, (), (*graph.inputs, *temporaries), graph.outputs))


def arguments(step: Step, where: Mapping[int, RequestArgument]) -> tuple[Any, Any]:
    """Of a step's request: (inputs, outputs). `where`: of each operand that enters or leaves a step."""
    return tuple(where[i] for i in step.inputs), tuple(where[i] for i in step.outputs)


def check_shapes(operands: Sequence[Operand], shapes: Sequence[OutputShape]) -> None:
    """Raises GeneralFailure where a device says other shapes of outputs than the model."""
    for n, (operand, shape) in enumerate(zip(operands, shapes, strict=False)):
        if combine_dimensions(operand.dimensions, shape.dimensions) is None:
            raise GeneralFailure(
                f"the device says that output {n} has shape {shape.dimensions}, and the model {operand.dimensions}"
            )


class StepInputs(InputSet):
    """What a step reads, in memory that others own."""

    def __init__(
        self, memory: Memory, its: tuple[RequestArgument, ...], arrays: tuple[NDArray[Any] | None, ...] = ()
    ) -> None:
        self.memory, self.arguments, self.arrays = memory, its, arrays


class StepOutputs(Outputs):
    """What a step writes, in memory that others own. It has as much room as the model says."""

    def __init__(self, operands: Sequence[Operand], memory: Memory, its: tuple[RequestArgument, ...]) -> None:
        self._operands, self.memory, self.arguments = list(operands), memory, its
        self.sizes = tuple(argument.length for argument in its)
        self.number, self.is_busy, self.encoded = 0, False, {}
        self.shapes, self.given = None, []

    def arrays(self, shapes: Sequence[OutputShape]) -> tuple[NDArray[Any], ...]:
        """None: who reads them knows where they are. Raises GeneralFailure for shapes that contradict the model."""
        if self.shapes is not shapes:
            check_shapes(self._operands, shapes)
            self.shapes = shapes
        return ()


class Aimed(Buffers):
    """The buffers of a step's burst: whatever it was aimed at."""

    def __init__(self) -> None:
        self._known: list[StepOutputs] = []
        self._target: StepOutputs

    def aim(self, inputs: StepInputs, outputs: StepOutputs) -> None:
        """The next request is about these."""
        self.inputs, self._target = inputs, outputs

    def know(self, outputs: StepOutputs) -> None:
        """It will be aimed at."""
        self._known.append(outputs)

    def free_outputs(self) -> Outputs:
        """The target: whether it is free is the chain's concern."""
        return self._target

    def outputs_for(self, inputs: InputSet) -> Outputs:
        """The same."""
        return self._target

    def next_inputs(self) -> None:
        """The chain aims."""

    def give_back(self, inputs: InputSet) -> None:
        """To the chain, which knows."""

    def forget_requests(self) -> None:
        """A new device knows none of them."""
        for outputs in self._known:
            outputs.encoded.clear()

    def grow(self, outputs: Outputs, shapes: tuple[OutputShape, ...]) -> None:
        """There is as much room as the model says, and a device that wants more is wrong."""

    def close(self) -> None:
        """Nobody gets any more."""
        self.forget_requests()
        self._known.clear()


Sets = tuple[StepInputs, StepOutputs]


class Frame:
    """One execution's memory, and every step's part in it."""

    def __init__(
        self, model: Model, temporaries: Sequence[int], steps: Sequence[Step], inputs: InputSet, outputs: Outputs
    ) -> None:
        """`inputs` and `outputs`: laid out for `with_temporaries(model, temporaries)`."""
        graph, n = model.main, len(model.main.inputs)
        where = dict(zip((*graph.inputs, *temporaries), inputs.arguments, strict=True))
        where |= zip(graph.outputs, outputs.arguments, strict=True)
        self.inputs, self.outputs = inputs, outputs
        self.whole = Request(inputs.arguments[:n], outputs.arguments, (inputs.memory, outputs.memory))
        self.sets: list[Sets] = []
        for step in steps:
            reads, writes = arguments(step, where)
            operands = [graph.operands[i] for i in step.outputs]
            self.sets.append((StepInputs(inputs.memory, reads), StepOutputs(operands, outputs.memory, writes)))

    @property
    def is_in_use(self) -> bool:
        """Whether a request that nobody waits for any more is still being executed."""
        return any(outputs.is_busy for _, outputs in self.sets)
