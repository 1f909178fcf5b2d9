"""How fast is the reference device's arithmetic: single operations, a whole network, and what stands around them?

    python bench/ops.py
    python bench/ops.py relaxed [--pairs 31] [--json FILE]

    OPENBLAS_NUM_THREADS=1 python bench/ops.py [--pairs 9] [--only CONV_2D ...] [--json FILE] [--plot FILE]

Every operation at a size that networks give it, and MobileNetV1 1.0 for images of 224 x 224, in this process and in one
thread: the interpreter of the reference device (numpy) beside LiteRT with XNNPACK, its default. Inputs and outputs are
in place on both sides; what is timed is the execution alone. Each round runs both, one right after the other, in turns.
Outputs are compared once, before anything is timed.

What the interpreter itself costs is the difference between a chain of additions of 4 floats and the same calls of
np.add written out by hand, for one operation.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import litert
import numpy as np
from interference import chain
from measure import (
    Budget,
    NotMeasured,
    Runs,
    ask,
    block_of,
    progress,
    ratio,
    spell,
)
from models import CASES, feeds_of, mobilenet, single
from question import Question, interval, median

import driver
from driver.cli.timing import Estimate, estimate
from driver.nn import Interpreter
from driver.runtime.capabilities import mobile

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from measure import Block

    from driver import Model

NETWORKS = {f"MobileNetV1 {dtype}": dtype for dtype in ("float32", "quant8")}
CHAIN, BY_HAND = "chain of ADD", "np.add by hand"
CHAIN_HEAD = ("operations of 4 floats", "us", "of them each, ns")
LIMITS = {"MobileNetV1 float32": 2.5, "MobileNetV1 quant8": 3.0}
STEP = 1  # quantised results may differ by so much, floats by TOLERANCE
TOLERANCE = 1e-3


def models(only: list[str] | None) -> dict[str, Model]:
    """What is run on both sides."""
    every = {**CASES, **NETWORKS}
    names = [name for name in every if not only or any(word in name for word in only)]
    return {name: mobilenet(NETWORKS[name]) if name in NETWORKS else single(name) for name in names}


def ours(model: Model, feeds: list[np.ndarray]) -> tuple[Callable[[], Any], Callable[[], np.ndarray]]:
    """The interpreter bound to memory of its own, and what reads output 0."""
    bound = Interpreter(model).bind(feeds)
    return bound.run, lambda: np.array(bound.results[0].data)


def pair(model: Model, milliseconds: float) -> tuple[Callable[[], Block], Callable[[], Block] | None, str]:
    """A block of each side, about so long; for theirs None and the reason where there is none."""
    feeds = feeds_of(model)
    run, read = ours(model, feeds)
    run()
    count = max(3, int(milliseconds * 1e3 / max(1.0, block_of(run, 3)()["p50_us"])))
    try:
        peer, answer = litert.runnable(model, feeds)
        peer()
        compare(read(), answer())
    except NotMeasured as why:
        return block_of(run, count), None, str(why)
    return block_of(run, count), block_of(peer, count), ""


def compare(mine: np.ndarray, theirs: np.ndarray) -> None:
    """Both have to compute the same: anything else is no peer."""
    difference = float(np.abs(mine.astype(np.float64) - theirs.reshape(mine.shape)).max())
    limit = STEP if mine.dtype.itemsize == 1 else TOLERANCE * max(1.0, float(np.abs(mine).max()))
    if not difference <= limit:
        raise NotMeasured(f"computes something else: off by {difference:.3g}")


def by_hand(count: int) -> Callable[[], None]:
    """What a chain of additions does, written out."""
    x, y = np.ones((1, 4), np.float32), np.ones((1, 4), np.float32)
    arrays = [x, *(np.empty((1, 4), np.float32) for _ in range(count))]
    calls = list(pairwise(arrays))

    def run() -> None:
        add = np.add
        for source, result in calls:
            add(source, y, result)

    return run


def measure(args: argparse.Namespace) -> Runs:
    """All rounds of all pairs."""
    runs, blocks = Runs(), {}
    for name, model in models(args.only).items():
        progress("prepares", name)
        mine, theirs, why = pair(model, args.milliseconds)
        blocks[name] = [(name, mine)]
        if theirs is None:
            runs.errors[peer_of(name)] = why
        else:
            blocks[name].append((peer_of(name), theirs))
    if not args.only:
        model = chain(args.operations)
        run = ours(model, feeds_of(model))[0]
        blocks[CHAIN] = [(CHAIN, block_of(run, args.count)), (BY_HAND, block_of(by_hand(args.operations), args.count))]
    for number in range(args.pairs):
        for name in blocks:
            progress(f"round {number + 1} of {args.pairs}", name)
            for side, block in blocks[name][:: -1 if number % 2 else 1]:
                runs.add(side, block())
    progress("")
    return runs


def peer_of(name: str) -> str:
    """The name of LiteRT's side."""
    return f"{name}, LiteRT"


def to_litert(runs: Runs, name: str) -> Estimate | None:
    """Ours to theirs in the same round."""
    return ratio(runs, name, peer_of(name)) if runs.has(name, peer_of(name)) else None


def theirs(runs: Runs, name: str) -> str:
    """Microseconds of LiteRT, or a dash."""
    return f"{np.median(runs.values(peer_of(name))):.1f}" if runs.has(peer_of(name)) else "-"


def compared(runs: Runs, name: str) -> str:
    """Ours to theirs, or why not."""
    return spell(to_litert(runs, name)) if runs.has(peer_of(name)) else runs.errors[peer_of(name)][:60]


def table(runs: Runs, _: argparse.Namespace) -> list[Any]:
    """A line for each that is run on both sides."""
    names = [name for name in (*CASES, *NETWORKS) if runs.has(name)]
    lines = [(name, f"{np.median(runs.values(name)):.1f}", theirs(runs, name), compared(runs, name)) for name in names]
    return [(lines, ("in one thread", "ours, us", "LiteRT, us", "ours to LiteRT"))]


def chain_table(runs: Runs, args: argparse.Namespace) -> list[Any]:
    """What stands around an operation."""
    cost, each = overhead(runs, args.operations), args.operations
    if cost is None:
        return []
    medians = {side: float(np.median(runs.values(side))) for side in (CHAIN, BY_HAND)}
    sides = [(f"{each}: {side}", f"{us:.1f}", f"{us * 1e3 / each:.0f}") for side, us in medians.items()]
    return [([*sides, ("the interpreter itself", "", spell(cost, "ns"))], CHAIN_HEAD)]


def overhead(runs: Runs, operations: int) -> Estimate | None:
    """Nanoseconds that the interpreter takes for one operation besides numpy's call."""
    if not runs.has(CHAIN, BY_HAND):
        return None
    return estimate((runs.values(CHAIN) - runs.values(BY_HAND)) * 1e3 / operations)


def settle(args: argparse.Namespace) -> None:
    """One thread each, and something to run."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        raise ValueError("one thread each: set OPENBLAS_NUM_THREADS=1 before numpy is loaded")
    if not any(not args.only or any(word in name for word in args.only) for name in (*CASES, *NETWORKS)):
        raise ValueError(f"--only {' '.join(args.only)} names nothing; there are {', '.join((*CASES, *NETWORKS))}")
    args.milliseconds, args.operations, args.count = (2.0, 10, 20) if args.quick else (60.0, 100, 500)


ARITHMETIC = Question(
    __doc__,
    measure,
    options={"--only": {"nargs": "+", "metavar": "WORD", "help": "only what has one of these words in its name"}},
    settle=settle,
    budgets=lambda runs, _: [
        Budget(f"{name} <= {limit} x LiteRT", to_litert(runs, name), limit)
        for name, limit in LIMITS.items()
        if runs.has(name)
    ],
    tables=table,
    more=chain_table,
    figures=("p50_us",),
    estimates={"to_litert": to_litert},
    bars=(
        lambda row: row["to_litert"]["median"] if row.get("to_litert") else None,
        "time of ours to LiteRT's, one thread each",
    ),
)

# ---- relaxed


RUNS = 20  # of a block


def dense(*, relaxed: bool, size: int, rows: int) -> driver.Model:
    """Two layers of size x size weights."""
    m, random = driver.ModelBuilder(relaxed=relaxed), np.random.default_rng(1)
    x = m.input("float32", (rows, size))
    for _ in range(2):
        weights = random.standard_normal((size, size), np.float32) / np.float32(size**0.5)
        x = m.operation("FULLY_CONNECTED", x, weights, np.zeros(size, np.float32), 0)
    m.output(x)
    return m.build()


MODELS: dict[str, Callable[[bool], driver.Model]] = {
    "2 x 4 M weights, 1 row": lambda relaxed: dense(relaxed=relaxed, size=2048, rows=1),
    "2 x 4 M weights, 4 rows": lambda relaxed: dense(relaxed=relaxed, size=2048, rows=4),
    "2 x 4 M weights, 16 rows (stays float32)": lambda relaxed: dense(relaxed=relaxed, size=2048, rows=16),
    "2 x 1 M weights, 1 row": lambda relaxed: dense(relaxed=relaxed, size=1024, rows=1),
    "a small MobileNet (stays float32)": lambda relaxed: mobile("float32", relaxed=relaxed),
}


def block(burst: driver.Burst) -> float:
    """The median of its executions, in microseconds."""
    samples = []
    for _ in range(RUNS):
        begin = time.perf_counter_ns()
        burst.run()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    return float(np.median(samples))


def relaxed_run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    runs = Runs()
    with driver.connect("litert") as device:
        for name, build in MODELS.items():
            progress(name)
            with ExitStack() as stack:
                prepared = [stack.enter_context(device.prepare(build(is_relaxed))) for is_relaxed in (False, True)]
                bursts = [stack.enter_context(p.burst()) for p in prepared]
                for burst in bursts:
                    burst.run(*(np.ones(array.shape, array.dtype) for array in burst.inputs if array is not None))
                for number in range(args.pairs):
                    order = (0, 1) if number % 2 else (1, 0)
                    found = {("strict_us", "relaxed_us")[side]: block(bursts[side]) for side in order}
                    runs.add(name, {**found, "ratio": found["relaxed_us"] / found["strict_us"]})
    progress("")
    return runs


RELAXED = Question(
    """What does a relaxed model gain on the litert device, of which weights?

        python bench/ops.py relaxed [--pairs 31] [--json FILE]

    Each round runs a block of executions of the strict model and one of the same model relaxed, through a burst, in
    turns. The ratio is relaxed over strict: the median of the pairs, and its 95 % interval.
    """,
    relaxed_run,
    {"strict us": median("strict_us", ".1f"), "relaxed us": median("relaxed_us", ".1f"), "ratio": interval("ratio")},
    figures=("strict_us", "relaxed_us", "ratio"),
    bars=("ratio", "time of the relaxed model to the strict one's"),
    pairs=31,
    is_pinned=False,
)

if __name__ == "__main__":
    ask({"": ARITHMETIC.answer, "relaxed": RELAXED.answer})
