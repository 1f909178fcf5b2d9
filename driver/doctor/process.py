"""Checks the limits of this process, and those that devices set for their clients."""

from __future__ import annotations

import resource
from dataclasses import asdict
from typing import TYPE_CHECKING

from driver.doctor.finding import Finding, size
from driver.engine.limits import limits, limits_file

if TYPE_CHECKING:
    from collections.abc import Iterator

_FEW_FILES, _SMALL_FILE = 1024, 2**30
_INFINITE = resource.RLIM_INFINITY


def limits_of_the_process() -> Iterator[Finding]:
    """Limits of descriptors, locked memory, and file size."""
    yield _files()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Finding("RLIMIT_MEMLOCK", "ok", f"{_told(soft)}; bursts lock nothing")
    yield _size_of_files()


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_count(soft)}; devices raise theirs to {_count(hard)}"
    if (soft != _INFINITE and soft < _FEW_FILES) or (hard != _INFINITE and hard < 4 * _FEW_FILES):
        why = "a burst needs up to 12 descriptors on each side, and one for each memory pool"
        return Finding("RLIMIT_NOFILE", "note", found, why, "ulimit -n 65536, or LimitNOFILE= in the service's unit")
    return Finding("RLIMIT_NOFILE", "ok", found)


def _size_of_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == _INFINITE:
        return Finding("RLIMIT_FSIZE", "ok", _told(soft))
    why = "it also limits shared memory: larger models and pools are refused"
    state = "warning" if soft < 2**20 else "note" if soft < _SMALL_FILE else "ok"
    return Finding("RLIMIT_FSIZE", state, _told(soft), why, "ulimit -f unlimited")  # type: ignore[arg-type]


def _told(nbytes: int) -> str:
    return "unlimited" if nbytes == _INFINITE else size(nbytes)


def _count(number: int) -> str:
    return "unlimited" if number == _INFINITE else str(number)


def limits_of_clients() -> Iterator[Finding]:
    """The limits in limits.toml, as a device that starts now would read them."""
    path = limits_file()
    try:
        found = limits()
    except ValueError as error:
        yield Finding("limits.toml", "warning", str(error), "no device starts", "correct that line, or remove the file")
        return
    yield Finding("limits.toml", "ok", f"{path}, {'read' if path.exists() else 'does not exist; defaults apply'}")
    for name, value in asdict(found).items():
        yield Finding(name, "ok", size(value) if name.endswith("bytes") else f"{value:g}")
