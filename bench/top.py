"""Does `burst top` cost the bursts that it shows anything?

    python bench/top.py [--processes 8] [--bursts 8] [--rate 50] [--json FILE] [--plot FILE]

Eight client processes have eight bursts each on one device, in a thread of its own each: ADD on four floats.
*paced*: each burst has a request every 20 ms, as a control loop would have; *full*: each sends its next request
when it has its result, and nothing is left of the machine. Every block of either stands beside one in which
`burst top` shows the 64 bursts on a terminal of 120 x 40, with a look every second; it was started before the
block, and ends after it. Which of the two comes first turns from round to round. What is told is the paired ratio
of p99s, of all requests of all bursts in a block.
"""

from __future__ import annotations

import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from burst_many import SOON, ones
from burst_roundtrip import add_model
from measure import Runs, conditions, percentiles, ratio
from own_device import own_device
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import driver

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from measure import Block

QUESTION = "Does burst top cost the bursts that it shows anything?"
PACED, FULL = "paced", "full"
BESIDE = ", beside burst top"
TOP = [sys.executable, "-m", "driver.cli", "top"]
HEAD = ("", "requests per s", "p50 us", "p99 us", "p99 with it, of without", "CPU of burst top %")


def client(line: Connection, count: int) -> None:
    """Opens so many bursts, and runs them when it is told to, from a time on until another."""
    with driver.connect() as device, device.prepare(add_model()) as prepared, ExitStack() as stack:
        bursts = [stack.enter_context(prepared.burst()) for _ in range(count)]
        for burst in bursts:
            burst.run(*ones())
        line.send("ready")
        while message := line.recv():
            line.send(together(bursts, *message))


def together(bursts: Sequence[driver.Burst], begin: float, end: float, period: float) -> list[float]:
    """Nanoseconds of all requests; `period`: seconds from one of a burst's to its next, or 0."""
    found: list[list[float]] = [[] for _ in bursts]

    def work(place: int) -> None:
        run, clock, samples = bursts[place].run, time.perf_counter_ns, found[place]
        due = begin + period * np.random.default_rng((os.getpid(), place)).random()
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            since = clock()
            run()
            samples.append(clock() - since)
            due = max(due + period, time.monotonic())

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(bursts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ns for samples in found for ns in samples]


@contextmanager
def clients(args: argparse.Namespace) -> Iterator[list[Connection]]:
    """All processes, ready; they end with the block."""
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for _ in range(args.processes):
        near, far = multiprocessing.Pipe()
        processes.append(context.Process(target=client, args=(far, args.bursts), daemon=True))
        processes[-1].start()
        far.close()
        lines.append(near)
    for line in lines:
        assert line.recv() == "ready"
    yield lines
    for line, process in zip(lines, processes, strict=True):
        line.send(None)
        process.join(10)


@contextmanager
def shown() -> Iterator[int]:
    """`burst top` on a terminal; its pid, once it has shown a table."""
    near, far = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(TOP, stdin=far, stdout=far, stderr=far, env=environment) as process:
        os.close(far)
        said = b""
        while b"rate/s" not in said:
            said += os.read(near, 65536)
        reader = threading.Thread(target=drain, args=(near,))
        reader.start()
        yield process.pid
        process.send_signal(signal.SIGINT)
        reader.join()
    os.close(near)
    assert process.returncode == 0, process.returncode


def drain(terminal: int) -> None:
    """Reads until no process writes to it any more."""
    with suppress(OSError):
        while os.read(terminal, 65536):
            pass


def cpu_of(pid: int | None) -> float:
    """Seconds that a process has computed."""
    if pid is None:
        return 0.0
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def block(lines: Sequence[Connection], args: argparse.Namespace, load: str, pid: int | None) -> Block:
    """All at once."""
    begin, before = time.monotonic() + SOON, cpu_of(pid)
    for line in lines:
        line.send((begin, begin + args.seconds, 1 / args.rate if load == PACED else 0.0))
    samples = np.array([ns for line in lines for ns in line.recv()])
    cpu = (cpu_of(pid) - before) / (args.seconds + SOON)
    return {**percentiles(samples), "per_s": len(samples) / args.seconds, "cpu": cpu}


def run(args: argparse.Namespace) -> Runs:
    """All rounds: each load alone and beside it; in the next one the other way round."""
    runs = Runs()
    with own_device(), clients(args) as lines:
        for number in range(args.pairs):
            for load in (PACED, FULL):
                for beside in ("", BESIDE)[:: -1 if number % 2 else 1]:
                    progress(f"round {number + 1} of {args.pairs}", load + beside)
                    with shown() if beside else nullcontext() as pid:
                        runs.blocks.setdefault(load + beside, []).append(block(lines, args, load, pid))
    progress("")
    return runs


def row(runs: Runs, name: str) -> dict[str, Any]:
    """Medians over the blocks of one kind."""
    medians = {key: float(np.median(runs.values(name, key))) for key in ("per_s", "p50_us", "p99_us", "max_us", "cpu")}
    return {"name": name, "ours": True, **medians, "rounds": runs.blocks[name]}


def line_of(runs: Runs, name: str) -> tuple[str, ...]:
    """One line of the table."""
    found, alone = row(runs, name), name.removesuffix(BESIDE)
    figures = f"{found['per_s']:.0f}", f"{found['p50_us']:.1f}", f"{found['p99_us']:.1f}"
    if name == alone:
        return name, *figures, "", ""
    return name, *figures, spell(ratio(runs, name, alone, "p99_us")), f"{100 * found['cpu']:.1f}"


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, help="client processes (default 8)")
    parser.add_argument("--bursts", type=int, help="bursts of each (default 8)")
    parser.add_argument("--rate", type=float, default=50.0, help="requests of a paced burst in a second (default 50)")
    args = parse(parser)
    args.processes = args.processes or (2 if args.quick else 8)
    args.bursts = args.bursts or (2 if args.quick else 8)
    args.seconds = 0.2 if args.quick else 3.0
    return args


def main() -> None:
    """Measures, prints, writes."""
    # A script's background jobs ignore SIGINT, and what they start does, too: `burst top` would not end at one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args = options()
    found, runs = conditions(), run(args)
    names = [load + beside for load in (PACED, FULL) for beside in ("", BESIDE)]
    budgets = [
        Budget(f"{load}: p99 beside burst top <= 1.1 x without it", ratio(runs, load + BESIDE, load, "p99_us"), 1.1)
        for load in (PACED, FULL)
    ]
    body = {"subjects": [row(runs, name) for name in names], "processes": args.processes, "bursts": args.bursts}
    publish(args, Report(QUESTION, found, [line_of(runs, name) for name in names], budgets, body, HEAD))
    if args.plot:
        import plots

        plots.bars(args.plot, {one["name"]: one["p99_us"] for one in body["subjects"]}, "p99, us", QUESTION)


if __name__ == "__main__":
    main()
