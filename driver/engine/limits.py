"""What a client, an account and all of them may have on a device, so that none of them can take everything.

The limits are a file of the user's, `~/.config/burst/limits.toml`, read when a device starts: its environment is fixed,
and no client shapes what others get. Whoever meets one gets RESOURCE_EXHAUSTED: _TRANSIENT where somebody may give
something back, _PERSISTENT where it would not fit then either.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from burst import ResourceExhaustedPersistent, ResourceExhaustedTransient
from burst.turns import MOST_WEIGHT
from driver.config import configured

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limits:
    """client_bytes: of the buffers that a device manages for one client, and of the temporaries of its executions where
    these are arrays of ours. device_bytes: of those of all clients of a device.

    client_bursts, client_models, client_connections: of one client; a connection is a plain path, of which a client has
    one for each call at the same time. client_launched, client_fences: fenced executions of one client that are not
    done, and fences of others that they wait for. burst_elements: of each of a burst's two queues, which is what bounds
    the requests that wait in it. uid_clients, device_clients: connected, of one account and of all.

    idle_seconds: after which a device that rests gives back what it can make again.
    """

    client_bytes: int
    device_bytes: int
    client_bursts: int = 256
    client_models: int = 1024
    client_connections: int = 128
    client_launched: int = 256
    client_fences: int = 1024
    burst_elements: int = 2**16
    uid_clients: int = 512
    device_clients: int = 1024
    idle_seconds: float = 10.0

    def check(self, name: str, there: int, remedy: str, more: int = 1) -> None:
        """Whether there may be more. Raises ResourceExhaustedTransient. `remedy`: what the client itself can do."""
        most = getattr(self, name)
        if there + more > most:
            raise ResourceExhaustedTransient(
                f"the limit {name} = {most} is reached, with {there} in use; {remedy}, or {_raised(name)}"
            )

    def check_size(self, name: str, size: int, remedy: str) -> None:
        """Whether something may be so large. Raises ResourceExhaustedPersistent."""
        most = getattr(self, name)
        if size > most:
            raise ResourceExhaustedPersistent(f"{size} exceeds the limit {name} = {most}; {remedy}, or {_raised(name)}")


def limits_file() -> Path:
    """Where they are configured."""
    return Path("~/.config/burst/limits.toml").expanduser()


def limits() -> Limits:
    """As configured; by default a quarter and a half of the memory that this process may have. Raises ValueError."""
    defaults: dict[str, Any] = {"client_bytes": memory_bytes() // 4, "device_bytes": memory_bytes() // 2}
    path = limits_file()
    found = configured(path)
    found.pop("weights", None)
    known = [field.name for field in fields(Limits)]
    for name, value in found.items():
        kinds = (int, float) if name == "idle_seconds" else (int,)
        if name not in known or type(value) not in kinds or not 0 < value < 2**63:
            raise ValueError(
                f"{path}: {name} = {value!r}: the limits are {', '.join(known)}, each a whole number above 0 "
                "(idle_seconds may be a fraction)"
            )
    return Limits(**(defaults | found))


def no_room(nbytes: int, free: int, most: int, name: str) -> ResourceExhaustedTransient | ResourceExhaustedPersistent:
    """For bytes that do not fit: never, or until some are given back."""
    kind = ResourceExhaustedPersistent if nbytes > most else ResourceExhaustedTransient
    who = "a client" if name == "client_bytes" else "all clients together"
    return kind(
        f"an execution or a buffer needs {nbytes} bytes, and {free} of the {most} that {who} may use on a device are "
        f"free ({name}); release buffers and models, or {_raised(name)}"
    )


def _raised(name: str) -> str:
    return f"raise {name} in {limits_file()} and restart the device"


def weights() -> dict[int, int]:
    """By uid, what an account gets of a device that several want: its part of the sum. As configured, in the table
    `[weights]` of the same file. Raises ValueError.
    """
    path = limits_file()
    found = configured(path).get("weights", {})
    for uid, weight in found.items() if isinstance(found, dict) else [("weights", found)]:
        if not uid.isdecimal() or type(weight) is not int or not 1 <= weight <= MOST_WEIGHT:
            raise ValueError(
                f"{path}: weights: {uid} = {weight!r}: must be a uid and a whole number from 1 to {MOST_WEIGHT}"
            )
    return {int(uid): weight for uid, weight in found.items()}


def memory_bytes() -> int:
    """The machine's, or what its control group leaves us, if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int((_CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine
