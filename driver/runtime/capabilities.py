"""The speed of a device on this machine: as its driver states it, else measured; remembered per device version.

The figures are those of the HAL: time and power per type of operand, relative to the CPU in this process. What a driver
states is taken as it is, and nothing is measured beside it. Measured figures each compare the same small
network (`WORKLOADS`) executed by turns here and there, transport included, by the quarter of the runs
that was disturbed least; it takes less than two seconds, at the first time that `driver.compile` has to choose. What a
device does not support has no figure, and costs infinitely much.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from burst import StatusError
from driver.client.device import status_of
from driver.client.discovery import runtime_dir, stem_of
from driver.client.served_sockets import is_path
from driver.devices import device_class, lacking, names, not_installed
from driver.devices.reference import ReferenceDevice
from driver.errors import DeviceFailed
from driver.interface import Capabilities, DeviceInfo, Performance, Source
from driver.nn import ModelBuilder
from driver.protocol.stated_capabilities import FIGURES, all_figures, checked, types_of
from driver.runtime.local import LocalDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.client.device import RemoteDevice
    from driver.interface import Device
    from driver.nn import Model, Operation, Subgraph, Value


_SIDE, _CHANNELS, _BLOCKS = 32, 16, 3
_SCALE = 1 / 16


class Workload(NamedTuple):
    """A model, and what its time says something about."""

    build: Callable[[], Model]
    figures: tuple[str, ...]  #: HAL names of operand types, or fields of `Capabilities`


def mobile(dtype: str, *, relaxed: bool = False) -> Model:
    """Build depthwise separable convolutions of "float32", "float16", "quant8_asymm" or "quant8_asymm_signed"."""
    net = _Net(dtype, ModelBuilder(relaxed=relaxed))
    x = net.builder.input(dtype, (1, _SIDE, _SIDE, _CHANNELS), **net.quantisation)
    for _ in range(_BLOCKS):
        x = net.depthwise(x)
        x = net.pointwise(x)
    x = net.builder.operation("AVERAGE_POOL_2D", x, 2, 1, 1, _SIDE, _SIDE, 0)
    net.builder.output(x)
    return net.builder.build()


class _Net:
    """A builder of layers with seeded weights."""

    def __init__(self, dtype: str, builder: ModelBuilder) -> None:
        self.builder, self._random = builder, np.random.default_rng(1)
        self._dtype = {"float32": np.float32, "float16": np.float16, "quant8_asymm": np.uint8}.get(dtype, np.int8)
        self._zero = 128 if self._dtype is np.uint8 else 0
        self._is_quantised = dtype.startswith("quant8")
        self.quantisation: dict[str, Any] = {"scale": _SCALE, "zero_point": self._zero} if self._is_quantised else {}

    def depthwise(self, x: Value) -> Any:
        weights, bias = self._weights(1, 3, 3, _CHANNELS), self._bias()
        return self.builder.operation("DEPTHWISE_CONV_2D", x, weights, bias, 1, 1, 1, 1, 3, **self.quantisation)

    def pointwise(self, x: Value) -> Any:
        weights, bias = self._weights(_CHANNELS, 1, 1, _CHANNELS), self._bias()
        return self.builder.operation("CONV_2D", x, weights, bias, 1, 1, 1, 3, **self.quantisation)

    def _weights(self, *shape: int) -> Value:
        values = self._random.standard_normal(shape) / 8
        if self._is_quantised:
            values = np.round(values / _SCALE) + self._zero
        return self.builder.constant(values.astype(self._dtype), **self.quantisation)

    def _bias(self) -> Value:
        if self._is_quantised:
            return self.builder.constant(np.zeros(_CHANNELS, np.int32), scale=_SCALE * _SCALE)
        return self.builder.constant(np.zeros(_CHANNELS, self._dtype))


def _integers() -> Model:
    """Build a model of arithmetic on int32."""
    builder = ModelBuilder()
    x = builder.input("int32", (256, 1024))
    y = builder.operation("ADD", x, x, 0)
    builder.output(builder.operation("MUL", y, x, 0))
    return builder.build()


def _booleans() -> Model:
    builder = ModelBuilder()
    x = builder.input("bool8", (256, 1024))
    builder.output(builder.operation("LOGICAL_OR", builder.operation("LOGICAL_NOT", x), x))
    return builder.build()


def _branch() -> Model:
    """Return an IF between two additions."""
    builder = ModelBuilder()
    condition, x = builder.input("bool8", (1,)), builder.input("float32", (64, 64))
    builder.output(builder.operation("IF", condition, _plus(1.0), _plus(2.0), x))
    return builder.build()


def _plus(number: float) -> Model:
    builder = ModelBuilder()
    x = builder.input("float32", (64, 64))
    builder.output(builder.operation("ADD", x, np.full((1, 1), number, np.float32), 0))
    return builder.build()


def _loop() -> Model:
    """Return a WHILE of eight rounds."""
    condition, body, builder = ModelBuilder(), ModelBuilder(), ModelBuilder()
    x = condition.input("float32", (1,))
    condition.output(condition.operation("LESS", x, np.full(1, 8, np.float32)))
    body.output(body.operation("ADD", body.input("float32", (1,)), np.ones(1, np.float32), 0))
    builder.output(builder.operation("WHILE", condition.build(), body.build(), builder.input("float32", (1,))))
    return builder.build()


WORKLOADS = (
    Workload(lambda: mobile("float32"), ("FLOAT32", "TENSOR_FLOAT32")),
    Workload(lambda: mobile("float32", relaxed=True), ("relaxed_scalar", "relaxed_tensor")),
    Workload(lambda: mobile("quant8_asymm"), ("TENSOR_QUANT8_ASYMM",)),
    Workload(lambda: mobile("quant8_asymm_signed"), ("TENSOR_QUANT8_ASYMM_SIGNED",)),
    Workload(lambda: mobile("float16"), ("FLOAT16", "TENSOR_FLOAT16")),
    Workload(_integers, ("INT32", "TENSOR_INT32")),
    Workload(_booleans, ("BOOL", "TENSOR_BOOL8")),
    Workload(_branch, ("if_performance",)),
    Workload(_loop, ("while_performance",)),
)


_BUDGET = 1.2  # seconds for all workloads; building and preparing them takes some more
_IN_A_ROW = 4  # runs of one party, before it is the other's turn
_RAPL = Path("/sys/class/powercap")
_RELAXED = {"FLOAT32": "relaxed_scalar", "TENSOR_FLOAT32": "relaxed_tensor"}
CPU = Performance(1.0, 1.0)  # of everything on the CPU: what the others are measured in


class Cost(NamedTuple):
    """The cost of operations of a model on one device. `capabilities` None: on the CPU."""

    model: Model
    capabilities: Capabilities | None
    by_power: bool = False

    def of(self, graph: Subgraph, operation: Operation) -> float:
        """Return the cost of one operation: a figure for the type of its first input; IF and WHILE add those of what
        they run.
        """
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
            found = getattr(known, name) if name in FIGURES else known.operands.get(name)
        if found is None:
            return math.inf
        return found.power_usage if self.by_power and found.power_usage is not None else found.exec_time


def has_power(capabilities: Capabilities) -> bool:
    """Return True if all its figures say something about power."""
    return all(figure.power_usage is not None for figure in all_figures(capabilities))


def of(device: RemoteDevice) -> Capabilities:
    """Return what the driver states; else figures that are stored, or measured now and stored.

    Raise StatusError, also for a statement that makes no sense; PeerDied, DeviceFailed.
    """
    before, stated = stored(device.address, device.version), device.stated_capabilities()
    return before if before and before.source == "measured" and not stated else _kept(device, stated)


def taken(device: RemoteDevice) -> Capabilities:
    """Return what the driver states, else figures measured now; and store them. Raise what `of` does."""
    return _kept(device, device.stated_capabilities())


def _kept(device: RemoteDevice, stated: Capabilities | None) -> Capabilities:
    found = stated or measured(device)
    store(device.address, device.version, found)
    return found


def measured(device: RemoteDevice) -> Capabilities:
    """Measure each workload that the device supports; about a second. Raise PeerDied."""
    figures: dict[str, Performance] = {}
    end = time.monotonic() + _BUDGET
    for left, workload in zip(range(len(WORKLOADS), 0, -1), WORKLOADS, strict=True):
        until = time.monotonic() + max(0.0, end - time.monotonic()) / left
        with suppress(StatusError):  # what a device promised and does not do has no figure
            performance = _measured(device, workload, until)
            figures |= dict.fromkeys(workload.figures, performance) if performance else {}
    return Capabilities(figures, **{name: figures.pop(name, None) for name in FIGURES}, source="measured")


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
    """A meter of time and energy of two parties by turns."""

    def __init__(self) -> None:
        self.times: tuple[list[float], list[float]] = [], []
        self._energies: tuple[list[int | None], list[int | None]] = [], []

    def note(self, party: int, run: Callable[[], object]) -> None:
        """Run once, and note time and energy."""
        energy, begin = energy_uj(), time.perf_counter()
        run()
        self.times[party].append(time.perf_counter() - begin)
        after = energy_uj()
        self._energies[party].append(None if energy is None or after is None or after < energy else after - energy)

    def performance(self) -> Performance:
        """Return the performance of the second, relative to the first."""
        sums = [sum(e) if (e := [e for e in party if e is not None]) else 0 for party in self._energies]
        counts = [sum(e is not None for e in party) for party in self._energies]
        power = None
        if all(sums) and all(counts):
            power = (sums[1] / counts[1]) / (sums[0] / counts[0])
        from statistics import quantiles

        ours, theirs = (quantiles(times, n=4)[0] for times in self.times)
        return Performance(theirs / ours, power)


def energy_uj(directory: Path = _RAPL) -> int | None:
    """Return the microjoules that the processor packages have used since some moment; None: they cannot be read."""
    try:
        files = sorted(directory.glob("intel-rapl:[0-9]*/energy_uj"))
        packages = [int(file.read_text()) for file in files if file.parent.name.count(":") == 1]
    except (OSError, ValueError):
        return None
    return sum(packages) if packages else None


# ---- remembered


def store(address: str, version: str, capabilities: Capabilities) -> None:
    """Keep capabilities for this version of the device, and of the CPU that it was measured against."""
    path = _path(address)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    text = json.dumps({"version": version, "cpu": ReferenceDevice.version, **capabilities._asdict()}, indent=1)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.replace(path)  # at once: who reads sees the old figures or the new


def digest(address: str) -> bytes:
    """Return the digest of what is stored, so that others can tell when it was measured anew."""
    with suppress(OSError, DeviceFailed):
        return hashlib.sha256(_path(address).read_bytes()).digest()
    return b""


def devices() -> list[DeviceInfo]:
    """Return every device that an entry point names, with the capabilities that are stored. Starts none.

    `missing` says what keeps a device from being connected, `status` whether one that runs takes work.
    """
    return [_info(name) for name in names()]


def _info(name: str) -> DeviceInfo:
    try:
        kind = device_class(name)
    except Exception as error:  # noqa: BLE001 (a vendor's code may do anything when it is loaded)
        return DeviceInfo(name, "", "", missing=str(error))
    if lacks := lacking(name, kind):
        return DeviceInfo(name, kind.version, kind.type, missing=str(not_installed(name, lacks)))
    try:
        found = known(name, kind)
    except StatusError as error:
        return DeviceInfo(kind.name, kind.version, kind.type, missing=str(error), status=status_of(name))
    return DeviceInfo(kind.name, kind.version, kind.type, found, status=status_of(name))


def known(name: str, kind: type[Device]) -> Capabilities | None:
    """Return what is known without starting the device. Raise GeneralFailure for a statement that makes no sense."""
    stated: object = kind.capabilities
    if stated is None or isinstance(stated, property):
        return stored(name, kind.version)
    return checked(kind.name, stated, types_of(kind))


def stored(address: str, version: str) -> Capabilities | None:
    """Return what was measured of this version, or stated by its driver at the last connection; or None."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, DeviceFailed):
        plain = json.loads(_path(address).read_text())
        if (plain["version"], plain["cpu"]) == (version, ReferenceDevice.version):
            operands = {str(name): _performance(figure) for name, figure in plain["operands"].items()}
            others = {name: plain[name] and _performance(plain[name]) for name in FIGURES}
            return Capabilities(operands, **others, source=_source(plain["source"]))
    return None


def _source(plain: Any) -> Source:
    if plain not in get_args(Source):
        raise ValueError(plain)
    return plain  # type: ignore[no-any-return]


def _performance(plain: Any) -> Performance:
    exec_time, power_usage = plain
    return Performance(float(exec_time), None if power_usage is None else float(power_usage))


def _path(address: str) -> Path:
    stem = stem_of(address)
    if is_path(address):  # others give the same stem
        stem += "-" + hashlib.sha256(os.fsencode(address)).hexdigest()[:16]
    return runtime_dir() / "capabilities" / f"{stem}.json"
