"""The plans of one way of requests into a device, by what requests are recognised by."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burst.executor import Plan

MAX_PLANS = 128
"""Different requests that are bound at a time: one more takes the place of the one used longest ago."""


class PlanCache:
    """A cache of plans. Any thread may use it.

    What a plan holds is never freed under the cache's lock.
    """

    def __init__(self) -> None:
        self._plans: dict[bytes, Plan] = {}  # the last one was used last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, key: bytes) -> Plan | None:
        """Return the plan of that request, which is used now."""
        with self._lock:
            plan = self._plans.pop(key, None)
            if plan is not None:
                self._plans[key] = plan
            return plan

    def keep(self, key: bytes, plan: Plan) -> list[Plan | None]:
        """Add a plan, and return those that go, such as another one of that request: to be freed without a lock."""
        with self._lock:
            gone = [self._plans.pop(key, None)]
            if len(self._plans) >= MAX_PLANS:
                gone.append(self._plans.pop(next(iter(self._plans))))
            self._plans[key] = plan
        return gone

    def forget(self, slots: frozenset[int] | None) -> None:
        """Drop the plans that use one of these slots; None: all."""
        with self._lock:
            before = self._plans
            self._plans = {} if slots is None else {key: p for key, p in before.items() if not p.slots & slots}
        del before

    def drop(self, plan: Plan) -> None:
        """Drop this one, if it is there."""
        with self._lock:
            self._plans = {key: other for key, other in self._plans.items() if other is not plan}

    def cancel(self) -> None:
        """End the runs of all plans, as far as they can be ended."""
        with self._lock:
            plans = list(self._plans.values())
        for plan in plans:
            plan.cancel()
