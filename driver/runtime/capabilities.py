"""How fast a device is on this machine: measured against the CPU in this process, and remembered per device version.

The figures are those of the HAL: time and power per type of operand, relative to the CPU. Each compares the same small
network (`driver.runtime.workloads`) executed by turns here and there, transport included, by the quarter of the runs
that was disturbed least; it takes less than two seconds, at the first time that `driver.compile` has to choose. What a
device does not support has no figure, and costs infinitely much.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import StatusError
from driver.client.discovery import runtime_dir
from driver.client.served import is_path
from driver.devices import device_class, names
from driver.devices.reference import ReferenceDevice
from driver.errors import DeviceFailed
from driver.interface import Capabilities, DeviceInfo, Performance
from driver.runtime.local import LocalDevice
from driver.runtime.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.client.device import RemoteDevice
    from driver.nn import Model, Operation, Subgraph
    from driver.runtime.workloads import Workload

_BUDGET = 1.2  # seconds for all workloads; building and preparing them takes some more
_IN_A_ROW = 4  # runs of one party, before it is the other's turn
_RAPL = Path("/sys/class/powercap")
_FIGURES = ("relaxed_scalar", "relaxed_tensor", "if_performance", "while_performance")
_RELAXED = {"FLOAT32": "relaxed_scalar", "TENSOR_FLOAT32": "relaxed_tensor"}
CPU = Performance(1.0, 1.0)  # of everything on the CPU: what the others are measured in


class Cost(NamedTuple):
    """What operations of a model cost on one device. `capabilities` None: on the CPU."""

    model: Model
    capabilities: Capabilities | None
    by_power: bool = False

    def of(self, graph: Subgraph, operation: Operation) -> float:
        """Of one operation: a figure for the type of its first input; IF and WHILE add those of what they run."""
        if operation.type not in ("IF", "WHILE"):
            kind = graph.operands[operation.inputs[0]].type.name if operation.inputs else ""
            return self._figure(_RELAXED[kind] if self.model.relaxed and kind in _RELAXED else kind)
        numbers = [graph.operands[i].value for i in operation.inputs if graph.operands[i].type.name == "SUBGRAPH"]
        inner = [self._sum(self.model.referenced[n]) for n in numbers]
        if operation.type == "IF":
            return self._figure("if_performance") + sum(inner) / len(inner)
        return self._figure("while_performance") + sum(inner)

    def _sum(self, graph: Subgraph) -> float:
        return sum(self.of(graph, operation) for operation in graph.operations)

    def _figure(self, name: str) -> float:
        found: Performance | None = CPU
        if self.capabilities is not None:
            known = self.capabilities
            found = getattr(known, name) if name in _FIGURES else known.operands.get(name)
        if found is None:
            return math.inf
        return found.power_usage if self.by_power and found.power_usage is not None else found.exec_time


def has_power(capabilities: Capabilities) -> bool:
    """Whether all its figures say something about power."""
    figures = [*capabilities.operands.values(), *(getattr(capabilities, name) for name in _FIGURES)]
    return all(figure.power_usage is not None for figure in figures if figure)


def of(device: RemoteDevice) -> Capabilities:
    """Those that are stored, or else measured now and stored. Raises StatusError, PeerDied, DeviceFailed."""
    found = stored(device.address, device.version)
    if found is None:
        found = measured(device)
        store(device.address, device.version, found)
    return found


def measured(device: RemoteDevice) -> Capabilities:
    """Measures each workload that the device supports; about a second. Raises PeerDied."""
    figures: dict[str, Performance] = {}
    end = time.monotonic() + _BUDGET
    for left, workload in zip(range(len(WORKLOADS), 0, -1), WORKLOADS, strict=True):
        until = time.monotonic() + max(0.0, end - time.monotonic()) / left
        with suppress(StatusError):  # what a device promised and does not do has no figure
            performance = _measured(device, workload, until)
            figures |= dict.fromkeys(workload.figures, performance) if performance else {}
    others = {name: figures.pop(name, None) for name in _FIGURES}
    return Capabilities(figures, **others)


def _measured(device: RemoteDevice, workload: Workload, until: float) -> Performance | None:
    model = workload.build()
    if not all(device.supported_operations(model)):
        return None
    ours = LocalDevice().prepare(model)
    with device.prepare(model) as theirs, theirs.burst() as there, ours.burst() as here:
        for place in (*here.inputs, *there.inputs):
            assert place is not None
            place[...] = 0
        for run in (here.run, there.run):  # the first one is not like the others
            run()
        meter = _Meter()
        while not meter.times[0] or time.monotonic() < until:
            for party, run in ((0, here.run), (1, there.run)):
                for _ in range(_IN_A_ROW):
                    meter.note(party, run)
    return meter.performance()


class _Meter:
    """Time and energy of two parties by turns."""

    def __init__(self) -> None:
        self.times: tuple[list[float], list[float]] = [], []
        self._energies: tuple[list[int | None], list[int | None]] = [], []

    def note(self, party: int, run: Callable[[], object]) -> None:
        """Runs once."""
        energy, begin = energy_uj(), time.perf_counter()
        run()
        self.times[party].append(time.perf_counter() - begin)
        after = energy_uj()
        self._energies[party].append(None if energy is None or after is None or after < energy else after - energy)

    def performance(self) -> Performance:
        """Of the second, relative to the first."""
        sums = [sum(e) if (e := [e for e in party if e is not None]) else 0 for party in self._energies]
        counts = [sum(e is not None for e in party) for party in self._energies]
        power = None
        if all(sums) and all(counts):
            power = (sums[1] / counts[1]) / (sums[0] / counts[0])
        ours, theirs = (quantiles(times, n=4)[0] for times in self.times)
        return Performance(theirs / ours, power)


def energy_uj(directory: Path = _RAPL) -> int | None:
    """Microjoules that the processor packages have used since some moment, or None where that cannot be read."""
    try:
        files = sorted(directory.glob("intel-rapl:[0-9]*/energy_uj"))
        packages = [int(file.read_text()) for file in files if file.parent.name.count(":") == 1]
    except (OSError, ValueError):
        return None
    return sum(packages) if packages else None


# ---- remembered


def store(address: str, version: str, capabilities: Capabilities) -> None:
    """For this version of the device, and of the CPU that it was measured against."""
    path = _path(address)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    text = json.dumps({"version": version, "cpu": ReferenceDevice.version, **capabilities._asdict()}, indent=1)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.replace(path)  # at once: who reads sees the old figures or the new


def digest(address: str) -> bytes:
    """Of what is stored, so that others can tell when it was measured anew."""
    with suppress(OSError, DeviceFailed):
        return hashlib.sha256(_path(address).read_bytes()).digest()
    return b""


def devices() -> list[DeviceInfo]:
    """Every installed device, with the capabilities that are stored. Nothing is started by asking."""
    found = [(name, device_class(name)) for name in names()]
    return [DeviceInfo(kind.name, kind.version, kind.type, stored(name, kind.version)) for name, kind in found]


def stored(address: str, version: str) -> Capabilities | None:
    """What was measured of this version, or None."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, DeviceFailed):
        plain = json.loads(_path(address).read_text())
        if (plain["version"], plain["cpu"]) == (version, ReferenceDevice.version):
            operands = {str(name): _performance(figure) for name, figure in plain["operands"].items()}
            others = {name: plain[name] and _performance(plain[name]) for name in _FIGURES}
            return Capabilities(operands, **others)
    return None


def _performance(plain: Any) -> Performance:
    exec_time, power_usage = plain
    return Performance(float(exec_time), None if power_usage is None else float(power_usage))


def _path(address: str) -> Path:
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", address)
    if is_path(address):  # others give the same stem
        stem += "-" + hashlib.sha256(os.fsencode(address)).hexdigest()[:16]
    return runtime_dir() / "capabilities" / f"{stem}.json"
