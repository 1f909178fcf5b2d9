"""`bench`: this machine's round trips and throughput between two processes, with fmq alone."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fmq.clock import deadline_of
from fmq.command.show import human
from fmq.errors import Closed, PeerDied
from fmq.exchange import Exchange
from fmq.queue import MessageQueue

if TYPE_CHECKING:
    import argparse
    from multiprocessing.process import BaseProcess

    from fmq.descriptor import Descriptor

_BLOCK = 1 << 16  # bytes that the one-way part writes at once, at least one message
_WARM_UP = 200  # round trips
_PATIENCE = 30.0  # seconds, until the other process is there or has answered


class Part(NamedTuple):
    """What the other process does with a pair of queues."""

    kind: str
    there: Descriptor
    back: Descriptor
    spin: float


def run(options: argparse.Namespace) -> int:
    """All three parts, with one other process."""
    seconds, message = options.seconds / 3, bytes(options.bytes)
    batch = max(1, _BLOCK // len(message))
    own, other = _cpus()
    with contextlib.ExitStack() as stack:

        def queue(dtype: str, capacity: int) -> Descriptor:
            return stack.enter_context(MessageQueue.create(dtype, capacity)).descriptor

        n = len(message)
        parts = [
            Part(kind, queue("u1", n), queue("u1", n), spin) for kind, spin in (("polling", 1.0), ("sleeping", 0.0))
        ]
        parts.append(Part("one way", queue(f"V{n}", 4 * batch), queue("u8", 1), 50e-6))
        child = multiprocessing.get_context("spawn").Process(target=answer, args=(parts, other), daemon=True)
        child.start()
        stack.callback(_end, child)
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        _pin(own)
        trips = {one.kind: _round_trips(one, message, seconds) for one in parts[:2]}
        stream = _one_way(parts[2], batch, seconds)
    report = {"bytes": len(message), "round_trip_us": trips, "one_way": stream, "conditions": _conditions(own, other)}
    print(json.dumps(report) if options.json else _table(report))
    return 0


# ---- the two sides ---------------------------------------------------------------------------------------------------


def answer(parts: list[Part], cpu: int | None) -> None:
    """The other process: each part until its queue is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the one that was started, and that one ends us
    _pin(cpu)
    for part in parts:
        with MessageQueue.open(part.there).reader() as reader, MessageQueue.open(part.back).writer() as writer:
            reader.spin = writer.spin = part.spin
            with contextlib.suppress(Closed, PeerDied):
                if part.kind == "one way":
                    _count(reader, writer)
                else:
                    _echo(Exchange(writer, reader))


def _echo(call: Exchange) -> None:
    message = b""
    while True:
        message = call(message)


def _count(reader: Any, writer: Any) -> None:
    taken = 0
    try:
        while True:
            taken += len(reader.read(max(1, reader.available)))
    except Closed:
        writer.write([taken], _PATIENCE)


def _round_trips(part: Part, message: bytes, seconds: float) -> dict[str, float]:
    _progress(f"round trips, {part.kind}")
    with MessageQueue.open(part.there).writer() as writer, MessageQueue.open(part.back).reader() as reader:
        reader.spin = part.spin
        call, clock, samples = Exchange(writer, reader), time.perf_counter_ns, []
        for _ in range(_WARM_UP):
            call(message, deadline_of(_PATIENCE))
        until = clock() + int(seconds * 1e9)
        while (begin := clock()) < until:
            call(message)
            samples.append(clock() - begin)
    p50, p99, p999 = np.percentile(samples, [50, 99, 99.9]) / 1e3
    return {
        "p50": float(p50),
        "p99": float(p99),
        "p99.9": float(p999),
        "max": max(samples) / 1e3,
        "count": len(samples),
    }


def _one_way(part: Part, batch: int, seconds: float) -> dict[str, float]:
    _progress("one way")
    with MessageQueue.open(part.back).reader() as reader:
        with MessageQueue.open(part.there).writer() as writer:
            block, clock = np.zeros(batch, writer.dtype), time.perf_counter
            writer.write(block, _PATIENCE)
            begin, sent = clock(), batch
            while clock() - begin < seconds:
                writer.write(block, _PATIENCE)
                sent += batch
        taken = int(reader.read(1, _PATIENCE)[0])
        elapsed = clock() - begin
    assert taken == sent, f"{sent} messages were sent and {taken} have arrived"
    size = part.there.dtype.itemsize
    return {
        "messages_per_second": sent / elapsed,
        "bytes_per_second": sent * size / elapsed,
        "messages_per_write": batch,
    }


def _end(child: BaseProcess) -> None:
    child.join(1)
    child.kill()
    child.join()


# ---- the machine -----------------------------------------------------------------------------------------------------


def _cpus() -> tuple[int | None, int | None]:
    """One for each side, when there are two."""
    free = sorted(os.sched_getaffinity(0))
    return (free[0], free[1]) if len(free) > 1 else (None, None)


def _pin(cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})


def _conditions(own: int | None, other: int | None) -> dict[str, Any]:
    words = [
        line.split(":", 1)[1].strip() for line in _text("/proc/cpuinfo").splitlines() if line.startswith("model name")
    ]
    governor = _text(f"/sys/devices/system/cpu/cpu{own or 0}/cpufreq/scaling_governor").strip()
    return {
        "cpu": words[0] if words else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "pinned_to": [own, other] if own is not None else None,
        "governor": governor or None,
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _progress(what: str) -> None:
    print(f"fmq bench: {what} ...", file=sys.stderr, flush=True)


def _table(report: dict[str, Any]) -> str:
    c, stream = report["conditions"], report["one_way"]
    pinned = f"pinned to CPUs {c['pinned_to'][0]} and {c['pinned_to'][1]}" if c["pinned_to"] else "sharing one CPU"
    lines = [f"{report['bytes']}-byte messages between two processes", ""]
    lines.append(f"{'round trip, us':<16}" + "".join(f"{head:>10}" for head in ("p50", "p99", "p99.9", "max", "count")))
    for kind, row in report["round_trip_us"].items():
        figures = "".join(f"{row[head]:>10.2f}" for head in ("p50", "p99", "p99.9", "max"))
        lines.append(f"{kind:<16}{figures}{row['count']:>10}")
    each = f"{stream['messages_per_write']} at a time, copied in and out"
    lines.append(f"{'one way':<16}  {stream['messages_per_second']:,.0f} messages/s, ")
    lines[-1] += f"{human(stream['bytes_per_second'])}/s ({each})"
    lines += [
        "",
        f"{c['cpu']}, {c['cpus']} CPUs, {pinned}, governor {c['governor'] or 'not readable'}, load {c['load']:.2f},",
    ]
    lines.append(f"Linux {c['kernel']}, Python {c['python']}, numpy {c['numpy']}")
    return "\n".join(lines)
