"""Multi-stage compilation: a device serves a quick plan first, and a better one as soon as that is made.

The better one is made in one thread, while the quick one serves. Requests that are bound to
the quick one run to their end there; the next ones are bound anew. None is lost, none runs twice.
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
    """Those of one device, one at a time."""

    def __init__(self, forget_plans: Callable[[], None]) -> None:
        """`forget_plans`: what is bound is bound anew."""
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
        if shared is None:  # nobody has it any more
            return
        try:
            better = shared.use.run(partial(shared.prepared.improved, pace))
        except Exception:  # noqa: BLE001 (whatever it was, others are still served)
            _log.exception("a model could not be improved; the first compilation stays in use")
            return
        if better is not None:
            shared.improve(better, self._forget_plans)
