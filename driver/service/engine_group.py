"""Control groups of engines, version 2, where systemd has delegated this service's (`Delegate=yes` in its unit).

Between two looks of `EngineWatch` an engine can take what it likes. In a group of its own the kernel holds it at once,
and counts what is in no process's private memory, too: pages of shared memory that the engine touches first, and what
the kernel keeps for it. Beyond `memory.high` the kernel slows the engine down and tells the service, which ends it and
says so to its clients; beyond `memory.max`, a little above, the kernel ends it by itself.

    burst@litert.service/    delegated; it may have no process of its own once it has controllers to give
        service/             the broker, services, trials
        engine-N/            an engine

A service writes by descriptors that were opened before its sandbox, and before it got a uid of its own. An engine has
none of them.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import select
from contextlib import suppress
from pathlib import Path
from typing import Self

_log = logging.getLogger(__name__)

TOP = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")

_MARKS = "user.delegate", "trusted.delegate"
"""Attributes by which systemd says that a group is the service's own to divide (since 251)."""

_SERVICE, _ENGINE = "service", "engine-"
_SLACK = 64 << 20
_WRITTEN, _READ = ("cgroup.procs", "memory.high", "memory.max"), ("memory.events", "memory.stat")
_HELD = ("anon", "shmem", "kernel")
"""What the kernel cannot take back from an engine that runs, without swap."""


def delegated() -> Path | None:
    """Return this process's control group if it is ours to divide, and memory can be bounded there; None: it is not."""
    with suppress(OSError):
        if found := re.search(r"^0::(/.*)$", OWN.read_text(), re.MULTILINE):
            path = TOP / found[1].removeprefix("/")
            controllers = (path / "cgroup.controllers").read_text().split()
            if any(map(_is_set, [path] * len(_MARKS), _MARKS)) and "memory" in controllers and os.access(path, os.W_OK):
                return path
    return None


def _is_set(path: Path, mark: str) -> bool:
    try:
        return os.getxattr(path, mark) == b"1"
    except OSError:
        return False


def most_of(pid: int) -> int | None:
    """Return what an engine's control group of its own may have; None: it has none, or no limit there."""
    with suppress(OSError, ValueError):
        found = re.search(r"^0::(/.*)$", Path(f"/proc/{pid}/cgroup").read_text(), re.MULTILINE)
        path = TOP / found[1].removeprefix("/") if found else TOP
        if path.name.startswith(_ENGINE):
            return int((path / "memory.max").read_text())
    return None


class EngineGroup:
    """The control group of one engine, by descriptors."""

    def __init__(self, path: Path) -> None:
        """Make the group. Raise OSError."""
        self._path = path
        path.mkdir()
        self._fds = dict[str, int]()
        try:
            with suppress(FileNotFoundError):  # a kernel without swap
                (path / "memory.swap.max").write_text("0")
            for names, flags in ((_WRITTEN, os.O_WRONLY), (_READ, os.O_RDONLY)):
                self._fds |= {name: os.open(path / name, flags | os.O_CLOEXEC) for name in names}
        except OSError:
            self.remove()
            raise

    @property
    def fds(self) -> list[int]:
        """All descriptors."""
        return list(self._fds.values())

    def take(self, pid: int) -> None:
        """Have a process in the group from now on."""
        self._write("cgroup.procs", pid)

    def bound(self, most: int) -> None:
        """Have the kernel hold the group to so many bytes."""
        self._write("memory.high", most)
        self._write("memory.max", most + max(_SLACK, most // 8))

    def _write(self, name: str, value: int) -> None:
        try:
            os.write(self._fds[name], str(value).encode())
        except OSError as error:
            _log.warning("%s of an engine's control group cannot be %d: %s", name, value, error)

    def wait(self) -> None:
        """Wait until the group has come to a limit, or the kernel has ended a process there."""
        poll = select.poll()
        poll.register(self._fds["memory.events"], select.POLLPRI)
        self.has_ended_one()  # what is read is not told again
        poll.poll()

    def has_ended_one(self) -> bool:
        """Return True if the kernel has ended a process of the group."""
        return self._figures("memory.events").get("oom_kill", 0) > 0

    def held(self) -> int:
        """Return the bytes in the group that the kernel cannot take back."""
        found = self._figures("memory.stat")
        return sum(found.get(name, 0) for name in _HELD)

    def _figures(self, name: str) -> dict[str, int]:
        text = os.pread(self._fds[name], 1 << 16, 0).decode()
        return {key: int(value) for key, value in map(str.split, text.splitlines())}

    def close(self) -> None:
        """Close the descriptors: this process acts on the group no more."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def remove(self) -> None:
        """Close the descriptors, and take the group away unless a process is in it still."""
        self.close()
        with suppress(OSError):
            self._path.rmdir()


class EngineGroups:
    """Makes the control groups of a device's engines."""

    def __init__(self, path: Path) -> None:
        """Divide the delegated group `path`, and move this process down. Raise OSError."""
        self.path, self._numbers = path, itertools.count()
        (path / _SERVICE).mkdir(exist_ok=True)
        (path / _SERVICE / "cgroup.procs").write_text(str(os.getpid()))
        (path / "cgroup.subtree_control").write_text("+memory")

    @classmethod
    def of_this_process(cls) -> Self | None:
        """Return those of this process's own group; None: it is not delegated. Call it before this process forks."""
        path = delegated()
        try:
            return cls(path) if path else None
        except OSError as error:
            _log.warning("engines get no control groups of their own: %s", error)
            return None

    def begin(self) -> EngineGroup | None:
        """Return a group for a new engine; None: there can be none."""
        for left in self.path.glob(f"{_ENGINE}*"):
            with suppress(OSError):  # it is in use
                left.rmdir()
        try:
            return EngineGroup(self.path / f"{_ENGINE}{next(self._numbers)}")
        except OSError as error:
            _log.warning("an engine gets no control group of its own: %s", error)
            return None
