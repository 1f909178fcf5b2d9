"""The first code of a device that a client starts, and what a device inherits from the client that starts it.

It runs as a script, before numpy and the device's library make threads: what it resets here, all threads get. It
imports nothing of ours until then.

A process cannot undo everything without privilege: hard limits, a raised nice value, the scheduling class SCHED_IDLE. A
client with such limits uses a device that runs, or has systemd's manager of the account start one
(`driver.client.user_manager`). Without a manager it starts one for itself alone (`discovery.connect`), named after
`kept()`.
"""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import signal
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

STACK = 8 << 20
"""The size of a thread's stack: the soft limit that almost every system has."""

BACKLOG = 128
"""Connections that wait until a service accepts them."""

_MANY = 1 << 46  # as good as unlimited, for bytes
ENOUGH = {
    resource.RLIMIT_CPU: ("RLIMIT_CPU", resource.RLIM_INFINITY),
    resource.RLIMIT_AS: ("RLIMIT_AS", _MANY),
    resource.RLIMIT_DATA: ("RLIMIT_DATA", _MANY),
    resource.RLIMIT_FSIZE: ("RLIMIT_FSIZE", _MANY),
    resource.RLIMIT_STACK: ("RLIMIT_STACK", STACK),
    resource.RLIMIT_NOFILE: ("RLIMIT_NOFILE", 4096),
    resource.RLIMIT_NPROC: ("RLIMIT_NPROC", 1024),
}
"""By limit: its name, and the least hard limit with which a device can serve every client."""

_LACKS = (
    "{} does not find the package driver. Devices take neither PYTHONPATH nor sys.path from their clients: install "
    "burst-engine into the environment of that Python (a .pth file there may name a folder of pip install --target), "
    "or name another Python by driver.set_executable"
)
_SYS_NICE, _SYS_RESOURCE = 23, 24  # linux/capability.h
_ATTRIBUTES = 256  # bytes: more than pthread_attr_t has
_SET_TIMERSLACK, _SET_THP_DISABLE, _TIMERSLACK = 29, 41, 50_000  # linux/prctl.h, nanoseconds


def kept() -> dict[str, int]:
    """Return by name what this process would pass on to a device, which could not reset it. Empty for most."""
    found = {}
    if not _may(_SYS_RESOURCE):
        for number, (name, enough) in ENOUGH.items():
            hard = resource.getrlimit(number)[1]
            if hard != resource.RLIM_INFINITY and (enough == resource.RLIM_INFINITY or hard < enough):
                found[name] = hard
    if not _may(_SYS_NICE):
        least = 20 - min(
            40, resource.getrlimit(resource.RLIMIT_NICE)[1] % (1 << 63)
        )  # the lowest nice value it may have
        nice, scheduler = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
        if nice > 0 and least > 0:
            found["nice"] = nice
        if scheduler & ~os.SCHED_RESET_ON_FORK == os.SCHED_IDLE and least > nice:
            found["SCHED_IDLE"] = 1
    return found


def name_of(limits: dict[str, int]) -> str:
    """Name a device by the limits that it keeps, and by this process if they are used up."""
    words = [f"{name}={value}" for name, value in sorted(limits.items())]
    if "RLIMIT_CPU" in limits:
        words.append(f"{os.getpid()} {Path('/proc/self/stat').read_text().rpartition(') ')[2].split()[19]}")
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]


def told(limits: dict[str, int]) -> str:
    """Return limits in words."""
    return ", ".join(name if name == "SCHED_IDLE" else f"{name} {value}" for name, value in limits.items())


def _may(capability: int) -> bool:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
        return bool(effective >> capability & 1)
    return False


def reset() -> None:
    """Undo what was inherited and can be undone: CPU affinity, resource limits, scheduling, memory policy."""
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    for number in (
        *ENOUGH,
        resource.RLIMIT_NICE,
        resource.RLIMIT_MEMLOCK,
        resource.RLIMIT_SIGPENDING,
        resource.RLIMIT_MSGQUEUE,
    ):
        soft, hard = resource.getrlimit(number)
        most = hard if number in {resource.RLIMIT_NOFILE, resource.RLIMIT_NICE} else resource.RLIM_INFINITY
        with suppress(OSError, ValueError):  # only with the privilege
            resource.setrlimit(number, (soft, most))
            hard = most
        is_stack = number == resource.RLIMIT_STACK
        resource.setrlimit(number, (STACK if is_stack and not 0 <= hard < STACK else hard, hard))
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    for signal_number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # which Python ignores itself
        if signal.getsignal(signal_number) == signal.SIG_IGN:
            signal.signal(signal_number, signal.SIG_DFL)
    _reset_by_system_calls()


def _reset_by_system_calls() -> None:
    """Reset what the standard library has no functions for. Failures change nothing that matters."""
    import ctypes

    libc, numbers = ctypes.CDLL(None), {"x86_64": (251, 238), "aarch64": (30, 237)}
    libc.prctl(_SET_TIMERSLACK, _TIMERSLACK, 0, 0, 0)
    libc.prctl(_SET_THP_DISABLE, 0, 0, 0, 0)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES)  # new threads: the C library has read the old soft limit
    if not libc.pthread_getattr_default_np(attributes) and not libc.pthread_attr_setstacksize(attributes, STACK):
        libc.pthread_setattr_default_np(attributes)
    if calls := numbers.get(os.uname().machine):
        set_io_priority, set_memory_policy = calls
        libc.syscall(set_io_priority, 1, 0, 0)
        libc.syscall(set_memory_policy, 0, None, 0)


def _listening(path: Path) -> int:
    """Return the socket of a device that a manager starts, to which a client can hand none.

    That client holds the lock.
    """
    import socket

    if limits := kept():
        sys.exit(f"the manager has limits itself, which only privilege can reset: {told(limits)}")
    os.umask(0o077)
    os.chdir("/")
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(BACKLOG)
    return listener.detach()


def _main() -> None:
    """Fork, so that the device is init's child and never our zombie, before anything heavy is imported.

    Arguments: the module whose `main` is the device's process, and what that takes. The third argument is a listening
    socket, or the path at which to listen.
    """
    reset()
    if not sys.argv[3].isdecimal():
        sys.argv[3] = str(_listening(Path(sys.argv[3])))
    if not os.path.isdir("/proc/self/fd"):
        sys.exit("/proc is not mounted, and shared memory is opened by it: mount -t proc proc /proc")
    if find_spec("driver") is None:
        sys.exit(_LACKS.format(sys.executable))
    if os.fork():
        os._exit(0)
    gc.disable()  # what is loaded now stays; the service enables it
    import_module(sys.argv.pop(1)).main()


if __name__ == "__main__":
    _main()
