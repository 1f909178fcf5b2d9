"""Telling an error that says that this process can have no more of something from other errors.

Descriptors, threads, mappings and memory can run out whatever is counted beforehand. The request for which one was
missing then fails with RESOURCE_EXHAUSTED_TRANSIENT: it is no mistake of the caller's, and may succeed later.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from burst.errors import BurstError, Malformed, ResourceExhaustedTransient
from burst.memory_limits import descriptors_text
from fmq import FmqError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ERRNOS = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,  # of fork
    errno.ENOBUFS,
    errno.ENOSPC,
    errno.ETOOMANYREFS,
    errno.EDQUOT,
}
_T = TypeVar("_T")
_NO_THREAD = "can't start new thread"  # what `threading` says, in a RuntimeError


class DescriptorsLost(Malformed):
    """A message came without its descriptors, because this process can open no more; the kernel has closed them.

    Attributes:
        raw: the rest of the message.
    """

    def __init__(self, raw: bytes) -> None:
        super().__init__(f"descriptors that came with a message are lost: {descriptors_text()}")
        self.raw = raw


def exhausted(error: BaseException, whose: str = "the device") -> ResourceExhaustedTransient | None:
    """Return the error that a client gets for one that says that something has run out, and for whom; None for other
    errors.
    """
    match error:
        case DescriptorsLost():
            why = str(error)
        case OSError(errno=errno.EMFILE):
            why = descriptors_text()
        case OSError() if error.errno in _ERRNOS:
            why = str(error)
        case RuntimeError() if str(error) == _NO_THREAD:
            why = "no more threads can be started (ulimit -u, kernel.threads-max, pids.max, vm.max_map_count)"
        case MemoryError():
            why = f"no memory is left: {error}" if str(error) else "no memory is left"
        case _:
            return None
    return ResourceExhaustedTransient(f"{whose} has run out of resources: {why}; try again later")


@contextmanager
def running_out() -> Iterator[None]:
    """Raise what says that this process can have no more of something as ResourceExhaustedTransient."""
    try:
        yield
    except (BurstError, FmqError):
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        if found := exhausted(error, "this process"):
            raise found from error
        raise


def with_room(make: Callable[[], _T], forget_plans: Callable[[], object]) -> _T:
    """Return what `make` returns. If there is no room, drop plans first: they cost less to make than a refusal."""
    with suppress(ResourceExhaustedTransient):
        return make()
    forget_plans()
    return make()
