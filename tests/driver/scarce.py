"""A device whose system calls fail when a test says so, as they do where memory, descriptors or threads run out.

A seccomp filter has the kernel ask this process before each call of the list, and it answers: go on, or the error. So
the n-th call of a process fails, whichever thread makes it. `strace -e inject` counts the calls of each thread apart,
and would have to attach to the device again for each n.
"""

import ctypes
import errno
import os
import platform
import re
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

CALLS = {  # by name: the numbers on x86-64 and on aarch64, and the error
    "mmap": (9, 222, errno.ENOMEM),
    "mprotect": (10, 226, errno.ENOMEM),
    "brk": (12, 214, errno.ENOMEM),
    "recvmsg": (47, 212, errno.ENOMEM),
    "sendmsg": (46, 211, errno.ENOBUFS),
    "clone": (56, 220, errno.EAGAIN),
    "fork": (57, None, errno.EAGAIN),
    "pipe2": (293, 59, errno.EMFILE),
    "socketpair": (53, 199, errno.EMFILE),
    "accept4": (288, 242, errno.EMFILE),
    "dup": (32, 23, errno.EMFILE),
    "memfd_create": (319, 279, errno.EMFILE),
    "openat": (257, 56, errno.EMFILE),
    "eventfd2": (290, 19, errno.EMFILE),
    "epoll_create1": (291, 20, errno.EMFILE),
    "epoll_ctl": (233, 21, errno.ENOMEM),
    "inotify_init1": (294, 26, errno.EMFILE),
    "inotify_add_watch": (254, 27, errno.ENOSPC),
    "pidfd_open": (434, 434, errno.EMFILE),
    "ftruncate": (77, 46, errno.ENOMEM),
    "fcntl": (72, 25, errno.EMFILE),  # those below
}
_OF_FCNTL = {1030, 1033, 37}  # F_DUPFD_CLOEXEC, F_ADD_SEALS, F_OFD_SETLK: other commands need nothing
_COLUMN, _SECCOMP = (0, 317) if platform.machine() == "x86_64" else (1, 277)
_NAMES = {numbers[_COLUMN]: name for name, numbers in CALLS.items()}
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctls
_ASK, _ALLOW, _GO_ON = 0x7FC00000, 0x7FFF0000, 1
_libc = ctypes.CDLL(None, use_errno=True)


def ask_before_calls():
    """From now on, this process and its children ask before these calls. Returns the descriptor to answer on."""
    steps = [(0x20, 0, 0, 0)]
    for number in filter(None, _NAMES):
        steps += [(0x15, 0, 1, number), (0x06, 0, 0, _ASK)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in [*steps, (0x06, 0, 0, _ALLOW)]))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps) + 1, ctypes.addressof(code)))
    _libc.prctl(38, 1, 0, 0, 0)
    fd = _libc.syscall(_SECCOMP, 1, 8, program)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "this kernel cannot be asked to tell of system calls")
    return fd


class Scarcity:
    """Answers for a process and its children. Nothing fails until `failing`."""

    def __init__(self, fd):
        self._fd, self._wanted, self._processes = fd, None, {}
        self.count, self.failed = 0, None
        self._thread = threading.Thread(target=self._serve, name="scarcity", daemon=True)
        self._thread.start()

    @contextmanager
    def failing(self, pid, call, n, times=1):
        """Within, the n-th call (from 1) of that kind in that process fails, and `times - 1` that follow."""
        self.count, self.failed, self._wanted = 0, None, (pid, call, n, n + times)
        try:
            yield self
        finally:
            self._wanted = None

    def _serve(self):
        poll, asked = select.poll(), ctypes.create_string_buffer(80)
        poll.register(self._fd, select.POLLIN)
        while not poll.poll()[0][1] & select.POLLHUP:
            asked[:] = bytes(80)
            if _libc.ioctl(self._fd, ctypes.c_ulong(_RECEIVE), asked):
                continue  # the process was killed meanwhile
            number, thread, _, call, *_, first, second = struct.unpack_from("=QIIiIQQQ", asked)
            error = self._error(thread, _NAMES[call], first, second)
            answer = struct.pack("=QqiI", number, 0, -error, 0 if error else _GO_ON)
            _libc.ioctl(self._fd, ctypes.c_ulong(_SEND), ctypes.create_string_buffer(answer, 24))
        os.close(self._fd)

    def _error(self, thread, call, first, second):
        wanted = self._wanted
        if wanted is None or call != wanted[1] or self._process_of(thread) != wanted[0]:
            return 0
        if (call == "fcntl" and second not in _OF_FCNTL) or (call == "brk" and not first):
            return 0
        self.count += 1
        if not wanted[2] <= self.count < wanted[3]:
            return 0
        with suppress(OSError):
            self.failed = Path(f"/proc/{thread}/comm").read_text().strip()
        return CALLS[call][2]

    def _process_of(self, thread):
        try:
            return int(re.search(r"Tgid:\s*(\d+)", Path(f"/proc/{thread}/status").read_text())[1])
        except OSError:
            return 0


@contextmanager
def scarce(words, **options):
    """A process that runs `words`, a command line, and answers for it: (process, scarcity). Killed in the end."""
    near, far = socket.socketpair()
    with near:
        with far:
            line = [sys.executable, __file__, str(far.fileno()), *map(str, words)]
            process = subprocess.Popen(line, pass_fds=[far.fileno()], **options)
        with process:
            try:
                scarcity = Scarcity(_taken(process.pid, int(near.recv(99))))
                near.send(b"go on")
                yield process, scarcity
            finally:
                process.kill()


def _taken(pid, fd):
    """A copy of another process's descriptor, which cannot send it: its system calls wait for this process."""
    pidfd = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(438, pidfd, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {fd} of process {pid} cannot be had")
        return copy
    finally:
        os.close(pidfd)


@contextmanager
def descriptors_left(pid, n):
    """Within, that process can open `n` more descriptors."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = sorted(map(int, os.listdir(f"/proc/{pid}/fd")))
    free = (fd for fd in range(used[-1] + n + 2) if fd not in set(used))
    most = [next(free) for _ in range(n + 1)][-1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


if __name__ == "__main__":
    there = int(sys.argv[1])
    os.write(there, str(ask_before_calls()).encode())
    os.read(there, 9)
    os.execv(sys.argv[2], sys.argv[2:])
