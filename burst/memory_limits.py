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
    """Raise ResourceExhaustedPersistent when fewer bytes are available."""
    if nbytes < _SMALL:
        return
    available, of = available_bytes()
    if nbytes > available:
        raise ResourceExhaustedPersistent(
            f"nbytes={nbytes}: a pool needs {nbytes} bytes, and {available} are available ({of}); "
            "make it smaller, or free others"
        )


def available_text() -> str:
    """Return what is available, for messages."""
    available, of = available_bytes()
    return f"{available} bytes are available ({of})"


def descriptors_text() -> str:
    """Say why no descriptor is left, and the remedy, for messages."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"all {most} descriptors that this process may have are open (ulimit -n): close some, or raise the limit"


def available_bytes() -> tuple[int, str]:
    """Return the tightest of all limits in bytes, and its name."""
    found = [(_machine(), "the machine's memory"), (_control_group(), "its control group")]
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        found.append((size, "RLIMIT_FSIZE"))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        with suppress(OSError):
            pages = int((_PROC / "self/statm").read_text().split()[0])
            found.append((space - pages * os.sysconf("SC_PAGE_SIZE"), "RLIMIT_AS"))
    available, of = min((value, of) for value, of in found if value is not None)
    return max(0, available), of


def machine_bytes() -> int:
    """Return the memory of the machine; as good as unlimited where the C library cannot tell."""
    pages = os.sysconf("SC_PHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else _UNLIMITED


def _machine() -> int:
    rows = _figures(_PROC / "meminfo")
    return 1024 * (rows["MemAvailable:"] + rows["SwapFree:"]) if "MemAvailable:" in rows else machine_bytes()


def control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control groups and of all above them that can be seen, of either
    version.

    In a container a group's path may begin above what is mounted: then its end is looked for there.
    """
    found: list[Path] = []
    with suppress(OSError):
        for row in (_PROC / "self/cgroup").read_text().splitlines():
            number, names, path = row.split(":", 2)
            if number == "0" and not names:
                tops = [_CGROUPS, _CGROUPS / "unified"]
            elif controller in names.split(","):
                tops = list(dict.fromkeys((_CGROUPS / controller, _CGROUPS / names)))
            else:
                continue
            parts = [part for part in path.split("/") if part not in {"", ".."}]
            for top in tops:
                ends = (top.joinpath(*parts[n:]) for n in range(len(parts) + 1))
                inner = next((folder for folder in ends if folder.is_dir()), top)
                found += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return found


def control_group_bytes() -> int | None:
    """Return the least limit of memory of our groups and of all above them; None where they have none."""
    limits = [_number(group, *_MOST) for group in control_groups("memory")]
    return min((most for most in limits if most is not None and most < _UNLIMITED), default=None)


_MOST, _USED = ("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes")
_INACTIVE = ("inactive_file", "total_inactive_file")
"""Of version 2 and of version 1."""
_UNLIMITED = 2**62  # version 1 has a number for it


def _control_group() -> int | None:
    """Return what our groups leave; None without a limit."""
    return min((left for group in control_groups("memory") if (left := _left(group)) is not None), default=None)


def _left(group: Path) -> int | None:
    """Return what is left below the limit. The kernel takes back pages of inactive files when it needs them, so they
    count as free.
    """
    most, used = _number(group, *_MOST), _number(group, *_USED)
    if most is None or most >= _UNLIMITED or used is None:
        return None
    figures = _figures(group / "memory.stat")
    return most - used + next((figures[name] for name in reversed(_INACTIVE) if name in figures), 0)


def _number(group: Path, *names: str) -> int | None:
    """Return what the first of these files says that can be read; None for "max"."""
    for name in names:
        with suppress(OSError, ValueError):
            return int((group / name).read_text())
    return None


def _figures(path: Path) -> dict[str, int]:
    with suppress(OSError):
        words = [row.split() for row in path.read_text().splitlines()]
        return {name: int(value) for name, value, *_ in words}
    return {}
