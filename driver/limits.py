"""What one client may have on a device, so that none of them can take the memory of all.

The limits are a file of the user's, `~/.config/burst/limits.toml`, read when a device starts: its environment is fixed,
and no client shapes what others get.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limits:
    """client_bytes: of the buffers that a device manages for one client, and of the temporaries of its executions where
    these are arrays of ours. device_bytes: of those of all clients of a device.
    """

    client_bytes: int
    device_bytes: int


def limits() -> Limits:
    """As configured; by default a quarter and a half of the memory that this process may have. Raises ValueError."""
    defaults = {"client_bytes": memory_bytes() // 4, "device_bytes": memory_bytes() // 2}
    path = Path("~/.config/burst/limits.toml").expanduser()
    try:
        found = tomllib.loads(path.read_text())
    except FileNotFoundError:
        found = {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    known = [field.name for field in fields(Limits)]
    for name, value in found.items():
        if name not in known or type(value) is not int or value < 1:
            raise ValueError(f"{path}: {name} = {value!r}: known are {', '.join(known)}, whole numbers above 0")
    return Limits(**(defaults | found))


def memory_bytes() -> int:
    """The machine's, or what its control group leaves us, if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int((_CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine
