"""One model on one device, executed in each of the ways that there are, by turns.

Every round has a block of every way, in an order that turns, so that all of them meet the same machine. What is claimed
is the median over rounds of what was paired within them, with an interval for that median.
"""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import BurstError
from driver.cli.timing import Median, count_for, median, seconds_of, timed
from driver.cli.work import PLAIN, Work
from driver.client.device import connect
from driver.client.workspace import InputSet, OutputSet, Workspace
from driver.devices import device_class
from driver.errors import DeviceFailed, DriverError
from driver.runtime.local import LocalDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from driver.client.device import RemoteDevice
    from driver.nn import Model

    Calls = dict[str, Callable[[], object]]

IN_PROCESS = "in this process"
_FEWEST_ROUNDS, _ROUNDS = 6, 15  # six are enough for an interval of 95 %


class Way(NamedTuple):
    """One of the ways. Times are microseconds."""

    name: str
    p50: Median  #: of the medians of all rounds
    p99: float  #: of all calls
    ratio: Median | None  #: of the medians, to the first way's in the same round
    calls: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it."""

    device: str
    model: str
    is_pinned: bool
    rounds: int = 0
    ways: tuple[Way, ...] = ()
    reason: str = ""  #: why there are none

    def as_json(self) -> dict[str, Any]:
        """With plain parts."""
        ways = [
            {**way._asdict(), "p50": way.p50._asdict(), "ratio": way.ratio and way.ratio._asdict()} for way in self.ways
        ]
        plain = {"device": self.device, "model": self.model, "pinned": self.is_pinned, "rounds": self.rounds}
        return {**plain, "us": ways, "reason": self.reason}


def compared(device: str, name: str, model: Model, arrays: Sequence[Any], seconds: float, *, pin: bool) -> Comparison:
    """Takes about so long, and some time before that. What cannot be measured says why.

    `pin`: client and device to processors of their own, if there are two.
    """
    pin = pin and len(os.sched_getaffinity(0)) > 1
    try:
        with _own(device) as remote:
            if not all(remote.supported_operations(model)):
                return Comparison(device, name, pin, reason="it does not take all operations of this model")
            with Work(remote, model, arrays) as work:
                calls: Calls = {}
                with suppress(Exception):  # a device may need what only its own process has
                    calls[IN_PROCESS] = _here(device, model, arrays)
                calls |= work.calls()
                rounds = _rounds(calls, seconds, _pinned(remote) if pin else lambda _way: None)
                return Comparison(device, name, pin, len(rounds[PLAIN]), _ways(rounds))
    except (BurstError, DriverError, OSError) as error:
        return Comparison(device, name, pin, reason=str(error))


def _here(device: str, model: Model, arrays: Sequence[Any]) -> Callable[[], object]:
    """The device's own code in this process: one request, bound once."""
    prepared = LocalDevice(device_class(device)()).prepare(model)
    space = Workspace(InputSet(model, tuple(array.shape for array in arrays)), OutputSet(model))
    space.inputs.fill(arrays)
    result = prepared.execute(space.request)
    if result.output_shapes:
        space.grow(result.output_shapes)
    execution = prepared.bind(space.request)
    return execution.run


def _rounds(calls: Calls, seconds: float, settle: Callable[[str], object]) -> dict[str, list[NDArray[np.float64]]]:
    """Microseconds of each call, by way and round. `settle`: called before each block of a way."""
    share = seconds / (_ROUNDS + 1) / len(calls)
    each = {name: seconds_of(call, share / 10) for name, call in calls.items()}
    rounds = max(_FEWEST_ROUNDS, min(_ROUNDS, int(seconds / sum(each.values()) / 2)))
    counts = {name: count_for(each[name], seconds / rounds / len(calls)) for name in calls}
    found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in calls}
    names = list(calls)
    for n in range(rounds):
        turn = n % len(names)
        for name in [*names[turn:], *names[:turn]][:: -1 if n % 2 else 1]:
            settle(name)
            timed(calls[name], 1 + counts[name] // 20)  # what slept wakes up
            found[name].append(timed(calls[name], counts[name]))
    return found


def _ways(rounds: dict[str, list[NDArray[np.float64]]]) -> tuple[Way, ...]:
    p50 = {name: np.array([np.median(block) for block in blocks]) for name, blocks in rounds.items()}
    first = next(iter(p50.values()))
    ways = []
    for name, blocks in rounds.items():
        every = np.concatenate(blocks)
        ratio = None if p50[name] is first else median(p50[name] / first)
        ways.append(Way(name, median(p50[name]), float(np.percentile(every, 99)), ratio, len(every)))
    return tuple(ways)


@contextmanager
def _own(name: str) -> Iterator[RemoteDevice]:
    """A device that nobody else uses: in a runtime directory of its own, ended with the block."""
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


def _pinned(device: RemoteDevice) -> Callable[[str], None]:
    """The client on one processor, who executes on the others: the device, or this process while it does so itself."""
    ours, *theirs = sorted(os.sched_getaffinity(0))
    for pid in (device.service_pid, device.engine_pid):
        _move(pid, theirs)
    return lambda way: _move(os.getpid(), theirs if way == IN_PROCESS else [ours])


def _move(pid: int, processors: Iterable[int]) -> None:
    """All threads of a process."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), processors)
