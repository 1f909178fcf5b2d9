"""Programs that keep the stream's device busy: each a process of its own that detects in one frame again and again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any, cast

import burst
import driver
from driver.demos.camera import connected

SIZE = 1280, 720
AGAIN = 0.5  # seconds until what failed is tried again


class Rivals:
    """A number of rivals on that device, with that priority."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._where: tuple[str, str] | None = None

    def want(self, count: int, device: str, priority: str) -> None:
        """Start or end some, without waiting for any of them."""
        self._processes = [process for process in self._processes if process.poll() is None]
        if self._where != (device, priority):
            self._end(0)
            self._where = device, priority
        self._end(count)
        while len(self._processes) < count:
            command = [sys.executable, "-m", __name__, device, priority]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))

    def _end(self, count: int) -> None:
        """End some until there are no more than that."""
        while len(self._processes) > count:
            process = self._processes.pop()
            process.kill()
            process.communicate()

    def close(self) -> None:
        """End all of them."""
        self._end(0)


def compete(device: str, priority: str) -> None:
    """Keep the device busy until standard input ends; go on after the death of the device."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        with (
            suppress(burst.BurstError, driver.DriverError),
            connected(device, SIZE, cast("Any", priority), recover=True) as detector,
        ):
            while True:
                detector.fast.run().raise_for_status()
        time.sleep(AGAIN)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    compete(*sys.argv[1:])
