"""The front door: `driver.compile` finds out what each device can do and how fast, cuts the model, and prepares it."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from burst import MissedDeadlinePersistent, MissedDeadlineTransient, PeerDied, StatusError
from burst.messages import Cause
from driver.client.burst import Burst
from driver.client.device import RemoteDevice, connect
from driver.client.fenced import FencedOptions
from driver.client.pipeline import Pipeline
from driver.client.session import FAILURES
from driver.client.surface import AnyPreparedModel
from driver.client.workspace import FreeList, Workspace
from driver.deadlines import check_times
from driver.devices import missing
from driver.devices import names as installed
from driver.errors import DeviceNotFound, DriverError, NotPlaced
from driver.nn import InvalidModel, validate
from driver.options import ExecuteOptions, Preference, PrepareOptions, Priority, check_application
from driver.runtime import capabilities as measures
from driver.runtime.allocate import StepRole, allocate
from driver.runtime.cache.device import CachedDevice, CompilationCache
from driver.runtime.fallback import BurstFallback, CpuFallback, FallbackModel, Fallbacks
from driver.runtime.launched import launch_here
from driver.runtime.local import BACKGROUND, NAME, LocalBurst, LocalDevice, LocalPrepared
from driver.runtime.partition import Step, choose, partition
from driver.runtime.plan import PlannedModel, PreparedStep
from driver.runtime.shared_buffers import ModelRoles, names_shared, on_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from burst import Memory, Request, Result
    from driver.client.device_buffers import Buffer, BufferDesc, BufferRole
    from driver.client.fenced import FencedExecution, Waitable
    from driver.client.prepared_model import RemotePreparedModel
    from driver.interface import Capabilities
    from driver.nn import Model
    from driver.options import Options
    from driver.runtime.chain import Chain


_numbers = count(1)
_MISSED = MissedDeadlinePersistent, MissedDeadlineTransient
_SAME_AS_CPU = "reference"  # in another process, and so never cheaper: used where it is named


def compile(  # noqa: A001 (the name that users look for)
    model: Model,
    devices: Sequence[str | RemoteDevice] | None = None,
    preference: Preference = "fast_single_answer",
    priority: Priority = "medium",
    timeout: float | None = None,
    cache_dir: str | Path | None = None,
    cache_token: bytes | None = None,
    progress: Callable[[str, float], object] | None = None,
    require_device: str | None = None,
    application: str | None = None,
) -> CompiledModel:
    """Prepares a model on the best of several devices, each operation where it costs least.

    Args:
        model: is validated first.
        devices: names for `driver.connect`, connected devices, and "cpu" for the CPU in this process, in order of
            preference among equals. What they cannot do, or fail to do, falls back to "cpu" only if that is among
            them. By default all that are installed, and "cpu".
        preference: "low_power" chooses by power where all devices' power is known, the others by time.
        priority: "low", "medium" or "high": of its executions, among all of this application on a device.
        timeout: seconds. Each device is told what is left of it; when time is up, what it has begun is given up.
        cache_dir: a folder in which compilations are kept for the next time; None keeps none.
        cache_token: 32 bytes that stand for this model, and save the time to hash it; None: its SHA-256.
        progress: called with what is done next, and which part of the whole is done, from 0 to 1.
        require_device: where all of it has to run; nothing falls back then.
        application: as in `driver.connect`, of the connections that this call makes.

    Raises InvalidModel, ValueError, DeviceNotFound, NotPlaced, MissedDeadline*, and what a device's `connect`
    or `prepare` raises where that may not fall back.
    """
    for name, value, allowed in (("preference", preference, Preference), ("priority", priority, Priority)):
        if value not in get_args(allowed):
            raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, get_args(allowed)))}")
    if cache_token is not None and cache_dir is None:
        raise ValueError("cache_token needs a cache_dir; give both or neither")
    names = _candidates(devices, require_device)
    _check_application(application, names)
    may_fall_back = NAME in names and require_device is None
    asked = tuple(map(_name, names))
    any_, prepare = devices is None, PrepareOptions(preference, priority)
    cache = cache_dir, cache_token
    options = CompileOptions(model, prepare, asked, require_device, may_fall_back, any_, *cache, application)
    clock = _Clock(timeout, progress)
    with ExitStack() as stack:
        compilation = _Compilation(options, stack, clock, options.cache(clock))
        compiled = compilation.placed_before(names) or compilation.compiled(names)
        stack.pop_all()
    return compiled


def _candidates(devices: Sequence[str | RemoteDevice] | None, required: str | None) -> list[str | RemoteDevice]:
    if devices is None:
        return [required] if required else [*(name for name in installed() if name != _SAME_AS_CPU), NAME]
    if isinstance(devices, str) or not devices:
        raise ValueError(f"devices={devices!r}: give a list of at least one name, or None for all")
    found = list(devices)
    if len({_name(d) for d in found}) < len(found):
        raise ValueError(f"devices={[_name(d) for d in found]}: a device is named twice")
    return found


def _check_application(application: str | None, devices: Sequence[str | RemoteDevice]) -> None:
    """Raises InvalidArgument, ValueError."""
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
    """What `compile` was asked for."""

    model: Model
    prepare: PrepareOptions  #: of each step; its deadline is the clock's
    names: tuple[str, ...]
    required: str | None
    may_fall_back: bool
    takes_any: bool  #: that is installed, and works
    cache_dir: str | Path | None
    cache_token: bytes | None
    application: str | None

    def cache(self, clock: _Clock) -> CompilationCache | None:
        """Where compilations are kept. Raises ValueError."""
        if self.cache_dir is None:
            return None
        wait = partial(clock.note, "wait for another process that compiles the same")
        return CompilationCache.of(self.cache_dir, self.cache_token, self.model, self.prepare, wait, clock.left)


class _Clock:
    """Says how far it has come, and when time is up."""

    def __init__(self, timeout: float | None, progress: Callable[[str, float], object] | None) -> None:
        self._timeout, self._progress = timeout, progress or (lambda _, __: None)
        self._end, self._done = None if timeout is None else time.monotonic() + timeout, 0.0

    def begin(self, what: str, done: float) -> None:
        """The next step. Raises MissedDeadlinePersistent."""
        if self._end is not None and time.monotonic() >= self._end:
            cause = Cause("before start", time.monotonic() - self._end)
            raise MissedDeadlinePersistent(f"timeout={self._timeout} s passed before this step: {what}", cause=cause)
        self._done = done
        self._progress(what, done)

    @property
    def end(self) -> float | None:
        """A time.monotonic()."""
        return self._end

    def note(self, what: str) -> None:
        """Something within a step."""
        self._progress(what, self._done)

    def left(self) -> float | None:
        """Seconds."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


class _Candidate(NamedTuple):
    """A device, and what is known about it with respect to one model."""

    device: RemoteDevice | LocalDevice
    supported: list[bool]
    capabilities: Capabilities | None


class _Compilation:
    """One call of `compile`."""

    def __init__(
        self, options: CompileOptions, stack: ExitStack, clock: _Clock, cache: CompilationCache | None
    ) -> None:
        """`stack`: closes what was opened, if that fails."""
        self._options, self._stack, self._clock, self._fallbacks = options, stack, clock, Fallbacks()
        self._cache = cache
        self._own: dict[str, RemoteDevice] = {}  # connections of ours
        self._at = "none in particular"  # that is at work

    def placed_before(self, names: Sequence[str | RemoteDevice]) -> CompiledModel | None:
        """With the devices that were chosen the last time, of which none need be asked. None: there was no such time,
        or it does not work any more.
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
                prepared.append(self._prepare_step(devices[step.device], step, len(prepared), len(steps)))
        except (*FAILURES, NotPlaced, DeviceNotFound, InvalidModel) as error:
            _close(prepared)
            if isinstance(error, _MISSED):
                raise
            return None
        return self._finished(prepared)

    def compiled(self, names: Sequence[str | RemoteDevice]) -> CompiledModel:
        """Asks the devices, chooses, and prepares each step; on the CPU, if that fails and may fall back."""
        validate(self._options.model)
        candidates = self._asked(names)
        prepared: list[PreparedStep] = []
        try:
            steps = self._steps(candidates)
            for step in steps:
                device = candidates[step.device].device
                prepared.append(self._prepare_step(device, step, len(prepared), len(steps)))
        except (*FAILURES, NotPlaced) as error:
            _close(prepared)
            if isinstance(error, _MISSED) or not self._options.may_fall_back:
                raise
            prepared = [self._on_cpu(error)]
        else:
            self._remember(names, candidates, steps)
        return self._finished(prepared)

    def _remember(
        self, names: Sequence[str | RemoteDevice], candidates: Sequence[_Candidate], steps: Sequence[Step]
    ) -> None:
        """Which device runs what, for `placed_before`. Others may have been dropped, so that numbers moved."""
        if self._cache is None:
            return
        where = [_name(name) for name in names]
        chosen = [0] * len(self._options.model.main.operations)
        for step in steps:
            for operation in step.operations:
                chosen[operation] = where.index(candidates[step.device].device.address)
        self._cache.placement(self._options.names, self._options.required).write(chosen, self._options.model)

    def _finished(self, steps: Sequence[PreparedStep]) -> CompiledModel:
        used = {step.device for step in steps}
        for device in self._own.values():
            if device.address not in used:
                device.close()
        self._clock.begin("compiled", 1.0)
        devices = [device for device in self._own.values() if device.address in used]
        return CompiledModel(self._options, steps, devices, self._fallbacks)

    def _asked(self, names: Sequence[str | RemoteDevice]) -> list[_Candidate]:
        """Each device, connected, measured if there is a choice, and asked what it supports."""
        found = []
        for n, name in enumerate(names):
            self._clock.begin(f"ask {_name(name)}", 0.5 * n / len(names))
            try:
                found.append(self._candidate(name, measure=len(names) > 1))
            except (*FAILURES, DeviceNotFound) as error:
                is_asked_for = isinstance(error, DeviceNotFound) and not self._options.takes_any
                if is_asked_for or len(names) == 1 or self._options.required:
                    raise
                if not (self._options.takes_any and missing(_name(name))):
                    self._fallbacks.note("dropped", _name(name), error)
        if not found:
            raise NotPlaced(f"none of the devices {[_name(n) for n in names]} can be used: {self._fallbacks.report()}")
        return found

    def _candidate(self, name: str | RemoteDevice, *, measure: bool) -> _Candidate:
        model, device = self._options.model, self._device(name)
        if isinstance(device, RemoteDevice):
            device.check_available()
        supported = device.supported_operations(model)
        if len(supported) != len(model.main.operations):
            supported = [False] * len(model.main.operations)
        if measure and any(supported) and isinstance(device, RemoteDevice):
            return _Candidate(device, supported, measures.of(device))
        return _Candidate(device, supported, None)

    def _device(self, name: str | RemoteDevice) -> RemoteDevice | LocalDevice:
        """Connected, once."""
        if name == NAME:
            return LocalDevice()
        if not isinstance(name, str):
            return name
        if name not in self._own:
            self._own[name] = connect(name, application=self._options.application)
            self._stack.callback(self._own[name].close)
        return self._own[name]

    def _steps(self, candidates: Sequence[_Candidate]) -> list[Step]:
        model, graph = self._options.model, self._options.model.main
        remote = [c.capabilities for c in candidates if c.capabilities is not None]
        by_power = self._options.prepare.preference == "low_power" and all(map(measures.has_power, remote))
        costs = [measures.Cost(model, c.capabilities, by_power) for c in candidates]
        rows = [[cost.of(graph, operation) for operation in graph.operations] for cost in costs]
        cpu = next((n for n, c in enumerate(candidates) if isinstance(c.device, LocalDevice)), None)
        chosen = choose(model, [c.supported for c in candidates], rows, cpu)
        self._check_required([candidates[n].device.address for n in chosen])
        try:
            return partition(model, chosen)
        except NotPlaced:
            whole = [n for n, c in enumerate(candidates) if all(c.supported)]
            if self._options.may_fall_back or not whole:
                raise
            best = min(whole, key=lambda n: (sum(rows[n]), n))
            return partition(model, [best] * len(chosen))

    def _check_required(self, chosen: Sequence[str]) -> None:
        required = self._options.required
        operations = self._options.model.main.operations
        others = [f"{n} ({operations[n].type}) on {name}" for n, name in enumerate(chosen) if name != required]
        if required and others:
            raise NotPlaced(f"require_device={required!r}, but elsewhere would run operation {', '.join(others)}")

    def _prepare_step(self, device: RemoteDevice | LocalDevice, step: Step, n: int, count: int) -> PreparedStep:
        preference, kept = self._options.prepare.preference, None
        self._at = device.address
        self._clock.begin(f"prepare {len(step.operations)} operations on {device.address}", 0.5 + 0.5 * n / count)
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
            return PreparedStep(step, device.address, FallbackModel(prepared, None), kept)
        kind = "whole" if count == 1 else "step"
        fallback = CpuFallback(step.model, preference, kind, device.address, self._fallbacks)
        return PreparedStep(step, device.address, FallbackModel(prepared, fallback), kept)

    def _on_cpu(self, error: Exception) -> PreparedStep:
        """The whole model, after that."""
        model = self._options.model
        self._fallbacks.note("compile", self._at, error)
        prepared = LocalDevice().prepare(model, preference=self._options.prepare.preference)
        whole = Step(0, tuple(range(len(model.main.operations))), model, model.main.inputs, model.main.outputs)
        return PreparedStep(whole, NAME, FallbackModel(prepared, None))


def _close(steps: Sequence[PreparedStep]) -> None:
    for step in steps:
        with suppress(PeerDied, StatusError):
            step.model.prepared.close()


def compile_again(options: CompileOptions) -> CompiledModel:
    """What an unpickled model is made by."""
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


class CompiledModel(FallbackModel, AnyPreparedModel):
    """A model on one or several devices. Any thread may use it, several at once. Made by `compile`.

    On one device it is what that device's `prepare` gives, and its burst is that device's burst.
    """

    def __init__(
        self,
        options: CompileOptions,
        steps: Sequence[PreparedStep],
        devices: Sequence[RemoteDevice],
        fallbacks: Fallbacks,
    ) -> None:
        """Use `compile`. `devices`: connections to be closed with it."""
        self.model = options.model
        self.preference, self.priority = options.prepare.preference, options.prepare.priority
        self._steps, self._devices, self._fallbacks = steps, devices, fallbacks
        self._is_closed, self._options = False, options
        self._workspaces: FreeList[Workspace] = FreeList()
        self._roles = ModelRoles(next(_numbers), options.model)
        if len(steps) == 1:
            super().__init__(steps[0].model.prepared, steps[0].model.fallback)
        else:
            fallback = None
            if options.may_fall_back:
                names = " + ".join(dict.fromkeys(step.device for step in steps))
                fallback = CpuFallback(options.model, self.preference, "whole", names, fallbacks)
            super().__init__(PlannedModel(options.model, steps, self.preference, fallback), fallback)

    def placement(self) -> list[tuple[str, tuple[int, ...]]]:
        """What runs where now: (device, indices of operations of the main subgraph) of each step, in order."""
        if self.is_replaced:
            return [(NAME, tuple(range(len(self.model.main.operations))))]
        return [(NAME if p.model.is_replaced else p.device, p.step.operations) for p in self._steps]

    def open_burst(self, options: Options) -> Burst | Chain | LocalBurst:
        """On one device it is that device's, on several a chain of them."""
        if self._is_closed:
            raise ValueError("this compiled model is closed; compile it again")
        life = self.life
        found: Burst | Chain | LocalBurst
        try:
            found = self._burst(options)
        except FAILURES as error:
            found = LocalBurst(self.replacement(error, life), options)
        found.on_memory = partial(on_memory, self._roles)
        return found

    def _burst(self, options: Options) -> Burst | Chain | LocalBurst:
        prepared: RemotePreparedModel | LocalPrepared | PlannedModel = self.prepared
        if isinstance(prepared, PlannedModel | LocalPrepared) or self.fallback is None:
            return prepared.open_burst(options)
        prepared.check_quarantine()
        return Burst(Pipeline(prepared, options, fallback=BurstFallback(self, prepared)))

    def free_memory(self, memory: Memory) -> None:
        """As `RemoteDevice.free_memory`, on all its devices."""
        for step in self._steps:
            step.model.prepared.device.free_memory(memory)

    def execute(
        self,
        request: Request,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Result:
        """As `RemotePreparedModel.execute`; `request` may also name buffers that `allocate` has made."""
        way, options = super().execute, ExecuteOptions(measure, timeout, loop_timeout, deadline)
        return on_memory(self._roles, request, lambda its: way(its, *options))

    def execute_async(
        self,
        request: Request,
        measure: bool = False,
        *,
        timeout: float | None = None,
        callback: Callable[[Future[Result]], object] | None = None,
        loop_timeout: float | None = None,
        deadline: float | None = None,
    ) -> Future[Result]:
        """As `RemotePreparedModel.execute_async`; a request on shared buffers takes a thread of this process."""
        if not names_shared(request):
            return super().execute_async(
                request, measure, timeout=timeout, callback=callback, loop_timeout=loop_timeout, deadline=deadline
            )
        check_times(timeout=timeout, loop_timeout=loop_timeout, deadline=deadline)
        end = None if timeout is None else time.monotonic() + timeout

        def work() -> Result:
            left = None if end is None else max(0.0, end - time.monotonic())
            return self.execute(request, measure, left, loop_timeout, deadline)

        future = BACKGROUND.submit(work)
        if callback:
            future.add_done_callback(callback)
        return future

    def execute_fenced(
        self,
        request: Request,
        wait_for: Sequence[Waitable | None] = (),
        *,
        measure: bool = False,
        deadline: float | None = None,
        loop_timeout: float | None = None,
        duration: float | None = None,
    ) -> FencedExecution:
        """As `RemotePreparedModel.execute_fenced`; for shared buffers this process waits for the fences."""
        if not names_shared(request):
            return super().execute_fenced(
                request, wait_for, measure=measure, deadline=deadline, loop_timeout=loop_timeout, duration=duration
            )

        def execute(end: int | None) -> Result:
            return self.execute(request, measure, None, loop_timeout, None if end is None else end / 1e9)

        return launch_here(self.model, request, wait_for, FencedOptions.of(measure, deadline, duration), execute)

    def allocate(
        self, desc: BufferDesc, input_roles: Sequence[BufferRole] = (), output_roles: Sequence[BufferRole] = ()
    ) -> Buffer:
        """As `driver.allocate` for this model alone: the `model_index` of each role is 0."""
        return allocate(desc, [self], input_roles, output_roles)

    @property
    def number(self) -> int:
        """By which the roles of buffers mean this model."""
        return self._roles.number

    def step_roles(self, io_index: int, *, is_input: bool) -> list[StepRole]:
        """Which steps read and write that input or output. Raises ValueError."""
        if self._is_closed:
            raise ValueError("this compiled model is closed; compile it again")
        operand = (self.model.main.inputs if is_input else self.model.main.outputs)[io_index]
        found = []
        for prepared, inputs, outputs in self._placed():
            found += [StepRole(prepared, True, n) for n, i in enumerate(inputs) if i == operand]
            found += [StepRole(prepared, False, n) for n, i in enumerate(outputs) if i == operand]
        return found

    def _placed(self) -> list[tuple[Any, Sequence[int], Sequence[int]]]:
        """Of each step: what executes it now, and its inputs and outputs among the main subgraph's operands."""
        if isinstance(self.prepared, PlannedModel):
            return [(each.model.prepared, each.step.inputs, each.step.outputs) for each in self._steps]
        return [(self.prepared, self.model.main.inputs, self.model.main.outputs)]

    def instead(self, error: BaseException, life: int) -> CpuFallback | None:
        """As `FallbackModel.instead`, unless it is closed."""
        if self._is_closed:
            raise ValueError("this compiled model is closed; compile it again") from error
        return super().instead(error, life)

    def stats(self) -> dict[str, Any]:
        """`placement`, and `fallbacks`: how often a device was dropped when compiling, and how often the whole model
        was compiled for the CPU instead, or a step or the whole executed there; with the last reasons.

        `compilations`: of each step, its device; whether it came out of the cache (`restored`), was made anew and is
        kept (`saved`), or is not (`compiled`), and why; and its `stage`: how often the device has replaced it by
        something better since.
        """
        compilations = [step.compilation() for step in self._steps]
        return {"placement": self.placement(), "fallbacks": self._fallbacks.report(), "compilations": compilations}

    def __reduce__(self) -> tuple[Any, ...]:
        """A recipe: compiles the model again, for devices of the same names, wherever it is unpickled."""
        return compile_again, (self._options,)

    def close(self) -> None:
        """Frees the model on its devices. Bursts end with the connections that `compile` made."""
        self._is_closed = True
        self._workspaces.clear()
        for displaced in (self, *(step.model for step in self._steps)):
            displaced.stay()
        with suppress(PeerDied, DriverError):
            self.prepared.close()
        for device in self._devices:
            device.close()
