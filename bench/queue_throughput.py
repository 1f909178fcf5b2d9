"""How many elements and bytes per second does the queue carry, single and batched?

    python bench/queue_throughput.py [--pairs 9] [--peers all|none|pipe zmq …] [--json FILE] [--plot FILE]
    python bench/queue_throughput.py broadcast [--pairs 9] [--seconds 0.5] [--json FILE]

A producer on CPU 0 and a consumer on CPU 1 that do nothing else. In C (queue_throughput.c), for every size and batch:
by copying, in place, and the writer that overwrites; each right after a block of the smallest ring there is
(peers/spsc.c), which does the same with the elements. From Python, one element per call at every size and batches of
64 bytes: copying and in place, beside what a user would pick instead (peers/streams.py).
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from measure import (
    HERE,
    PEER_TIMEOUT,
    Block,
    Budget,
    Runs,
    Subject,
    ask,
    c_block,
    compile_c,
    compile_with_ours,
    cpu_seconds,
    figures_of,
    interleave,
    progress,
    ratio,
    scratch,
    size,
    spell,
    times_floor,
)
from question import Question, against, dots, interval

import fmq
from driver.cli.timing import estimate

sys.path.append(str(HERE / "peers"))
import streams
from chunks import CHUNKS, ChunkReader, ChunkRing, ChunkWriter

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from driver.cli.timing import Estimate

SIZES, BATCHES, MOST = (8, 64, 512, 4096, 65536, 1 << 20), (1, 4, 16, 64, 256), 1 << 20
COPY, PLACE, OVERWRITE = "write/read in C", "in place in C", "overwriting in C"
PY_COPY, PY_PLACE = "write/read", "reserve/peek"
FLOOR_COPY, FLOOR_PLACE = "floor: spsc", "floor: spsc in place"
IN_C = {COPY: ("copy", FLOOR_COPY), PLACE: ("place", FLOOR_PLACE), OVERWRITE: ("overwrite", FLOOR_COPY)}
OURS = (*IN_C, PY_COPY, PY_PLACE)
C_HEAD = (
    "in C",
    "floor ns",
    f"{COPY[:10]} ns",
    "MB/s",
    "x floor",
    "floor ns",
    "in place ns",
    "x floor",
    "overwriting ns",
)


class Cell(NamedTuple):
    """Elements of a size, so many per call."""

    nbytes: int
    batch: int

    def __str__(self) -> str:
        return f"{size(self.nbytes)} x {self.batch}"

    def of(self, what: str) -> str:
        """The name of a row."""
        return f"{what}, {self}"


# From Python


def dtype(cell: Cell) -> np.dtype[Any]:
    """Of one element."""
    return np.dtype("u8") if cell.nbytes == 8 else np.dtype((np.void, cell.nbytes))


def message(cell: Cell, data: bytes) -> Any:
    """A batch, as the writer wants it."""
    return np.frombuffer(data, dtype(cell))


def new_queue(cell: Cell) -> fmq.MessageQueue:
    """As many bytes as every subject may have in flight; batches never wrap."""
    return fmq.MessageQueue.create(dtype(cell), streams.ring_bytes(cell.nbytes * cell.batch) // cell.nbytes)


def ends(elements: Any) -> tuple[int, int]:
    """The first and the last byte."""
    octets = elements.view(np.uint8)
    return int(octets[0]), int(octets[-1])


def copying(cell: Cell) -> streams.Way:
    """MessageQueueWriter.write and MessageQueueReader.read."""
    queue = new_queue(cell)

    def receiver() -> tuple[streams.Take, streams.Look]:
        read = queue.reader().read
        return partial(read, cell.batch), lambda: ends(read(cell.batch))

    return streams.Way(lambda: queue.writer().write, receiver, partial(message, cell))


def in_place(cell: Cell) -> streams.Way:
    """MessageQueueWriter.reserve, and a copy into it; MessageQueueReader.peek, and a look at it."""
    queue, n = new_queue(cell), cell.batch

    def sender() -> Callable[[Any], object]:
        reserve = queue.writer().reserve

        def put(batch: Any) -> None:
            with reserve(n) as span:
                span.first[:] = batch

        return put

    def receiver() -> tuple[streams.Take, streams.Look]:
        peek = queue.reader().peek

        def take() -> None:
            with peek(n):
                pass

        def look() -> tuple[int, int]:
            with peek(n) as span:
                return ends(span.first)

        return take, look

    return streams.Way(sender, receiver, partial(message, cell))


def python_block(way: Callable[[], streams.Way], cell: Cell, seconds: float) -> Callable[[], Block]:
    """Microseconds per element."""

    def block() -> Block:
        row = streams.isolated(way, cell.nbytes * cell.batch, seconds, PEER_TIMEOUT)
        return {key: figures_of(row)[key] / cell.batch for key in ("p50_us", "p99_us", "p999_us", "max_us")}

    return block


# What is measured


def cells_in_c(args: argparse.Namespace) -> list[Cell]:
    """Every size and batch, up to 1 MiB a call."""
    return [Cell(n, batch) for n in args.sizes for batch in args.batches if n * batch <= MOST]


def cells_from_python(args: argparse.Namespace) -> list[Cell]:
    """One element per call at every size, and all batches of 64 bytes."""
    return list(dict.fromkeys([Cell(n, 1) for n in args.sizes] + [Cell(64, batch) for batch in args.batches]))


def subjects_in_c(cell: Cell, queue: Path, count: int) -> list[Subject]:
    """Three ways, each with the floor that does the same."""
    return [
        Subject(cell.of(what), c_block(queue, mode, count, *cell), cell.of(floor), is_ours=True)
        for what, (mode, floor) in IN_C.items()
    ]


def subjects_from_python(cell: Cell, peers: Sequence[str], seconds: float) -> list[Subject]:
    """Ours and the others."""
    ways: dict[str, Callable[[], streams.Way]] = {PY_COPY: partial(copying, cell), PY_PLACE: partial(in_place, cell)}
    ways |= {name: partial(streams.PEERS[name], cell.nbytes * cell.batch) for name in peers}
    return [
        Subject(cell.of(what), python_block(way, cell, seconds), cell.of(FLOOR_COPY), is_ours=what in OURS)
        for what, way in ways.items()
    ]


def elements(cell: Cell, *, quick: bool) -> int:
    """Of a block in C: about a tenth of a second."""
    return 1 if quick else min(2_000_000, (1 << 29) // cell.nbytes)


def run(args: argparse.Namespace) -> Runs:
    """All rounds. Cell by cell, so that what is compared stands close together."""
    with scratch() as directory:
        spsc = compile_c(directory / "spsc", HERE / "peers" / "spsc.c")
        queue = compile_with_ours(directory / "queue", HERE / "queue_throughput.c")
        args.subjects, floors = [], {}
        in_c, from_python = cells_in_c(args), cells_from_python(args)
        for cell in dict.fromkeys((*in_c, *from_python)):
            count = elements(cell, quick=args.quick)
            floors[cell.of(FLOOR_COPY)] = c_block(spsc, "copy", count, *cell)
            floors[cell.of(FLOOR_PLACE)] = c_block(spsc, "place", count, *cell)
            if cell in in_c:
                args.subjects += subjects_in_c(cell, queue, count)
            if cell in from_python:
                args.subjects += subjects_from_python(cell, args.peers, 0.01 if args.quick else 0.25)
        return interleave(args.subjects, floors, args.pairs, progress)


# What is told


def nanoseconds(runs: Runs, name: str) -> float:
    """Per element."""
    return float(np.median(runs.values(name))) * 1e3


def rows_of(runs: Runs, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per subject and floor."""
    cells = list(dict.fromkeys((*cells_in_c(args), *cells_from_python(args))))
    what = (FLOOR_COPY, FLOOR_PLACE, *IN_C, PY_COPY, PY_PLACE, *args.peers)
    known = {subject.name: subject for subject in args.subjects}
    rows = []
    for cell, one in ((cell, one) for cell in cells for one in what):
        name = cell.of(one)
        row = {"name": name, "what": one, "bytes": cell.nbytes, "batch": cell.batch, "ours": one in OURS}
        if name in runs.errors:
            rows.append({**row, "error": runs.errors[name]})
        elif runs.has(name):
            ns = nanoseconds(runs, name)
            row |= {"ns": ns, "elements_per_s": 1e9 / ns, "mb_per_s": cell.nbytes / ns * 1e3}
            if name in known:
                row |= {"floor": known[name].floor, "times_floor": times_floor(runs, name)._asdict()}
            rows.append({**row, "rounds": runs.blocks[name]})
    return rows


def best_peer(runs: Runs, cell: Cell) -> str | None:
    """The fastest of the others in this cell."""
    found = [cell.of(name) for name in streams.PEERS if runs.has(cell.of(name))]
    return min(found, key=partial(nanoseconds, runs), default=None)


def to_best_peer(runs: Runs, cell: Cell, what: str) -> Estimate | None:
    """Ours, in pairs with it."""
    best = best_peer(runs, cell)
    return ratio(runs, cell.of(what), best) if best and runs.has(cell.of(what)) else None


def _to_floor(runs: Runs, cell: Cell, what: str) -> Estimate | None:
    return times_floor(runs, cell.of(what)) if runs.has(cell.of(what)) else None


def line_in_c(runs: Runs, cell: Cell) -> tuple[str, ...]:
    """One line of the first table."""
    copy, place = cell.of(COPY), cell.of(PLACE)
    floors = [f"{nanoseconds(runs, cell.of(floor)):.2f}" for floor in (FLOOR_COPY, FLOOR_PLACE)]
    ns = nanoseconds(runs, copy)
    copied = f"{ns:.2f}", f"{cell.nbytes / ns * 1e3:.0f}", spell(times_floor(runs, copy))
    placed = f"{nanoseconds(runs, place):.2f}", spell(times_floor(runs, place))
    return str(cell), floors[0], *copied, floors[1], *placed, f"{nanoseconds(runs, cell.of(OVERWRITE)):.2f}"


def line_from_python(runs: Runs, cell: Cell, peers: Sequence[str]) -> tuple[str, ...]:
    """One line of the second: nanoseconds per element and, in brackets, MB/s."""
    figures = []
    for what in (PY_COPY, PY_PLACE, *peers):
        name = cell.of(what)
        if name in runs.errors:
            figures.append(runs.errors[name][:30])
        else:
            ns = nanoseconds(runs, name)
            figures.append(f"{ns:.0f} ({cell.nbytes / ns * 1e3:.3g})")
    return str(cell), *figures, *(spell(to_best_peer(runs, cell, what)) for what in (PY_COPY, PY_PLACE))


def budgets(runs: Runs) -> list[Budget]:
    """What ours must be."""
    floor, best = partial(_to_floor, runs), partial(to_best_peer, runs)
    return [
        Budget("C, 64 B one per call <= 1.5 x spsc", floor(Cell(64, 1), COPY), 1.5),
        Budget("C, 64 B in batches of 16 <= 1.25 x spsc", floor(Cell(64, 16), COPY), 1.25),
        Budget("C, 64 KiB one per call <= 1.1 x spsc", floor(Cell(65536, 1), COPY), 1.1),
        Budget("Python, 64 B one per call <= 1 x the best peer", best(Cell(64, 1), PY_COPY), 1.0),
        Budget("Python, 64 KiB in place <= 1 x the best peer", best(Cell(65536, 1), PY_PLACE), 1.0),
    ]


def settle(args: argparse.Namespace) -> None:
    """Few cells where nothing is measured."""
    args.sizes, args.batches = ((64, 65536), (1, 16)) if args.quick else (SIZES, BATCHES)


def tables(runs: Runs, args: argparse.Namespace) -> list[Any]:
    """In C, and from Python."""
    in_c = [line_in_c(runs, cell) for cell in cells_in_c(args)]
    from_python = [line_from_python(runs, cell, args.peers) for cell in cells_from_python(args)]
    head = ("from Python, ns (MB/s)", PY_COPY, PY_PLACE, *args.peers, f"{PY_COPY} x best", f"{PY_PLACE} x best")
    return [(in_c, C_HEAD), (from_python, head)]


def draw_streams(args: argparse.Namespace, _: Runs, rows: list[dict[str, Any]]) -> None:
    """Of all cells."""
    import plots

    plots.streams(args.plot, rows, "One way through a queue, between two processes")


STREAMS = Question(
    __doc__,
    run,
    peers=streams.PEERS,
    settle=settle,
    budgets=lambda runs, _: budgets(runs),
    rows=rows_of,
    tables=tables,
    draw=draw_streams,
)

# ---- broadcast


BROADCAST_OURS, PEER = "fmq, broadcast", "chunks and flags, polling"
POLLING, IN_PLACE = "fmq, polling for 2 ms", "fmq, in place"
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


def ours(load: Load, spin: float = fmq.end.DEFAULT_SPIN, *, in_place: bool = False) -> Way:
    """Records. The ring holds as many as the peer's has chunks; in place they are looked at, and not copied."""
    capacity = CHUNKS * (load.nbytes + HEAD_BYTES)
    queue = fmq.MessageQueue.create("u1", capacity, fmq.Flavour.BROADCAST)

    def reader(_: int) -> Callable[[], Any]:
        end = fmq.MessageQueue.open(queue.descriptor).reader()
        end.spin = spin
        records = fmq.RecordReader(end)

        def look() -> bytes:
            with records.receive_in_place() as record:
                return bytes(record[:8])

        return look if in_place else records.receive

    return Way(fmq.RecordWriter(queue.writer()), reader)


def peer(load: Load) -> Way:
    """The chunks."""
    ring = ChunkRing(load.readers, load.nbytes)
    return Way(ChunkWriter(ring), lambda number: ChunkReader(ring, number).receive)


WAYS: dict[str, Callable[[Load], Way]] = {
    BROADCAST_OURS: ours,
    POLLING: partial(ours, spin=2e-3),
    IN_PLACE: partial(ours, in_place=True),
    PEER: peer,
}


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


def ways_for(load: Load) -> list[str]:
    """All; to one reader, the usual ones."""
    return list(WAYS) if load.readers > 1 else [BROADCAST_OURS, PEER]


def broadcast_run(args: argparse.Namespace) -> Runs:
    """All rounds; within each, the ways take turns."""
    runs = Runs()
    for number in range(args.pairs):
        for load in args.loads:
            for name in ways_for(load)[:: -1 if number % 2 else 1]:
                progress(f"round {number + 1} of {args.pairs}", load.row(name))
                runs.add(load.row(name), block(name, load, args.seconds))
    progress("")
    return runs


def way_of(row: str) -> str:
    """Its way."""
    return next(way for way in WAYS if row.startswith(way))


def load_of(row: str) -> list[str]:
    """The readers, the message and the rate of a row."""
    return row.removeprefix(f"{way_of(row)}, ").split(", ")


def times_peer(runs: Runs, row: str) -> Estimate:
    """Our p50 over the peer's, round by round."""
    return against(row.replace(way_of(row), PEER), "p50_us")(runs, row)


def settle_broadcast(args: argparse.Namespace) -> None:
    """Few loads where nothing is measured."""
    args.seconds = args.seconds or (0.1 if args.quick else 0.5)
    args.loads = [load for load in LOADS if load.rate == 10] if args.quick else LOADS


def broadcast_budgets(runs: Runs, args: argparse.Namespace) -> list[Budget]:
    """As fast as those that poll, and next to nothing while nothing comes."""
    many = [load for load in args.loads if load.readers == 8]
    rows = [load.row(way) for load in args.loads for way in ways_for(load) if way != PEER]
    idle = np.max([runs.values(row, "idle_percent") for row in rows], axis=0)
    return [
        Budget(
            f"{way}, {load.readers} readers, {size(load.nbytes)}, {load.rate}/s: p50 over the peer's",
            times_peer(runs, load.row(way)),
            most,
        )
        for load in many
        for way, most in ((BROADCAST_OURS, 1), (POLLING, 2 if load.nbytes == 64 else 1), (IN_PLACE, 1))
    ] + [Budget("an idle reader, whichever has the most", estimate(idle), 1, "% of a CPU")]


BROADCAST = Question(
    """How long until the last reader of a broadcast has a message, and what do readers that wait cost?

        python bench/queue_throughput.py broadcast [--pairs 9] [--seconds 0.5] [--json FILE]

    One writer process and 1 or 8 reader processes, none of them pinned; records on a broadcast queue beside
    peers/chunks.py, which is the algorithm of vLLM's shm_broadcast: in turns, block by block. The writer sends at a
    rate; the time of a message is from just before it is sent until the last reader has it as bytes. Readers of ours
    poll for 50 us and then sleep, which is the default, or for 2 ms (`reader.spin`); in place they look at a message
    where it lies (`receive_in_place`). The peer's poll without an end. (vLLM has an option by which
    they sleep for 0.1 s at a time when nothing came for some seconds. At the rates here that never happens.) Idle:
    CPU time of each reader while nothing is sent.
    """,
    broadcast_run,
    {
        "readers": lambda _, row: load_of(row)[0].removesuffix(" readers"),
        "message": lambda _, row: load_of(row)[1],
        "rate": lambda _, row: load_of(row)[2],
        "p50 us": interval("p50_us"),
        "p99 us": interval("p99_us"),
        "idle: % of a CPU each": interval("idle_percent"),
        "p50, x the peer's": lambda runs, row: "" if row.startswith(PEER) else spell(times_peer(runs, row)),
    },
    options={"--seconds": {"type": float, "metavar": "S", "help": "of a block (default 0.5, with --quick 0.1)"}},
    settle=settle_broadcast,
    budgets=broadcast_budgets,
    figures=("p50_us", "p99_us"),
    group=lambda _: "way",
    label=way_of,
    ours=[load.row(way) for load in LOADS for way in WAYS if way != PEER],
    kept=("seconds",),
    draw=dots("From the writer to the last reader"),
    is_pinned=False,
)

if __name__ == "__main__":
    ask({"": STREAMS.answer, "broadcast": BROADCAST.answer})
