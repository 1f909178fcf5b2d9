"""Does an important stream stay on time beside programs that saturate the same device?

    python bench/qos.py [--pairs 9] [--seconds 10] [--only stream grpc fairness applications uids behind cost]
                        [--others 1 4 16] [--json FILE] [--plot FILE]

A stream of 30 frames a second with 5 ms of work each, of high priority, alone and beside clients of low priority that
ask for 20 ms of work again and again, on one litert device, all of one account. A frame is late that is not done 15 ms
after it was due. Of each frame the script also notes how late its own sleep ended: what the machine itself stalled.

grpc: the same mix through a gRPC server with a pool of as many threads as there are processors, and the same models.
fairness: two equal processes of one account; applications: two of one account, at high and at medium priority; uids: of
two accounts, with equal weights (only root can be others). Each has as many bursts as there are processors, and one
more. behind: a request at high priority behind 24 at low priority, of the same client, on every way (bench/behind.py).
cost: bench/burst_roundtrip.py queue.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import behind
import burst_roundtrip
import numpy as np
from interference import second_process
from litert import InProcess
from measure import (
    Budget,
    NotMeasured,
    Runs,
    Subject,
    interleave,
    percentiles,
    progress,
    scratch,
)
from own_device import own_device
from question import Finding, Inquiry

import driver
from driver.cli.timing import estimate
from driver.devices.litert.cuts import SEGMENT

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from measure import Block

    Call = Callable[[], object]

PAIRS = (
    ("fairness", "processes of one account"),
    ("applications", "applications of one account, at high and at medium priority"),
    ("uids", "accounts"),
)
PARTS = ("stream", "grpc", "fairness", "applications", "uids", "behind", "cost")
PERIOD, LIMIT = 1 / 30, 0.015  # seconds
WORK = {"stream": 0.005, "other": 0.020}  # seconds, about
STALL = 1e-3  # seconds by which a sleep ends late
SHAPE, LAYER = (1, 28, 28, 64), 28 * 28 * 64 * 64 * 9  # and the products of a convolution on it
SERVER, GROUP, ACCOUNTS = 61001, 61900, (61002, 61003)  # no account has these: a number needs none
METHOD = "/qos/run"
OURS, GRPC = "burst", "gRPC"
HEAD = ("", "p50 ms", "p99 ms", "p99.9 ms", "late", "stalls", "frames", "others/s", "others lose %")
PATIENCE = 60


# ---- the models


def chain(layers: int) -> driver.Model:
    """Convolutions one after the other."""
    m, random = driver.ModelBuilder(), np.random.default_rng(1)
    x = m.input("float32", SHAPE)
    for _ in range(layers):
        weights = random.standard_normal((64, 3, 3, 64), np.float32) / np.float32(2 * np.sqrt(64 * 9))
        x = m.operation("CONV_2D", x, weights, np.zeros(64, np.float32), 1, 1, 1, 1)
    m.output(x)
    return m.build()


def seconds_per_layer() -> float:
    """On this machine, in one thread."""
    layers = 8
    alone = InProcess(chain(layers), lambda _: 1)
    samples = []
    for _ in range(20):
        begin = time.perf_counter()
        alone.run()
        samples.append(time.perf_counter() - begin)
    return float(np.median(samples)) / layers


# ---- ours and theirs


def burst_call(stack: ExitStack, role: str, layers: int) -> Call:
    """A client of the device in BURST_RUNTIME_DIR."""
    device = stack.enter_context(driver.connect("litert"))
    prepared = stack.enter_context(device.prepare(chain(layers), priority="high" if role == "stream" else "low"))
    return stack.enter_context(prepared.burst()).run


def grpc_call(stack: ExitStack, role: str, address: str) -> Call:
    """A client of the server below."""
    import grpc

    channel = stack.enter_context(grpc.insecure_channel(address, options=_limits()))
    frame = np.ones(SHAPE, np.float32).tobytes()
    return partial(channel.unary_unary(METHOD), role.encode().ljust(8) + frame, wait_for_ready=True, timeout=PATIENCE)


def _limits() -> list[tuple[str, int]]:
    return [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def serve_grpc(path: str, layers: dict[str, int]) -> None:
    """Until standard input ends. Each thread of the pool has models of its own, as one runs in one thread at a time."""
    from concurrent import futures

    import grpc

    mine = threading.local()

    def infer(request: bytes, _: object) -> bytes:
        role = request[:8].strip().decode()
        models = mine.__dict__.setdefault("models", {})
        if role not in models:
            models[role] = InProcess(chain(layers[role]), lambda _: 1)
        model = models[role]
        model.inputs[0][...] = np.frombuffer(request[8:], np.float32).reshape(SHAPE)
        model.run()
        return bytes(model.outputs[0].data)

    class Service(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(infer) if details.method == METHOD else None

    server = grpc.server(futures.ThreadPoolExecutor(os.cpu_count()), options=_limits())
    server.add_generic_rpc_handlers((Service(),))
    server.add_insecure_port(path)
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(None).wait()


@contextmanager
def grpc_server(layers: dict[str, int]) -> Iterator[str]:
    """Its address."""
    with scratch() as directory:
        address = f"unix:{directory / 'grpc.sock'}"
        command = [sys.executable, __file__, "--serve-grpc", address, json.dumps(layers)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            if process.stdout.readline() != "ready\n":
                raise NotMeasured("no gRPC server: pip install grpcio")
            yield address
            process.stdin.close()


# ---- the mix


def other(opened: Callable[[ExitStack], Call], stack: ExitStack) -> dict[str, Call]:
    """What a process beside the stream can do."""
    return {"work": opened(stack)}


class Mix:
    """A stream, and others beside it that were started when they were first needed."""

    def __init__(self, stack: ExitStack, opened: Callable[[ExitStack, str], Call]) -> None:
        self._stack, self._opened = stack, opened
        self._call = opened(stack, "stream")
        self._others: list[Connection] = []
        for _ in range(3):
            self._call()

    def block(self, others: int, seconds: float) -> Block:
        """Others alone, and then with the stream."""
        while len(self._others) < others:
            tasks = partial(other, partial(_open_other, self._opened))
            self._others.append(self._stack.enter_context(second_process(tasks, None)))
        lines = self._others[:others]
        alone = _rate(lines, partial(time.sleep, seconds / 2)) if others else 0.0
        found: list[Block] = []
        rate = _rate(lines, lambda: found.append(self._stream(seconds)))
        lost = 100 * (1 - rate / alone) if alone else 0.0
        return {**found[0], "others_per_s": rate, "others_lose": lost}

    def _stream(self, seconds: float) -> Block:
        frames = max(3, round(seconds / PERIOD))
        took, stalled = np.empty(frames), np.empty(frames)
        begin = time.monotonic() + PERIOD
        for n in range(frames):
            due = begin + n * PERIOD
            time.sleep(max(0.0, due - time.monotonic()))
            stalled[n] = time.monotonic() - due
            self._call()
            took[n] = time.monotonic() - due
        late = took > LIMIT
        stalls = int((late & (stalled > STALL)).sum())
        return {**percentiles(took * 1e9), "late": int(late.sum()), "stalls": stalls, "frames": frames}


def _open_other(opened: Callable[[ExitStack, str], Call], stack: ExitStack) -> Call:
    return opened(stack, "other")


def _rate(lines: Sequence[Connection], meanwhile: Call) -> float:
    """Executions a second of all others while that goes on."""
    begin = time.monotonic()
    for line in lines:
        line.send("work")
    meanwhile()
    for line in lines:
        line.send("stop")
    done = sum(line.recv() for line in lines)
    return float(done / (time.monotonic() - begin))


def open_burst(layers: dict[str, int], stack: ExitStack, role: str) -> Call:
    return burst_call(stack, role, layers[role])


def open_grpc(address: str, stack: ExitStack, role: str) -> Call:
    return grpc_call(stack, role, address)


def row_of(way: str, others: int) -> str:
    return f"{way}, beside {others}" if others else f"{way}, alone"


def noted(alone: dict[str, list[Block]], name: str, mix: Mix, args: argparse.Namespace) -> Block:
    """A block of the stream alone, kept whole."""
    alone.setdefault(name, []).append(mix.block(0, args.seconds))
    return alone[name][-1]


def mixes(args: argparse.Namespace, layers: dict[str, int]) -> Runs:
    """All rounds; each mix right after the stream alone."""
    with ExitStack() as stack:
        found = {}
        if "stream" in args.only:
            stack.enter_context(own_device("litert"))
            found[OURS] = Mix(stack, partial(open_burst, layers))
        if "grpc" in args.only:
            found[GRPC] = Mix(stack, partial(open_grpc, stack.enter_context(grpc_server(layers))))
        args.subjects = [
            Subject(row_of(way, n), partial(mix.block, n, args.seconds), row_of(way, 0), is_ours=way == OURS)
            for way, mix in found.items()
            for n in args.others
        ]
        floors = {row_of(way, 0): partial(noted, args.alone, row_of(way, 0), mix, args) for way, mix in found.items()}
        return interleave(args.subjects, floors, args.pairs, progress) if found else Runs()


# ---- shares


class Program(NamedTuple):
    """A process that asks for more than it can get."""

    account: dict[str, Any]  #: for Popen
    priority: str = "medium"
    application: str = ""  #: that it declares, if any


def share(address: str, priority: Any, application: str, layers: int, seconds: float) -> None:
    """Such a process, which says how often it executed. It begins when it is told to."""
    bursts = (os.cpu_count() or 1) + 1
    with ExitStack() as stack:
        device = stack.enter_context(driver.connect(address, application=application or None))
        prepared = [stack.enter_context(device.prepare(chain(layers), priority=priority)) for _ in range(bursts)]
        calls = [stack.enter_context(one.burst()).run for one in prepared]
        for call in calls:
            call()
        print("ready", flush=True)
        sys.stdin.readline()
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(bursts) as threads:
            print(sum(threads.map(partial(_until, end), calls)), flush=True)


def _until(end: float, call: Call) -> int:
    done = 0
    while time.monotonic() < end:
        call()
        done += 1
    return done


def difference(address: str, programs: Sequence[Program], layers: int, seconds: float) -> float:
    """Percent by which two programs differ in how often they executed, the same model."""
    command = [sys.executable, __file__, "--share", address]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": "/"}
    with ExitStack() as stack:
        found = []
        for account, *words in programs:
            popen = subprocess.Popen([*command, *words, str(layers), str(seconds)], **pipes, **account)
            found.append(stack.enter_context(popen))
        for process in found:
            if process.stdout.readline() != "ready\n":
                raise NotMeasured("another account may not read the sources, or the libraries of this Python")
        for process in found:
            process.stdin.write("go\n")
            process.stdin.flush()
        one, two = (float(process.stdout.readline()) for process in found)
    return 200 * abs(one - two) / (one + two)


@contextmanager
def served() -> Iterator[str]:
    """The socket of a device of another account that is open to a group."""
    if os.geteuid():
        raise NotMeasured("only root can start processes of other accounts")
    with scratch() as directory:
        directory.chmod(0o755)
        home = directory / "home"
        home.mkdir()
        os.chown(home, SERVER, SERVER)
        words = ["-m", "driver.cli", "serve", "litert", "--group", GROUP, "--dir", home / "run"]
        with subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=os.environ | {"HOME": str(home)},
            start_new_session=True,
            **_account(SERVER),
        ) as process:
            try:
                if "is served at" not in process.stdout.readline():
                    raise NotMeasured("the device was not served under another account")
                yield str(home / "run/litert.sock")
            finally:
                process.terminate()


def _account(uid: int) -> dict[str, Any]:
    return {"user": uid, "group": uid, "extra_groups": [GROUP]}


ONE_ACCOUNT = {
    "fairness": [Program({}), Program({})],
    "applications": [Program({}, "high", "one"), Program({}, "medium", "another")],
}


def differences(args: argparse.Namespace, layers: int, part: str) -> list[float]:
    """Of all rounds."""
    with ExitStack() as stack:
        if part == "uids":
            address, programs = stack.enter_context(served()), [Program(_account(uid)) for uid in ACCOUNTS]
        else:
            stack.enter_context(own_device("litert"))
            address, programs = "litert", ONE_ACCOUNT[part]
        found = []
        for n in range(args.pairs):
            progress(f"{part}: round {n + 1} of {args.pairs}")
            found.append(difference(address, programs, layers, args.seconds))
        progress("")
        return found


# ---- what it says


def cells(runs: Runs, name: str, alone: dict[str, list[Block]]) -> tuple[str, ...]:
    if name in runs.errors:
        return (name, runs.errors[name], *[""] * (len(HEAD) - 2))
    values = partial(runs.values, name)
    times = [f"{np.median(values(key)) / 1e3:.2f}" for key in ("p50_us", "p99_us", "p999_us")]
    blocks = alone.get(name, runs.blocks[name])
    counts = [str(sum(block[key] for block in blocks)) for key in ("late", "stalls", "frames")]
    others = [f"{np.median(values(key)):.1f}" for key in ("others_per_s", "others_lose") if key in runs.blocks[name][0]]
    return (name, *times, *counts, *(others or ["", ""]))


def budgets(args: argparse.Namespace, runs: Runs, checkpoint: float) -> list[Budget]:
    """Against the stream alone, in the block before."""
    found = []
    for subject in args.subjects:
        if not subject.is_ours or not runs.has(subject.name):
            continue
        late = runs.values(subject.name, "late") - runs.values(subject.name, "stalls")
        usual = np.mean([block["late"] - block["stalls"] for block in args.alone[subject.floor]])
        extra = runs.values(subject.name, "p999_us") - runs.values(subject.floor, "p999_us")
        found += [
            Budget(f"{subject.name}: frames late in a block, beyond stalls and alone", estimate(late - usual), 0, ""),
            Budget(
                f"{subject.name}: p99.9 over alone <= a checkpoint, {checkpoint:.1f} ms",
                estimate(extra / 1e3),
                checkpoint,
                "ms",
            ),
        ]
    return found


@cache
def per_layer() -> float:
    return seconds_per_layer()


def find(args: argparse.Namespace) -> Finding:
    """The parts that `--only` names."""
    args.subjects, args.alone = [], {}
    layers = {role: max(1, round(seconds / per_layer())) for role, seconds in WORK.items()}
    checkpoint = 1.5 * SEGMENT / LAYER * per_layer() * 1e3
    runs, more, promises = mixes(args, layers), {}, []
    names = [name for subject in args.subjects for name in (subject.floor, subject.name)]
    promises += budgets(args, runs, checkpoint)
    for part, who in PAIRS:
        if part in args.only:
            try:
                more[part] = differences(args, layers["stream"], part)
            except (NotMeasured, OSError) as why:
                print(f"{part}: {why}", file=sys.stderr)
            promises.append(Budget(f"two {who}: apart by", estimate(more[part]) if part in more else None, 5, "%"))
    tables = []
    if "behind" in args.only:
        models = {"low": chain(layers["other"]), "high": chain(layers["stream"])}
        found_behind = behind.run(args, models, SHAPE)
        more["behind"] = found_behind.blocks
        promises += behind.budgets(found_behind)
        tables.append((behind.table(found_behind), behind.HEAD))
    if "cost" in args.only:
        promises += burst_roundtrip.queue_budgets(burst_roundtrip.queue_run(args))
    rows = [cells(runs, name, args.alone) for name in dict.fromkeys(names)]
    subjects = [{"name": name, "rounds": blocks} for name, blocks in runs.blocks.items()]
    body = {"layers": layers, "checkpoint_ms": checkpoint, "subjects": subjects, "alone": args.alone, **more}
    body["errors"] = runs.errors
    if args.plot and runs.blocks:
        draw(args.plot, runs.blocks | args.alone)
    return Finding(rows, promises, body, HEAD, tables)


def settle(args: argparse.Namespace) -> None:
    """One short block for --quick."""
    args.seconds = args.seconds or (0.5 if args.quick else 10)
    args.others = args.others[:1] if args.quick else args.others


def draw(path: Path, found: dict[str, list[Block]]) -> None:
    import plots

    curves = {name: np.median([block["cdf_us"] for block in blocks], axis=0) for name, blocks in found.items()}
    plots.distributions(path, curves, {name for name in curves if name.startswith(OURS)}, "30 frames/s beside others")


QOS = Inquiry(
    __doc__,
    find,
    options={
        "--only": {"nargs": "+", "choices": PARTS, "default": PARTS},
        "--seconds": {"type": float, "help": "of each block (default 10, with --quick 0.5)"},
        "--others": {"nargs": "+", "type": int, "default": [1, 4, 16], "help": "how many beside the stream"},
    },
    settle=settle,
)

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--serve-grpc", path, layers]:
            serve_grpc(path, json.loads(layers))
        case ["--share", address, priority, application, layers, seconds]:
            share(address, priority, application, int(layers), float(seconds))
        case _:
            QOS.answer()
