"""Is the queue as fast as the floor?

    python bench/queue_roundtrip.py [--pairs 9] [--json FILE] [--plot FILE] [--markdown]

64 bytes each way between two processes on CPUs 0 and 1: in C (queue_roundtrip.c) and from Python (fmq.Exchange),
polling and sleeping, each right after a block of the same exchange through two bare mailboxes (peers/limit.c).
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from measure import (
    DEVICE_CPU,
    HERE,
    Runs,
    Subject,
    block_of,
    c_block,
    compile_c,
    conditions,
    interleave,
    over_floor,
    pin_client,
    scratch,
    times_floor,
)
from verdict import Budget, Report, arguments, cells, parse, progress, publish, subject_rows

import fmq

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

QUESTION = "Is the queue as fast as the floor? 64 bytes each way"
SPIN, FUTEX = "floor: limit spin", "floor: limit futex"
C_SPIN, C_SLEEP = "queue in C, polling", "queue in C, sleeping"
PY_SPIN, PY_SLEEP = "queue from Python, polling", "queue from Python, sleeping"
NBYTES, CAPACITY = 64, 4096
POLL = 1e-3  # seconds: long enough never to sleep within a block, short enough to be quiet between blocks


def compile_queue(target: Path) -> Path:
    """queue_roundtrip.c with the queue's own sources, without Python."""
    sources = HERE.parent / "csrc"
    return compile_c(target, HERE / "queue_roundtrip.c", *sorted(sources.glob("*.c")), include=sources)


def echo(there: fmq.Descriptor, back: fmq.Descriptor, spin: float) -> None:
    """The other process: sends back what comes, until the client is gone."""
    os.sched_setaffinity(0, {DEVICE_CPU})
    reader, writer = fmq.MessageQueue.open(there).reader(), fmq.MessageQueue.open(back).writer()
    reader.spin = spin
    exchange, message = fmq.Exchange(writer, reader), b""
    with suppress(fmq.Closed, fmq.PeerDied):
        while True:
            message = exchange(message)


@contextmanager
def exchange_with_echo(spin: float) -> Iterator[fmq.Exchange]:
    """Two queues and somebody at their other ends."""
    queues = [fmq.MessageQueue.create("u1", CAPACITY) for _ in range(2)]
    there, back = queues
    process = multiprocessing.get_context("spawn").Process(
        target=echo, args=(there.descriptor, back.descriptor, spin), daemon=True
    )
    process.start()
    with there.writer() as writer, back.reader() as reader:
        reader.spin = spin
        yield fmq.Exchange(writer, reader)
    process.join(10)


def subjects(count: int, directory: Path, stack: ExitStack) -> list[Subject]:
    """All four ways; each with the floor that waits as it does."""
    queue = compile_queue(directory / "queue")
    polling, sleeping = (stack.enter_context(exchange_with_echo(spin)) for spin in (POLL, 0))
    message = bytes(NBYTES)
    return [
        Subject(C_SPIN, c_block(queue, "spin", count * 10, NBYTES), SPIN, is_ours=True),
        Subject(PY_SPIN, block_of(partial(polling, message), count), SPIN, is_ours=True),
        Subject(C_SLEEP, c_block(queue, "sleep", count, NBYTES), FUTEX, is_ours=True),
        Subject(PY_SLEEP, block_of(partial(sleeping, message), count), FUTEX, is_ours=True),
    ]


def budgets(runs: Runs) -> list[Budget]:
    """What ours must be."""
    return [
        Budget("C, polling <= 1.0 x limit spin", times_floor(runs, C_SPIN), 1.0),
        Budget("C, sleeping <= 1.15 x limit futex", times_floor(runs, C_SLEEP), 1.15),
        Budget("Python, polling <= floor + 0.7 us", over_floor(runs, PY_SPIN), 0.7, "us"),
        Budget("Python, sleeping <= 1.15 x limit futex", times_floor(runs, PY_SLEEP), 1.15),
    ]


def run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    count = 50 if args.quick else 2000
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        limit = compile_c(directory / "limit", HERE / "peers" / "limit.c")
        floors = {SPIN: c_block(limit, "spin", count * 10, NBYTES), FUTEX: c_block(limit, "futex", count, NBYTES)}
        args.subjects = subjects(count, directory, stack)
        return interleave(args.subjects, floors, args.pairs, progress)


def main() -> None:
    """Measures, prints, writes."""
    args = parse(arguments(__doc__))
    pin_client()
    found = conditions()
    runs = run(args)
    rows = subject_rows(runs, args.subjects)
    publish(args, Report(QUESTION, found, [cells(row) for row in rows], budgets(runs), {"subjects": rows}))
    if args.plot:
        import plots

        plots.latencies(args.plot, rows, [PY_SPIN, PY_SLEEP], "64 bytes each way through two queues")


if __name__ == "__main__":
    main()
