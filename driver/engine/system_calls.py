"""The system calls of a device that serves clients: which it may make, and the filter (seccomp) that says so.

The list says what is allowed. Recorded with strace, each device here makes 62 to 82 kinds of calls while the
conformance kit or its tests run it. The list has these, what other releases of the C library and of Python use in
their place, and their families: 210 of the 362 calls in the kernel's headers. What only an intruder would call gets
EPERM; every other call, also each that a later kernel adds, gets ENOSYS, as from an older kernel: libraries fall back.

`driver.engine.call_rules` says which arguments some of the allowed calls may have.

The kernel remembers which numbers are always allowed, and runs the filter for the others alone (since Linux 5.11);
before, it makes about seven comparisons.
"""

from __future__ import annotations

import errno
import struct
from typing import TYPE_CHECKING

from driver.engine.call_rules import becoming_alone, rules_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from driver.engine.call_rules import Reach, Rule, Rules

_ALLOWED = """
# files
read 0 63, write 1 64, open 2 -, openat 257 56, openat2 437 437, creat 85 -, close 3 57, close_range 436 436, stat 4
-, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269
48, faccessat2 439 439, lseek 8 62, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev
296 70, preadv2 327 286, pwritev2 328 287, sendfile 40 71, copy_file_range 326 285, dup 32 23, dup2 33 -, dup3 292 24,
fcntl 72 25, flock 73 32, ioctl 16 29, fsync 74 82, fdatasync 75 83, sync_file_range 277 84, syncfs 306 267, truncate
76 45, ftruncate 77 46, fallocate 285 47, fadvise64 221 223, readahead 187 213, getdents 78 -, getdents64 217 61,
getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34,
rmdir 84 -, link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -, symlinkat 266 36, readlink 89 -,
readlinkat 267 78, umask 95 166,
# memory
mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, msync 26 227, madvise 28 233, mincore 27 232, brk 12 214,
mlock 149 228, mlock2 325 284, munlock 150 229, mlockall 151 230, munlockall 152 231, memfd_create 319 279, membarrier
324 283, mbind 237 235, set_mempolicy 238 237, get_mempolicy 239 236, set_mempolicy_home_node 450 450,
# threads, processes, signals
clone 56 220, fork 57 -, vfork 58 -, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95, futex 202 98,
futex_waitv 449 449, set_robust_list 273 99, get_robust_list 274 100, set_tid_address 218 96, rseq 334 293,
restart_syscall 219 128, arch_prctl 158 -, prctl 157 167, kill 62 129, tkill 200 130, tgkill 234 131, pidfd_open 434
434, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127
136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, sigaltstack
131 132, pause 34 -, signalfd 282 -, signalfd4 289 74, getpid 39 172, getppid 110 173, gettid 186 178, getpgid 121
155, getpgrp 111 -, getsid 124 156, setpgid 109 154, setsid 112 157, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, capget 125 90, capset 126 91, uname 63 160,
sysinfo 99 179, times 100 153, getrusage 98 165, getcpu 309 168, getpriority 140 141, setpriority 141 140, getrlimit
97 163, setrlimit 160 164, prlimit64 302 261, ioprio_get 252 31, ioprio_set 251 30, sched_yield 24 124,
sched_getaffinity 204 123, sched_setaffinity 203 122, sched_getscheduler 145 120, sched_setscheduler 144 119,
sched_getparam 143 121, sched_setparam 142 118, sched_getattr 315 275, sched_setattr 314 274, sched_get_priority_max
146 125, sched_get_priority_min 147 126, sched_rr_get_interval 148 127, seccomp 317 277, landlock_create_ruleset 444
444, landlock_add_rule 445 445, landlock_restrict_self 446 446,
# time
time 201 -, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35
101, alarm 37 -, getitimer 36 102, setitimer 38 103, timer_create 222 107, timer_settime 223 110, timer_gettime 224
108, timer_getoverrun 225 109, timer_delete 226 111, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime
287 87, getrandom 318 278,
# waiting, pipes, sockets
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19, pipe 22 -, pipe2 293 59,
socket 41 198, socketpair 53 199, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, connect 42 203, shutdown
48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209, setsockopt 54 208, sendto 44 206, recvfrom 45 207,
sendmsg 46 211, recvmsg 47 212, sendmmsg 307 269, recvmmsg 299 243,
"""
"""Names, and numbers on x86-64 and on aarch64."""

_OTHERS = """
shmget 29 194, shmat 30 196, shmctl 31 195, execve 59 221, semget 64 190, semop 65 193, semctl 66 191, shmdt 67 197,
msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, ptrace 101 117, syslog 103 116, setuid 105 146, setgid 106
144, setreuid 113 145, setregid 114 143, setgroups 116 159, setresuid 117 147, setresgid 119 149, setfsuid 122 151,
setfsgid 123 152, mknod 133 -, uselib 134 -, personality 135 92, ustat 136 -, sysfs 139 -, vhangup 153 58, modify_ldt
154 -, pivot_root 155 41, _sysctl 156 -, adjtimex 159 171, chroot 161 51, sync 162 81, acct 163 89, settimeofday 164
170, mount 165 40, umount2 166 39, swapon 167 224, swapoff 168 225, reboot 169 142, sethostname 170 161, setdomainname
171 162, iopl 172 -, ioperm 173 -, create_module 174 -, init_module 175 105, delete_module 176 106, get_kernel_syms
177 -, query_module 178 -, quotactl 179 60, nfsservctl 180 42, getpmsg 181 -, putpmsg 182 -, afs_syscall 183 -,
tuxcall 184 -, security 185 -, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, getxattr 191 8, lgetxattr 192 9,
fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13, removexattr 197 14, lremovexattr 198 15,
fremovexattr 199 16, set_thread_area 205 -, io_setup 206 0, io_destroy 207 1, io_getevents 208 4, io_submit 209 2,
io_cancel 210 3, get_thread_area 211 -, lookup_dcookie 212 18, epoll_ctl_old 214 -, epoll_wait_old 215 -,
remap_file_pages 216 234, semtimedop 220 192, clock_settime 227 112, vserver 236 -, mq_open 240 180, mq_unlink 241
181, mq_timedsend 242 182, mq_timedreceive 243 183, mq_notify 244 184, mq_getsetattr 245 185, kexec_load 246 104,
add_key 248 217, request_key 249 218, keyctl 250 219, inotify_init 253 -, inotify_add_watch 254 27, inotify_rm_watch
255 28, migrate_pages 256 238, mknodat 259 33, unshare 272 97, splice 275 76, tee 276 77, vmsplice 278 75, move_pages
279 239, inotify_init1 294 26, perf_event_open 298 241, fanotify_init 300 262, fanotify_mark 301 263,
name_to_handle_at 303 264, open_by_handle_at 304 265, clock_adjtime 305 266, setns 308 268, process_vm_readv 310 270,
process_vm_writev 311 271, kcmp 312 272, finit_module 313 273, kexec_file_load 320 294, bpf 321 280, execveat 322 281,
userfaultfd 323 282, pkey_mprotect 329 288, pkey_alloc 330 289, pkey_free 331 290, io_pgetevents 333 292,
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, open_tree 428 428, move_mount 429 429,
fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, clone3 435 435, pidfd_getfd 438 438,
process_madvise 440 440, mount_setattr 442 442, quotactl_fd 443 443, memfd_secret 447 447, process_mrelease 448 448,
pidfd_send_signal 424 424, chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat
260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88
"""

_INTRUDERS = """
execve execveat ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd pidfd_send_signal kcmp mount
umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr setns unshare bpf
perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register add_key request_key keyctl init_module
finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl syslog settimeofday
clock_settime adjtimex clock_adjtime sethostname setdomainname vhangup setuid setgid setreuid setregid setresuid
setresgid setgroups setfsuid setfsgid open_by_handle_at fanotify_init personality chmod fchmod fchmodat chown fchown
lchown fchownat utime utimes futimesat utimensat
"""
"""What only an intruder would call."""

_IDENTITIES = (
    *("setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setfsuid", "setfsgid", "setgroups"),
    *("unshare", "setns"),
)
"""Calls by which a process becomes another account, or gets a namespace where numbers stand for others."""


def _numbers(text: str) -> dict[str, tuple[int | None, int | None]]:
    lines = " ".join(line for line in text.splitlines() if not line.startswith("#"))
    words = (item.split() for item in lines.split(",") if item.strip())
    return {name: (_number(x86), _number(arm)) for name, x86, arm in words}


def _number(word: str) -> int | None:
    return None if word == "-" else int(word)


ALLOWED = _numbers(_ALLOWED)
NUMBERS = ALLOWED | _numbers(_OTHERS)
REFUSED = tuple(_INTRUDERS.split())
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column above, and AUDIT_ARCH."""

_LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06  # of classic BPF
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data; of an argument, the low half comes first
_FOREIGN = 1 << 30  # from here on: the same calls by other numbers (x32)
_FARTHEST = 255  # that a condition can skip

_Step = tuple[int, int, int, int]  # code, how many to skip if true and if false, operand
_Steps = tuple[_Step, ...]


def _error(number: int) -> _Steps:
    return ((_RETURN, 0, 0, _ERROR | number),)


_PASS: _Steps = ((_RETURN, 0, 0, _ALLOW),)


def _compared(rule: Rule) -> _Steps:
    """Return the steps that refuse a call which breaks the rule, and else go on behind them."""
    load = (_LOAD, 0, 0, _ARGUMENTS + 8 * rule.argument), (_AND, 0, 0, rule.mask)
    if rule.is_range:
        first, last = rule.values
        return (*load, (_AT_LEAST, 1, 0, last + 1), (_AT_LEAST, 1, 0, first), *_error(errno.EPERM))
    count = len(rule.values)
    equal = ((_EQUAL, count - n, 0, value) for n, value in enumerate(rule.values))
    return (*load, *equal, *(((_JUMP, 0, 0, 1),) if rule.is_refused else ()), *_error(errno.EPERM))


def program(machine: str, needed: Iterable[str] = (), reach: Reach | None = None, beside: Rules | None = None) -> bytes:
    """Return the filter, which also allows what is `needed`. Names that are not known change nothing.

    `reach`: as `rules_for` takes it. `beside`: calls that it also allows, with their rules.
    """
    needed = frozenset(needed)
    rules = rules_for(needed, reach) | (beside or {})
    verdicts = dict.fromkeys(REFUSED, _error(errno.EPERM))
    for name in {*ALLOWED, *(needed & NUMBERS.keys()), *(beside or {})}:
        verdicts[name] = _ruled(rules.get(name, ()))
    return _program(machine, verdicts, _error(errno.ENOSYS))


def program_of_uids(machine: str, uids: range) -> bytes:
    """Return a filter that leaves a process all calls, but to become an account beyond that range.

    That is also what a user namespace is for, in which one number stands for another.
    """
    verdicts = dict.fromkeys(_IDENTITIES, _error(errno.EPERM)) | {"clone3": _error(errno.ENOSYS)}
    verdicts |= {name: _ruled(rules) for name, rules in becoming_alone(uids).items()}
    return _program(machine, verdicts, _PASS)


def _ruled(rules: Iterable[Rule]) -> _Steps:
    return (*(step for rule in rules for step in _compared(rule)), *_PASS)


def _program(machine: str, verdicts: dict[str, _Steps], other: _Steps) -> bytes:
    """Return the filter that has these verdicts on calls, and `other` on all others."""
    column, architecture = MACHINES[machine]
    by_number = {number: steps for name, steps in verdicts.items() if (number := NUMBERS[name][column]) is not None}
    begins: list[tuple[int, _Steps]] = []
    for number in range(max(by_number) + 2):
        verdict = by_number.get(number, other)
        if not begins or begins[-1][1] != verdict:
            begins.append((number, verdict))
    begins.append((_FOREIGN, _error(errno.ENOSYS)))
    is_native = (_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), *_error(errno.EPERM)
    head: _Steps = (*is_native, (_LOAD, 0, 0, _NUMBER))
    return b"".join(struct.pack("HBBI", *step) for step in (*head, *_searched(begins)))


def _searched(begins: list[tuple[int, _Steps]]) -> _Steps:
    """Find the span of numbers that a call is in, by halves. `begins`: the first number of each, and what to do."""
    if len(begins) == 1:
        return begins[0][1]
    middle = len(begins) // 2
    low, high = _searched(begins[:middle]), _searched(begins[middle:])
    first = begins[middle][0]
    if len(low) <= _FARTHEST:
        return ((_AT_LEAST, len(low), 0, first), *low, *high)
    return ((_AT_LEAST, 0, 1, first), (_JUMP, 0, 0, len(low)), *low, *high)
