"""Subordinate uids: those that /etc/subuid gives an account beside its own, by user namespaces and `newuidmap`.

A process takes one in a user namespace of its own, in which that number stands for itself and no other one exists.
`newuidmap` and `newgidmap`, which the system installs with the right to do so, write that map once they have looked
into the tables. What serves a device may start no program once it is confined, so a process that it forks before asks
for maps (`MapWriter`), and does nothing else.

The kernel leaves the account all rights over these namespaces: it may signal and trace what runs under its subordinate
uids, which in turn may do nothing to it, nor to each other.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self

from burst import PeerDied
from burst.channel import Channel
from driver.libc import function
from driver.protocol.rpc import take_fd
from driver.service.fork_server import close_all_but, end_with_parent
from fmq._core import ffi

if TYPE_CHECKING:
    from collections.abc import Callable

WORD = "subuids"
"""What `--uids` takes for those of this account."""

TABLES = Path("/etc/subuid"), Path("/etc/subgid")
"""The tables of subordinate uids and gids."""

NEW_USERS = 0x10000000
"""CLONE_NEWUSER."""

_COMMANDS = "newuidmap", "newgidmap"
_MOST = 256  # of a range: the last ones, for containers take the first
_PATIENCE = 10.0  # seconds
_unshare = function("unshare", "int(*)(int flags)")


class SubordinateNumbers(NamedTuple):
    """A row of a table. `owner`: None for an account that is not there."""

    name: str
    owner: int | None
    numbers: range


def rows(table: Path) -> list[SubordinateNumbers]:
    """Return the rows of a table. Other lines are left out."""
    try:
        text = table.read_text(errors="replace")
    except OSError:
        return []
    found = re.findall(r"^([^:#\s]+):(\d+):(\d+)\s*$", text, re.MULTILINE)
    return [
        SubordinateNumbers(name, _uid_of(name), range(int(first), int(first) + int(count)))
        for name, first, count in found
    ]


def _uid_of(account: str) -> int | None:
    """Return the uid of an account that a table names so or by its number; None if there is none."""
    with suppress(KeyError):
        return int(account) if account.isdecimal() else pwd.getpwnam(account).pw_uid
    return None


def own_uids() -> range:
    """Return the last numbers that both tables give this account; empty: there are none."""
    uids, gids = ([row.numbers for row in rows(table) if row.owner == os.getuid()] for table in TABLES)
    both = (range(max(a.start, b.start), min(a.stop, b.stop)) for a in uids for b in gids)
    found = max(both, key=len, default=range(0))
    return found[-_MOST:]


def absence() -> str:
    """Return why this account cannot use subordinate uids here, and what would help; "": it can. Tries it."""
    if missing := [command for command in _COMMANDS if not shutil.which(command)]:
        return f"there is no {' and no '.join(missing)}: install the package uidmap (Debian) or shadow-utils"
    if not (uids := own_uids()):
        return (
            f"/etc/subuid and /etc/subgid give uid {os.getuid()} no numbers: usermod --add-subuids 100000-165535 "
            "--add-subgids 100000-165535 ACCOUNT"
        )
    last = uids[-1]
    try:
        with MapWriter(uids) as writer:
            writer.within(uids[-1:], lambda: os.setresuid(last, last, last))
    except OSError as error:
        return str(error)
    return ""


class MapWriter:
    """A process that has the maps of user namespaces written. Fork it before a filter or NO_NEW_PRIVS is there."""

    def __init__(self, uids: range) -> None:
        """`uids`: no map has others, but for this account's own. Raise OSError."""
        self._uids, parent = uids, os.getpid()
        self._near, far = Channel.pair()
        with far:
            self.pid = _fork()
            if not self.pid:
                self._become(far, parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the last end of it, and reap the process."""
        self.close()
        os.waitpid(self.pid, 0)

    def fileno(self) -> int:
        """Return the descriptor that a process needs to ask."""
        return self._near.fileno()

    def enter(self, uids: range, *, own: bool = False) -> None:
        """Enter a user namespace that has these uids and gids alone, and this account's own if `own`. Raise OSError.

        This process has one thread, and all capabilities there.
        """
        near, far = Channel.pair()  # of which the kernel says whose it is
        with near:
            with far:
                if _unshare(NEW_USERS):
                    raise OSError(ffi.errno, f"no user namespace can be made: {os.strerror(ffi.errno)}")
                self._near.send([uids[0], len(uids), own], [far.fileno()])
            message = near.receive(_PATIENCE)
        if message.body != [""]:
            raise PermissionError(*message.body)

    def close(self) -> None:
        """Close this process's end."""
        self._near.close()

    def within(self, uids: range, work: Callable[[], object], *, own: bool = False) -> None:
        """Do some work in a process in such a namespace. Raise OSError, with the words of what failed there."""
        near, far = Channel.pair()
        with near:
            with far:
                if not (pid := _fork()):
                    self._work(far, uids, work, own=own)
            try:
                said = near.receive().body
            finally:
                os.waitpid(pid, 0)
        if said != [""]:
            raise PermissionError(*said)

    def _work(self, channel: Channel, uids: range, work: Callable[[], object], *, own: bool) -> NoReturn:
        said = ""
        try:
            self.enter(uids, own=own)
            work()
        except Exception as error:  # noqa: BLE001 (whatever it is, it is the answer)
            said = str(error)
        finally:
            channel.send([said])
            os._exit(0)

    # ---- the process

    def _become(self, channel: Channel, parent: int) -> NoReturn:
        try:
            end_with_parent()
            if os.getppid() == parent:
                close_all_but(channel.fileno())
                self._serve(channel)
        except PeerDied:
            os._exit(0)
        finally:
            os._exit(1)

    def _serve(self, channel: Channel) -> None:
        while True:
            message = channel.receive()
            match message.body:
                case [int(first), int(count), bool(own)]:
                    with Channel.from_fd(take_fd(message)) as asking, suppress(PeerDied):
                        asking.send([self._written(asking.peer_pid, first, count, own=own)])

    def _written(self, pid: int, first: int, count: int, *, own: bool) -> str:
        """Have both maps of a process's namespace written; return what is wrong, or ""."""
        if count < 1 or first not in self._uids or first + count - 1 not in self._uids:
            return f"{first} and the next {count} are not all in {self._uids}"
        for command, mine in zip(_COMMANDS, (os.getuid(), os.getgid()), strict=True):
            maps = [first, first, count, *([mine, mine, 1] if own else [])]
            try:
                done = subprocess.run(
                    [command, str(pid), *map(str, maps)],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=_PATIENCE,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"{command}: {error}"
            if done.returncode:
                return f"{command}: {done.stderr.strip() or done.returncode}"
        return ""


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads survive forks
        return os.fork()
