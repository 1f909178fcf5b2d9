"""How a peer runs: a client here and a server in a child, both in a process group that ends with the measurement."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

Call = Callable[[], object]
Row = dict[str, Any]


def payload(nbytes: int) -> bytes:
    """A message in memory of its own. `bytes(n)` is one page of zeros over and over, which no cache ever misses."""
    return b"x" * nbytes


def measure(call: Call, rounds: int) -> Row:
    for _ in range(max(min(10, rounds), rounds // 20)):
        call()
    samples = np.empty(rounds)
    clock = time.perf_counter_ns
    for i in range(rounds):
        begin = clock()
        call()
        samples[i] = clock() - begin
    p50, p99, p999 = np.percentile(samples, [50, 99, 99.9]) / 1e3
    cdf = np.percentile(samples, np.linspace(0, 100, 201)) / 1e3
    return {
        "p50_us": p50,
        "p99_us": p99,
        "p999_us": p999,
        "max_us": samples.max() / 1e3,
        "cdf_us": cdf.round(4).tolist(),
    }


def fork_server(serve: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        os.sched_setaffinity(0, {1})
        try:
            serve()
        finally:
            os._exit(0)
    os.sched_setaffinity(0, {0})
    return pid


def once_ready() -> tuple[Call, Call]:
    """What the server calls when it can be reached, and what the client calls to wait for that."""
    out, into = os.pipe()
    return partial(os.write, into, b"!"), partial(os.read, out, 1)


def in_a_child(work: Callable[[], Row], timeout: float) -> Row:
    """What `work` returns in a process group that ends with it, or a row with the error."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="peer-") as directory:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            tempfile.tempdir = directory
            try:
                writer.send(work())
            except BaseException as error:  # noqa: BLE001 (whatever ails a peer is its row)
                writer.send({"error": f"{type(error).__name__}: {error}"})
            os.killpg(0, signal.SIGKILL)
        writer.close()
        try:
            row: Row = reader.recv() if reader.poll(timeout) else {"error": f"no answer in {timeout:g} s"}
        except EOFError:
            row = {"error": "it died without an answer"}
        reader.close()
        end_group(pid)
    return row


def end_group(pid: int) -> None:
    """The peer's server goes with its client."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
