"""What does one execution of ADD on four floats cost: through a burst, on the plain path, and in process?

    python bench/burst_roundtrip.py [--peers all|none|uds iceoryx2 …] [--json FILE] [--plot FILE] [--markdown]

The client is pinned to CPU 0; every thread of the device's two processes, and every peer's server, to CPU 1. Every
round runs a short block of everything, each right after a block of the floor (peers/limit.c) that it stands beside:
polling for what polls, sleeping for what sleeps. The peers do no work: they answer 64 bytes at once.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import (
    HERE,
    Block,
    Runs,
    Subject,
    block_of,
    c_block,
    compile_c,
    conditions,
    estimate,
    interleave,
    over_floor,
    peer_block,
    pin_client,
    ratio,
    scratch,
)
from own_device import own_device, pin
from verdict import Budget, Report, arguments, cells, parse, progress, publish, subject_rows

import driver
from burst import Memory, Request, RequestArgument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    from driver import Model, RemoteDevice, RemotePreparedModel

QUESTION = "What does one execution of ADD on four floats cost?"
SPIN, FUTEX = "floor: limit spin", "floor: limit futex"
ADD, INTERPRETER = "in process: numpy.add", "in process: interpreter"
BURST, POSIX, SLEEPING = "burst, spinning (memfd)", "burst, spinning (posix)", "burst, sleeping (spin=0)"
PLAIN = "plain path"
PEERS = ("iceoryx2", "iceoryx2_wait", "uds", "pipe", "zmq", "nng", "grpc", "posix_mq", "faster_fifo")
POLLING_PEERS = ("iceoryx2",)


def add_model() -> Model:
    """float32 [1, 4] + float32 [1, 4]."""
    m = driver.ModelBuilder()
    m.output(m.operation("ADD", m.input("float32", (1, 4)), m.input("float32", (1, 4)), 0))
    return m.build()


def in_process(count: int) -> list[Subject]:
    """The same work without another process."""
    from driver.nn import Interpreter

    a, b, out = np.ones((1, 4), np.float32), np.ones((1, 4), np.float32), np.empty((1, 4), np.float32)
    bound = Interpreter(add_model()).bind([a, b], [np.zeros(16, np.uint8)])
    return [
        Subject(ADD, block_of(partial(np.add, a, b, out=out), count), SPIN),
        Subject(INTERPRETER, block_of(bound.run, count), SPIN),
    ]


def bursts(prepared: RemotePreparedModel, count: int, stack: ExitStack) -> list[Subject]:
    """Three bursts, open at the same time: who is not measured sleeps."""
    kinds: tuple[tuple[str, str, dict[str, Any]], ...] = (
        (BURST, SPIN, {}),
        (POSIX, SPIN, {"memory": "posix"}),
        (SLEEPING, FUTEX, {"spin": 0}),
    )
    subjects = []
    for name, floor, options in kinds:
        burst = stack.enter_context(prepared.burst(**options))
        for place, value in zip(burst.inputs, (1, 2), strict=True):
            place[...] = value
        if not np.array_equal(burst.run().outputs[0], np.full((1, 4), 3)):
            sys.exit(f"bench: {name} adds wrongly")
        subjects.append(Subject(name, block_of(burst.run, count), floor, is_ours=True))
    return subjects


def plain(prepared: RemotePreparedModel, count: int) -> Subject:
    """An explicit request, made once."""
    memory = Memory.create(192)
    there = tuple(RequestArgument(offset=at, length=16) for at in (0, 64))
    request = Request(there, (RequestArgument(offset=128, length=16),), (memory,))
    return Subject(PLAIN, block_of(partial(prepared.execute, request), count), FUTEX, is_ours=True)


def pinned(device: RemoteDevice, block: Callable[[], Block]) -> Callable[[], Block]:
    """Pins again first: the device starts threads when it likes."""

    def run() -> Block:
        pin(device)
        return block()

    return run


def peer(name: str, count: int, directory: Path) -> Subject:
    """One of peers.py."""
    return Subject(name, peer_block(name, count, directory), SPIN if name in POLLING_PEERS else FUTEX)


def budgets(runs: Runs) -> list[Budget]:
    """What ours must be."""
    beyond = over_floor(runs, BURST)
    in_adds = estimate((runs.values(BURST) - runs.values(BURST, "floor_us")) / runs.values(ADD))
    against = partial(_against, runs)
    return [
        Budget("burst p50 <= floor + 4.5 us", beyond, 4.5, "us"),
        Budget("plain path <= 2 x uds (msgpack over a Unix socket)", against(PLAIN, "uds"), 2.0),
        Budget("later: burst p50 <= floor + 6.5 x numpy.add", in_adds, 6.5),
        Budget("later: burst <= 0.5 x iceoryx2", against(BURST, "iceoryx2"), 0.5),
        Budget("both sleeping: burst <= 0.7 x plain path", against(SLEEPING, PLAIN), 0.7),
    ]


def _against(runs: Runs, name: str, reference: str) -> Any:
    return ratio(runs, name, reference) if runs.has(name, reference) else None


def run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    count, peer_count = (50, 200) if args.quick else (2000, 1000)
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        limit = compile_c(directory / "limit", HERE / "peers" / "limit.c")
        floors = {SPIN: c_block(limit, "spin", count * 10), FUTEX: c_block(limit, "futex", count)}
        device = stack.enter_context(own_device())
        prepared = stack.enter_context(device.prepare(add_model()))
        ours = [*bursts(prepared, count, stack), plain(prepared, count)]
        for subject in ours:
            subject.block = pinned(device, subject.block)
        args.subjects = [*in_process(count), *ours, *(peer(name, peer_count, directory) for name in args.peers)]
        return interleave(args.subjects, floors, args.pairs, progress)


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--peers", nargs="+", default=["all"], choices=("all", "none", *PEERS), metavar="PEER")
    args = parse(parser)
    args.peers = [name for name in PEERS if name in args.peers or "all" in args.peers]
    return args


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Everything in one column of dots, and four of them in full."""
    import plots

    plots.latencies(path, rows, [BURST, PLAIN, "uds", "iceoryx2"], "One execution of ADD on four floats")


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    pin_client()
    found = conditions()
    runs = run(args)
    rows = subject_rows(runs, args.subjects)
    publish(args, Report(QUESTION, found, [cells(row) for row in rows], budgets(runs), {"subjects": rows}))
    if args.plot:
        draw(args.plot, rows)


if __name__ == "__main__":
    main()
