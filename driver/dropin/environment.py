"""The variables below which every Python has the hook: what `burst exec` adds to a program's environment."""

from __future__ import annotations

import os
from importlib.resources import files
from typing import TYPE_CHECKING

from driver.dropin.hook import DEVICE, DROPINS, SWITCH
from driver.dropin.report import REPORT
from fmq.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

RUNTIMES = tuple(dict.fromkeys(name for name, _ in DROPINS.values()))
"""The runtimes whose classes are replaced."""

STARTUP = str(files("driver.dropin") / "startup")
"""The folder whose sitecustomize installs the hook."""


def environment_of_program(
    device: str | None = None, report: Path | None = None, only: str | None = None
) -> dict[str, str]:
    """Return this process's environment as a program gets it whose models are to run in a device.

    `device`: None: the one of each runtime. `report`: the file to which each process adds what ran where; it is there.
    `only`: the one runtime to replace.
    """
    environment = dict(os.environ)
    before = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place and place != STARTUP]
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP, *before])
    environment[SWITCH] = f"{__version__} {only or ','.join(RUNTIMES)}"
    for name, value in ((DEVICE, device), (REPORT, report and str(report.absolute()))):
        environment.pop(name, None)
        if value:
            environment[name] = value
    return environment
