"""A repository for an account that may be idle: its models are loaded for its first request, and given back later."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from driver.gateways.oip.repository import ModelRepository

if TYPE_CHECKING:
    from pathlib import Path

    from driver.gateways.oip.repository import Load


class RestingRepository(ModelRepository):
    """A repository whose models, and with them its clients of the device, are there while requests come. Any thread."""

    def __init__(self, folder: Path, load: Load, looks: int, period: float = 1.0) -> None:
        """Rest after so many looks at the folder without a request. `period`: seconds between two looks."""
        super().__init__(folder, load, period)
        self._looks, self._unused = looks, 0
        self._waking = threading.Lock()  #: held while it wakes, and while it goes to rest

    @property
    def is_ready(self) -> bool:
        """True: a request is answered once the models are there, for which a probe neither waits nor asks."""
        return True

    def wake(self) -> None:
        """Note a request, and load the models if they are not there. It waits for that, as others do."""
        with self._waking:
            self._unused = 0
            if not self.has_begun:
                self.begin()

    def look(self) -> None:
        """Look as a repository does, or give the models back after the last of so many looks."""
        self._unused += 1
        if self._unused <= self._looks or not self.has_begun:
            super().look()
        else:
            self._rest()

    def _rest(self) -> None:
        with self._waking:
            if self._unused <= self._looks:
                return  # a request has come
            self._end.set()
            self.has_begun = False
            with self._lock:
                states, self._states = self._states, {}
        for state in states.values():
            if state.served:
                state.served.close()  # requests that run on it are finished
