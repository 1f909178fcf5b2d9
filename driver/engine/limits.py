"""Limits on what one client, one account and all clients together may hold on a device.

They are read from `~/.config/burst/limits.toml` when a device starts. Its environment is fixed, so no client can change
the limits of others. A request beyond a limit gets RESOURCE_EXHAUSTED: _TRANSIENT if it could succeed after something
is freed, _PERSISTENT if it could not.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from burst import ResourceExhaustedPersistent, ResourceExhaustedTransient
from burst.memory_limits import control_group_bytes, control_groups, machine_bytes
from burst.run_queue import MOST_WEIGHT
from driver.config import configured, in_home, of_device
from driver.protocol.ledger_report import FigureLimits

if TYPE_CHECKING:
    from collections.abc import Callable

RELEASE = "release buffers and models"
"""What a client can do that has used up its bytes."""

WEIGHT = 100
"""The weight of an account that limits.toml does not name."""
RESERVED = 256
"""Descriptors of a device that no client gets."""
ENGINE_BYTES = 512 << 20
"""What an engine may take at least beyond what its clients may: libraries, and what they keep."""
OWN_THREADS = 64 + 2 * (os.cpu_count() or 1)
"""Threads that an engine may have for itself, a pool of its runtime's for all models among them."""
NO_LIMIT = 2**62
"""Bytes that no machine has."""


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of all accounts together that are no settings: what a process of a device has, less a reserve."""

    is_shared: bool = False  #: by several accounts
    pool_bytes: int = NO_LIMIT
    gpu_bytes: int = NO_LIMIT
    descriptors: int = 16_384
    mappings: int = 48_000  # of 65,530 that Linux grants a process
    threads: int = 4096
    life_words: int = 1984  # of 2,048 that a process has
    guards: int = 4000
    engine_bytes: int = 0  #: private memory that the engine of an account may take at least

    @classmethod
    def of_this_process(cls, *, is_shared: bool) -> ProcessLimits:
        """Return the limits that the machine, the rlimits and the control group of this process allow."""
        possible = {figure: min(most, getattr(cls, figure)) for figure, most in _possible().items()}
        return cls(is_shared, memory_bytes(), **possible)

    def of_account(self, most: int) -> int:
        """Return how much of `most` one account may have: half of it, or where it is alone all but a sixteenth.

        The sixteenth is left to root and the device's account, who watch the device.
        """
        return max(1, most // 2 if self.is_shared else most - most // 16)


@dataclass(frozen=True)
class Limits:
    """The limits on what clients may hold; all fields but the last are settings.

    client_bytes: device buffers of one client, the temporaries of its executions that the engine allocates, its
    models, and what the engine keeps for it besides. account_bytes, device_bytes: the same for all clients of an
    account, and for all together.

    client_bursts, client_models, client_connections: per client; a connection is a socket of its lane, and a client has
    one for each concurrent call. client_async: pending asynchronous executions of one client. client_launched: its
    pending fenced executions. uid_clients, device_clients: connected clients, of one account and of all.
    engine_bytes: private memory that the engine of an account may take beyond that: its own, and what its runtime makes
    of models and requests. An engine that takes more is ended.

    device_accounts: accounts that have an engine of their own at the same time. uid_applications: applications of one
    account that have connected clients.

    account_…: what one account may hold, as driver/engine/ledger.py counts it. One application may hold
    `application_percent` of that, so that the account's other programs find room.

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
    client_async: int = 4096
    uid_clients: int = 512
    device_clients: int = 1024
    device_accounts: int = 64
    uid_applications: int = 128
    application_percent: int = 75
    account_bytes: int = NO_LIMIT
    account_pool_bytes: int = NO_LIMIT
    account_gpu_bytes: int = NO_LIMIT
    engine_bytes: int = NO_LIMIT
    account_descriptors: int = 8192
    account_threads: int = 2048
    idle_seconds: float = 10.0
    driver_seconds: float = 30.0
    prepare_seconds: float = 600.0
    validate_seconds: float = 30.0
    file_seconds: float = 10.0
    process: ProcessLimits = ProcessLimits()

    client_fences: ClassVar[int] = 1024
    """Fences of others that the executions of one client wait for."""
    burst_elements: ClassVar[int] = 2**16
    """Capacity of each of a burst's two queues, which limits the requests in it."""

    @classmethod
    def settings(cls) -> list[str]:
        """Return the names that limits.toml may have."""
        return [field.name for field in fields(cls) if field.name != "process"]

    def figures(self) -> dict[str, FigureLimits]:
        """Return what an application, an account and all together may hold of each figure of the ledger."""
        process = self.process
        found = {
            "bytes": (self.account_bytes, self.device_bytes),
            "pool_bytes": (self.account_pool_bytes, process.pool_bytes),
            "engine_bytes": (max(self.account_bytes + self.engine_bytes, process.engine_bytes), NO_LIMIT),
            "runtime_bytes": (max(self.account_bytes + self.engine_bytes, process.engine_bytes), NO_LIMIT),
            "gpu_bytes": (self.account_gpu_bytes, process.gpu_bytes),
            "descriptors": (min(self.account_descriptors, process.descriptors), process.descriptors),
            "mappings": (process.of_account(process.mappings), process.mappings),
            "threads": (min(self.account_threads, process.threads), process.threads),
            "life_words": (process.of_account(process.life_words), process.life_words),
            "guards": (process.of_account(process.guards), process.guards),
        }
        percent = self.application_percent
        return {
            figure: FigureLimits(account * percent // 100, account, device)
            for figure, (account, device) in found.items()
        }

    def engine_most(self, clients: int) -> int:
        """Return how much private memory the engine of an account with so many clients may take."""
        of_clients = min(max(1, clients) * self.client_bytes, self.account_bytes)
        return max(of_clients + self.engine_bytes, self.process.engine_bytes)

    def group_most(self, clients: int, *, makes_pages: bool) -> int:
        """Return how much memory of all kinds the engine of an account with so many clients may take: buffers that they
        share with it, too. `makes_pages`: also those of their pools; it does for its device's own account alone.
        """
        shared = min(max(1, clients) * self.client_bytes, self.account_bytes)
        found = self.engine_most(clients) + shared + (self.account_pool_bytes if makes_pages else 0)
        return min(found, NO_LIMIT)

    def check(self, name: str, there: int, remedy: str, more: int = 1) -> None:
        """Raise ResourceExhaustedTransient if `more` do not fit. `remedy`: what the client itself can do."""
        most = getattr(self, name)
        if there + more > most:
            raise ResourceExhaustedTransient(
                f"the limit {name} = {most} is reached, with {there} in use; {remedy}{or_raise(name)}"
            )

    def check_threads(self, there: int, of_account: Callable[[], int]) -> None:
        """Raise ResourceExhaustedTransient if an engine has so many threads that an account may have no more models.

        `there`: all. `of_account`: called where accounts share the engine; returns how many are this account's, by the
        ledger and of a runtime's. In an engine of its own all are its.
        """
        of, whose = self.figures()["threads"], "the device's engine has"
        most_of_account, most = of.account + OWN_THREADS, of.device + OWN_THREADS
        if not self.process.is_shared:
            most = most_of_account
        elif most_of_account < there <= most:
            there, most, whose = of_account(), most_of_account, "this account has in the device's engine"
        if there > most:
            raise ResourceExhaustedTransient(
                f"{whose} {there} threads, with those that its runtime has started for models, and may have {most} "
                f"(account_threads and {OWN_THREADS}); release models{or_raise('account_threads')}"
            )

    def check_size(self, name: str, size: int, remedy: str) -> None:
        """Raise ResourceExhaustedPersistent if `size` is too large."""
        most = getattr(self, name)
        if size > most:
            raise ResourceExhaustedPersistent(f"{size} exceeds the limit {name} = {most}; {remedy}{or_raise(name)}")


@dataclass(frozen=True)
class RenewWhen:
    """When an engine is renewed, of itself: each None is never.

    private_bytes: its private memory, the least age for which is ten minutes. age: seconds. runs: executions.
    """

    private_bytes: int | None = None
    age: float | None = None
    runs: int | None = None

    _settled: ClassVar[float] = 600.0
    """Seconds in which an engine is not renewed for its memory: the next one will soon have as much."""

    def reason(self, private_bytes: int, age: float, runs: int) -> str:
        """Return why an engine with these figures is renewed; "": it is not."""
        if self.private_bytes is not None and private_bytes > self.private_bytes and age > self._settled:
            return f"it has {private_bytes} bytes of private memory (renew_when private_bytes = {self.private_bytes})"
        if self.age is not None and age > self.age:
            return f"it is {age:.0f} s old (renew_when age = {self.age:g})"
        if self.runs is not None and runs > self.runs:
            return f"it has done {runs} executions (renew_when runs = {self.runs})"
        return ""


def renew_when() -> RenewWhen:
    """Return the table `[renew_when]` of limits.toml. Raise ValueError."""
    path = limits_file()
    found = configured(path).get("renew_when", {})
    known = [field.name for field in fields(RenewWhen)]
    for name, value in found.items() if isinstance(found, dict) else [("renew_when", found)]:
        kinds = (int, float) if name == "age" else (int,)
        if name not in known or type(value) not in kinds or not 0 < value < 2**63:
            raise ValueError(
                f"{path}: renew_when: {name} = {value!r}: must be {', '.join(known)}, each a whole number above 0 "
                "(age is in seconds, and may be a fraction)"
            )
    return RenewWhen(**found)


def limits_file() -> Path:
    """Return the path of the configuration."""
    return in_home("~/.config/burst/limits.toml")


def limits(*, is_shared: bool = False, is_own: bool = False) -> Limits:
    """Return the configured limits. By default a client gets a quarter of this process's memory, all together half.

    `is_shared`: by several accounts. `is_own`: of a device that serves no account but its own.

    Raise ValueError.
    """
    process = ProcessLimits.of_this_process(is_shared=is_shared)
    path = limits_file()
    found = configured(path)
    for table in ("weights", "renew_when"):
        found.pop(table, None)
    known = Limits.settings()
    for name, value in found.items():
        kinds = (int, float) if name.endswith("_seconds") else (int,)
        if name not in known or type(value) not in kinds or not 0 < value < 2**63:
            raise ValueError(
                f"{path}: {name} = {value!r}: the limits are {', '.join(known)}, each a whole number above 0 "
                "(seconds may be a fraction)"
            )
    memory, account = process.pool_bytes, process.of_account
    if is_own and not {"client_bytes", "engine_bytes"} & found.keys():
        process = replace(process, engine_bytes=memory - memory // 8)
    defaults: dict[str, Any] = {
        "client_bytes": memory // 4,
        "device_bytes": memory // 2,
        "engine_bytes": max(ENGINE_BYTES, found.get("client_bytes", memory // 4)),
        "account_bytes": account(found.get("device_bytes", memory // 2)),
        "account_pool_bytes": account(memory),
        "account_descriptors": account(process.descriptors),
        "account_threads": account(process.threads),
        "process": process,
    }
    return Limits(**(defaults | found))


def _possible() -> dict[str, int]:
    """Return what this process may have of its tables, less what it needs itself."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    threads = [2**31, resource.getrlimit(resource.RLIMIT_NPROC)[1]]
    mappings = _number(Path("/proc/sys/vm/max_map_count"), 65_530) * 3 // 4
    threads.append(_number(Path("/proc/sys/kernel/threads-max"), 2**31))
    threads += [_number(group / "pids.max", 2**31) for group in control_groups("pids")]
    # An account's service and its engine count in the same number, and so do another account's: two leave a quarter.
    most = min(n for n in threads if n > 0) * 3 // 4 // 4
    return {"descriptors": max(64, descriptors - RESERVED), "mappings": mappings, "threads": most}


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return default


def no_room(nbytes: int, free: int, most: int) -> ResourceExhaustedTransient | ResourceExhaustedPersistent:
    """Return the error for bytes that exceed what a client may use: never, or until others are freed."""
    kind = ResourceExhaustedPersistent if nbytes > most else ResourceExhaustedTransient
    return kind(
        f"an execution or a buffer needs {nbytes} bytes, and {free} of the {most} that a client may use on a device "
        f"are free (client_bytes); {RELEASE}{or_raise('client_bytes')}"
    )


def or_raise(name: str) -> str:
    """Return the end of a remedy: to raise that limit, if it is a setting."""
    if name not in Limits.settings():
        return ""
    return f", or raise {name} in {of_device(limits_file())} and restart the device"


def weights() -> dict[int, int]:
    """Return the weights by uid of the table `[weights]` in the same file: a busy device is divided in proportion.

    Raise ValueError.
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
    """Return the memory of the machine, or the limit of this process's control groups if that is less."""
    group = control_group_bytes()
    return machine_bytes() if group is None else min(machine_bytes(), group)
