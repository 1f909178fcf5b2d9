"""The front door: `driver.compile` finds out what each device can do and how fast, cuts the model, and prepares it."""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

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
from driver.options import Preference, PrepareOptions, Priority, check_application
from driver.runtime import capabilities as measures
from driver.runtime.cache.device import CachedDevice, CompilationCache
from driver.runtime.cache.folder import default_folder
from driver.runtime.compiled import CompiledModel
from driver.runtime.fallback import CpuFallback, FallbackExecutor, Fallbacks
from driver.runtime.local import NAME, LocalDevice, LocalPrepared
from driver.runtime.measuring import MOST_SECONDS, NO_FIGURES, Figures, FigureStore, Load, can_be_measured, seconds_of
from driver.runtime.partition import Step, choose, partition
from driver.runtime.plan import PreparedStep, StepsExecutor
from driver.runtime.progress import CompilationClock

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from driver.client.executor import Executor
    from driver.client.prepared_model import RemotePreparedModel
    from driver.interface import Capabilities, Source
    from driver.nn import Model


_MISSED = MissedDeadlinePersistent, MissedDeadlineTransient
MOST_STEPS = 4
"""More steps than these a model is not cut into where a device takes all of it: each hands its results over."""
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
        cache_token: 32 bytes that stand for this model, and save the time to hash it; None: its SHA-256.
        progress: called with what is done next, and which part of the whole is done, from 0 to 1. None: shown in a
            terminal when it takes more than a second. False: not shown.
        require_device: where all of it has to run; nothing falls back then.
        application: as in `driver.connect`, of the connections that this call makes.
        device: the one to use, as `devices=[device]`: nothing is measured, and no other is started.
        name: by which `burst top`, traces, caches and metrics call it; None: its own, which is its file's.

    Raises TypeError for what is no model, InvalidModel, ValueError, DeviceNotFound, NotPlaced, MissedDeadline*, what
    `load` raises, and what a device's `connect` or `prepare` raises where that may not fall back.
    """
    model = loaded(model) if name is None else loaded(model).named(name)
    _check_words(preference, priority)
    if cache_token is not None and cache_dir is None:
        raise ValueError("cache_token needs a cache_dir; give both or neither")
    if device is not None and (devices is not None or require_device is not None):
        raise ValueError(f"device={_name(device)!r}: give it alone, without devices and require_device")
    devices = devices if device is None else [device]
    _check_application(application, devices or ())
    names = _candidates(model, devices, require_device)
    may_fall_back = NAME in names and require_device is None
    asked, folder = tuple(map(_name, names)), default_folder() if cache_dir is True else cache_dir
    any_, prepare = devices is None, PrepareOptions(preference, priority)
    options = CompileOptions(model, prepare, asked, require_device, may_fall_back=may_fall_back, takes_any=any_)
    options = options._replace(cache_dir=folder, cache_token=cache_token, application=application)
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
    if len({_name(d) for d in found}) < len(found):
        raise ValueError(f"devices={[_name(d) for d in found]}: a device is named twice")
    return found


def _check_words(preference: Preference, priority: Priority) -> None:
    """Raise ValueError for a word that is not allowed."""
    for name, value, allowed in (("preference", preference, Preference), ("priority", priority, Priority)):
        if value not in get_args(allowed):
            raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, get_args(allowed)))}")


def _check_application(application: str | None, devices: Sequence[str | RemoteDevice]) -> None:
    """Raise InvalidArgument for what is no name, ValueError where there are connections of another."""
    if application is None:
        return
    check_application(application)
    if connected := [device.address for device in devices if not isinstance(device, str)]:
        raise ValueError(
            f"application={application!r}: device {connected[0]!r} is connected already; give the application to "
            "driver.connect, or name the device"
        )


def _name(device: str | RemoteDevice | LocalDevice) -> str:
    return device if isinstance(device, str) else device.address


class CompileOptions(NamedTuple):
    """The terms of a call of `compile`."""

    model: Model
    prepare: PrepareOptions  #: of each step; its deadline is the clock's
    names: tuple[str, ...]
    required: str | None
    may_fall_back: bool
    takes_any: bool  #: that is installed, and works
    cache_dir: str | Path | None = None
    cache_token: bytes | None = None
    application: str | None = None

    @property
    def how(self) -> list[str]:
        """The terms that change how fast it runs."""
        return [self.prepare.preference, self.prepare.priority]

    def cache(self, clock: CompilationClock) -> CompilationCache | None:
        """Return the cache where compilations are kept. Raises ValueError."""
        if self.cache_dir is None:
            return None
        wait = partial(clock.note, "wait for another process that compiles the same")
        return CompilationCache.of(
            self.cache_dir, self.cache_token, self.model, self.prepare, wait=wait, patience=clock.left
        )


class _Candidate(NamedTuple):
    """A device, and what is known about it with respect to one model."""

    device: RemoteDevice | LocalDevice
    model: Model  #: in the form that suits the device
    obstacles: list[str | None]  #: why it does not support each operation; None: it does
    capabilities: Capabilities | None


class ExecutionPlan(NamedTuple):
    """A way to run a model: whole on one device, or in steps on several."""

    name: str
    model: Model
    steps: Sequence[Step]
    devices: Sequence[RemoteDevice | LocalDevice]  #: by number
    seconds: float  #: estimated from capabilities; of a file 0.0, which means unknown

    @property
    def where(self) -> list[RemoteDevice | LocalDevice]:
        """The device of each operation."""
        found = {n: self.devices[step.device] for step in self.steps for n in step.operations}
        return [found[n] for n in sorted(found)]


class Chosen(NamedTuple):
    """A plan, prepared; without one, the whole model on the CPU."""

    steps: Sequence[PreparedStep]
    plan: ExecutionPlan | None = None


def _whole(candidate: _Candidate, seconds: float) -> ExecutionPlan:
    steps = partition(candidate.model, [0] * len(candidate.model.main.operations))
    return ExecutionPlan(candidate.device.address, candidate.model, steps, [candidate.device], seconds=seconds)


def _cut(candidates: Sequence[_Candidate], rows: Sequence[Sequence[float]]) -> ExecutionPlan:
    """Return a plan with each operation where it costs least. Raises NotPlaced."""
    model, devices = candidates[0].model, [c.device for c in candidates]
    cpu = next((n for n, device in enumerate(devices) if isinstance(device, LocalDevice)), None)
    chosen = choose(model, {c.device.address: c.obstacles for c in candidates}, rows, cpu)
    steps = partition(model, chosen)
    name = " + ".join(dict.fromkeys(devices[step.device].address for step in steps))
    return ExecutionPlan(name, model, steps, devices, seconds=sum(rows[n][i] for i, n in enumerate(chosen)))


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
            chosen, figures, candidates = self._instead(error)
        if chosen.plan is not None:
            self._options = self._options._replace(model=chosen.plan.model)
            self._remember(names, candidates, chosen.plan)
        return self._finished(chosen.steps, figures)

    def _planned(self, names: Sequence[str | RemoteDevice]) -> tuple[list[ExecutionPlan], list[_Candidate]]:
        """Return what could run where, the best guess first. Raises NotPlaced with the reasons."""
        options = self._options
        is_file = options.takes_any and bool(options.model.portable)
        # A file whose runtime is there is not imported for others: that takes longer than all the rest.
        asked = [name for name in names if not (is_file and name == NAME)] or names
        candidates = self._asked(asked)
        return self._plans(candidates), candidates

    def _chosen(self, names: Sequence[str | RemoteDevice]) -> tuple[Chosen, Figures, list[_Candidate]]:
        plans, candidates = self._planned(names)
        return *self._fastest(plans), candidates

    def _instead(self, refusal: Exception) -> tuple[Chosen, Figures, list[_Candidate]]:
        """Place a file that its own runtime does not take: on another one, or as operations. Raises as they do."""
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

    def _planned_as_operations(self, failed: str, refusal: Exception) -> tuple[list[ExecutionPlan], list[_Candidate]]:
        """Plan a file that none of its runtimes takes, as operations.

        Raises `refusal`, of the device `failed`, where the model has no other form.
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
        """Prepare them, and measure them if that is not known yet. Raises what the last one raised, if all fail."""
        if len(plans) == 1 or self._chooses_by_power or not can_be_measured(plans[0].model):
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
        return steps[0].model.prepared if len(steps) == 1 else StepsExecutor(plan.model, steps, None)

    def _first_that_works(self, plans: Sequence[ExecutionPlan]) -> Chosen:
        failure: Exception | None = None
        failed = self._at
        for plan in plans:
            steps: list[PreparedStep] = []
            try:
                self._prepare(plan, steps, 0.8)
            except (*FAILURES, NotPlaced) as error:
                _close(steps)
                if isinstance(error, _MISSED) or not self._options.may_fall_back:
                    raise
                failure, failed = failure or error, failed if failure else self._at
                continue
            if failure:
                is_cpu = isinstance(plan.devices[0], LocalDevice)
                self._fallbacks.note("compile" if is_cpu else "dropped", failed, failure)
            return Chosen(steps, plan)
        assert failure is not None
        return Chosen([self._on_cpu(failure)])

    def _prepare(self, plan: ExecutionPlan, steps: list[PreparedStep], done: float) -> None:
        """Add the plan's prepared steps to `steps`."""
        for step in plan.steps:
            part = done + (1 - done) * len(steps) / len(plan.steps) if done else 0.5
            steps.append(self._prepare_step(plan.devices[step.device], step, len(plan.steps), part))

    def _remember(
        self, names: Sequence[str | RemoteDevice], candidates: Sequence[_Candidate], plan: ExecutionPlan
    ) -> None:
        """Keep which device runs what, for `placed_before`. Others may have been dropped, so that numbers moved."""
        where = [_name(name) for name in names]
        if (
            self._cache is None
            or self._given is not plan.model
            or any(c.device.address not in where for c in candidates)
        ):
            return
        chosen = [0] * len(plan.model.main.operations)
        for step in plan.steps:
            for operation in step.operations:
                chosen[operation] = where.index(plan.devices[step.device].address)
        self._cache.placement(self._options.names, self._options.required).write(chosen, plan.model)

    def _finished(self, steps: Sequence[PreparedStep], figures: Figures = NO_FIGURES) -> CompiledModel:
        used = {step.device for step in steps}
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

    def _asked(self, names: Sequence[str | RemoteDevice]) -> list[_Candidate]:
        """Return each device, connected, asked for its capabilities if there is a choice, and for its operations."""
        found, unreachable = [], dict[str, Exception]()
        for n, name in enumerate(names):
            self._clock.begin(f"ask {_name(name)}", 0.5 * n / len(names))
            try:
                found.append(self._candidate(name, measure=len(names) > 1))
            except (*FAILURES, DeviceNotFound) as error:
                is_asked_for = isinstance(error, DeviceNotFound) and not self._options.takes_any
                if is_asked_for or len(names) == 1 or self._options.required:
                    raise
                if isinstance(error, DeviceFailed) and error.is_of_all:
                    unreachable[_name(name)] = error
                elif not (self._options.takes_any and missing(_name(name))):
                    self._fallbacks.note("dropped", _name(name), error)
        if unreachable:  # told once: it is one fault
            self._fallbacks.note("dropped", ", ".join(unreachable), next(iter(unreachable.values())))
        if not found:
            raise NotPlaced(f"none of the devices {[_name(n) for n in names]} can be used: {self._fallbacks.report()}")
        return found

    def _candidate(self, name: str | RemoteDevice, *, measure: bool) -> _Candidate:
        device = self._device(name)
        if isinstance(device, RemoteDevice):
            device.check_available()
        try:
            model = self._options.model.form_for(device.extensions)
        except (ImportFailed, InvalidModel) as error:
            return _Candidate(device, self._options.model, [str(error)], None)
        obstacles = device.explain(model)
        if len(obstacles) != len(model.main.operations):
            obstacles = ["the device gives another number of answers than there are operations"] * len(
                model.main.operations
            )
        if measure and None in obstacles and isinstance(device, RemoteDevice) and not file_of(model):
            capabilities = measures.of(device)
            self._sources[device.address] = capabilities.source
            return _Candidate(device, model, obstacles, capabilities)
        return _Candidate(device, model, obstacles, None)

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

    def _plans(self, candidates: Sequence[_Candidate]) -> list[ExecutionPlan]:
        """Plan the whole model on each device that takes it, and cut it where that may be faster; the best guess first.

        Raises NotPlaced with the reasons.
        """
        required = self._options.required
        plans = [_whole(c, 0.0) for c in candidates if file_of(c.model) and not any(c.obstacles)]
        others = [c for c in candidates if not file_of(c.model)] or ([] if plans else [*candidates])
        if others:
            plans += self._operations_plans(others)
        kept = [plan for plan in plans if required in {None, plan.name}]
        if not kept:
            self._check_required([device.address for device in plans[-1].where], plans[-1].model)
        return kept

    def _operations_plans(self, candidates: Sequence[_Candidate]) -> list[ExecutionPlan]:
        """Return the plans for candidates that get the same form."""
        model = candidates[0].model
        costs = [measures.Cost(model, c.capabilities, self._chooses_by_power) for c in candidates]
        rows = [[cost.of(model.main, operation) for operation in model.main.operations] for cost in costs]
        pairs = zip(candidates, rows, strict=True)
        plans = [_whole(c, sum(row)) for c, row in pairs if not any(c.obstacles)]
        try:
            cut = _cut(candidates, rows)
        except NotPlaced:
            if not plans:
                raise
        else:
            if 1 < len(cut.steps) <= MOST_STEPS or not plans:
                plans.append(cut)
        return sorted(plans, key=lambda plan: (plan.seconds, not isinstance(plan.devices[0], LocalDevice)))

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

    def _prepare_step(self, device: RemoteDevice | LocalDevice, step: Step, count: int, done: float) -> PreparedStep:
        preference, kept = self._options.prepare.preference, None
        self._at = device.address
        self._clock.begin(f"prepare {len(step.operations)} operations on {device.address}", done)
        prepared: RemotePreparedModel | LocalPrepared
        if self._cache and isinstance(device, RemoteDevice):
            kept = CachedDevice(device, self._cache, step, is_whole=count == 1)
            prepared = kept.prepare(self._clock.end)
        elif isinstance(device, RemoteDevice):
            priority, end = self._options.prepare.priority, self._clock.end
            prepared = device.prepare(step.model, preference=preference, priority=priority, deadline=end)
        else:
            prepared = device.prepare(step.model, preference=preference, deadline=self._clock.end)
        if isinstance(prepared, LocalPrepared) or not self._options.may_fall_back:
            return PreparedStep(step, device.address, FallbackExecutor(prepared, None), kept)
        kind = "whole" if count == 1 else "step"
        runtimes = [str(name) for name in _runtimes_for(step.model) if name != device.address]
        fallback = CpuFallback(
            step.model, preference, kind, device.address, fallbacks=self._fallbacks, runtimes=runtimes
        )
        return PreparedStep(step, device.address, FallbackExecutor(prepared, fallback), kept)

    def _on_cpu(self, error: Exception) -> PreparedStep:
        """Prepare the whole model after that error. Raises the error where the CPU cannot, either."""
        model = self._options.model
        if file_of(model) or any(LocalDevice().explain(model)):
            raise error
        self._fallbacks.note("compile", self._at, error)
        prepared = LocalDevice().prepare(model, preference=self._options.prepare.preference)
        whole = Step(0, tuple(range(len(model.main.operations))), model, model.main.inputs, outputs=model.main.outputs)
        return PreparedStep(whole, NAME, FallbackExecutor(prepared, None))


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
    )
