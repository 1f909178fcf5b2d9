"""Watches running devices and their bursts from outside: only reads shared memory, and wakes no process."""

from driver.watching.device import WatchedBurst, accounts_of
from driver.watching.figures import AccountFigures, BurstFigures, DeviceFigures, GpuFigures, Queue, Sample, Spread
from driver.watching.follow import Followed, events, follow, write
from driver.watching.gpus import GpuReader
from driver.watching.watcher import Watcher

__all__ = [
    "AccountFigures",
    "BurstFigures",
    "DeviceFigures",
    "Followed",
    "GpuFigures",
    "GpuReader",
    "Queue",
    "Sample",
    "Spread",
    "WatchedBurst",
    "Watcher",
    "accounts_of",
    "events",
    "follow",
    "write",
]
