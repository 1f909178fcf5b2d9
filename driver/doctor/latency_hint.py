"""Checks which parts of the hint that an open burst is take effect on this machine, for devices of this account."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from driver.engine.latency import DEVICE_FILE, MOST_LATENCY
from driver.engine.utilisation import least, set_least
from driver.finding import Finding, text_of
from driver.libc import function

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/")
_CPU = "sys/devices/system/cpu"
_RULE = (
    'a udev rule, KERNEL=="cpu_dma_latency", GROUP="burst", MODE="0660", for accounts of a group; not in a container'
)


def hint() -> Iterator[Finding]:
    """Yield a finding for each part of the hint: idle states, clock, arenas."""
    yield _idle_states()
    yield _clock()
    words = (
        "kept while a burst is open"
        if function("malloc_trim", "int(*)(size_t pad)")
        else "no effect: this C library gives none back by itself"
    )
    yield Finding("open bursts, arenas", "ok", words)


def _idle_states() -> Finding:
    subject, file = "open bursts, idle states", ROOT / DEVICE_FILE.relative_to("/")
    deepest = max(
        (
            int(text)
            for path in (ROOT / _CPU / "cpu0/cpuidle").glob("state*/latency")
            if (text := text_of(path)).isdigit()
        ),
        default=None,
    )
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CLOEXEC))  # which asks for nothing, until it is written
    except OSError as error:
        found = f"{file}: refused with {errno.errorcode.get(error.errno or 0, str(error.errno))}"
        if deepest is not None and deepest <= MOST_LATENCY:
            return Finding(subject, "ok", f"{found}; it would change nothing: {_deepest(deepest)}")
        why = f"between requests, processors may enter idle states that they need more than {MOST_LATENCY} us to leave"
        return Finding(subject, "note", found, why, remedy=_RULE)
    if deepest is None:
        return Finding(
            subject, "ok", f"{file} may be opened; which states there are is unknown, as in most virtual machines"
        )
    effect = f"keeps processors out of the deeper of them: {_deepest(deepest)}"
    return Finding(
        subject, "ok", effect if deepest > MOST_LATENCY else f"{file} may be opened; no effect: {_deepest(deepest)}"
    )


def _deepest(latency: int) -> str:
    return f"the deepest idle state takes {latency} us to leave"


def _clock() -> Finding:
    subject, governor = "open bursts, clock", text_of(ROOT / _CPU / "cpu0/cpufreq/scaling_governor")
    try:
        set_least(least())
    except OSError as error:
        found = f"sched_setattr: refused with {errno.errorcode.get(error.errno or 0, str(error.errno))}"
        why = "a device's threads cannot be clamped to full utilisation, so the clock may be low when a request comes"
        return Finding(
            subject, "note", found, why, remedy="a kernel with CONFIG_UCLAMP_TASK, or the governor performance"
        )
    if governor == "schedutil":
        return Finding(subject, "ok", "devices' threads are clamped to full utilisation; schedutil goes by that")
    words = "unknown to the kernel" if governor == "unknown" else f"chosen by the governor {governor}"
    return Finding(subject, "ok", f"devices' threads are clamped; no effect on clocks, which are {words}")
