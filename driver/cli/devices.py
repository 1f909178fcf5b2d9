"""`burst devices`: what can run models here, what it can, and how fast it is."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from burst import BurstError
from driver.cli.output import json_option, print_json, print_line, print_table, spelled, watched
from driver.cli.timing import count_for, seconds_of, timed
from driver.cli.work import WAYS, Work, add_model
from driver.client import discovery
from driver.client.device import connect
from driver.devices import device_class, names
from driver.errors import DriverError
from driver.runtime import capabilities as measures
from driver.service.serve import DEFAULT_DIR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.client.device import RemoteDevice
    from driver.interface import Capabilities

FEATURE_LEVEL = 30  # Android's number for what a driver of the HAL 1.3 can be asked, which all of ours can
_SECONDS = 0.3  # for each way to a device
_FIGURES = ("relaxed_scalar", "relaxed_tensor", "if_performance", "while_performance")


@dataclass(slots=True)
class _Found:
    """A device, as far as it is known. JSON has the same names."""

    name: str  #: for `driver.connect`
    version: str = ""
    type: str = ""
    feature_level: int = FEATURE_LEVEL
    cache_files: dict[str, int] | None = None  #: that a compilation takes, beside the model; None: none is kept
    runs: bool = False
    capabilities: dict[str, Any] | None = None  #: None: not measured yet
    measured: dict[str, Any] | None = None
    reason: str = ""  #: why it cannot be used

    def note(self, capabilities: Capabilities | None) -> None:
        """As the HAL has them, each figure with its name."""
        if capabilities is not None:
            plain = {"operands": {name: p._asdict() for name, p in capabilities.operands.items()}}
            others = {name: getattr(capabilities, name) for name in _FIGURES}
            self.capabilities = plain | {name: p and p._asdict() for name, p in others.items()}


@click.command()
@click.option("--measure", is_flag=True, help="Start each of them, and measure it anew: some seconds.")
@json_option
def devices(measure: bool, as_json: bool) -> None:
    """Lists the devices: what they are, what they can, how fast.

    Those that are installed, and those that `burst serve` runs in /run/burst. Without --measure nothing is started, and
    only capabilities are shown that were measured before. Exits with 1 when one that was to be measured does not work.
    """
    found = [*map(_installed, names()), *_served()]
    with watched() as tell:
        for device in found if measure else ():
            tell(f"measure {device.name}")
            if not device.reason:
                _measure(device)
    if as_json:
        print_json([asdict(device) for device in found])
    else:
        _show(found)
    raise SystemExit(1 if measure and any(device.reason for device in found) else 0)


def _installed(name: str) -> _Found:
    try:
        kind = device_class(name)
        files = kind.cache_files
        found = _Found(name, kind.version, kind.type, cache_files=files and files._asdict(), runs=_is_running(name))
        found.note(measures.stored(name, kind.version))
    except Exception as error:  # noqa: BLE001 (a vendor's code may do anything when it is loaded)
        return _Found(name, reason=f"cannot be used: {error}; pip install 'burst-engine[{name}]', or what it lacks")
    return found


def _is_running(name: str) -> bool:
    channel = discovery.find(discovery.Place(discovery.runtime_dir(), name))
    if channel:
        channel.close()
    return channel is not None


def _served() -> Iterator[_Found]:
    """Those of other accounts, by their sockets."""
    if not os.access(DEFAULT_DIR, os.R_OK):
        return
    for path in sorted(DEFAULT_DIR.glob("*.sock")):
        try:
            with connect(str(path)) as device:
                files = device.number_of_cache_files_needed()
                found = _Found(str(path), device.version, device.type, cache_files=files._asdict(), runs=True)
                found.note(measures.stored(device.address, device.version))
        except (BurstError, DriverError, OSError) as error:
            found = _Found(str(path), reason=str(error))
        yield found


def _measure(found: _Found) -> None:
    """Starts it, and notes what it does."""
    begin = time.monotonic()
    try:
        with connect(found.name) as device:
            device.call("free", 0)  # goes to its second process and back, and frees nothing
            started = time.monotonic() - begin
            capabilities = measures.measured(device)
            measures.store(device.address, device.version, capabilities)
            found.note(capabilities)
            found.measured = {"seconds_to_connect": started, **_round_trips(device)}
            found.runs = True
    except (BurstError, DriverError, OSError) as error:
        found.reason = str(error)


def _round_trips(device: RemoteDevice) -> dict[str, Any]:
    """Of ADD on four floats."""
    with Work(device, add_model()) as work:
        return {name: _spread(call) for name, call in work.calls().items()}


def _spread(call: Callable[[], object]) -> dict[str, float]:
    us = timed(call, count_for(seconds_of(call, _SECONDS / 10), _SECONDS))
    p50, p99 = np.percentile(us, [50, 99])
    return {"p50_us": float(p50), "p99_us": float(p99), "calls": len(us)}


def _show(found: list[_Found]) -> None:
    known = [device for device in found if device.type]
    rows = [(d.name, d.type, d.version, "yes" if d.runs else "no", _files(d.cache_files)) for d in known]
    print_table(("device", "type", "version", "runs", "cache files"), rows)
    print_line(f"all of them take models of the HAL 1.0 to 1.3, feature level {FEATURE_LEVEL}")
    _show_measured({device.name: device.measured for device in known if device.measured})
    _show_capabilities({device.name: _figures(device.capabilities) for device in known if device.capabilities})
    for device in found:
        if device.reason:
            print_line(f"{device.name}: {device.reason}")


def _files(files: dict[str, int] | None) -> str:
    return f"{files['model']} + {files['data']}, and the model" if files else "none kept"


def _show_measured(found: dict[str, dict[str, Any]]) -> None:
    if found:
        rows = [row for name, measured in found.items() for row in _times(name, measured)]
        print_table(("device", "one execution of ADD on 4 floats", "p50", "p99"), rows, (2, 3))


def _times(name: str, measured: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for way in WAYS:
        yield name, way, spelled(measured[way]["p50_us"]), spelled(measured[way]["p99_us"])
        name = ""
    yield "", "to connect, once, its start included", spelled(1e6 * measured["seconds_to_connect"]), ""


def _show_capabilities(found: dict[str, dict[str, Any]]) -> None:
    """A row for each figure of the HAL that any of them has."""
    if not found:
        print_line("their capabilities are not measured yet: burst devices --measure")
        return
    names = dict.fromkeys(name for figures in found.values() for name in figures)
    rows = [[name, *(_performance(figures.get(name)) for figures in found.values())] for name in names]
    print_table(("time (and power); the CPU here is 1", *found), rows, range(1, 1 + len(found)))


def _figures(capabilities: dict[str, Any]) -> dict[str, Any]:
    others = {name: capabilities[name] for name in _FIGURES if capabilities[name]}
    return {**capabilities["operands"], **others}


def _performance(figure: dict[str, float | None] | None) -> str:
    if figure is None:
        return "-"
    power = figure["power_usage"]
    return f"{figure['exec_time']:.2f}" + ("" if power is None else f" ({power:.2f})")
