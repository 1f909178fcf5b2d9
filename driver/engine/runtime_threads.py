"""The threads that a driver's runtime starts for models, by the account that had these prepared.

No ledger knows of them, and the kernel says who started a thread in one way alone: a new thread has the name of the
one that starts it, until it takes another. So a thread that prepares is named after its account meanwhile.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fmq._core import lib

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def starting_threads_for(uid: int) -> Iterator[None]:
    """Have the threads that start in this one, within the block, count as the account's."""
    before = Path("/proc/thread-self/comm").read_bytes().strip()
    lib.fmq_name_thread(_name(uid))
    try:
        yield
    finally:
        lib.fmq_name_thread(before)


def threads_started_for(uid: int) -> int:
    """Return how many threads of this process count as the account's, those that prepare among them."""
    found, name = 0, _name(uid)
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            found += (task / "comm").read_bytes().strip() == name
    return found


def _name(uid: int) -> bytes:
    return b"uid %d" % uid
