"""Checks the machine: kernel, system calls, container, CPUs, memory, limits, and the folders of sockets and caches."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import struct
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from burst import real_time
from burst.real_time import PRIORITY
from driver.client import launch, user_manager
from driver.client.discovery import Place, files_there, runtime_dir, why_elsewhere
from driver.engine import landlock, state
from driver.engine.limits import NO_LIMIT, Limits, limits, limits_file, memory_bytes, renew_when
from driver.engine.real_time import REMEDY
from driver.errors import DeviceFailed
from driver.finding import Finding, State, size, text_of
from driver.libc import function
from driver.runtime.cache.folder import default_folder
from fmq._core import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OLDEST = (5, 6)
ROOT = Path("/")
_SMALL_MEMORY, _SMALL_SHM = 10**9, 64 * 2**20
_WAITV, _RECENT = (5, 16), "5.16"


def kernel() -> Iterator[Finding]:
    """Yield the kernel's version, against the features that bursts use."""
    release = os.uname().release
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else None
    if version is None:
        yield Finding("kernel", "note", f"unknown: {release}", "bursts need Linux 5.6")
    elif version < OLDEST:
        yield Finding("kernel", "warning", release, "bursts need Linux 5.6", remedy="use a newer kernel")
    elif version < _WAITV:
        why = f"before Linux {_RECENT}, the death of a peer that holds gigabytes is detected late"
        yield Finding("kernel", "note", release, why, remedy="use a newer kernel if your devices hold gigabytes")
    else:
        yield Finding("kernel", "ok", release)


def container() -> Iterator[Finding]:
    """Report if this is a container, and if system calls are filtered."""
    marks = [name for name in (".dockerenv", "run/.containerenv") if (ROOT / name).exists()]
    group = text_of(ROOT / "proc/self/cgroup").splitlines()[-1:]
    yield Finding("container", "ok", f"{', '.join(marks) or 'none detected'}; cgroup {''.join(group)}")
    filtered = re.search(r"^Seccomp:\s*(\d)", text_of(ROOT / "proc/self/status"), re.MULTILINE)
    modes = {"0": "none", "1": "strict", "2": "a filter; the calls that bursts need were tried above"}
    yield Finding("seccomp", "ok", modes.get(filtered[1], filtered[1]) if filtered else "unknown")
    yield _landlock()


def _landlock() -> Finding:
    version = landlock.abi()
    if version >= landlock.SCOPES:
        return Finding("Landlock", "ok", f"version {version}")
    if version:
        why = "what takes a device over can signal other programs of its account"
        return Finding("Landlock", "note", f"version {version}", why, remedy="Linux 6.12, for version 6")
    why = "what takes a device over reaches all files of its account"
    remedy = "boot with landlock in lsm=, and allow landlock_create_ruleset in the container's seccomp profile"
    return Finding("Landlock", "note", "not there", why, remedy=remedy)


def processors() -> Iterator[Finding]:
    """Report the number of usable CPUs, their quota and their governor."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if usable < 2:
        why = "client and device share one CPU, so neither polls, and each request costs two context switches"
        yield Finding(
            "CPUs", "note", f"{usable} of {there} usable", why, remedy="give this process two (taskset, cpuset)"
        )
    else:
        yield Finding("CPUs", "ok", f"{usable} of {there} usable")
    yield _quota()
    yield _governor()


def _quota() -> Finding:
    words = text_of(ROOT / "sys/fs/cgroup/cpu.max").split()
    if len(words) != 2 or not all(map(str.isdecimal, words)):
        return Finding("CPU quota", "ok", "unknown" if words[:1] != ["max"] else "none")
    share = int(words[0]) / int(words[1])
    why = "once the quota is spent, the process stalls up to 100 ms mid-request"
    return Finding(
        "CPU quota", "note", f"{share:g} CPUs", why, remedy="reserve CPUs (cpuset) instead of setting a quota"
    )


def _governor() -> Finding:
    governor = text_of(ROOT / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor != "powersave":
        return Finding("governor", "ok", governor)
    why = "an idle CPU starts slowly; does not matter if intel_pstate is active"
    return Finding("governor", "note", governor, why, remedy="for steady times: cpupower frequency-set -g performance")


def memory() -> Iterator[Finding]:
    """Memory that this process may use, and how much of it is free."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text_of(ROOT / "proc/meminfo"), re.MULTILINE)
    free = int(found[1]) * 1024 if found else None
    words = f"{size(memory_bytes())} for this process, {size(free) if free is not None else 'unknown'} available"
    if free is not None and free < _SMALL_MEMORY:
        yield Finding(
            "memory",
            "note",
            words,
            "models, weights and pools must fit in it",
            remedy="stop programs that you don't need",
        )
    else:
        yield Finding("memory", "ok", words)


def shared_memory() -> Iterator[Finding]:
    """/dev/shm, which only named memory uses."""
    path, why = ROOT / "dev/shm", 'memory="posix" uses it; sealed memory, the default, does not'
    try:
        found = os.statvfs(path)
    except OSError as error:
        yield Finding("/dev/shm", "note", f"unknown: {error.strerror}", why, remedy="mount a tmpfs there")
        return
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    state = "note" if free < _SMALL_SHM else "ok"
    words, remedy = f"{size(total)}, {size(free)} free", "docker run --shm-size=1g, or use sealed memory"
    yield (
        Finding("/dev/shm", "note", words, why, remedy=remedy) if state == "note" else Finding("/dev/shm", "ok", words)
    )


def huge_pages() -> Iterator[Finding]:
    """Report if the kernel uses huge pages by itself."""
    for kind, file in (("memory", "enabled"), ("shared memory", "shmem_enabled")):
        words = text_of(ROOT / "sys/kernel/mm/transparent_hugepage" / file)
        chosen = re.search(r"\[(\w+)\]", words)
        yield Finding(f"huge pages of {kind}", "ok", chosen[1] if chosen else "unknown")


_syscall = function("syscall", "long(*)(long number, long a, long b, long c, long d, long e)")
_FUTEX_WAITV = 449  # on every architecture
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_OFD_SETLK = 37
_ALLOW = "allow the call in the container's seccomp profile, or use a newer kernel"


class SystemCall(NamedTuple):
    """A system call to try. `state`: the finding if it is refused."""

    name: str
    attempt: Callable[[], object]
    state: State
    why: str


def tried() -> Iterator[Finding]:
    """Make each call once, harmlessly."""
    for call in CALLS:
        try:
            call.attempt()
        except OSError as error:
            number = errno.errorcode.get(error.errno or 0, str(error.errno))
            yield Finding(call.name, call.state, f"refused with {number}", call.why, remedy=_ALLOW)
        else:
            yield Finding(call.name, "ok", "works")


def futex_waitv() -> None:
    """Wait on nothing: a kernel that has the call answers EINVAL. Raise OSError."""
    if _syscall(_FUTEX_WAITV, *[0] * 5) < 0 and ffi.errno != errno.EINVAL:
        raise OSError(ffi.errno, os.strerror(ffi.errno))


def memfd() -> None:
    """Make anonymous memory and seal its size. Raise OSError."""
    fd = _new_memfd()
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    finally:
        os.close(fd)


def ofd_lock() -> None:
    """Take a lock that belongs to an open file, as the roles of a queue do. Raise OSError."""
    fd = _new_memfd()
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    finally:
        os.close(fd)


def _new_memfd() -> int:
    return os.memfd_create("burst-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


CALLS = [
    SystemCall("memfd_create and seals", memfd, "warning", "queues and pools are sealed anonymous memory"),
    SystemCall("open file locks (OFD)", ofd_lock, "warning", "the reader and the writer of a queue each hold one"),
    SystemCall(
        "futex_waitv", futex_waitv, "note", "without it (Linux 5.16), the death of a large peer is detected later"
    ),
]


_FEW_FILES, _SMALL_FILE = 1024, 2**30
_INFINITE = resource.RLIM_INFINITY


def limits_of_the_process() -> Iterator[Finding]:
    """Return the limits of descriptors, locked memory, and file size, and those that a device would keep."""
    yield _files()
    yield _passed_on()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Finding("RLIMIT_MEMLOCK", "ok", f"{_told(soft)}; bursts lock memory in real time alone")
    yield _real_time()
    yield _size_of_files()


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_count(soft)}; devices raise theirs to {_count(hard)}"
    if (soft != _INFINITE and soft < _FEW_FILES) or (hard != _INFINITE and hard < 4 * _FEW_FILES):
        why = "a burst needs up to 12 descriptors on each side, and one for each memory pool"
        return Finding(
            "RLIMIT_NOFILE", "note", found, why, remedy="ulimit -n 65536, or LimitNOFILE= in the service's unit"
        )
    return Finding("RLIMIT_NOFILE", "ok", found)


def _passed_on() -> Finding:
    subject, limits, reason = "limits of devices", launch.kept(), user_manager.absence()
    if not limits:
        return Finding(subject, "ok", "a device that this process starts keeps no limits of it")
    if not reason:
        return Finding(subject, "ok", f"{launch.told(limits)}: systemd's manager of the account starts devices instead")
    why = f"a device would keep them, so this program gets one of its own; systemd's manager cannot start it: {reason}"
    return Finding(
        subject, "note", launch.told(limits), why, remedy="start the device from a program without these limits"
    )


def _real_time() -> Finding:
    """Report if devices that this process starts may have it; a thread of the doctor tries."""
    most = min(real_time.limits()[1], PRIORITY)
    if not most:
        words = f"not for devices that this process starts: {real_time.limit_text()}; {REMEDY}"
        return Finding("real time", "ok", words)
    if why := real_time.why_not(min(real_time.limits()[0], most) or most):
        return Finding("real time", "note", why, "connect(real_time=True) is refused", remedy=REMEDY)
    words = f"real_time=True gives bursts SCHED_FIFO, priority {most}, before all ordinary threads"
    longest = f"of the machine, for {real_time.LONGEST:g} s at once"
    return Finding("real time", "ok", f"{real_time.limit_text()}: {words} {longest}")


def _size_of_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == _INFINITE:
        return Finding("RLIMIT_FSIZE", "ok", _told(soft))
    why = "it also limits shared memory: larger models and pools are refused"
    state = "warning" if soft < 2**20 else "note" if soft < _SMALL_FILE else "ok"
    return Finding("RLIMIT_FSIZE", state, _told(soft), why, remedy="ulimit -f unlimited")  # type: ignore[arg-type]


def _told(nbytes: int) -> str:
    return "unlimited" if nbytes == _INFINITE else size(nbytes)


def _count(number: int) -> str:
    return "unlimited" if number == _INFINITE else str(number)


def limits_of_clients() -> Iterator[Finding]:
    """Yield the limits in limits.toml, as a device that starts now would read them."""
    path = limits_file()
    try:
        found, due = limits(), renew_when()
    except ValueError as error:
        yield Finding(
            "limits.toml", "warning", str(error), "no device starts", remedy="correct that line, or remove the file"
        )
        return
    yield Finding("limits.toml", "ok", f"{path}, {'read' if path.exists() else 'does not exist; defaults apply'}")
    for name in Limits.settings():
        value = getattr(found, name)
        words = "no limit" if value >= NO_LIMIT else size(value) if name.endswith("bytes") else f"{value:g}"
        yield Finding(name, "ok", words)
    for name, figure in asdict(due).items():
        yield Finding(f"renew_when {name}", "ok", "never" if figure is None else f"{figure:g}")


_LONG_NAME = "onnxruntime"
_LITTLE = 100 * 10**6


def runtime() -> Iterator[Finding]:
    """Report on the folder of sockets. Creates it if it is missing, as every client does."""
    why = "no device can be found or started"
    remedy = "set BURST_RUNTIME_DIR to a folder that you own, with a short path and mode 0700"
    try:
        path = runtime_dir()
        Place(path, _LONG_NAME)
    except (DeviceFailed, OSError) as error:
        yield Finding("runtime directory", "warning", str(error), why, remedy=remedy)
        return
    mode = path.stat().st_mode & 0o777
    if not os.access(path, os.W_OK | os.X_OK):
        yield Finding("runtime directory", "warning", f"{path}: mode {mode:04o}, not writable", why, remedy=remedy)
        return
    yield Finding("runtime directory", "ok", f"{path}, mode {mode:04o}")
    if reason := why_elsewhere(path):
        why = f"another account can make it before you; devices of all your programs are in {path} since then"
        yield Finding(
            "runtime directory", "note", reason, why, remedy=f"none needed; remove both, and {path} is not used"
        )


def start_locks() -> Iterator[Finding]:
    """Report processes that hold the lock of a device's start, which is held for milliseconds, and are stopped."""
    for lock in files_there("*.lock"):
        holder = Place(lock.parent, lock.stem).holder()
        if holder and holder.is_stopped:
            found = f"{lock.stem}: process {holder.pid} ({holder.command}) holds it and is stopped"
            why = "this device does not start while it does"
            yield Finding("start lock", "warning", found, why, remedy=f"kill -CONT {holder.pid}, or end it")


def kept() -> Iterator[Finding]:
    """Yield the folder of compilations, and that of measurements of devices."""
    yield _writable("cache folder", default_folder(), "models are compiled again in every process")
    yield _writable("state folder", state.folder(), "devices are measured again in every process")


def _writable(subject: str, path: Path, why: str) -> Finding:
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            subject, "note", f"{path}: {there} is not writable", why, remedy=f"make {there} writable for this account"
        )
    found = os.statvfs(there)
    free = found.f_bavail * found.f_frsize
    words = f"{path}, {'exists' if there == path else 'not created yet'}, {size(free)} free"
    return (
        Finding(subject, "note", words, why, remedy="free some disk space")
        if free < _LITTLE
        else Finding(subject, "ok", words)
    )
