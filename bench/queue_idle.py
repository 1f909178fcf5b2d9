"""What does a waiting reader cost?

    python bench/queue_idle.py [--pairs 9] [--seconds 5] [--json FILE] [--plot FILE]
    python bench/queue_idle.py number [--pairs 9] [--counts 1 10 100 1000] [--json FILE] [--plot FILE]

One process per way of waiting, all of them waiting at the same time, for a message that does not come: in the main
thread, where Python runs signal handlers, and in another one. Wake-ups are the context switches of all of a process's
threads, of both kinds, as /proc counts them; CPU time is its CPU clock's, user and system. Both are read from outside.
After the last round each is sent what it waits for, and a process that had not been waiting fails here.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import (
    CLIENT_CPU,
    DEVICE_CPU,
    Budget,
    Runs,
    ask,
    held,
    progress,
    rounds,
)
from question import Question, interval, median

import fmq
from driver.cli.timing import Estimate, estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from driver.cli.timing import Estimate

MAIN, OTHER = "main thread", "other thread"
QUEUES = 8  # for the process that waits for several
SETTLE = 0.5  # seconds between "I am about to wait" and the first look

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
                runs.add(name_of(w.name, w.where), block)
        progress("")
    return runs


def most(runs: Runs, where: str) -> Estimate:
    """Wake-ups of whichever of ours had the most, round by round."""
    ours = [name_of(what, where) for what in WAYS if runs.has(name_of(what, where))]
    return estimate(np.max([runs.values(name, "wakeups_per_s") for name in ours], axis=0))


WAITING = Question(
    __doc__,
    run,
    {
        "where": lambda _, name: name.rpartition(", ")[2],
        "wake-ups per s": interval("wakeups_per_s"),
        "CPU us per s": interval("cpu_us_per_s"),
    },
    options={"--seconds": {"type": float, "metavar": "S", "help": "of a round (default 5, with --quick 0.3)"}},
    settle=lambda args: vars(args).update(seconds=args.seconds or (0.3 if args.quick else 5.0)),
    budgets=lambda runs, _: [
        Budget("no wake-ups outside the main thread, whichever has the most", most(runs, OTHER), 0, "per s"),
        Budget("in the main thread at most 10 per second", most(runs, MAIN), 10, "per s"),
    ],
    figures=("wakeups_per_s", "cpu_us_per_s"),
    group=lambda _: "a process that waits in",
    label=lambda name: name.rpartition(", ")[0],
    ours=[name_of(what, where) for what in WAYS for where in (MAIN, OTHER)],
    kept=("seconds",),
    bars=("wakeups_per_s", "wake-ups per second"),
    is_pinned=False,
)

# ---- number


DTYPE, CAPACITY = "V64", 64
EACH, TOGETHER = "a memory each", "in one region"
NUMBER_WAYS, SIDES = (EACH, TOGETHER), ("maker", "attacher")
COUNTS = (1, 10, 100, 1000)
STRIDE = 8192  # bytes of a queue in a region: the control page and the ring
FDS_PER_MESSAGE = 200  # the kernel takes 253
KEYS = ("us", "resident_kib", "shared_kib", "fds", "mappings", "threads")


def make(way: str, count: int, times: list[float]) -> list[tuple[fmq.MessageQueue, fmq.MessageQueueWriter]]:
    """The queues and their writers; seconds of each."""
    ends, begin = [], time.perf_counter()
    region = fmq.Region.create(count * STRIDE) if way == TOGETHER else None
    for k in range(count):
        queue = fmq.MessageQueue.create(DTYPE, CAPACITY, region=region, offset=k * STRIDE if region else 0)
        ends.append((queue, queue.writer()))
        times.append(time.perf_counter() - begin)
        begin += times[-1]
    return ends


def maker(line: Connection, sock: socket.socket, way: str, count: int) -> None:
    """Makes all, sends them over `sock`, and says what they cost when they are attached."""
    os.sched_setaffinity(0, {CLIENT_CPU})
    make(way, 1, [])  # what the first one costs besides, in imports and caches, is not a queue's
    before, times = held(), []
    queues = make(way, count, times)
    wires = [queue.descriptor.to_wire() for queue, _ in queues]
    line.send([plain for plain, _ in wires])
    fds = [fd for _, its in wires[: count if way == EACH else 1] for fd in its]  # one region has one
    for i in range(0, len(fds), FDS_PER_MESSAGE):
        socket.send_fds(sock, [b"x"], fds[i : i + FDS_PER_MESSAGE])
    del wires
    for queue, _ in queues:
        queue.close()  # its writer lives on, and needs no more than this
    answer(line, before, times)


def attacher(line: Connection, sock: socket.socket, way: str, count: int) -> None:
    """Attaches all."""
    os.sched_setaffinity(0, {DEVICE_CPU})
    make(EACH, 1, [])[0][0].reader().close()
    before, wires = held(), line.recv()
    times: list[float] = []
    ends = list(attached(sock, way, wires, times))
    assert len(ends) == count
    del wires
    answer(line, before, times)


def attached(sock: socket.socket, way: str, wires: list[Any], times: list[float]) -> Iterator[fmq.MessageQueueReader]:
    """The readers of all; seconds of each. Descriptors that arrive are checked; a region is checked once."""
    fds: list[int] = []
    region = None
    for k, plain in enumerate(wires):
        if not fds and region is None:
            fds = list(socket.recv_fds(sock, 1, FDS_PER_MESSAGE)[1])
        begin = time.perf_counter()
        if way == EACH:
            with fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, [fds.pop(0)])) as queue:
                reader = queue.reader()
        else:
            region = region or fmq.Region.from_fd(fds.pop())
            reader = fmq.MessageQueue.open(region, offset=k * STRIDE).reader()
        times.append(time.perf_counter() - begin)
        yield reader


def answer(line: Connection, before: dict[str, float], times: list[float]) -> None:
    """When the other side is ready too. Per queue, and of the times the median; then stays until it is told to go."""
    line.send("ready")
    line.recv()
    after = held()
    line.send({"us": float(np.median(times)) * 1e6, **{k: (after[k] - before[k]) / len(times) for k in after}})
    line.recv()


def block(way: str, count: int) -> dict[str, dict[str, float]]:
    """Both processes, from their start to their end."""
    context = multiprocessing.get_context("spawn")
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    lines, processes = [], []
    for target, sock in zip((maker, attacher), sockets, strict=True):
        near, far = context.Pipe()
        processes.append(context.Process(target=target, args=(far, sock, way, count), daemon=True))
        processes[-1].start()
        far.close()
        lines.append(near)
    lines[1].send(lines[0].recv())
    for line in lines:
        assert line.recv() == "ready"
    found = {}
    for side, line in zip(SIDES, lines, strict=True):
        line.send("look")
        found[side] = line.recv()
    for line, process in zip(lines, processes, strict=True):
        line.send("go")
        process.join(30)
    for sock in sockets:
        sock.close()
    return found


def number_name_of(way: str, count: int, side: str) -> str:
    """Of a row."""
    return f"{count} {way}, {side}"


def number_run(args: argparse.Namespace) -> Runs:
    """All rounds, in an order that turns around."""
    runs = Runs()
    order = [(way, count) for way in NUMBER_WAYS for count in args.counts]
    for way, count in rounds(args.pairs, order, lambda one: f"{one[1]} {one[0]}"):
        found = block(way, count)
        for side in SIDES:
            runs.add(number_name_of(way, count, side), found[side])
    return runs


def growth(runs: Runs, way: str, side: str, key: str, counts: Sequence[int]) -> Estimate | None:
    """What one of the many costs, to what one of a tenth of them does; in pairs."""
    if len(counts) < 2:
        return None
    many, few = (number_name_of(way, count, side) for count in (counts[-1], counts[-2]))
    return estimate(runs.values(many, key) / runs.values(few, key)) if runs.has(many, few) else None


def of_many(runs: Runs, way: str, key: str, counts: Sequence[int]) -> Estimate | None:
    """The larger side's, for the largest number."""
    names = [number_name_of(way, counts[-1], side) for side in SIDES]
    return estimate(np.max([runs.values(name, key) for name in names], axis=0)) if runs.has(*names) else None


def budgets(runs: Runs, counts: Sequence[int]) -> list[Budget]:
    """What ours must be."""
    most, fewer = f"of {counts[-1]}", f"of {counts[-2]}" if len(counts) > 1 else "-"
    return [
        Budget(f"making one {most} <= 1.5 x one {fewer}", growth(runs, EACH, "maker", "us", counts), 1.5),
        Budget(f"attaching one {most} <= 1.5 x one {fewer}", growth(runs, EACH, "attacher", "us", counts), 1.5),
        Budget(f"one {most}: resident <= 16 KiB", of_many(runs, EACH, "resident_kib", counts), 16, "KiB"),
        Budget(f"one {most} in a region: fds <= 0.01", of_many(runs, TOGETHER, "fds", counts), 0.01, "fds"),
        Budget(f"one {most} in a region: mappings <= 1.01", of_many(runs, TOGETHER, "mappings", counts), 1.01, "maps"),
    ]


def draw(args: argparse.Namespace, _: Runs, rows: list[dict[str, Any]]) -> None:
    """Time and memory per queue against their number."""
    import plots

    plots.costs(args.plot, rows, "What does an idle queue cost as their number grows?")


def settle_counts(args: argparse.Namespace) -> None:
    """As many descriptors as may be."""
    args.counts = sorted(args.counts or ((1, 10) if args.quick else COUNTS))
    if args.counts[0] < 1:
        raise ValueError("--counts: at least 1")
    args.most_fds = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.most_fds, args.most_fds))


def parts_of(name: str) -> dict[str, Any]:
    """What is in a row's name."""
    kind, _, side = name.rpartition(", ")
    count, _, way = kind.partition(" ")
    return {"way": way, "count": int(count), "side": side}


def number_rows(runs: Runs, _: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per way, number and side."""
    return [
        {"name": name, **parts_of(name), "ours": True, **runs.medians(name, *KEYS), "rounds": runs.blocks[name]}
        for name in runs.blocks
    ]


NUMBER = Question(
    """What does an idle queue cost as their number grows?

        python bench/queue_idle.py number [--pairs 9] [--counts 1 10 100 1000] [--json FILE] [--plot FILE]

    One process makes that many queues of 64 elements of 64 bytes and takes the writer of each; another attaches them
    and takes the readers; then neither does anything. Both say what they have more than before: resident memory, and
    how much of it the two share (smaps_rollup), file descriptors, mappings, threads, all divided by the number of
    queues; and how long making and attaching the median queue took. Every round starts both processes anew. A memory
    each, and, where this version has it, all queues in one region.
    """,
    number_run,
    {
        "": lambda _, name: parts_of(name)["side"],
        "us to make or attach": interval("us"),
        "resident KiB": median("resident_kib"),
        "of it shared KiB": median("shared_kib"),
        "fds": median("fds"),
        "mappings": median("mappings"),
        "threads": median("threads"),
    },
    options={"--counts": {"type": int, "nargs": "+", "metavar": "N", "help": "of queues (default 1 10 100 1000)"}},
    settle=settle_counts,
    budgets=lambda runs, args: budgets(runs, args.counts),
    conditions=lambda args: {"most_fds": args.most_fds},
    group=lambda _: "queues",
    label=lambda name: name.rpartition(", ")[0],
    rows=number_rows,
    draw=draw,
    is_pinned=False,
)

if __name__ == "__main__":
    ask({"": WAITING.answer, "number": NUMBER.answer})
