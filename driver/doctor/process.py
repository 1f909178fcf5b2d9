"""What the system lets this process have, and what devices let their clients have."""

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
    """Descriptors, locked memory, and the size of files."""
    yield _files()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Finding("RLIMIT_MEMLOCK", "ok", f"{_told(soft)}; bursts lock nothing")
    yield _size_of_files()


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_count(soft)}; devices raise theirs to {_count(hard)}"
    if (soft != _INFINITE and soft < _FEW_FILES) or (hard != _INFINITE and hard < 4 * _FEW_FILES):
        why = "a burst takes up to 12 descriptors on either side, and each pool of memory one"
        return Finding("RLIMIT_NOFILE", "note", found, why, "ulimit -n 65536, or LimitNOFILE= of the service")
    return Finding("RLIMIT_NOFILE", "ok", found)


def _size_of_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == _INFINITE:
        return Finding("RLIMIT_FSIZE", "ok", _told(soft))
    why = "it holds for shared memory, too: larger models and pools are refused"
    state = "warning" if soft < 2**20 else "note" if soft < _SMALL_FILE else "ok"
    return Finding("RLIMIT_FSIZE", state, _told(soft), why, "ulimit -f unlimited")  # type: ignore[arg-type]


def _told(nbytes: int) -> str:
    return "unlimited" if nbytes == _INFINITE else size(nbytes)


def _count(number: int) -> str:
    return "unlimited" if number == _INFINITE else str(number)


def limits_of_clients() -> Iterator[Finding]:
    """Those of limits.toml, as a device that starts now has them."""
    path = limits_file()
    try:
        found = limits()
    except ValueError as error:
        yield Finding("limits.toml", "warning", str(error), "no device starts", "correct that line, or remove the file")
        return
    yield Finding("limits.toml", "ok", f"{path}, {'read' if path.exists() else 'not there: the defaults hold'}")
    for name, value in asdict(found).items():
        yield Finding(name, "ok", size(value) if name.endswith("bytes") else f"{value:g}")
