"""A key-value store for a driver's small records that outlive its process, such as compiled kernels and their digests.

The rules are those of Android's nnCache: a new entry evicts others by a policy when the store is full, and is saved
some seconds later, together with other new entries. Whatever happens to the file, a store never fails: at worst it is
empty, and its entries are in memory only.

A store holds the contents of its file in memory, and on top the entries that were set, used or evicted since the last
save. Before each get and save it checks whether another process has saved, so all processes on one file see the same
entries, each with its own unsaved ones on top. A file that is damaged or gone is rebuilt from memory at the next save.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Literal, get_args

from driver import fork
from driver.engine.cache.blob_file import BlobFile, DamagedBlobFile, opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from driver.engine.cache.blob_file import BlobRow

Select = Literal["random", "lru"]
Capacity = Literal["halve", "fit", "fit_halve"]

_log = logging.getLogger(__name__)
_inherited: list[BlobFile | None] = []  # files of the parent process: closing them here would harm the parent


class BlobStore:
    """Maps keys to values, both bytes, in a file that processes share. Any thread may call.

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
        """`build_id`: of the program that writes; other builds find no entries. `delay`: seconds from set to save.

        Raises ValueError for limits that are not positive and for unknown policies.
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
        self._saver: threading.Thread | None = None
        self._file: BlobFile | None = None
        self._damaged: int | None = None
        self._is_child = self._has_warned = False
        self._closed = threading.Event()
        with self._lock:
            self._attempt(self._refresh)
        fork.abandon_in_child(self)

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None. Counts as a use."""
        with self._lock:
            if self._file:
                self._attempt(self._refresh)
            value = self._entries.get(key)
            if value is not None:
                self._note_use(key)
            return value

    def set(self, key: bytes, value: bytes) -> None:
        """Stores an entry. Ignored if key or value is empty, or if they cannot fit; an older value stays then."""
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
                self._saver = threading.Thread(target=self._save_when_due, name="blobs", daemon=True)
                self._saver.start()

    def flush(self) -> bool:
        """Saves now. False if that fails: then unsaved entries stay in memory only."""
        with self._lock:
            self._due = None
            if not self._is_child and (self._used or self._gone):
                self._attempt(self._save)
            return not self._unsaved

    def close(self) -> None:
        """Saves and closes. From now on `get` finds nothing, and `set` is ignored."""
        with self._lock:
            self.flush()
            self._closed.set()
            self._drop_file()
            self._forget()

    def abandon(self) -> None:
        """Called in a forked child: leaves the file to the parent."""
        self._lock = threading.RLock()
        _inherited.append(self._file)
        self._file, self._saver, self._is_child = None, None, True
        self._forget()

    def _save_when_due(self) -> None:
        """The saving thread. It outlives a flush, to serve the next `set`, but ends once nothing is due."""
        while True:
            with self._lock:
                if self._due is not None and self._due <= time.monotonic():
                    self.flush()
                if self._due is None:
                    self._saver = None
                    return
                left = self._due - time.monotonic()
            self._closed.wait(min(max(left, 0), threading.TIMEOUT_MAX))

    # ---- what is kept

    def _is_acceptable(self, key: bytes, value: bytes) -> bool:
        return (
            0 < len(key) <= self._max_key
            and 0 < len(value) <= self._max_value
            and len(key) + len(value) <= self._max_total
        )

    def _make_room(self, key: bytes, value: bytes) -> bool:
        """Evicts until the entry fits; its own older value may be evicted, too. False if it cannot fit."""
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
        """Stores it as the most recently used entry."""
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
        """Opens the file if necessary, and reads it if it has changed. Raises OSError, DamagedBlobFile."""
        file = self._opened()
        if file.has_changed():
            with file.transaction("DEFERRED"):
                self._merge(file.rows())

    def _save(self) -> None:
        """Raises OSError, DamagedBlobFile."""
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
        """Takes over the file's entries; applies on top what was set, used or evicted here."""
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
        """Marks all entries as unsaved: the file has lost them."""
        unused = [key for key in self._entries if key not in self._used]
        for key in reversed(unused):
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
        """Runs an action on the file. A damaged file is rebuilt, once; after other errors the next save tries again."""
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
