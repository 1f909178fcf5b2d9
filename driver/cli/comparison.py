"""Compares the ways to execute one model on one device: in this process, through a burst, on the plain path.

A model file is compared with the same file in its own runtime, and each call writes its inputs. Any other model is
compared with the device's code in this process, and its inputs are in place.
"""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import BurstError
from driver.cli.timing import Estimate, count_for, estimate, order_of_round, seconds_of, time_calls
from driver.client.device import connect
from driver.client.job import Job, perform_with_room
from driver.client.workspace import InputSet, OutputSet, Workspace, input_shapes
from driver.devices import device_class
from driver.errors import DeviceFailed, DriverError
from driver.nn import ModelBuilder
from driver.nn.file_form import is_file
from driver.runtime.frame_cost import processor_ns
from driver.runtime.local import LocalDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from driver.cli.own_runtime import OwnRuntime
    from driver.client.device import RemoteDevice
    from driver.client.prepared_model import RemotePreparedModel
    from driver.nn import Model

    Calls = dict[str, Callable[[], object]]

WAYS = POLLING, SLEEPING, PLAIN = "burst, polling", "burst, sleeping", "plain path"


def add_model() -> Model:
    """Return a model that adds four floats to four floats."""
    builder = ModelBuilder()
    a, b = builder.input("float32", (1, 4)), builder.input("float32", (1, 4))
    builder.output(builder.operation("ADD", a, b, 0))
    return builder.build()


@contextmanager
def remote_calls(
    device: RemoteDevice, model: Model, arrays: Sequence[Any] | None = None, *, writes: bool = False
) -> Iterator[Calls]:
    """Prepare a model and open two bursts on it; yield the call of each way, by its name. Idle bursts sleep.

    `arrays`: the inputs; by default ones, if the model declares all shapes. `writes`: each call copies them to the
    device; else they are in place. Raise as `device.prepare` does.
    """
    operands = [model.main.operands[i] for i in model.main.inputs]
    inputs = arrays or [np.ones(o.dimensions, o.type.dtype) for o in operands]
    with device.prepare(model) as prepared, ExitStack() as stack:
        polling, sleeping = (_burst(stack, prepared, inputs, writes, **options) for options in ({}, {"spin": 0}))
        plain = partial(prepared.run, *inputs) if writes else _plain_path(prepared, inputs)
        yield {POLLING: polling, SLEEPING: sleeping, PLAIN: plain}


def _burst(
    stack: ExitStack, prepared: RemotePreparedModel, arrays: Sequence[Any], writes: bool, **options: Any
) -> Callable[[], object]:
    burst = stack.enter_context(prepared.burst(input_shapes=[array.shape for array in arrays], **options))
    burst.run(*arrays)
    return partial(burst.run, *arrays) if writes else burst.run


def _plain_path(prepared: RemotePreparedModel, arrays: Sequence[Any]) -> Callable[[], object]:
    """Build one request; its outputs have the size that a first execution reports."""
    workspace = Workspace(InputSet(prepared.model, input_shapes(prepared.model, arrays)), OutputSet(prepared.model))
    workspace.inputs.fill(arrays)
    perform_with_room(prepared.executor.perform, Job(workspace.request), workspace.grown_for).raise_for_status()
    return partial(prepared.execute, workspace.request)


IN_PROCESS = "in this process"
_FEWEST_ROUNDS, _ROUNDS = 6, 15  # six give an interval of 95 %


class Way(NamedTuple):
    """The figures of one way to execute. Times are microseconds."""

    name: str
    p50: Estimate  #: of the medians of all rounds
    p99: float  #: of all calls
    processor: float  #: time that this process and the device use for a call, the median of all rounds
    ratio: Estimate | None  #: to the first way in the same round
    calls: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result: the figures of each way, or the reason why there are none."""

    device: str
    model: str
    form: str  #: "file" or "operations"; "" of what is no file
    is_pinned: bool
    rounds: int = 0
    ways: tuple[Way, ...] = ()
    reason: str = ""  #: why there are none
    is_refused: bool = False  #: the device works, and does not take the model

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as --json prints it."""
        ways = [
            {**way._asdict(), "p50": _plain(way.p50), "ratio": way.ratio and _plain(way.ratio)} for way in self.ways
        ]
        plain = {"device": self.device, "model": self.model, "form": self.form, "pinned": self.is_pinned}
        return {**plain, "rounds": self.rounds, "us": ways, "reason": self.reason}

    @property
    def title(self) -> str:
        """The thing that was measured, in words."""
        if not self.device:
            return f"{self.model} as {'it is' if self.form == 'file' else 'operations of the HAL'}"
        form = {"file": " as it is", "operations": " as operations", "": ""}[self.form]
        return f"{self.model}{form} on {self.device}"


def _plain(found: Estimate) -> dict[str, float]:
    return {"value": found.median, "low": found.low, "high": found.high, "confidence": found.confidence}


class Subject(NamedTuple):
    """A model in one form that is measured, with its inputs. `own`: the file that it came from, in its own runtime."""

    name: str
    model: Model
    arrays: Sequence[Any]
    own: OwnRuntime | None = None
    is_from_file: bool = False

    @property
    def form(self) -> str:
        """The words of `Comparison.form`."""
        return "file" if is_file(self.model) else "operations" if self.is_from_file else ""


def compared(device: str, subject: Subject, seconds: float, *, pin: bool) -> Comparison:
    """Measure for about `seconds`, after some preparation. If it cannot measure, the result holds the reason.

    `pin`: pins client and device to separate CPUs, if there are two.
    """
    pin = pin and len(os.sched_getaffinity(0)) > 1
    found = Comparison(device, subject.name, subject.form, pin)
    try:
        with _own(device) as remote:
            if reason := refusal(remote, subject.model):
                return replace(found, reason=reason, is_refused=True)
            calls = _calls_here(device, subject)
            with remote_calls(remote, subject.model, subject.arrays, writes=subject.own is not None) as others:
                here = set(calls)
                settle = _pinned(remote, here) if pin else lambda _way: None
                used = partial(processor_ns, (remote.service_pid, remote.engine_pid))
                rounds = _rounds(calls | others, seconds, settle, used)
                return replace(found, rounds=len(rounds[PLAIN]), ways=_ways(rounds))
    except (BurstError, DriverError, OSError) as error:
        return replace(found, reason=str(error))


def refusal(device: RemoteDevice, model: Model) -> str:
    """Return why the device does not take the model; "" if it does."""
    reasons = [(n, reason) for n, reason in enumerate(device.explain(model)) if reason is not None]
    if not reasons:
        return ""
    number, reason = reasons[0]
    where = "" if is_file(model) else f"operation {number} ({model.main.operations[number].type}): "
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return f"{where}{reason}{more}"


def _calls_here(device: str, subject: Subject) -> Calls:
    """Return the call in this process: of the file's own runtime, else of the device's code."""
    if subject.own is not None:
        return {subject.own.name: subject.own.call}
    with suppress(Exception):  # a device may need something that only its own process has
        return {IN_PROCESS: _here(device, subject.model, subject.arrays)}
    return {}


def _here(device: str, model: Model, arrays: Sequence[Any]) -> Callable[[], object]:
    """Return a call of the device's own code in this process, on a request that is bound once."""
    prepared = LocalDevice(device_class(device)()).prepare(model)
    space = Workspace(InputSet(model, input_shapes(model, arrays)), OutputSet(model))
    space.inputs.fill(arrays)
    perform_with_room(prepared.local.perform, Job(space.request), space.grown_for)
    return prepared.local.bind(space.request).run


class _Block(NamedTuple):
    """The microseconds of each call, and those of processor time for one of them."""

    took: NDArray[np.float64]
    used: float


def _rounds(
    calls: Calls, seconds: float, settle: Callable[[str], object], used: Callable[[], int]
) -> dict[str, list[_Block]]:
    """Return a block for each way and round. `settle`: called before each, with the name of the way. `used`: says how
    much processor time was used so far, in ns.
    """
    share = seconds / (_ROUNDS + 1) / len(calls)
    each = {name: seconds_of(call, share / 10) for name, call in calls.items()}
    rounds = max(_FEWEST_ROUNDS, min(_ROUNDS, int(seconds / sum(each.values()) / 2)))
    counts = {name: count_for(each[name], seconds / rounds / len(calls)) for name in calls}
    found: dict[str, list[_Block]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in order_of_round(list(calls), number):
            settle(name)
            time_calls(calls[name], 1 + counts[name] // 20)  # wakes what slept
            begin = used()
            took = time_calls(calls[name], counts[name]) / 1e3
            found[name].append(_Block(took, (used() - begin) / 1e3 / counts[name]))
    return found


def _ways(rounds: dict[str, list[_Block]]) -> tuple[Way, ...]:
    p50 = {name: np.array([np.median(block.took) for block in blocks]) for name, blocks in rounds.items()}
    first = next(iter(p50.values()))
    ways = []
    for name, blocks in rounds.items():
        every, used = np.concatenate([b.took for b in blocks]), float(np.median([b.used for b in blocks]))
        ratio = None if p50[name] is first else estimate(p50[name] / first)
        ways.append(
            Way(name, estimate(p50[name]), float(np.percentile(every, 99)), used, ratio=ratio, calls=len(every))
        )
    return tuple(ways)


@contextmanager
def _own(name: str) -> Iterator[RemoteDevice]:
    """Yield a device that no other program uses: in its own runtime directory, ended with the block."""
    usable = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="burst-bench-") as folder:
        before = os.environ.get("BURST_RUNTIME_DIR")
        os.environ["BURST_RUNTIME_DIR"] = folder
        try:
            device = connect(name)
        except DeviceFailed as error:
            said = [line for log in Path(folder).glob("*.log") for line in log.read_text().splitlines()]
            raise DeviceFailed(f"device {name!r} did not start: {said[-1] if said else error}") from error
        finally:
            os.environ.pop("BURST_RUNTIME_DIR")
            if before is not None:
                os.environ["BURST_RUNTIME_DIR"] = before
        try:
            yield device
        finally:
            device.close()
            _move(os.getpid(), usable)
            with suppress(ProcessLookupError):
                os.kill(device.service_pid, signal.SIGTERM)  # the engine ends with it


def _pinned(device: RemoteDevice, here: Collection[str]) -> Callable[[str], None]:
    """Pin the client to one CPU and the execution to the others: the device's, and in ways `here` this process."""
    ours, *theirs = sorted(os.sched_getaffinity(0))
    for pid in (device.service_pid, device.engine_pid):
        _move(pid, theirs)
    return lambda way: _move(os.getpid(), theirs if way in here else [ours])


def _move(pid: int, processors: Iterable[int]) -> None:
    """Move all threads of a process to the given CPUs."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), processors)
