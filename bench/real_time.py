"""How late is a stream with real time and without, beside cyclictest and other work?

    python bench/real_time.py [--pairs 5] [--seconds 8] [--period 8] [--busy 2] [--json FILE]

A block of work every 8 ms, as a sound card asks for it, on litert, while `--busy` processes compute. In one row
the burst is as usual, in the next one it is real time, and in the last one its client is, too. A row says when
the result was there, from when the request was due. cyclictest (Debian: rt-tests), in the same round, wakes up as
often, in real time and as an ordinary thread: so late is the machine itself. Needs CAP_SYS_NICE, as root has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from measure import Budget, NotMeasured, Runs, percentiles, progress, scratch
from own_device import own_device
from paced import model
from question import Question, against, median, times
from served_devices import served  # paced has the tests' folder on the path

import driver
from burst.real_time import PRIORITY, why_not
from driver.cli.timing import order_of_round

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from measure import Block

    from driver import Burst

USUAL, DEVICE, BOTH = "burst", "burst, real_time=True", "the same, and its client"
ORDINARY, CYCLIC = "cyclictest, ordinary", "cyclictest, real time"
_BUSY = "while True: pass"


@contextmanager
def in_real_time() -> Iterator[None]:
    """Run this thread so within the block."""
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def block(burst: Burst, args: argparse.Namespace) -> Block:
    """Requests on time, each from when it was due."""
    period = args.period / 1e3
    due, took = time.monotonic(), []
    for _ in range(round(args.seconds / period)):
        due += period
        time.sleep(max(0.0, due - time.monotonic()))
        burst.run()
        took.append((time.monotonic() - due) * 1e9)
    return percentiles(np.array(took))


def cyclictest(args: argparse.Namespace, *how: str) -> Block:
    """The wake-ups of one thread at that pace. Raise NotMeasured."""
    program = shutil.which("cyclictest")
    if program is None:
        raise NotMeasured("cyclictest is missing; install it (Debian: apt install rt-tests)")
    loops = round(args.seconds * 1e3 / args.period)
    with scratch() as folder:
        words = [program, "-q", "-t1", "-i", str(round(args.period * 1e3)), "-l", str(loops), "-h", "20000", *how]
        done = subprocess.run([*words, f"--json={folder / 'found'}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotMeasured(f"cyclictest: {(done.stdout + done.stderr).strip()[-60:]}")
        counts = json.loads((folder / "found").read_text())["thread"]["0"]["histogram"]
    return percentiles(1e3 * np.repeat([int(us) for us in counts], list(counts.values())))


def blocks(stack: ExitStack, args: argparse.Namespace) -> dict[str, Callable[[], Block]]:
    """By name: what runs a block."""
    device = stack.enter_context(own_device("litert"))
    path = stack.enter_context(scratch())
    stack.enter_context(served(path / "run", "--real-time", device="litert"))
    real = stack.enter_context(driver.connect(str(path / "run/litert.sock"), real_time=True))
    bursts = []
    for each in (device, real):
        bursts.append(stack.enter_context(stack.enter_context(each.prepare(model())).burst()))
        bursts[-1].run()

    def both() -> Block:
        with in_real_time():
            return block(bursts[1], args)

    return {
        USUAL: partial(block, bursts[0], args),
        DEVICE: partial(block, bursts[1], args),
        BOTH: both,
        ORDINARY: partial(cyclictest, args, "--policy=other"),
        CYCLIC: partial(cyclictest, args, f"-p{PRIORITY}"),
    }


def measure(args: argparse.Namespace) -> Runs:
    """All rounds. Raise SystemExit where nothing may be real time."""
    if why := why_not():
        sys.exit(f"real_time.py: {why}")
    runs = Runs()
    with ExitStack() as stack:
        found = blocks(stack, args)
        for _ in range(args.busy):
            stack.callback(subprocess.Popen([sys.executable, "-c", _BUSY]).kill)
        for number in range(args.pairs):
            for name in order_of_round(list(found), number):
                runs.attempt(name, found[name], f"round {number + 1} of {args.pairs}")
    progress("")
    return runs


P99, P999 = against(USUAL, "p99_us"), against(USUAL, "p999_us")


def budgets(runs: Runs, _: argparse.Namespace) -> list[Budget]:
    """Return what real time is for."""
    return [
        Budget("p99.9 in real time, of that without", P999(runs, BOTH), 1.0),
        Budget("p99.9 in real time, of cyclictest's", against(CYCLIC, "p999_us")(runs, BOTH), 3.0),
    ]


REAL_TIME = Question(
    __doc__,
    measure,
    {
        "p50 us": median("p50_us", ".0f"),
        "p99 us": median("p99_us", ".0f"),
        "p99.9 us": median("p999_us", ".0f"),
        "max us": median("max_us", ".0f"),
        "p99 x burst": times(P99, USUAL),
        "p99.9 x burst": times(P999, USUAL),
    },
    options={
        "--seconds": {"type": float, "default": 8, "help": "for one block (default 8)"},
        "--period": {"type": float, "default": 8, "help": "milliseconds (default 8)"},
        "--busy": {"type": int, "default": 2, "help": "processes that compute beside it (default 2)"},
    },
    budgets=budgets,
    figures=("p50_us", "p99_us", "p999_us", "max_us"),
    estimates={"p99_x": P99, "p999_x": P999},
    ours=[USUAL, DEVICE, BOTH],
    pairs=5,
    is_pinned=False,
)

if __name__ == "__main__":
    REAL_TIME.answer()
