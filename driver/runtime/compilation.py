"""The front door: `driver.compile` finds out what each device can do and how fast, cuts the model, and prepares it."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

from burst import MissedDeadlinePersistent, PeerDied, StatusError
from driver.devices import names as installed
from driver.errors import DeviceNotFound, DriverError, NotPlaced
from driver.nn import validate
from driver.options import Preference
from driver.remote import RemoteDevice, connect
from driver.runtime import capabilities as measures
from driver.runtime.fallback import FAILURES, Fallbacks, Guarded, SafeBurst, Spare
from driver.runtime.local import NAME, LocalBurst, LocalDevice, LocalPrepared, options_of
from driver.runtime.partition import Step, choose, partition
from driver.runtime.plan import Part, Planned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.interface import Capabilities
    from driver.nn import Model
    from driver.options import Options
    from driver.prepared import RemotePreparedModel
    from driver.runtime.chain import Chain
    from driver.session import Burst

Priority = Literal["low", "medium", "high"]
_SAME_AS_CPU = "reference"  # in another process, and so never cheaper: used where it is named


def compile(  # noqa: A001 (the name that users look for)
    model: Model,
    devices: Sequence[str | RemoteDevice] | None = None,
    preference: Preference = "fast_single_answer",
    priority: Priority = "medium",
    timeout: float | None = None,
    cache_dir: None = None,
    cache_token: None = None,
    progress: Callable[[str, float], object] | None = None,
    require_device: str | None = None,
) -> CompiledModel:
    """Prepares a model on the best of several devices, each operation where it costs least.

    Args:
        model: is validated first.
        devices: names for `driver.connect`, connected devices, and "cpu" for the CPU in this process, in order of
            preference among equals. What they cannot do, or fail to do, falls back to "cpu" only if that is among
            them. By default all that are installed, and "cpu".
        preference: "low_power" chooses by power where all devices' power is known, the others by time.
        priority: "low", "medium" or "high"; carried along as `priority`.
        timeout: seconds. A step that has begun is finished; when time is up, the next one does not begin.
        cache_dir, cache_token: None: compilations are not cached.
        progress: called with what is done next, and which part of the whole is done, from 0 to 1.
        require_device: where all of it has to run; nothing falls back then.

    Raises InvalidModel, ValueError, DeviceNotFound, NotPlaced, MissedDeadlinePersistent, and what a device's `connect`
    or `prepare` raises where that may not fall back.
    """
    for name, value, allowed in (("preference", preference, Preference), ("priority", priority, Priority)):
        if value not in get_args(allowed):
            raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, get_args(allowed)))}")
    for name, cache in (("cache_dir", cache_dir), ("cache_token", cache_token)):
        if cache is not None:
            raise ValueError(f"{name}={cache!r}: compilations are not cached; leave it out")
    validate(model)
    names = _candidates(devices, require_device)
    may_fall_back = NAME in names and require_device is None
    asked = tuple(map(_name, names))
    terms = _Terms(model, preference, priority, asked, require_device, may_fall_back, takes_any=devices is None)
    with ExitStack() as stack:
        compilation = _Compilation(terms, stack, _Clock(timeout, progress))
        compiled = compilation.compiled(names)
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


def _name(device: str | RemoteDevice | LocalDevice) -> str:
    return device if isinstance(device, str) else device.address


class _Terms(NamedTuple):
    """What somebody wants compiled, and how."""

    model: Model
    preference: Preference
    priority: Priority
    names: tuple[str, ...]
    required: str | None
    may_fall_back: bool
    takes_any: bool  #: that is installed, and works


class _Clock:
    """Says how far it has come, and when time is up."""

    def __init__(self, timeout: float | None, progress: Callable[[str, float], object] | None) -> None:
        self._timeout, self._progress = timeout, progress or (lambda _, __: None)
        self._end = None if timeout is None else time.monotonic() + timeout

    def begin(self, what: str, done: float) -> None:
        """The next step. Raises MissedDeadlinePersistent."""
        if self._end is not None and time.monotonic() >= self._end:
            raise MissedDeadlinePersistent(f"timeout={self._timeout} s have passed before this: {what}")
        self._progress(what, done)


class _Candidate(NamedTuple):
    """A device, and what is known about it with respect to one model."""

    device: RemoteDevice | LocalDevice
    supported: list[bool]
    capabilities: Capabilities | None


class _Compilation:
    """One call of `compile`."""

    def __init__(self, terms: _Terms, stack: ExitStack, clock: _Clock) -> None:
        """`stack`: closes what was opened, if that fails."""
        self._terms, self._stack, self._clock, self._fallbacks = terms, stack, clock, Fallbacks()
        self._own: list[RemoteDevice] = []  # connections of ours
        self._at = "none in particular"  # that is at work

    def compiled(self, names: Sequence[str | RemoteDevice]) -> CompiledModel:
        """All of it."""
        candidates = self._asked(names)
        parts: list[Part] = []
        try:
            steps = self._steps(candidates)
            for step in steps:
                parts.append(self._part(candidates[step.device], step, len(parts), len(steps)))
        except (*FAILURES, NotPlaced) as error:
            for part in parts:
                with suppress(PeerDied, StatusError):
                    part.guarded.prepared.close()
            if isinstance(error, MissedDeadlinePersistent) or not self._terms.may_fall_back:
                raise
            parts = [self._on_cpu(error)]
        used = {part.device for part in parts}
        for device in self._own:
            if device.address not in used:
                device.close()
        self._clock.begin("compiled", 1.0)
        return CompiledModel(self._terms, parts, [d for d in self._own if d.address in used], self._fallbacks)

    def _asked(self, names: Sequence[str | RemoteDevice]) -> list[_Candidate]:
        """Each device, connected, measured if there is a choice, and asked what it supports."""
        found = []
        for n, name in enumerate(names):
            self._clock.begin(f"ask {_name(name)}", 0.5 * n / len(names))
            try:
                found.append(self._candidate(name, measure=len(names) > 1))
            except (*FAILURES, DeviceNotFound) as error:
                is_asked_for = isinstance(error, DeviceNotFound) and not self._terms.takes_any
                if is_asked_for or len(names) == 1 or self._terms.required:
                    raise
                self._fallbacks.note("dropped", _name(name), error)
        if not found:
            raise NotPlaced(f"none of the devices {[_name(n) for n in names]} can be used: {self._fallbacks.report()}")
        return found

    def _candidate(self, name: str | RemoteDevice, *, measure: bool) -> _Candidate:
        model = self._terms.model
        if name == NAME:
            device = LocalDevice()
            return _Candidate(device, device.supported_operations(model), None)
        remote = connect(name) if isinstance(name, str) else name
        if isinstance(name, str):
            self._stack.callback(remote.close)
            self._own.append(remote)
        supported = remote.supported_operations(model)
        if len(supported) != len(model.main.operations):
            supported = [False] * len(model.main.operations)
        return _Candidate(remote, supported, measures.of(remote) if measure and any(supported) else None)

    def _steps(self, candidates: Sequence[_Candidate]) -> list[Step]:
        model, graph = self._terms.model, self._terms.model.main
        remote = [c.capabilities for c in candidates if c.capabilities is not None]
        by_power = self._terms.preference == "low_power" and all(map(measures.has_power, remote))
        costs = [measures.Cost(model, c.capabilities, by_power) for c in candidates]
        rows = [[cost.of(graph, operation) for operation in graph.operations] for cost in costs]
        cpu = next((n for n, c in enumerate(candidates) if isinstance(c.device, LocalDevice)), None)
        chosen = choose(model, [c.supported for c in candidates], rows, cpu)
        self._check_required([candidates[n].device.address for n in chosen])
        try:
            return partition(model, chosen)
        except NotPlaced:
            whole = [n for n, c in enumerate(candidates) if all(c.supported)]
            if self._terms.may_fall_back or not whole:
                raise
            best = min(whole, key=lambda n: (sum(rows[n]), n))
            return partition(model, [best] * len(chosen))

    def _check_required(self, chosen: Sequence[str]) -> None:
        required = self._terms.required
        operations = self._terms.model.main.operations
        others = [f"{n} ({operations[n].type}) on {name}" for n, name in enumerate(chosen) if name != required]
        if required and others:
            raise NotPlaced(f"require_device={required!r}, but it would be operation {', '.join(others)}")

    def _part(self, candidate: _Candidate, step: Step, n: int, count: int) -> Part:
        device, preference = candidate.device, self._terms.preference
        self._at = device.address
        self._clock.begin(f"prepare {len(step.operations)} operations on {device.address}", 0.5 + 0.5 * n / count)
        prepared = device.prepare(step.model, preference=preference)
        if isinstance(prepared, LocalPrepared) or not self._terms.may_fall_back:
            return Part(step, device.address, Guarded(prepared, None))
        kind = "whole" if count == 1 else "step"
        spare = Spare(step.model, preference, kind, device.address, self._fallbacks)
        return Part(step, device.address, Guarded(prepared, spare))

    def _on_cpu(self, error: Exception) -> Part:
        """The whole model, after that."""
        model = self._terms.model
        self._fallbacks.note("compile", self._at, error)
        prepared = LocalDevice().prepare(model, preference=self._terms.preference)
        whole = Step(0, tuple(range(len(model.main.operations))), model, model.main.inputs, model.main.outputs)
        return Part(whole, NAME, Guarded(prepared, None))


class CompiledModel(Guarded):
    """A model on one or several devices. Any thread may use it, several at once. Made by `compile`.

    On one device it is what that device's `prepare` gives, and its burst is that device's burst.
    """

    def __init__(
        self, terms: _Terms, parts: Sequence[Part], devices: Sequence[RemoteDevice], fallbacks: Fallbacks
    ) -> None:
        """Use `compile`. `devices`: connections to be closed with it."""
        self.model, self.preference, self.priority = terms.model, terms.preference, terms.priority
        self._parts, self._devices, self._fallbacks = parts, devices, fallbacks
        self._is_closed, self._terms = False, terms
        if len(parts) == 1:
            super().__init__(parts[0].guarded.prepared, parts[0].guarded.spare)
        else:
            spare = None
            if terms.may_fall_back:
                names = " + ".join(dict.fromkeys(part.device for part in parts))
                spare = Spare(terms.model, terms.preference, "whole", names, fallbacks)
            super().__init__(Planned(terms.model, parts, terms.preference, spare), spare)

    def placement(self) -> list[tuple[str, tuple[int, ...]]]:
        """What runs where now: (device, indices of operations of the main subgraph) of each step, in order."""
        if self.is_replaced:
            return [(NAME, tuple(range(len(self.model.main.operations))))]
        return [(NAME if p.guarded.is_replaced else p.device, p.step.operations) for p in self._parts]

    def burst(self, **options: Any) -> Burst | Chain | LocalBurst:
        """Opens a burst, with the options of `RemotePreparedModel.burst`.

        On one device it is that device's, on several a chain of them. Raises StatusError, PeerDied, ValueError.
        """
        if self._is_closed:
            raise ValueError("this compiled model is closed; compile it again")
        its = options_of(self.preference, **options)
        try:
            return self._burst(its)
        except FAILURES as error:
            return LocalBurst(self.instead(error), its)

    def _burst(self, options: Options) -> Burst | Chain | LocalBurst:
        prepared: RemotePreparedModel | LocalPrepared | Planned = self.prepared
        if isinstance(prepared, Planned):
            return prepared.burst(options)
        if isinstance(prepared, LocalPrepared):
            return LocalBurst(prepared, options)
        if self.spare is None:
            return prepared.burst(**options._asdict())
        prepared.check_quarantine()
        return SafeBurst(prepared, options, self)

    def instead(self, error: BaseException) -> LocalPrepared:
        """As `Guarded.instead`, unless it is closed."""
        if self._is_closed:
            raise ValueError("this compiled model is closed; compile it again") from error
        return super().instead(error)

    def stats(self) -> dict[str, Any]:
        """`placement`, and `fallbacks`: how often a device was dropped when compiling, and how often the whole model
        was compiled for the CPU instead, or a step or the whole executed there; with the last reasons.
        """
        return {"placement": self.placement(), "fallbacks": self._fallbacks.report()}

    def __reduce__(self) -> tuple[Any, ...]:
        """A recipe: compiles the model again, for devices of the same names, wherever it is unpickled."""
        return _compile_again, (self._terms,)

    def close(self) -> None:
        """Frees the model on its devices. Bursts end with the connections that `compile` made."""
        self._is_closed = True
        with suppress(PeerDied, DriverError):
            self.prepared.close()
        for device in self._devices:
            device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _compile_again(terms: _Terms) -> CompiledModel:
    names = None if terms.takes_any else list(terms.names)
    return compile(terms.model, names, terms.preference, terms.priority, require_device=terms.required)
