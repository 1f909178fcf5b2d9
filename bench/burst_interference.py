"""What does a burst feel of another burst on its device, and of a busy thread in its own client?

    python bench/burst_interference.py [--other-cpu N] [--json FILE] [--plot FILE]

The burst runs ADD on four floats, client on CPU 0 and device on CPU 1: back to back; and once a millisecond, where each
call finds both sides asleep and competes with the thread that has the CPU or an interpreter. In each round: nothing
else happens; a second process computes in Python (the control: what any busy program costs on a machine with these
cores); a burst of the second process runs a model of one operation back to back, and one of 60 operations, each a numpy
call that the engine makes in Python; a thread of the client computes in Python. The second process may run wherever the
scheduler puts it, unless --other-cpu says where.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import Runs, conditions, pin_client, ratio
from own_device import own_device, pin
from second_process import CHUNK, IDLE, back_to_back, chain, compute, paced, sample, second_process
from verdict import Report, arguments, parse, progress, publish, spell

import driver
from driver.cli.timing import time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack

    from driver.cli.timing import Estimate

QUESTION = "What does a burst feel of another burst, and of a busy thread in its client?"
CONTROL, SHORT, LONG = "another computes", "another burst, 1 operation", "another burst, 60 operations"
THREAD = "a busy thread in the client"
ROWS = (IDLE, CONTROL, SHORT, LONG, THREAD)
OPERATIONS = 60
PACES = {"back to back": back_to_back, "once a millisecond": paced}
HEAD = ("p50 us", "p99 us", "p99.9 us", "max us", "runs", "p50 to idle", "p99 to idle", "p99 to control")


def tasks(stack: ExitStack) -> dict[str, Callable[[], object]]:
    """What the second process can do. It has a connection and bursts of its own."""
    device = stack.enter_context(driver.connect())

    def repeated(operations: int) -> Callable[[], object]:
        prepared = stack.enter_context(device.prepare(chain(operations)))
        run = stack.enter_context(prepared.burst()).run
        run(np.ones((1, 4), np.float32))

        def work() -> None:
            for _ in range(50):
                run()

        return work

    return {CONTROL: compute, SHORT: repeated(1), LONG: repeated(OPERATIONS)}


@contextmanager
def busy_thread() -> Iterator[None]:
    """Computes in Python until the block ends."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            compute()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def run(args: argparse.Namespace) -> Runs:
    """All rounds; every other one backwards."""
    runs, order = Runs(), [(name, pace) for name in ROWS for pace in PACES]
    with own_device() as device, device.prepare(chain(1)) as prepared, prepared.burst() as burst:
        burst.run(np.ones((1, 4), np.float32))
        with second_process(tasks, args.other_cpu) as line:
            time_calls(burst.run, CHUNK)
            for number in range(args.pairs):
                for name, pace in order[:: -1 if number % 2 else 1]:
                    progress(f"round {number + 1} of {args.pairs}", row_of(name, pace))
                    pin(device)
                    with busy_thread() if name == THREAD else nullcontext():
                        task = IDLE if name == THREAD else name
                        block = sample(burst.run, args.seconds, line, task, PACES[pace])
                    runs.blocks.setdefault(row_of(name, pace), []).append(block)
    progress("")
    return runs


def row_of(name: str, pace: str) -> str:
    """A row's name."""
    return f"{name}; {pace}"


def ratios(runs: Runs, name: str, pace: str) -> dict[str, Estimate]:
    """Of blocks in the same round."""
    own, idle, control = (row_of(one, pace) for one in (name, IDLE, CONTROL))
    return {
        "p50_to_idle": ratio(runs, own, idle, "p50_us"),
        "p99_to_idle": ratio(runs, own, idle, "p99_us"),
        "p99_to_control": ratio(runs, own, control, "p99_us"),
    }


def row(runs: Runs, name: str, pace: str) -> dict[str, Any]:
    """Medians over the blocks of one kind."""
    own = row_of(name, pace)
    return {
        "name": own,
        "ours": name in {LONG, THREAD},
        **{key: float(np.median(runs.values(own, key))) for key in ("p50_us", "p99_us", "p999_us", "max_us")},
        **{key: found._asdict() for key, found in ratios(runs, name, pace).items()},
        "rounds": runs.blocks[own],
    }


def line_of(runs: Runs, name: str, pace: str) -> tuple[str, ...]:
    """One line of the table; the counts are sums."""
    own = row_of(name, pace)
    figures = (f"{np.median(runs.values(own, key)):.2f}" for key in ("p50_us", "p99_us", "p999_us", "max_us"))
    against = ["" if name == IDLE else spell(found) for found in ratios(runs, name, pace).values()]
    if name == CONTROL:
        against[-1] = ""
    return name, *figures, str(int(runs.values(own, "runs").sum())), *against


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--other-cpu", type=int, metavar="N", help="pins the second process (default: anywhere)")
    args = parse(parser)
    args.seconds = 0.05 if args.quick else 0.6
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    pin_client()
    found = {**conditions(), "other_cpu": "any" if args.other_cpu is None else args.other_cpu}
    runs = run(args)
    rows = [row(runs, name, pace) for pace in PACES for name in ROWS]
    tables = [([line_of(runs, name, pace) for name in ROWS], (pace, *HEAD)) for pace in PACES]
    body = {"subjects": rows, "operations": OPERATIONS}
    publish(args, Report(QUESTION, found, *tables[0][:1], [], body, tables[0][1], tables[1:]))
    if args.plot:
        import plots

        plots.distributions(
            args.plot, {r["name"]: plots.curve(r) for r in rows}, {row_of(LONG, p) for p in PACES}, QUESTION
        )


if __name__ == "__main__":
    main()
