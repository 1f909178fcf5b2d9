"""A lock that is a file: for one thread of one process at a time, and gone with a process that is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOOK_AGAIN = 0.05  # seconds; a wait that sleeps in the kernel could miss a Ctrl-C that comes just before it


@contextlib.contextmanager
def locked(path: str, on_wait: Callable[[], object], timeout: float | None) -> Iterator[None]:
    """Waits for it, after one call of on_wait. timeout: seconds; None waits for ever. Raises TimeoutError, OSError."""
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
def taken(path: str) -> Iterator[bool]:
    """Yields whether the lock is ours; does not wait. Raises OSError."""
    lock = _try_lock(path)
    with _releasing(lock) if lock else contextlib.nullcontext():
        yield lock is not None


def private(path: str, flags: int) -> int:
    """An opener for `open`: what it makes is ours alone, and no link is followed."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(path: str) -> BinaryIO | None:
    """A file that holds the lock; None when another one does."""
    while True:
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(open(path, "ab", opener=private))
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
    """At once, even if the process has forked meanwhile: a child's copy of the descriptor would keep the lock."""
    with lock:
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
