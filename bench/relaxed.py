"""What does a relaxed model gain on the litert device, where its weights are read once and where they are used often?

    python bench/relaxed.py [--pairs 31] [--json FILE]

Each round runs a block of executions of the strict model and one of the same model relaxed, through a burst, in turns.
The ratio is relaxed over strict: the median of the pairs, and its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from measure import conditions

import driver
from driver.cli.timing import estimate
from driver.runtime.capabilities import mobile

if TYPE_CHECKING:
    from collections.abc import Callable

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


def main() -> None:
    """Measures, and prints a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = {}
    print(f"{conditions()}\n{'':42} {'strict us':>10} {'relaxed us':>10} {'ratio':>7}  interval")
    with driver.connect("litert") as device:
        for name, build in MODELS.items():
            print(name, file=sys.stderr)
            with ExitStack() as stack:
                prepared = [stack.enter_context(device.prepare(build(relaxed))) for relaxed in (False, True)]
                bursts = [stack.enter_context(p.burst()) for p in prepared]
                for burst in bursts:
                    burst.run(*(np.ones(array.shape, array.dtype) for array in burst.inputs if array is not None))
                pairs = []
                for number in range(args.pairs):
                    order = (0, 1) if number % 2 else (1, 0)
                    found = {side: block(bursts[side]) for side in order}
                    pairs.append((found[0], found[1]))
            strict, relaxed = (float(np.median(side)) for side in zip(*pairs, strict=True))
            ratio = estimate([b / a for a, b in pairs])
            rows[name] = {"strict_us": strict, "relaxed_us": relaxed, "ratio": ratio._asdict()}
            print(f"{name:42} {strict:10.1f} {relaxed:10.1f} {ratio.median:7.3f}  {ratio.low:.3f} .. {ratio.high:.3f}")
    if args.json:
        args.json.write_text(json.dumps({"conditions": conditions(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
