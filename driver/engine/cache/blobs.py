"""A key-value store for a driver's small records that outlive its process, such as compiled kernels and their digests.

The rules are those of Android's nnCache: a new entry evicts others by a policy when the store is full, and is saved
some seconds later, together with other new entries. Whatever happens to the file, a store never fails: at worst it is
empty, and its entries are in memory only.

A store holds the contents of its file in memory, and on top the entries that were set, used or evicted since the last
save. Before each get and save it checks whether another process has saved, so all processes on one file see the same
entries, each with its own unsaved ones on top. A file that is damaged or gone is rebuilt from memory at the next save.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import sqlite3
import stat
import threading
import time
import zlib
from collections import OrderedDict
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from burst.serving_thread import ServingThread
from driver import fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
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
    """An error: the file is damaged or no longer at its path. The next process to open it rebuilds it."""


class BlobRow(NamedTuple):
    """An entry. `used` grows with every save of an entry or of its use; a value that does not verify is None."""

    key: bytes
    value: bytes | None
    used: int


class BlobFile:
    """A file of entries: one table in SQLite.

    Every method raises OSError when the system refuses, and DamagedBlobFile for a bad file.

    SQLite is part of Python and does what is needed: a killed writer leaves either the old contents or the new ones,
    one process writes at a time, and its readers have been tested with damaged files for twenty years. Importing it
    takes some milliseconds, so a device imports this module only when it caches.

    Saves are appended to a log. The log is synced (`fsync`) when it is moved into the file, about once per megabyte,
    not at each save: killing the process loses nothing that was saved; a power failure may lose the last saves, and
    leaves earlier ones whole.

    Each row has a checksum, because SQLite detects only damage of its own structure. The row with the empty key, which
    callers cannot set, names the build that wrote the entries.

    The file belongs to this account: mode 0600, not a link, in a folder that no other account may write to. It is
    opened, and rebuilt if it is damaged, under a lock on the folder, so that no process removes what another has just
    made. A process that still has the old file open finds another one at its path, and writes its entries into that.
    """

    def __init__(self, path: Path, build_id: str, most: int) -> None:
        """Use `opened`. `most`: limit on the bytes of keys and values."""
        self._path, self._build, self._most = path, build_id.encode(), most
        self._is_of_build, self._seen, self._last = False, -1, 0
        _create(path)
        _check(path, most)
        self.inode = _inode(path)
        with _errors(path):
            self._db = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
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
        """Do all or nothing. IMMEDIATE: excludes other writers from the beginning."""
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
        """Return True if another process has written since `rows`."""
        if _inode(self._path) != self.inode:
            raise DamagedBlobFile(f"{self._path}: another process has replaced it")
        with _errors(self._path):
            return self._version() != self._seen

    def _version(self) -> int:
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        return int(version)

    def rows(self) -> list[BlobRow] | None:
        """Return all entries, least recently used first, within a transaction. None if another build wrote them."""
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
        """Delete `gone`, and store `entries` in the order of their use. Within an IMMEDIATE transaction, after `rows`.

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
        """Close it. SQLite moves the log into the file unless another process has it open."""
        with suppress(sqlite3.Error):
            self._db.close()

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was not opened
            self.close()


def opened(path: Path, build_id: str, most: int, damaged: int | None) -> BlobFile:
    """Open the file; make it if it is missing, and rebuild it if it is damaged, as that of inode `damaged` is.

    Raise OSError, DamagedBlobFile.
    """
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with locked(path.parent):
        if damaged is not None and _inode(path) == damaged:
            _remove(path)
        try:
            return BlobFile(path, build_id, most)
        except DamagedBlobFile:
            _remove(path)
        return BlobFile(path, build_id, most)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, which only this account may write to. Raise OSError."""
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
    """Make a missing file, and open no other: closing its descriptor would release SQLite's locks on it."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _check(path: Path, most: int) -> None:
    """Raise PermissionError for a file that SQLite must not be given, DamagedBlobFile for one that is too large.

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
    """Return its number; 0 when there is no such file."""
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return 0


def _remove(path: Path) -> None:
    """Remove the file. SQLite's side files go first, or the next file would take them for its own."""
    for side in reversed(_SIDES):
        path.with_name(path.name + side).unlink(missing_ok=True)


def _is_stamp(used: Any) -> bool:
    return type(used) is int and 0 <= used < _MOST_USED


def _sum(key: bytes, used: int, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key, zlib.crc32(b"%d %d" % (len(key), used))))


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Convert SQLite's errors to OSError and DamagedBlobFile."""
    try:
        yield
    except UnicodeDecodeError:  # SQLite quotes the file's contents in a message
        raise DamagedBlobFile(f"{path}: it has a different schema") from None
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _OUTSIDE or (code == sqlite3.SQLITE_READONLY and not os.access(path, os.W_OK)):
            raise OSError(f"{path}: {error}") from None
        raise DamagedBlobFile(f"{path}: {error}") from None


Select = Literal["random", "lru"]
Capacity = Literal["halve", "fit", "fit_halve"]

_log = logging.getLogger(__name__)
_inherited: list[BlobFile | None] = []  # files of the parent process: closing them here would harm the parent


class BlobStore:
    """A map of keys to values, both bytes, in a file that processes share. Any thread may call.

    An entry counts as the bytes of its key and value. When a new one exceeds `max_total_bytes`, others are evicted: at
    random or least recently used (`select`), until half the total is left, until it fits, or until both (`capacity`).
    With "halve" an entry that does not fit into the other half is not stored.

    Entries that are not saved when the process ends are lost: close the store. In a forked child it is empty, and in
    memory only. SQLite's locks belong to the parent, so a child must not open another store on that file, either.
    """

    def __init__(
        self,
        path: Path,
        *,
        build_id: str,
        max_key_bytes: int = 12 * 2**10,
        max_value_bytes: int = 64 * 2**10,
        max_total_bytes: int = 2 * 2**20,
        select: Select = "random",
        capacity: Capacity = "halve",
        delay: float = 4.0,
    ) -> None:
        """Open no file yet. `build_id`: of the writing program; others find no entries. `delay`: seconds to a save.

        Raise ValueError for limits that are not positive and for unknown policies.
        """
        _check_limits(
            max_key_bytes=max_key_bytes, max_value_bytes=max_value_bytes, max_total_bytes=max_total_bytes, delay=delay
        )
        _check_choice("select", select, get_args(Select))
        _check_choice("capacity", capacity, get_args(Capacity))
        self._path, self._build_id, self._delay = path.absolute(), build_id, delay
        self._max_key, self._max_value, self._max_total = max_key_bytes, max_value_bytes, max_total_bytes
        self._select, self._capacity = select, capacity
        self._lock = threading.RLock()
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._total = 0
        self._used: OrderedDict[bytes, None] = OrderedDict()  # since the last save, in this order
        self._unsaved: set[bytes] = set()  # of these
        self._stamps: dict[bytes, int] = {}  # of the rows that the file has
        self._gone: set[bytes] = set()  # of these
        self._due: float | None = None  # when to save: `delay` after the first set since the last save
        self._saver: ServingThread | None = None
        self._file: BlobFile | None = None
        self._damaged: int | None = None
        self._is_child = self._has_warned = False
        self._closed = threading.Event()
        with self._lock:
            self._attempt(self._refresh)
        fork.abandon_in_child(self)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None. Counts as a use."""
        with self._lock:
            if self._file:
                self._attempt(self._refresh)
            value = self._entries.get(key)
            if value is not None:
                self._note_use(key)
            return value

    def set(self, key: bytes, value: bytes) -> None:
        """Store an entry. Ignored if key or value is empty, or if they cannot fit; an older value stays then."""
        key, value = bytes(memoryview(key)), bytes(memoryview(value))
        with self._lock:
            if self._closed.is_set() or not self._is_acceptable(key, value) or not self._make_room(key, value):
                return
            self._put(key, value)
            self._unsaved.add(key)
            self._note_use(key)
            if self._due is None:
                self._due = time.monotonic() + self._delay
            if not self._saver and not self._is_child:
                saver = ServingThread(self._save_when_due, name="blobs")
                with suppress(RuntimeError):  # the next entry tries again; `close` saves in any case
                    saver.start()
                    self._saver = saver

    def flush(self) -> bool:
        """Save now. False if that fails: then unsaved entries stay in memory only."""
        with self._lock:
            self._due = None
            if not self._is_child and (self._used or self._gone):
                self._attempt(self._save)
            return not self._unsaved

    def close(self) -> None:
        """Save and close. From now on `get` finds nothing, and `set` is ignored."""
        with self._lock:
            self.flush()
            self._closed.set()
            self._drop_file()
            self._forget()

    def abandon(self) -> None:
        """Leave the file to the parent. Called in a forked child."""
        self._lock = threading.RLock()
        _inherited.append(self._file)
        self._file, self._saver, self._is_child = None, None, True
        self._forget()

    def _save_when_due(self) -> None:
        """Save when it is due. This thread outlives a flush, to serve the next `set`, but ends when nothing is due for
        long.
        """
        while True:
            with self._lock:
                left = self._delay if self._due is None else self._due - time.monotonic()
            self._closed.wait(min(max(left, 0), threading.TIMEOUT_MAX))
            with self._lock:
                if self._due is not None and self._due <= time.monotonic():
                    self.flush()
                if self._due is None:
                    self._saver = None
                    return

    # ---- what is kept

    def _is_acceptable(self, key: bytes, value: bytes) -> bool:
        return (
            0 < len(key) <= self._max_key
            and 0 < len(value) <= self._max_value
            and len(key) + len(value) <= self._max_total
        )

    def _make_room(self, key: bytes, value: bytes) -> bool:
        """Evict until the entry fits; its own older value may be evicted, too. False if it cannot fit."""
        while True:
            old = self._entries.get(key)
            growth = len(value) - len(old) if old is not None else len(key) + len(value)
            if self._total + growth <= self._max_total:
                return True
            left = self._left_after_cleaning(growth)
            if self._total <= left:
                return False
            self._evict_down_to(left)

    def _left_after_cleaning(self, growth: int) -> int:
        if self._capacity == "halve":
            return self._max_total // 2
        fit = self._max_total - growth
        return fit if self._capacity == "fit" else min(fit, self._max_total // 2)

    def _evict_down_to(self, most: int) -> None:
        at_random = list(self._entries) if self._select == "random" and self._total > most else []
        while self._total > most:
            if at_random:
                i = secrets.randbelow(len(at_random))
                at_random[i], at_random[-1] = at_random[-1], at_random[i]
                self._evict(at_random.pop())
            else:
                self._evict(next(iter(self._entries)))

    def _evict(self, key: bytes) -> None:
        self._total -= len(key) + len(self._entries.pop(key))
        self._used.pop(key, None)
        self._unsaved.discard(key)
        if key in self._stamps:
            self._gone.add(key)

    def _put(self, key: bytes, value: bytes) -> None:
        """Store it as the most recently used entry."""
        old = self._entries.pop(key, None)
        self._total += len(value) - len(old) if old is not None else len(key) + len(value)
        self._entries[key] = value
        self._gone.discard(key)

    def _note_use(self, key: bytes) -> None:
        self._entries.move_to_end(key)
        self._used[key] = None
        self._used.move_to_end(key)

    def _forget(self) -> None:
        self._entries.clear()
        self._total = 0
        for noted in (self._used, self._unsaved, self._stamps, self._gone):
            noted.clear()

    # ---- the file

    def _refresh(self) -> None:
        """Open the file if necessary, and read it if it has changed. Raise OSError, DamagedBlobFile."""
        file = self._opened()
        if file.has_changed():
            with file.transaction("DEFERRED"):
                self._merge(file.rows())

    def _save(self) -> None:
        """Save the entries that are unsaved. Raise OSError, DamagedBlobFile."""
        file = self._opened()
        with file.transaction("IMMEDIATE"):
            if file.has_changed():
                self._merge(file.rows())
            entries = [(key, self._entries[key]) for key in self._used]
            stamps = file.write(self._gone, entries, self._unsaved)
        for key in self._gone:
            del self._stamps[key]
        self._stamps.update(stamps)
        for noted in (self._used, self._unsaved, self._gone):
            noted.clear()
        self._has_warned = False

    def _opened(self) -> BlobFile:
        if not self._file:
            self._file = opened(self._path, self._build_id, 2 * self._max_total, self._damaged)
            self._damaged = None
        return self._file

    def _merge(self, rows: list[BlobRow] | None) -> None:
        """Take over the file's entries; apply on top what was set, used or evicted here."""
        used = [(key, self._entries[key], key in self._unsaved) for key in self._used]
        gone = {key: self._stamps[key] for key in self._gone}
        self._forget()
        for key, value, stamp in rows or ():
            self._stamps[key] = stamp
            if value is None or gone.get(key) == stamp:
                self._gone.add(key)
            elif self._is_acceptable(key, value):
                self._put(key, value)
        for key, value, unsaved in used:
            if unsaved:
                self._put(key, value)
                self._unsaved.add(key)
            if key in self._entries:
                self._note_use(key)
        self._evict_down_to(self._max_total)

    def _keep_as_unsaved(self) -> None:
        """Mark all entries as unsaved: the file has lost them."""
        for key in reversed([key for key in self._entries if key not in self._used]):
            self._used[key] = None
            self._used.move_to_end(key, last=False)
        self._unsaved.update(self._entries)
        self._stamps.clear()
        self._gone.clear()

    def _drop_file(self) -> None:
        if self._file:
            self._file.close()
        self._file = None

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run an action on the file. A damaged file is rebuilt, once; after other errors the next save tries again."""
        for _ in range(2):
            try:
                return action()
            except DamagedBlobFile as error:
                _log.info("%s; the file is rebuilt", error)
                self._damaged = self._file.inode if self._file else None
                self._keep_as_unsaved()
                self._drop_file()
            except OSError as error:
                if not self._has_warned:
                    _log.warning("%s; until that is fixed, new entries stay in memory only", error)
                self._has_warned = True
                return self._drop_file()


def _check_limits(**limits: float) -> None:
    for name, value in limits.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: must be positive")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(known)}")
