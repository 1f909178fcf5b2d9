"""Checks that installed devices can be loaded, and that they start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from burst import BurstError
from driver.client.device import connect
from driver.devices import device_class, names
from driver.doctor.finding import Finding
from driver.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator

_NEEDS = "models for it run on the CPU instead, or not at all"


def installed() -> Iterator[Finding]:
    """Loads the code of every device that an entry point names. Starts none."""
    if not (found := names()):
        yield Finding("devices", "warning", "none", "no model can run in another process", "pip install burst-engine")
    for name in found:
        try:
            kind = device_class(name)
        except Exception as error:  # noqa: BLE001 (a vendor's code may do anything when it is loaded)
            remedy = f"pip install 'burst-engine[{name}]', or uninstall the package that provides it"
            yield Finding(f"device {name}", "warning", f"cannot be loaded: {error}", _NEEDS, remedy)
        else:
            yield Finding(f"device {name}", "ok", f"version {kind.version}, {kind.type}")


def started() -> Iterator[Finding]:
    """Starts each device and reports how long it took."""
    for name in names():
        begin = time.monotonic()
        try:
            with connect(name) as device:
                device.call("free", 0)
                found = f"pids {device.connection.service_pid}, {device.connection.engine_pid}"
        except (BurstError, DriverError, OSError) as error:
            yield Finding(
                f"start of {name}", "warning", str(error), _NEEDS, "read its log, and install what the log names"
            )
        else:
            yield Finding(f"start of {name}", "ok", f"connected in {time.monotonic() - begin:.2f} s, {found}")
