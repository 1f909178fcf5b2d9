"""From a model's file to its first result: what does each stage take in a fresh process?

    python bench/cold_start.py [--only float32 quant8 per-channel] [--devices reference litert ...] [--json FILE]

Each round starts a Python process (first_result.py) for each row: it imports `driver`, loads MobileNetV1 from a .tflite
file, connects to a device, prepares the model there, opens a burst and runs it twice. "Started": the device was not
running, so connecting starts its processes, which are ended afterwards. "Running": it was, and has run this model for
others before. Files are in the page cache, and no process is pinned.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import litert
import numpy as np
from measure import HERE, conditions, scratch
from models import FORMS, mobilenet
from own_device import installed, own_device
from verdict import Report, arguments, parse, progress, publish, spell

from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from measure import Block

QUESTION = "From a model's file to its first result, in ms"
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


def measure(args: argparse.Namespace, stack: ExitStack) -> dict[str, list[Block]]:
    """All rounds; every other one backwards. A first round, of which nothing is kept, warms the files."""
    directory = stack.enter_context(scratch())
    files = {form: directory / f"{form}.tflite" for form in args.only}
    for form, path in files.items():
        path.write_bytes(litert.written(mobilenet(form)))
    places = {}
    for device in args.devices:
        stack.enter_context(own_device(device))
        places[device] = os.environ["BURST_RUNTIME_DIR"]
    order = [(form, device, state) for form in files for device in args.devices for state in (STARTED, RUNNING)]
    blocks: dict[str, list[Block]] = {row_of(*one): [] for one in order}
    for number in range(args.pairs + 1):
        for form, device, state in order[:: -1 if number % 2 else 1]:
            progress(f"round {number} of {args.pairs}", row_of(form, device, state))
            path = files[form]
            block = started(path, device) if state == STARTED else fresh(path, device, places[device])[0]
            if number:
                blocks[row_of(form, device, state)].append(block)
    progress("")
    return blocks


def row(name: str, blocks: list[Block]) -> dict[str, Any]:
    """Medians, and the interval of the sum."""
    total = estimate([sum(block[stage] for stage in TO_RESULT) for block in blocks])
    stages = {stage: float(np.median([block[stage] for block in blocks])) for stage in STAGES}
    return {"name": name, "stages_ms": stages, "to_result_ms": total._asdict(), "rounds": blocks}


def line_of(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    figures = (f"{row['stages_ms'][stage]:.1f}" for stage in STAGES)
    return row["name"], *figures, spell(estimate([sum(b[stage] for stage in TO_RESULT) for b in row["rounds"]]))


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=["float32", "quant8"], choices=FORMS, metavar="FORM")
    parser.add_argument("--devices", nargs="+", default=[*DEVICES], metavar="DEVICE")
    return parse(parser)


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    if litert.schema is None:
        sys.exit("bench: ai-edge-litert is missing, which writes the files; pip install 'burst-engine[litert]'")
    args.devices, missing = installed(args.devices)
    found = conditions()
    with ExitStack() as stack:
        blocks = measure(args, stack)
    rows = [row(name, of) for name, of in blocks.items()]
    lines = [line_of(one) for one in rows]
    lines += [(device, *["-"] * len(STAGES), "not installed") for device in missing]
    head = ("", *STAGES, "to the first result")
    publish(args, Report(QUESTION, found, lines, [], {"subjects": rows, "missing": missing}, head))
    if args.plot:
        import plots

        plots.bars(args.plot, {one["name"]: one["to_result_ms"]["median"] for one in rows}, "ms", QUESTION)


if __name__ == "__main__":
    main()
