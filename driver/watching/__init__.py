"""Looking at devices that run, and at their bursts, from outside: shared memory is read, and nobody wakes."""

from driver.watching.device import WatchedBurst
from driver.watching.figures import BurstFigures, DeviceFigures, Queue, Sample, Spread
from driver.watching.follow import Followed, events, follow, write
from driver.watching.watcher import Watcher

__all__ = [
    "BurstFigures",
    "DeviceFigures",
    "Followed",
    "Queue",
    "Sample",
    "Spread",
    "WatchedBurst",
    "Watcher",
    "events",
    "follow",
    "write",
]
