"""What does a burst give back when it rests, and what does its first request after that cost?

    python bench/idle_cost.py [--pairs N] [--json FILE] [--plot FILE]

Two devices of each kind have the same model: one rests after a quarter of a second without a request, the other never.
In each round both bursts run back to back, pause for so long that the one has let go, and then take one request: the
first after the pause. A pause costs something anyway, because processors sleep and caches cool down; what the rest adds
is the difference. Memory is what the engine has resident, beyond what it had before its first request.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np
from burst_roundtrip import add_model
from measure import Runs, held, percentiles, progress, scratch
from models import feeds_of, mobilenet
from own_device import own_device
from question import Question, median, times

import driver
from driver.cli.timing import estimate, time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from driver import Model, RemoteDevice
    from driver.cli.timing import Estimate
    from driver.client.burst import Burst

SECONDS, NEVER = 0.25, 3600
RESTING, KEEPING = "resting", "keeping"
WARM = 20  # requests back to back


def wide_model() -> Model:
    """Four temporaries of 16 MB each."""
    builder = driver.ModelBuilder()
    x = builder.operation("TILE", builder.input("float32", (1,)), np.array([1 << 22], np.int32))
    for _ in range(3):
        x = builder.operation("ADD", x, x, 0)
    builder.output(builder.operation("SLICE", x, np.array([0], np.int32), np.array([1], np.int32)))
    return builder.build()


MODELS: dict[str, tuple[str, Callable[[], Model]]] = {
    "reference: ADD of 4 floats": ("reference", add_model),
    "reference: temporaries of 16 MB": ("reference", wide_model),
    "reference: MobileNetV1 0.25, 128 pixels": ("reference", lambda: mobilenet("float32", 0.25, 128)),
    "litert: MobileNetV1 1.0, 224 pixels": ("litert", lambda: mobilenet("float32")),
}


@contextmanager
def device_that(name: str, seconds: float) -> Iterator[RemoteDevice]:
    """One of its own, which rests after so many seconds."""
    before = os.environ.get("HOME", "/")
    with scratch() as home:
        folder = home / ".config/burst"
        folder.mkdir(parents=True)
        (folder / "limits.toml").write_text(f"idle_seconds = {seconds}\n")
        os.environ["HOME"] = str(home)
        try:
            with own_device(name) as device:
                os.environ["HOME"] = before
                yield device
        finally:
            os.environ["HOME"] = before


class Side:
    """A burst on one of the devices."""

    def __init__(self, device: RemoteDevice, model: Model, stack: ExitStack) -> None:
        prepared = stack.enter_context(device.prepare(model))
        self.pid, self.empty = device.engine_pid, held(device.engine_pid)["resident_kib"]
        self.burst: Burst = stack.enter_context(prepared.burst())
        for place, feed in zip(self.burst.inputs, feeds_of(model), strict=True):
            place[...] = feed

    def megabytes(self) -> float:
        """More than before the first request."""
        return (held(self.pid)["resident_kib"] - self.empty) / 1024


def round_of(runs: Runs, name: str, sides: dict[str, Side]) -> None:
    """Both: warm, a pause, the first request, and what they have before and after the pause."""
    found: dict[str, float] = {}
    for who, side in sides.items():
        found[f"{who}_warm_us"] = percentiles(time_calls(side.burst.run, WARM))["p50_us"]
        found[f"{who}_busy_mb"] = side.megabytes()
    time.sleep(4 * SECONDS)
    for who, side in sides.items():
        found[f"{who}_paused_mb"] = side.megabytes()
        found[f"{who}_first_us"] = percentiles(time_calls(side.burst.run, 1))["p50_us"]
    runs.add(name, found)


def measure(args: argparse.Namespace) -> Runs:
    """All rounds of all models; who is asked first changes from round to round."""
    runs = Runs()
    for name, (kind, build) in MODELS.items():
        with ExitStack() as stack:
            devices = {
                who: stack.enter_context(device_that(kind, seconds))
                for who, seconds in ((RESTING, SECONDS), (KEEPING, NEVER))
            }
            model = build()
            sides = {who: Side(device, model, stack) for who, device in devices.items()}
            for number in range(args.pairs):
                progress(f"round {number + 1} of {args.pairs}", name)
                round_of(runs, name, dict([*sides.items()][:: -1 if number % 2 else 1]))
    progress("")
    return runs


def added(runs: Runs, name: str) -> Estimate:
    """What a rest adds to the first request after a pause."""
    return estimate(runs.values(name, f"{RESTING}_first_us") - runs.values(name, f"{KEEPING}_first_us"))


REST = Question(
    __doc__,
    measure,
    {
        "warm, us": median(f"{RESTING}_warm_us", ".1f"),
        "first, kept, us": median(f"{KEEPING}_first_us", ".1f"),
        "first, rested, us": median(f"{RESTING}_first_us", ".1f"),
        "held, MB": median(f"{RESTING}_busy_mb", ".1f"),
        "rested, MB": median(f"{RESTING}_paused_mb", ".1f"),
        "rest adds, us": times(added),
    },
    group=lambda _: "burst",
    figures=(f"{RESTING}_first_us",),
    bars=(f"{RESTING}_first_us", "first request after a rest, us"),
    is_pinned=False,
)

if __name__ == "__main__":
    REST.answer()
