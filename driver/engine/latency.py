"""What an open burst promises, requests that follow each other soon, and what the machine does for that meanwhile.

While a burst lives whose model was not prepared for "low_power":

* idle states: processors enter none that takes longer than MOST_LATENCY to leave (PM QoS), where this account may open
  the device file. It holds for the whole machine;
* clock: the thread that serves it is clamped to full utilisation (driver/engine/utilisation.py), and so is the one that
  prepares such a model, with the threads that the driver starts for it;
* arenas: free memory of the C library stays the process's; a client's idle plans are dropped all the same.

The first and the last are given once, whatever the number of bursts, end with the last of them, and with the process.
Where the kernel or the account may not, the debug log says so, once, and `burst doctor` beforehand.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from driver.engine import utilisation
from driver.engine.landlock import Access

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from driver.options import Preference

_log = logging.getLogger(__name__)
DEVICE_FILE = Path("/dev/cpu_dma_latency")
KEPT = {DEVICE_FILE: Access.READ_FILE | Access.WRITE_FILE}
"""What the engine, and the process that forks it, keep in the sandbox for that."""

MOST_LATENCY = 2
"""Microseconds to leave the first idle state (C1, WFI); the next ones take 10 to 1000. With 0 idle processors poll."""

PARTS = frozenset({"idle states", "clock", "arenas"})
"""What is given."""


@contextmanager
def shallow_idle(file: Path) -> Iterator[None]:
    """Keep processors out of deep idle states within the block. Raise OSError."""
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)  # a request that asks for nothing yet, and ends when it is closed
    try:
        os.write(fd, struct.pack("i", MOST_LATENCY))
        yield
    finally:
        os.close(fd)


class LatencyHint:
    """The hint of an engine's bursts: given while one of them lives. Any thread."""

    def __init__(self, file: Path = DEVICE_FILE, parts: frozenset[str] = PARTS) -> None:
        """`parts`: what is given; the bench takes parts away."""
        self._lock, self._bursts = threading.Lock(), 0
        self._given, self._failed = ExitStack(), set[str]()
        self._file, self._parts = file, parts

    @property
    def keeps_arenas(self) -> bool:
        """True while the C library's free memory is not given back."""
        return self._bursts > 0 and "arenas" in self._parts

    @contextmanager
    def around(self, preference: Preference) -> Iterator[None]:
        """Clamp the thread that serves a burst of this preference, or prepares for it, within the block."""
        with ExitStack() as given:
            if preference != "low_power":
                self._give("clock", utilisation.clamped, given)
            yield

    def began(self, preference: Preference) -> None:
        """Note that a burst has begun. The first one waits until the hint is given."""
        if preference == "low_power":
            return
        with self._lock:
            self._bursts += 1
            if self._bursts == 1:
                self._give("idle states", partial(shallow_idle, self._file), self._given)

    def _give(self, part: str, way: Callable[[], AbstractContextManager[None]], until: ExitStack) -> None:
        try:
            if part in self._parts:
                until.enter_context(way())
        except OSError as error:
            if part not in self._failed:
                self._failed.add(part)
                _log.debug("open bursts change nothing about the %s: %s", part, error)

    def ended(self, preference: Preference) -> bool:
        """Note that a burst has ended. Return True if it was the last one: what it was given is taken back."""
        if preference == "low_power":
            return False
        with self._lock:
            self._bursts -= 1
            if self._bursts:
                return False
            self._given.close()
            return True
