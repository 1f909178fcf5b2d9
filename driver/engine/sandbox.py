"""What a process of a device gives up, because a defect in a library may let a model run code of its own in it.

* Files (`enter_files`): by Landlock, a process keeps those that it computes with, those of its own state, and those
  that the device says it needs. It signals and traces none but its own children, and opens no TCP connection. It also
  drops the capabilities that it has as root. This is done before the process has threads: service, engine and each
  trial have a layer of their own, one in the other.
* System calls (`enter`): a seccomp filter refuses the calls below with EPERM, in all threads, and children inherit it.
  It is entered when the device is ready. It starts no program then, traces and reads no other process, makes no network
  connection, mounts nothing, and gains no privilege.

Where the kernel has one of them not, a device runs without it, and says so: in its log, and by `active`.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cffi import FFI

from driver.engine import landlock
from driver.engine.landlock import Access

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from driver.interface import Device

_ffi = FFI()
_ffi.cdef(
    """
    int prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d);
    int capset(const void *header, const void *data);
    long syscall(long number, long a, long b, void *c);
    """
)
_libc: Any = _ffi.dlopen(None)
_log = logging.getLogger(__name__)

REFUSED = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "unshare": (272, 97),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
}
"""By name: the numbers on x86-64 and on aarch64."""

_MACHINES = {"x86_64": (0, 0xC000003E, 41, 435), "aarch64": (1, 0xC00000B7, 198, 435)}
"""The column above, AUDIT_ARCH, and the numbers of socket and clone3."""

_FAMILIES = (1, 16)  # AF_UNIX, and AF_NETLINK, which tells whose a connection is
_NO_NEW_PRIVS, _SECCOMP, _SET_FILTER = 38, {"x86_64": 317, "aarch64": 277}, 1
_FLAGS = 1 | 4  # for all threads; and without the mitigation that older kernels add, which slows computing down
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # of classic BPF
_ALLOWED, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16  # offsets in seccomp_data; the low half of the first argument
_OTHER_ABI = 0x40000000  # the bit of x32


_SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/ssl/openssl.cnf", "/etc/crypto-policies"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
    *("/proc", "/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm"),
    *("/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)
"""What libraries that compute read, and Python. Of /proc, the kernel shows a process its own layers' memory alone."""

_OWN = "~/.config/burst"
STATE = "~/.local/state/burst"
"""The folder in which a device keeps its records."""

_KEPT_CAPABILITIES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root reads an environment that lies in another account's folders."""

_CAPABILITY_VERSION = 0x20080522

EXTRA = "BURST_WRITE_PATH"
"""The variable that names a folder to which a device may write beside. `discovery.own_devices` alone can set it."""

_active_abi = 0


def enter_files(device: Device | type[Device], keeps: Mapping[Path, Access] | None = None) -> bool:
    """Leaves this process, which has one thread, the files that this device computes with, and what it `keeps`.

    Whether all of the process is confined: the kernel can, and no library has a thread already.
    """
    global _active_abi  # noqa: PLW0603 (of the process, as what it stands for)
    _end_idle_threads()
    _drop_capabilities()
    calls, rules = device.needs.system_calls, dict.fromkeys(map(Path, _SYSTEM), Access.READ)
    rules |= dict.fromkeys([*_code_folders(), *map(Path, device.own_files)], Access.READ)
    if "execve" in calls:
        rules = {path: access | Access.EXECUTE for path, access in rules.items()} | {Path("/bin"): Access.READ}
    rules[Path("/dev/null")] = Access.READ | Access.WRITE
    rules[Path("/dev/shm")] = Access.READ_FILE | Access.WRITE_FILE  # the role of a queue is a lock on a file of its own
    rules[Path(_OWN).expanduser()] = Access.READ
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


def state_folder() -> dict[Path, Access]:
    """The folder of records, made if it is missing; to be kept by processes that write there."""
    folder = Path(STATE).expanduser()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {folder: Access.EDIT}


def active() -> dict[str, bool]:
    """What this process has given up, by layer."""
    fields = _status()
    return {
        "seccomp": fields.get("Seccomp") == "2",
        "no_new_privileges": fields.get("NoNewPrivs") == "1",
        "no_capabilities": not int(fields.get("CapPrm", "0"), 16) & ~_KEPT_CAPABILITIES,
        "landlock_files": bool(_active_abi),
        "landlock_signals": _active_abi >= landlock.SCOPES,
    }


def _drop_capabilities() -> None:
    """For this thread. It can always drop some."""
    fields = _status()
    permitted, effective = (int(fields[name], 16) & _KEPT_CAPABILITIES for name in ("CapPrm", "CapEff"))
    header, data = struct.pack("Ii", _CAPABILITY_VERSION, 0), struct.pack("6I", effective, permitted, 0, 0, 0, 0)
    if _libc.capset(_ffi.from_buffer(header), _ffi.from_buffer(data)):
        _log.warning("capabilities are not dropped: %s", errno.errorcode.get(_ffi.errno))


def _end_idle_threads() -> None:
    """The library of numpy's linear algebra ends its threads before a fork, and starts others when it needs them."""
    if _threads() > 1:
        if pid := os.fork():
            os.waitpid(pid, 0)
        else:
            os._exit(0)


def _checked(text: str) -> Path:
    """Raises ValueError for what a device cannot mean."""
    path = Path(text).expanduser()
    if not path.is_absolute() or path == Path("/"):
        raise ValueError(f'needs: {text!r} must be an absolute path of a file or a folder, or one from "~/"')
    return path


def _status() -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _code_folders() -> Iterator[Path]:
    """Where Python finds modules: its own, those of this environment, and packages that lie elsewhere."""
    yield from map(Path, (sys.prefix, sys.base_prefix, sys.exec_prefix))
    yield from (Path(path) for path in sys.path if path)
    for name, module in list(sys.modules.items()):
        if "." not in name and name != "__main__":
            yield from map(Path, getattr(module, "__path__", ()))


def enter(needed: Iterable[str] = ()) -> bool:
    """Refuses the calls above to this process from now on, but for those `needed`. Whether the kernel could."""
    machine = os.uname().machine
    if machine not in _MACHINES or _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        _log.warning("no sandbox: there is none for %s", machine)
        return False
    steps = b"".join(struct.pack("HBBI", *step) for step in _program(machine, frozenset(needed)))
    code = _ffi.from_buffer(steps)
    header = struct.pack("HxxxxxxQ", len(steps) // 8, int(_ffi.cast("uintptr_t", code)))
    program = _ffi.from_buffer(header)
    if _libc.syscall(_SECCOMP[machine], _SET_FILTER, _FLAGS, program):
        _log.warning("no sandbox: the kernel refuses a seccomp filter with %s", errno.errorcode.get(_ffi.errno))
        return False
    return True


def _program(machine: str, needed: frozenset[str]) -> list[tuple[int, int, int, int]]:
    """Steps: code, how many to skip if true and if false, operand."""
    column, architecture, socket, clone3 = _MACHINES[machine]
    refused = [numbers[column] for name, numbers in REFUSED.items() if name not in needed]
    eperm, enosys = (_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    steps = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), eperm, (_LOAD, 0, 0, _NUMBER)]
    steps += [(_AT_LEAST, 0, 1, _OTHER_ABI), eperm]
    for number in refused:
        steps += [(_EQUAL, 0, 1, number), eperm]
    if "clone3" not in needed:  # its flags cannot be looked at; the C library takes clone instead
        steps += [(_EQUAL, 0, 1, clone3), enosys]
    if "socket" not in needed:
        families = [(_EQUAL, len(_FAMILIES) - n, 0, family) for n, family in enumerate(_FAMILIES)]
        steps += [(_EQUAL, 0, 2 + len(families), socket), (_LOAD, 0, 0, _FIRST), *families, eperm]
    return [*steps, (_RETURN, 0, 0, _ALLOWED)]
