"""What does one execution of ADD on four floats cost: through a burst, on the plain path, and in process?

    python bench/burst_roundtrip.py [--peers all|none|uds iceoryx2 …] [--json FILE] [--plot FILE] [--cdf FILE]
    python bench/burst_roundtrip.py c [--pairs N] [--json FILE]
    python bench/burst_roundtrip.py queue [--pairs 9] [--json FILE] [--plot FILE]

The client is pinned to CPU 0; every thread of the device's two processes, and every peer's server, to CPU 1. Every
round runs a short block of everything, each right after a block of the floor (peers/limit.c) that it stands beside:
polling for what polls, sleeping for what sleeps. The peers do no work: they answer 64 bytes at once. The native row is
native_device.py, whose model is a C function that a listener calls without Python. "Driver in C" is the shared library
of examples/device-c, which gives its ADD to XNNPACK.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import (
    ADD,
    HERE,
    Block,
    Budget,
    NotMeasured,
    Runs,
    Subject,
    ask,
    block_of,
    c_block,
    compile_c,
    compile_with_ours,
    interleave,
    over_floor_in_adds,
    peer_block,
    peers_process,
    progress,
    ratio,
    scratch,
    times_floor,
)
from own_device import c_driver, own_device, pinned
from question import beside_floors, dots, floor_tables

import driver
from burst import Memory, Request, RequestArgument
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from measure import Ask, Block

    from driver import Model, RemotePreparedModel
    from driver.cli.timing import Estimate


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


def draw(args: argparse.Namespace, _: Runs, rows: list[dict[str, Any]]) -> None:
    """Everything in one column of dots; and what is chosen most often in full."""
    import plots

    title, ours = "One execution of ADD on four floats", {SHORT[name] for name in (BURST, NATIVE, SLEEPING, PLAIN)}
    shown = [{**row, "name": SHORT.get(row["name"], row["name"])} for row in rows]
    if args.plot:
        plots.latencies(args.plot, shown, [], title)
    if args.cdf:
        curves = {row["name"]: plots.curve(row) for row in shown if row["name"] in IN_FULL and "rounds" in row}
        plots.distributions(args.cdf, curves, ours, f"{title}, there and back")


ROUNDTRIP = beside_floors(
    __doc__,
    run,
    options={"--cdf": {"type": Path, "metavar": "FILE", "help": "a picture of the distributions, all in one"}},
    peers=PEERS,
    budgets=lambda runs, _: budgets(runs),
    draw=draw,
)

# ---- c


IN_C, IN_C_REFERENCE = "from C, native device", "from C, reference"
IN_PYTHON, IN_PYTHON_REFERENCE = "from Python, native device", "from Python, reference"
DEVICES = (("native_device:Native", IN_C, IN_PYTHON), ("reference", IN_C_REFERENCE, IN_PYTHON_REFERENCE))
STAGE_HEAD = ("native device, from Python", "p50 us")
C_LIBRARY = HERE.parent / "csrc/libburst"


def build(folder: Path) -> Path:
    """The program, and the library that it is linked with."""
    make = ["make", "--silent", "install", f"PREFIX={folder}", f"BUILD={folder / 'build'}"]
    if subprocess.run(make, cwd=C_LIBRARY, check=False).returncode:
        sys.exit("bench: libburst does not build")
    program = folder / "libburst_add"
    linked = [f"-I{folder}/include", f"-L{folder}/lib", "-lburst", f"-Wl,-rpath,{folder}/lib"]
    source = HERE / "peers" / "libburst_add.c"
    if subprocess.run(["cc", "-O2", source, *linked, "-o", program], check=False).returncode:
        sys.exit("bench: peers/libburst_add.c does not compile")
    return program


@contextmanager
def client_in_c(program: Path, socket: Path, count: int) -> Iterator[Callable[[], Block]]:
    """A block of its calls; the program ends with this."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([program, socket], text=True, **pipes) as process:
        assert process.stdin
        assert process.stdout
        given, told = process.stdin, process.stdout

        def block() -> Block:
            given.write(f"{count}\n")
            given.flush()
            row = json.loads(told.readline())
            return {f"{key}_us": row[f"{key}_ns"] / 1e3 for key in ("p50", "p99", "p999", "max")}

        if told.readline() != "ready\n":
            sys.exit("bench: the client in C has not begun")
        try:
            yield block
        finally:
            given.close()


def subjects(program: Path, count: int, stack: ExitStack) -> tuple[list[Subject], list[RemotePreparedModel]]:
    """From C and from Python, on either device; and the models there."""
    found, models = [], []
    for name, in_c, in_python in DEVICES:
        device = stack.enter_context(own_device(name))
        (socket,) = [path for path in os.scandir(os.environ["BURST_RUNTIME_DIR"]) if path.name.endswith(".sock")]
        block = stack.enter_context(client_in_c(program, socket.path, count))
        found.append(Subject(in_c, pinned(device, block), SPIN, is_ours=True))
        prepared = stack.enter_context(device.prepare(add_model()))
        models.append(prepared)
        subject = burst_subject(in_python, SPIN, prepared, count, stack)
        subject.block = pinned(device, subject.block)
        found.append(subject)
    return found, models


def stages(prepared: RemotePreparedModel, count: int) -> list[tuple[str, str]]:
    """Of a request: the median of each stage, in microseconds."""
    with prepared.burst() as burst:
        for place in burst.inputs:
            place[...] = 1
        for _ in range(count):
            burst.run()
        return [(name, f"{each['p50']:.3f}") for name, each in burst.stats()["stages"].items()]


def run_in_c(args: argparse.Namespace) -> Runs:
    """All rounds; and where a round trip's time goes."""
    count = 50 if args.quick else 2000
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        limit = compile_c(folder / "limit", HERE / "peers" / "limit.c")
        found, models = subjects(build(folder), count, stack)
        args.subjects = [*in_process(count)[:1], *found]
        runs = interleave(args.subjects, {SPIN: c_block(limit, "spin", count * 10)}, args.pairs, progress)
        args.stages = stages(models[0], count)
    assert args.subjects[0].name == ADD
    return runs


def budgets_in_c(runs: Runs, _: argparse.Namespace) -> list[Budget]:
    """What a client in C must be."""
    words = "floor + 0.5 x in-process numpy.add, in numpy.adds"
    return [
        Budget(f"from C, native device <= {words}", over_floor_in_adds(runs, IN_C), 0.5),
        Budget(f"from C, reference <= {words.replace('0.5', '2.5')}", over_floor_in_adds(runs, IN_C_REFERENCE), 2.5),
    ]


CLIENT_IN_C = beside_floors(
    """What does one execution of ADD on four floats cost a client in C, and what of that is the device's?

        python bench/burst_roundtrip.py c [--pairs N] [--json FILE]

    As burst_roundtrip.py: the client is pinned to CPU 0, the devices to CPU 1, and every block stands beside one of
    the floor (peers/limit.c). The program in C (peers/libburst_add.c) is linked with libburst as `make install`
    leaves it. The native device (native_device.py) has a C function for a model, which a listener calls without
    Python; "reference" has the interpreter. The last table says where a round trip's time goes on the native device,
    by the trace of Python's burst there: bind and execute are the device's, by its own clock.
    """,
    run_in_c,
    budgets=budgets_in_c,
    more=lambda _, args: [(args.stages, STAGE_HEAD)],
)

# ---- queue


FLOOR, ALONE, CHECKPOINT, BESIDE, TWO = ROWS = (
    "floor: two compare-and-exchanges",
    "enter and leave",
    "enter, look whether to yield, leave; with a deadline",
    "enter and leave, beside another thread",
    "enter and leave, while another account has a client; with a look at the clock",
)
MODES = dict(zip(ROWS, ("floor", "alone", "checkpoint", "beside", "two"), strict=True))
IN_NANOSECONDS = ("", "p50 ns", "p99 ns", "p99.9 ns", "over the floor, ns", "x floor", "floor")
MOST = 150  # ns


def block(binary: Path, name: str, count: int) -> Callable[[], Block]:
    """Of one row. `measure` keeps microseconds; here they are thousands of nanoseconds, and told as such."""

    def run() -> Block:
        command = [str(binary), MODES[name], str(count)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
        return {f"{key}_us": row[f"{key}_ns"] for key in ("p50", "p99", "p999", "max")}

    return run


def queue_run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    count = 20_000 if args.quick else 2_000_000
    with scratch() as directory:
        binary = compile_with_ours(directory / "run_queue", HERE / "run_queue.c")
        args.subjects = [Subject(name, block(binary, name, count), FLOOR, is_ours=True) for name in ROWS[1:]]
        return interleave(args.subjects, {FLOOR: block(binary, FLOOR, count)}, args.pairs, progress)


def queue_budgets(runs: Runs, _: object = None) -> list[Budget]:
    """What it may cost."""
    return [Budget(f"{name} <= {MOST} ns", estimate(runs.values(name)), MOST, "ns") for name in ROWS[1:]]


QUEUE = beside_floors(
    """What does the run queue of a device cost when no execution waits? Nanoseconds an execution

        python bench/burst_roundtrip.py queue [--pairs 9] [--json FILE] [--plot FILE]

    Entering and leaving it, in C (run_queue.c): alone; with a deadline and a checkpoint; while another thread does the
    same on the other CPU and each finds a slot; and while another account has a client. A sample is a 64th of a block,
    divided by its executions, because the clock takes longer than what it would measure. The floor is two
    compare-and-exchanges on a word of one's own.
    """,
    queue_run,
    budgets=queue_budgets,
    tables=lambda runs, args: ((floor_tables(runs, args)[0][0], IN_NANOSECONDS),),
    draw=dots("What the run queue costs, ns an execution", ALONE, CHECKPOINT),
)

if __name__ == "__main__":
    ask({"": ROUNDTRIP.answer, "c": CLIENT_IN_C.answer, "queue": QUEUE.answer})
