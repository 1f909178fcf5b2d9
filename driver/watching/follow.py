"""Following bursts: each is looked at before its trace, which holds the last 256 requests, has forgotten any."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from burst._core import lib

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from driver.watching.watched import WatchedBurst
    from driver.watching.watcher import Watcher

_SOONEST, _LATEST = 0.5e-3, 50e-3  # seconds between two looks at a burst
_FRESH = lib.BURST_RECORDS / 4  # requests that are worth a look
_FIND_EVERY = 0.5


@dataclass(slots=True)
class Followed:
    """One burst from a moment on."""

    burst: WatchedBurst
    last: int  #: id of the last request that was seen, or missed
    missed: int = 0
    due: float = 0.0  #: of the next look
    _pause: float = _SOONEST
    _found: list[NDArray[Any]] = field(default_factory=list)

    @property
    def records(self) -> NDArray[Any]:
        """Of all requests that were seen, in their order."""
        return np.concatenate(self._found) if self._found else self.burst.trace.records()[:0]

    def look(self, now: float) -> None:
        """Notes what came, and when to look again."""
        before = self.last
        if int(self.burst.trace.page.client.results) > before:
            self._note()
        fresh = self.last - before
        if fresh > _FRESH:
            self._pause *= max(0.1, _FRESH / fresh)
        elif fresh < _FRESH / 2:
            self._pause *= 1.5
        self._pause = min(_LATEST, max(_SOONEST, self._pause))
        self.due = now + self._pause

    def _note(self) -> None:
        """What is not whole though later ones are has been overwritten by those."""
        records = self.burst.trace.records()
        new = records[records["id"] > self.last]
        if len(new):
            newest = int(new["id"][-1])
            self.missed += newest - self.last - len(new)
            self.last = newest
            self._found.append(new)


def follow(watcher: Watcher, seconds: float, wanted: Callable[[WatchedBurst], bool]) -> list[Followed]:
    """All bursts that are wanted, also those that begin meanwhile. Ctrl-C ends it early, with what there is."""
    followed: dict[WatchedBurst, Followed] = {}
    _find(watcher, wanted, followed, is_first=True)
    end, find_at = time.monotonic() + seconds, time.monotonic() + _FIND_EVERY
    try:
        while (now := time.monotonic()) < end:
            if now >= find_at:
                _find(watcher, wanted, followed, is_first=False)
                find_at = now + _FIND_EVERY
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
) -> None:
    """Of those that are there at first, what comes from now on; of those that begin later, all."""
    watcher.refresh()
    for device in watcher.devices:
        for burst in device.bursts.values():
            if burst not in followed and wanted(burst):
                seen = int(burst.trace.page.client.results) if is_first else 0
                followed[burst] = Followed(burst, seen)
