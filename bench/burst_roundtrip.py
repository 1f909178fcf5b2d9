"""What does one execution of ADD on four floats cost: through a burst, on the plain path, and in process?

    python bench/burst_roundtrip.py [--peers all|none|uds iceoryx2 …] [--json FILE] [--plot FILE] [--cdf FILE]

The client is pinned to CPU 0; every thread of the device's two processes, and every peer's server, to CPU 1. Every
round runs a short block of everything, each right after a block of the floor (peers/limit.c) that it stands beside:
polling for what polls, sleeping for what sleeps. The peers do no work: they answer 64 bytes at once. The native row is
native_device.py, whose model is a C function that a listener calls without Python. "Driver in C" is the shared library
of examples/device-c, which gives its ADD to XNNPACK.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import (
    ADD,
    HERE,
    NotMeasured,
    Runs,
    Subject,
    block_of,
    c_block,
    compile_c,
    conditions,
    interleave,
    over_floor_in_adds,
    peer_block,
    peers_process,
    pin_client,
    ratio,
    scratch,
    times_floor,
)
from own_device import c_driver, own_device, pinned
from verdict import Budget, Report, arguments, cells, parse, progress, publish, subject_rows

import driver
from burst import Memory, Request, RequestArgument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from measure import Ask, Block

    from driver import Model, RemotePreparedModel
    from driver.cli.timing import Estimate

QUESTION = "What does one execution of ADD on four floats cost?"
SPIN, FUTEX = "floor: limit spin", "floor: limit futex"
INTERPRETER = "in process: interpreter"
BURST, POSIX, SLEEPING = "burst, spinning (memfd)", "burst, spinning (posix)", "burst, sleeping (spin=0)"
NATIVE, PLAIN = "burst, spinning (native)", "plain path"
LIBRARY, LITERT = "burst, spinning (driver in C)", "burst, spinning (litert)"
PEERS = ("iceoryx2", "iceoryx2_wait", "uds", "pipe", "zmq", "nng", "grpc", "posix_mq", "faster_fifo")
POLLING_PEERS = ("iceoryx2",)
SHORT = {  # names in the picture
    BURST: "burst, polling",
    POSIX: "burst, polling (posix)",
    NATIVE: "burst, native",
    LIBRARY: "burst, driver in C",
    LITERT: "burst, litert",
    SLEEPING: "burst, sleeping",
    PLAIN: "plain path",
    "uds": "UDS + msgpack",
    "iceoryx2_wait": "iceoryx2, sleeping",
    "iceoryx2": "iceoryx2, polling",
    "grpc": "gRPC",
    "posix_mq": "POSIX queue",
    "faster_fifo": "faster-fifo",
}
IN_FULL = {*(SHORT[name] for name in (BURST, NATIVE, SLEEPING, PLAIN, *PEERS[:3], "grpc")), "pipe", "zmq"}


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
    return [burst_subject(name, floor, prepared, count, stack, **options) for name, floor, options in kinds]


def burst_subject(
    name: str, floor: str, prepared: RemotePreparedModel, count: int, stack: ExitStack, **options: Any
) -> Subject:
    """One burst that is known to add."""
    burst = stack.enter_context(prepared.burst(**options))
    for place, value in zip(burst.inputs, (1, 2), strict=True):
        place[...] = value
    if not np.array_equal(burst.run().outputs[0], np.full((1, 4), 3)):
        sys.exit(f"bench: {name} adds wrongly")
    return Subject(name, block_of(burst.run, count), floor, is_ours=True)


def others(count: int, directory: Path, stack: ExitStack) -> list[Subject]:
    """The same on devices whose listener calls C: a function, a driver in a shared library, a library behind Python."""
    return [
        on_device(NATIVE, lambda: "native_device:Native", count, stack),
        on_device(LIBRARY, lambda: str(c_driver(directory / "device-c")), count, stack),
        on_device(LITERT, lambda: "litert", count, stack),
    ]


def on_device(name: str, find: Callable[[], str], count: int, stack: ExitStack) -> Subject:
    """A burst on a device of its own; where there is no such device, a row that says why."""
    try:
        device = stack.enter_context(own_device(find()))
    except (NotMeasured, driver.DeviceNotFound) as error:
        return Subject(name, partial(_fail, str(error)), SPIN)
    prepared = stack.enter_context(device.prepare(add_model()))
    subject = burst_subject(name, SPIN, prepared, count, stack)
    subject.block = pinned(device, subject.block)
    return subject


def _fail(why: str) -> Block:
    raise NotMeasured(why)


def plain(prepared: RemotePreparedModel, count: int) -> Subject:
    """An explicit request, made once."""
    memory = Memory.create(192)
    there = tuple(RequestArgument(offset=at, length=16) for at in (0, 64))
    request = Request(there, (RequestArgument(offset=128, length=16),), (memory,))
    return Subject(PLAIN, block_of(partial(prepared.execute, request), count), FUTEX, is_ours=True)


def peer(name: str, count: int, ask: Ask) -> Subject:
    """One of peers.py."""
    return Subject(name, peer_block(ask, name, count), SPIN if name in POLLING_PEERS else FUTEX)


def budgets(runs: Runs) -> list[Budget]:
    """What ours must be."""
    in_adds = partial(over_floor_in_adds, runs)
    against = partial(_against, runs)
    return [
        Budget("polling: burst <= floor + 2.5 x in-process numpy.add, in numpy.adds", in_adds(BURST), 2.5),
        Budget("polling: native <= floor + 1 x in-process numpy.add, in numpy.adds", in_adds(NATIVE), 1.0),
        Budget("polling: burst <= 0.3 x iceoryx2", against(BURST, "iceoryx2"), 0.3),
        Budget("polling: driver in C <= 1.1 x native", against(LIBRARY, NATIVE), 1.1),
        Budget("sleeping: burst <= 1.4 x limit futex", times_floor(runs, SLEEPING), 1.4),
        Budget("sleeping: burst <= 0.7 x plain path", against(SLEEPING, PLAIN), 0.7),
        Budget("sleeping: plain path <= 2 x uds (msgpack over a Unix socket)", against(PLAIN, "uds"), 2.0),
    ]


def _against(runs: Runs, name: str, reference: str) -> Estimate | None:
    return ratio(runs, name, reference) if runs.has(name, reference) else None


def run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    count, peer_count = (50, 100) if args.quick else (2000, 1000)
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        limit = compile_c(directory / "limit", HERE / "peers" / "limit.c")
        floors = {SPIN: c_block(limit, "spin", count * 10), FUTEX: c_block(limit, "futex", count)}
        device = stack.enter_context(own_device())
        prepared = stack.enter_context(device.prepare(add_model()))
        ours = [*bursts(prepared, count, stack), plain(prepared, count)]
        for subject in ours:
            subject.block = pinned(device, subject.block)
        ours[2:2] = others(count, directory, stack)
        ask = stack.enter_context(peers_process())
        args.subjects = [*in_process(count), *ours, *(peer(name, peer_count, ask) for name in args.peers)]
        return interleave(args.subjects, floors, args.pairs, progress)


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--peers", nargs="+", default=["all"], choices=("all", "none", *PEERS), metavar="PEER")
    parser.add_argument("--cdf", type=Path, metavar="FILE", help="a picture of the distributions, all in one")
    args = parse(parser)
    args.peers = [name for name in PEERS if name in args.peers or "all" in args.peers]
    return args


def draw(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Everything in one column of dots; and what is chosen most often in full."""
    import plots

    title, ours = "One execution of ADD on four floats", {SHORT[name] for name in (BURST, NATIVE, SLEEPING, PLAIN)}
    shown = [{**row, "name": SHORT.get(row["name"], row["name"])} for row in rows]
    if args.plot:
        plots.latencies(args.plot, shown, [], title)
    if args.cdf:
        curves = {row["name"]: plots.curve(row) for row in shown if row["name"] in IN_FULL and "rounds" in row}
        plots.distributions(args.cdf, curves, ours, f"{title}, there and back")


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    pin_client()
    found = conditions()
    runs = run(args)
    rows = subject_rows(runs, args.subjects)
    publish(args, Report(QUESTION, found, [cells(row) for row in rows], budgets(runs), {"subjects": rows}))
    if args.plot or args.cdf:
        draw(args, rows)


if __name__ == "__main__":
    main()
