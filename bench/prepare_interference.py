"""Does another client's prepare of a 1,000-operation model disturb a burst?

    python bench/prepare_interference.py [--pairs 9] [--other-cpu N] [--json FILE] [--plot FILE]

The burst runs ADD on four floats, back to back, client on CPU 0 and device on CPU 1. A second process has a connection
of its own to the same device. Each round has three blocks: it is idle; it computes in Python without touching the
device (the control: what any busy program costs on a machine with these cores); it prepares the model over and over.
A busy block ends with the prepare that runs when its time is over, so it contains whole prepares only. The second
process may run wherever the scheduler puts it, unless --other-cpu says where.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import Runs, conditions, pin_client, ratio
from own_device import own_device, pin
from second_process import CHUNK, IDLE, chain, compute, sample, second_process
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import driver
from driver.cli.timing import time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from contextlib import ExitStack

QUESTION = "Does another client's prepare of a 1,000-operation model disturb a burst?"
CONTROL, PREPARE = "another computes", "another prepares"
OPERATIONS = 1000
HEAD = ("the second process", "p50 us", "p99 us", "p99.9 us", "max us", "runs", "prepares", "p99 to idle")


def tasks(operations: int, stack: ExitStack) -> dict[str, Callable[[], object]]:
    """What the second process can do. It has a connection of its own."""
    model, device = chain(operations), stack.enter_context(driver.connect())
    device.prepare(model).close()
    return {CONTROL: compute, PREPARE: lambda: device.prepare(model).close()}


def run(args: argparse.Namespace) -> Runs:
    """All rounds: idle, control, prepare; the next one backwards."""
    runs, order = Runs(), [IDLE, CONTROL, PREPARE]
    with own_device() as device, device.prepare(chain(1)) as prepared, prepared.burst() as burst:
        burst.run(*[np.ones((1, 4), np.float32)])
        with second_process(partial(tasks, args.operations), args.other_cpu) as line:
            time_calls(burst.run, CHUNK)
            for number in range(args.pairs):
                for task in order[:: -1 if number % 2 else 1]:
                    progress(f"round {number + 1} of {args.pairs}", task)
                    pin(device)
                    runs.blocks.setdefault(task, []).append(sample(burst.run, args.seconds, line, task))
    progress("")
    return runs


def row(runs: Runs, task: str) -> dict[str, Any]:
    """Medians over the blocks of one kind."""
    keys = ("p50_us", "p99_us", "p999_us", "max_us")
    return {
        "name": task,
        "ours": task == PREPARE,
        **{key: float(np.median(runs.values(task, key))) for key in keys},
        "p99_to_idle": p99_ratio(runs, task, IDLE)._asdict(),
        "rounds": runs.blocks[task],
    }


def p99_ratio(runs: Runs, task: str, reference: str) -> Any:
    """Of blocks in the same round."""
    return ratio(runs, task, reference, "p99_us")


def line_of(runs: Runs, task: str) -> tuple[str, ...]:
    """One line of the table; the counts are sums."""
    figures = (f"{np.median(runs.values(task, key)):.2f}" for key in ("p50_us", "p99_us", "p999_us", "max_us"))
    prepares = str(int(runs.values(task, "done").sum())) if task == PREPARE else ""
    against = "" if task == IDLE else spell(p99_ratio(runs, task, IDLE))
    return task, *figures, str(int(runs.values(task, "runs").sum())), prepares, against


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--other-cpu", type=int, metavar="N", help="pins the second process (default: anywhere)")
    args = parse(parser)
    args.seconds, args.operations = (0.05, 20) if args.quick else (2.0, OPERATIONS)
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    pin_client()
    found = {**conditions(), "other_cpu": "any" if args.other_cpu is None else args.other_cpu}
    runs = run(args)
    tasks = (IDLE, CONTROL, PREPARE)
    rows = [row(runs, task) for task in tasks]
    budgets = [
        Budget("p99 while another prepares <= 1.5 x idle", p99_ratio(runs, PREPARE, IDLE), 1.5),
        Budget("the same against the control <= 1.5 x", p99_ratio(runs, PREPARE, CONTROL), 1.5),
    ]
    body = {"subjects": rows, "operations": args.operations}
    publish(args, Report(QUESTION, found, [line_of(runs, task) for task in tasks], budgets, body, HEAD))
    if args.plot:
        import plots

        plots.distributions(args.plot, {r["name"]: plots.curve(r) for r in rows}, {PREPARE}, QUESTION)


if __name__ == "__main__":
    main()
