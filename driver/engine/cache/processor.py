"""Kind and features of the processors, by which libraries choose their kernels."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_LINES = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)


_PROCESSORS = Path("/proc/cpuinfo")  # hidden by systemd's ProcSubset=pid
_OTHERWISE = Path("/sys/devices/system/cpu/modalias")
"""The same in one line, from kernels that tell it."""


@cache
def processor() -> str:
    """Return the kernel's description of them; where it gives none, this machine's name, as others may differ."""
    found = {line for line in _text(_PROCESSORS).splitlines() if line.partition(":")[0].strip() in _LINES}
    known = sorted(found) or [_text(_OTHERWISE) or os.uname().nodename]
    return "\n".join([os.uname().machine, *known])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
