"""The front door: `driver.compile` finds out what each device can do and how fast, cuts the model, and prepares it."""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

from burst import MissedDeadlinePersistent, MissedDeadlineTransient, PeerDied, StatusError
from driver.client.device import RemoteDevice, connect
from driver.client.session import FAILURES
from driver.devices import missing
from driver.devices import names as installed
from driver.devices.files import RUNTIMES
from driver.devices.library.description import absolute
from driver.errors import DeviceFailed, DeviceNotFound, ImportFailed, NotPlaced
from driver.importers.files import loaded
from driver.nn import InvalidModel, validate
from driver.nn.file_form import file_of
from driver.options import Batch, Preference, PrepareOptions, Priority
from driver.runtime import capabilities as measures
from driver.runtime.cache.device import CachedDevice, CompilationCache
from driver.runtime.cache.folder import default_folder
from driver.runtime.compile_options import CompileOptions, Fallback, check_connected, check_words, name_of, only
from driver.runtime.compiled import CompiledModel
from driver.runtime.control_flow import ControlFlow, Graphs, inner_steps
from driver.runtime.fallback import CpuFallback, FallbackExecutor, Fallbacks
from driver.runtime.local import NAME, LocalDevice
from driver.runtime.measuring import MOST_SECONDS, NO_FIGURES, Figures, FigureStore, Load, can_be_measured, seconds_of
from driver.runtime.open_steps import OpenSteps, is_single, together
from driver.runtime.partition import Step, partition
from driver.runtime.plan import PreparedStep
from driver.runtime.planning import Candidate, ExecutionPlan, explained_by, operations_plans, subgraphs_of, whole
from driver.runtime.progress import CompilationClock

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from driver.client.executor import Executor
    from driver.client.surface import AnyPreparedModel
    from driver.interface import Source
    from driver.nn import Model


_MISSED = MissedDeadlinePersistent, MissedDeadlineTransient
_SAME_AS_CPU = "reference"  # in another process, and so never cheaper: used where it is named


def compile(  # noqa: A001 (the name that users look for)
    model: Model | str | os.PathLike[str],
    devices: Sequence[str | RemoteDevice] | None = None,
    preference: Preference = "fast_single_answer",
    priority: Priority = "medium",
    timeout: float | None = None,
    cache_dir: str | Path | Literal[True] | None = None,
    cache_token: bytes | None = None,
    progress: Callable[[str, float], object] | Literal[False] | None = None,
    require_device: str | None = None,
    application: str | None = None,
    device: str | RemoteDevice | None = None,
    name: str | None = None,
    fallback: Fallback = "cpu",
    batch: Batch | None = None,
) -> CompiledModel:
    """Prepare a model on the best of several devices: each executes it a few times, and the fastest gets it.

    It is cut into steps on several devices only where that was measured to be faster, or no device takes all of it.
    Figures are kept for this machine. A model file goes to the runtimes that run it as it is, in operations of the HAL
    to other devices where these are named.

    Args:
        model: is validated first. The path of a model file is loaded, as by `driver.load`.
        devices: names for `driver.connect`, connected devices, and "cpu" for the CPU in this process, in order of
            preference among equals. What they cannot do, or fail to do, falls back to "cpu" only if that is among
            them. By default all that are installed, and "cpu".
        preference: "low_power" chooses by power where all devices' power is known, the others by time.
        priority: "low", "medium" or "high": of its executions, among all of this application on a device.
        timeout: seconds. Each device is told what is left of it; when time is up, what it has begun is given up.
        cache_dir: a folder in which compilations are kept for the next time; True: `burst cache`'s; None keeps none.
        cache_token: 32 bytes that stand for this model, and save the time to hash it; None: its BLAKE3.
        progress: called with what is next, and which part is done, 0 to 1. None: a terminal shows it. False: not.
        require_device: where all of it has to run; nothing falls back then.
        application: as in `driver.connect`, of the connections that this call makes.
        device: the one to use, as `devices=[device]`: nothing is measured, and no other is started.
        name: by which `burst top`, traces, caches and metrics call it; None: its own, which is its file's.
        fallback: where a model goes when the device that was chosen fails to prepare it: "cpu", if that is among the
            devices, or "next", the next best device.
        batch: has executions of several clients run together, for a model whose first dimension is open.

    Raise TypeError for what is no model, InvalidModel, ValueError, DeviceNotFound, NotPlaced, MissedDeadline*, what
    `load` raises, and what a device's `connect` or `prepare` raises where that may not fall back.
    """
    model = loaded(model) if name is None else loaded(model).named(name)
    check_words(preference, priority, fallback)
    devices = only(device, devices, require_device)
    check_connected(application, devices or ())
    names = _candidates(model, devices, require_device)
    may_fall_back, asked = NAME in names and require_device is None, tuple(map(name_of, names))
    folder = default_folder() if cache_dir is True else cache_dir
    any_, prepare = devices is None, PrepareOptions(preference, priority, batch=batch).checked(model)
    options = CompileOptions(model, prepare, asked, require_device, may_fall_back=may_fall_back, takes_any=any_)
    options = options._replace(cache_dir=folder, cache_token=cache_token, application=application, fallback=fallback)
    clock = CompilationClock(timeout, progress)
    with ExitStack() as stack:
        compilation = _Compilation(options, stack, clock, options.cache(clock))
        compiled = compilation.placed_before(names) or compilation.compiled(names)
        stack.pop_all()
    return compiled


_ANY_FILE = "openvino"
"""The device that runs files of every kind. The one of the runtime that a file was made for comes before it."""


def _runtimes_for(model: Model) -> list[str | RemoteDevice]:
    """Return the installed devices that run the file that the model is; none if it is no file."""
    file = file_of(model)
    names = (RUNTIMES[file.kind], _ANY_FILE) if file else ()
    there = installed() if names else ()
    return [name for name in names if name in there and not missing(name)]


def _all_installed() -> list[str | RemoteDevice]:
    return [*(name for name in installed() if name != _SAME_AS_CPU), NAME]


def _candidates(
    model: Model, devices: Sequence[str | RemoteDevice] | None, required: str | None
) -> list[str | RemoteDevice]:
    if devices is None:
        found = _runtimes_for(model)[:1]  # other runtimes compute other bits, and stand in where it fails
        return [required] if required else [*found, NAME] if found else _all_installed()
    if isinstance(devices, str) or not devices:
        raise ValueError(f"devices={devices!r}: give a list of at least one name, or None for all")
    found = [absolute(device) if isinstance(device, str) else device for device in devices]
    if len({name_of(d) for d in found}) < len(found):
        raise ValueError(f"devices={[name_of(d) for d in found]}: a device is named twice")
    return found


class Chosen(NamedTuple):
    """A plan, prepared; without one, the whole model on the CPU."""

    steps: Sequence[PreparedStep]
    plan: ExecutionPlan | None = None


class _Compilation:
    """A call of `compile`."""

    def __init__(
        self, options: CompileOptions, stack: ExitStack, clock: CompilationClock, cache: CompilationCache | None
    ) -> None:
        """Connect nothing yet. `stack`: closes what was opened, if that fails."""
        self._options, self._stack, self._clock, self._fallbacks = options, stack, clock, Fallbacks()
        self._cache, self._given = cache, options.model
        self._own: dict[str, RemoteDevice] = {}  # connections of ours
        self._at = "none in particular"  # that is at work
        self._sources: dict[str, Source] = {}  # of capabilities

    def placed_before(self, names: Sequence[str | RemoteDevice]) -> CompiledModel | None:
        """Return the model on the devices that were chosen the last time, of which none need be asked.

        None: there was no such time, or it does not work any more.
        """
        if self._cache is None:
            return None
        model, place = self._options.model, self._cache.placement(self._options.names, self._options.required)
        chosen = place.read(len(model.main.operations), len(names))
        if chosen is None:
            return None
        prepared: list[PreparedStep] = []
        try:
            devices = {n: self._device(names[n]) for n in sorted(set(chosen))}
            steps = partition(model, chosen)
            for step in steps:
                part = 0.5 + 0.5 * len(prepared) / len(steps)
                prepared.append(self._prepare_step(devices[step.device], step, len(steps), part))
        except (*FAILURES, NotPlaced, DeviceNotFound, InvalidModel) as error:
            _close(prepared)
            if isinstance(error, _MISSED):
                raise
            return None
        return self._finished(prepared)

    def compiled(self, names: Sequence[str | RemoteDevice]) -> CompiledModel:
        """Ask the devices, prepare the plans, and take the fastest; the CPU, if all fail and may fall back."""
        validate(self._options.model)
        try:
            chosen, figures, candidates = self._chosen(names)
        except (*FAILURES, NotPlaced) as error:
            if isinstance(error, _MISSED):
                raise
            chosen, figures, candidates = self._chosen_after(error)
        if chosen.plan is not None:
            self._options = self._options._replace(model=chosen.plan.model)
            self._remember(names, candidates, chosen.plan)
        return self._finished(chosen.steps, figures)

    def _planned(self, names: Sequence[str | RemoteDevice]) -> tuple[list[ExecutionPlan], list[Candidate]]:
        """Return what could run where, the best guess first. Raise NotPlaced with the reasons."""
        options = self._options
        is_file = options.takes_any and bool(options.model.portable)
        # A file whose runtime is there is not imported for others: that takes longer than all the rest.
        asked = [name for name in names if not (is_file and name == NAME)] or names
        candidates = self._asked(asked)
        return self._plans(candidates), candidates

    def _chosen(self, names: Sequence[str | RemoteDevice]) -> tuple[Chosen, Figures, list[Candidate]]:
        plans, candidates = self._planned(names)
        return *self._fastest(plans), candidates

    def _chosen_after(self, refusal: Exception) -> tuple[Chosen, Figures, list[Candidate]]:
        """Place a file that its own runtime does not take: on another one, or as operations. Raise as they do."""
        failed = self._at
        for name in _runtimes_for(self._given)[1:] if self._options.takes_any else ():
            try:
                found = self._chosen([name])
            except (*FAILURES, NotPlaced, DeviceNotFound) as error:
                if isinstance(error, _MISSED):
                    raise
                continue
            self._fallbacks.note("dropped", failed, refusal)
            return found
        plans, candidates = self._planned_as_operations(failed, refusal)
        return *self._fastest(plans), candidates

    def _planned_as_operations(self, failed: str, refusal: Exception) -> tuple[list[ExecutionPlan], list[Candidate]]:
        """Plan a file that none of its runtimes takes, as operations.

        Raise `refusal`, of the device `failed`, where the model has no other form.
        """
        options = self._options
        if not options.takes_any or options.model.portable is None:
            raise refusal
        try:
            self._options = options._replace(model=options.model.portable())
        except (ImportFailed, InvalidModel) as error:
            raise NotPlaced(f"{failed}: {refusal}; and as operations of the HAL: {error}") from refusal
        candidates = self._asked(_all_installed())
        return self._plans(candidates), candidates

    def _fastest(self, plans: Sequence[ExecutionPlan]) -> tuple[Chosen, Figures]:
        """Prepare them, and measure them if that is not known yet. Raise what the last one raised, if all fail."""
        is_blind = any(plan.interprets for plan in plans)  # zeros take one branch, and no round, or rounds for ever
        if len(plans) == 1 or self._chooses_by_power or is_blind or not can_be_measured(plans[0].model):
            return self._first_that_works(plans), NO_FIGURES
        store = FigureStore(self._options.model, [[plan.name for plan in plans], self._versions, self._options.how])
        known, load = store.read(), Load()
        if known is None or (known.was_busy and not known.is_final):
            known = Figures(self._measured(plans), load.is_high, is_final=known is not None)
            store.write(known)
        best = known.seconds
        order = sorted(plans, key=lambda plan: best.get(plan.name, math.inf))
        return self._first_that_works(order), known

    @property
    def _versions(self) -> list[tuple[str, str]]:
        return [(device.address, device.version) for device in self._own.values()]

    def _measured(self, plans: Sequence[ExecutionPlan]) -> dict[str, float]:
        """Return the seconds of one execution of each plan that works."""
        found = {}
        for n, plan in enumerate(plans):
            self._clock.begin(f"measure {plan.name}", 0.5 + 0.3 * n / len(plans))
            left, steps = self._clock.left(), list[PreparedStep]()
            try:
                self._prepare(plan, steps, 0.0)
                most = MOST_SECONDS if left is None else min(MOST_SECONDS, left / 4)
                found[plan.name] = seconds_of(self._together(plan, steps), self._options.prepare.preference, most)
            except (*FAILURES, NotPlaced) as error:
                if isinstance(error, _MISSED):
                    raise
                self._fallbacks.note("dropped", self._at, error)
            finally:
                _close(steps)
        return found

    def _together(self, plan: ExecutionPlan, steps: Sequence[PreparedStep]) -> Executor:
        return steps[0].model.prepared if is_single(steps) else together(plan.model, steps, None)

    def _first_that_works(self, plans: Sequence[ExecutionPlan]) -> Chosen:
        failure: Exception | None = None
        failed = self._at
        for plan in plans:
            steps: list[PreparedStep] = []
            try:
                self._prepare(plan, steps, 0.8)
            except (*FAILURES, NotPlaced) as error:
                _close(steps)
                if isinstance(error, _MISSED) or not self._options.may_try_others:
                    raise
                failure, failed = failure or error, failed if failure else self._at
                if self._options.fallback == "cpu" and not file_of(plan.model):  # no other form of a file is known yet
                    break
                continue
            if failure:
                is_cpu = isinstance(plan.devices[0], LocalDevice)
                self._fallbacks.note("compile" if is_cpu else "dropped", failed, failure)
            return Chosen(steps, plan)
        assert failure is not None
        if not self._options.may_fall_back:
            raise failure
        return Chosen([self._on_cpu(failure)])

    def _prepare(self, plan: ExecutionPlan, steps: list[PreparedStep], done: float) -> None:
        """Add the plan's prepared steps to `steps`."""
        graphs, close = Graphs(), ExitStack()
        with close:
            close.callback(graphs.close)
            for step in plan.steps:
                part = done + (1 - done) * len(steps) / len(plan.steps) if done else 0.5
                if step.device == plan.interpreter:
                    steps.append(self._decided_here(plan, step, graphs, part))
                else:
                    steps.append(self._prepare_step(plan.devices[step.device], step, len(plan.steps), part))
            close.pop_all()

    def _decided_here(self, plan: ExecutionPlan, step: Step, graphs: Graphs, done: float) -> PreparedStep:
        """Prepare the graphs of an IF or WHILE, each once, and return the step that chooses between them."""
        for number in subgraphs_of(step.model.main, step.model.main.operations[0]):
            if number not in graphs.executors:
                self._prepare_graph(plan.graphs[number], number, graphs, done)
        return PreparedStep(step, NAME, FallbackExecutor(ControlFlow(step.model, graphs), None))

    def _prepare_graph(self, plan: ExecutionPlan, number: int, graphs: Graphs, done: float) -> None:
        """Prepare the plan of a referenced subgraph, and add it to `graphs`."""
        steps: list[PreparedStep] = []
        try:
            for step in plan.steps:
                if step.device == plan.interpreter:
                    steps.append(self._decided_here(plan, step, graphs, done))
                else:
                    steps.append(self._prepare_step(plan.devices[step.device], step, 0, done, graph=number + 1))
        except BaseException:
            _close(steps)
            raise
        graphs.add(number, steps[0].model if is_single(steps) else OpenSteps(plan.model, steps, None), steps)

    def _remember(
        self, names: Sequence[str | RemoteDevice], candidates: Sequence[Candidate], plan: ExecutionPlan
    ) -> None:
        """Keep which device runs what, for `placed_before`. Others may have been dropped, so that numbers moved."""
        where = [name_of(name) for name in names]
        if (
            self._cache is None
            or self._given is not plan.model
            or plan.interprets
            or any(c.device.address not in where for c in candidates)
        ):
            return
        chosen = [0] * len(plan.model.main.operations)
        for step in plan.steps:
            for operation in step.operations:
                chosen[operation] = where.index(plan.devices[step.device].address)
        self._cache.placement(self._options.names, self._options.required).write(chosen, plan.model)

    def _finished(self, steps: Sequence[PreparedStep], figures: Figures = NO_FIGURES) -> CompiledModel:
        used = {each.device for step in steps for each in (step, *inner_steps(step))}
        for device in self._own.values():
            if device.address not in used:
                device.close()
        self._clock.begin("compiled", 1.0)
        devices = [device for device in self._own.values() if device.address in used]
        options, recipe = self._options, (compile_again, (self._options._replace(model=self._given),))
        return CompiledModel(
            options.model,
            options.prepare,
            steps,
            devices,
            fallbacks=self._fallbacks,
            figures=figures,
            recipe=recipe,
            may_fall_back=options.may_fall_back,
            capabilities=self._sources,
        )

    def _asked(self, names: Sequence[str | RemoteDevice]) -> list[Candidate]:
        """Return each device, connected, asked for its capabilities if there is a choice, and for its operations."""
        found, unreachable = [], dict[str, Exception]()
        for n, name in enumerate(names):
            self._clock.begin(f"ask {name_of(name)}", 0.5 * n / len(names))
            try:
                found.append(self._candidate(name, measure=len(names) > 1))
            except (*FAILURES, DeviceNotFound) as error:
                is_asked_for = isinstance(error, DeviceNotFound) and not self._options.takes_any
                if is_asked_for or len(names) == 1 or self._options.required:
                    raise
                if isinstance(error, DeviceFailed) and error.is_of_all:
                    unreachable[name_of(name)] = error
                elif not (self._options.takes_any and missing(name_of(name))):
                    self._fallbacks.note("dropped", name_of(name), error)
        if unreachable:  # told once: it is one fault
            self._fallbacks.note("dropped", ", ".join(unreachable), next(iter(unreachable.values())))
        if not found:
            raise NotPlaced(
                f"none of the devices {[name_of(n) for n in names]} can be used: {self._fallbacks.report()}"
            )
        return found

    def _candidate(self, name: str | RemoteDevice, *, measure: bool) -> Candidate:
        device = self._device(name)
        if isinstance(device, RemoteDevice):
            device.check_available()
        try:
            model = self._options.model.form_for(device.extensions)
        except (ImportFailed, InvalidModel) as error:
            return Candidate(device, self._options.model, [str(error)], None)
        obstacles = explained_by(device, model)
        is_of_use = None in obstacles or bool(model.referenced)
        if measure and is_of_use and isinstance(device, RemoteDevice) and not file_of(model):
            capabilities = measures.of(device)
            self._sources[device.address] = capabilities.source
            return Candidate(device, model, obstacles, capabilities)
        return Candidate(device, model, obstacles, None)

    def _device(self, name: str | RemoteDevice) -> RemoteDevice | LocalDevice:
        """Return the device of that name; connect to it once."""
        if name == NAME:
            return LocalDevice()
        if not isinstance(name, str):
            return name
        if name not in self._own:
            self._own[name] = connect(name, application=self._options.application)
            self._stack.callback(self._own[name].close)
        return self._own[name]

    def _plans(self, candidates: Sequence[Candidate]) -> list[ExecutionPlan]:
        """Plan the whole model on each device that takes it, and cut it where that may be faster; the best guess first.

        Raise NotPlaced with the reasons.
        """
        required = self._options.required
        plans = [whole(c, 0.0) for c in candidates if file_of(c.model) and not any(c.obstacles)]
        others = [c for c in candidates if not file_of(c.model)] or ([] if plans else [*candidates])
        if others:
            plans += operations_plans(others, by_power=self._chooses_by_power)
        kept = [plan for plan in plans if required in {None, plan.name}]
        if not kept:
            self._check_required([device.address for device in plans[-1].where], plans[-1].model)
        return kept

    @property
    def _chooses_by_power(self) -> bool:
        remote = [device.address for device in self._own.values()]
        found = [measures.stored(name, self._own[name].version) for name in remote]
        is_low = self._options.prepare.preference == "low_power"
        return is_low and all(one is not None and measures.has_power(one) for one in found)

    def _check_required(self, chosen: Sequence[str], model: Model) -> None:
        required, operations = self._options.required, model.main.operations
        others = [f"{n} ({operations[n].type}) on {name}" for n, name in enumerate(chosen) if name != required]
        if required and others:
            raise NotPlaced(f"require_device={required!r}, but elsewhere would run operation {', '.join(others)}")

    def _prepare_step(
        self, device: RemoteDevice | LocalDevice, step: Step, count: int, done: float, *, graph: int = 0
    ) -> PreparedStep:
        """Prepare a step, one of `count`, of the main subgraph, or of the referenced one `graph` - 1."""
        preference, kept = self._options.prepare.preference, None
        self._at = device.address
        self._clock.begin(f"prepare {len(step.operations)} operations on {device.address}", done)
        prepared: AnyPreparedModel
        if self._cache and isinstance(device, RemoteDevice):
            kept = CachedDevice(device, self._cache, step, is_whole=count == 1, graph=graph)
            prepared = kept.prepare(self._clock.end)
        elif isinstance(device, RemoteDevice):
            terms, end = self._options.prepare, self._clock.end
            batch = terms.batch if count == 1 else None  # a step's outputs are another one's inputs
            prepared = device.prepare(
                step.model, preference=preference, priority=terms.priority, deadline=end, batch=batch
            )
        else:
            prepared = device.prepare(step.model, preference=preference, deadline=self._clock.end)
        executor = prepared.executor
        if executor.remote is None or not self._options.may_fall_back:
            return PreparedStep(step, device.address, FallbackExecutor(executor, None), kept)
        kind = "whole" if count == 1 else "step"
        runtimes = [str(name) for name in _runtimes_for(step.model) if name != device.address]
        fallback = CpuFallback(
            step.model, preference, kind, device.address, fallbacks=self._fallbacks, runtimes=runtimes
        )
        return PreparedStep(step, device.address, FallbackExecutor(executor, fallback), kept)

    def _on_cpu(self, error: Exception) -> PreparedStep:
        """Prepare the whole model after that error. Raise the error where the CPU cannot, either."""
        model = self._options.model
        if file_of(model) or any(LocalDevice().explain(model)):
            raise error
        self._fallbacks.note("compile", self._at, error)
        prepared = LocalDevice().prepare(model, preference=self._options.prepare.preference)
        whole = Step(0, tuple(range(len(model.main.operations))), model, model.main.inputs, outputs=model.main.outputs)
        return PreparedStep(whole, NAME, FallbackExecutor(prepared.executor, None))


def _close(steps: Sequence[PreparedStep]) -> None:
    for step in steps:
        with suppress(PeerDied, StatusError):
            step.model.close()


def compile_again(options: CompileOptions) -> CompiledModel:
    """Compile an unpickled model."""
    names = None if options.takes_any else list(options.names)
    return compile(
        options.model,
        names,
        options.prepare.preference,
        options.prepare.priority,
        cache_dir=options.cache_dir,
        cache_token=options.cache_token,
        require_device=options.required,
        application=options.application,
        fallback=options.fallback,
        batch=options.prepare.batch,
    )
