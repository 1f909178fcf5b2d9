"""The plans of one way of requests into a device, by what requests are recognised by."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fmq import clock

if TYPE_CHECKING:
    from burst.executor import Plan

MAX_PLANS = 128
"""Different requests that are bound at a time: one more takes the place of the one used longest ago."""


class PlanCache:
    """A cache of plans. Any thread may use it.

    What a plan holds is never freed under the cache's lock.
    """

    def __init__(self) -> None:
        self.plans: dict[bytes, Plan] = {}  #: which threads in C look at, and none changes without the lock
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.plans)

    def find(self, key: bytes) -> Plan | None:
        """Return the plan of that request, which is used now."""
        plan = self.plans.get(key)
        if plan is not None:
            plan.last_use = clock.now()
        return plan

    def keep(self, key: bytes, plan: Plan) -> list[Plan | None]:
        """Add a plan, and return those that go, such as another one of that request: to be freed without a lock."""
        plan.last_use = clock.now()
        with self._lock:
            gone = [self.plans.pop(key, None)]
            if len(self.plans) >= MAX_PLANS:
                gone.append(self.plans.pop(min(self.plans, key=lambda other: self.plans[other].last_use)))
            self.plans[key] = plan
        return gone

    def forget(self, slots: frozenset[int] | None) -> None:
        """Drop the plans that use one of these slots; None: all."""
        with self._lock:
            keys = [key for key, plan in self.plans.items() if slots is None or plan.slots & slots]
            gone = [self.plans.pop(key) for key in keys]
        del gone

    def drop(self, plan: Plan) -> None:
        """Drop this one, if it is there."""
        with self._lock:
            for key in [key for key, other in self.plans.items() if other is plan]:
                del self.plans[key]

    def cancel(self) -> None:
        """End the runs of all plans, as far as they can be ended."""
        with self._lock:
            plans = list(self.plans.values())
        for plan in plans:
            plan.cancel()
