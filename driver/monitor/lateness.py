"""Why frames of a paced stream came late: what the kernel says of both sides' threads for the time of such a frame.

It is read from outside, at each look at a burst: no frame takes longer for it. A frame is a request that began long
after the result before it, and is late when it took 100 us more than the median of its stream. What it lost has one
name: the first source of `SOURCES` that accounts for half of it.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from burst.timeline import ON_DEVICE
from driver.client.other_process import processor_time_ns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from burst import Trace

LATE: Final = 100_000  #: ns beyond the median
_PAUSE = 1_000_000  # ns between a result and the next request that make that a frame, as in csrc/burst/caller.c
_LEAST = 8  # frames in which a median means anything
_FAULT, _READ = 1_500, 100_000  # ns that a page takes at least, from memory and from a disk
_TICK = 10_000_000  # ns, of what /proc/stat counts

STOLEN, WAITED, READ, FAULTED = "stolen by the host", "waited for a processor", "read pages", "new pages"
OTHERS, WAKE, WORK, OWN = "another thread of its process", "wake-up of a processor", "the execution itself", "unknown"
SOURCES: Final = (STOLEN, WAITED, READ, FAULTED, OTHERS, WAKE, WORK, OWN)
"""What a frame may have lost its time to, in the order in which it is looked for; docs/watching.md has the meanings."""
NOT_OURS: Final = {STOLEN, WAITED, WAKE, WORK}
"""The sources that Burst has no part in: the machine, its other programs, and the model."""


class ThreadCounts(NamedTuple):
    """The counts of a thread since it began; all only grow."""

    waited: int  #: ns in which it could have run
    others: int  #: ns that other threads of its process have run
    faults: int
    reads: int  #: pages from a disk

    @classmethod
    def of(cls, pid: int, tid: int) -> ThreadCounts | None:
        """Read it. Return None where the kernel does not tell, as of a process in another container."""
        task = Path(f"/proc/{pid}/task/{tid}")
        try:
            ran, waited = (int(word) for word in (task / "schedstat").read_text().split()[:2])
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            both = processor_time_ns(pid)
        except (OSError, ValueError, OverflowError):
            return None
        return cls(waited, both - ran, int(fields[7]), int(fields[9]))


class Moment(NamedTuple):
    """The figures of one look."""

    at: int  #: CLOCK_MONOTONIC ns
    stolen: int  #: ns, of all processors
    client: ThreadCounts | None
    device: ThreadCounts | None

    @classmethod
    def now(cls, trace: Trace) -> Moment:
        """Read all of it."""
        client, device = trace.page.client, trace.page.device
        return cls(
            time.monotonic_ns(),
            _stolen(),
            ThreadCounts.of(int(client.pid), int(client.tid)),
            ThreadCounts.of(int(device.pid), int(device.tid)),
        )


class LateFrame(NamedTuple):
    """One frame that was late."""

    number: int  #: of its request
    begin: int  #: CLOCK_MONOTONIC ns
    ns: int  #: beyond the median of its stream
    stage: str  #: in which most of that was lost
    source: str  #: of `SOURCES`


def late_frames(trace: Trace, records: NDArray[np.void], moments: Sequence[Moment]) -> list[LateFrame]:
    """Return the late ones of these records, oldest first. `moments`: those of the looks around them, in order."""
    if len(records) < 2:
        return []
    stages = trace.stages(records)
    pauses = records["begin"][1:].astype(np.int64) - records["received"][:-1].astype(np.int64)
    frames = 1 + np.flatnonzero(pauses > _PAUSE)
    if len(frames) < _LEAST:
        return []
    usual = {stage: int(np.median(ns[frames])) for stage, ns in stages.items()}
    found = []
    for n in frames[stages["total"][frames] - usual["total"] > LATE].tolist():
        more = {stage: int(ns[n]) - usual[stage] for stage, ns in stages.items()}
        late, stage = more.pop("total"), max(more, key=more.__getitem__)
        begin, end = int(records["begin"][n]), int(records["received"][n])
        source = _source(stage, late, *_around(moments, begin, end))
        found.append(LateFrame(number=int(records["id"][n]), begin=begin, ns=late, stage=stage, source=source))
    return found


def counted(frames: Sequence[LateFrame]) -> dict[str, int]:
    """Return how many there are of each source, the most frequent one first."""
    return dict(Counter(frame.source for frame in frames).most_common())


def told(counts: Mapping[str, int]) -> str:
    """Say that in words."""
    each = (f"{count} {source}{' (not ours)' if source in NOT_OURS else ''}" for source, count in counts.items())
    return ", ".join(each)


def _around(moments: Sequence[Moment], begin: int, end: int) -> tuple[Moment | None, Moment | None]:
    """Return the last look before a frame and the first one after it."""
    first = bisect_right(moments, begin, key=lambda moment: moment.at)
    last = bisect_left(moments, end, key=lambda moment: moment.at)
    return (moments[first - 1] if first else None), (moments[last] if last < len(moments) else None)


def _source(stage: str, late: int, before: Moment | None, after: Moment | None) -> str:
    on_device, half = stage in ON_DEVICE, late // 2
    if before and after:
        first, last = (before.device, after.device) if on_device else (before.client, after.client)
        if after.stolen - before.stolen >= max(half, 1):
            return STOLEN
        if first and last:
            met = ThreadCounts(*(b - a for a, b in zip(first, last, strict=True)))
            for source, ns in (
                (WAITED, met.waited),
                (READ, met.reads * _READ),
                (FAULTED, met.faults * _FAULT),
                (OTHERS, 0 if stage == "execute" else met.others),
            ):
                if ns >= half:
                    return source
    return WORK if stage == "execute" else WAKE if stage in {"wake", "return"} else OWN


def _stolen() -> int:
    try:
        with Path("/proc/stat").open() as file:
            return int(file.readline().split()[8]) * _TICK
    except (OSError, ValueError, IndexError):
        return 0
