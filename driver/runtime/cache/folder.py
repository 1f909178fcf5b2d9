"""The folder in which compilations are kept, for all programs of one user at once.

It knows nothing of devices: an entry is a set of files written for a token of 32 bytes. Entries that were
used longest ago go when all together are larger than the folder may be. A locked entry is left alone
by whatever removes entries, and not waited for: it is being made anew, which may take minutes, and is wanted.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from driver.config import configured, in_home
from driver.runtime.cache.entry import Compilation, Draft, Entry, Files
from driver.runtime.cache.manifest import TOKEN_BYTES, About, Counts, parsed_name

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST = 2 << 30


def default_folder() -> Path:
    """Return $XDG_CACHE_HOME/burst/compiled, or the same in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else in_home("~/.cache")) / "burst/compiled"


class Pruned(NamedTuple):
    """The number of what was removed, and of how many more would have been if no process had them locked."""

    removed: list[Compilation]
    in_use: int


class Folder:
    """A folder of entries. Any thread may use it."""

    def __init__(self, path: str | os.PathLike[str], most: int | None = None) -> None:
        """Make it with mode 0700 if it is not there. most: bytes of all entries; None: as configured, or 2 GiB.

        Raise ValueError when another account could write into it. One that cannot be made is empty, and is told of by
        `locked` of its entries.
        """
        if most is not None and most < 0:
            raise ValueError(f"most={most}: bytes that a folder may hold are 0 or more")
        try:
            self.path = Path(path).expanduser().absolute()
        except RuntimeError as error:  # "~" of nobody, or of a process without a home
            raise ValueError(str(error)) from None
        self.most = _configured() if most is None else most
        with contextlib.suppress(OSError):
            self.path.mkdir(mode=0o700, parents=True)
        fault = None
        with contextlib.suppress(OSError):
            fault = self._fault()
        if fault:
            raise ValueError(fault)

    def check(self) -> None:
        """Raise OSError unless it is there, and ours alone."""
        if fault := self._fault():
            raise PermissionError(fault)

    def entry(self, token: bytes) -> Entry:
        """Return the entry of this token, which may not exist yet. Raise ValueError."""
        return Entry(self, token)

    def entries(self) -> list[Compilation]:
        """Return all there are now. Raise nothing: a folder that is gone has none."""
        try:
            found = [self.entry(token).listed() for token in self._tokens()]
        except OSError:
            return []
        return [compilation for compilation in found if compilation]

    def remove(self, token: bytes) -> bool:
        """Remove an entry. Raise OSError.

        Returns False if a process has it locked, so that it is being made anew, and stays.
        """
        return self.entry(token).remove()

    def clear(self) -> Pruned:
        """Remove everything. Raise OSError."""
        pruned = self._remove_if(lambda _, _total: True)
        self._tidy()
        return pruned

    def prune(self, most: int | None = None, older_than: float | None = None) -> Pruned:
        """Remove what crashes left, entries not used for `older_than` seconds, and more until all have `most` bytes.

        most: None is the folder's own. Raise OSError.
        """
        limit = self.most if most is None else most
        oldest = float("-inf") if older_than is None else time.time() - older_than
        self._tidy()
        return self._remove_if(lambda compilation, total: compilation.used < oldest or total > limit)

    def make_room(self) -> None:
        """Remove others until no more than `most` is left, after a commit, whose entry is locked and so stays.

        Raise nothing: where others are locked, or cannot be removed, more than `most` is left until the next commit.
        """
        with contextlib.suppress(OSError):
            self._remove_if(lambda _, total: total > self.most)

    def _remove_if(self, wanted: Callable[[Compilation, int], bool]) -> Pruned:
        """Remove in order of last use. `wanted` is asked with an entry, and the bytes of all that are left."""
        entries = sorted(self.entries(), key=lambda compilation: compilation.used)
        total = sum(compilation.nbytes for compilation in entries)
        removed, in_use = [], 0
        for compilation in entries:
            if not wanted(compilation, total):
                continue
            if self.remove(bytes.fromhex(compilation.token)):
                removed.append(compilation)
                total -= compilation.nbytes
            else:
                in_use += 1
        return Pruned(removed, in_use)

    def _tidy(self) -> None:
        for token in self._tokens():
            self.entry(token).tidy()

    def _tokens(self) -> set[bytes]:
        """Return the tokens of the files that lie here. Others' files are never touched. Raise OSError."""
        return {name[0] for name in map(parsed_name, os.listdir(self.path)) if name}

    def _fault(self) -> str | None:
        """Return why the folder is not ours alone; None: it is. Raise OSError when there is nothing."""
        status = os.stat(self.path)
        if not stat.S_ISDIR(status.st_mode):
            return f"{self.path} is not a folder; remove it or choose another"
        if status.st_uid != os.getuid():
            return f"{self.path} belongs to another user (uid {status.st_uid}); choose a folder of your own"
        if status.st_mode & 0o022:
            return f"{self.path} may be written to by others; `chmod 0700` it and empty it, or choose another"
        return None


def _configured() -> int:
    """Return `most_mb` of a file of the user's. Raise ValueError."""
    path = in_home("~/.config/burst/cache.toml")
    found = configured(path)
    for name, value in found.items():
        if name != "most_mb" or type(value) is not int or value < 0:
            raise ValueError(f"{path}: {name} = {value!r}: the only setting is most_mb, a whole number of 0 or more")
    return found["most_mb"] * 10**6 if found else _MOST


__all__ = [
    "TOKEN_BYTES",
    "About",
    "Compilation",
    "Counts",
    "Draft",
    "Entry",
    "Files",
    "Folder",
    "Pruned",
    "default_folder",
]
