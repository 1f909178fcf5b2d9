"""What does the run queue of a device cost when no execution waits?

    python bench/run_queue.py [--pairs 9] [--json FILE] [--plot FILE]

Entering and leaving it, in C (run_queue.c): alone; with a deadline and a checkpoint; while another thread does the
same on the other CPU and each finds a slot; and while another account has a client. A sample is a 64th of a block,
divided by its executions, because the clock takes longer than what it would measure. The floor is two
compare-and-exchanges on a word of one's own.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

from measure import HERE, Block, Runs, Subject, compile_with_ours, conditions, interleave, pin_client, scratch
from verdict import Budget, Report, arguments, cells, parse, progress, publish, subject_rows

from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

QUESTION = "What does the run queue of a device cost when no execution waits? Nanoseconds an execution"
FLOOR, ALONE, CHECKPOINT, BESIDE, TWO = ROWS = (
    "floor: two compare-and-exchanges",
    "enter and leave",
    "enter, look whether to yield, leave; with a deadline",
    "enter and leave, beside another thread",
    "enter and leave, while another account has a client; with a look at the clock",
)
MODES = dict(zip(ROWS, ("floor", "alone", "checkpoint", "beside", "two"), strict=True))
HEAD = ("", "p50 ns", "p99 ns", "p99.9 ns", "over the floor, ns", "x floor", "floor")
MOST = 150  # ns


def block(binary: Path, name: str, count: int) -> Callable[[], Block]:
    """Of one row. `measure` keeps microseconds; here they are thousands of nanoseconds, and told as such."""

    def run() -> Block:
        command = [str(binary), MODES[name], str(count)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
        return {f"{key}_us": row[f"{key}_ns"] for key in ("p50", "p99", "p999", "max")}

    return run


def run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    count = 20_000 if args.quick else 2_000_000
    with scratch() as directory:
        binary = compile_with_ours(directory / "run_queue", HERE / "run_queue.c")
        args.subjects = [Subject(name, block(binary, name, count), FLOOR, is_ours=True) for name in ROWS[1:]]
        return interleave(args.subjects, {FLOOR: block(binary, FLOOR, count)}, args.pairs, progress)


def budgets(runs: Runs) -> list[Budget]:
    """What it may cost."""
    return [Budget(f"{name} <= {MOST} ns", estimate(runs.values(name)), MOST, "ns") for name in ROWS[1:]]


def main() -> None:
    """Measures, prints, writes."""
    args = parse(arguments(__doc__))
    pin_client()
    found = conditions()
    runs = run(args)
    rows = subject_rows(runs, args.subjects)
    publish(args, Report(QUESTION, found, [cells(row) for row in rows], budgets(runs), {"subjects": rows}, HEAD))
    if args.plot:
        import plots

        plots.latencies(args.plot, rows, [ALONE, CHECKPOINT], QUESTION)


if __name__ == "__main__":
    main()
