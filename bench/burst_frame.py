"""Does the size of a frame matter to a burst when the frame lies in place; and what does writing it cost?

    python bench/burst_frame.py [--peers all|none|pipe …] [--json FILE] [--plot FILE]

The model takes four values out of a uint8 frame (STRIDED_SLICE) and adds (ADD). The same model on a frame of 4x4 pixels
stands beside it. In place: the frame is in the burst's input already, as a camera or a decoder would have put it there,
and iceoryx2 loans and sends memory that is not written. Written: before each execution the client copies 6.2 MB from an
array of its own; iceoryx2 copies them into its loan, and the others send them. A peer's server does no more than its
transport needs to have them, looks at the first byte in iceoryx2's case, and answers 64 bytes. While a frame is written
a device that spins for 50 us goes to sleep; iceoryx2 polls for ever, and so stands against a burst that spins for 1 ms.
Client on CPU 0, device on CPU 1.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import (
    HERE,
    Runs,
    Subject,
    block_of,
    c_block,
    compile_c,
    conditions,
    interleave,
    peer_block,
    peers_process,
    pin_client,
    ratio,
    scratch,
)
from own_device import own_device, pinned
from verdict import Budget, Report, arguments, cells, parse, progress, publish, subject_rows

import driver

if TYPE_CHECKING:
    import argparse

    from measure import Ask

    from driver import Burst, Model, RemoteDevice
    from driver.cli.timing import Estimate

QUESTION = "What does a frame of 1080 x 1920 x 3 bytes cost?"
SPIN, COPY = "floor: limit spin", "floor: one copy, in process"
SMALL, LARGE = "burst, 48 B in place", "burst, 6.2 MB in place"
WRITTEN, POLLING = "burst, 6.2 MB written", "burst, 6.2 MB written, spin=1 ms"
IN_PLACE = "iceoryx2, 6.2 MB in place"
PEERS = {"iceoryx2": "iceoryx2_written", "pipe": "pipe", "zmq": "zmq", "uds": "uds", "grpc": "grpc"}  # in peers.py
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
        Subject(WRITTEN, block_of(partial(written, large, frame), few), COPY, is_ours=True),
        Subject(POLLING, block_of(partial(written, polling, frame), few), COPY, is_ours=True),
    ]
    for subject in ours:
        subject.block = pinned(device, subject.block)
    return ours


def peers(names: list[str], counts: tuple[int, int], ask: Ask) -> list[Subject]:
    """What a user would pick instead; iceoryx2 also without writing, as a bound."""
    many, few = counts
    found = [Subject(f"{name}, 6.2 MB written", peer_block(ask, PEERS[name], few, NBYTES), COPY) for name in names]
    if "iceoryx2" in names:
        found.append(Subject(IN_PLACE, peer_block(ask, "iceoryx2", many, NBYTES), SPIN))
    return found


def budgets(runs: Runs, names: list[str]) -> list[Budget]:
    """In place, the size does not matter; written, no peer is faster."""

    def against(name: str, reference: str) -> Estimate | None:
        return ratio(runs, name, reference) if runs.has(name, reference) else None

    found = [Budget("in place: 6.2 MB <= 1.1 x 48 B", against(LARGE, SMALL), 1.1)]
    for name in names:
        ours = POLLING if name == "iceoryx2" else WRITTEN
        found.append(Budget(f"{ours} <= 1 x {name}", against(ours, f"{name}, 6.2 MB written"), 1.0))
    return found


def run(args: argparse.Namespace) -> Runs:
    """All rounds. The floor of what is written is one copy within the client's process."""
    counts = (50, 5) if args.quick else (3000, 60)
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        limit = compile_c(directory / "limit", HERE / "peers" / "limit.c")
        here, there = np.full(FRAME, 7, np.uint8), np.empty(FRAME, np.uint8)
        floors = {
            SPIN: c_block(limit, "spin", counts[0] * 10),
            COPY: block_of(partial(np.copyto, there, here), counts[1]),
        }
        device = stack.enter_context(own_device())
        ask = stack.enter_context(peers_process())
        args.subjects = [*subjects(device, counts, stack), *peers(args.peers, counts, ask)]
        return interleave(args.subjects, floors, args.pairs, progress)


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--peers", nargs="+", default=["all"], choices=("all", "none", *PEERS), metavar="PEER")
    args = parse(parser)
    args.peers = [name for name in PEERS if name in args.peers or "all" in args.peers]
    return args


def draw(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """One column of dots."""
    import plots

    plots.latencies(args.plot, rows, [], "A frame of 6.2 MB, there and back")


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    pin_client()
    found = conditions()
    runs = run(args)
    rows = subject_rows(runs, args.subjects)
    told = budgets(runs, args.peers)
    publish(args, Report(QUESTION, found, [cells(row) for row in rows], told, {"subjects": rows}))
    if args.plot:
        draw(args, rows)


if __name__ == "__main__":
    main()
