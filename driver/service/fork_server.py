"""Processes that are thrown away: what may end a process, or never return, is done in one of these.

Such a process has to begin with the device's modules in memory, to be cheap. It is forked by the fork server, a process
with one thread, which the service forks once it has loaded the device and before it starts threads. The server also
tells how a process ended: the exit status, and the last words that it wrote to its standard output or error. What all
of them take together is bounded.
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

from burst import ErrorStatus, PeerDied
from burst.channel import Channel
from driver.engine import sandbox
from driver.engine.call_rules import Reach
from driver.engine.landlock import Access
from driver.engine.limits import or_raise
from driver.libc import function
from driver.protocol.rpc import take_fd
from driver.service.process_figures import private_bytes
from fmq.printable import printable_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.interface import Device

    Work = Callable[[Channel], object]

_MOST_WORDS, _CHUNK = 300, 64 << 10  # characters; bytes, as many as a pipe holds
_MOST_CHUNKS = 16  # as many as a process without privileges may have a pipe hold
SCORES = {Path("/proc"): Access.WRITE}
"""What the server and the process that forks it keep, so that `_forked` may make its children the first to end when
memory runs out.
"""

_SOONEST, _LATEST = 0.05, 0.25  # seconds between two looks at what they take: often while that changes
_CHANGE = 1 << 20  # bytes
_STDOUT, _STDERR, _LAST_FD = 1, 2, 1 << 30

_prctl = function("prctl", "int(*)(int option, unsigned long value)")
_PDEATHSIG = 1


class ForkServer:
    """Begins processes that do one kind of work. Any thread."""

    def __init__(self, device: Device, work: Work, most: int) -> None:
        """Fork the server. No thread may exist but this one, and numpy's, which survive forks.

        `most`: bytes of memory that its processes may take together; then the largest is ended.

        `work`: what each process does, with its end of a channel; the process ends when that returns. It is confined to
        what the device needs, and each process apart from the others.
        """
        near, far = Channel.pair()
        gc.freeze()
        with warnings.catch_warnings(), far:
            warnings.simplefilter("ignore", DeprecationWarning)
            if not os.fork():
                _become_server(device, work, far, most)
        self._channel = near

    def begin(self) -> Channel:
        """Return a channel to a new process. Closing it kills the process.

        ["refused", RESOURCE_EXHAUSTED_*, words] comes before it is ended for the memory that it took.

        When it ends by itself, and not by calling `os._exit` after it has closed the channel, ["ended", code, words]
        comes: its exit status, or minus the signal, and the last that it wrote. Raise PeerDied.
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


class LastWords:
    """The last that a process writes to its standard output and error, however much it writes."""

    def __init__(self) -> None:
        self.readable, self.writable = os.pipe2(os.O_CLOEXEC)  # both stay open here: so the pipe has no end
        os.set_blocking(self.readable, False)
        self._kept = b""

    def read(self) -> bool:
        """Take a chunk of what is in the pipe, and make room there; the process waits for that. False: it is empty."""
        try:
            self._kept = (self._kept + os.read(self.readable, _CHUNK))[-4 * _MOST_WORDS :]
        except BlockingIOError:
            return False
        return True

    def finish(self) -> str:
        """Return the words of a process that has ended, and close the pipe."""
        for _ in range(_MOST_CHUNKS):
            if not self.read():
                break
        os.close(self.readable)
        os.close(self.writable)
        return printable_line(self._kept)[-_MOST_WORDS:]


class _Child(NamedTuple):
    pid: int
    pidfd: int
    channel: Channel
    words: LastWords


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    _prctl(_PDEATHSIG, signal.SIGKILL)


def _become_server(device: Device, work: Work, channel: Channel, most: int) -> None:
    try:
        end_with_parent()
        close_all_but(channel.fileno())
        sandbox.enter_files(device, SCORES)
        sandbox.enter(device.needs.system_calls)
        _serve(device, work, channel, most)
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


def _serve(device: Device, work: Work, channel: Channel, most: int) -> None:
    """Fork for each request until the service is gone. Raise PeerDied then."""
    poll, children, words = select.poll(), dict[int, _Child](), dict[int, LastWords]()
    poll.register(channel, select.POLLIN)
    before, pause = 0, _SOONEST
    while True:
        taken, ended = bounded({child for fd, child in children.items() if fd != child.pidfd}, most)
        if ended:
            poll.unregister(ended.channel)
            del children[ended.channel.fileno()]
        pause = min(_LATEST, 2 * pause) if abs(taken - before) < _CHANGE else _SOONEST
        before = taken
        for fd, _ in poll.poll(pause * 1e3 if children else None):
            pause = _SOONEST
            if fd == channel.fileno():
                child = _forked(device, work, Channel.from_fd(take_fd(channel.receive())))
                children[child.pidfd] = children[child.channel.fileno()] = child
                words[child.words.readable] = child.words
                poll.register(child.pidfd, select.POLLIN)
                poll.register(child.words.readable, select.POLLIN)
                poll.register(child.channel, 0)  # the hang-up of the service
            elif fd in words:
                words[fd].read()
            elif fd in children:  # and not ended by an event just before
                child = children.pop(fd)
                poll.unregister(fd)
                if fd != child.pidfd:
                    os.kill(child.pid, signal.SIGKILL)
                    continue
                if children.pop(child.channel.fileno(), None):
                    poll.unregister(child.channel)
                poll.unregister(child.words.readable)
                del words[child.words.readable]
                _reap(child)


def bounded(children: set[_Child], most: int) -> tuple[int, _Child | None]:
    """Return the bytes that all have taken since they began; if these are more than `most`, end the largest, tell its
    peer, and return it, too. `children`: without those that are being ended.
    """
    own = private_bytes(os.getpid())  # which they share
    taken = {child: max(0, private_bytes(child.pid) - own) for child in children}
    if (total := sum(taken.values())) <= most:
        return total, None
    largest = max(taken, key=taken.__getitem__)
    words = f"it took {taken[largest]} bytes of memory beside the engine"
    status = ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT
    if taken[largest] <= most:
        words += f", and others at the same time {total - taken[largest]}"
        status = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    with suppress(PeerDied):
        remedy = or_raise("engine_bytes")
        said = f"{words}; they may take {most} together (client_bytes and engine_bytes): use a smaller model{remedy}"
        largest.channel.send(["refused", int(status), said])
    os.kill(largest.pid, signal.SIGKILL)
    return total, largest


def _forked(device: Device, work: Work, channel: Channel) -> _Child:
    words = LastWords()
    pid = os.fork()
    if not pid:
        try:
            for fd in (_STDOUT, _STDERR):
                os.dup2(words.writable, fd)
            close_all_but(channel.fileno())
            end_with_parent()
            with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # if memory runs out, this process is the one to end
            sandbox.enter_files(device)
            sandbox.enter(device.needs.system_calls, Reach(os.getpid()))
            work(channel)
        finally:
            os._exit(0)
    return _Child(pid, os.pidfd_open(pid), channel, words)


def _reap(child: _Child) -> None:
    """Tell how the child has ended, unless it had done all."""
    _, status = os.waitpid(child.pid, 0)
    words = child.words.finish()
    with suppress(PeerDied):
        child.channel.send(["ended", os.waitstatus_to_exitcode(status), words])
    child.channel.close()
    os.close(child.pidfd)
