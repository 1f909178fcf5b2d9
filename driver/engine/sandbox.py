"""The confinement of a device's processes, because a defect in a library may let a model run code of its own there.

* Files (`enter_files`): by Landlock, a process keeps those that it computes with, those of its own state, and those
  that the device says it needs. It signals and traces none but its own children, and opens no TCP connection. It also
  drops the capabilities that it has as root. This is done before the process has threads: service, engine and each
  trial have a layer of their own, one in the other.
* System calls (`enter`): a seccomp filter leaves it those of `driver.engine.system_calls`, in all threads, and children
  inherit it. It is entered when the device is ready. The process starts no program then, traces, reads, signals and
  slows down no other one, makes no network connection, mounts nothing, and gains no privilege and no namespace.

Where the kernel has one of them not, a device runs without it, and says so: in its log, and by `active`.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from driver.config import in_home
from driver.engine import landlock
from driver.engine.landlock import Access
from driver.engine.system_calls import MACHINES, NUMBERS, program, program_of_uids
from driver.libc import function
from fmq._core import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from driver.engine.call_rules import Reach, Rules
    from driver.interface import Device

_prctl = function("prctl", "int(*)(int, unsigned long, unsigned long, unsigned long, unsigned long)")
_capset = function("capset", "int(*)(const void *header, const void *data)")
_syscall = function("syscall", "long(*)(long number, long a, long b, void *c)")
_log = logging.getLogger(__name__)

_NO_NEW_PRIVS, _SET_FILTER, _DROP_BOUND = 38, 1, 24
_SECCOMP = {machine: NUMBERS["seccomp"][column] for machine, (column, _) in MACHINES.items()}
_FLAGS = 1 | 4  # for all threads; and without the mitigation that older kernels add, which slows computing down

_SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/ssl/openssl.cnf", "/etc/crypto-policies"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
    *("/proc", "/sys/devices", "/sys/fs/cgroup", "/sys/kernel/mm"),
    *("/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)
"""What libraries that compute read, and Python. Of /proc, the kernel shows a process its own layers' memory alone."""

_OWN = "~/.config/burst"
OF_CELLS = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root reads an environment that lies in another account's folders."""

SYS_NICE = 1 << 23
"""CAP_SYS_NICE, which a device in real time keeps: the filter lets it schedule itself alone."""

_CAPABILITY_VERSION = 0x20080522

EXTRA = "BURST_WRITE_PATH"
"""The variable that names a folder to which a device may write beside. `discovery.own_devices` alone can set it."""

_active_abi = 0


def enter_files(
    device: Device | type[Device],
    keeps: Mapping[Path, Access] | None = None,
    capabilities: int = OF_CELLS,
    *,
    locks: bool = False,
) -> bool:
    """Leave this process, which has one thread, the files that this device computes with, and what it `keeps`.

    `capabilities`: those that it does not drop. `locks`: it may lock memory, up to its limit.

    Returns True if all of the process is confined: the kernel can, and no library has a thread already.
    """
    global _active_abi  # noqa: PLW0603 (of the process, as what it stands for)
    end_idle_threads()
    keep_capabilities(capabilities)
    if not locks and "ioctl" not in device.needs.system_calls:  # drivers of hardware lock memory that it reads
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    calls, rules = device.needs.system_calls, dict.fromkeys(map(Path, _SYSTEM), Access.READ)
    rules |= dict.fromkeys([*_code_folders(), *map(Path, device.own_files)], Access.READ)
    if "execve" in calls:
        rules = {path: access | Access.EXECUTE for path, access in rules.items()} | {Path("/bin"): Access.READ}
    rules[Path("/dev/null")] = Access.READ | Access.WRITE
    rules[Path("/dev/shm")] = Access.READ_FILE | Access.WRITE_FILE  # the role of a queue is a lock on a file of its own
    rules[in_home(_OWN)] = Access.READ
    for paths, access in ((device.needs.read_paths, Access.READ), (device.needs.write_paths, Access.EDIT)):
        for path in map(_checked, paths if isinstance(paths, tuple) else ()):
            rules[path] = rules.get(path, Access(0)) | access | Access.CONTROL
    extra = {Path(os.environ[EXTRA]): Access.EDIT} if EXTRA in os.environ else {}
    for path, access in (*extra.items(), *(keeps or {}).items()):
        rules[path] = rules.get(path, Access(0)) | access
    is_abstract = os.environ.get("NOTIFY_SOCKET", "").startswith("@")  # an old systemd's
    try:
        _active_abi = landlock.restrict(rules, network="socket" in calls, abstract=is_abstract)
    except OSError as error:
        _log.warning("files are not confined: %s", error)
        return False
    if not _active_abi:
        _log.warning("files are not confined: the kernel has no Landlock, or it is off")
    elif (threads := _threads()) > 1:
        _log.warning("files are not confined: libraries have %s threads already", threads - 1)
        _active_abi = 0
    return bool(_active_abi)


def active() -> dict[str, bool]:
    """Return what this process has given up, by layer."""
    fields = _status()
    return {
        "seccomp": fields.get("Seccomp") == "2",
        "no_new_privileges": fields.get("NoNewPrivs") == "1",
        "no_capabilities": not int(fields.get("CapPrm", "0"), 16) & ~(OF_CELLS | SYS_NICE),
        "landlock_files": bool(_active_abi),
        "landlock_signals": _active_abi >= landlock.SCOPES,
    }


def keep_capabilities(kept: int) -> None:
    """Drop all capabilities of this thread but these, which it can always do."""
    fields = _status()
    permitted, effective = (int(fields[name], 16) & kept for name in ("CapPrm", "CapEff"))
    header, data = struct.pack("Ii", _CAPABILITY_VERSION, 0), struct.pack("6I", effective, permitted, 0, 0, 0, 0)
    if _capset(ffi.from_buffer(header), ffi.from_buffer(data)):
        _log.warning("capabilities are not dropped: %s", errno.errorcode.get(ffi.errno))


def has_capabilities(wanted: int) -> bool:
    """Return True if this thread may do what all of these allow."""
    return not wanted & ~int(_status()["CapEff"], 16)


def bound_capabilities(kept: int) -> None:
    """Have no program that this thread starts get others than these, whether it is root's or has some of its own."""
    _prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    for number in range(64):  # the kernel refuses those that it does not know
        if not kept >> number & 1:
            _prctl(_DROP_BOUND, number, 0, 0, 0)


def end_idle_threads() -> None:
    """End the threads of numpy's linear algebra, as before a fork; the library starts others when it needs them."""
    if _threads() > 1:
        if pid := os.fork():
            os.waitpid(pid, 0)
        else:
            os._exit(0)


def _checked(text: str) -> Path:
    """Return the path in that text. Raise ValueError for what a device cannot mean."""
    path = in_home(text)
    if not path.is_absolute() or path == Path("/"):
        raise ValueError(f'needs: {text!r} must be an absolute path of a file or a folder, or one from "~/"')
    return path


def _status() -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _code_folders() -> Iterator[Path]:
    """Return where Python finds modules: its own, those of this environment, and packages that lie elsewhere."""
    yield from map(Path, (sys.prefix, sys.base_prefix, sys.exec_prefix))
    yield from (Path(path) for path in sys.path if path)
    for name, module in list(sys.modules.items()):
        if "." not in name and name != "__main__":
            yield from map(Path, getattr(module, "__path__", ()))


def enter(needed: Iterable[str] = (), reach: Reach | None = None, beside: Rules | None = None) -> bool:
    """Leave this process the system calls of a program that computes, and those `needed`. False: the kernel cannot.

    `reach`: what a process may reach that forks no others; None for one that does, as the filter holds for all of them.
    `beside`: calls that it may make, too, and the rules on their arguments.
    """
    return _filter(lambda machine: program(machine, needed, reach, beside))


def keep_uids(uids: range) -> bool:
    """Have this process, which may become any account, become those of a range alone. False: the kernel cannot."""
    return _filter(lambda machine: program_of_uids(machine, uids))


def _filter(program_for: Callable[[str], bytes]) -> bool:
    machine = os.uname().machine
    if machine not in _SECCOMP or _prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        _log.warning("system calls are not confined: there is no filter for %s", machine)
        return False
    steps = program_for(machine)
    code = ffi.from_buffer(steps)
    header = struct.pack("HxxxxxxQ", len(steps) // 8, int(ffi.cast("uintptr_t", code)))
    if _syscall(_SECCOMP[machine], _SET_FILTER, _FLAGS, ffi.from_buffer(header)):
        found = errno.errorcode.get(ffi.errno)
        _log.warning("system calls are not confined: the kernel refuses a seccomp filter with %s", found)
        return False
    return True
