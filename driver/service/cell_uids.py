"""The uids of cells: those of other accounts have one each, of a range that nothing else uses.

So the kernel itself keeps cells apart, beside their sandboxes, and counts for each alone what it counts by uid:
processes, pages of pipes, descriptors on their way, pending signals. The cell of the device's own account keeps that.

The broker needs CAP_SETUID and CAP_SETGID to begin such a cell, and CAP_KILL to end it. It keeps these three, and its
filter lets it become an account of the range, without supplementary groups, and no other one. A cell has none of them.

Each uid has a home, which is made before the device listens. An account's first cell gets one that is free: its name
becomes the account's number, so its next cells have the same uid, and the records there. What a cell needs of the
configuration of the device's account, it reads before it changes its uid, and writes into its home.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from driver.config import home, in_home, listed_home, move_to
from driver.engine import sandbox
from driver.engine.cache.blobs import locked
from driver.engine.call_rules import becoming
from driver.errors import DeviceFailed
from driver.libc import function
from driver.service.fork_server import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.engine.call_rules import Rules

CAPABILITIES = 1 << 5 | 1 << 6 | 1 << 7
"""CAP_KILL, CAP_SETGID and CAP_SETUID."""

_HOMES, _CONFIGURATION, _FREE = ".local/state/burst-cells", ".config/burst", "free-"
_MOST, _LAST = 4096, 2**31
_DUMPABLE = 4

_prctl = function("prctl", "int(*)(int option, unsigned long value)")
_setfsuid = function("setfsuid", "int(*)(unsigned int uid)")


def uids_in(text: str) -> range:
    """Return the range in "FIRST-LAST". Raise DeviceFailed."""
    found = re.fullmatch(r"(\d{1,10})-(\d{1,10})", text)
    uids = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    if not 0 < len(uids) <= _MOST or not 0 < uids[0] <= uids[-1] < _LAST or os.getuid() in uids:
        raise DeviceFailed(
            f"--uids {text}: must be FIRST-LAST, up to {_MOST} numbers that no account has as uid or gid, one for each "
            "account that is served, such as 200000-200063"
        )
    return uids


class CellUids:
    """The uids of one broker's cells."""

    def __init__(self, uids: range, home: Path) -> None:
        """`home`: of the device's account, in which those of the cells are."""
        self._uids, self.homes = uids, home / _HOMES

    @classmethod
    def prepare(cls, text: str) -> None:
        """Make the homes that are missing for a range. Raise DeviceFailed where no cell could begin."""
        uids = uids_in(text)
        if not sandbox.has_capabilities(CAPABILITIES):
            raise DeviceFailed(
                f"--uids {text}: uid {os.getuid()} lacks CAP_SETUID, CAP_SETGID or CAP_KILL: have systemd give them by "
                "the unit that `burst serve --unit --uids` prints, start it as root, or leave --uids away"
            )
        found = cls(uids, listed_home() or home())
        try:
            found._make_folder()
            found._check_reach()
            with locked(found.homes):
                found._make_homes()
        except OSError as error:
            raise DeviceFailed(f"--uids {text}: the homes of cells cannot be made: {error}") from error

    def _make_folder(self) -> None:
        for parent in reversed(self.homes.parents):
            if not parent.exists():
                parent.mkdir()
                parent.chmod(0o711)
        if not self.homes.exists():
            with _as_group(self._uids[0]):
                self.homes.mkdir()
            self.homes.chmod(0o711)

    def _check_reach(self) -> None:
        paths = self.homes, *map(Path, (sys.prefix, sys.base_prefix, __file__))
        folders = {folder for path in paths for folder in path.resolve().parents}
        if closed := " ".join(sorted(str(folder) for folder in folders if not folder.stat().st_mode & 0o001)):
            raise DeviceFailed(
                f"--uids: cells have to reach their homes and Python, but other accounts may not enter {closed}: "
                f"chmod o+x {closed}, or serve the device under another account"
            )

    def _make_homes(self) -> None:
        """Make those that are missing, as their uids, in a folder that the group of one of these may write to now."""
        own, status, owners = os.getuid(), self.homes.stat(), self._owners()
        if status.st_gid not in self._uids or not {*owners.values()} <= {*self._uids}:
            words = f"was made for other numbers, such as {status.st_gid}: give these, too, or remove it"
            raise DeviceFailed(f"--uids: {self.homes} {words}")
        self.homes.chmod(0o771)
        try:
            with _as_group(status.st_gid):
                for uid in sorted({*self._uids} - {*owners.values()}):
                    _setfsuid(uid)
                    (self.homes / f"{_FREE}{uid}").mkdir(0o700)
        finally:
            _setfsuid(own)
            self.homes.chmod(0o711)

    def _owners(self) -> dict[str, int]:
        return {entry.name: entry.stat(follow_symlinks=False).st_uid for entry in os.scandir(self.homes)}

    @property
    def rules(self) -> Rules:
        """The calls of a process that begins cells, and the rules on their arguments."""
        return becoming(self._uids)

    def assign(self, account: int) -> None:
        """Have an account own a home, before its cell is forked. Raise OSError where none is left."""
        if account in self._uids:
            raise PermissionError(f"uid {account} is one of the device's cells")
        with locked(self.homes):  # other devices of this account have their cells there, too
            owners = self._owners()
            if str(account) in owners:
                return
            free = next((name for name in sorted(owners) if name.startswith(_FREE)), None)
            if free is None:
                words = f"all {len(self._uids)} uids for accounts are taken; serve the device with more --uids"
                raise OSError(errno.EUSERS, words)
            (self.homes / free).rename(self.homes / str(account))

    def become(self, account: int) -> None:
        """Take the uid and the home of that account's cells, in a new process with one thread. Raise OSError.

        It ends with its parent, as before.
        """
        folder, parent = self.homes / str(account), os.getppid()
        uid, configuration = folder.stat().st_uid, _files_in(in_home(f"~/{_CONFIGURATION}"))
        move_to(folder)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        sandbox.keep_capabilities(0)
        _prctl(_DUMPABLE, 1)  # for processes of this uid alone, which read each other's figures
        end_with_parent()  # the kernel forgets that, too, with the uid
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        _write(folder / _CONFIGURATION, configuration)


@contextmanager
def _as_group(gid: int) -> Iterator[None]:
    """Make files of that group within the block."""
    own = os.getegid()
    os.setegid(gid)
    try:
        yield
    finally:
        os.setegid(own)


def _files_in(folder: Path) -> dict[Path, bytes]:
    """Return the contents of files by their paths in a folder; those that cannot be read are not there."""
    readable = (path for path in folder.rglob("*") if path.is_file() and os.access(path, os.R_OK))
    return {path.relative_to(folder): path.read_bytes() for path in readable}


def _write(folder: Path, files: dict[Path, bytes]) -> None:
    """Have these files alone in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
