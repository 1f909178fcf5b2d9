"""What does a whole network cost through a burst, beside the same library called in one's own process?

    python bench/mobilenet.py [--threads 1|2] [--only float32 quant8 per-channel] [--peers all|none|grpc] [--json FILE]

MobileNetV1 1.0 for images of 224 x 224, in floats, in bytes with a scale for each tensor, and in bytes with a scale for
each channel of the weights. LiteRT runs it for them all, from the same flatbuffer and on as many threads. The floor is
LiteRT in this process: one call of its C API on memory that is in place, with nothing of ours around it. Each of the
others runs right after a block of it: a burst of the litert device, its input in place; the same with spin=1 ms, whose
device is still awake when the client has woken up; the plain path, its input in place (`execute`) and with arrays there
and back (`run`); and a server that speaks the Open Inference Protocol over gRPC (peers/inference.py), to which the
client sends an array. ADD of 4 floats stands beside peers/limit.c.

--threads 1 (the default): the process that executes does so on CPU 1. The client is on CPU 0, all threads of the
device and of the server are on CPU 1, and so is this process while it runs LiteRT itself. --threads 2: no process is
pinned.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from burst_roundtrip import add_model
from in_process import InProcess
from litert_threads import NAMES
from measure import (
    CLIENT_CPU,
    DEVICE_CPU,
    HERE,
    NotMeasured,
    Runs,
    Subject,
    block_of,
    c_block,
    compile_c,
    conditions,
    interleave,
    over_floor,
    percentiles,
    pin_client,
    scratch,
    times_floor,
)
from models import FORMS, feeds_of, mobilenet
from own_device import own_device, pinned
from verdict import Budget, Report, arguments, cells, parse, progress, publish, subject_rows

from burst import Memory, Request, RequestArgument
from driver.cli.timing import Estimate, time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from measure import Block
    from numpy.typing import NDArray

    from driver import Model, RemoteDevice

QUESTION = "What does MobileNetV1 cost through a burst, beside LiteRT in process?"
SPIN = "floor: limit spin"
ADD_HERE, ADD_BURST = "ADD of 4 floats: in process", "ADD of 4 floats: burst"
PEERS = ("grpc",)
SPINNING = 1e-3  # after which both sides go to sleep; by default it is 50 us


def floor_of(form: str) -> str:
    """The row of LiteRT in process."""
    return f"in process: {form}"


def burst_of(form: str) -> str:
    """The row of the burst."""
    return f"{form}: burst"


def few(call: Callable[[], object], count: int) -> Callable[[], Block]:
    """A block of calls that take milliseconds: `block_of` with a shorter warm-up."""

    def block() -> Block:
        time_calls(call, 3)
        return percentiles(time_calls(call, count))

    return block


def on_device_cpu(block: Callable[[], Block]) -> Callable[[], Block]:
    """Runs in this process, where a device would."""

    def run() -> Block:
        os.sched_setaffinity(0, {DEVICE_CPU})
        try:
            return block()
        finally:
            os.sched_setaffinity(0, {CLIENT_CPU})

    return run


def here(model: Model, feeds: list[NDArray[Any]], threads: int) -> InProcess:
    """LiteRT in this process, its input in place. Ends the script when it fails."""
    found = InProcess(model, lambda _: threads)
    for place, feed in zip(found.inputs, feeds, strict=True):
        place[...] = feed
    if status := found.run():
        sys.exit(f"bench: LiteRT's status {status} in process")
    return found


def same(name: str, answer: NDArray[Any], expected: NDArray[Any]) -> None:
    """The same library on the same flatbuffer computes the same bytes. Ends the script when it does not."""
    if not np.array_equal(answer.reshape(expected.shape), expected):
        sys.exit(f"bench: {name} computes something else than LiteRT in process")


def in_place(feed: NDArray[Any], result: NDArray[Any]) -> Request:
    """A request whose input lies in its memory."""
    start = -(-feed.nbytes // 64) * 64
    memory = Memory.create(start + result.nbytes)
    memory.asarray(np.uint8, feed.nbytes)[...] = feed.reshape(-1).view(np.uint8)
    there, back = RequestArgument(offset=0, length=feed.nbytes), RequestArgument(offset=start, length=result.nbytes)
    return Request((there,), (back,), (memory,))


def ours(form: str, device: RemoteDevice, feed: NDArray[Any], expected: NDArray[Any], stack: ExitStack) -> list[Any]:
    """Names of rows and what they call: known to compute what LiteRT does in process."""
    prepared = stack.enter_context(device.prepare(mobilenet(form)))
    burst, awake = (stack.enter_context(prepared.burst(**options)) for options in ({}, {"spin": SPINNING}))
    for one in (burst, awake):
        one.inputs[0][...] = feed
        same(burst_of(form), one.run().outputs[0], expected)
    same(f"{form}: plain path", prepared.run(feed)[0], expected)
    request = in_place(feed, expected)
    return [
        (burst_of(form), burst.run),
        (f"{burst_of(form)}, spin=1 ms", awake.run),
        (f"{form}: plain path, execute", partial(prepared.execute, request)),
        (f"{form}: plain path, run", partial(prepared.run, feed)),
    ]


def add(device: RemoteDevice, count: int, stack: ExitStack) -> list[Subject]:
    """What is left of the cost when there is next to nothing to execute."""
    model = add_model()
    feeds = [np.full((1, 4), value, np.float32) for value in (1, 2)]
    local = here(model, feeds, 1)
    burst = stack.enter_context(stack.enter_context(device.prepare(model)).burst())
    for place, feed in zip(burst.inputs, feeds, strict=True):
        place[...] = feed
    same(ADD_BURST, burst.run().outputs[0], local.outputs[0])
    return [
        Subject(ADD_HERE, on_device_cpu(block_of(local.run, count)), SPIN),
        Subject(ADD_BURST, pinned(device, block_of(burst.run, count)), SPIN, is_ours=True),
    ]


@contextmanager
def server(args: argparse.Namespace) -> Iterator[Callable[[str, NDArray[Any]], NDArray[Any]]]:
    """peers/inference.py, and what asks it: model and array. It ends with the block. Raises NotMeasured."""
    sys.path.append(str(HERE / "peers"))
    try:
        from inference import Client
    except ImportError as error:
        raise NotMeasured("not installed") from error
    cpu = ["--cpu", str(DEVICE_CPU)] if args.threads == 1 else []
    with scratch() as directory:
        path = directory / "socket"
        command = [sys.executable, HERE / "peers" / "inference.py", path, "--threads", str(args.threads), *cpu]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([*command, "--models", *args.only], **pipes) as process:
            try:
                if process.stdout.readline() != b"ready\n":
                    raise NotMeasured("the server did not start")
                client = Client(path)
                yield client.infer
                client.close()
            finally:
                process.stdin.close()


class Peer:
    """What the rows of gRPC call, or why there are none."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.why = ""
        try:
            self._infer = stack.enter_context(server(args))
        except NotMeasured as error:
            self.why = str(error)

    def subject(self, form: str, feed: NDArray[Any], expected: NDArray[Any], count: int) -> Subject:
        """Its row for one form."""
        name = f"{form}: gRPC"
        if self.why:
            return Subject(name, self._fails, floor_of(form))
        same(name, self._infer(form, feed), expected)
        return Subject(name, few(partial(self._infer, form, feed), count), floor_of(form))

    def _fails(self) -> Block:
        raise NotMeasured(self.why)


def subjects(args: argparse.Namespace, stack: ExitStack) -> tuple[list[Subject], dict[str, Callable[[], Block]]]:
    """All rows, and their floors."""
    is_pinned = args.threads == 1
    device = stack.enter_context(own_device(NAMES[args.threads]))
    place: Callable[..., Any] = partial(pinned, device) if is_pinned else lambda block: block
    peer = Peer(args, stack) if args.peers else None
    rows, floors = [], {}
    for form in args.only:
        progress("prepares", form)
        model = mobilenet(form)
        (feed,) = feeds_of(model)
        local = here(model, [feed], args.threads)
        floor = few(local.run, args.count)
        floors[floor_of(form)] = on_device_cpu(floor) if is_pinned else floor
        for name, call in ours(form, device, feed, local.outputs[0], stack):
            rows.append(Subject(name, place(few(call, args.count)), floor_of(form), is_ours=True))
        if peer:
            rows.append(peer.subject(form, feed, local.outputs[0], args.count))
    if is_pinned:
        limit = compile_c(stack.enter_context(scratch()) / "limit", HERE / "peers" / "limit.c")
        floors[SPIN] = c_block(limit, "spin", args.add_count * 10)
        rows += add(device, args.add_count, stack)
    return rows, floors


def budgets(runs: Runs, args: argparse.Namespace) -> list[Budget]:
    """The whole interval of another process's cost is below 6 %; and when next to nothing is executed, microseconds."""
    found = []
    for form in args.only:
        most = times_floor(runs, burst_of(form)).high
        found.append(Budget(f"{form}: burst <= 1.06 x in process, upper end", Estimate(most, most, most, 1.0), 1.06))
    if runs.has(ADD_BURST):
        found.append(Budget("ADD of 4 floats: burst <= floor + 4 us", over_floor(runs, ADD_BURST), 4.0, "us"))
    return found


def is_network(row: dict[str, Any]) -> bool:
    """True for what was measured beside LiteRT in process."""
    return "rounds" in row and row["name"] != row["floor"] != SPIN


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, pairs=15)
    parser.add_argument("--threads", type=int, default=1, choices=(1, 2), help="of each execution (default 1)")
    parser.add_argument("--only", nargs="+", default=[*FORMS], choices=FORMS, metavar="FORM", help=", ".join(FORMS))
    parser.add_argument("--peers", nargs="+", default=["all"], choices=("all", "none", *PEERS), metavar="PEER")
    args = parse(parser)
    args.peers = [name for name in PEERS if name in args.peers or "all" in args.peers]
    args.count, args.add_count = (3, 50) if args.quick else (20, 2000)
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    if args.threads == 1:
        pin_client()
    found = {**conditions(), "threads": args.threads, "pinned": args.threads == 1}
    with ExitStack() as stack:
        rows, floors = subjects(args, stack)
        runs = interleave(rows, floors, args.pairs, progress)
    table = subject_rows(runs, rows)
    publish(args, Report(QUESTION, found, [cells(row) for row in table], budgets(runs, args), {"subjects": table}))
    if args.plot:
        import plots

        ratios = {one["name"]: one["times_floor"]["median"] for one in table if is_network(one)}
        plots.bars(args.plot, ratios, "time to LiteRT's in process", QUESTION)


if __name__ == "__main__":
    main()
