"""A model in steps of which some are open: they tell the sizes of what they hand on only when they have run, or decide
by a value which graph runs. Each step begins when the one before it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst import ErrorStatus, OutputShape, Result, Timing
from driver.client.workspace import output_views
from driver.errors import OutputInsufficientSize
from driver.runtime.control_flow import ControlFlow
from driver.runtime.launched import total_of
from driver.runtime.partition import is_open
from driver.runtime.performed import PerformedHere, check_wanted
from driver.runtime.plan import StepsExecutor, failure_of, free_everywhere
from driver.runtime.values import PartOfModel, StepValue, Temporaries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst import Memory
    from driver.client.job import Job
    from driver.nn import Model
    from driver.runtime.fallback import CpuFallback
    from driver.runtime.plan import PreparedStep


class OpenSteps(PerformedHere):
    """A model in steps, whose values find their places while it runs."""

    def __init__(self, model: Model, steps: Sequence[PreparedStep], fallback: CpuFallback | None) -> None:
        super().__init__(model, fallback)
        self.steps = tuple(steps)
        self._parts = [PartOfModel(step.step.model, step.model.perform) for step in steps]

    def _perform(self, job: Job) -> Result:
        """Execute step by step; end at the first that fails.

        Where an output of the model is too small, the rest is executed all the same, to tell the sizes of all.
        """
        graph, request, scope = self.model.main, job.request, Temporaries(self.rooms)
        sides = ((graph.inputs, request.inputs), (graph.outputs, request.outputs))
        values, places = (
            {i: StepValue.of(a, request.pools, graph.operands[i]) for i, a in zip(*side, strict=True)} for side in sides
        )
        spent = list[Timing]()
        for step, part in zip(self.steps, self._parts, strict=True):
            check_wanted()
            job.wait.check("executing")
            reads = [values[i] for i in step.step.inputs]
            result, made = part.run(job, reads, [places.get(i) for i in step.step.outputs], scope)
            if result.status:
                return failure_of(step, result, is_first=not spent)
            values |= zip(step.step.outputs, made, strict=True)
            spent.append(result.timing)
        shapes = tuple(OutputShape(values[i].shape, not values[i].is_elsewhere) for i in places)
        scope.end()
        if not all(shape.is_sufficient for shape in shapes):
            words = str(OutputInsufficientSize(shapes))
            return Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, output_shapes=shapes, message=words)
        return Result(ErrorStatus.NONE, output_views(self.model, request, shapes), shapes, total_of(spent))

    def free_memory(self, memory: Memory) -> None:
        """Let the devices of all steps unmap it."""
        free_everywhere(memory, [step.model for step in self.steps])

    def _free(self) -> None:
        self.rooms.clear()
        for step in self.steps:
            step.model.close()


def together(model: Model, steps: Sequence[PreparedStep], fallback: CpuFallback | None) -> StepsExecutor | OpenSteps:
    """Return the executor of these steps. `fallback`: what executes the whole model instead, for its bursts."""
    if any(isinstance(step.model.prepared, ControlFlow) for step in steps) or is_open([step.step for step in steps]):
        return OpenSteps(model, steps, fallback)
    return StepsExecutor(model, steps, fallback)


def is_single(steps: Sequence[PreparedStep]) -> bool:
    """Return True if one device has all of the model, so that nothing has to stand before it."""
    return len(steps) == 1 and not isinstance(steps[0].model.prepared, ControlFlow)
