"""How much memory this process may still take: what a pool has to fit in when it is made.

A memfd takes its pages when they are touched. More of them than there is would end a process long after, so pools are
held against what the machine, the control group and the limits of the process leave, when they are made.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from burst.errors import ResourceExhaustedPersistent

_SMALL = 2**20  # bytes, below which nobody looks: less than what the figures are good for
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def check_room(nbytes: int) -> None:
    """Raises ResourceExhaustedPersistent where that many bytes are not to be had."""
    if nbytes < _SMALL:
        return
    available, of = available_bytes()
    if nbytes > available:
        raise ResourceExhaustedPersistent(
            f"nbytes={nbytes}: a pool needs {nbytes} bytes, and {available} are available ({of}); "
            "make it smaller, or free others"
        )


def room() -> str:
    """For messages."""
    available, of = available_bytes()
    return f"{available} bytes are available ({of})"


def available_bytes() -> tuple[int, str]:
    """The least of what anybody leaves us, and who that is."""
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
    """What the groups that we are in leave, of version 2 of control groups; None where there is no limit."""
    with suppress(OSError, ValueError, StopIteration):
        rows = (_PROC / "self/cgroup").read_text().splitlines()
        inside = next(row for row in rows if row.startswith("0::")).removeprefix("0::").strip("/")
        groups = [_CGROUPS.joinpath(*inside.split("/")[:n]) for n in range(len(inside.split("/")) + 1)]
        return min((left for group in groups if (left := _left(group)) is not None), default=None)
    return None


def _left(group: Path) -> int | None:
    """Pages of files that nobody uses are given back when they are needed."""
    try:
        most = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no such group to be seen, or "max"
        return None
    return most - used + _figures(group / "memory.stat").get("inactive_file", 0)


def _figures(path: Path) -> dict[str, int]:
    with suppress(OSError):
        words = [row.split() for row in path.read_text().splitlines()]
        return {name: int(value) for name, value, *_ in words}
    return {}
