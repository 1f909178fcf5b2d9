"""The uids of cells: those of other accounts have one each, of a range that nothing else uses.

So the kernel itself keeps cells apart, beside their sandboxes, and counts for each alone what it counts by uid:
processes, pages of pipes, descriptors on their way, pending signals. The cell of the device's own account keeps that.

The broker needs CAP_SETUID and CAP_SETGID to begin such a cell, and CAP_KILL to end it. It keeps these three, and its
filter lets it become an account of the range, without supplementary groups, and no other one. A cell has none of them.
Or an account without privileges gives cells its subordinate uids (`driver.service.subordinate_uids`): then a cell takes
its uid in a user namespace of its own, for which the broker needs no capability.

Each uid has a home, which is made before the device listens. An account's first cell gets one that is free: its name
becomes the account's number, so its next cells have the same uid, and the records there. Their folder has the lock of
all devices of the account, and none but the account ever writes to either. What a cell needs of the configuration of
the device's account, it reads before it changes its uid, and writes into its home.

A subordinate uid (/etc/subuid) has the home of its owner, who could otherwise come as 65536 accounts and take all.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import re
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from driver.config import home, in_home, listed_home, move_to
from driver.engine import sandbox
from driver.engine.cache.blobs import locked
from driver.errors import DeviceFailed
from driver.libc import function
from driver.service import subordinate_uids
from driver.service.cell_configuration import files_in, write
from driver.service.fork_server import end_with_parent
from driver.service.subordinate_uids import MapWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPABILITIES = 1 << 5 | 1 << 6 | 1 << 7
"""CAP_KILL, CAP_SETGID and CAP_SETUID."""

_HOMES, _CONFIGURATION = ".local/state/burst-cells", ".config/burst"
_FREE, _NEW = "free-", "new-"
_MOST, _LAST = 4096, 2**31
EXAMPLE = "2100000000-2100000063"
"""Unused in the table of https://systemd.io/UIDS-GIDS, and above what useradd, containers and SSSD give."""

_DUMPABLE = 4

_prctl = function("prctl", "int(*)(int option, unsigned long value)")
setfsuid = function("setfsuid", "int(*)(unsigned int uid)")


def uids_in(text: str) -> range:
    """Return the range in "FIRST-LAST", or this account's subordinate uids for "subuids". Raise DeviceFailed."""
    if text == subordinate_uids.WORD:
        if uids := subordinate_uids.own_uids():
            return uids
        raise DeviceFailed(f"--uids {text}: {subordinate_uids.absence()}")
    found = re.fullmatch(r"(\d{1,10})-(\d{1,10})", text)
    uids = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    if not 0 < len(uids) <= _MOST or not 0 < uids[0] <= uids[-1] < _LAST or os.getuid() in uids:
        raise DeviceFailed(
            f"--uids {text}: must be FIRST-LAST, up to {_MOST} numbers that no account has as uid or gid, one for each "
            f"account that is served, such as {EXAMPLE}; or subuids, for those of /etc/subuid"
        )
    return uids


def taken(uids: range, group: int | None, *, own: bool = False) -> str:
    """Say what has one of these numbers already, of what this machine's tables list; "" if nothing does.

    `group`: that is served. `own`: they are this account's subordinate ones.
    """
    found = [(each.pw_uid, f"the account {each.pw_name}") for each in pwd.getpwall()]
    found += [(each.gr_gid, f"the group {each.gr_name}") for each in grp.getgrall()]
    found += [(each, "a group that this device has or is served to") for each in (os.getgid(), group) if each]
    for number, whose in found:
        if number in uids:
            return f"{number} is {whose}"
    for path in subordinate_uids.TABLES:
        for name, owner, numbers in subordinate_uids.rows(path):
            if numbers.start < uids.stop and uids.start < numbers.stop and not (own and owner == os.getuid()):
                return f"{max(uids.start, numbers.start)} is a subordinate number of {name} in {path}"
    return ""


def check_reach(homes: Path) -> None:
    """Raise DeviceFailed where other accounts cannot go through to the homes of cells, and to Python."""
    places = homes, Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parent
    folders = {folder for path in map(Path.resolve, places) for folder in (path, *path.parents)}
    if closed := " ".join(sorted(str(folder) for folder in folders if not folder.stat().st_mode & 0o001)):
        raise DeviceFailed(
            f"--uids: cells have to reach their homes and Python, but other accounts may not enter {closed}: "
            f"chmod o+x {closed}, or serve the device under another account"
        )


class CellUids:
    """The uids of one broker's cells."""

    def __init__(self, uids: range, home: Path, maps: MapWriter | None = None) -> None:
        """`home`: of the device's account, in which those of the cells are. `maps`: for subordinate uids."""
        self.uids, self.homes, self._maps = uids, home / _HOMES, maps
        self._lock = self.homes / "lock"  # a folder, as `locked` takes one
        self._subordinate = [row for row in subordinate_uids.rows(subordinate_uids.TABLES[0]) if row.owner]

    @classmethod
    def of(cls, text: str) -> CellUids:
        """Return those that `prepare` has prepared. Call it before this process is confined."""
        uids = uids_in(text)
        return cls(uids, home(), MapWriter(uids) if text == subordinate_uids.WORD else None)

    @property
    def capabilities(self) -> int:
        """Those that the broker needs."""
        return 0 if self._maps else CAPABILITIES

    @property
    def takes_namespaces(self) -> bool:
        """True if a cell has its uid in a user namespace of its own."""
        return self._maps is not None

    @property
    def fds(self) -> list[int]:
        """Descriptors that `become` needs."""
        return [self._maps.fileno()] if self._maps else []

    @classmethod
    def prepare(cls, text: str, group: int | None = None) -> None:
        """Make the homes that are missing for a range. Raise DeviceFailed where no cell could begin.

        `group`: that is served.
        """
        uids, own = uids_in(text), text == subordinate_uids.WORD
        if whose := taken(uids, group, own=own):
            raise DeviceFailed(f"--uids {text}: {whose}: use numbers that nobody has, such as {EXAMPLE}")
        if own and (why := subordinate_uids.absence()):
            raise DeviceFailed(f"--uids {text}: {why}")
        if not own and not sandbox.has_capabilities(CAPABILITIES):
            raise DeviceFailed(
                f"--uids {text}: uid {os.getuid()} lacks CAP_SETUID, CAP_SETGID or CAP_KILL: have systemd give them by "
                "the unit that `burst serve --unit --uids` prints, start it as root, give it subordinate uids "
                "(--uids subuids), or leave --uids away"
            )
        found = cls(uids, listed_home() or home())
        try:
            found._make_folder()
            check_reach(found.homes)
            with locked(found._lock):
                if missing := found._missing():
                    found._make_homes(missing, own=own)
        except OSError as error:
            raise DeviceFailed(f"--uids {text}: the homes of cells cannot be made: {error}") from error

    def _make_folder(self) -> None:
        for folder in (*reversed(self.homes.parents), self.homes):
            if not folder.exists():
                folder.mkdir()
                folder.chmod(0o711)
        self._lock.mkdir(0o700, exist_ok=True)

    def _missing(self) -> list[int]:
        """Return the uids that have no home. Raise DeviceFailed for homes of others."""
        made = {*self._owners().values()}
        if others := sorted(made - {*self.uids}):
            words = f"was made for other numbers, such as {others[0]}: give these, too, or remove it"
            raise DeviceFailed(f"--uids: {self.homes} {words}")
        return sorted({*self.uids} - made)

    def _make_homes(self, uids: list[int], *, own: bool) -> None:
        """Make homes. `own`: for subordinate uids, as which a process in a namespace of theirs can make them."""

        def make() -> None:
            for uid in uids:
                self._make_home(uid)

        if own:
            with MapWriter(self.uids) as maps:
                maps.within(self.uids, make, own=True)
        else:
            make()

    def _make_home(self, uid: int) -> None:
        """Make one as its uid, in a folder of its gid, and move it from there: no cell may write to that of all."""
        with _as_group(uid), TemporaryDirectory(dir=self.homes, prefix=_NEW) as name:
            folder = Path(name)
            folder.chmod(0o770)
            with _as_owner(uid):
                (folder / "home").mkdir()
                (folder / "home").chmod(0o770)  # who moves a folder writes to it: this process, by the gid
            (folder / "home").rename(self.homes / f"{_FREE}{uid}")

    def _owners(self) -> dict[str, int]:
        """Return the uids of all homes by their names. What else is there is this account's."""
        found = {entry.name: entry.stat(follow_symlinks=False).st_uid for entry in os.scandir(self.homes)}
        return {name: uid for name, uid in found.items() if uid != os.getuid()}

    def assign(self, account: int) -> None:
        """Have an account own a home, before its cell is forked. Raise OSError where none is left."""
        if account in self.uids:
            raise PermissionError(f"uid {account} is one of the device's cells")
        if self._has_home(account):
            return
        with locked(self._lock):  # other devices of this account have their cells there, too
            if self._has_home(account):
                return
            owners = self._owners()
            free = (name for name in sorted(owners) if name.startswith(_FREE) and owners[name] in self.uids)
            if (name := next(free, None)) is None:
                words = (
                    f"all {len(self.uids)} uids for accounts are taken; serve the device with more --uids, or stop "
                    f"all devices of its account, remove what nobody needs from {self.homes} as root, and start them"
                )
                raise OSError(errno.EUSERS, words)
            (self.homes / name).rename(self._home_of(account))

    def _has_home(self, account: int) -> bool:
        try:
            uid = self._home_of(account).stat().st_uid
        except FileNotFoundError:
            return False
        if uid not in self.uids:
            raise PermissionError(f"another device gave it uid {uid}: serve this one with the same --uids")
        return True

    def _home_of(self, account: int) -> Path:
        """Return the home of an account, which may not be there yet."""
        owners = {row.owner for row in self._subordinate if account in row.numbers}
        return self.homes / str(owners.pop() if len(owners) == 1 else account)

    def become(self, account: int) -> None:
        """Take the uid and the home of that account's cells, in a new process with one thread. Raise OSError.

        It ends with its parent, as before.
        """
        folder, parent = self._home_of(account), os.getppid()
        uid, configuration = folder.stat().st_uid, files_in(in_home(f"~/{_CONFIGURATION}"))
        move_to(folder)
        if self._maps:
            self._maps.enter(range(uid, uid + 1))
            self._maps.close()
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        sandbox.keep_capabilities(0)
        _prctl(_DUMPABLE, 1)  # for processes of this uid alone, which read each other's figures
        end_with_parent()  # the kernel forgets that, too, with the uid
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder / _CONFIGURATION, configuration)


@contextmanager
def _as_group(gid: int) -> Iterator[None]:
    """Make files of that group within the block."""
    own = os.getegid()
    os.setegid(gid)
    try:
        yield
    finally:
        os.setegid(own)


@contextmanager
def _as_owner(uid: int) -> Iterator[None]:
    """Reach files as that account, and make files of it, within the block."""
    own = os.geteuid()
    setfsuid(uid)
    try:
        if setfsuid(uid) != uid:  # it returns the one before, also where it has refused
            raise PermissionError(f"this process may not make files of uid {uid}")
        yield
    finally:
        setfsuid(own)
