"""Hints that a device's driver gets: that bursts open and end on a model, and that nothing has run for a while.

A hint is a courtesy, so nothing depends on it: what the driver raises is logged, once for each kind of hint.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.interface import PreparedModel
    from driver.options import Preference

_log = logging.getLogger(__name__)


class Hints:
    """A giver of hints to the driver of one device. Any thread."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._logged: set[str] = set()

    def give(self, what: str, hint: Callable[[], object]) -> None:
        """Call `hint`, the driver's function of the name `what`."""
        try:
            hint()
        except BaseException:  # noqa: BLE001 (whatever it is, the client's burst goes on, and so does this thread)
            if what not in self._logged:
                self._logged.add(what)
                words = "the driver %r failed in the hint %s; it is not said again when it does"
                _log.exception(words, self._driver, what)


class BurstHints:
    """A counter of the bursts on a prepared model, which tells it of them, and a better model that replaces it.

    Each model hears `burst_ended` as often as `burst_began`, never first.
    """

    def __init__(self, prepared: PreparedModel, preference: Preference, hints: Hints) -> None:
        self._prepared, self.preference, self._hints = prepared, preference, hints
        self._open, self._lock = 0, threading.Lock()

    def began(self) -> None:
        """Tell that a burst opens."""
        with self._lock:
            self._open += 1
            self._tell_began(self._prepared)

    def ended(self) -> None:
        """Tell that one of them has ended."""
        with self._lock:
            self._open -= 1
            self._tell_ended(self._prepared)

    def move(self, better: PreparedModel) -> None:
        """Tell a better model, which replaces the present one, of the bursts that are open."""
        with self._lock:
            before, self._prepared = self._prepared, better
            for _ in range(self._open):
                self._tell_began(better)
                self._tell_ended(before)

    def _tell_began(self, prepared: PreparedModel) -> None:
        self._hints.give("burst_began", lambda: prepared.burst_began(self.preference))

    def _tell_ended(self, prepared: PreparedModel) -> None:
        self._hints.give("burst_ended", prepared.burst_ended)
