"""`burst devices`: lists the devices of this machine, with capabilities and speed."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from burst import BurstError
from driver.cli.comparison import WAYS, add_model, refusal, remote_calls
from driver.cli.epilog import examples
from driver.cli.output import echo, json_option, print_json, print_line, print_table, progress, spelled
from driver.cli.timing import count_for, seconds_of, time_calls
from driver.client import discovery
from driver.client.device import connect, status_of
from driver.devices import device_class, missing, names
from driver.errors import DeviceFailed, DriverError
from driver.nn.older import minor
from driver.protocol.stated_capabilities import FIGURES
from driver.runtime import capabilities as measures
from driver.service.serve import DEFAULT_DIR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.client.device import RemoteDevice
    from driver.interface import Capabilities
    from driver.nn import Model

_FIRST_LEVEL, _NEWEST_LEVEL = 27, 30  # Android's feature levels of the HAL 1.0 and 1.3
_SECONDS = 0.3  # measuring time for each way to call a device


@dataclass(slots=True)
class _Row:
    """The known facts about a device. --json prints the same fields."""

    name: str  #: for `driver.connect`
    version: str = ""
    type: str = ""
    feature_level: int | None = None  #: 27 to 30 for the HAL 1.0 to 1.3; None: not known
    needs: dict[str, Sequence[str]] | None = None  #: of the system: paths and system calls; None: not known
    cache_files: dict[str, int] | None = None  #: files of one compilation, beside the model; None: no caching
    runs: bool = False
    capabilities: dict[str, Any] | None = None  #: with their source, "stated" or "measured"; None: not known yet
    measured: dict[str, Any] | None = None
    status: str = "unknown"  #: what a device that runs says: available, busy, offline or unknown, and why
    is_installed: bool = True  #: False: something that it needs is missing; `reason` names it and the remedy
    reason: str = ""  #: why it cannot be used
    unmeasured: str = ""  #: why --measure has no round trips of it, although it works

    def note(self, capabilities: Capabilities | None) -> None:
        """Record capabilities under the HAL's names."""
        if capabilities is not None:
            operands = {name: p._asdict() for name, p in capabilities.operands.items()}
            others = {name: p and p._asdict() for name in FIGURES for p in [getattr(capabilities, name)]}
            self.capabilities = {"source": capabilities.source, "operands": operands, **others}


@click.command(epilog=examples("burst devices", "burst devices --measure"))
@click.option("--measure", is_flag=True, help="Start and measure each device; takes a few seconds.")
@json_option
def devices(measure: bool, as_json: bool) -> None:
    """List devices: type, version, capabilities, speed.

    Covers installed devices and those that `burst serve` runs in /run/burst. Without --measure, no device is started
    and capabilities come from the last measurement. What a driver states is shown as it is, and never measured. Exits
    with 1 if a device to be measured does not work; one whose extra is not installed is only listed.
    """
    try:
        discovery.runtime_dir()
    except DeviceFailed as error:
        echo(f"Error: no device can be reached or started: {error}", err=True)
    found = [*map(_installed, names()), *_served()]
    with progress() as tell:
        for device in found if measure else ():
            tell(f"measure {device.name}")
            if not device.reason:
                _measure(device)
    if as_json:
        print_json([asdict(device) for device in found])
    else:
        _show(found)
    raise SystemExit(1 if measure and any(d.reason and d.is_installed for d in found) else 0)


def _installed(name: str) -> _Row:
    try:
        kind = device_class(name)
        found = _Row(name, kind.version, kind.type, _FIRST_LEVEL + minor(kind.hal_version))
        if lacks := missing(name):
            found.is_installed, found.reason = False, f"not installed: {lacks.what}; {lacks.remedy}"
            return found
        found.cache_files, found.runs = kind.cache_files and kind.cache_files._asdict(), _is_running(name)
        found.needs = kind.needs._asdict()
        found.status = str(status_of(name))
        found.note(measures.known(name, kind))
    except Exception as error:  # noqa: BLE001 (a vendor's code may do anything when it is loaded)
        return _Row(name, reason=str(error))
    return found


def _is_running(name: str) -> bool:
    try:
        channel = discovery.running(name)
    except DeviceFailed as error:
        if error.is_of_all:
            return False  # as all of them: it is told once
        raise
    if channel:
        channel.close()
    return channel is not None


def _served() -> Iterator[_Row]:
    """Return the devices that other accounts serve, by the paths of their sockets."""
    if not os.access(DEFAULT_DIR, os.R_OK):
        return
    for path in sorted(DEFAULT_DIR.glob("*.sock")):
        try:
            with connect(str(path)) as device:
                files = device.number_of_cache_files_needed()
                found = _Row(str(path), device.version, device.type, cache_files=files._asdict(), runs=True)
                found.status = str(device.status())
                found.note(measures.stored(device.address, device.version))
        except (BurstError, DriverError, OSError) as error:
            found = _Row(str(path), reason=str(error))
        yield found


def _measure(found: _Row) -> None:
    """Start the device and record its capabilities and round trips."""
    begin = time.monotonic()
    try:
        with connect(found.name) as device:
            device.call("free", 0)  # a round trip to the engine process; frees nothing
            started = time.monotonic() - begin
            found.note(measures.taken(device))
            model = add_model()
            found.unmeasured = refusal(device, model)
            times = {} if found.unmeasured else _round_trips(device, model)
            found.measured = {"seconds_to_connect": started, **times}
            found.runs = True
    except (BurstError, DriverError, OSError) as error:
        found.reason = str(error)


def _round_trips(device: RemoteDevice, model: Model) -> dict[str, Any]:
    """Return times of the model, each way."""
    with remote_calls(device, model) as calls:
        return {name: _spread(call) for name, call in calls.items()}


def _spread(call: Callable[[], object]) -> dict[str, float]:
    us = time_calls(call, count_for(seconds_of(call, _SECONDS / 10), _SECONDS)) / 1e3
    p50, p99 = np.percentile(us, [50, 99])
    return {"p50_us": float(p50), "p99_us": float(p99), "calls": len(us)}


def _show(found: list[_Row]) -> None:
    known = [device for device in found if device.type]
    rows = [(d.name, d.type, d.version, _running(d), _files(d.cache_files)) for d in known]
    print_table(("device", "type", "version", "running", "cache files"), rows)
    _show_versions(known)
    _show_measured({device.name: device.measured for device in known if device.measured})
    _show_capabilities({device.name: device.capabilities for device in known if device.capabilities})
    for device in found:
        if device.reason or (device.runs and not _takes_work(device)):
            print_line(f"{device.name}: {device.reason or device.status}")
        elif device.unmeasured:
            print_line(f"{device.name}: works, and is measured by models of yours (burst bench): {device.unmeasured}")


def _show_versions(known: list[_Row]) -> None:
    older = [(d.name, d.feature_level) for d in known if d.feature_level and d.feature_level < _NEWEST_LEVEL]
    which = "All other" if older else "All"
    print_line(f"{which} installed devices accept models of the HAL 1.0 to 1.3 (feature level {_NEWEST_LEVEL}).")
    for name, level in older:
        print_line(f"{name}: models of the HAL up to 1.{level - _FIRST_LEVEL} (feature level {level})")


def _running(device: _Row) -> str:
    if not device.is_installed:
        return "not installed"
    if not device.runs:
        return "no"
    return "yes" if _takes_work(device) else f"yes, {device.status.partition(':')[0]}"


def _takes_work(device: _Row) -> bool:
    return device.status in {"available", "unknown"}


def _files(files: dict[str, int] | None) -> str:
    return f"{files['model']} + {files['data']}, and the model" if files else "no caching"


def _show_measured(found: dict[str, dict[str, Any]]) -> None:
    if found:
        rows = [row for name, measured in found.items() for row in _times(name, measured)]
        print_table(("device", "one execution of ADD on 4 floats", "p50", "p99"), rows, (2, 3))


def _times(name: str, measured: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for way in (way for way in WAYS if way in measured):
        yield name, way, spelled(measured[way]["p50_us"]), spelled(measured[way]["p99_us"])
        name = ""
    yield name, "connecting, including its start", spelled(1e6 * measured["seconds_to_connect"]), ""


def _show_capabilities(found: dict[str, dict[str, Any]]) -> None:
    """Print one row for each capability of the HAL that any device has."""
    if not found:
        print_line("Capabilities are not known yet; run: burst devices --measure")
        return
    all_ = {name: _figures(capabilities) for name, capabilities in found.items()}
    found = {name: found[name] for name, figures in all_.items() if any(figures.values())}  # others run files alone
    devices = [all_[name] for name in found]
    names = dict.fromkeys(name for figures in devices for name in figures)
    rows = [["source", *(capabilities["source"] for capabilities in found.values())]]
    rows += [[name, *(_performance(figures.get(name)) for figures in devices)] for name in names]
    print_line("Capabilities: time (and power) of an operation; 1 is numpy on this CPU.")
    print_table(("", *found), rows, range(1, 1 + len(found)))


def _figures(capabilities: dict[str, Any]) -> dict[str, Any]:
    others = {name: capabilities[name] for name in FIGURES if capabilities[name]}
    return {**capabilities["operands"], **others}


def _performance(figure: dict[str, float | None] | None) -> str:
    if figure is None:
        return "-"
    power = figure["power_usage"]
    return f"{figure['exec_time']:.2f}" + ("" if power is None else f" ({power:.2f})")
