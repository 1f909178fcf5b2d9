"""How long until the first result, when the model was compiled before, and when it was not?

    python bench/cache.py [FILE ...] [--only float32 quant8 large] [--devices litert onnxruntime reference] [--json OUT]

Each round starts three Python processes (cache_result.py) for each model and device, on a device that is running. Each
calls `driver.compile`, opens a burst and runs it once; importing and making the model are not counted. "Off": without a
cache. "Cold": with an empty one, so that the compilation is kept, too. "Warm": with what the cold one has kept. `large`
is 105 MB of fully connected layers. Files are in the page cache, and no process is pinned. What hashing costs is
measured apart, on the bytes of each model: SHA-256 is the client's, for the token; reading and keyed BLAKE3 are the
device's.

FILEs, .onnx or .tflite, take the place of these models. Loading the file counts, then, and a fourth process, "own",
runs it once in the runtime that it was made for, on one thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from corpus import DEVICES as RUNTIMES
from measure import HERE, conditions, scratch
from models import mobilenet
from own_device import installed, own_device
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import driver
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from measure import Block

QUESTION = "From driver.compile, or from a file, to the first result of a burst, in ms"
STAGES = ("load", "compile", "burst", "first run")
OWN = "own"
EXPECTED = {OWN: OWN, "off": "compiled", "cold": "saved", "warm": "restored"}
DEVICES = ("litert", "onnxruntime", "reference")
TIMEOUT = 120.0
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


def fresh(model: str, device: str, state: str, places: tuple[str, Path]) -> Block:
    """One process: milliseconds of each stage, and of all."""
    directory, folder = places
    where = "none" if state == "off" else folder
    command = [sys.executable, HERE / "cache_result.py", model, OWN if state == OWN else device, where]
    environment = {**os.environ, "BURST_RUNTIME_DIR": directory}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT)
    found = json.loads(done.stdout)
    declines = model not in MODELS and found["outcome"] == "compiled"  # a device may keep nothing of a file
    if found["outcome"] != EXPECTED[state] and not declines:
        sys.exit(f"bench: {model} on {device} was {found['outcome']} when the cache was {state}")
    stages = {stage: nanoseconds / 1e6 for stage, nanoseconds in found["stages"].items()}
    return stages | {"all": sum(stages.values()), "sum": found["sum"]}


def measure(args: argparse.Namespace, stack: ExitStack) -> dict[tuple[str, str, str], list[Block]]:
    """All rounds. Of a first one, which starts what can be started, nothing is kept."""
    directory, places = stack.enter_context(scratch()), {}
    for device in args.devices:
        stack.enter_context(own_device(device))
        places[device] = os.environ["BURST_RUNTIME_DIR"]
    pairs = subjects(args)
    states = [state for state in EXPECTED if args.files or state != OWN]
    blocks: dict[tuple[str, str, str], list[Block]] = {(*pair, state): [] for pair in pairs for state in states}
    for number in range(args.pairs + 1):
        progress(f"round {number} of {args.pairs}")
        for model, device in pairs[:: -1 if number % 2 else 1]:
            folder = directory / f"{Path(model).name}-{device}"
            shutil.rmtree(folder, ignore_errors=True)
            found = {state: fresh(model, device, state, (places[device], folder)) for state in states}
            if len({block["sum"] for state, block in found.items() if state != OWN}) > 1:
                sys.exit(f"bench: {model} on {device} gives another result out of the cache")
            if number:
                for state, block in found.items():
                    blocks[model, device, state].append(block)
    progress("")
    return blocks


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


def budgets(blocks: dict[tuple[str, str, str], list[Block]]) -> list[Budget]:
    """Warm beside cold, and MobileNetV1's 50 ms."""
    found = []
    for model, device, state in blocks:
        if state != "warm":
            continue
        times = {s: [block["all"] for block in of] for (*pair, s), of in blocks.items() if pair == [model, device]}
        warm, others = times["warm"], {"cold": 0.25, "off": 0.25} if model in MODELS else {OWN: 1.0}
        for name, most in others.items():
            ratios = [w / o for w, o in zip(warm, times[name], strict=True)]
            if model in MODELS or Path(model).stat().st_size > LARGE:
                label = f"{Path(model).name}, {device}: warm <= {most:g} x {name}"
                found.append(Budget(label, estimate(ratios), most))
        if model in MODELS and model != "large":
            found.append(Budget(f"{model}, {device}: warm <= 50 ms", estimate(warm), 50, " ms"))
    return found


def stage_of(blocks: Sequence[Block], stage: str) -> str:
    """The median, in words."""
    found = [block[stage] for block in blocks if stage in block]
    return f"{float(np.median(found)):.1f}" if found else "-"


def hashing_table(speeds: dict[str, dict[str, float]]) -> list[Any]:
    """A table beside the main one."""
    ways = next(iter(speeds.values()))
    return [([(model, *(f"{of[way]:.1f}" for way in ways)) for model, of in speeds.items()], ("GB/s", *ways))]


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", default=[*MODELS], choices=MODELS, metavar="MODEL")
    parser.add_argument("--devices", nargs="+", default=[*DEVICES], metavar="DEVICE")
    return parse(parser)


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    wanted = sorted({RUNTIMES[path.suffix] for path in args.files}) if args.files else args.devices
    args.devices, missing = installed(wanted)
    found = conditions()
    with ExitStack() as stack:
        blocks = measure(args, stack)
    lines = []
    for (model, device, state), of in blocks.items():
        stages = (stage_of(of, stage) for stage in STAGES)
        label = f"{Path(model).name[-40:]}, {device}, {state}"
        lines.append((label, *stages, spell(estimate([block["all"] for block in of]))))
    lines += [(device, *["-"] * len(STAGES), "not installed") for device in missing]
    speeds = {} if args.files else {model: hashing(MODELS[model](), args.pairs) for model in args.only}
    more = hashing_table(speeds) if speeds else []
    rows: list[dict[str, Any]] = [{"name": ", ".join(name), "rounds": of} for name, of in blocks.items()]
    body = {"subjects": rows, "hashing_gb_s": speeds, "missing": missing}
    publish(args, Report(QUESTION, found, lines, budgets(blocks), body, ("", *STAGES, "all"), more))


if __name__ == "__main__":
    main()
