"""How does a round trip grow with the payload, from 64 bytes to 32 MB?

    python bench/burst_payload.py [--peers all|none|pipe …] [--sizes BYTES …] [--json FILE] [--plot FILE]

Before each execution the client copies the payload from memory of its own: into the burst's input, into iceoryx2's
loan, or it sends it. The other side looks at it as little as its transport allows, and answers: the burst's model takes
four values out of it (STRIDED_SLICE), iceoryx2's server looks at the first byte, the others receive it. "In place": the
payload lies in the burst's input already. The bursts spin for 50 us, and for 10 ms where the row says polling, as
iceoryx2 always does. The floor is one copy of the payload within the client's process. Client on CPU 0, device on CPU
1.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from burst_frame import PEERS, open_burst, written
from measure import (
    Runs,
    Subject,
    block_of,
    conditions,
    interleave,
    peer_block,
    peers_process,
    pin_client,
    ratio,
)
from own_device import own_device, pinned
from verdict import Budget, Report, arguments, parse, progress, publish, size, spell, subject_rows

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from measure import Ask, Block

    from driver import RemoteDevice
    from driver.cli.timing import Estimate

QUESTION = "How does a round trip grow with the payload?"
SIZES = (64, 256, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 25)
IN_PLACE, POLLING, WRITTEN = "burst, in place", "burst, polling", "burst"
OURS = (IN_PLACE, POLLING, WRITTEN)
COPY = "one copy"
POLL = 0.01  # seconds: longer than a copy of the largest


def count_of(nbytes: int, most: int) -> int:
    """Fewer of large ones: blocks of all sizes take about as long, and none has less than three."""
    return max(3, most // (1 + nbytes // 8192))


def of_size(name: str, nbytes: int) -> str:
    """The name of a subject."""
    return f"{name}, {size(nbytes)}"


def floors(sizes: Sequence[int], count: int) -> dict[str, Callable[[], Block]]:
    """One copy of each size."""
    found = {}
    for nbytes in sizes:
        here, there = np.full(nbytes, 7, np.uint8), np.zeros(nbytes, np.uint8)
        found[of_size(COPY, nbytes)] = block_of(partial(np.copyto, there, here), count_of(nbytes, count))
    return found


def ours(device: RemoteDevice, nbytes: int, count: int, stack: ExitStack) -> list[Subject]:
    """Three ways of one size. A frame of one row holds the payload."""
    shape = (1, 1, nbytes, 1)
    sleeping, polling = (open_burst(device, shape, stack, adds=False, **options) for options in ({}, {"spin": POLL}))
    payload, some = np.full(shape, 7, np.uint8), count_of(nbytes, count)
    calls: dict[str, Callable[[], object]] = {
        IN_PLACE: polling.run,
        POLLING: partial(written, polling, payload),
        WRITTEN: partial(written, sleeping, payload),
    }
    floor = of_size(COPY, nbytes)
    return [
        Subject(of_size(name, nbytes), pinned(device, block_of(call, some)), floor, is_ours=True)
        for name, call in calls.items()
    ]


def peers(names: Sequence[str], nbytes: int, count: int, ask: Ask) -> list[Subject]:
    """What a user would pick instead."""
    some, floor = count_of(nbytes, count), of_size(COPY, nbytes)
    return [Subject(of_size(name, nbytes), peer_block(ask, PEERS[name], some, nbytes), floor) for name in names]


def run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    count, peer_count = (20, 20) if args.quick else (1000, 200)
    with ExitStack() as stack:
        device = stack.enter_context(own_device())
        ask = stack.enter_context(peers_process())
        args.subjects = []
        for nbytes in args.sizes:
            args.subjects += ours(device, nbytes, count, stack)
            args.subjects += peers(args.peers, nbytes, peer_count, ask)
        return interleave(args.subjects, floors(args.sizes, count), args.pairs, progress)


def lines(runs: Runs, columns: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, ...]]:
    """A row per size: p50 of everything, and how the burst compares with the best peer of the same round."""
    found = []
    for nbytes in sizes:
        cells = [f"{np.median(runs.values(of_size(COPY, nbytes))):.2f}"]
        for column in columns:
            name = of_size(column, nbytes)
            cells.append(f"{np.median(runs.values(name)):.2f}" if runs.has(name) else "-")
        found.append((size(nbytes), *cells, spell(against_the_best(runs, columns, nbytes))))
    return found


def against_the_best(runs: Runs, columns: Sequence[str], nbytes: int) -> Estimate | None:
    """The burst that polls to the peer whose median is the lowest, of the same rounds."""
    names = [of_size(column, nbytes) for column in columns if column not in OURS]
    measured = [name for name in names if runs.has(name)]
    if not measured:
        return None
    best = min(measured, key=lambda name: np.median(runs.values(name)))
    return ratio(runs, of_size(POLLING, nbytes), best)


def budgets(runs: Runs, columns: Sequence[str], args: argparse.Namespace) -> list[Budget]:
    """In place, the size does not matter."""
    least, most = min(args.sizes), max(args.sizes)
    return [
        Budget(
            f"in place: {size(most)} <= 1.1 x {size(least)}",
            ratio(runs, of_size(IN_PLACE, most), of_size(IN_PLACE, least)),
            1.1,
        ),
        Budget(f"burst, polling <= 1 x best peer, {size(most)}", against_the_best(runs, columns, most), 1.0),
    ]


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, pairs=5)
    parser.add_argument("--peers", nargs="+", default=["all"], choices=("all", "none", *PEERS), metavar="PEER")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES")
    args = parse(parser)
    if min(args.sizes) < 4:
        parser.error("--sizes: at least 4")
    args.peers = [name for name in PEERS if name in args.peers or "all" in args.peers]
    return args


def draw(args: argparse.Namespace, runs: Runs, columns: Sequence[str]) -> None:
    """p50 against the size, both axes logarithmic."""
    import plots

    names = {COPY: "one copy in process", "uds": "UDS + msgpack", "grpc": "gRPC"}
    curves = []
    for column in (COPY, *columns):
        found = [(nbytes, of_size(column, nbytes)) for nbytes in args.sizes]
        points = [(nbytes, float(np.median(runs.values(name)))) for nbytes, name in found if runs.has(name)]
        if points:
            name = names.get(column, column)
            colour = plots.FLOOR if column == COPY else plots.OURS if column in OURS else plots.colour_of(name)
            style = {IN_PLACE: "--", WRITTEN: ":", COPY: ":"}.get(column, "-")
            curves.append(plots.Line(name, *zip(*points, strict=True), colour, style))
    plots.latency_against_size(args.plot, curves, "A payload there, an answer back", "bytes of the payload")


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    pin_client()
    found = conditions()
    runs = run(args)
    columns = (*OURS, *args.peers)
    head = ("payload; p50 us", COPY, *columns, "burst, polling x best peer")
    body = {"subjects": subject_rows(runs, args.subjects)}
    publish(args, Report(QUESTION, found, lines(runs, columns, args.sizes), budgets(runs, columns, args), body, head))
    if args.plot:
        draw(args, runs, columns)


if __name__ == "__main__":
    main()
