"""The file of a blob store: one table in SQLite.

SQLite is part of Python and does what is needed: a killed writer leaves either the old contents or the new ones, one
process writes at a time, and its readers have been tested with damaged files for twenty years. Importing it takes some
milliseconds, so a device imports this module only when it caches.

Saves are appended to a log. The log is synced (`fsync`) when it is moved into the file, about once per megabyte, not at
each save: killing the process loses nothing that was saved; a power failure may lose the last saves, and leaves earlier
ones whole.

Each row has a checksum, because SQLite detects only damage of its own structure. The row with the empty key, which
callers cannot set, names the build that wrote the entries.

The file belongs to this account: mode 0600, not a link, in a folder that no other account may write to. It is opened,
and rebuilt if it is damaged, under a lock on the folder, so that no process removes what another has just made. A
process that still has the old file open finds another one at its path, and writes its entries into that.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
import time
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_SCHEMA = "CREATE TABLE entry(key BLOB PRIMARY KEY, used INTEGER, sum INTEGER, value BLOB) WITHOUT ROWID"
_PRAGMAS = "page_size=1024", "journal_mode=WAL", "synchronous=NORMAL"
_SIDES = "", "-wal", "-shm", "-journal"  # suffixes of the file and of those that SQLite keeps beside it
_BUILD = b""
_PATIENCE = 1.0  # seconds to wait for a lock
_MOST_USED = 2**62
_OUTSIDE = {  # error codes that do not mean a damaged file
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_INTERRUPT),
}


class DamagedBlobFile(Exception):
    """The file is damaged or no longer at its path. The next process to open it rebuilds it."""


class BlobRow(NamedTuple):
    """One entry. `used` grows with every save of an entry or of its use; a value that does not verify is None."""

    key: bytes
    value: bytes | None
    used: int


class BlobFile:
    """Entries in a file. Every method raises OSError when the system refuses, and DamagedBlobFile for a bad file."""

    def __init__(self, path: Path, build_id: str, most: int) -> None:
        """Use `opened`. `most`: limit on the bytes of keys and values."""
        self._path, self._build, self._most = path, build_id.encode(), most
        self._is_of_build, self._seen, self._last = False, -1, 0
        _create(path)
        _check(path, most)
        self.inode = _inode(path)
        with _errors(path):
            self._db = sqlite3.connect(path, _PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            with _errors(path):
                self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        self._db.text_factory = bytes
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(self._most + 2**14, 10**9))
        for pragma in _PRAGMAS:
            self._db.execute(f"PRAGMA {pragma}")
        if not self._schema():
            self._db.execute(_SCHEMA)

    def _schema(self) -> list[Any]:
        return self._db.execute("SELECT sql FROM sqlite_master").fetchall()

    @contextmanager
    def transaction(self, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[None]:
        """All or nothing. IMMEDIATE: excludes other writers from the beginning."""
        with _errors(self._path):
            self._db.execute(f"BEGIN {kind}")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    def has_changed(self) -> bool:
        """Whether another process has written since `rows`."""
        if _inode(self._path) != self.inode:
            raise DamagedBlobFile(f"{self._path}: another process has replaced it")
        with _errors(self._path):
            return self._version() != self._seen

    def _version(self) -> int:
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        return int(version)

    def rows(self) -> list[BlobRow] | None:
        """Within a transaction: all entries, least recently used first. None if another build wrote them."""
        if self._schema() != [(_SCHEMA.encode(),)]:
            raise DamagedBlobFile(f"{self._path}: it is not a blob store of this version")
        self._seen, found, left = self._version(), {}, self._most
        for key, used, checksum, value in self._db.execute("SELECT key, used, sum, value FROM entry"):
            if not isinstance(key, bytes) or key in found:
                raise DamagedBlobFile(f"{self._path}: it has keys that no store writes")
            is_whole = isinstance(value, bytes) and _is_stamp(used) and checksum == _sum(key, used, value)
            found[key] = BlobRow(key, value, used) if is_whole else BlobRow(key, None, 0)
            left -= len(key) + len(value or b"") if is_whole else 1
            if left < 0:
                raise DamagedBlobFile(f"{self._path}: it is larger than a store may be")
        build = found.pop(_BUILD, None)
        self._last = max((row.used for row in found.values()), default=0)
        self._is_of_build = build is not None and build.value == self._build
        return sorted(found.values(), key=lambda row: row.used) if self._is_of_build else None

    def write(self, gone: Iterable[bytes], entries: Iterable[tuple[bytes, bytes]], new: set[bytes]) -> dict[bytes, int]:
        """Within an IMMEDIATE transaction, after `rows`: deletes `gone`; stores `entries` in the order of their use.

        `new`: keys whose values have changed. Returns the new `used` of each entry.
        """
        if not self._is_of_build:
            self._db.execute("DELETE FROM entry")
            self._insert(_BUILD, 0, self._build)
            self._is_of_build = True
        self._db.executemany("DELETE FROM entry WHERE key = ?", ((key,) for key in gone))
        stamps = {}
        for used, (key, value) in enumerate(entries, self._last + 1):
            stamps[key] = self._last = used
            if key in new:
                self._insert(key, used, value)
            else:
                self._db.execute(
                    "UPDATE entry SET used = ?, sum = ? WHERE key = ?", (used, _sum(key, used, value), key)
                )
        return stamps

    def _insert(self, key: bytes, used: int, value: bytes) -> None:
        self._db.execute("REPLACE INTO entry VALUES (?, ?, ?, ?)", (key, used, _sum(key, used, value), value))

    def close(self) -> None:
        """Closes it. SQLite moves the log into the file unless another process has it open."""
        with suppress(sqlite3.Error):
            self._db.close()


def opened(path: Path, build_id: str, most: int, damaged: int | None) -> BlobFile:
    """Opens the file; makes it if it is missing, and rebuilds it if it is damaged, as that of inode `damaged` is.

    Raises OSError, DamagedBlobFile.
    """
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with _locked(path.parent):
        if damaged is not None and _inode(path) == damaged:
            _remove(path)
        try:
            return BlobFile(path, build_id, most)
        except DamagedBlobFile:
            _remove(path)
        return BlobFile(path, build_id, most)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder, which only this account may write to. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"other accounts may write to {folder}; chmod 700 it, or choose a folder of your own")
        end = time.monotonic() + _PATIENCE
        while not _try_lock(fd):
            if time.monotonic() > end:
                raise TimeoutError(f"{folder}: another process holds its lock")
            time.sleep(1e-3)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _create(path: Path) -> None:
    """Makes a missing file, and opens no other: closing its descriptor would release SQLite's locks on it."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _check(path: Path, most: int) -> None:
    """Raises PermissionError for a file that SQLite must not be given, DamagedBlobFile for one that is too large.

    An entry of a few bytes takes several times as many, and the log has room for two saves of everything.
    """
    size = 0
    for side in map(path.with_name, (path.name + side for side in _SIDES)):
        with suppress(FileNotFoundError):
            status = os.lstat(side)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError(f"{side}: it is not a regular file of this user; remove it")
            if status.st_mode & 0o077:
                os.chmod(side, 0o600)
            size += status.st_size
    if size > 4 * most + 2**22:
        raise DamagedBlobFile(f"{path}: it has {size} bytes, but its entries may have {most}")


def _inode(path: Path) -> int:
    """Its number; 0 when there is no such file."""
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return 0


def _remove(path: Path) -> None:
    """Removes the file. SQLite's side files go first, or the next file would take them for its own."""
    for side in reversed(_SIDES):
        path.with_name(path.name + side).unlink(missing_ok=True)


def _is_stamp(used: Any) -> bool:
    return type(used) is int and 0 <= used < _MOST_USED


def _sum(key: bytes, used: int, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key, zlib.crc32(b"%d %d" % (len(key), used))))


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Converts SQLite's errors to OSError and DamagedBlobFile."""
    try:
        yield
    except UnicodeDecodeError:  # SQLite quotes the file's contents in a message
        raise DamagedBlobFile(f"{path}: it has a different schema") from None
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _OUTSIDE or (code == sqlite3.SQLITE_READONLY and not os.access(path, os.W_OK)):
            raise OSError(f"{path}: {error}") from None
        raise DamagedBlobFile(f"{path}: {error}") from None
