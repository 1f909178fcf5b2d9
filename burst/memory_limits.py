"""How much memory this process may still take: a new pool must fit in it.

A memfd takes its pages when they are first touched. A pool that is too large would end the process long after it was
made, so its size is checked when it is made: against what the machine, the control group and the process limits leave.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from burst.errors import ResourceExhaustedPersistent

_SMALL = 2**20  # bytes; smaller pools are not checked, since the figures are less exact than that
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def check_available(nbytes: int) -> None:
    """Raises ResourceExhaustedPersistent when fewer bytes are available."""
    if nbytes < _SMALL:
        return
    available, of = available_bytes()
    if nbytes > available:
        raise ResourceExhaustedPersistent(
            f"nbytes={nbytes}: a pool needs {nbytes} bytes, and {available} are available ({of}); "
            "make it smaller, or free others"
        )


def available_text() -> str:
    """What is available, for messages."""
    available, of = available_bytes()
    return f"{available} bytes are available ({of})"


def descriptors_text() -> str:
    """Why no descriptor is left, and the remedy, for messages."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"all {most} descriptors that this process may have are open (ulimit -n): close some, or raise the limit"


def available_bytes() -> tuple[int, str]:
    """The tightest of all limits in bytes, and its name."""
    found = [(_machine(), "the machine's memory"), (_control_group(), "its control group")]
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        found.append((size, "RLIMIT_FSIZE"))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        pages = int((_PROC / "self/statm").read_text().split()[0])
        found.append((space - pages * os.sysconf("SC_PAGE_SIZE"), "RLIMIT_AS"))
    available, of = min((value, of) for value, of in found if value is not None)
    return max(0, available), of


def _machine() -> int | None:
    rows = _figures(_PROC / "meminfo")
    return 1024 * (rows["MemAvailable:"] + rows["SwapFree:"]) if "MemAvailable:" in rows else 2**63


def _control_group() -> int | None:
    """What our groups leave (control groups version 2); None without a limit."""
    with suppress(OSError, ValueError, StopIteration):
        rows = (_PROC / "self/cgroup").read_text().splitlines()
        inside = next(row for row in rows if row.startswith("0::")).removeprefix("0::").strip("/")
        groups = [_CGROUPS.joinpath(*inside.split("/")[:n]) for n in range(len(inside.split("/")) + 1)]
        return min((left for group in groups if (left := _left(group)) is not None), default=None)
    return None


def _left(group: Path) -> int | None:
    """The kernel takes back pages of inactive files when it needs them, so they count as free."""
    try:
        most = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # the group is not visible here, or its limit is "max"
        return None
    return most - used + _figures(group / "memory.stat").get("inactive_file", 0)


def _figures(path: Path) -> dict[str, int]:
    with suppress(OSError):
        words = [row.split() for row in path.read_text().splitlines()]
        return {name: int(value) for name, value, *_ in words}
    return {}
