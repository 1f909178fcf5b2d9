"""The conditions of a measurement: machine, kernel, load and versions."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def conditions() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    return {
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "governor": _text(_GOVERNOR) or "not readable",
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "at": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


def in_words(found: dict[str, Any]) -> str:
    """The conditions as one line of text."""
    load = " ".join(map(str, found["load"]))
    return (
        f"{found['processor']}, {found['processors']} usable, {found['kernel']}, "
        f"governor {found['governor']}, load {load}, Python {found['python']}, numpy {found['numpy']}, {found['at']}"
    )


def _processor() -> str:
    names = (
        line.partition(":")[2].strip() for line in _text(Path("/proc/cpuinfo")).splitlines() if "model name" in line
    )
    return next(names, platform.machine())


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
