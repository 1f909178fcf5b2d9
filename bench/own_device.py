"""A device of the bench's own: nobody else's work is in the figures, and nobody else's device is pinned."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from measure import DEVICE_CPU, scratch

import driver

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def own_device() -> Iterator[driver.RemoteDevice]:
    """`driver.connect()` in a runtime directory of its own; both processes end with the block."""
    with scratch() as directory:
        os.environ["BURST_RUNTIME_DIR"] = str(directory)
        device = driver.connect()
        try:
            yield device
        finally:
            device.close()
            with suppress(ProcessLookupError):
                os.kill(device.service_pid, signal.SIGTERM)  # the engine ends with it


def pin(device: driver.RemoteDevice) -> None:
    """Every thread of both processes on the device's CPU. Threads inherit it, but call again when some were started."""
    for pid in (device.service_pid, device.engine_pid):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), {DEVICE_CPU})
