"""Watches running devices and their bursts from outside: only reads shared memory, and wakes no process."""

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
