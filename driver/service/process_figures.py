"""What the kernel says of one process: its processor time, memory and descriptors."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

_PAGE = os.sysconf("SC_PAGE_SIZE")
KINDS = ("anon", "file", "shmem")


def private_bytes(pid: int) -> int:
    """Return the private memory of a process, without what is swapped out; 0 for one that has ended."""
    with suppress(OSError), open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
        _, resident, shared, *_ = map(int, file.read(200).split())
        return (resident - shared) * _PAGE
    return 0


class ProcessFigures(NamedTuple):
    """The kernel's figures of one process."""

    cpu: float  #: seconds
    start: float  #: seconds since 1970
    descriptors: int
    pss: list[int]  #: bytes, by `KINDS`

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Read the figures of a process; None: it has just ended, or this kernel lacks a file."""
        try:
            ticks = os.sysconf("SC_CLK_TCK")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            cpu, start = (int(fields[11]) + int(fields[12])) / ticks, _boot() + int(fields[19]) / ticks
            return cls(cpu, start, len(os.listdir(f"/proc/{pid}/fd")), _pss(pid))
        except (OSError, ValueError, LookupError):
            return None


def _pss(pid: int) -> list[int]:
    """Return the bytes by kind: anon (private), file (mapped files), shmem (shared pools and queues)."""
    lines: Any = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    found = {words[0]: int(words[1]) * 1024 for words in lines}
    return [found[f"Pss_{kind.capitalize()}:"] for kind in KINDS]


def _boot() -> float:
    lines = Path("/proc/stat").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("btime ")))
