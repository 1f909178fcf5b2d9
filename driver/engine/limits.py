"""Limits on what one client, one account and all clients together may hold on a device.

They are read from `~/.config/burst/limits.toml` when a device starts. Its environment is fixed, so no client can change
the limits of others. A request beyond a limit gets RESOURCE_EXHAUSTED: _TRANSIENT if it could succeed after something
is freed, _PERSISTENT if it could not.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from burst import ResourceExhaustedPersistent, ResourceExhaustedTransient
from burst.memory_limits import control_group_bytes, control_groups, machine_bytes
from burst.run_queue import MOST_WEIGHT
from driver.config import configured, in_home

RELEASE = "release buffers and models"
"""What a client can do that has used up its bytes."""

WEIGHT = 100
"""The weight of an account that limits.toml does not name."""
RESERVED = 256
"""Descriptors of a device that no client gets."""
NO_LIMIT = 2**62
"""Bytes that no machine has."""


@dataclass(frozen=True)
class Limits:
    """client_bytes: device buffers of one client, the temporaries of its executions that the engine allocates, its
    models, and what the engine keeps for it besides. account_bytes, device_bytes: the same for all clients of an
    account, and for all together.

    client_bursts, client_models, client_connections: per client; a connection is a plain path, and a client has one for
    each concurrent call. client_async: pending asynchronous executions of one client. client_launched, client_fences:
    its pending fenced executions, and the fences of others that they wait for. burst_elements: capacity of each of a
    burst's two queues, which limits the requests in it. uid_clients, device_clients: connected clients, of one account
    and of all. device_accounts: accounts that have an engine of their own at the same time. uid_applications:
    applications of one account that have connected clients.

    account_…, device_…: what one account and all together may hold, as driver/engine/ledger.py counts it. One
    application may hold `application_percent` of what its account may, so that the account's other programs find room.
    By default an account has half of what all may have, and nearly all of it where the engine serves it alone.

    idle_seconds: an idle device frees what it can make again after so long. driver_seconds: how long a driver may take
    to allocate a buffer, or to copy to or from one; a driver in a shared library for any call but an execution, or its
    process is ended. prepare_seconds: how long such a driver may take to prepare a model. validate_seconds: processor
    time that the validation of one model may take. file_seconds: how long it may take to read a file that a client of
    another account hands over.
    """

    client_bytes: int
    device_bytes: int
    client_bursts: int = 256
    client_models: int = 1024
    client_connections: int = 128
    client_launched: int = 256
    client_fences: int = 1024
    client_async: int = 4096
    burst_elements: int = 2**16
    uid_clients: int = 512
    device_clients: int = 1024
    device_accounts: int = 64
    uid_applications: int = 128
    application_percent: int = 75
    account_bytes: int = NO_LIMIT
    account_pools: int = 8192
    account_pool_bytes: int = NO_LIMIT
    account_gpu_bytes: int = NO_LIMIT
    account_descriptors: int = 8192
    account_mappings: int = 24_000
    account_threads: int = 2048
    account_life_words: int = 992
    account_guards: int = 2000
    account_plans: int = 32_768
    account_models: int = 2048
    account_buffers: int = 16_384
    account_fences: int = 4096
    device_pools: int = 16_384
    device_pool_bytes: int = NO_LIMIT
    device_gpu_bytes: int = NO_LIMIT
    device_descriptors: int = 16_384
    device_mappings: int = 48_000
    device_threads: int = 4096
    device_life_words: int = 1984
    device_guards: int = 4000
    device_plans: int = 65_536
    device_models: int = 4096
    device_buffers: int = 32_768
    device_fences: int = 8192
    idle_seconds: float = 10.0
    driver_seconds: float = 30.0
    prepare_seconds: float = 600.0
    validate_seconds: float = 30.0
    file_seconds: float = 10.0

    def check(self, name: str, there: int, remedy: str, more: int = 1) -> None:
        """Raises ResourceExhaustedTransient if `more` do not fit. `remedy`: what the client itself can do."""
        most = getattr(self, name)
        if there + more > most:
            raise ResourceExhaustedTransient(
                f"the limit {name} = {most} is reached, with {there} in use; {remedy}, or {raised(name)}"
            )

    def check_size(self, name: str, size: int, remedy: str) -> None:
        """Raises ResourceExhaustedPersistent if `size` is too large."""
        most = getattr(self, name)
        if size > most:
            raise ResourceExhaustedPersistent(f"{size} exceeds the limit {name} = {most}; {remedy}, or {raised(name)}")


def limits_file() -> Path:
    """The path of the configuration."""
    return in_home("~/.config/burst/limits.toml")


def limits(*, is_shared: bool = False) -> Limits:
    """The configured limits. A client gets a quarter of this process's memory by default, all together half of it.

    `is_shared`: by several accounts. Then one gets half of what all may have by default, else all but a sixteenth,
    which is left to root and the device's account, who watch it.

    Raises ValueError.
    """
    memory = memory_bytes()
    defaults: dict[str, Any] = {"client_bytes": memory // 4, "device_bytes": memory // 2, "device_pool_bytes": memory}
    for figure, most in _possible().items():
        defaults[f"device_{figure}"] = min(most, getattr(Limits, f"device_{figure}"))
    path = limits_file()
    found = configured(path)
    found.pop("weights", None)
    known = [field.name for field in fields(Limits)]
    for name, value in found.items():
        kinds = (int, float) if name.endswith("_seconds") else (int,)
        if name not in known or type(value) not in kinds or not 0 < value < 2**63:
            raise ValueError(
                f"{path}: {name} = {value!r}: the limits are {', '.join(known)}, each a whole number above 0 "
                "(seconds may be a fraction)"
            )
    return Limits(**(_of_accounts(defaults | found, is_shared) | defaults | found))


def _of_accounts(found: dict[str, Any], is_shared: bool) -> dict[str, int]:
    """What an account may hold of each figure by default."""
    names = [field.name.removeprefix("account_") for field in fields(Limits) if field.name.startswith("account_")]
    whole = {name: found.get(f"device_{name}", getattr(Limits, f"device_{name}", 0)) for name in names}
    return {f"account_{name}": max(1, most // 2 if is_shared else most - most // 16) for name, most in whole.items()}


def _possible() -> dict[str, int]:
    """What this process may have, less what it needs itself."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    threads = [2**31, resource.getrlimit(resource.RLIMIT_NPROC)[1]]
    mappings = _number(Path("/proc/sys/vm/max_map_count"), 65_530) * 3 // 4
    threads.append(_number(Path("/proc/sys/kernel/threads-max"), 2**31))
    threads += [_number(group / "pids.max", 2**31) for group in control_groups("pids")]
    most = min(n for n in threads if n > 0) * 3 // 4 // 2  # the service's come out of the same number
    return {"descriptors": max(64, descriptors - RESERVED), "mappings": mappings, "threads": most}


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return default


def no_room(nbytes: int, free: int, most: int) -> ResourceExhaustedTransient | ResourceExhaustedPersistent:
    """The error for bytes that exceed what a client may use: never, or until others are freed."""
    kind = ResourceExhaustedPersistent if nbytes > most else ResourceExhaustedTransient
    return kind(
        f"an execution or a buffer needs {nbytes} bytes, and {free} of the {most} that a client may use on a device "
        f"are free (client_bytes); {RELEASE}, or {raised('client_bytes')}"
    )


def raised(name: str) -> str:
    """The remedy that raises a limit."""
    return f"raise {name} in {limits_file()} and restart the device"


def weights() -> dict[int, int]:
    """Fair-share weights by uid, from the table `[weights]` of the same file: a busy device is divided in proportion.

    Raises ValueError.
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
    """The memory of the machine, or the limit of this process's control group, or of one above it, if that is less."""
    group = control_group_bytes()
    return machine_bytes() if group is None else min(machine_bytes(), group)
