"""What does a waiting reader cost?

    python bench/queue_idle.py [--pairs 9] [--seconds 5] [--json FILE] [--plot FILE]

One process per way of waiting, all of them waiting at the same time, for a message that does not come: in the main
thread, where Python runs signal handlers, and in another one. Wake-ups are the context switches of all of a process's
threads, of both kinds, as /proc counts them; CPU time is its CPU clock's, user and system. Both are read from outside.
After the last round each is sent what it waits for, and a process that had not been waiting fails here.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import Runs, conditions
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import fmq
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from driver.cli.timing import Estimate

QUESTION = "What does a waiting reader cost?"
MAIN, OTHER = "main thread", "other thread"
QUEUES = 8  # for the process that waits for several
SETTLE = 0.5  # seconds between "I am about to wait" and the first look
HEAD = ("a process that waits in", "where", "wake-ups per s", "CPU us per s")


# What they wait in. Each gets readers and a flag's memory, and returns when something came.


def in_read(readers: Sequence[fmq.MessageQueueReader], _: fmq.Region) -> None:
    """One queue."""
    readers[0].read(1)


def in_wait_any(readers: Sequence[fmq.MessageQueueReader], _: fmq.Region) -> None:
    """Several queues."""
    fmq.wait_any(readers)


def in_flag(_: Sequence[fmq.MessageQueueReader], region: fmq.Region) -> None:
    """An event flag."""
    fmq.EventFlag(region, 0).wait(1)


def in_asyncio(readers: Sequence[fmq.MessageQueueReader], _: fmq.Region) -> None:
    """An event loop."""
    import asyncio

    async def read() -> None:
        await readers[0].read_async(1)

    asyncio.run(read())


WAYS: dict[str, Callable[[Sequence[fmq.MessageQueueReader], fmq.Region], None]] = {
    "reader.read": in_read,
    f"fmq.wait_any of {QUEUES}": in_wait_any,
    "EventFlag.wait": in_flag,
    "asyncio: reader.read_async": in_asyncio,
}
AVAILABLE = {
    in_wait_any: lambda: hasattr(fmq, "wait_any"),
    in_asyncio: lambda: hasattr(fmq.MessageQueueReader, "read_async"),
}
FLOOR = "floor: os.read of a pipe"


def waiting(line: Connection, what: str, where: str, queues: Sequence[fmq.Descriptor], memory: str) -> None:
    """The process. Sends a word before it waits, and one when it has been woken."""
    readers = [fmq.MessageQueue.open(queue).reader() for queue in queues]
    region = fmq.Region.open(memory)

    def wait() -> None:
        line.send("about to wait")
        if what == FLOOR:
            line.recv()
        else:
            WAYS[what](readers, region)
        line.send("woken")

    if where == MAIN:
        wait()
    else:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    line.recv()  # stays until it is told to go


@dataclass
class Waiter:
    """One of them, seen from outside."""

    name: str
    where: str
    pid: int
    line: Connection

    def switches(self) -> int:
        """Context switches of all threads since their start."""
        total = 0
        for status in Path(f"/proc/{self.pid}/task").glob("*/status"):
            for line in status.read_text().splitlines():
                if "ctxt_switches" in line:
                    total += int(line.split()[1])
        return total

    def cpu_seconds(self) -> float:
        """User and system, all threads, from the process's CPU clock (CPUCLOCK_SCHED of clock_gettime(2))."""
        return time.clock_gettime(~self.pid << 3 | 2)


@contextmanager
def waiter(what: str, where: str) -> Iterator[Waiter]:
    """Waiting when this begins; found to have waited, and gone, when it ends."""
    near, far = multiprocessing.Pipe()
    queues = [fmq.MessageQueue.create("u8", 16) for _ in range(QUEUES)]
    writers = [queue.writer() for queue in queues]
    memory = f"/fmq-bench-idle-{os.getpid()}-{abs(hash((what, where)))}"
    region = fmq.Region.create(4096, name=memory)
    arguments = far, what, where, [queue.descriptor for queue in queues], memory
    process = multiprocessing.get_context("spawn").Process(target=waiting, args=arguments, daemon=True)
    process.start()
    try:
        assert near.recv() == "about to wait"
    finally:
        fmq.unlink(memory)
    yield Waiter(what, where, process.pid or 0, near)
    wakes = {FLOOR: lambda: near.send("go"), "EventFlag.wait": lambda: fmq.EventFlag(region, 0).wake(1)}
    wakes.get(what, lambda: writers[0].write([1]))()
    if not near.poll(10) or near.recv() != "woken":
        raise SystemExit(f"bench: {what} in the {where} was not woken")
    near.send("go")
    process.join(10)


def measure_all(waiters: Sequence[Waiter], seconds: float) -> list[dict[str, float]]:
    """A block of every subject: what changed while this process slept."""
    before = [(w.switches(), w.cpu_seconds(), time.monotonic()) for w in waiters]
    time.sleep(seconds)
    after = [(w.switches(), w.cpu_seconds(), time.monotonic()) for w in waiters]
    for w in waiters:
        if w.line.poll():
            raise SystemExit(f"bench: {w.name} in the {w.where} did not wait: {w.line.recv()}")
    return [
        {"wakeups_per_s": (b[0] - a[0]) / (b[2] - a[2]), "cpu_us_per_s": 1e6 * (b[1] - a[1]) / (b[2] - a[2])}
        for a, b in zip(before, after, strict=True)
    ]


def name_of(what: str, where: str) -> str:
    """Of a row."""
    return f"{what}, {where}"


def run(args: argparse.Namespace) -> Runs:
    """All rounds; every subject is in each."""
    runs = Runs()
    with ExitStack() as stack:
        waiters = []
        for what, where in ((what, where) for what in (FLOOR, *WAYS) for where in (MAIN, OTHER)):
            if what != FLOOR and not AVAILABLE.get(WAYS[what], lambda: True)():
                runs.drop(name_of(what, where), "this version does not have it")
                continue
            progress("starting", what)
            waiters.append(stack.enter_context(waiter(what, where)))
        time.sleep(SETTLE)
        for number in range(args.pairs):
            progress(f"round {number + 1} of {args.pairs}", f"{len(waiters)} processes wait for {args.seconds:g} s")
            for w, block in zip(waiters, measure_all(waiters, args.seconds), strict=True):
                runs.blocks.setdefault(name_of(w.name, w.where), []).append(block)
        progress("")
    return runs


def rows_of(runs: Runs) -> list[dict[str, Any]]:
    """A row per way and thread."""
    rows = []
    for what, where in ((what, where) for what in (FLOOR, *WAYS) for where in (MAIN, OTHER)):
        name = name_of(what, where)
        row: dict[str, Any] = {"name": name, "what": what, "where": where, "ours": what != FLOOR}
        if name in runs.errors:
            rows.append({**row, "error": runs.errors[name]})
            continue
        figures = {key: estimate(runs.values(name, key))._asdict() for key in ("wakeups_per_s", "cpu_us_per_s")}
        rows.append({**row, **figures, "rounds": runs.blocks[name]})
    return rows


def line_of(runs: Runs, row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    if "error" in row:
        return row["what"], row["where"], row["error"], ""
    figures = (spell(estimate(runs.values(row["name"], key))) for key in ("wakeups_per_s", "cpu_us_per_s"))
    return row["what"], row["where"], *figures


def most(runs: Runs, where: str) -> Estimate:
    """Wake-ups of whichever of ours had the most, round by round."""
    ours = [name_of(what, where) for what in WAYS if runs.has(name_of(what, where))]
    return estimate(np.max([runs.values(name, "wakeups_per_s") for name in ours], axis=0))


def main() -> None:
    """Measures, prints, writes."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, metavar="S", help="of a round (default 5, with --quick 0.3)")
    args = parse(parser)
    args.seconds = args.seconds or (0.3 if args.quick else 5.0)
    found = conditions()
    runs = run(args)
    rows = rows_of(runs)
    budgets = [
        Budget("no wake-ups outside the main thread, whichever has the most", most(runs, OTHER), 0, "per s"),
        Budget("in the main thread at most 10 per second", most(runs, MAIN), 10, "per s"),
    ]
    body = {"subjects": rows, "block_seconds": args.seconds}
    publish(args, Report(QUESTION, found, [line_of(runs, row) for row in rows], budgets, body, HEAD))
    if args.plot:
        import plots

        plots.bars(
            args.plot,
            {r["name"]: r["wakeups_per_s"]["median"] for r in rows if r["ours"] and "error" not in r},
            "wake-ups per second",
            QUESTION,
        )


if __name__ == "__main__":
    main()
