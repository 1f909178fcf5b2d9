"""What could run where: a model whole on each device that takes it, and cut where that may be faster.

A cut model may have an IF or a WHILE whose graphs run apart, each cut like a model of its own, where no device that has
the whole operation is cheaper: the CPU then decides which of them runs.
"""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, NamedTuple

from driver.client.session import FAILURES
from driver.errors import NotPlaced
from driver.nn import Model, OperandLifeTime
from driver.runtime.capabilities import CPU, Cost
from driver.runtime.local import LocalDevice
from driver.runtime.measuring import can_be_measured
from driver.runtime.partition import CONTROL, Step, choose, is_open, partition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from driver.client.device import RemoteDevice
    from driver.interface import Capabilities
    from driver.nn import Operand, Operation, Subgraph

MOST_STEPS = 4
"""More steps than these a model is not cut into where a device takes all of it: each hands its results over."""
_MOST_NESTED = 16  # graphs inside of graphs that run apart
_ONLY_CONTROL = "only the graphs of IF and WHILE run apart"


class Candidate(NamedTuple):
    """A device, and what is known about it with respect to one model."""

    device: RemoteDevice | LocalDevice
    model: Model  #: in the form that suits the device
    obstacles: list[str | None]  #: why it does not support each operation; None: it does
    capabilities: Capabilities | None


class ExecutionPlan(NamedTuple):
    """A way to run a model: whole on one device, or in steps on several.

    graphs: the plans of referenced subgraphs that run apart, by number. interpreter: the number, in place of a
    device's, of the steps that do no more than choose between them.
    """

    name: str
    model: Model
    steps: Sequence[Step]
    devices: Sequence[RemoteDevice | LocalDevice]  #: by number
    seconds: float  #: estimated from capabilities; of a file 0.0, which means unknown
    graphs: Mapping[int, ExecutionPlan] = {}
    interpreter: int | None = None

    @property
    def where(self) -> list[RemoteDevice | LocalDevice]:
        """The device of each operation."""
        found = {n: self.devices[step.device] for step in self.steps for n in step.operations}
        return [found[n] for n in sorted(found)]

    @property
    def interprets(self) -> bool:
        """True if one of its steps is no device's."""
        return any(step.device == self.interpreter for step in self.steps)


def whole(candidate: Candidate, seconds: float) -> ExecutionPlan:
    """Return the plan with all operations on one device."""
    steps = partition(candidate.model, [0] * len(candidate.model.main.operations))
    return ExecutionPlan(candidate.device.address, candidate.model, steps, [candidate.device], seconds=seconds)


def operations_plans(candidates: Sequence[Candidate], *, by_power: bool) -> list[ExecutionPlan]:
    """Return the plans for candidates that get the same form, the cheapest first. Raise NotPlaced."""
    model, cutter = candidates[0].model, _Cutter(candidates, by_power=by_power)
    pairs = zip(candidates, cutter.rows(model), strict=True)
    plans = [whole(c, sum(row)) for c, row in pairs if not any(c.obstacles)]
    try:
        cut = cutter.cut(model, [c.obstacles for c in candidates])
    except NotPlaced:
        if not plans:
            raise
    else:
        is_short = cut.interprets or len(cut.steps) > 1
        if not plans or (is_short and len(cut.steps) <= MOST_STEPS and _is_sure(cut)):
            plans.append(cut)
    return sorted(plans, key=lambda plan: (plan.seconds, not isinstance(plan.devices[0], LocalDevice)))


def _is_sure(cut: ExecutionPlan) -> bool:
    """Return True if steps are known to be worth it: those that hand on values of open size only where measured."""
    return can_be_measured(cut.model) or not is_open(cut.steps)


class _Cutter:
    """Cuts a model, and first the graphs in it, among these candidates."""

    def __init__(self, candidates: Sequence[Candidate], *, by_power: bool) -> None:
        self._candidates, self._model = candidates, candidates[0].model
        self._costs = [Cost(self._model, c.capabilities, by_power) for c in candidates]
        self._devices = [c.device for c in candidates]
        self._cpu = next((n for n, device in enumerate(self._devices) if isinstance(device, LocalDevice)), None)
        self._graphs: dict[int, ExecutionPlan] = {}
        self._depths: dict[int, int] = {}
        if self._cpu is not None and len(candidates) > 1:
            self._plan_graphs()

    def rows(self, model: Model) -> list[list[float]]:
        """Return what each operation costs on each candidate."""
        return [[cost.of(model.main, operation) for operation in model.main.operations] for cost in self._costs]

    def cut(self, model: Model, obstacles: Sequence[Sequence[str | None]]) -> ExecutionPlan:
        """Return a plan with each operation where it costs least. Raise NotPlaced."""
        rows, devices, interpreter = self.rows(model), [*self._devices], None
        table = dict(zip([device.address for device in devices], obstacles, strict=True))
        apart = [self._apart(model.main, operation) for operation in model.main.operations]
        if any(cost is not None for cost in apart):
            interpreter = len(devices)
            devices.append(devices[self._cpu or 0])
            table["the CPU, apart"] = [_ONLY_CONTROL if cost is None else None for cost in apart]
            rows.append([cost or 0.0 for cost in apart])
        chosen = choose(model, table, rows, self._cpu, interpreter=interpreter)
        steps = partition(model, chosen, interpreter)
        names = [devices[step.device].address for step in steps]
        for step in steps if interpreter is not None else ():
            if step.device == interpreter:
                names += [self._graphs[n].name for n in subgraphs_of(step.model.main, step.model.main.operations[0])]
        name = " + ".join(dict.fromkeys(" + ".join(names).split(" + ")))
        seconds = sum(rows[n][i] for i, n in enumerate(chosen))
        return ExecutionPlan(name, model, steps, devices, seconds=seconds, graphs=self._graphs, interpreter=interpreter)

    def _apart(self, graph: Subgraph, operation: Operation) -> float | None:
        """Return what an IF or WHILE costs whose graphs run apart; None where that brings nothing."""
        if operation.type not in CONTROL or not self._graphs:
            return None
        numbers = subgraphs_of(graph, operation)
        plans = [self._graphs.get(n) for n in numbers]
        found = [plan for plan in plans if plan is not None]
        if len(found) < len(plans) or all(self._is_all_here(plan) for plan in found):
            return None
        if max(self._depths[n] for n in numbers) >= _MOST_NESTED:
            return None
        costs = [plan.seconds for plan in found]
        return CPU.exec_time + (sum(costs) / len(costs) if operation.type == "IF" else sum(costs))

    def _is_all_here(self, plan: ExecutionPlan) -> bool:
        return all(step.device == self._cpu for step in plan.steps)

    def _plan_graphs(self) -> None:
        """Plan each referenced subgraph, after those that it refers to."""
        graphs = self._model.referenced
        refers = {n: {o.value for o in g.operands if _is_subgraph(o)} for n, g in enumerate(graphs)}
        for n in TopologicalSorter(refers).static_order():
            model = Model(graphs[n], graphs if refers[n] else (), relaxed=self._model.relaxed, name=self._model.name)
            self._depths[n] = 1 + max((self._depths[inner] for inner in refers[n]), default=0)
            obstacles = [_explained(device, model) for device in self._devices]
            try:
                plan = self.cut(model, obstacles)
            except NotPlaced:
                continue
            if len(plan.steps) > MOST_STEPS:
                plan = self._on_one(model, obstacles) or plan
            self._graphs[n] = plan

    def _on_one(self, model: Model, obstacles: Sequence[Sequence[str | None]]) -> ExecutionPlan | None:
        """Return the cheapest plan on one device; None: none supports all of it."""
        sums = {n: sum(row) for n, row in enumerate(self.rows(model)) if not any(obstacles[n])}
        if not sums:
            return None
        best = min(sums, key=lambda n: (sums[n], n != self._cpu, n))
        steps = partition(model, [best] * len(model.main.operations))
        return ExecutionPlan(self._devices[best].address, model, steps, self._devices, seconds=sums[best])


def _is_subgraph(operand: Operand) -> bool:
    return operand.lifetime == OperandLifeTime.SUBGRAPH


def subgraphs_of(graph: Subgraph, operation: Operation) -> list[int]:
    """Return the numbers of the subgraphs that an operation refers to."""
    return [graph.operands[i].value for i in operation.inputs if _is_subgraph(graph.operands[i])]


def _explained(device: RemoteDevice | LocalDevice, model: Model) -> list[str | None]:
    """Return why a device does not support the operations of a graph; none, where it cannot tell."""
    try:
        return explained_by(device, model)
    except FAILURES as error:
        return [str(error)] * len(model.main.operations)


def explained_by(device: RemoteDevice | LocalDevice, model: Model) -> list[str | None]:
    """Return why a device does not support each operation of a graph; None: it does. Raise what `explain` raises."""
    found, count = device.explain(model), len(model.main.operations)
    return found if len(found) == count else ["the device gives another number of answers than operations"] * count
