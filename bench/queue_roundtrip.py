"""Is the queue as fast as the floor? 64 bytes each way

    python bench/queue_roundtrip.py [--sizes] [--peers all|none|posix_mq …] [--json FILE] [--plot FILE]

64 bytes each way between two processes on CPUs 0 and 1: in C (queue_roundtrip.c) and from Python, by fmq.Exchange and
by `write` and `read(out=)`, polling and sleeping, each right after a block of the same exchange through two bare
mailboxes (peers/limit.c), and what a user would pick instead (peers/peers.py). The same with 1 KiB, beside msgq. A is
one numpy.add of four floats in this process: machines differ by three in what Python costs. --sizes adds other sizes,
polling: 8 bytes to 1 MiB, or those that it names. Beyond the 4 KiB that limit.c takes, the floor is the same exchange
through two bare rings (peers/spsc.c).
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import (
    ADD,
    DEVICE_CPU,
    HERE,
    Budget,
    Runs,
    Subject,
    block_of,
    c_block,
    compile_c,
    compile_with_ours,
    interleave,
    over_floor_in_adds,
    peer_block,
    peers_process,
    progress,
    ratio,
    scratch,
    size,
    times_floor,
)
from question import beside_floors

import fmq
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import plots
    from measure import Ask

    from driver.cli.timing import Estimate

SPIN, FUTEX, RING = "floor: limit spin", "floor: limit futex", "floor: spsc"
C_SPIN, C_SLEEP = "queue in C, polling", "queue in C, sleeping"
PY_SPIN, PY_SLEEP = "queue from Python, polling", "queue from Python, sleeping"
WR_SPIN, WR_SLEEP = "Python, write + read(out=), polling", "Python, write + read(out=), sleeping"
PEERS = ("iceoryx2", "posix_mq", "faster_fifo", "msgq", "msgq_wait")
POLLING_PEERS, OF_A_KIB = ("iceoryx2", "msgq"), ("msgq", "msgq_wait", "posix_mq")
NBYTES, KIB, LEAST, MOST_OF_LIMIT = 64, 1024, 4096, 4096
SIZES = (8, 512, 4096, 65536, 1 << 20)
POLL = 1e-3  # seconds: long enough never to sleep within a block, short enough to be quiet between blocks


def compile_queue(target: Path) -> Path:
    """queue_roundtrip.c with the queue's own sources, without Python."""
    return compile_with_ours(target, HERE / "queue_roundtrip.c")


def echo(there: fmq.Descriptor, back: fmq.Descriptor, spin: float, out_of: int) -> None:
    """The other process: sends back what comes, until the client is gone. `out_of`: by reads of so many bytes; 0: by an
    exchange."""
    os.sched_setaffinity(0, {DEVICE_CPU})
    reader, writer = fmq.MessageQueue.open(there).reader(), fmq.MessageQueue.open(back).writer()
    reader.spin, message = spin, b""
    with suppress(fmq.Closed, fmq.PeerDied):
        if out_of:
            read, write, got = reader.read, writer.write, np.empty(out_of, np.uint8)
            while True:
                read(out_of, None, got)
                write(got)
        exchange = fmq.Exchange(writer, reader, hold=10e-6 if spin else 0).__call__
        while True:
            message = exchange(message)


@contextmanager
def ends_of_echo(spin: float, nbytes: int, out_of: int) -> Iterator[tuple[Any, Any]]:
    """A writer and a reader, and an echo at the other ends of their queues."""
    queues = [fmq.MessageQueue.create("u1", max(LEAST, nbytes)) for _ in range(2)]
    there, back = queues
    process = multiprocessing.get_context("spawn").Process(
        target=echo, args=(there.descriptor, back.descriptor, spin, out_of), daemon=True
    )
    process.start()
    with there.writer() as writer, back.reader() as reader:
        reader.spin = spin
        yield writer, reader
    process.join(10)


@contextmanager
def exchange_with_echo(spin: float, nbytes: int = NBYTES) -> Iterator[Callable[[], object]]:
    """A message there and back in one call."""
    with ends_of_echo(spin, nbytes, 0) as (writer, reader):
        yield partial(fmq.Exchange(writer, reader, hold=10e-6 if spin else 0).__call__, bytes(nbytes))


@contextmanager
def write_and_read(spin: float, nbytes: int = NBYTES) -> Iterator[Callable[[], object]]:
    """The same by a write and a read into an array that is there."""
    with ends_of_echo(spin, nbytes, nbytes) as (writer, reader):
        write, read, message, got = writer.write, reader.read, np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)

        def call() -> None:
            write(message)
            read(nbytes, None, got)

        yield call


def subjects(queue: Path, count: int, stack: ExitStack) -> list[Subject]:
    """All four ways; each with the floor that waits as it does."""
    polling, sleeping = (stack.enter_context(exchange_with_echo(spin)) for spin in (POLL, 0))
    written, slept = (stack.enter_context(write_and_read(spin)) for spin in (POLL, 0))
    a, b, out = np.ones((1, 4), np.float32), np.ones((1, 4), np.float32), np.empty((1, 4), np.float32)
    return [
        Subject(ADD, block_of(partial(np.add, a, b, out=out), count), SPIN),
        Subject(C_SPIN, c_block(queue, "spin", count * 10, NBYTES), SPIN, is_ours=True),
        Subject(PY_SPIN, block_of(polling, count), SPIN, is_ours=True),
        Subject(WR_SPIN, block_of(written, count), SPIN, is_ours=True),
        Subject(C_SLEEP, c_block(queue, "sleep", count, NBYTES), FUTEX, is_ours=True),
        Subject(PY_SLEEP, block_of(sleeping, count), FUTEX, is_ours=True),
        Subject(WR_SLEEP, block_of(slept, count), FUTEX, is_ours=True),
    ]


def subjects_of_a_kib(count: int, stack: ExitStack) -> list[Subject]:
    """What stands beside msgq."""
    ways = ((PY_SPIN, exchange_with_echo, POLL), (WR_SPIN, write_and_read, POLL), (PY_SLEEP, exchange_with_echo, 0))
    return [
        Subject(
            of_size(name, KIB),
            block_of(stack.enter_context(way(spin, KIB)), count),
            of_size(SPIN if spin else FUTEX, KIB),
            is_ours=True,
        )
        for name, way, spin in ways
    ]


def of_size(name: str, nbytes: int) -> str:
    """The name of a row. 64 bytes are not told: they are what this script is about."""
    return name if nbytes == NBYTES else f"{name}, {size(nbytes)}"


def floor_of(nbytes: int) -> str:
    """The name of the floor of a size, polling."""
    return of_size(SPIN if nbytes <= MOST_OF_LIMIT else RING, nbytes)


def subjects_of_size(nbytes: int, queue: Path, count: int, stack: ExitStack) -> list[Subject]:
    """The two ways that poll."""
    polling, floor = stack.enter_context(exchange_with_echo(POLL, nbytes)), floor_of(nbytes)
    in_c, from_python = of_size(C_SPIN, nbytes), of_size(PY_SPIN, nbytes)
    return [
        Subject(in_c, c_block(queue, "spin", count, nbytes), floor, is_ours=True),
        Subject(from_python, block_of(polling, count), floor, is_ours=True),
    ]


def count_of(nbytes: int, count: int) -> int:
    """Fewer of large messages: a block of 1 MiB takes as long as one of 64 bytes."""
    return max(50, count // (1 + nbytes // 4096))


def peers(names: Sequence[str], count: int, ask: Ask) -> list[Subject]:
    """What a user would pick instead."""
    asked = [(name, NBYTES) for name in names if name not in ("msgq", "msgq_wait")]
    asked += [(name, KIB) for name in names if name in OF_A_KIB]
    return [
        Subject(
            of_size(name, nbytes),
            peer_block(ask, name, count, nbytes),
            of_size(SPIN if name in POLLING_PEERS else FUTEX, nbytes),
        )
        for name, nbytes in asked
    ]


def against(runs: Runs, name: str, reference: str) -> Estimate | None:
    """A ratio, where both were measured."""
    return ratio(runs, name, reference) if runs.has(name, reference) else None


def least(runs: Runs, name: str, reference: str) -> Estimate | None:
    """As `against`, of the fastest round trip of each block."""
    if not runs.has(name, reference):
        return None
    ours, theirs = (np.array([block["cdf_us"][0] for block in runs.blocks[which]]) for which in (name, reference))
    return estimate(ours / theirs)


def budgets(runs: Runs) -> list[Budget]:
    """What ours must be."""
    kib, msgq = of_size(PY_SPIN, KIB), of_size("msgq", KIB)
    return [
        Budget("C, polling <= 1.0 x limit spin", times_floor(runs, C_SPIN), 1.0),
        Budget("C, sleeping <= 1.15 x limit futex", times_floor(runs, C_SLEEP), 1.15),
        Budget("Python, polling <= floor + 0.7 A", over_floor_in_adds(runs, PY_SPIN), 0.7, "A"),
        Budget("Python, write + read(out=), polling <= floor + 0.7 A", over_floor_in_adds(runs, WR_SPIN), 0.7, "A"),
        Budget("Python, sleeping <= 1.15 x limit futex", times_floor(runs, PY_SLEEP), 1.15),
        Budget("Python, write + read(out=), sleeping <= 1.15 x limit futex", times_floor(runs, WR_SLEEP), 1.15),
        Budget("Python, polling <= 0.25 x iceoryx2", against(runs, PY_SPIN, "iceoryx2"), 0.25),
        Budget("Python, sleeping <= 1.0 x the POSIX message queue", against(runs, PY_SLEEP, "posix_mq"), 1.0),
        Budget("Python, polling, 1 KiB <= 1.0 x msgq, p50", against(runs, kib, msgq), 1.0),
        Budget("Python, polling, 1 KiB <= 1.0 x msgq, least", least(runs, kib, msgq), 1.0),
        Budget(
            "Python, sleeping, 1 KiB <= 1.0 x msgq",
            against(runs, of_size(PY_SLEEP, KIB), of_size("msgq_wait", KIB)),
            1.0,
        ),
    ]


def run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    count, peer_count = (50, 200) if args.quick else (2000, 1000)
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        queue = compile_queue(directory / "queue")
        limit = compile_c(directory / "limit", HERE / "peers" / "limit.c")
        modes = ((SPIN, "spin", count * 10), (FUTEX, "futex", count))
        floors = {
            of_size(name, nbytes): c_block(limit, mode, some, nbytes)
            for nbytes in (NBYTES, KIB)
            for name, mode, some in modes
        }
        args.subjects = [
            *subjects(queue, count, stack),
            *subjects_of_a_kib(count, stack),
            *peers(args.peers, peer_count, stack.enter_context(peers_process())),
        ]
        ring = compile_c(directory / "spsc", HERE / "peers" / "spsc.c") if args.sizes else limit
        for nbytes in args.sizes:
            some = count_of(nbytes, count)
            is_small = nbytes <= MOST_OF_LIMIT
            binary, mode = (limit, "spin") if is_small else (ring, "roundtrip")
            floors[floor_of(nbytes)] = c_block(binary, mode, some, nbytes)
            args.subjects += subjects_of_size(nbytes, queue, some, stack)
        return interleave(args.subjects, floors, args.pairs, progress)


def settle(args: argparse.Namespace) -> None:
    """Without --sizes there are no others; with it and no number, those of SIZES."""
    wanted = () if args.sizes is None else args.sizes or SIZES
    if min(wanted, default=1) < 1:
        raise ValueError("--sizes: at least 1")
    args.sizes = sorted({*wanted} - {NBYTES, KIB})


def against_size(rows: list[dict[str, Any]], sizes: Sequence[int]) -> list[plots.Line]:
    """The curves of the picture; the floor's two halves are one."""
    import plots

    p50 = {row["name"]: row["p50_us"] for row in rows if "error" not in row}
    names = {
        "queue from Python": (partial(of_size, PY_SPIN), plots.OURS, "--"),
        "queue in C": (partial(of_size, C_SPIN), plots.OURS, "-"),
        "floor": (floor_of, plots.FLOOR, "-"),
    }
    return [
        plots.Line(name, sizes, [p50[row_of(nbytes)] for nbytes in sizes], colour, style)
        for name, (row_of, colour, style) in names.items()
    ]


def draw(args: argparse.Namespace, _: Runs, rows: list[dict[str, Any]]) -> None:
    """64 bytes in full, or one figure of every size."""
    import plots

    if args.sizes:
        lines = against_size(rows, sorted({NBYTES, *args.sizes}))
        plots.latency_against_size(args.plot, lines, "There and back through two queues, polling")
    else:
        plots.latencies(args.plot, rows, [PY_SPIN, PY_SLEEP], "64 bytes each way through two queues")


ROUNDTRIP = beside_floors(
    __doc__,
    run,
    options={
        "--sizes": {"nargs": "*", "type": int, "metavar": "BYTES", "help": "also messages of these sizes, polling"}
    },
    peers=PEERS,
    settle=settle,
    budgets=lambda runs, _: budgets(runs),
    draw=draw,
)

if __name__ == "__main__":
    ROUNDTRIP.answer()
