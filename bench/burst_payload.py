"""How does a round trip grow with the payload, from 64 bytes to 32 MB?

    python bench/burst_payload.py [--peers all|none|pipe …] [--sizes BYTES …] [--json FILE] [--plot FILE]
    python bench/burst_payload.py frame [--peers all|none|pipe …] [--json FILE] [--plot FILE]

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
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import (
    HERE,
    Budget,
    Runs,
    Subject,
    ask,
    block_of,
    c_block,
    compile_c,
    interleave,
    peer_block,
    peers_process,
    progress,
    ratio,
    scratch,
    size,
    spell,
)
from own_device import own_device, pinned
from question import beside_floors, dots

import driver

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from measure import Ask, Block

    from driver import Burst, Model, RemoteDevice
    from driver.cli.timing import Estimate

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


def settle(args: argparse.Namespace) -> None:
    """Four values are taken out of the payload."""
    if min(args.sizes) < 4:
        raise ValueError("--sizes: at least 4")


def table(runs: Runs, args: argparse.Namespace) -> tuple[tuple[list[tuple[str, ...]], tuple[str, ...]]]:
    """A row per size."""
    columns = (*OURS, *args.peers)
    head = ("payload; p50 us", COPY, *columns, "burst, polling x best peer")
    return ((lines(runs, columns, args.sizes), head),)


def draw(args: argparse.Namespace, runs: Runs, _: list[dict[str, Any]]) -> None:
    """p50 against the size, both axes logarithmic."""
    import plots

    names = {COPY: "one copy in process", "uds": "UDS + msgpack", "grpc": "gRPC"}
    curves = []
    for column in (COPY, *OURS, *args.peers):
        found = [(nbytes, of_size(column, nbytes)) for nbytes in args.sizes]
        points = [(nbytes, float(np.median(runs.values(name)))) for nbytes, name in found if runs.has(name)]
        if points:
            name = names.get(column, column)
            colour = plots.FLOOR if column == COPY else plots.OURS if column in OURS else plots.colour_of(name)
            style = {IN_PLACE: "--", WRITTEN: ":", COPY: ":"}.get(column, "-")
            curves.append(plots.Line(name, *zip(*points, strict=True), colour, style))
    plots.latency_against_size(args.plot, curves, "A payload there, an answer back", "bytes of the payload")


PEERS = {"iceoryx2": "iceoryx2_written", "pipe": "pipe", "zmq": "zmq", "uds": "uds", "grpc": "grpc"}  # in peers.py
PAYLOAD = beside_floors(
    __doc__,
    run,
    options={"--sizes": {"nargs": "+", "type": int, "default": SIZES, "metavar": "BYTES"}},
    peers=PEERS,
    settle=settle,
    budgets=lambda runs, args: budgets(runs, (*OURS, *args.peers), args),
    tables=table,
    draw=draw,
    pairs=5,
)

# ---- frame


SPIN, FRAME_COPY = "floor: limit spin", "floor: one copy, in process"
SMALL, LARGE = "burst, 48 B in place", "burst, 6.2 MB in place"
FRAME_WRITTEN, FRAME_POLLING = "burst, 6.2 MB written", "burst, 6.2 MB written, spin=1 ms"
FRAME_IN_PLACE = "iceoryx2, 6.2 MB in place"
FRAME, SMALL_FRAME = (1, 1080, 1920, 3), (1, 4, 4, 3)
NBYTES = int(np.prod(FRAME))


def slicing(shape: tuple[int, ...], *, adds: bool = True) -> Model:
    """Four values from the middle of a frame, each added to 1."""
    _, height, width, _ = shape
    begin = [0, height // 2, width // 2 - 2, 0]
    end = [1, height // 2 + 1, width // 2 + 2, 1]
    m = driver.ModelBuilder()
    x = m.input("quant8_asymm", shape, scale=1.0)
    four = m.operation("STRIDED_SLICE", x, begin, end, [1, 1, 1, 1], 0, 0, 0)
    if not adds:
        m.output(four)
        return m.build()
    one = m.constant(np.ones((1, 1, 4, 1), np.uint8), dtype="quant8_asymm", scale=1.0)
    m.output(m.operation("ADD", four, one, 0, scale=1.0, zero_point=0))
    return m.build()


def open_burst(
    device: RemoteDevice, shape: tuple[int, ...], stack: ExitStack, *, adds: bool = True, **options: Any
) -> Burst:
    """A burst whose frame is in place, and which is known to look at its middle."""
    burst = stack.enter_context(stack.enter_context(device.prepare(slicing(shape, adds=adds))).burst(**options))
    middle = burst.inputs[0][0, shape[1] // 2, shape[2] // 2 - 2 : shape[2] // 2 + 2, 0]
    burst.inputs[0][...] = 1
    middle[:] = (10, 20, 30, 40)
    found = burst.run().outputs[0].reshape(-1).tolist()
    assert found == [v + adds for v in (10, 20, 30, 40)], found
    return burst


def written(burst: Burst, frame: np.ndarray) -> None:
    """The producer's copy, and the execution."""
    burst.inputs[0][...] = frame
    burst.run()


def subjects(device: RemoteDevice, counts: tuple[int, int], stack: ExitStack) -> list[Subject]:
    """Ours."""
    small, large = (open_burst(device, shape, stack) for shape in (SMALL_FRAME, FRAME))
    polling = open_burst(device, FRAME, stack, spin=1e-3)
    frame = np.full(FRAME, 7, np.uint8)
    many, few = counts
    ours = [
        Subject(SMALL, block_of(small.run, many), SPIN, is_ours=True),
        Subject(LARGE, block_of(large.run, many), SPIN, is_ours=True),
        Subject(FRAME_WRITTEN, block_of(partial(written, large, frame), few), FRAME_COPY, is_ours=True),
        Subject(FRAME_POLLING, block_of(partial(written, polling, frame), few), FRAME_COPY, is_ours=True),
    ]
    for subject in ours:
        subject.block = pinned(device, subject.block)
    return ours


def frame_peers(names: list[str], counts: tuple[int, int], ask: Ask) -> list[Subject]:
    """What a user would pick instead; iceoryx2 also without writing, as a bound."""
    many, few = counts
    found = [
        Subject(f"{name}, 6.2 MB written", peer_block(ask, PEERS[name], few, NBYTES), FRAME_COPY) for name in names
    ]
    if "iceoryx2" in names:
        found.append(Subject(FRAME_IN_PLACE, peer_block(ask, "iceoryx2", many, NBYTES), SPIN))
    return found


def frame_budgets(runs: Runs, names: list[str]) -> list[Budget]:
    """In place, the size does not matter; written, no peer is faster."""

    def against(name: str, reference: str) -> Estimate | None:
        return ratio(runs, name, reference) if runs.has(name, reference) else None

    found = [Budget("in place: 6.2 MB <= 1.1 x 48 B", against(LARGE, SMALL), 1.1)]
    for name in names:
        ours = FRAME_POLLING if name == "iceoryx2" else FRAME_WRITTEN
        found.append(Budget(f"{ours} <= 1 x {name}", against(ours, f"{name}, 6.2 MB written"), 1.0))
    return found


def frame_run(args: argparse.Namespace) -> Runs:
    """All rounds. The floor of what is written is one copy within the client's process."""
    counts = (50, 5) if args.quick else (3000, 60)
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        limit = compile_c(directory / "limit", HERE / "peers" / "limit.c")
        here, there = np.full(FRAME, 7, np.uint8), np.empty(FRAME, np.uint8)
        floors = {
            SPIN: c_block(limit, "spin", counts[0] * 10),
            FRAME_COPY: block_of(partial(np.copyto, there, here), counts[1]),
        }
        device = stack.enter_context(own_device())
        ask = stack.enter_context(peers_process())
        args.subjects = [*subjects(device, counts, stack), *frame_peers(args.peers, counts, ask)]
        return interleave(args.subjects, floors, args.pairs, progress)


FRAMES = beside_floors(
    """Does the size of a frame matter to a burst when the frame lies in place; and what does writing it cost?

        python bench/burst_payload.py frame [--peers all|none|pipe …] [--json FILE] [--plot FILE]

    The model takes four values out of a uint8 frame (STRIDED_SLICE) and adds (ADD). The same model on a frame of 4x4
    pixels stands beside it. In place: the frame is in the burst's input already, as a camera or a decoder would have
    put it there, and iceoryx2 loans and sends memory that is not written. Written: before each execution the client
    copies 6.2 MB from an array of its own; iceoryx2 copies them into its loan, and the others send them. A peer's
    server does no more than its transport needs to have them, looks at the first byte in iceoryx2's case, and answers
    64 bytes. While a frame is written a device that spins for 50 us goes to sleep; iceoryx2 polls for ever, and so
    stands against a burst that spins for 1 ms. Client on CPU 0, device on CPU 1.
    """,
    frame_run,
    peers=PEERS,
    budgets=lambda runs, args: frame_budgets(runs, args.peers),
    draw=dots("A frame of 6.2 MB, there and back"),
)

if __name__ == "__main__":
    ask({"": PAYLOAD.answer, "frame": FRAMES.answer})
