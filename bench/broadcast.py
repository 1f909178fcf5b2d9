"""How long until the last reader of a broadcast has a message, and what do readers that wait cost?

    python bench/broadcast.py [--pairs 9] [--seconds 0.5] [--json FILE]

One writer process and 1 or 8 reader processes, none of them pinned; records on a broadcast queue beside
peers/chunks.py, which is the algorithm of vLLM's shm_broadcast: in turns, block by block. The writer sends at a rate;
the time of a message is from just before it is sent until the last reader has it as bytes. Readers of ours poll for
50 us and then sleep, which is the default; the peer's poll without an end. (vLLM has an option by which they sleep for
0.1 s at a time when nothing came for some seconds. At the rates here that never happens.) Idle: CPU time of each reader
while nothing is sent.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from measure import Runs, conditions
from verdict import Budget, Report, arguments, parse, progress, publish, size, spell

import fmq
from driver.cli.timing import estimate

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from chunks import CHUNKS, ChunkReader, ChunkRing, ChunkWriter

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from multiprocessing.connection import Connection

QUESTION = "How long until the last reader has it?"
OURS, PEER = "fmq, broadcast", "chunks and flags, polling"
HEAD = ("way", "readers", "message", "rate", "p50 us", "p99 us", "idle: % of a CPU each", "p50, x the peer's")
HEAD_BYTES = 16  # of a part of a record


class Load(NamedTuple):
    """What is sent, and to how many."""

    readers: int
    nbytes: int
    rate: int  # per second

    def row(self, way: str) -> str:
        """Its name."""
        return f"{way}, {self.readers} readers, {size(self.nbytes)}, {self.rate}/s"


LOADS = [
    Load(readers, nbytes, rate)
    for readers in (1, 8)
    for nbytes, rate in ((64, 10), (64, 1000), (64, 10000), (65536, 1000), (1 << 20, 10), (1 << 20, 100))
]


class Writer(Protocol):
    """What sends."""

    def send(self, data: bytes) -> None:
        """Waits for room."""


@dataclass
class Way:
    """A broadcast: its writer, and what makes the reader of a process."""

    writer: Writer
    reader: Callable[[int], Callable[[], Any]]


def ours(load: Load) -> Way:
    """Records. The ring holds as many as the peer's has chunks."""
    capacity = CHUNKS * (load.nbytes + HEAD_BYTES)
    queue = fmq.MessageQueue.create("u1", capacity, fmq.Flavour.BROADCAST)

    def reader(_: int) -> Callable[[], Any]:
        return fmq.RecordReader(fmq.MessageQueue.open(queue.descriptor).reader()).receive

    return Way(fmq.RecordWriter(queue.writer()), reader)


def peer(load: Load) -> Way:
    """The chunks."""
    ring = ChunkRing(load.readers, load.nbytes)
    return Way(ChunkWriter(ring), lambda number: ChunkReader(ring, number).receive)


WAYS: dict[str, Callable[[Load], Way]] = {OURS: ours, PEER: peer}


def receive(line: Connection, make: Callable[[int], Callable[[], Any]], number: int, count: int) -> None:
    """A reader's process: when each message had come."""
    take, times = make(number), np.zeros(count, np.int64)
    line.send("here")
    for i in range(count):
        message = take()
        times[i] = time.monotonic_ns()
        if int.from_bytes(message[:8], "little") != i:
            raise SystemExit(f"bench: message {i} is lost")
    line.send(times)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads (CPUCLOCK_SCHED of clock_gettime(2))."""
    return time.clock_gettime(~pid << 3 | 2)


WARM = 2 * CHUNKS  # messages that are not counted: each page of the ring is touched, and the readers have begun


def send_all(writer: Writer, load: Load, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """When each message was about to be sent."""
    rest, times = bytes(load.nbytes - 8), np.zeros(count, np.int64)
    period, due = 1 / load.rate, time.monotonic()
    for i in range(count):
        due = time.monotonic() + 0.005 if i < WARM else max(due, time.monotonic() - period) + period
        if (early := due - time.monotonic()) > 0:
            time.sleep(early)
        message = i.to_bytes(8, "little") + rest
        times[i] = time.monotonic_ns()
        writer.send(message)
    return times


def block(name: str, load: Load, seconds: float) -> dict[str, float]:
    """Some seconds of one way."""
    way, count = WAYS[name](load), WARM + max(5, round(load.rate * seconds))
    context, lines, processes = multiprocessing.get_context("fork"), [], []
    for number in range(load.readers):
        near, far = multiprocessing.Pipe()
        process = context.Process(target=receive, args=(far, way.reader, number, count), daemon=True)
        process.start()
        lines.append(near)
        processes.append(process)
    try:
        for line in lines:
            line.recv()
        before, began = [cpu_seconds(p.pid or 0) for p in processes], time.monotonic()
        time.sleep(min(seconds, 0.3))
        idle = [cpu_seconds(p.pid or 0) - b for p, b in zip(processes, before, strict=True)]
        passed = time.monotonic() - began
        sent = send_all(way.writer, load, count)
        last = np.max([line.recv() for line in lines], axis=0)
    finally:
        for process in processes:
            process.kill()
            process.join()
    took = (last - sent)[WARM:] / 1e3
    p50, p99 = np.percentile(took, [50, 99])
    return {"p50_us": float(p50), "p99_us": float(p99), "idle_percent": 100 * max(idle) / passed}


def run(args: argparse.Namespace) -> Runs:
    """All rounds; within each, the two ways take turns."""
    runs = Runs()
    for number in range(args.pairs):
        for load in args.loads:
            for name in list(WAYS)[:: 1 if number % 2 else -1]:
                progress(f"round {number + 1} of {args.pairs}", load.row(name))
                runs.blocks.setdefault(load.row(name), []).append(block(name, load, args.seconds))
    progress("")
    return runs


def line_of(runs: Runs, name: str, load: Load) -> tuple[str, ...]:
    """One line of the table."""
    row = load.row(name)
    figures = (spell(estimate(runs.values(row, key))) for key in ("p50_us", "p99_us", "idle_percent"))
    times = spell(times_peer(runs, load)) if name == OURS else ""
    return name, str(load.readers), size(load.nbytes), f"{load.rate}/s", *figures, times


def times_peer(runs: Runs, load: Load) -> Any:
    """Our p50 over the peer's, round by round."""
    return estimate(runs.values(load.row(OURS)) / runs.values(load.row(PEER)))


def main() -> None:
    """Measures, prints, writes."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, metavar="S", help="of a block (default 0.5, with --quick 0.1)")
    args = parse(parser)
    args.seconds = args.seconds or (0.1 if args.quick else 0.5)
    args.loads = [load for load in LOADS if load.rate == 10] if args.quick else LOADS
    found = conditions()
    runs = run(args)
    lines = [line_of(runs, name, load) for load in args.loads for name in WAYS]
    budgets = [
        Budget(
            f"{load.readers} readers, {size(load.nbytes)}, {load.rate}/s: p50 <= the peer's", times_peer(runs, load), 1
        )
        for load in args.loads
        if load.readers == 8
    ]
    idle = np.max([runs.values(load.row(OURS), "idle_percent") for load in args.loads], axis=0)
    budgets.append(Budget("an idle reader, whichever has the most", estimate(idle), 1, "% of a CPU"))
    body = {"rows": dict(runs.blocks), "block_seconds": args.seconds}
    publish(args, Report(QUESTION, found, lines, budgets, body, HEAD))
    if args.plot:
        draw(args, runs)


def draw(args: argparse.Namespace, runs: Runs) -> None:
    """A dot for each load and way."""
    import plots

    rows = [
        {
            "name": name,
            "ours": name.startswith(OURS),
            "floor": "",
            **{key: float(np.median(runs.values(name, key))) for key in ("p50_us", "p99_us")},
            "rounds": rounds,
        }
        for name, rounds in runs.blocks.items()
    ]
    plots.latencies(args.plot, rows, [], "From the writer to the last reader")


if __name__ == "__main__":
    main()
