"""How many elements and bytes per second does the queue carry, single and batched?

    python bench/queue_throughput.py [--pairs 9] [--peers all|none|pipe zmq …] [--json FILE] [--plot FILE]

A producer on CPU 0 and a consumer on CPU 1 that do nothing else. In C (queue_throughput.c), for every size and batch:
by copying, in place, and the writer that overwrites; each right after a block of the smallest ring there is
(peers/spsc.c), which does the same with the elements. From Python, one element per call at every size and batches of
64 bytes: copying and in place, beside what a user would pick instead (peers/streams.py).
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from measure import (
    HERE,
    PEER_TIMEOUT,
    Block,
    Runs,
    Subject,
    c_block,
    compile_c,
    compile_with_ours,
    conditions,
    figures_of,
    interleave,
    pin_client,
    ratio,
    scratch,
    times_floor,
)
from verdict import Budget, Report, arguments, parse, progress, publish, size, spell

import fmq

sys.path.append(str(HERE / "peers"))
import streams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from driver.cli.timing import Estimate

QUESTION = "How many elements and bytes per second, single and batched?"
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


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--peers", nargs="+", default=["all"], choices=("all", "none", *streams.PEERS), metavar="PEER")
    args = parse(parser)
    args.peers = [name for name in streams.PEERS if name in args.peers or "all" in args.peers]
    args.sizes, args.batches = ((64, 65536), (1, 16)) if args.quick else (SIZES, BATCHES)
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    pin_client()
    found = conditions()
    runs = run(args)
    rows = rows_of(runs, args)
    in_c = [line_in_c(runs, cell) for cell in cells_in_c(args)]
    from_python = [line_from_python(runs, cell, args.peers) for cell in cells_from_python(args)]
    head = ("from Python, ns (MB/s)", PY_COPY, PY_PLACE, *args.peers, f"{PY_COPY} x best", f"{PY_PLACE} x best")
    body = {"subjects": rows}
    publish(args, Report(QUESTION, found, in_c, budgets(runs), body, C_HEAD, [(from_python, head)]))
    if args.plot:
        import plots

        plots.streams(args.plot, rows, "One way through a queue, between two processes")


if __name__ == "__main__":
    main()
