"""What does an idle queue cost as their number grows?

    python bench/queue_cost.py [--pairs 9] [--counts 1 10 100 1000] [--json FILE] [--plot FILE]

One process makes that many queues of 64 elements of 64 bytes and takes the writer of each; another attaches them and
takes the readers; then neither does anything. Both say what they have more than before: resident memory, and how much
of it the two share (smaps_rollup), file descriptors, mappings, threads, all divided by the number of queues; and how
long making and attaching the median queue took. Every round starts both processes anew. A memory each, and, where this
version has it, all queues in one region.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import CLIENT_CPU, DEVICE_CPU, Runs, conditions, held
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import fmq
from driver.cli.timing import Estimate, estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

QUESTION = "What does an idle queue cost as their number grows?"
DTYPE, CAPACITY = "V64", 64
EACH, TOGETHER = "a memory each", "in one region"
WAYS, SIDES = (EACH, TOGETHER), ("maker", "attacher")
COUNTS = (1, 10, 100, 1000)
STRIDE = 8192  # bytes of a queue in a region: the control page and the ring
FDS_PER_MESSAGE = 200  # the kernel takes 253
KEYS = ("us", "resident_kib", "shared_kib", "fds", "mappings", "threads")
HEAD = ("queues", "", "us to make or attach", "resident KiB", "of it shared KiB", "fds", "mappings", "threads")


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


def name_of(way: str, count: int, side: str) -> str:
    """Of a row."""
    return f"{count} {way}, {side}"


def run(args: argparse.Namespace) -> Runs:
    """All rounds, in an order that turns around."""
    runs = Runs()
    order = [(way, count) for way in WAYS for count in args.counts]
    for number in range(args.pairs):
        for way, count in order[:: -1 if number % 2 else 1]:
            progress(f"round {number + 1} of {args.pairs}", f"{count} {way}")
            found = block(way, count)
            for side in SIDES:
                runs.blocks.setdefault(name_of(way, count, side), []).append(found[side])
    progress("")
    return runs


def rows_of(runs: Runs, counts: Sequence[int]) -> list[dict[str, Any]]:
    """A row per way, number and side."""
    rows = []
    for way, count, side in ((way, count, side) for way in WAYS for count in counts for side in SIDES):
        name = name_of(way, count, side)
        row: dict[str, Any] = {"name": name, "way": way, "count": count, "side": side, "ours": True}
        if name in runs.errors:
            rows.append({**row, "error": runs.errors[name]})
        else:
            figures = {key: float(np.median(runs.values(name, key))) for key in KEYS}
            rows.append({**row, **figures, "rounds": runs.blocks[name]})
    return rows


def line_of(runs: Runs, row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    head = f"{row['count']} {row['way']}", row["side"]
    if "error" in row:
        return *head, row["error"], "", "", "", "", ""
    figures = (f"{row[key]:.2f}" for key in KEYS if key != "us")
    return *head, spell(estimate(runs.values(row["name"], "us"))), *figures


def growth(runs: Runs, way: str, side: str, key: str, counts: Sequence[int]) -> Estimate | None:
    """What one of the many costs, to what one of a tenth of them does; in pairs."""
    if len(counts) < 2:
        return None
    many, few = (name_of(way, count, side) for count in (counts[-1], counts[-2]))
    return estimate(runs.values(many, key) / runs.values(few, key)) if runs.has(many, few) else None


def of_many(runs: Runs, way: str, key: str, counts: Sequence[int]) -> Estimate | None:
    """The larger side's, for the largest number."""
    names = [name_of(way, counts[-1], side) for side in SIDES]
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


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Time and memory per queue against their number."""
    import plots

    plots.costs(path, [row for row in rows if "error" not in row], QUESTION)


def main() -> None:
    """Measures, prints, writes."""
    parser = arguments(__doc__)
    parser.add_argument("--counts", type=int, nargs="+", metavar="N", help="of queues (default 1 10 100 1000)")
    args = parse(parser)
    args.counts = sorted(args.counts or ((1, 10) if args.quick else COUNTS))
    if args.counts[0] < 1:
        parser.error("--counts: at least 1")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = {**conditions(), "most_fds": hard}
    runs = run(args)
    rows = rows_of(runs, args.counts)
    lines = [line_of(runs, row) for row in rows]
    publish(args, Report(QUESTION, found, lines, budgets(runs, args.counts), {"subjects": rows}, HEAD))
    if args.plot:
        draw(args.plot, rows)


if __name__ == "__main__":
    main()
