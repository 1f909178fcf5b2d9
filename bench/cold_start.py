"""From a model's file to its first result: what does each stage take in a fresh process?

    python bench/cold_start.py [--only float32 quant8 per-channel] [--devices reference litert ...] [--json FILE]
    python bench/cold_start.py cache [FILE ...] [--only float32 quant8 large] [--devices litert …] [--json OUT]
    python bench/cold_start.py constants [--devices reference litert onnxruntime] [--megabytes 256] [--json FILE]

Each round starts a Python process (first_result.py) for each row: it imports `driver`, loads MobileNetV1 from a .tflite
file, connects to a device, prepares the model there, opens a burst and runs it twice. "Started": the device was not
running, so connecting starts its processes, which are ended afterwards. "Running": it was, and has run this model for
others before. Files are in the page cache, and no process is pinned.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import litert
import numpy as np
from corpus import DEVICES as RUNTIMES
from measure import HERE, Budget, Runs, ask, progress, scratch
from models import FORMS, mobilenet
from own_device import installed, own_device
from question import Question, against, interval, median

import driver
from burst_engine.names import install_command
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from measure import Block
    from question import Cell


STAGES = ("python", "import", "load", "connect", "prepare", "burst", "first run", "second run")
TO_RESULT = STAGES[:-1]
DEVICES = ("reference", "litert", "onnxruntime")
STARTED, RUNNING = "started", "running"
TIMEOUT = 60.0


def fresh(path: Path, device: str, directory: str) -> tuple[Block, int]:
    """One process: milliseconds of each stage, and the pid of the device's service."""
    command = [sys.executable, HERE / "first_result.py", path, device, str(time.monotonic_ns())]
    environment = {**os.environ, "BURST_RUNTIME_DIR": directory}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT)
    found = json.loads(done.stdout)
    if not found["is_same"]:
        sys.exit(f"bench: {device} gives two results for one input")
    return {stage: nanoseconds / 1e6 for stage, nanoseconds in found["stages"].items()}, found["service"]


def started(path: Path, device: str) -> Block:
    """With a device of its own, which is gone when this returns."""
    with scratch() as directory:
        block, service = fresh(path, device, str(directory))
        end(service)
    return block


def end(service: int) -> None:
    """Ends a device's service, its engine with it, and waits until it is gone."""
    try:
        pidfd = os.pidfd_open(service)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        select.select([pidfd], [], [], TIMEOUT)
    finally:
        os.close(pidfd)


def row_of(form: str, device: str, state: str) -> str:
    """A row's name."""
    return f"{form}, {device}, {state}"


def measure(args: argparse.Namespace) -> Runs:
    """All rounds; every other one backwards. A first round, of which nothing is kept, warms the files."""
    with ExitStack() as stack:
        return of_files(args, stack)


def of_files(args: argparse.Namespace, stack: ExitStack) -> Runs:
    """All rows, on devices that run until `stack` ends."""
    if litert.schema is None:
        sys.exit(f"bench: ai-edge-litert is missing, which writes the files; {install_command('litert')}")
    runs, directory = without(args), stack.enter_context(scratch())
    files = {form: directory / f"{form}.tflite" for form in args.only}
    for form, path in files.items():
        path.write_bytes(litert.written(mobilenet(form)))
    places = {}
    for device in args.devices:
        stack.enter_context(own_device(device))
        places[device] = os.environ["BURST_RUNTIME_DIR"]
    order = [(form, device, state) for form in files for device in args.devices for state in (STARTED, RUNNING)]
    for number in range(args.pairs + 1):
        for form, device, state in order[:: 1 if number % 2 else -1]:
            progress(f"round {number} of {args.pairs}", row_of(form, device, state))
            path = files[form]
            block = started(path, device) if state == STARTED else fresh(path, device, places[device])[0]
            if number:
                runs.add(row_of(form, device, state), {**block, "to_result": sum(block[s] for s in TO_RESULT)})
    progress("")
    return runs


def without(args: argparse.Namespace) -> Runs:
    """Rows of the devices that are not installed; `args.devices` are those that are."""
    runs = Runs()
    args.devices, missing = installed(args.devices)
    for device in missing:
        runs.drop(device, "not installed")
    return runs


FIRST_RESULT = Question(
    __doc__,
    measure,
    {**{stage: median(stage, ".1f") for stage in STAGES}, "to the first result": interval("to_result")},
    options={
        "--only": {"nargs": "+", "default": ["float32", "quant8"], "choices": FORMS, "metavar": "FORM"},
        "--devices": {"nargs": "+", "default": [*DEVICES], "metavar": "DEVICE"},
    },
    figures=("to_result",),
    bars=("to_result", "ms"),
    is_pinned=False,
)

# ---- cache


CACHE_STAGES = ("load", "compile", "burst", "first run")
OWN = "own"
EXPECTED = {OWN: OWN, "off": "compiled", "cold": "saved", "warm": "restored"}
CACHE_DEVICES = ("litert", "onnxruntime", "reference")
CACHE_TIMEOUT = 120.0
WIDTH, LAYERS = 2560, 4
LARGE = 10_000_000  # bytes of a file that has to be there as soon as in its own runtime


def large() -> driver.Model:
    """105 MB of weights, 26 million products."""
    m, rng = driver.ModelBuilder(), np.random.default_rng(3)
    x = m.input("float32", (1, WIDTH))
    for _ in range(LAYERS):
        weights = rng.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(np.sqrt(WIDTH))
        x = m.operation("FULLY_CONNECTED", x, weights, np.zeros(WIDTH, np.float32), 1)
    m.output(x)
    return m.build()


MODELS: dict[str, Callable[[], driver.Model]] = {
    "float32": lambda: mobilenet("float32"),
    "quant8": lambda: mobilenet("quant8"),
    "large": large,
}


def cache_fresh(model: str, device: str, state: str, places: tuple[str, Path]) -> Block:
    """One process: milliseconds of each stage, and of all."""
    directory, folder = places
    where = "none" if state == "off" else folder
    command = [sys.executable, HERE / "cache_result.py", model, OWN if state == OWN else device, where]
    environment = {**os.environ, "BURST_RUNTIME_DIR": directory}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=CACHE_TIMEOUT)
    found = json.loads(done.stdout)
    declines = model not in MODELS and found["outcome"] == "compiled"  # a device may keep nothing of a file
    if found["outcome"] != EXPECTED[state] and not declines:
        sys.exit(f"bench: {model} on {device} was {found['outcome']} when the cache was {state}")
    stages = {stage: nanoseconds / 1e6 for stage, nanoseconds in found["stages"].items()}
    return stages | {"all": sum(stages.values()), "sum": found["sum"]}


def cache_measure(args: argparse.Namespace) -> Runs:
    """All rounds. Of a first one, which starts what can be started, nothing is kept."""
    with ExitStack() as stack:
        runs = of_caches(args, stack)
    args.hashing_gb_s = {} if args.files else {model: hashing(MODELS[model](), args.pairs) for model in args.only}
    return runs


def cache_row(model: str, device: str, state: str) -> str:
    """A row's name."""
    return f"{Path(model).name[-40:]}, {device}, {state}"


def of_caches(args: argparse.Namespace, stack: ExitStack) -> Runs:
    """All rows, on devices that run until `stack` ends."""
    if args.files:
        args.devices = sorted({RUNTIMES[path.suffix] for path in args.files})
    runs = without(args)
    directory, places = stack.enter_context(scratch()), {}
    for device in args.devices:
        stack.enter_context(own_device(device))
        places[device] = os.environ["BURST_RUNTIME_DIR"]
    pairs = subjects(args)
    states = [state for state in EXPECTED if args.files or state != OWN]
    for number in range(args.pairs + 1):
        progress(f"round {number} of {args.pairs}")
        for model, device in pairs[:: 1 if number % 2 else -1]:
            folder = directory / f"{Path(model).name}-{device}"
            shutil.rmtree(folder, ignore_errors=True)
            found = {state: cache_fresh(model, device, state, (places[device], folder)) for state in states}
            if len({block["sum"] for state, block in found.items() if state != OWN}) > 1:
                sys.exit(f"bench: {model} on {device} gives another result out of the cache")
            if number:
                for state, block in found.items():
                    runs.add(cache_row(model, device, state), block)
    progress("")
    return runs


def subjects(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Model and device, of each."""
    if args.files:
        return [(str(path), RUNTIMES[path.suffix]) for path in args.files]
    return [(model, device) for model in args.only for device in args.devices]


def hashing(model: driver.Model, rounds: int) -> dict[str, float]:
    """GB/s of what a restored model passes through."""
    from blake3 import blake3

    from driver.engine.cache.memory import PrivateMemory
    from driver.protocol.model_codec import encode, sealed

    encoded = encode(model, most_handles=0)
    fd, data = encoded.fd, sealed([os.dup(encoded.fd)], encoded.where).asarray()
    memory = PrivateMemory([data.nbytes])
    ways: dict[str, Callable[[], object]] = {
        "SHA-256": lambda: hashlib.sha256(data.data),
        "reading": lambda: PrivateMemory([data.nbytes]).fill([(fd, 0)]),
        "BLAKE3": lambda: blake3(key=bytes(32)).update(memory.arrays[0].data),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - begin)
    return {name: data.nbytes / 1e9 / float(np.median(found)) for name, found in times.items()}


def budgets(runs: Runs, args: argparse.Namespace) -> list[Budget]:
    """Warm beside cold, and MobileNetV1's 50 ms."""
    found = []
    for model, device in subjects(args):
        warm = cache_row(model, device, "warm")
        others = {"cold": 0.25, "off": 0.25} if model in MODELS else {OWN: 1.0}
        for name, most in others.items():
            if model in MODELS or Path(model).stat().st_size > LARGE:
                ratios = against(cache_row(model, device, name), "all")(runs, warm)
                found.append(Budget(f"{Path(model).name}, {device}: warm <= {most:g} x {name}", ratios, most))
        if model in MODELS and model != "large":
            text = f"{model}, {device}: warm <= 50 ms"
            found.append(Budget(text, estimate(runs.values(warm, "all")), 50, " ms"))
    return found


def stage(name: str) -> Cell:
    """A column of the rows that have that stage."""
    return lambda runs, row: median(name, ".1f")(runs, row) if name in runs.blocks[row][0] else "-"


def hashing_table(speeds: dict[str, dict[str, float]]) -> list[Any]:
    """A table beside the main one."""
    ways = next(iter(speeds.values()))
    return [([(model, *(f"{of[way]:.1f}" for way in ways)) for model, of in speeds.items()], ("GB/s", *ways))]


CACHE = Question(
    """How long until the first result, when the model was compiled before, and when it was not?

        python bench/cold_start.py cache [FILE ...] [--only float32 quant8 large] [--devices litert …] [--json OUT]

    Each round starts three Python processes (cache_result.py) for each model and device, on a device that is running.
    Each calls `driver.compile`, opens a burst and runs it once; importing and making the model are not counted.
    "Off": without a cache. "Cold": with an empty one, so that the compilation is kept, too. "Warm": with what the
    cold one has kept. `large` is 105 MB of fully connected layers. Files are in the page cache, and no process is
    pinned. What hashing costs is measured apart, on the bytes of each model: BLAKE3 is the client's, for the token,
    and, keyed, the device's, which also reads them; SHA-256 stands beside it.

    FILEs, .onnx or .tflite, take the place of these models. Loading the file counts, then, and a fourth process,
    "own", runs it once in the runtime that it was made for, on one thread.
    """,
    cache_measure,
    {**{name: stage(name) for name in CACHE_STAGES}, "all": interval("all")},
    options={
        "files": {"nargs": "*", "type": Path, "metavar": "FILE"},
        "--only": {"nargs": "+", "default": [*MODELS], "choices": MODELS, "metavar": "MODEL"},
        "--devices": {"nargs": "+", "default": [*CACHE_DEVICES], "metavar": "DEVICE"},
    },
    budgets=budgets,
    more=lambda _, args: hashing_table(args.hashing_gb_s) if args.hashing_gb_s else [],
    kept=("hashing_gb_s",),
    figures=("all",),
    bars=("all", "ms"),
    is_pinned=False,
)

# ---- constants


OPERATIONS = ("EMBEDDING_LOOKUP", "FULLY_CONNECTED")
LIMIT, CONSTANTS_LAYERS = 1.1, 4
POOLS = ("frozen", "written")


class Row(NamedTuple):
    """What is measured: a device, an operation, and the pool of its constants."""

    device: str
    operation: str
    pool: str


def side(nbytes: int) -> int:
    """Of each of the matrices."""
    return int(np.sqrt(nbytes / 4 / CONSTANTS_LAYERS)) // 16 * 16


def model(operation: str, pool: driver.Memory) -> driver.Model:
    """A model whose constants fill the pool."""
    m, n = driver.ModelBuilder(), side(pool.nbytes)
    if operation == "EMBEDDING_LOOKUP":
        table = m.constant(pool.asarray(np.float32, (CONSTANTS_LAYERS * n, n)), by_reference=True)
        m.output(m.operation(operation, m.input("int32", (8,)), table))
        return m.build()
    x = m.input("float32", (1, n))
    for layer in range(CONSTANTS_LAYERS):
        weights = m.constant(pool.asarray(np.float32, (n, n), 4 * layer * n * n), by_reference=True)
        x = m.operation(operation, x, weights, np.zeros(n, np.float32), 0)
    m.output(x)
    return m.build()


def pools(nbytes: int) -> dict[str, driver.Memory]:
    """Equal bytes in both."""
    values = np.random.default_rng(1).standard_normal(nbytes // 4, np.float32)
    written = driver.Memory.create(values.nbytes)
    written.asarray(np.float32)[:] = values
    return {"frozen": driver.Memory.frozen(values), "written": written}


def milliseconds(begin: float) -> float:
    """Since then."""
    return (time.perf_counter() - begin) * 1e3


def copied(pool: driver.Memory) -> float:
    """One copy into new shared memory, in ms."""
    begin = time.perf_counter()
    with open(os.memfd_create("copy"), "wb") as file:
        file.write(pool.asarray().data)
        return milliseconds(begin)


def hashed(pool: driver.Memory) -> float:
    """SHA-256 of the constants, in ms."""
    begin = time.perf_counter()
    hashlib.sha256(pool.asarray().data).digest()
    return milliseconds(begin)


def asked(device: driver.RemoteDevice, wanted: driver.Model) -> Block:
    """Both calls, in ms."""
    begin = time.perf_counter()
    supported = device.supported_operations(wanted)
    first = milliseconds(begin)
    if not all(supported):
        raise SystemExit(f"bench: {device.name} does not support this model")
    begin = time.perf_counter()
    prepared = device.prepare(wanted)
    second = milliseconds(begin)
    prepared.close()
    return {"supported": first, "prepare": second, "both": first + second}


def constants_measure(args: argparse.Namespace) -> Runs:
    """All rounds, of which the first is not kept."""
    with ExitStack() as stack:
        return of_constants(args, stack)


def of_constants(args: argparse.Namespace, stack: ExitStack) -> Runs:
    """All rows, on devices that run until `stack` ends."""
    runs = without(args)
    devices = {name: stack.enter_context(own_device(name)) for name in args.devices}
    memory = pools(args.megabytes << 20)
    rows = [Row(*row) for row in np.array(np.meshgrid(args.devices, OPERATIONS, POOLS)).T.reshape(-1, 3).tolist()]
    for number in range(args.pairs + 1):
        progress(f"round {number} of {args.pairs}")
        for row in rows[:: 1 if number % 2 else -1]:
            pool = memory[row.pool]
            beside = {"SHA-256": hashed(pool), "copy": copied(pool)}
            found = asked(devices[row.device], model(row.operation, pool)) | beside
            if number:
                runs.add(", ".join(row), {**found, "of_hashing": of_hashing(row, found)})
    progress("")
    return runs


def of_hashing(row: Row, block: Block) -> float:
    """What both calls take, without the one copy of a pool that can be written, by what hashing takes."""
    return (block["both"] - (block["copy"] if row.pool == "written" else 0.0)) / block["SHA-256"]


def constants_budgets(runs: Runs, _: argparse.Namespace) -> list[Budget]:
    """Both calls beside hashing."""
    found = []
    for row in runs.blocks:
        what = "SHA-256, and one copy" if row.endswith("written") else "SHA-256"
        ratios = estimate(runs.values(row, "of_hashing"))
        found.append(Budget(f"{row}: both <= {LIMIT} x {what}", ratios, LIMIT))
    return found


CONSTANTS = Question(
    """What does a device take to say what it supports of a model with large constants, and to prepare it?

        python bench/cold_start.py constants [--devices reference litert onnxruntime] [--megabytes 256] [--json FILE]

    The constants lie in one pool. "Frozen": no process can write it any more, so it travels as its handle. "Written":
    its client can still write it, so its bytes are copied once. Each round calls `supported_operations` and then
    `prepare`, on a device that runs and has no such model. EMBEDDING_LOOKUP reads rows of one table: no library makes
    anything of it beforehand. FULLY_CONNECTED is four square matrices, which LiteRT and ONNX Runtime pack for their
    kernels while they prepare. Beside it, in the same round: the SHA-256 of the constants, as a measure
    of what looking at all of them takes, and one copy of them into new shared memory.
    """,
    constants_measure,
    {
        **{stage: median(stage, ".1f") for stage in ("supported", "prepare", "SHA-256", "copy")},
        "supported and prepare": interval("both"),
    },
    options={
        "--devices": {"nargs": "+", "default": [*DEVICES], "metavar": "DEVICE"},
        "--megabytes": {"type": int, "help": "of constants (default 256, with --quick 4)"},
    },
    settle=lambda args: vars(args).update(megabytes=args.megabytes or (4 if args.quick else 256)),
    budgets=constants_budgets,
    kept=("megabytes",),
    figures=("both",),
    bars=("both", "ms"),
    is_pinned=False,
)

if __name__ == "__main__":
    ask({"": FIRST_RESULT.answer, "cache": CACHE.answer, "constants": CONSTANTS.answer})
