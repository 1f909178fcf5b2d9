"""The safety net: what a device fails to do is done by the CPU in this process, with the same result.

Only what another device might do better is done again. An output that is too small, an argument that is wrong and a
deadline that has passed are the same everywhere, and go to the caller. Every fallback that has executed something is
counted, and logged once for each device and kind; so is one that fails as well, but it is not counted.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from burst import (
    BuffersLost,
    ErrorStatus,
    GeneralFailure,
    PeerDied,
    Quarantined,
    Result,
    StatusError,
)
from burst.errors import status_error
from driver.client.completion import Completion, follow
from driver.client.device import connect
from driver.client.executor import PLAIN, BurstParts
from driver.client.session import FAILURES
from driver.deadlines import check
from driver.devices.files import CONVERTED
from driver.errors import DeviceFailed, DeviceNotFound, DriverError, NotPlaced
from driver.nn import InvalidModel
from driver.nn.file_form import file_of
from driver.runtime.comeback import Comeback
from driver.runtime.launched import FencedFallback, launching
from driver.runtime.local import LocalDevice
from driver.runtime.local_executor import BACKGROUND
from driver.runtime.places import check_shapes
from driver.runtime.shared_buffers import EvacuatedJob, lost, names_buffers, names_vendor_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import Memory
    from driver.client.device import RemoteDevice
    from driver.client.executor import Executor
    from driver.client.fenced import FencedExecution
    from driver.client.job import Job
    from driver.client.remote_executor import Home, RemoteExecutor
    from driver.client.surface import AnyBurst
    from driver.nn import Model
    from driver.options import Options, Preference

_log = logging.getLogger("driver.runtime")
CLOSED = "this compiled model is closed; compile it again"
_HERE = "the CPU in this process"
_PAST = -2  # a life of the device that is over
_FINAL = frozenset(
    {
        ErrorStatus.NONE,
        ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
        ErrorStatus.INVALID_ARGUMENT,
        ErrorStatus.MISSED_DEADLINE_TRANSIENT,
        ErrorStatus.MISSED_DEADLINE_PERSISTENT,
    }
)
_EXECUTED = {ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE}


def is_retryable(error: BaseException) -> bool:
    """Return True if the same request may succeed elsewhere."""
    if isinstance(error, StatusError):
        return error.status not in _FINAL
    return isinstance(error, FAILURES) and not isinstance(error, BuffersLost)


class Fallbacks:
    """Counts of one compiled model, by kind: `_WORDS` has them all. Any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._last: dict[tuple[str, str], str] = {}
        self._refused: set[tuple[str, str]] = set()
        self._lock, self._returns = threading.Lock(), 0

    def note(self, kind: str, device: str, error: BaseException, place: str = _HERE) -> None:
        """Count one more failure of a device, in whose stead that place has gone on."""
        reason = _reason(error)
        with self._lock:
            self._counts[kind] += 1
            is_first = (kind, device) not in self._last
            self._last[kind, device] = reason
        if is_first:
            _log.warning("device %r failed (%s); %s", device, reason, _WORDS[kind].format(place=place))

    def note_refusal(self, kind: str, device: str, error: BaseException, *, place: str, refusal: StatusError) -> None:
        """Log, once, that a device failed and that its fallback did so, too. It has executed nothing: no count."""
        with self._lock:
            is_first = (kind, device) not in self._refused
            self._refused.add((kind, device))
        if is_first:
            told = device, _reason(error), place, _reason(refusal)
            _log.warning("device %r failed (%s); %s refused the request, too (%s)", *told)

    def note_return(self, device: str) -> None:
        """Count a model that is on its device again."""
        with self._lock:
            self._returns += 1
        _log.warning("device %r is there again; its part of the model runs on it", device)

    def report(self) -> dict[str, Any]:
        """Return how often each happened, and why last; `returned`: how often a device that had died came back."""
        with self._lock:
            reasons = {f"{kind}, {device}": reason for (kind, device), reason in self._last.items()}
            counts = {kind: self._counts[kind] for kind in _WORDS} | {"returned": self._returns}
            return counts | {"reasons": reasons}


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


_WORDS = {
    "dropped": "nothing is compiled for it",
    "compile": "the whole model runs on {place}",
    "step": "its part of the model was executed on {place}",
    "whole": "the whole model was executed on {place}",
}


class CpuFallback:
    """The CPU in the place of one device, for one model: made ready there when it is first needed.

    A model file goes to another runtime that runs it, or else, as operations of the HAL, to the CPU, if it has the same
    inputs and outputs in that form.
    """

    def __init__(
        self,
        model: Model,
        preference: Preference,
        kind: str,
        device: str,
        fallbacks: Fallbacks,
        runtimes: Sequence[str] = (),
    ) -> None:
        """Prepare nothing yet. `runtimes`: devices that run the file that the model is."""
        self.model, self._preference, self._runtimes = model, preference, runtimes
        self._kind, self._device, self._fallbacks = kind, device, fallbacks
        self._lock = threading.Lock()
        self._prepared: Executor | None = None
        self._connected: RemoteDevice | None = None

    def can_take_over(self, error: BaseException) -> bool:
        """Return True if anything can execute instead; if not, the error gets a note that says why."""
        try:
            return bool(self.prepared)
        except NotPlaced as why:
            error.add_note(f"nothing can take its place: {why}")
            return False

    def take_over(self, error: BaseException) -> Executor:
        """Return what executes instead, after a failure that is counted here."""
        self._fallbacks.note(self._kind, self._device, error)
        return self.prepared

    def attempt(self, error: BaseException, executor: Executor, perform: Callable[[Executor], Result]) -> Result:
        """Return what `perform` makes by `executor`, which is `prepared`: counted if it has executed, else logged."""
        found = perform(executor)
        connected = self._connected if executor.remote else None
        place = f"device {connected.address!r}" if connected else _HERE
        if found.status in _EXECUTED:
            self._fallbacks.note(self._kind, self._device, error, place)
        else:
            refusal = status_error(found.status, found.message)
            self._fallbacks.note_refusal(self._kind, self._device, error, place=place, refusal=refusal)
        return found

    def perform(self, error: BaseException, perform: Callable[[Executor], Result]) -> Result | None:
        """Do as `attempt`, by what is prepared.

        None: it fails at that request as well, and the words of the file's own runtime are clearer than its own.
        """
        executor = self.prepared
        try:
            found = self.attempt(error, executor, perform)
        except (PeerDied, DeviceFailed) as death:
            self.drop(executor, death)
            return None
        is_none = found.status == ErrorStatus.GENERAL_FAILURE and isinstance(error, GeneralFailure)
        return None if is_none else found

    def drop(self, executor: Executor, death: BaseException) -> None:
        """Use that runtime no more: it has died over a request that was not made for it."""
        with self._lock:
            if self._prepared is executor and self._connected:
                name, connected = self._connected.address, self._connected
                _log.warning("device %r died in the place of %r (%s); it is used no more", name, self._device, death)
                self._runtimes = [runtime for runtime in self._runtimes if runtime != name]
                self._prepared = self._connected = None
                connected.close()

    def report(self) -> dict[str, Any]:
        """Return all fallbacks of the compiled model."""
        return self._fallbacks.report()

    def note_return(self) -> None:
        """Count that the device is there again."""
        self._fallbacks.note_return(self._device)

    @property
    def prepared(self) -> Executor:
        """The model on the CPU, or a file on another runtime. Raises NotPlaced."""
        with self._lock:
            if self._prepared is None:
                self._prepared = self._of_file() if file_of(self.model) else self._on_cpu(self.model)
            return self._prepared

    def _on_cpu(self, model: Model) -> Executor:
        return LocalDevice().prepare(model, preference=self._preference).executor

    def _of_file(self) -> Executor:
        reasons = []
        for name in self._runtimes:
            try:
                self._connected = connect(name)
                return self._connected.prepare(self.model, preference=self._preference).executor
            except (*FAILURES, DeviceNotFound) as error:
                reasons.append(f"{name}: {error}")
        try:
            other = self.model.form_for(())
            if other is self.model:
                file = file_of(self.model)
                remedy = "; load it with form='auto'" if file and file.kind in CONVERTED else ""
                reasons.append(f"the model has no other form{remedy}")
            elif _types(other) != _types(self.model):
                reasons.append("as operations of the HAL it has inputs or outputs of other types")
            else:
                return self._on_cpu(other)
        except (DriverError, InvalidModel) as error:
            reasons.append(f"as operations of the HAL: {error}")
        raise NotPlaced("; ".join(reasons))

    def close(self) -> None:
        """End what it has connected."""
        if self._connected:
            self._connected.close()


def _types(model: Model) -> list[Any]:
    return [tensor.dtype for tensor in (*model.inputs, *model.outputs)]


def perform_with_fallback(
    attempt: Callable[[], Result],
    fallback_for: Callable[[BaseException], CpuFallback | None],
    job: Job,
) -> Result:
    """Return what `attempt` does; perform the job on the CPU where that may do better, if `fallback_for` says so.

    Values of a device's buffers come to this process for that, and go back. Raise BuffersLost when it has died.
    """
    request, result = job.request, None
    failure: StatusError | PeerDied | DeviceFailed
    try:
        result = attempt()
        if result.status in _FINAL:
            return result
        failure = status_error(result.status, result.message)
    except FAILURES as error:
        failure = error
    cpu = fallback_for(failure)
    if cpu is None or names_vendor_memory(request):
        if result is None:
            raise failure
        return result._replace(message="; ".join([result.message, *vars(failure).get("__notes__", ())]))
    if not names_buffers(request):
        if (found := cpu.perform(failure, lambda executor: executor.perform(job))) is not None:
            return found
        if result is None:  # as in a burst
            raise failure
        return result
    if isinstance(failure, PeerDied):
        raise lost(request) from failure
    try:
        evacuated = EvacuatedJob(cpu.model, job)
    except StatusError as error:  # an input without a value
        return error.as_result()
    return cpu.attempt(failure, cpu.prepared, evacuated.perform_by)


def is_final(attempt: Callable[[], Result]) -> bool:
    """Return True if no other device may do better."""
    try:
        return attempt().status in _FINAL
    except Exception as error:  # noqa: BLE001 (whatever it is)
        return not is_retryable(error)


class FallbackExecutor:
    """A model on a device, or in steps, with the CPU behind it.

    When the device has died, the CPU takes its place, until the device is there again and has prepared the model.
    """

    def __init__(self, first: Executor, fallback: CpuFallback | None, steps: int = 1) -> None:
        """Execute by `prepared`. `fallback`: None where nothing may fall back. `steps`: each has a job's duration."""
        self.prepared, self.fallback = first, fallback  #: `prepared` executes now
        self.life = 0  #: counts deaths and returns: odd while the CPU is in the device's place
        self._moving, self._is_closed = threading.Lock(), False
        self._first, self._steps = first, steps
        self._comeback: Comeback | None = None
        if fallback is not None and first.remote is not None:
            self._comeback = Comeback(self, first.remote)

    @property
    def model(self) -> Model:
        return self._first.model

    @property
    def remote(self) -> RemoteExecutor | None:
        return self.prepared.remote

    @property
    def is_replaced(self) -> bool:
        """True if the CPU is in the place of its device."""
        return bool(self.life % 2)

    def perform(self, job: Job) -> Result:
        """Execute the job on the device, or else on the CPU."""
        life = self.life
        return self._with_fallback(lambda: self._checked(self.prepared.perform(job)), job, life)

    def _checked(self, result: Result) -> Result:
        graph = self.prepared.model.main
        check_shapes([graph.operands[i] for i in graph.outputs], result.output_shapes)
        return result

    def start(self, job: Job) -> Completion:
        """Execute it on the device; what falls back does so in another thread."""
        life, whole = self.life, Completion()

        def then(execution: Completion) -> None:
            def attempt() -> Result:
                return self._checked(execution.result())

            if is_final(attempt):
                whole.settle(execution.result)
            else:
                BACKGROUND.complete(whole, partial(self._with_fallback, attempt, job, life))

        follow(whole, self.prepared.start(job), then)
        return whole

    def _with_fallback(self, attempt: Callable[[], Result], job: Job, life: int) -> Result:
        return perform_with_fallback(attempt, lambda error: self.fallback_for(error, life), job)

    def launch_or_replace(self, job: Job) -> FencedExecution:
        """Launch it; on the CPU if it cannot be launched, and not if it fails later."""
        life = self.life
        try:
            return self.prepared.launch(job)
        except FAILURES as error:
            return self.replacement(error, life).take_over(error).launch(job)

    def launch(self, job: Job) -> FencedExecution:
        """Launch it on the device; if it fails there, the CPU executes it in this process."""
        life = self.life
        if self.fallback is None or self.is_replaced:
            return self.launch_or_replace(job)
        whole = job if job.duration is None else job._replace(duration=job.duration * self._steps)
        with launching(whole) as launch:  # before the device has it: from then on nothing may fail here
            launched = self.launch_or_replace(job)
            if life != self.life:
                return launched

            def execute(end: int | None) -> Result:
                def fallback_for(error: BaseException) -> CpuFallback | None:
                    cpu = self.fallback_for(error, life)
                    if cpu is not None:
                        check("queued", end)
                    return cpu

                return perform_with_fallback(launched.result, fallback_for, job.by(end))

            return FencedFallback(launched, self.model, launch, execute)

    def open_burst(self, options: Options, parts: BurstParts = PLAIN) -> AnyBurst:
        """Return a burst on the device, with the CPU behind it, or one on the CPU if the device opens none."""
        if self._is_closed:
            raise ValueError(CLOSED)
        life = self.life
        try:
            return self.prepared.open_burst(options, parts._replace(fallback=self if self.fallback else None))
        except FAILURES as error:
            return self.replacement(error, life).take_over(error).open_burst(options, parts)

    def free_memory(self, memory: Memory) -> None:
        """Let what executes now unmap a pool."""
        self.prepared.free_memory(memory)

    def replacement(self, error: BaseException, life: int) -> CpuFallback:
        """Return what executes after that failure, as `fallback_for` says; raise it when there is nothing."""
        cpu = self.fallback_for(error, life)
        if cpu is None:
            raise error
        return cpu

    def fallback_for(self, error: BaseException, life: int) -> CpuFallback | None:
        """Return what executes after that failure of a request that was made in that `life`; it takes the place of a
        device that has died.

        None: there is nothing, or it would only fail again. Raise ValueError when the model is closed.
        """
        if self._is_closed:
            raise ValueError(CLOSED) from error
        if self.fallback is None or life % 2 or not is_retryable(error) or not self.fallback.can_take_over(error):
            return None
        if self._comeback and isinstance(error, PeerDied):
            has_moved = self._move(self.fallback.prepared, life)
            if has_moved and not isinstance(error, Quarantined):
                self._comeback.begin()
        return self.fallback

    # ---- for the bursts of its device

    def perform_at(self, error: BaseException, home: Home, perform: Callable[[Executor], Result]) -> Result:
        """Return what `perform` makes by what executes after a failure of the device in the life that was at that home.

        Raise the failure if there is nothing, or if the request fails there, too.
        """
        found = self.replacement(error, self._life_at(home)).perform(error, perform)
        if found is None:
            raise error
        return found

    def perform_with_fallback(
        self, attempt: Callable[[], Result], job: Job, home: Callable[[BaseException], Home]
    ) -> Result:
        """Return what `attempt` gives, or what the fallback gives if the device has failed.

        home: returns where the burst was when the device failed with that error.
        """
        return perform_with_fallback(attempt, lambda error: self.fallback_for(error, self._life_at(home(error))), job)

    def _life_at(self, home: Home) -> int:
        return self.life if self.home is home else _PAST

    @property
    def home(self) -> Home | None:
        """The place where its device has prepared the model now; None while the CPU is in the device's place."""
        remote = self.prepared.remote
        return None if remote is None or self.is_replaced else remote.home

    def report(self) -> dict[str, Any]:
        """Return all fallbacks of the compiled model."""
        return self.fallback.report() if self.fallback else {}

    def come_back(self) -> None:
        """Go back to the device: it is there again, and has prepared the model."""
        if self._move(self._first, self.life) and self.fallback:
            self.fallback.note_return()

    def close(self) -> None:
        """Free the model where it is; it does not move any more."""
        self._is_closed = True
        if self._comeback:
            self._comeback.end()
        if self.fallback:
            self.fallback.close()
        with suppress(PeerDied, DriverError):  # with its device, the model is gone too
            self.prepared.close()

    def _move(self, prepared: Executor, life: int) -> bool:
        """Have `prepared` execute from now on, unless another thread has moved it in that life."""
        with self._moving:
            if life != self.life:
                return False
            self.prepared = prepared
            self.life += 1
            return True
