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
    Runs,
    ask,
    percentiles,
    ratio,
    rounds,
)
from own_device import own_device, pin
from question import Question, against, median, times, total

import driver
from driver.cli.timing import time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Iterator
    from multiprocessing.connection import Connection

    from measure import Block
    from numpy.typing import NDArray
    from question import Figure

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


def against_all(key: str, reference: str) -> Figure:
    """The ratio of a row's figure to that of another row at the same pace."""
    return lambda runs, row: ratio(runs, row, row_of(reference, row.partition("; ")[2]), key)


FIGURES = ("p50_us", "p99_us", "p999_us", "max_us")
TIMES = {"p50 us": "p50_us", "p99 us": "p99_us", "p99.9 us": "p999_us", "max us": "max_us"}
FIRST, SECOND = (tuple(row_of(name, pace) for pace in PACES) for name in (IDLE, CONTROL))
ESTIMATES = {
    "p50_to_idle": against_all("p50_us", IDLE),
    "p99_to_idle": against_all("p99_us", IDLE),
    "p99_to_control": against_all("p99_us", CONTROL),
}
OTHER_CPU = {"--other-cpu": {"type": int, "metavar": "N", "help": "pins the second process (default: anywhere)"}}


def other_cpu(args: argparse.Namespace) -> dict[str, object]:
    """Where the second process is."""
    return {"other_cpu": "any" if args.other_cpu is None else args.other_cpu}


def draw(args: argparse.Namespace, marked: Collection[str], rows: list[dict[str, Any]]) -> None:
    """The distributions."""
    import plots

    plots.distributions(args.plot, {row["name"]: plots.curve(row) for row in rows}, set(marked), "What a burst feels")


INTERFERENCE = Question(
    __doc__,
    run,
    {
        **{head: median(key) for head, key in TIMES.items()},
        "runs": total("runs"),
        "p50 to idle": times(ESTIMATES["p50_to_idle"], *FIRST),
        "p99 to idle": times(ESTIMATES["p99_to_idle"], *FIRST),
        "p99 to control": times(ESTIMATES["p99_to_control"], *FIRST, *SECOND),
    },
    options=OTHER_CPU,
    settle=lambda args: vars(args).update(seconds=0.05 if args.quick else 0.6),
    figures=FIGURES,
    estimates=ESTIMATES,
    group=lambda row: row.partition("; ")[2],
    label=lambda row: row.partition("; ")[0],
    ours=[row_of(name, pace) for name in (LONG, THREAD) for pace in PACES],
    conditions=other_cpu,
    draw=lambda args, _, rows: draw(args, [row_of(LONG, pace) for pace in PACES], rows),
)

# ---- prepare


PREPARE = "another prepares"
PREPARE_OPERATIONS = 1000


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


P99_TO_IDLE, P99_TO_CONTROL = against(IDLE, "p99_us"), against(CONTROL, "p99_us")
PREPARING = Question(
    """Does another client's prepare of a 1,000-operation model disturb a burst?

        python bench/interference.py prepare [--pairs 9] [--other-cpu N] [--json FILE] [--plot FILE]

    The burst runs ADD on four floats, back to back, client on CPU 0 and device on CPU 1. A second process has a
    connection of its own to the same device. Each round has three blocks: it is idle; it computes in Python without
    touching the device (the control: what any busy program costs on a machine with these cores); it prepares the
    model over and over. A busy block ends with the prepare that runs when its time is over, so it contains whole
    prepares only. The second process may run wherever the scheduler puts it, unless --other-cpu says where.
    """,
    prepare_run,
    {
        **{head: median(key) for head, key in TIMES.items()},
        "runs": total("runs"),
        "prepares": lambda runs, row: total("done")(runs, row) if row == PREPARE else "",
        "p99 to idle": times(P99_TO_IDLE, IDLE),
    },
    options=OTHER_CPU,
    settle=lambda args: vars(args).update(
        seconds=0.05 if args.quick else 2.0, operations=20 if args.quick else PREPARE_OPERATIONS
    ),
    budgets=lambda runs, _: [
        Budget("p99 while another prepares <= 1.5 x idle", P99_TO_IDLE(runs, PREPARE), 1.5),
        Budget("the same against the control <= 1.5 x", P99_TO_CONTROL(runs, PREPARE), 1.5),
    ],
    figures=FIGURES,
    estimates={"p99_to_idle": P99_TO_IDLE},
    group=lambda _: "the second process",
    ours=(PREPARE,),
    kept=("operations",),
    conditions=other_cpu,
    draw=lambda args, _, rows: draw(args, [PREPARE], rows),
)

if __name__ == "__main__":
    ask({"": INTERFERENCE.answer, "prepare": PREPARING.answer})
