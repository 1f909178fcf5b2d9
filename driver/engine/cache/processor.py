"""Kind and features of the processors, by which libraries choose their kernels."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_LINES = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)


@cache
def processor() -> str:
    """The kernel's description of them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {line for line in lines if line.partition(":")[0].strip() in _LINES}
    return "\n".join([os.uname().machine, *sorted(found)])
