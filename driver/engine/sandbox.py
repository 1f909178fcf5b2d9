"""System calls that no process of a device makes any more once it serves clients.

A defect in a library that computes may let a model run code of its own in the device. It then has the device's account,
but it starts no program, traces and reads no other process, makes no network connection, mounts nothing, and gains no
privilege: a seccomp filter refuses these calls with EPERM, in all threads, and children inherit it. The list is of what
is refused. Whatever computes has need of hundreds of other calls, which change with each release of a library.

Without seccomp in the kernel, a device runs without it, and says so in its log.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from typing import TYPE_CHECKING, Any

from cffi import FFI

if TYPE_CHECKING:
    from collections.abc import Iterable

_ffi = FFI()
_ffi.cdef(
    """
    int prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d);
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
