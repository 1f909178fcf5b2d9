"""Follows bursts, and writes what was followed as one file for Perfetto.

Each burst is read before its trace, which holds the last 256 requests, has overwritten any.
"""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import dataclass, field
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from burst import timeline
from burst._core import lib
from driver.monitor.lateness import LateFrame, Moment, late_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.monitor.device import WatchedBurst
    from driver.monitor.watcher import Watcher

_SOONEST, _LATEST = 0.5e-3, 10e-3  # seconds between two looks at a burst: few frames of a stream lie between them
_FRESH = lib.BURST_RECORDS / 4  # requests that are worth a look
_FIND_EVERY = 0.5
_ASK_EVERY = 5.0  # seconds for which devices note their accelerators' work, and a second more


@dataclass(slots=True)
class Followed:
    """The records of one burst since it is followed."""

    burst: WatchedBurst
    last: int  #: id of the last request that was read or missed
    missed: int = 0
    due: float = 0.0  #: of the next look
    _pause: float = _SOONEST
    _found: list[NDArray[Any]] = field(default_factory=list)
    _works: list[NDArray[Any]] = field(default_factory=list)
    _moments: list[Moment] = field(default_factory=list)
    _first: int = 0
    _has_come: bool = True  #: anything, at the last look: else its moment lies between no two frames
    _worked: NDArray[Any] | None = None  #: ids of the works that the last look has found

    def __post_init__(self) -> None:
        self._first = self.last

    @property
    def records(self) -> NDArray[Any]:
        """The records of all requests read, in order."""
        return np.concatenate(self._found) if self._found else self.burst.trace.records()[:0]

    @property
    def works(self) -> NDArray[Any]:
        """The accelerator's work for these requests, as far as the device has noted it, in order."""
        found = np.concatenate(self._works) if self._works else self.burst.trace.works()[:0]
        return np.sort(found[found["id"] > self._first], order="id")

    @property
    def late(self) -> list[LateFrame]:
        """The frames that were late, if these are a stream's, with the source of each."""
        return late_frames(self.burst.trace, self.records, self._moments)

    def look(self, now: float) -> None:
        """Read new records, and set the time of the next look."""
        before = self.last
        if not self._has_come and len(self._moments) > 1:
            del self._moments[-1]
        self._moments.append(Moment.now(self.burst.trace))
        if int(self.burst.trace.page.client.results) > before:
            self._note()
        fresh = self.last - before
        self._has_come = fresh > 0
        if fresh > _FRESH:
            self._pause *= max(0.1, _FRESH / fresh)
        elif fresh < _FRESH / 2:
            self._pause *= 1.5
        self._pause = min(_LATEST, max(_SOONEST, self._pause))
        self.due = now + self._pause
        self._note_works()

    def _note_works(self) -> None:
        """Take new notes of work: they come later than the record of their request, and in any order."""
        found = self.burst.trace.works()
        if not len(found):
            return
        new = found if self._worked is None else found[~np.isin(found["id"], self._worked)]
        self._worked = found["id"]
        if len(new):
            self._works.append(new)

    def _note(self) -> None:
        """Take the complete records. An incomplete one before a complete one was overwritten: it counts as missed."""
        records = self.burst.trace.records()
        new = records[records["id"] > self.last]
        if len(new):
            newest = int(new["id"][-1])
            self.missed += newest - self.last - len(new)
            self.last = newest
            self._found.append(new)


def follow(watcher: Watcher, seconds: float, wanted: Callable[[WatchedBurst], bool]) -> list[Followed]:
    """Follow all wanted bursts, including those that begin meanwhile. Ctrl-C ends it early and keeps the records.

    Meanwhile devices note when their accelerators work.
    """
    followed: dict[WatchedBurst, Followed] = {}
    _find(watcher, wanted, followed, is_first=True)
    end, find_at, ask_at = time.monotonic() + seconds, time.monotonic() + _FIND_EVERY, 0.0
    try:
        while (now := time.monotonic()) < end:
            if now >= find_at:
                if _find(watcher, wanted, followed, is_first=False):
                    ask_at = now
                find_at = now + _FIND_EVERY
            if now >= ask_at:
                ask_at = now + _ASK_EVERY
                for device in watcher.devices:
                    device.time_work(min(_ASK_EVERY + 1, end - now))
            for one in followed.values():
                if one.due <= now:
                    one.look(now)
            soonest = min([end, find_at, *(one.due for one in followed.values())])
            time.sleep(max(0.0, soonest - time.monotonic()))
    except KeyboardInterrupt:
        pass
    for one in followed.values():
        one.look(0.0)
    return list(followed.values())


def _find(
    watcher: Watcher,
    wanted: Callable[[WatchedBurst], bool],
    followed: dict[WatchedBurst, Followed],
    *,
    is_first: bool,
) -> bool:
    """Start to follow new bursts: those open at the start from now on, later ones from their first request.

    Return True if there were any.
    """
    before = len(followed)
    watcher.refresh()
    for device in watcher.devices:
        for burst in device.bursts.values():
            if burst not in followed and wanted(burst):
                seen = int(burst.trace.page.client.results) if is_first else 0
                followed[burst] = Followed(burst, seen)
    return len(followed) > before


_LANES = 64  # of a burst: it has at most so many requests in flight


def write(path: Path, followed: Sequence[Followed]) -> None:
    """Write JSON, compressed if the path ends in .gz. Raise OSError."""
    with cast("IO[str]", gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w")) as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        between = ""
        for event in events(followed):
            file.write(between + json.dumps(event))
            between = ",\n"
        file.write("\n]}\n")


def events(followed: Sequence[Followed]) -> Iterator[dict[str, Any]]:
    """Return the names of processes, then burst by burst its requests and its counters."""
    yield from _names(followed)
    for n, one in enumerate(followed):
        burst, records = one.burst, one.records
        sides, name = burst.trace.sides(first_lane=1 + n * _LANES), f"burst {burst.number}"
        yield from timeline.requests(name, sides, records, burst.trace.stages(records))
        yield from timeline.works(name, sides, one.works, n * len(timeline.LANES))
        yield from timeline.counters(name, sides, records)
        yield from (timeline.mark(f"late: {late.source}", sides, late.begin, late.ns) for late in one.late)


def _names(followed: Sequence[Followed]) -> Iterator[dict[str, Any]]:
    """Return each process and each listener once."""
    clients = {one.burst.pid: one.burst.program or "client" for one in followed}
    all_sides = [(one.burst, one.burst.trace.sides()) for one in followed]
    devices = {sides.device: f"device {burst.device}" for burst, sides in all_sides}
    for pid, name in chain(devices.items(), clients.items()):
        yield timeline.label("process_name", pid, 0, name)
    for burst, sides in all_sides:
        yield timeline.label("thread_name", sides.device, sides.listener, f"burst {burst.number}, {burst.model}")
