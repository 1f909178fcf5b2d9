"""Installed devices: whether their code can be loaded, and whether they start."""

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

_NEEDS = "what is to run on it runs on the CPU, or not at all"


def installed() -> Iterator[Finding]:
    """All that the entry points name. Their code is loaded; nothing is started."""
    if not (found := names()):
        yield Finding("devices", "warning", "none", "nothing can run in another process", "pip install burst-engine")
    for name in found:
        try:
            kind = device_class(name)
        except Exception as error:  # noqa: BLE001 (a vendor's code may do anything when it is loaded)
            remedy = f"pip install 'burst-engine[{name}]', or uninstall what brought it"
            yield Finding(f"device {name}", "warning", f"cannot be loaded: {error}", _NEEDS, remedy)
        else:
            yield Finding(f"device {name}", "ok", f"version {kind.version}, {kind.type}")


def started() -> Iterator[Finding]:
    """Whether each of them comes up, and in what time."""
    for name in names():
        begin = time.monotonic()
        try:
            with connect(name) as device:
                device.call("free", 0)
                found = f"pids {device.connection.service_pid}, {device.connection.engine_pid}"
        except (BurstError, DriverError, OSError) as error:
            yield Finding(
                f"start of {name}", "warning", str(error), _NEEDS, "read its log; install what it names there"
            )
        else:
            yield Finding(f"start of {name}", "ok", f"connected in {time.monotonic() - begin:.2f} s, {found}")
