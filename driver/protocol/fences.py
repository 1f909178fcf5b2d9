"""Fences: descriptors that signal when something is done, and whether it failed. The states are those of syncWait.

| a fence is | signalled when | in error when |
|---|---|---|
| the read end of a pipe, as executions have | it holds a byte | it is hung up and holds no byte |
| an eventfd | its count is from 1 to 2**63 - 1 | its count is 2**63 (`ERROR_COUNT`) or more |
| a DMA-fence sync file | its fences are signalled | one of them has an error |

Fences are polled and never read: many waiters, in several processes, poll one pipe or one count, and a read would take
the signal from all others. The count of an eventfd is read from /proc, which leaves it unchanged. Programs that signal
by writing 1 cannot reach 2**63.

Our own fences are pipes because of deaths: when the device dies, the kernel closes its end, and all who poll the other
end see a hang-up. The count of an eventfd would stay 0 for ever.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import stat
import struct
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from burst import InvalidArgument, ResourceExhaustedTransient

if TYPE_CHECKING:
    from collections.abc import Sequence

ERROR_COUNT = 2**63
MOST_FENCES = 64  # that one execution can wait for
_KINDS = {"anon_inode:[eventfd]": "eventfd", "anon_inode:sync_file": "sync file", "anon_inode:[sync_file]": "sync file"}
_COUNT = re.compile(r"^eventfd-count:\s*([0-9a-f]+)$", re.MULTILINE)
_FILE_INFO = struct.Struct("32siIIIQ")  # linux/sync_file.h: name, status, flags, number of fences, padding, their place
_SYNC_IOC_FILE_INFO = 3 << 30 | _FILE_INFO.size << 16 | ord(">") << 8 | 4


class FenceState(Enum):
    """SIGNALED: done. ERROR: failed, it will never be done. ACTIVE: pending. UNKNOWN: not a fence."""

    SIGNALED = "signaled"
    ERROR = "error"
    ACTIVE = "active"
    UNKNOWN = "unknown"


def look(fd: int, timeout: float | None = 0.0, kind: str = "") -> FenceState:
    """Return the state of a fence; ACTIVE after `timeout` seconds without a signal or an error. None waits without an
    end.

    `kind`: what `kind_of` has said, where that is known.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    found = poll.poll(None if timeout is None else max(0.0, timeout) * 1e3)
    state = state_of_pipe(found[0][1] if found else 0)
    if state is FenceState.SIGNALED and kind != "pipe" and _has_error(fd, kind or kind_of(fd)):
        return FenceState.ERROR
    return state


def state_of_pipe(events: int) -> FenceState:
    """Return the state of a fence that is a pipe, as those of devices are, of which a poll has told these events."""
    if events & select.POLLNVAL:
        return FenceState.UNKNOWN
    if events & select.POLLERR:
        return FenceState.ERROR
    if events & select.POLLIN:
        return FenceState.SIGNALED
    return FenceState.ERROR if events & select.POLLHUP else FenceState.ACTIVE


def kind_of(fd: int) -> str:
    """ "pipe", "eventfd" or "sync file"; empty if `fd` is not a fence or not open."""
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            return "" if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY else "pipe"
        return _KINDS.get(os.readlink(f"/proc/self/fd/{fd}"), "")
    except OSError:
        return ""


def _has_error(fd: int, kind: str) -> bool:
    """Return True if a fence that polls as readable is in error, or if that cannot be found out."""
    try:
        match kind:
            case "eventfd":
                found = _COUNT.search(Path(f"/proc/self/fdinfo/{fd}").read_text())
                return found is None or int(found[1], 16) >= ERROR_COUNT
            case "sync file":
                info = bytearray(_FILE_INFO.size)
                fcntl.ioctl(fd, _SYNC_IOC_FILE_INFO, info)
                return bool(_FILE_INFO.unpack(info)[1] < 0)
    except OSError:
        return True
    return False


def check_most(wanted: int) -> None:
    """Raise InvalidArgument if an execution is to wait for more fences than it can."""
    if wanted > MOST_FENCES:
        raise InvalidArgument(f"wait_for: {wanted} fences; an execution can wait for at most {MOST_FENCES}")


def check_count(fds: Sequence[int], wanted: int) -> None:
    """Raise InvalidArgument if some of the fences that an execution is to wait for have no descriptor."""
    if len(fds) < wanted:
        raise InvalidArgument(f"wait_for: {wanted - len(fds)} of {wanted} fences are null")


def kinds_of(fds: Sequence[int]) -> list[str]:
    """Return the kinds of the fences that an execution is to wait for. Raise InvalidArgument for what is none."""
    kinds = [kind_of(fd) for fd in fds]
    if "" in kinds:
        raise InvalidArgument(
            f"wait_for: fence {kinds.index('')} is not a fence: fences are pipes, eventfds and sync files"
        )
    return kinds


def is_pending(n: int, fd: int, kind: str) -> bool:
    """Return True if fence `n` of those is still to come. Raise InvalidArgument if it is in error."""
    state = look(fd, kind=kind)
    if state in {FenceState.ERROR, FenceState.UNKNOWN}:
        raise InvalidArgument(f"wait_for: fence {n}, {kind}, is already in error")
    return state is FenceState.ACTIVE


def no_descriptor(error: OSError) -> ResourceExhaustedTransient:
    """Return the error of a fence that cannot be made, or copied."""
    return ResourceExhaustedTransient(f"no file descriptors are left for another fence: {error}")


class FenceSignal:
    """The device's end of a fence. The fence is in error once this object or its process is gone."""

    def __init__(self) -> None:
        """`fence` is the other end; the caller passes it on and closes it. Raise ResourceExhaustedTransient."""
        try:
            self.fence, self._fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise no_descriptor(error) from error
        self.identity = os.fstat(self.fence).st_ino  #: the same for both ends, and for all copies of them

    def signal(self) -> None:
        """Signal the fence, for good."""
        with suppress(BrokenPipeError, BlockingIOError):  # all waiters are gone, or one of them has filled the pipe
            os.write(self._fd, b"\1")
        self.fail()

    def fail(self) -> None:
        """Set the fence to error unless it is signalled. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
