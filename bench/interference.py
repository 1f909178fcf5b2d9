"""What does a burst feel of another burst on its device, and of a busy thread in its own client?

    python bench/interference.py [--other-cpu N] [--json FILE] [--plot FILE]
    python bench/interference.py prepare [--pairs 9] [--other-cpu N] [--json FILE] [--plot FILE]

The burst runs ADD on four floats, client on CPU 0 and device on CPU 1: back to back; and once a millisecond, where each
call finds both sides asleep and competes with the thread that has the CPU or an interpreter. In each round: nothing
else happens; a second process computes in Python (the control: what any busy program costs on a machine with these
cores); a burst of the second process runs a model of one operation back to back, and one of 60 operations, each a numpy
call that the engine makes in Python; a thread of the client computes in Python. The second process may run wherever the
scheduler puts it, unless --other-cpu says where.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import (
    Budget,
    Report,
    Runs,
    arguments,
    ask,
    conditions,
    parse,
    percentiles,
    pin_client,
    publish,
    ratio,
    rounds,
    spell,
)
from own_device import own_device, pin

import driver
from driver.cli.timing import time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from measure import Block
    from numpy.typing import NDArray

    from driver.cli.timing import Estimate

    Timed = NDArray[np.float64]
    Work = Callable[[], object]
    Tasks = Callable[[ExitStack], dict[str, Work]]  # what it can do, made there; importable, or a partial of such

# ---- a second process

IDLE = "idle"
CHUNK = 200  # runs between two looks at the clock


def chain(operations: int) -> driver.Model:
    """x + x + x …: float32 [1, 4]."""
    m = driver.ModelBuilder()
    x = value = m.input("float32", (1, 4))
    for _ in range(operations):
        value = m.operation("ADD", value, x, 0)
    m.output(value)
    return m.build()


def compute() -> None:
    """About ten milliseconds of Python."""
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        sum(range(1000))


def _other(line: Connection, tasks: Tasks, cpu: int | None) -> None:
    """Does what it is told until something else comes, and answers how often."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1) if cpu is None else {cpu})
    with ExitStack() as stack:
        work = tasks(stack)
        line.send("ready")
        while task := line.recv():
            done = 0
            while not line.poll():
                work[task]()
                done += 1
            line.recv()
            line.send(done)


@contextmanager
def second_process(tasks: Tasks, cpu: int | None) -> Iterator[Connection]:
    """Ready to be told one of its tasks; ends with the block."""
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_other, args=(far, tasks, cpu), daemon=True)
    process.start()
    far.close()
    assert near.recv() == "ready"
    try:
        yield near
    finally:
        with suppress(BrokenPipeError):
            near.send("")
        process.join(10)


def back_to_back(call: Work) -> Timed:
    """A chunk of calls."""
    return time_calls(call, CHUNK)


def paced(call: Work) -> Timed:
    """A few calls, a millisecond of sleep before each: what is late for one is not hidden by thousands that are not."""
    samples = []
    for _ in range(10):
        time.sleep(1e-3)
        samples.append(time_calls(call, 1))
    return np.concatenate(samples)


def sample(
    call: Work, seconds: float, line: Connection, task: str = IDLE, chunk: Callable[[Work], Timed] = back_to_back
) -> Block:
    """Runs until the time is over and the second process has finished what it was doing then."""
    if task != IDLE:
        line.send(task)
    chunks, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        chunks.append(chunk(call))
    done = 0
    if task != IDLE:
        line.send("stop")
        while not line.poll():
            chunks.append(chunk(call))
        done = line.recv()
    samples = np.concatenate(chunks)
    return {**percentiles(samples), "runs": len(samples), "done": done}


# ---- another burst, a busy thread

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
            for name, pace in rounds(args.pairs, order, lambda one: row_of(*one)):
                pin(device)
                with busy_thread() if name == THREAD else nullcontext():
                    task = IDLE if name == THREAD else name
                    runs.add(row_of(name, pace), sample(burst.run, args.seconds, line, task, PACES[pace]))
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
        **runs.medians(own, "p50_us", "p99_us", "p999_us", "max_us"),
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


def options(doc: str | None, seconds: float) -> argparse.Namespace:
    """The command line."""
    parser = arguments(doc)
    parser.add_argument("--other-cpu", type=int, metavar="N", help="pins the second process (default: anywhere)")
    args = parse(parser)
    args.seconds = 0.05 if args.quick else seconds
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options(__doc__, 0.6)
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


# ---- prepare


PREPARE_QUESTION = "Does another client's prepare of a 1,000-operation model disturb a burst?"
PREPARE = "another prepares"
PREPARE_OPERATIONS = 1000
PREPARE_HEAD = ("the second process", "p50 us", "p99 us", "p99.9 us", "max us", "runs", "prepares", "p99 to idle")


def prepare_tasks(operations: int, stack: ExitStack) -> dict[str, Callable[[], object]]:
    """What the second process can do. It has a connection of its own."""
    model, device = chain(operations), stack.enter_context(driver.connect())
    device.prepare(model).close()
    return {CONTROL: compute, PREPARE: lambda: device.prepare(model).close()}


def prepare_run(args: argparse.Namespace) -> Runs:
    """All rounds: idle, control, prepare; the next one backwards."""
    runs = Runs()
    with own_device() as device, device.prepare(chain(1)) as prepared, prepared.burst() as burst:
        burst.run(*[np.ones((1, 4), np.float32)])
        with second_process(partial(prepare_tasks, args.operations), args.other_cpu) as line:
            time_calls(burst.run, CHUNK)
            for task in rounds(args.pairs, [IDLE, CONTROL, PREPARE]):
                pin(device)
                runs.add(task, sample(burst.run, args.seconds, line, task))
    return runs


def prepare_row(runs: Runs, task: str) -> dict[str, Any]:
    """Medians over the blocks of one kind."""
    keys = ("p50_us", "p99_us", "p999_us", "max_us")
    return {
        "name": task,
        "ours": task == PREPARE,
        **runs.medians(task, *keys),
        "p99_to_idle": p99_ratio(runs, task, IDLE)._asdict(),
        "rounds": runs.blocks[task],
    }


def p99_ratio(runs: Runs, task: str, reference: str) -> Any:
    """Of blocks in the same round."""
    return ratio(runs, task, reference, "p99_us")


def prepare_line_of(runs: Runs, task: str) -> tuple[str, ...]:
    """One line of the table; the counts are sums."""
    figures = (f"{np.median(runs.values(task, key)):.2f}" for key in ("p50_us", "p99_us", "p999_us", "max_us"))
    prepares = str(int(runs.values(task, "done").sum())) if task == PREPARE else ""
    against = "" if task == IDLE else spell(p99_ratio(runs, task, IDLE))
    return task, *figures, str(int(runs.values(task, "runs").sum())), prepares, against


def prepare() -> None:
    """Does another client's prepare of a 1,000-operation model disturb a burst?

        python bench/interference.py prepare [--pairs 9] [--other-cpu N] [--json FILE] [--plot FILE]

    The burst runs ADD on four floats, back to back, client on CPU 0 and device on CPU 1. A second process has a
    connection of its own to the same device. Each round has three blocks: it is idle; it computes in Python without
    touching the device (the control: what any busy program costs on a machine with these cores); it prepares the
    model over and over. A busy block ends with the prepare that runs when its time is over, so it contains whole
    prepares only. The second process may run wherever the scheduler puts it, unless --other-cpu says where.
    """
    args = options(prepare.__doc__, 2.0)
    args.operations = 20 if args.quick else PREPARE_OPERATIONS
    pin_client()
    found = {**conditions(), "other_cpu": "any" if args.other_cpu is None else args.other_cpu}
    runs = prepare_run(args)
    tasks = (IDLE, CONTROL, PREPARE)
    rows = [prepare_row(runs, task) for task in tasks]
    budgets = [
        Budget("p99 while another prepares <= 1.5 x idle", p99_ratio(runs, PREPARE, IDLE), 1.5),
        Budget("the same against the control <= 1.5 x", p99_ratio(runs, PREPARE, CONTROL), 1.5),
    ]
    body = {"subjects": rows, "operations": args.operations}
    publish(
        args,
        Report(PREPARE_QUESTION, found, [prepare_line_of(runs, task) for task in tasks], budgets, body, PREPARE_HEAD),
    )
    if args.plot:
        import plots

        plots.distributions(args.plot, {r["name"]: plots.curve(r) for r in rows}, {PREPARE}, PREPARE_QUESTION)


if __name__ == "__main__":
    ask({"": main, "prepare": prepare})
