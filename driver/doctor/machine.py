"""Checks the kernel, the container, CPUs and memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from driver.doctor.finding import Finding, size, text_of
from driver.engine.limits import memory_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDEST = (5, 6)
ROOT = Path("/")
_SMALL_MEMORY, _SMALL_SHM = 10**9, 64 * 2**20
_WAITV, _RECENT = (5, 16), "5.16"


def kernel() -> Iterator[Finding]:
    """The kernel's version, against the features that bursts use."""
    release = os.uname().release
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else None
    if version is None:
        yield Finding("kernel", "note", f"unknown: {release}", "bursts need Linux 5.6")
    elif version < OLDEST:
        yield Finding("kernel", "warning", release, "bursts need Linux 5.6", "use a newer kernel")
    elif version < _WAITV:
        why = f"before Linux {_RECENT}, the death of a peer that holds gigabytes is detected late"
        yield Finding("kernel", "note", release, why, "use a newer kernel if your devices hold gigabytes")
    else:
        yield Finding("kernel", "ok", release)


def container() -> Iterator[Finding]:
    """Whether this is a container, and whether system calls are filtered."""
    marks = [name for name in (".dockerenv", "run/.containerenv") if (ROOT / name).exists()]
    group = text_of(ROOT / "proc/self/cgroup").splitlines()[-1:]
    yield Finding("container", "ok", f"{', '.join(marks) or 'none detected'}; cgroup {''.join(group)}")
    filtered = re.search(r"^Seccomp:\s*(\d)", text_of(ROOT / "proc/self/status"), re.MULTILINE)
    modes = {"0": "none", "1": "strict", "2": "a filter; the calls that bursts need were tried above"}
    yield Finding("seccomp", "ok", modes.get(filtered[1], filtered[1]) if filtered else "unknown")


def processors() -> Iterator[Finding]:
    """Number of usable CPUs, their quota and their governor."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if usable < 2:
        why = "client and device share one CPU, so neither polls, and each request costs two context switches"
        yield Finding("CPUs", "note", f"{usable} of {there} usable", why, "give this process two (taskset, cpuset)")
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
    return Finding("CPU quota", "note", f"{share:g} CPUs", why, "reserve CPUs (cpuset) instead of setting a quota")


def _governor() -> Finding:
    governor = text_of(ROOT / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor != "powersave":
        return Finding("governor", "ok", governor)
    why = "an idle CPU starts slowly; does not matter if intel_pstate is active"
    return Finding("governor", "note", governor, why, "for steady times: cpupower frequency-set -g performance")


def memory() -> Iterator[Finding]:
    """Memory that this process may use, and how much of it is free."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text_of(ROOT / "proc/meminfo"), re.MULTILINE)
    free = int(found[1]) * 1024 if found else None
    words = f"{size(memory_bytes())} for this process, {size(free) if free is not None else 'unknown'} available"
    if free is not None and free < _SMALL_MEMORY:
        yield Finding(
            "memory", "note", words, "models, weights and pools must fit in it", "stop programs that you don't need"
        )
    else:
        yield Finding("memory", "ok", words)


def shared_memory() -> Iterator[Finding]:
    """/dev/shm, which only named memory uses."""
    path, why = ROOT / "dev/shm", 'memory="posix" uses it; sealed memory, the default, does not'
    try:
        found = os.statvfs(path)
    except OSError as error:
        yield Finding("/dev/shm", "note", f"unknown: {error.strerror}", why, "mount a tmpfs there")
        return
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    state = "note" if free < _SMALL_SHM else "ok"
    words, remedy = f"{size(total)}, {size(free)} free", "docker run --shm-size=1g, or use sealed memory"
    yield Finding("/dev/shm", "note", words, why, remedy) if state == "note" else Finding("/dev/shm", "ok", words)


def huge_pages() -> Iterator[Finding]:
    """Whether the kernel uses huge pages by itself."""
    for kind, file in (("memory", "enabled"), ("shared memory", "shmem_enabled")):
        words = text_of(ROOT / "sys/kernel/mm/transparent_hugepage" / file)
        chosen = re.search(r"\[(\w+)\]", words)
        yield Finding(f"huge pages of {kind}", "ok", chosen[1] if chosen else "unknown")
