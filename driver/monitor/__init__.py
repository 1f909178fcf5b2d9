"""Watches running devices and their bursts from outside: only reads shared memory, and wakes no process."""

from driver.monitor.device import WatchedBurst, accounts_of
from driver.monitor.figures import AccountFigures, BurstFigures, DeviceFigures, GpuFigures, Queue, Sample, Spread
from driver.monitor.follow import Followed, events, follow, write
from driver.monitor.gpus import GpuReader
from driver.monitor.watcher import Watcher

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
