"""Brings a model back to its device after that died, while the CPU executes in its place.

One thread, only while the CPU does: it connects the device, which is started if need be, and prepares the model there.
It waits twice as long after each failure, up to `LONGEST_WAIT`; also after a device that dies again soon after it came
back. It ends with the model: when that is closed, or when its last reference is gone.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from burst import Quarantined
from driver.client.session import FAILURES
from driver.errors import DriverError

if TYPE_CHECKING:
    from driver.client.remote_executor import RemoteExecutor

FIRST_WAIT, LONGEST_WAIT = 0.1, 30.0  # seconds

_log = logging.getLogger("driver.runtime")


class Displaced(Protocol):
    """An owner of a model that comes back."""

    def come_back(self) -> None:
        """Take the model back: its device is there, and has prepared it. Called by the thread that brought it back."""


class Comeback:
    """The return of one model to one device.

    Safe from any thread; the caller begins it only while it is not going on.
    """

    def __init__(self, owner: Displaced, prepared: RemoteExecutor) -> None:
        self._ended = ended = threading.Event()
        self._owner, self._prepared = weakref.ref(owner, lambda _: ended.set()), prepared
        self._wait, self._came_back = FIRST_WAIT, time.monotonic()

    def begin(self) -> None:
        """Begin: the device has died."""
        if time.monotonic() - self._came_back > LONGEST_WAIT:
            self._wait = FIRST_WAIT
        threading.Thread(target=self._bring_back, name="burst-comeback", daemon=True).start()

    def end(self) -> None:
        """Give up: the model is closed."""
        self._ended.set()

    def _bring_back(self) -> None:
        prepared, dead = self._prepared, self._prepared.home.connection
        while not self._ended.wait(self._wait):
            self._wait = min(2 * self._wait, LONGEST_WAIT)
            try:
                prepared.check_quarantine()
                prepared.device.revive(dead, patience=0)
                dead = prepared.device.connection  # should it die, too, before the model is prepared
                prepared.present_home()
            except Quarantined:
                return
            except (*FAILURES, DriverError, OSError) as error:
                if prepared.device.is_closed:
                    return
                _log.info("device %r is not back yet: %s", prepared.device.address, error)
                continue
            self._came_back, owner = time.monotonic(), self._owner()
            if owner is not None and not self._ended.is_set():
                owner.come_back()
            return
