"""Multi-stage compilation: a device serves a quick compilation first, and an improved one once that is ready.

The improved one is made in one thread while the quick one serves. Requests that are bound to the quick one finish on
it; later ones are bound anew. No request is lost, and none runs twice.
"""

from __future__ import annotations

import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.engine.models import SharedModel

_log = logging.getLogger(__name__)


class ModelImprover:
    """Improves the models of one device, one at a time."""

    def __init__(self, forget_plans: Callable[[], None]) -> None:
        """`forget_plans`: has all requests bound anew."""
        self._forget_plans, self._lock = forget_plans, threading.Lock()
        self._begun: weakref.WeakSet[SharedModel] = weakref.WeakSet()
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, shared: SharedModel, pace: Callable[[], object]) -> None:
        """In the background, unless it was done, or the device knows nothing better."""
        if not shared.prepared.can_improve:
            return
        with self._lock:
            if shared in self._begun:
                return
            self._begun.add(shared)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, "improvement")
        self._threads.submit(self._improve, weakref.ref(shared), pace)

    def _improve(self, wanted: weakref.ref[SharedModel], pace: Callable[[], object]) -> None:
        shared = wanted()
        if shared is None:  # no client holds it any more
            return
        try:
            better = shared.use.run(partial(shared.prepared.improved, pace))
        except Exception:  # noqa: BLE001 (the thread must go on)
            _log.exception("a model could not be improved; the first compilation stays in use")
            return
        if better is not None:
            shared.improve(better, self._forget_plans)
