"""The figures of `burst.stats()`, and its trace: how many requests a burst has done, and where the time went.

runs: by the path they took. drops: requests that were cancelled, refused or replaced by newer ones. copied_bytes: bulk
data, which is what `run(*arrays)` copied for its caller (arrays in `inputs` are not copied), and what the device copied
because of where it lay; control is packets, and operands that a device looks at in private memory. stages:
microseconds of the last 256 requests in each stage (`burst.trace.STAGES` says what they are), median and 99th
percentile. cpu_seconds: of the client, in calls and not asleep; of the device, its listener thread's, None where the
kernel does not tell. seconds, if the burst measures: in all, in the driver, and of that on the device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from burst import Controller, Timing, Trace


class Statistics:
    """The counts that Python keeps; the others are in the burst's trace."""

    def __init__(self) -> None:
        self.plain = self.copied = self.copied_ready = self.drops = self.recoveries = 0
        self._earlier = np.zeros(7, np.int64)  # of controllers that were replaced
        self._on_device = self._in_driver = 0

    def note(self, timing: Timing) -> None:
        """Add the times of one result, if it has any."""
        if timing.time_in_driver is not None:
            self._on_device += timing.time_on_device or 0
            self._in_driver += timing.time_in_driver

    def note_drop(self, trace: Trace) -> None:
        """Count a request that was cancelled, refused or replaced; readers of the trace see it, too."""
        self.drops += 1
        self.tell(trace)

    def note_plain(self, trace: Trace) -> None:
        """Count a request that was executed on the plain path."""
        self.plain += 1
        self.tell(trace)

    def tell(self, trace: Trace) -> None:
        """Write what Python counts into the trace."""
        trace.page.client.drops, trace.page.client.plain = self.drops, self.plain

    def retire(self, controller: Controller) -> None:
        """Keep the counts of a controller whose place another one takes."""
        self._earlier += _totals(controller)

    def report(self, controller: Controller, in_flight: int, measure: bool) -> dict[str, Any]:
        """Return the figures of `burst.stats()`."""
        totals = self._earlier + _totals(controller)
        results, timeouts, sent, control, copied, busy_ns, total_ns = (int(n) for n in totals)
        seconds = {"in_driver": self._in_driver / 1e6, "on_device": self._on_device / 1e6}
        stages = controller.trace.stages()
        return {
            "runs": {"burst": results, "plain": self.plain},
            "in_flight": in_flight,
            "timeouts": timeouts,
            "drops": self.drops,
            "recoveries": self.recoveries,
            "memories_sent": sent,
            "copied_bytes": {"bulk": self.copied + self.copied_ready + copied, "control": control},
            "stages": {name: spread(ns) for name, ns in stages.items()},
            "cpu_seconds": {"client": busy_ns / 1e9, "device": cpu_of_listener(controller.trace)},
            "seconds": {"total": total_ns / 1e9, **seconds} if measure else None,
        }


def write_timeline(path: str, events: list[dict[str, Any]]) -> int:
    """Write these events as `burst.trace(path)` does; return how many requests they show."""
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
    return sum(event["name"] == "request" for event in events)


def spread(ns: Any) -> dict[str, float] | None:
    """Return median and 99th percentile, in microseconds; None of nothing."""
    if not len(ns):
        return None
    p50, p99 = np.percentile(ns, [50, 99]) / 1e3
    return {"p50": float(p50), "p99": float(p99)}


def _totals(controller: Controller) -> Any:
    client, device = controller.trace.page.client, controller.trace.page.device
    busy = client.busy_ns - client.asleep_ns
    shared = [client.results, client.timeouts, controller.memories_sent, controller.control_bytes + device.checked]
    return np.array([*shared, device.copied, max(busy, 0), client.total_ns])


def cpu_of_listener(trace: Trace) -> float | None:
    """Return the seconds that this burst's thread in the device has computed; None: the kernel does not tell."""
    device = trace.page.device
    try:
        return int(Path(f"/proc/{device.pid}/task/{device.tid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
