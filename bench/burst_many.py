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
    Runs,
    ask,
    held,
    percentiles,
    progress,
    ratio,
    rounds,
)
from own_device import own_device
from question import Question, interval, median, times

import driver
from driver.cli.timing import Estimate, estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from measure import Block
    from question import Cell

    from driver import Burst


ONE, MANY, ASLEEP = "one burst", "all bursts, spinning", "all bursts, spin=0"
OPTIONS: dict[str, dict[str, Any]] = {ONE: {}, MANY: {}, ASLEEP: {"spin": 0}}
SOON = 0.1  # seconds until all have heard when a block begins
SIDES, KEYS = ("clients", "engine", "service"), ("resident_kib", "shared_kib", "fds", "mappings", "threads")
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


def run(args: argparse.Namespace) -> Runs:
    """All rounds: one, all, all asleep; the next one backwards. Before them, what bursts cost."""
    runs = Runs()
    with own_device() as device, clients(args.processes) as lines:
        progress("starts")
        before = [line.recv() for line in lines]
        args.costs = cost(device, lines, args, before)
        for name in rounds(args.pairs, [ONE, MANY, ASLEEP]):
            chosen = lines[:1] if name == ONE else lines
            open_all(chosen, 1 if name == ONE else args.bursts, OPTIONS[name])
            runs.add(name, block(chosen, args.seconds))
            close_all(chosen)
    return runs


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


def budgets(runs: Runs, args: argparse.Namespace) -> list[Budget]:
    """Fair, and small."""
    engine = next(one for one in args.costs if one["side"] == "engine")

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


def sizes(processes: int, bursts: int, seconds: float, **more: dict[str, Any]) -> dict[str, Any]:
    """Options that say how many, and what becomes of them."""

    def settle(args: argparse.Namespace) -> None:
        args.processes = args.processes or (2 if args.quick else processes)
        args.bursts = args.bursts or (2 if args.quick else bursts)
        args.seconds = seconds / 20 if args.quick else seconds

    options = {
        "--processes": {"type": int, "help": f"client processes (default {processes})"},
        "--bursts": {"type": int, "help": f"bursts of each (default {bursts})"},
        **{f"--{name}": how for name, how in more.items()},
    }
    return {"options": options, "settle": settle, "kept": ("processes", "bursts")}


def fair(key: str) -> Cell:
    """A column of what there are several of."""
    return lambda runs, name: "" if name == ONE else interval(key)(runs, name)


MANY_BURSTS = Question(
    __doc__,
    run,
    {
        "executions per s": median("per_s", ".0f"),
        "least to most": fair("fairness"),
        "of processes": fair("fairness_of_processes"),
        "of one process's": fair("fairness_within"),
        "p50 us": median("p50_us", ".1f"),
        "p50 of the worst": median("worst_p50_us", ".1f"),
        "p99 us": median("p99_us", ".1f"),
        "p99 of the worst": median("worst_p99_us", ".1f"),
    },
    **sizes(16, 4, 2.0),
    budgets=budgets,
    figures=("per_s", "fairness", "p50_us", "worst_p50_us", "p99_us", "worst_p99_us", "max_us"),
    ours=OPTIONS,
    more=lambda _, args: [([(one["side"], *(f"{one[key]:.2f}" for key in KEYS)) for one in args.costs], COST_HEAD)],
    body=lambda _, args: {"costs": args.costs},
    bars=("per_s", "executions per second"),
    is_pinned=False,
)

# ---- top


PACED, FULL = "paced", "full"
BESIDE = ", beside burst top"
TOP = [sys.executable, "-m", "driver.cli", "top"]


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
    # A script's background jobs ignore SIGINT, and what they start does, too: `burst top` would not end at one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runs = Runs()
    with own_device(), top_clients(args) as lines:
        for number in range(args.pairs):
            for load in (PACED, FULL):
                for it in ("", BESIDE)[:: -1 if number % 2 else 1]:
                    progress(f"round {number + 1} of {args.pairs}", load + it)
                    with shown() if it else nullcontext() as pid:
                        runs.add(load + it, top_block(lines, args, load, pid))
    progress("")
    return runs


def beside(figure: Callable[[Runs, str], str]) -> Cell:
    """A column of what stands beside burst top."""
    return lambda runs, name: figure(runs, name) if name.endswith(BESIDE) else ""


def to_alone(runs: Runs, name: str) -> Estimate:
    """The p99 beside it to that without."""
    return ratio(runs, name, name.removesuffix(BESIDE), "p99_us")


RATE = {"type": float, "default": 50.0, "help": "requests of a paced burst in a second (default 50)"}
BURST_TOP = Question(
    """Does `burst top` cost the bursts that it shows anything?

        python bench/burst_many.py top [--processes 8] [--bursts 8] [--rate 50] [--json FILE] [--plot FILE]

    Eight client processes have eight bursts each on one device, in a thread of its own each: ADD on four floats.
    *paced*: each burst has a request every 20 ms, as a control loop would have; *full*: each sends its next request
    when it has its result, and nothing is left of the machine. Every block of either stands beside one in which
    `burst top` shows the 64 bursts on a terminal of 120 x 40, with a look every second; it was started before the
    block, and ends after it. Which of the two comes first turns from round to round. What is told is the paired ratio
    of p99s, of all requests of all bursts in a block.
    """,
    top_run,
    {
        "requests per s": median("per_s", ".0f"),
        "p50 us": median("p50_us", ".1f"),
        "p99 us": median("p99_us", ".1f"),
        "p99 with it, of without": beside(times(to_alone)),
        "CPU of burst top %": beside(lambda runs, name: f"{100 * np.median(runs.values(name, 'cpu')):.1f}"),
    },
    **sizes(8, 8, 3.0, rate=RATE),
    budgets=lambda runs, _: [
        Budget(f"{load}: p99 beside burst top <= 1.1 x without it", to_alone(runs, load + BESIDE), 1.1)
        for load in (PACED, FULL)
    ],
    figures=("per_s", "p50_us", "p99_us", "max_us", "cpu"),
    bars=("p99_us", "p99, us"),
    is_pinned=False,
)

if __name__ == "__main__":
    ask({"": MANY_BURSTS.answer, "top": BURST_TOP.answer})
