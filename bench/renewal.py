"""What does the renewal of an engine cost the requests that go on meanwhile?

    python bench/renewal.py [--pairs N] [--json FILE] [--plot FILE]

A burst runs back to back for some seconds; then the device is asked to renew itself, and the burst runs on until it has
gone over to the second engine, and a little longer. The slowest in a thousand of both stretches are compared, and how
many requests of the second one are slower than the slowest in a hundred of the first: one in a hundred, if a renewal
costs nothing.

Then it runs 30 times a second, as for a camera: a minute without a renewal, and a minute with one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from idle_cost import MODELS
from measure import Budget, Runs, progress
from models import feeds_of
from own_device import own_device
from question import Question, interval, median

from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.cli.timing import Estimate
    from driver.client.burst import Burst

SECONDS, AFTER = 5.0, 0.3  # before the renewal is asked for; after the burst has gone over
MODEL_NAMES = ["reference: ADD of 4 floats", "litert: MobileNetV1 1.0, 224 pixels"]
PACED, MINUTE = ", 30 a second", 60.0
NAMES = [name + pace for pace in ("", PACED) for name in MODEL_NAMES]


def latencies(burst: Burst, is_over: Callable[[], bool], pause: float = 0.0) -> NDArray[np.float64]:
    """Of requests every `pause` seconds, or back to back, in us."""
    found, due = [], time.monotonic()
    while not is_over():
        if pause:
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))
        begin = time.perf_counter_ns()
        burst.run()
        found.append(time.perf_counter_ns() - begin)
    return np.array(found) / 1e3


def round_of(runs: Runs, name: str) -> None:
    """One device of its own, and one renewal."""
    kind, build = MODELS[name.removesuffix(PACED)]
    pause, seconds = (1 / 30, MINUTE) if name.endswith(PACED) else (0.0, SECONDS)
    model = build()
    with own_device(kind) as device, device.prepare(model) as prepared, prepared.burst() as burst:
        for place, feed in zip(burst.inputs, feeds_of(model), strict=True):
            place[...] = feed
        burst.run()
        end = time.monotonic() + seconds
        before = latencies(burst, lambda: time.monotonic() > end, pause)
        first, asked = device.connection, time.monotonic()
        first.call("renew", "bench")
        gone: list[float] = []

        def is_over() -> bool:
            if not gone and not burst.source.session.is_at(first):
                gone.append(time.monotonic())
            least = asked + seconds if pause else 0.0
            return bool(gone) and time.monotonic() > max(gone[0] + AFTER, least)

        during = latencies(burst, is_over, pause)
        runs.add(
            name,
            {
                "before_p50_us": float(np.median(before)),
                "before_p999_us": float(np.percentile(before, 99.9)),
                "during_p50_us": float(np.median(during)),
                "during_p999_us": float(np.percentile(during, 99.9)),
                "more_ms": float(np.percentile(during, 99.9) - np.percentile(before, 99.9)) / 1e3,
                "slow_percent": float(100 * np.mean(during > np.percentile(before, 99))),
                "renewal_s": gone[0] - asked,
                "requests": float(len(during)),
            },
        )


def measure(args: argparse.Namespace) -> Runs:
    """All rounds of both models."""
    runs = Runs()
    for number in range(args.pairs):
        for name in NAMES:
            progress(f"round {number + 1} of {args.pairs}", name)
            round_of(runs, name)
    progress("")
    return runs


def budgets(runs: Runs, _: argparse.Namespace) -> Sequence[Budget]:
    """Return what a minute with a renewal may cost a stream."""

    def more(name: str) -> Estimate:
        return estimate(runs.values(name, "more_ms"))

    return [Budget(f"{name}: p99.9 with a renewal, beyond without", more(name), 2.0, "ms") for name in NAMES[2:]]


RENEWAL = Question(
    __doc__,
    measure,
    {
        "p50 us before": median("before_p50_us", ".1f"),
        "p50 us during": median("during_p50_us", ".1f"),
        "p99.9 us before": median("before_p999_us", ".1f"),
        "p99.9 us during": median("during_p999_us", ".1f"),
        "p99.9 more, ms": interval("more_ms"),
        "slower than p99 before, %": interval("slow_percent"),
        "until it has gone over, s": median("renewal_s", ".2f"),
    },
    group=lambda _: "burst",
    figures=("during_p999_us",),
    budgets=budgets,
    bars=("during_p999_us", "slowest in a thousand during a renewal, us"),
    is_pinned=False,
)

if __name__ == "__main__":
    RENEWAL.answer()
