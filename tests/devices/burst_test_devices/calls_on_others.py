"""System calls by which code of one process reaches another one of its account, made as native code makes them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import signal
import socket
import struct
import threading
from functools import partial
from typing import TYPE_CHECKING

from driver.engine.system_calls import MACHINES, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_COLUMN = MACHINES[os.uname().machine][0]
_CLONES = {"mount": 0x20000, "user": 0x10000000, "network": 0x40000000, "process id": 0x20000000}
_FAMILIES = {"netlink": 16, "packet": 17, "ALG": 38, "vsock": 40, "bluetooth": 31, "CAN": 29, "TIPC": 30, "XDP": 44}
_TIOCSTI, _F_SETOWN_EX, _FIOSETOWN = 0x5412, 15, 0x8901
_IOPRIO_BEST_EFFORT, _SIGNALS = 2 << 13 | 4, re.compile("kill|signal")


def called(name: str, *arguments: object) -> int:
    """Make a system call. Raise OSError."""
    result = int(_libc.syscall(NUMBERS[name][_COLUMN], *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def on_a_process(pid: int) -> dict[str, Callable[[], object]]:
    """What changes a process, by name; each leaves it as it is where it succeeds."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    nothing = ctypes.create_string_buffer(struct.pack("IIQiIQQQII", 56, 0, 0x08 | 0x10, 0, 0, 0, 0, 0, 0, 0))
    order, usual = ctypes.create_string_buffer(struct.pack("i", 0)), os.SCHED_OTHER
    info = ctypes.create_string_buffer(struct.pack("iii", 0, 0, -1) + bytes(116))
    return {
        "limit": lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, limits),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)),
        "affinity": lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid)),
        "scheduler": lambda: os.sched_setscheduler(pid, usual, os.sched_param(0)),
        "scheduler's parameter": lambda: called("sched_setparam", pid, order),
        "scheduler's attributes": lambda: called("sched_setattr", pid, nothing, 0),
        "I/O priority": lambda: called("ioprio_set", 1, pid, _IOPRIO_BEST_EFFORT),
        "kill": lambda: os.kill(pid, 0),
        "tkill": lambda: called("tkill", pid, 0),
        "tgkill": lambda: called("tgkill", pid, pid, 0),
        "queued signal": lambda: called("rt_sigqueueinfo", pid, 0, info),
        "signal queued to a thread": lambda: called("rt_tgsigqueueinfo", pid, pid, 0, info),
    }


def of_others(pid: int) -> dict[str, Callable[[], object]]:
    """What reaches the process with that pid, or the machine, in other ways."""
    (near, far), info = socket.socketpair(), ctypes.create_string_buffer(8)
    return {
        **{f"{what} of {pid}": attempt for what, attempt in on_a_process(pid).items()},
        "signal through a pidfd": lambda: called("pidfd_send_signal", os.pidfd_open(pid), 0, None, 0),
        "memory": lambda: called("process_vm_readv", pid, None, 0, None, 0, 0),
        "trace": lambda: called("ptrace", 16, pid, 0, 0),
        "compare": lambda: called("kcmp", os.getpid(), pid, 1, 0, 0),
        "namespaces": lambda: called("setns", 0, 0),
        "cores": lambda: _libc_called("prctl", 62, 0, pid, 0, 0),
        "robust list": lambda: called("get_robust_list", pid, info, info),
        "priority of its account": lambda: os.setpriority(
            os.PRIO_USER, os.getuid(), os.getpriority(os.PRIO_PROCESS, 0)
        ),
        "signals by a socket": lambda: fcntl.fcntl(near, fcntl.F_SETOWN, pid),
        "signals by a socket's owner": lambda: fcntl.fcntl(near, _F_SETOWN_EX, struct.pack("ii", 1, pid)),
        "signals by control of a socket": lambda: fcntl.ioctl(near, _FIOSETOWN, struct.pack("i", pid)),
        "another signal": lambda: fcntl.fcntl(far, fcntl.F_SETSIG, signal.SIGKILL),
        "lease": lambda: fcntl.fcntl(os.memfd_create("leased"), fcntl.F_SETLEASE, fcntl.F_RDLCK),
        "typing": lambda: fcntl.ioctl(near, _TIOCSTI, b"x"),
        "datagrams": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
        **{f"{name} namespace": partial(_cloned, flag) for name, flag in _CLONES.items()},
        "child of the parent": partial(_cloned, 0x8000),
        **{f"{name} socket": partial(socket.socket, family, socket.SOCK_RAW) for name, family in _FAMILIES.items()},
    }


def of_addresses() -> dict[str, Callable[[], object]]:
    """What a process does not need that has all its connections."""
    near, far = socket.socketpair()
    return {
        "Unix socket": partial(socket.socket, socket.AF_UNIX, socket.SOCK_DGRAM),
        "connection": partial(near.connect, "\0"),
        "name": partial(far.bind, f"\0burst-{os.getpid()}"),
        "listener": near.listen,
        "life of another process": partial(os.pidfd_open, os.getppid()),
    }


def failures_on_itself() -> list[str]:
    """What a process may not do to itself, by its pid or by 0, from its first thread or another one."""
    found: list[str] = []

    def attempt_all() -> None:
        by_pid = on_a_process(os.getpid())
        by_zero = {
            f"{name}, by 0": call
            for name, call in on_a_process(0).items()
            if "kill" not in name and "signal" not in name
        }
        for name, call in (by_pid | by_zero).items():
            try:
                call()
            except OSError as error:
                found.append(f"{name}: {error}")
        signal.pthread_kill(threading.get_ident(), 0)

    attempt_all()
    thread = threading.Thread(target=attempt_all)
    thread.start()
    thread.join()
    return found


def _libc_called(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _cloned(flag: int) -> None:
    """Start a process with that flag, as fork does; it ends at once. Raise OSError."""
    pid = called("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)
    if not pid:
        os._exit(0)
    if not flag & 0x8000:
        os.waitpid(pid, 0)
