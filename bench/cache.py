"""How long until the first result, when the model was compiled before, and when it was not?

    python bench/cache.py [--only float32 quant8 large] [--devices litert onnxruntime reference] [--json FILE]

Each round starts three Python processes (cache_result.py) for each model and device, on a device that is running. Each
calls `driver.compile`, opens a burst and runs it once; importing and making the model are not counted. "Off": without a
cache. "Cold": with an empty one, so that the compilation is kept, too. "Warm": with what the cold one has kept. `large`
is 105 MB of fully connected layers. Files are in the page cache, and no process is pinned. What hashing costs is
measured apart, on the bytes of each model: SHA-256 is the client's, for the token; reading and keyed BLAKE3 are the
device's.
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
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import HERE, conditions, scratch
from models import mobilenet
from own_device import installed, own_device
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import driver
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    from measure import Block

QUESTION = "From driver.compile to the first result of a burst, in ms"
STAGES = ("compile", "burst", "first run")
STATES, EXPECTED = ("off", "cold", "warm"), {"off": "compiled", "cold": "saved", "warm": "restored"}
DEVICES = ("litert", "onnxruntime", "reference")
TIMEOUT = 120.0
WIDTH, LAYERS = 2560, 4


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
    command = [sys.executable, HERE / "cache_result.py", model, device, "none" if state == "off" else folder]
    environment = {**os.environ, "BURST_RUNTIME_DIR": directory}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT)
    found = json.loads(done.stdout)
    if found["outcome"] != EXPECTED[state]:
        sys.exit(f"bench: {model} on {device} was {found['outcome']} when the cache was {state}")
    stages = {stage: nanoseconds / 1e6 for stage, nanoseconds in found["stages"].items()}
    return stages | {"all": sum(stages.values()), "sum": found["sum"]}


def measure(args: argparse.Namespace, stack: ExitStack) -> dict[tuple[str, str, str], list[Block]]:
    """All rounds. Of a first one, which starts what can be started, nothing is kept."""
    directory, places = stack.enter_context(scratch()), {}
    for device in args.devices:
        stack.enter_context(own_device(device))
        places[device] = os.environ["BURST_RUNTIME_DIR"]
    pairs = [(model, device) for model in args.only for device in args.devices]
    blocks: dict[tuple[str, str, str], list[Block]] = {(*pair, state): [] for pair in pairs for state in STATES}
    for number in range(args.pairs + 1):
        progress(f"round {number} of {args.pairs}")
        for model, device in pairs[:: -1 if number % 2 else 1]:
            folder = directory / f"{model}-{device}"
            shutil.rmtree(folder, ignore_errors=True)
            found = {state: fresh(model, device, state, (places[device], folder)) for state in STATES}
            if len({block["sum"] for block in found.values()}) > 1:
                sys.exit(f"bench: {model} on {device} gives another result out of the cache")
            if number:
                for state, block in found.items():
                    blocks[model, device, state].append(block)
    progress("")
    return blocks


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
        warm, cold, off = ([block["all"] for block in blocks[model, device, s]] for s in ("warm", "cold", "off"))
        for name, other in (("cold", cold), ("off", off)):
            ratios = [w / o for w, o in zip(warm, other, strict=True)]
            found.append(Budget(f"{model}, {device}: warm <= 0.25 x {name}", estimate(ratios), 0.25))
        if model != "large":
            found.append(Budget(f"{model}, {device}: warm <= 50 ms", estimate(warm), 50, " ms"))
    return found


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=[*MODELS], choices=MODELS, metavar="MODEL")
    parser.add_argument("--devices", nargs="+", default=[*DEVICES], metavar="DEVICE")
    return parse(parser)


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    args.devices, missing = installed(args.devices)
    found = conditions()
    with ExitStack() as stack:
        blocks = measure(args, stack)
    lines = []
    for (model, device, state), of in blocks.items():
        stages = (f"{float(np.median([block[stage] for block in of])):.1f}" for stage in STAGES)
        lines.append((f"{model}, {device}, {state}", *stages, spell(estimate([block["all"] for block in of]))))
    lines += [(device, *["-"] * len(STAGES), "not installed") for device in missing]
    speeds = {model: hashing(MODELS[model](), args.pairs) for model in args.only}
    ways = next(iter(speeds.values()))
    more = [([(model, *(f"{of[way]:.1f}" for way in ways)) for model, of in speeds.items()], ("GB/s", *ways))]
    rows: list[dict[str, Any]] = [{"name": ", ".join(name), "rounds": of} for name, of in blocks.items()]
    body = {"subjects": rows, "hashing_gb_s": speeds, "missing": missing}
    publish(args, Report(QUESTION, found, lines, budgets(blocks), body, ("", *STAGES, "all"), more))


if __name__ == "__main__":
    main()
