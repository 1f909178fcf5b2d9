"""Is this checkout as fast as another one? The same executions through both, in turns, in one run.

    python bench/before_after.py OTHER/.venv/bin/python [--served] [--pairs 31] [--json FILE]

Each checkout has a client process and a device of its own. A client is pinned to CPU 0 and its device to CPU 1; while
one side is measured, the other sleeps. Every round runs a block of each subject on both sides, and the order turns.
After five rounds all four processes start anew, because two processes of one checkout differ by a few percent for as
long as they live: the pages that they got are others. The figures are the median of the paired ratios, this checkout
over the other, and its 95 % interval. --served: on devices that `burst serve reference --group` serves; and what all
processes of such a device hold after a client has come and gone (PSS; each checkout's device shares its libraries with
the other's), of one device of each checkout in five rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from measure import CLIENT_CPU, DEVICE_CPU, progress, scratch, shared_memory
from question import Finding, Inquiry

from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

ROUNDS = 5  # of one pair of clients and devices
Blocks = dict[str, list[dict[str, float]]]  # us of each side, by subject
SUBJECTS = {  # calls of one block
    "burst, spinning": 4000,
    "burst, written": 4000,
    "burst, sleeping": 1000,
    "plain path": 1000,
    "fenced chain of 20": 30,
    "connect": 50,
}
# Uses public names alone, so that it runs on checkouts of any age.
CLIENT = f"""
import contextlib, json, os, sys, time
import numpy as np
os.sched_setaffinity(0, {{{CLIENT_CPU}}})
import driver
from burst import Memory, Request, RequestArgument

m = driver.ModelBuilder()
m.output(m.operation("ADD", m.input("float32", (1, 4)), m.input("float32", (1, 4)), 0))
device = driver.connect(sys.argv[1])
prepared = device.prepare(m.build())
ones = np.ones((1, 4), np.float32)
there = tuple(RequestArgument(offset=at, length=16) for at in (0, 64))
request = Request(there, (RequestArgument(offset=128, length=16),), (Memory.create(192),))
spinning, sleeping = prepared.burst(), prepared.burst(spin=0)

def chain():
    fences = []
    for _ in range(20):
        fences.append(prepared.execute_fenced(request, wait_for=fences[-1:]))
    fences[-1].result()

calls = {{
    "burst, spinning": spinning.run,
    "burst, written": lambda: spinning.run(ones, ones),
    "burst, sleeping": sleeping.run,
    "plain path": lambda: prepared.execute(request),
    "fenced chain of 20": chain,
    "connect": lambda: driver.connect(sys.argv[1]).close(),
}}
print("ready", flush=True)
for line in sys.stdin:
    name, count = json.loads(line)
    for pid in (device.service_pid, device.engine_pid):
        for thread in os.listdir(f"/proc/{{pid}}/task"):
            with contextlib.suppress(ProcessLookupError):  # it ends with a connection
                os.sched_setaffinity(int(thread), {{{DEVICE_CPU}}})
    call, clock, samples = calls[name], time.perf_counter_ns, np.empty(count)
    for _ in range(count // 10):
        call()
    for n in range(count):
        begin = clock()
        call()
        samples[n] = clock() - begin
    print(float(np.median(samples)) / 1e3, flush=True)
device.close()
"""


PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": "/"}
Measure = Callable[[str, int], float]


def environment(directory: Path) -> dict[str, str]:
    """Of the processes of a checkout."""
    return {"PATH": "/usr/bin:/bin", "BURST_RUNTIME_DIR": str(directory), "OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def served(python: str, directory: Path) -> Iterator[tuple[str, list[int]]]:
    """A device of one checkout, served to this process's group: its address, and its processes after a client."""
    words = [python, "-P", "-m", "driver.cli", "serve", "reference", "--group", str(os.getgid())]
    words += ["--dir", str(directory / "served")]
    with subprocess.Popen(words, env=environment(directory), **PIPES) as process:
        address = process.stdout.readline().split()[-1:]
        if not address:
            sys.exit(f"bench: {python} serves no device; its words are above")
        once = [python, "-P", "-c", "import sys, driver; driver.connect(sys.argv[1]).close()", *address]
        subprocess.run(once, env=environment(directory), cwd="/", check=True)
        below = psutil.Process(process.pid).children(recursive=True)
        yield address[0], [process.pid, *(each.pid for each in below)]
        process.terminate()


@contextmanager
def client(python: str, directory: Path, device: str) -> Iterator[Measure]:
    """A client of one checkout. The call that it yields measures a block: the median in microseconds."""
    with subprocess.Popen([python, "-P", "-c", CLIENT, device], env=environment(directory), **PIPES) as process:
        if process.stdout.readline() != "ready\n":
            sys.exit(f"bench: the client of {python} did not start; its words are above")

        def measure(name: str, count: int) -> float:
            print(json.dumps([name, count]), file=process.stdin, flush=True)
            return float(process.stdout.readline())

        yield measure
        process.stdin.close()


def measure_rounds(args: argparse.Namespace, rounds: range, found: Blocks, memory: list[dict[str, float]]) -> None:
    """Add rounds of both checkouts, in processes of their own, and what their served devices hold."""
    with ExitStack() as stack:
        folder, pythons = stack.enter_context(scratch()), {"this": sys.executable, "other": str(args.other.absolute())}
        for side in pythons:
            (folder / side).mkdir(mode=0o700)
        devices = dict.fromkeys(pythons, "reference")
        if args.served:
            both = {side: stack.enter_context(served(python, folder / side)) for side, python in pythons.items()}
            devices = {side: address for side, (address, _) in both.items()}
            memory.append({side: shared_memory(pids) for side, (_, pids) in both.items()})
        sides = {
            side: stack.enter_context(client(python, folder / side, devices[side])) for side, python in pythons.items()
        }
        for number in rounds:
            for name, count in SUBJECTS.items():
                progress(f"round {number + 1} of {args.pairs}", name)
                order = sorted(sides, reverse=bool(number % 2))
                found[name].append({side: sides[side](name, count // 10 if args.quick else count) for side in order})


def compared(blocks: list[dict[str, float]]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What was found of both sides and their ratio: for the JSON, and in cells."""
    this, other = (np.array([block[side] for block in blocks]) for side in ("this", "other"))
    ratio = estimate(this / other)
    medians = float(np.median(this)), float(np.median(other))
    apart = f"{ratio.median:.3f} [{ratio.low:.3f} .. {ratio.high:.3f}]"
    return {"this": medians[0], "other": medians[1], "ratio": ratio._asdict()}, (*map("{:.2f}".format, medians), apart)


def find(args: argparse.Namespace) -> Finding:
    """All rounds."""
    found: Blocks = {name: [] for name in SUBJECTS}
    memory = list[dict[str, float]]()
    for begin in range(0, args.pairs, ROUNDS):
        measure_rounds(args, range(begin, min(begin + ROUNDS, args.pairs)), found, memory)
    progress("")
    blocks = found | ({"idle": memory} if memory else {})
    subjects = {name: compared(each) for name, each in blocks.items()}
    lines = [(name, *cells) for name, (_, cells) in subjects.items()]
    times, idle, ends = lines[: len(found)], lines[len(found) :], ("this / other",)
    more = [(idle, ("", "this, MiB", "the other, MiB", *ends))] if idle else []
    rows = {name: row for name, (row, _) in subjects.items()}
    return Finding(times, (), {"rows": rows}, ("", "this, us", "the other, us", *ends), more)


BEFORE_AFTER = Inquiry(
    __doc__,
    find,
    options={
        "other": {"type": Path, "metavar": "PYTHON", "help": "the interpreter of the other checkout's .venv"},
        "--served": {"action": "store_true", "help": "on devices that are served to a group"},
    },
    pairs=31,
)

if __name__ == "__main__":
    BEFORE_AFTER.answer()
