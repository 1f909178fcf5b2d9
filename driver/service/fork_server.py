"""Processes that are thrown away: what may end a process, or never return, is done in one of these.

Such a process has to begin with the device's modules in memory, to be cheap. It is forked by the fork server, a process
with one thread, which the service forks once it has loaded the device and before it starts threads. The server also
tells how a process ended: the exit status, and the last words that it wrote to its standard error.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from burst import PeerDied
from burst.channel import Channel
from driver.engine import sandbox
from driver.engine.landlock import Access
from driver.libc import function
from driver.protocol.rpc import take_fd

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.interface import Device

    Work = Callable[[Channel], object]

_MOST_WORDS = 300  # characters
SCORES = {Path("/proc"): Access.WRITE}
"""What the server and the process that forks it keep, so that `_forked` may make its children the first to end when
memory runs out.
"""

_STDERR, _LAST_FD = 2, 1 << 30

_prctl = function("prctl", "int(*)(int option, unsigned long value)")
_PDEATHSIG = 1


class ForkServer:
    """Begins processes that do one kind of work. Any thread."""

    def __init__(self, device: Device, work: Work) -> None:
        """Forks the server. No thread may exist but this one, and numpy's, which survive forks.

        `work`: what each process does, with its end of a channel; the process ends when that returns. It is confined to
        what the device needs, and each process apart from the others.
        """
        near, far = Channel.pair()
        gc.freeze()
        with warnings.catch_warnings(), far:
            warnings.simplefilter("ignore", DeprecationWarning)
            if not os.fork():
                _become_server(device, work, far)
        self._channel = near

    def begin(self) -> Channel:
        """Return a channel to a new process. Closing it kills the process.

        When that ends by itself, and not by calling `os._exit` after it has closed the channel, ["ended", code, words]
        comes: its exit status, or minus the signal, and the last that it wrote. Raises PeerDied.
        """
        near, far = Channel.pair()
        try:
            with far:
                self._channel.send([], [far.fileno()])
        except PeerDied:
            near.close()
            raise
        return near


# ---- the server process


class _Child(NamedTuple):
    pid: int
    pidfd: int
    channel: Channel
    words: int  #: a memfd, its standard error


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    _prctl(_PDEATHSIG, signal.SIGKILL)


def _become_server(device: Device, work: Work, channel: Channel) -> None:
    try:
        end_with_parent()
        close_all_but(channel.fileno())
        sandbox.enter_files(device, SCORES)
        sandbox.enter(device.needs.system_calls)
        _serve(device, work, channel)
    except PeerDied:
        os._exit(0)
    finally:
        os._exit(1)


def close_all_but(*fds: int) -> None:
    """Close all descriptors beside standard input, output and error, and write no more signals to one of them."""
    signal.set_wakeup_fd(-1)
    first = _STDERR + 1
    for fd in sorted(fds):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, _LAST_FD)


def _serve(device: Device, work: Work, channel: Channel) -> None:
    """Fork for each request until the service is gone. Raises PeerDied then."""
    poll, children = select.poll(), dict[int, _Child]()
    poll.register(channel, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == channel.fileno():
                child = _forked(device, work, Channel.from_fd(take_fd(channel.receive())))
                children[child.pidfd] = children[child.channel.fileno()] = child
                poll.register(child.pidfd, select.POLLIN)
                poll.register(child.channel, 0)  # the hang-up of the service
            elif fd in children:  # and not ended by an event just before
                child = children.pop(fd)
                poll.unregister(fd)
                if fd != child.pidfd:
                    os.kill(child.pid, signal.SIGKILL)
                    continue
                if children.pop(child.channel.fileno(), None):
                    poll.unregister(child.channel)
                _reap(child)


def _forked(device: Device, work: Work, channel: Channel) -> _Child:
    words = os.memfd_create("words", os.MFD_CLOEXEC)
    pid = os.fork()
    if not pid:
        try:
            os.dup2(words, _STDERR)
            close_all_but(channel.fileno())
            end_with_parent()
            with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # if memory runs out, this process is the one to end
            sandbox.enter_files(device)
            work(channel)
        finally:
            os._exit(0)
    return _Child(pid, os.pidfd_open(pid), channel, words)


def _reap(child: _Child) -> None:
    """Tells how the child has ended, unless it had done all."""
    _, status = os.waitpid(child.pid, 0)
    size = os.fstat(child.words).st_size
    raw = os.pread(child.words, 4 * _MOST_WORDS, max(0, size - 4 * _MOST_WORDS))
    words = " ".join("".join(c if c.isprintable() else " " for c in raw.decode(errors="replace")).split())
    with suppress(PeerDied):
        child.channel.send(["ended", os.waitstatus_to_exitcode(status), words[-_MOST_WORDS:]])
    child.channel.close()
    os.close(child.pidfd)
    os.close(child.words)
