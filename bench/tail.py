"""How late are the latest frames of a stream, beside the same work in process and a timer of the same minute, and why?

    python bench/tail.py [--hz 125] [--work 500] [--frames 1500] [--pairs 6] [--json FILE]

A block of sound every 8 ms: the client sleeps until a frame is due, and then runs it, in turns a frame on a burst and
the same work in its own process (native_device.py: as many microseconds of arithmetic as the first input says). "Timer"
is how late these sleeps ended, of the same frames: what cyclictest measures, with Python's own cost. Nothing is pinned.
After the rounds the stream goes on once more, beside `burst trace`, which says why frames came late; that one is not
in the rows. A virtual machine's tail is its host's: a tail says something beside the timer's alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from measure import Budget, Runs, ask, percentiles, progress, scratch
from native_device import work_of
from own_device import own_device
from paced import model
from question import Question, against, interval, median, times

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from numpy.typing import NDArray

    from driver import Burst

TIMER, OWN, BURST = "timer", "in process", "burst"
MOST = 1.5  # of the tail, over that in process


def frames_of(calls: tuple[Callable[[], object], ...], hz: float, count: int) -> NDArray[np.float64]:
    """Nanoseconds: of each frame, how late it began, and how long each call took; the calls take turns."""
    found, at = np.zeros((count, 1 + len(calls))), time.monotonic_ns()
    for frame in range(count):
        for which, call in enumerate(calls):
            at += int(1e9 / hz)
            time.sleep(max(0, at - time.monotonic_ns()) / 1e9)
            begin = time.monotonic_ns()
            call()
            found[frame, 1 + which] = time.monotonic_ns() - begin
            found[frame, 0] = max(found[frame, 0], begin - at)
    return found


def why_late(burst: Burst, address: str, seconds: float, hz: float) -> dict[str, int]:
    """What `burst trace` says of a stream that goes on for so long."""
    with ExitStack() as stack:
        words = "trace", address, "--seconds", f"{seconds:g}", "--json", "-o"
        command = [sys.executable, "-m", "driver.cli", *words, str(stack.enter_context(scratch()) / "trace.json")]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        while process.poll() is None:
            frames_of((burst.run,), hz, max(1, int(hz / 4)))
        assert process.stdout
        found: dict[str, int] = json.loads(process.stdout.read())["bursts"][0]["late"]
    return found


def run(args: argparse.Namespace) -> Runs:
    """All rounds, and then why."""
    runs = Runs()
    with ExitStack() as stack:
        device = stack.enter_context(own_device("native_device:Spinning"))
        burst = stack.enter_context(stack.enter_context(device.prepare(model())).burst())
        for array, value in zip(burst.inputs, (args.work, 0), strict=True):
            array[:] = value
        calls = burst.run, work_of(args.work)
        frames_of(calls, args.hz, 20)
        for number in range(args.pairs):
            progress(f"round {number + 1} of {args.pairs}")
            found = frames_of(calls, args.hz, args.frames)
            for name, column in zip((TIMER, BURST, OWN), found.T, strict=True):
                runs.add(name, percentiles(column))
        progress("why frames are late")
        args.late = why_late(burst, "native_device:Spinning", 2 * args.frames / args.hz, args.hz)
    progress("")
    return runs


def more(_: Runs, args: argparse.Namespace) -> list[tuple[list[tuple[str, ...]], tuple[str, ...]]]:
    """The sources that `burst trace` has named."""
    rows: list[tuple[str, ...]] = [(source, str(count)) for source, count in args.late.items()]
    return [(rows or [("no frame was late", "0")], ("what a late frame had lost its time to", "frames"))]


P99_TO_OWN, P999_TO_OWN = against(OWN, "p99_us"), against(OWN, "p999_us")


def budgets(runs: Runs, _: argparse.Namespace) -> list[Budget]:
    """The tail of a stream is not much longer than it is without us."""
    return [
        Budget(f"p99 <= {MOST} x in process", P99_TO_OWN(runs, BURST), MOST),
        Budget(f"p99.9 <= {MOST} x in process", P999_TO_OWN(runs, BURST), MOST),
    ]


def settle(args: argparse.Namespace) -> None:
    """Few frames where nothing is measured."""
    if args.quick:
        args.frames, args.hz = 60, 250


TAIL = Question(
    __doc__,
    run,
    {
        "p50 us": median("p50_us", ".0f"),
        "p99 us": interval("p99_us"),
        "p99.9 us": interval("p999_us"),
        "worst us": median("max_us", ".0f"),
        "p99 x in process": times(P99_TO_OWN, TIMER, OWN),
        "p99.9 x in process": times(P999_TO_OWN, TIMER, OWN),
    },
    options={
        "--hz": {"type": float, "default": 125, "help": "frames a second, of both ways together (default 125)"},
        "--work": {"type": float, "default": 500, "metavar": "US", "help": "microseconds of work (default 500)"},
        "--frames": {"type": int, "default": 1500, "help": "of each way in a round (default 1500)"},
    },
    settle=settle,
    budgets=budgets,
    more=more,
    kept=("hz", "work", "late"),
    figures=("p50_us", "p99_us", "p999_us", "max_us"),
    ours=(BURST,),
    bars=("p999_us", "us"),
    pairs=6,
    is_pinned=False,
)

if __name__ == "__main__":
    ask({"": TAIL.answer})
