"""Checks the packages that the engine needs, and that installed devices can be loaded and started."""

from __future__ import annotations

import importlib
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from burst import BurstError
from burst_engine.names import install_command
from driver.client.device import connect
from driver.devices import device_class, missing, names
from driver.devices.nvidia import NODES
from driver.errors import DeviceFailed, DriverError
from driver.finding import Finding, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.interface import Device

_NEEDED = {
    "fmq._core": "compiled message queues; nothing runs without them",
    "burst._core": "compiled bursts; only queues work without them",
    "numpy": "arrays",
    "msgpack": "messages between client and device",
    "blake3": "checksums of cache files",
    "sqlite3": "the blob store of compilations",
}


def packages() -> Iterator[Finding]:
    """Python, the compiled modules and the dependencies."""
    python = sys.version.split()[0]
    yield Finding("Python", "ok", f"{sys.implementation.name} {python}, {sys.executable}")
    for name, purpose in _NEEDED.items():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            yield Finding(
                name,
                "warning",
                f"cannot be loaded: {error}",
                purpose,
                remedy=f"{install_command()} --force-reinstall",
            )
        else:
            yield Finding(name, "ok", _version(name) or str(getattr(module, "__file__", "there")))
    yield Finding("posix_ipc", "ok", _version("posix_ipc") or "not installed; fmq opens named memory itself")


def _version(name: str) -> str | None:
    if name == "sqlite3":
        return f"SQLite {importlib.import_module(name).sqlite_version}"
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_NEEDS = "models for it run on the CPU instead, or not at all"


def installed() -> Iterator[Finding]:
    """Load the code of every device that an entry point names. Starts none."""
    if not (found := names()):
        yield Finding("devices", "warning", "none", "no model can run in another process", remedy=install_command())
    for name in found:
        try:
            kind, lacks = device_class(name), missing(name)
        except Exception as error:  # noqa: BLE001 (a vendor's code may do anything when it is loaded)
            remedy = "install what it lacks, or uninstall the package that provides it"
            yield Finding(f"device {name}", "warning", f"cannot be loaded: {error}", _NEEDS, remedy=remedy)
            continue
        if lacks and not _may_have_hardware(kind):
            yield Finding(f"device {name}", "ok", f"not installed, and this machine shows no {kind.type} for it")
        elif lacks:
            yield Finding(f"device {name}", "note", f"not installed: {lacks.what}", _NEEDS, remedy=lacks.remedy)
        else:
            yield Finding(f"device {name}", "ok", f"version {kind.version}, {kind.type}; needs: {kind.needs}")


def _may_have_hardware(kind: type[Device]) -> bool:
    """Return False if none of the device files that it opens is here, nor another file of a GPU of NVIDIA's."""
    nodes = [path for path in (*kind.needs.read_paths, *kind.needs.write_paths) if path.startswith("/dev/")]
    return not nodes or any(Path(path).exists() for path in (*nodes, *NODES))


def started() -> Iterator[Finding]:
    """Start each device that lacks nothing, and report how long it took."""
    for name in (name for name in names() if not missing(name)):
        begin = time.monotonic()
        try:
            with connect(name) as device:
                device.call("free", 0)
                found = f"pids {device.connection.service_pid}, {device.connection.engine_pid}"
                status = device.status()
        except (BurstError, DriverError, OSError) as error:
            yield Finding(
                f"start of {name}", "warning", str(error), _NEEDS, remedy="read its log, and install what the log names"
            )
            if isinstance(error, DeviceFailed) and error.is_of_all:
                return  # the others would say the same
        else:
            state: State = "ok" if status.takes_work else "warning"
            words = f"connected in {time.monotonic() - begin:.2f} s, {found}; {status}"
            remedy = "" if status.takes_work else "do what the reason says, and end the device's processes"
            yield Finding(f"start of {name}", state, words, "" if status.takes_work else _NEEDS, remedy=remedy)
