"""What do 64 bursts on one device get, and what do they cost?

    python bench/burst_many.py [--processes 16] [--bursts 4] [--json FILE] [--plot FILE]
    python bench/burst_many.py top [--processes 8] [--bursts 8] [--rate 50] [--json FILE] [--plot FILE]

Sixteen client processes have four bursts each, on a connection and a prepared model of their own, and run each burst in
a thread of its own, ADD on four floats back to back. Every block begins and ends at the same moment for all. Least to
most is the count of the burst that got the least divided by that of the one that got the most: of all bursts; of whole
processes; and of the four bursts of one process, whose threads also share an interpreter, in the process that is worst.
One burst of one of the processes stands beside them. No process is pinned: on two CPUs 64 clients and 64 listeners wait
for each other, and a thread that spins takes the CPU from a thread with work to do.

What a burst costs is what its processes have more with all bursts open and idle than before, divided by the number of
bursts; each process had opened and closed one before.
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
from burst_roundtrip import add_model
from measure import (
    Budget,
    Report,
    Runs,
    arguments,
    ask,
    conditions,
    held,
    parse,
    percentiles,
    progress,
    publish,
    ratio,
    rounds,
    spell,
)
from own_device import own_device

import driver
from driver.cli.timing import Estimate, estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from measure import Block

    from driver import Burst


QUESTION = "What do 64 bursts on one device get, and what do they cost?"
ONE, MANY, ASLEEP = "one burst", "all bursts, spinning", "all bursts, spin=0"
OPTIONS: dict[str, dict[str, Any]] = {ONE: {}, MANY: {}, ASLEEP: {"spin": 0}}
SOON = 0.1  # seconds until all have heard when a block begins
SIDES, KEYS = ("clients", "engine", "service"), ("resident_kib", "shared_kib", "fds", "mappings", "threads")
HEAD = (
    "",
    "executions per s",
    "least to most",
    "of processes",
    "of one process's",
    "p50 us",
    "p50 of the worst",
    "p99 us",
    "p99 of the worst",
)
COST_HEAD = ("a burst costs its", "resident KiB", "of it shared KiB", "fds", "mappings", "threads")


def client(line: Connection) -> None:
    """Opens, runs and closes bursts when it is told to."""
    with driver.connect() as device, device.prepare(add_model()) as prepared:
        with prepared.burst() as burst:
            burst.run(*ones())
        line.send(held())
        while message := line.recv():
            count, options = message
            with ExitStack() as stack:
                bursts = [stack.enter_context(prepared.burst(**options)) for _ in range(count)]
                for burst in bursts:
                    burst.run(*ones())
                line.send(held())
                while times := line.recv():
                    line.send(together(bursts, *times))
            line.send("closed")


def ones() -> list[np.ndarray]:
    """What the model adds."""
    return [np.ones((1, 4), np.float32)] * 2


def together(bursts: Sequence[Burst], begin: float, end: float) -> list[Block]:
    """Each in a thread of its own from `begin` to `end`, in time.monotonic() seconds."""
    blocks: list[Block] = [{}] * len(bursts)

    def work(place: int) -> None:
        run, clock, samples = bursts[place].run, time.perf_counter_ns, []
        time.sleep(max(0, begin - time.monotonic()))
        last, stop = clock(), clock() + int((end - time.monotonic()) * 1e9)
        while last < stop:
            run()
            now = clock()
            samples.append(now - last)
            last = now
        p50, p99 = np.percentile(samples, [50, 99]) / 1e3
        blocks[place] = {
            "count": len(samples),
            "p50_us": float(p50),
            "p99_us": float(p99),
            "max_us": max(samples) / 1e3,
        }

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(bursts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return blocks


@contextmanager
def clients(count: int) -> Iterator[list[Connection]]:
    """So many processes, connected and ready; they end with the block."""
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for _ in range(count):
        near, far = multiprocessing.Pipe()
        processes.append(context.Process(target=client, args=(far,), daemon=True))
        processes[-1].start()
        far.close()
        lines.append(near)
    yield lines
    for line, process in zip(lines, processes, strict=True):
        line.send(None)
        process.join(10)


def open_all(lines: Sequence[Connection], bursts: int, options: dict[str, Any]) -> list[dict[str, float]]:
    """Tells the clients; what each of them has with its bursts open."""
    for line in lines:
        line.send((bursts, options))
    return [line.recv() for line in lines]


def block(lines: Sequence[Connection], seconds: float) -> Block:
    """All at once; what the whole got, and each."""
    begin = time.monotonic() + SOON
    for line in lines:
        line.send((begin, begin + seconds))
    answers = [line.recv() for line in lines]
    keys = ("count", "p50_us", "p99_us", "max_us")
    counts, p50, p99, most = (np.array([burst[key] for answer in answers for burst in answer]) for key in keys)
    own_counts = [[burst["count"] for burst in answer] for answer in answers]
    sums = [sum(own) for own in own_counts]
    return {
        "per_s": float(counts.sum() / seconds),
        "fairness": float(counts.min() / counts.max()),
        "fairness_of_processes": min(sums) / max(sums),
        "fairness_within": float(min(min(own) / max(own) for own in own_counts)),
        "least": int(counts.min()),
        "most": int(counts.max()),
        "p50_us": float(np.median(p50)),
        "worst_p50_us": float(p50.max()),
        "p99_us": float(np.median(p99)),
        "worst_p99_us": float(p99.max()),
        "max_us": float(most.max()),
    }


def close_all(lines: Sequence[Connection]) -> None:
    """Until all have closed their bursts."""
    for line in lines:
        line.send(None)
    for line in lines:
        assert line.recv() == "closed"


def run(args: argparse.Namespace) -> tuple[Runs, list[dict[str, Any]]]:
    """All rounds: one, all, all asleep; the next one backwards. Before them, what bursts cost."""
    runs = Runs()
    with own_device() as device, clients(args.processes) as lines:
        progress("starts")
        before = [line.recv() for line in lines]
        costs = cost(device, lines, args, before)
        for name in rounds(args.pairs, [ONE, MANY, ASLEEP]):
            chosen = lines[:1] if name == ONE else lines
            open_all(chosen, 1 if name == ONE else args.bursts, OPTIONS[name])
            runs.add(name, block(chosen, args.seconds))
            close_all(chosen)
    return runs, costs


def cost(
    device: driver.RemoteDevice, lines: Sequence[Connection], args: argparse.Namespace, before: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """What each side has more with all bursts open, per burst."""
    pids = {"engine": device.engine_pid, "service": device.service_pid}
    settle(device.engine_pid)
    idle = {"clients": total(before), **{side: held(pid) for side, pid in pids.items()}}
    opened = {"clients": total(open_all(lines, args.bursts, {}))}
    opened |= {side: held(pid) for side, pid in pids.items()}
    close_all(lines)
    count = args.bursts * args.processes
    return [{"side": side, **{key: (opened[side][key] - idle[side][key]) / count for key in KEYS}} for side in SIDES]


def settle(pid: int) -> None:
    """Until no thread has come or gone for half a second: those of bursts that were closed end in their own time."""
    last, since = 0.0, time.monotonic()
    while time.monotonic() - since < 0.5:
        if (now := held(pid)["threads"]) != last:
            last, since = now, time.monotonic()
        time.sleep(0.02)


def total(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of all processes."""
    return {key: sum(one[key] for one in found) for key in KEYS}


def row(runs: Runs, name: str) -> dict[str, Any]:
    """Medians over the blocks of one kind."""
    keys = ("per_s", "fairness", "p50_us", "worst_p50_us", "p99_us", "worst_p99_us", "max_us")
    medians = runs.medians(name, *keys)
    return {"name": name, "ours": True, **medians, "rounds": runs.blocks[name]}


def line_of(runs: Runs, name: str) -> tuple[str, ...]:
    """One line of the table."""
    found = row(runs, name)
    keys = ("fairness", "fairness_of_processes", "fairness_within")
    fair = ("" if name == ONE else spell(estimate(runs.values(name, key))) for key in keys)
    times = (f"{found[key]:.1f}" for key in ("p50_us", "worst_p50_us", "p99_us", "worst_p99_us"))
    return name, f"{found['per_s']:.0f}", *fair, *times


def budgets(runs: Runs, costs: Sequence[dict[str, Any]]) -> list[Budget]:
    """Fair, and small."""
    engine = next(one for one in costs if one["side"] == "engine")

    def exactly(value: float) -> Estimate:
        return Estimate(value, value, value, 1.0)

    return [
        Budget(f"{name}: least to most {of} >= 0.5", estimate(runs.values(name, key)), 0.5, at_least=True)
        for name in (MANY, ASLEEP)
        for of, key in (("of processes", "fairness_of_processes"), ("of one process's bursts", "fairness_within"))
    ] + [
        Budget("a burst's resident memory in the engine <= 256 KiB", exactly(engine["resident_kib"]), 256, "KiB"),
        Budget("a burst's threads in the engine <= 1", exactly(engine["threads"]), 1, "threads"),
        Budget("a burst's descriptors in the engine <= 8", exactly(engine["fds"]), 8, "fds"),
    ]


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, help="client processes (default 16)")
    parser.add_argument("--bursts", type=int, help="bursts of each (default 4)")
    args = parse(parser)
    args.processes = args.processes or (2 if args.quick else 16)
    args.bursts = args.bursts or (2 if args.quick else 4)
    args.seconds = 0.1 if args.quick else 2.0
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    found = conditions()
    runs, costs = run(args)
    told = budgets(runs, costs)
    lines = [line_of(runs, name) for name in OPTIONS]
    more = [([(one["side"], *(f"{one[key]:.2f}" for key in KEYS)) for one in costs], COST_HEAD)]
    body = {
        "subjects": [row(runs, name) for name in OPTIONS],
        "costs": costs,
        "processes": args.processes,
        "bursts": args.bursts,
    }
    publish(args, Report(QUESTION, found, lines, told, body, HEAD, more))
    if args.plot:
        import plots

        plots.bars(
            args.plot, {one["name"]: one["per_s"] for one in body["subjects"]}, "executions per second", QUESTION
        )


# ---- top


TOP_QUESTION = "Does burst top cost the bursts that it shows anything?"
PACED, FULL = "paced", "full"
BESIDE = ", beside burst top"
TOP = [sys.executable, "-m", "driver.cli", "top"]
TOP_HEAD = ("", "requests per s", "p50 us", "p99 us", "p99 with it, of without", "CPU of burst top %")


def top_client(line: Connection, count: int) -> None:
    """Opens so many bursts, and runs them when it is told to, from a time on until another."""
    with driver.connect() as device, device.prepare(add_model()) as prepared, ExitStack() as stack:
        bursts = [stack.enter_context(prepared.burst()) for _ in range(count)]
        for burst in bursts:
            burst.run(*ones())
        line.send("ready")
        while message := line.recv():
            line.send(top_together(bursts, *message))


def top_together(bursts: Sequence[driver.Burst], begin: float, end: float, period: float) -> list[float]:
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
def top_clients(args: argparse.Namespace) -> Iterator[list[Connection]]:
    """All processes, ready; they end with the block."""
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for _ in range(args.processes):
        near, far = multiprocessing.Pipe()
        processes.append(context.Process(target=top_client, args=(far, args.bursts), daemon=True))
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


def top_block(lines: Sequence[Connection], args: argparse.Namespace, load: str, pid: int | None) -> Block:
    """All at once."""
    begin, before = time.monotonic() + SOON, cpu_of(pid)
    for line in lines:
        line.send((begin, begin + args.seconds, 1 / args.rate if load == PACED else 0.0))
    samples = np.array([ns for line in lines for ns in line.recv()])
    cpu = (cpu_of(pid) - before) / (args.seconds + SOON)
    return {**percentiles(samples), "per_s": len(samples) / args.seconds, "cpu": cpu}


def top_run(args: argparse.Namespace) -> Runs:
    """All rounds: each load alone and beside it; in the next one the other way round."""
    runs = Runs()
    with own_device(), top_clients(args) as lines:
        for number in range(args.pairs):
            for load in (PACED, FULL):
                for beside in ("", BESIDE)[:: -1 if number % 2 else 1]:
                    progress(f"round {number + 1} of {args.pairs}", load + beside)
                    with shown() if beside else nullcontext() as pid:
                        runs.add(load + beside, top_block(lines, args, load, pid))
    progress("")
    return runs


def top_row(runs: Runs, name: str) -> dict[str, Any]:
    """Medians over the blocks of one kind."""
    medians = runs.medians(name, "per_s", "p50_us", "p99_us", "max_us", "cpu")
    return {"name": name, "ours": True, **medians, "rounds": runs.blocks[name]}


def top_line_of(runs: Runs, name: str) -> tuple[str, ...]:
    """One line of the table."""
    found, alone = top_row(runs, name), name.removesuffix(BESIDE)
    figures = f"{found['per_s']:.0f}", f"{found['p50_us']:.1f}", f"{found['p99_us']:.1f}"
    if name == alone:
        return name, *figures, "", ""
    return name, *figures, spell(ratio(runs, name, alone, "p99_us")), f"{100 * found['cpu']:.1f}"


def top_options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(top.__doc__)
    parser.add_argument("--processes", type=int, help="client processes (default 8)")
    parser.add_argument("--bursts", type=int, help="bursts of each (default 8)")
    parser.add_argument("--rate", type=float, default=50.0, help="requests of a paced burst in a second (default 50)")
    args = parse(parser)
    args.processes = args.processes or (2 if args.quick else 8)
    args.bursts = args.bursts or (2 if args.quick else 8)
    args.seconds = 0.2 if args.quick else 3.0
    return args


def top() -> None:
    """Does `burst top` cost the bursts that it shows anything?

        python bench/burst_many.py top [--processes 8] [--bursts 8] [--rate 50] [--json FILE] [--plot FILE]

    Eight client processes have eight bursts each on one device, in a thread of its own each: ADD on four floats.
    *paced*: each burst has a request every 20 ms, as a control loop would have; *full*: each sends its next request
    when it has its result, and nothing is left of the machine. Every block of either stands beside one in which
    `burst top` shows the 64 bursts on a terminal of 120 x 40, with a look every second; it was started before the
    block, and ends after it. Which of the two comes first turns from round to round. What is told is the paired ratio
    of p99s, of all requests of all bursts in a block.
    """
    # A script's background jobs ignore SIGINT, and what they start does, too: `burst top` would not end at one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args = top_options()
    found, runs = conditions(), top_run(args)
    names = [load + beside for load in (PACED, FULL) for beside in ("", BESIDE)]
    budgets = [
        Budget(f"{load}: p99 beside burst top <= 1.1 x without it", ratio(runs, load + BESIDE, load, "p99_us"), 1.1)
        for load in (PACED, FULL)
    ]
    body = {"subjects": [top_row(runs, name) for name in names], "processes": args.processes, "bursts": args.bursts}
    publish(args, Report(TOP_QUESTION, found, [top_line_of(runs, name) for name in names], budgets, body, TOP_HEAD))
    if args.plot:
        import plots

        plots.bars(args.plot, {one["name"]: one["p99_us"] for one in body["subjects"]}, "p99, us", TOP_QUESTION)


if __name__ == "__main__":
    ask({"": main, "top": top})
