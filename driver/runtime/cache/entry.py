"""One entry of the cache folder: the files that a device wrote for one token, replaced as a whole.

A writer takes the entry's lock, makes files of a new generation beside the old ones, and renames a manifest
that names them into place. A process that is killed anywhere on this way leaves the old entry or the new one, and
perhaps files that no manifest names; the next draft removes those. Readers take no lock: files that are removed
under an open descriptor stay usable, and a reader that finds them gone looks at the manifest again.

Nothing is synced: what a power failure leaves is for the device to check, as it checks whatever else is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol, TypeVar

from driver.runtime.cache.manifest import MOST_MANIFEST_BYTES, Manifest, parsed_manifest, parsed_name, stem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from driver.runtime.cache.manifest import About, Counts

    Found = TypeVar("Found")


_LOOK_AGAIN = 0.05  # seconds; a wait that sleeps in the kernel could miss a Ctrl-C that comes just before it


@contextlib.contextmanager
def _locked(path: str, on_wait: Callable[[], object], timeout: float | None) -> Iterator[None]:
    """Wait for it, after one call of on_wait. timeout: seconds; None waits for ever. Raise TimeoutError, OSError."""
    deadline = None if timeout is None else time.monotonic() + timeout
    lock = _try_lock(path)
    if lock is None:
        on_wait()
    while lock is None:
        left = _LOOK_AGAIN if deadline is None else min(_LOOK_AGAIN, deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError(f"timeout={timeout}: another process still compiles this model; allow more seconds")
        time.sleep(left)
        lock = _try_lock(path)
    with _releasing(lock):
        yield


@contextlib.contextmanager
def _taken(path: str) -> Iterator[bool]:
    """Yield True if the lock is ours; does not wait. Raise OSError."""
    lock = _try_lock(path)
    with _releasing(lock) if lock else contextlib.nullcontext():
        yield lock is not None


def _private(path: str, flags: int) -> int:
    """Return an opener for `open`: what it makes is ours alone, and no link is followed."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _try_lock(path: str) -> BinaryIO | None:
    """Return a file that holds the lock; None when another one does. What is no file there is removed."""
    while True:
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(open(path, "ab", opener=_private))
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                lock = None
            if not lock or not _is_regular(lock.fileno()):  # a FIFO or a socket, at which others would wait
                os.unlink(path)
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock.fileno()), os.lstat(path)):
                    stack.pop_all()
                    return lock
            except BlockingIOError:
                return None
            except FileNotFoundError:
                pass  # as when it is another file by now: it was removed, with its entry, after we had opened it


@contextlib.contextmanager
def _releasing(lock: BinaryIO) -> Iterator[None]:
    """Release the lock at once, even if the process has forked meanwhile: a child's copy would keep it."""
    with lock:
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW
_NONE_THERE = {errno.ENOENT, errno.ELOOP, errno.ENXIO}  # no file, a link, a socket


class EntryFolder(Protocol):
    """A folder as an entry needs to know it."""

    path: Path
    most: int

    def check(self) -> None:
        """Raise OSError unless it is there, and ours alone."""

    def make_room(self) -> None:
        """Remove what is not locked until no more than `most` is left."""


class Files(NamedTuple):
    """The descriptors of an entry, open for reading and writing; they are closed for you."""

    model: list[int]
    data: list[int]


@dataclass(frozen=True)
class Compilation:
    """The known facts about an entry.

    token: in hexadecimal; nbytes: of a device's files; made, used: seconds since 1970.
    """

    token: str
    model: str
    device: str
    version: str
    nbytes: int
    made: float
    used: float
    hits: int


class Draft:
    """A new set of files, which no reader sees before `commit`."""

    def __init__(self, entry: Entry, manifest: Manifest, files: Files) -> None:
        """Use `entry.draft`."""
        self.files = files
        self._entry, self._manifest = entry, manifest

    def commit(self) -> bool:
        """Make these files the entry, and make room for them. Raise OSError.

        False: they alone are more than the folder may hold. Nothing has changed then, and they are not kept.
        """
        if sum(os.fstat(fd).st_size for fd in (*self.files.model, *self.files.data)) > self._entry.home.most:
            return False
        self._entry.publish(self._manifest)
        return True


class Entry:
    """An entry; use `folder.entry`. Any number of threads and processes may have one for the same token."""

    def __init__(self, home: EntryFolder, token: bytes) -> None:
        self.home, self.token = home, token
        self._stem = stem_of(token)
        self._locked = False

    @contextlib.contextmanager
    def opened(self, counts: Counts) -> Iterator[Files | None]:
        """Yield the files as they are now; None when there are none, or not as many. Raise nothing itself."""

        def find(manifest: Manifest) -> Files | None:
            return self._open(manifest, os.O_RDWR, stack) if manifest.counts == counts else None

        with contextlib.ExitStack() as stack:
            yield self._steady(find)

    @contextlib.contextmanager
    def locked(self, on_wait: Callable[[], object], timeout: float | None) -> Iterator[None]:
        """Lock the entry for one thread of one process, once; the lock goes with a process that is killed.

        on_wait: called once, before waiting for the process that has the lock. timeout: seconds; None waits for ever.
        Raise TimeoutError; another OSError when the folder is gone, not writable, not ours alone any more, or full.
        """
        self.home.check()
        with _locked(self._path(".lock"), on_wait, timeout):
            self._locked = True
            try:
                yield
            finally:
                self._locked = False

    @contextlib.contextmanager
    def draft(self, counts: Counts, about: About) -> Iterator[Draft]:
        """Yield new and empty files, inside `locked`. At the end they are gone, or the old ones if they were committed.

        Raise OSError, as does its `commit`, when the folder is gone, not writable, or full: go on without the cache.
        """
        if not self._locked:
            raise RuntimeError("this entry is not locked: call draft() inside `with entry.locked(...)`")
        self._sweep()
        manifest = Manifest(os.urandom(8).hex(), counts, about)
        try:
            with contextlib.ExitStack() as stack:
                yield Draft(self, manifest, self._open(manifest, os.O_RDWR | os.O_CREAT | os.O_EXCL, stack))
        finally:
            with contextlib.suppress(OSError):  # the next draft will
                self._sweep()

    def publish(self, manifest: Manifest) -> None:
        """Publish a draft, which is its last step.

        The file of hits is there whenever a manifest is, and is not made later.
        """
        new = self._path(f".json.{manifest.generation}")
        with open(new, "xb", opener=_private) as file:
            file.write(manifest.as_bytes())
        with open(self._path(".hits"), "ab", opener=_private):
            pass
        _touch(new)
        os.replace(new, self._path(".json"))
        self.home.make_room()

    def note_hit(self) -> None:
        """Count one more use, just now. Raise nothing."""
        with contextlib.suppress(OSError):
            fd = os.open(self._path(".hits"), os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | _SAFE)
            try:
                os.write(fd, b"+")
                _touch(fd)
            finally:
                os.close(fd)

    def listed(self) -> Compilation | None:
        """Return what is known of it; None when there is none. Raise nothing."""
        return self._steady(self._describe)

    def remove(self) -> bool:
        """Remove it. Raise OSError.

        Returns False if a process has it locked, so that it is being made anew, and stays.
        """
        with _taken(self._path(".lock")) as ours:
            if ours:
                self._erase()
        return ours

    def tidy(self) -> None:
        """Remove what no manifest names, unless a process has the entry locked. Raise OSError."""
        with _taken(self._path(".lock")) as ours:
            if ours and self._manifest():
                self._sweep()
            elif ours:
                self._erase()

    def _path(self, suffix: str) -> str:
        return os.path.join(self.home.path, self._stem + suffix)

    def _manifest(self) -> Manifest | None:
        """Return the manifest; None if there is none.

        Raise OSError when it cannot be read now: a caller that took that for none would sweep the entry away.
        """
        try:
            fd = os.open(self._path(".json"), os.O_RDONLY | os.O_NONBLOCK | _SAFE)
        except OSError as error:
            if error.errno in _NONE_THERE:
                return None
            raise
        try:
            raw = os.read(fd, MOST_MANIFEST_BYTES + 1) if _is_regular(fd) else b""
        finally:
            os.close(fd)
        return parsed_manifest(raw) if len(raw) <= MOST_MANIFEST_BYTES else None

    def _steady(self, find: Callable[[Manifest], Found | None]) -> Found | None:
        """Return what is found of the files that the manifest names; look once more if others came instead of them."""
        seen = None
        with contextlib.suppress(OSError):
            while (manifest := self._manifest()) and manifest.generation != seen:
                with contextlib.suppress(OSError):
                    return find(manifest)
                seen = manifest.generation
        return None

    def _open(self, manifest: Manifest, flags: int, closing: contextlib.ExitStack) -> Files:
        with contextlib.ExitStack() as stack:
            both = manifest.model_files, manifest.data_files
            files = Files(*([self._open_file(name, flags, stack) for name in names] for names in both))
            closing.push(stack.pop_all())
        return files

    def _open_file(self, suffix: str, flags: int, closing: contextlib.ExitStack) -> int:
        fd = os.open(self._path(suffix), flags | _SAFE, 0o600)
        closing.callback(os.close, fd)
        if not _is_regular(fd):
            raise OSError(f"{self._path(suffix)} is not a file")
        return fd

    def _describe(self, manifest: Manifest) -> Compilation:
        about = manifest.about
        sizes = [os.lstat(self._path(name)).st_size for name in (*manifest.model_files, *manifest.data_files)]
        used, hits = os.lstat(self._path(".json")).st_mtime, 0
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(self._path(".hits"))
            used, hits = max(used, status.st_mtime), status.st_size
        return Compilation(
            self.token.hex(),
            about.model,
            about.device,
            about.version,
            nbytes=sum(sizes),
            made=about.made,
            used=used,
            hits=hits,
        )

    def _names(self) -> Iterator[str]:
        """Yield the names of the entry's files: what follows the letters."""
        for name in os.listdir(self.home.path):
            if name.startswith(self._stem) and (found := parsed_name(name)):
                yield found[1]

    def _sweep(self) -> None:
        """Remove the files that the manifest does not name. The caller holds the lock."""
        manifest = self._manifest()
        named = [*manifest.model_files, *manifest.data_files] if manifest else []
        for suffix in set(self._names()) - {".json", ".hits", ".lock", *named}:
            os.unlink(self._path(suffix))

    def _erase(self) -> None:
        """Remove the entry under the lock: the manifest first, so that half an entry is none; the lock file last."""
        for suffix in sorted(self._names(), key=lambda suffix: (suffix == ".lock", suffix != ".json")):
            os.unlink(self._path(suffix))


def _is_regular(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def _touch(file: str | int) -> None:
    """Set the times to the nanosecond: the kernel's own are some milliseconds old, and close uses look alike."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))
