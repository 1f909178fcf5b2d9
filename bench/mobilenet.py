"""What does a whole network cost through a burst, beside the same library called in one's own process?

    python bench/mobilenet.py [--threads 1|2] [--only float32 quant8 per-channel] [--peers all|none|grpc] [--json FILE]
    python bench/mobilenet.py threads [--threads 1 2] [--json FILE] [--plot FILE]

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

import math
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from burst_roundtrip import add_model
from litert import NAMES, Chosen, InProcess
from measure import (
    CLIENT_CPU,
    DEVICE_CPU,
    HERE,
    Budget,
    NotMeasured,
    Runs,
    Subject,
    ask,
    block_of,
    c_block,
    compile_c,
    interleave,
    over_floor,
    percentiles,
    pin_client,
    progress,
    ratio,
    scratch,
    spell,
    times_floor,
)
from models import FORMS, feeds_of, mobilenet
from own_device import own_device, pinned
from question import Question, beside_floors

from burst import Memory, Request, RequestArgument
from driver.cli.timing import Estimate, time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from measure import Block
    from numpy.typing import NDArray

    from driver import Model, RemoteDevice

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


def settle(args: argparse.Namespace) -> None:
    """On two threads, no process is pinned."""
    args.count, args.add_count = (3, 50) if args.quick else (20, 2000)


def beside_litert(args: argparse.Namespace) -> Runs:
    """All rounds."""
    if args.threads == 1:
        pin_client()
    with ExitStack() as stack:
        args.subjects, floors = subjects(args, stack)
        return interleave(args.subjects, floors, args.pairs, progress)


NETWORK = beside_floors(
    __doc__,
    beside_litert,
    options={
        "--threads": {"type": int, "default": 1, "choices": (1, 2), "help": "of each execution (default 1)"},
        "--only": {"nargs": "+", "default": [*FORMS], "choices": FORMS, "metavar": "FORM", "help": ", ".join(FORMS)},
    },
    peers=PEERS,
    settle=settle,
    conditions=lambda args: {"threads": args.threads, "pinned": args.threads == 1},
    budgets=budgets,
    bars=(
        lambda row: row["times_floor"]["median"] if is_network(row) else None,
        "time to LiteRT's in process",
    ),
    pairs=15,
    is_pinned=False,
)

# ---- threads


IDLE, BUSY = "nothing else runs", "a processor is busy"
CHOSEN = "chosen"
MODELS: dict[str, Callable[[], Model]] = {
    "ADD of 4 floats": add_model,
    "MobileNetV1 0.25, 128 pixels": lambda: mobilenet("float32", 0.25, 128),
    "MobileNetV1 0.5, 160 pixels": lambda: mobilenet("float32", 0.5, 160),
    "MobileNetV1 1.0, 224 pixels": lambda: mobilenet("float32"),
    "MobileNetV1 1.0, 224 pixels, per-channel": lambda: mobilenet("per-channel"),
}


def products(model: Model) -> int:
    """What its convolutions multiply."""
    total, operands = 0, model.main.operands
    for operation in model.main.operations:
        if operation.type in {"CONV_2D", "DEPTHWISE_CONV_2D"}:
            sizes = operands[operation.inputs[1]].dimensions[1:]
            window = sizes[:2] if operation.type == "DEPTHWISE_CONV_2D" else sizes
            total += math.prod(operands[operation.outputs[0]].dimensions) * math.prod(window)
    return total


@contextmanager
def busy_processor() -> Iterator[Callable[[bool], None]]:
    """Another process that computes while it is told to; it stands still until then."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        process.send_signal(signal.SIGSTOP)
        try:
            yield lambda busy: process.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
        finally:
            process.kill()


def blocks_of(model: Model, devices: dict[str, RemoteDevice], milliseconds: float, stack: ExitStack) -> dict[str, Any]:
    """A block on each device, about so long."""
    found, feeds = {}, feeds_of(model)
    for who, device in devices.items():
        burst = stack.enter_context(stack.enter_context(device.prepare(model)).burst())
        for place, feed in zip(burst.inputs, feeds, strict=True):
            place[...] = feed
        found[who] = burst.run
    one = next(iter(found.values()))
    time_calls(one, 3)
    count = max(3, int(milliseconds * 1e6 / np.median(time_calls(one, 5))))
    return {who: _block(run, count) for who, run in found.items()}


def _block(run: Callable[[], object], count: int) -> Callable[[], Block]:
    """`block_of` with a warm-up that is a part of the block however few calls that has."""

    def block() -> Block:
        time_calls(run, max(3, count // 20))
        return percentiles(time_calls(run, count))

    return block


def measure(args: argparse.Namespace, models: dict[str, Model], stack: ExitStack) -> Runs:
    """All rounds; the order of the devices turns."""
    names = {**{str(n): NAMES[n] for n in args.threads}, CHOSEN: NAMES[None]}
    devices = {who: stack.enter_context(own_device(name)) for who, name in names.items()}
    tell = stack.enter_context(busy_processor())
    runs, blocks = Runs(), {}
    for name, model in models.items():
        progress("prepares", name)
        blocks[name] = list(blocks_of(model, devices, args.milliseconds, stack).items())
    for number in range(args.pairs):
        for state in (IDLE, BUSY):
            tell(state == BUSY)
            for name, sides in blocks.items():
                progress(f"round {number + 1} of {args.pairs}", f"{name}, {state}")
                turn = number % len(sides)
                for who, block in (*sides[turn:], *sides[:turn]):
                    runs.add(row_of(name, state, who), block())
        tell(False)
    progress("")
    return runs


def row_of(name: str, state: str, who: object) -> str:
    """A row's name."""
    return f"{name}; {state}; {who}"


def best(runs: Runs, name: str, state: str, counts: list[int]) -> int:
    """The quickest number of threads."""
    return min(counts, key=lambda n: float(np.median(runs.values(row_of(name, state, n)))))


def to_best(runs: Runs, name: str, state: str, counts: list[int]) -> Estimate:
    """What is chosen to the quickest, in the same round."""
    return ratio(runs, row_of(name, state, CHOSEN), row_of(name, state, best(runs, name, state, counts)))


def lines(runs: Runs, state: str, models: dict[str, Model], chosen: dict[str, int], counts: list[int]) -> list[Any]:
    """One table."""
    found = []
    for name, model in models.items():
        times = [f"{np.median(runs.values(row_of(name, state, who))):.1f}" for who in (*counts, CHOSEN)]
        against = spell(to_best(runs, name, state, counts))
        found.append((name, f"{products(model) / 1e6:.1f}", *times[:-1], str(chosen[name]), times[-1], against))
    return found


def measure_threads(args: argparse.Namespace) -> Runs:
    """All rounds."""
    args.models = {name: build() for name, build in MODELS.items()}
    choose = Chosen().threads_for
    args.chosen = {name: InProcess(model, choose).threads for name, model in args.models.items()}
    with ExitStack() as stack:
        return measure(args, args.models, stack)


def tables(runs: Runs, args: argparse.Namespace) -> list[Any]:
    """One for each state."""
    columns = ("10^6 products", *(f"on {n}, us" for n in args.threads), "chosen", "on that, us", "to the best")
    rows = partial(lines, runs, models=args.models, chosen=args.chosen, counts=args.threads)
    return [(rows(state=state), (state, *columns)) for state in (IDLE, BUSY)]


def limits(runs: Runs, args: argparse.Namespace) -> list[Budget]:
    """What is chosen is no slower than the best of the others."""
    return [
        Budget(f"{name}, {state}: chosen <= 1.1 x the best", to_best(runs, name, state, args.threads), 1.1)
        for state in (IDLE, BUSY)
        for name in args.models
    ]


def draw_threads(args: argparse.Namespace, runs: Runs, _: list[dict[str, Any]]) -> None:
    """What is chosen to the best."""
    import plots

    ratios = {budget.text.partition(":")[0]: budget.found.median for budget in limits(runs, args) if budget.found}
    plots.bars(args.plot, ratios, "time as chosen, to the best", "Threads of the litert device")


THREADS = Question(
    """How many threads should the litert device give a model?

        python bench/mobilenet.py threads [--threads 1 2] [--json FILE] [--plot FILE]

    Bursts of the litert device on as many threads as --threads says and on as many as the device chooses by itself,
    one right after the other in each round: ADD of 4 floats, where there is nothing to share, and MobileNetV1 from
    its smallest to its largest. No process is pinned. While "a processor is busy", another process computes without
    end, as a client does that decodes the next frame: then threads wait for each other. What is chosen is right when
    it is no slower than the best of the others.
    """,
    measure_threads,
    options={
        "--threads": {
            "nargs": "+",
            "type": int,
            "default": [1, 2],
            "choices": [n for n in NAMES if n],
            "help": "to compare (1 and 2)",
        }
    },
    settle=lambda args: vars(args).update(milliseconds=2.0 if args.quick else 100.0),
    budgets=limits,
    tables=tables,
    body=lambda _, args: {"chosen": args.chosen},
    draw=draw_threads,
    is_pinned=False,
)

if __name__ == "__main__":
    ask({"": NETWORK.answer, "threads": THREADS.answer})
