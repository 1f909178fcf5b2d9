"""A second process beside the one that measures, and blocks of calls while it does something or nothing."""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
from measure import percentiles

import driver
from driver.cli.timing import time_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from measure import Block
    from numpy.typing import NDArray

    Timed = NDArray[np.float64]
    Work = Callable[[], object]
    Tasks = Callable[[ExitStack], dict[str, Work]]  # what it can do, made there; importable, or a partial of such

IDLE = "idle"
CHUNK = 200  # runs between two looks at the clock


def chain(operations: int) -> driver.Model:
    """x + x + x …: float32 [1, 4]."""
    m = driver.ModelBuilder()
    x = value = m.input("float32", (1, 4))
    for _ in range(operations):
        value = m.operation("ADD", value, x, 0)
    m.output(value)
    return m.build()


def compute() -> None:
    """About ten milliseconds of Python."""
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        sum(range(1000))


def _other(line: Connection, tasks: Tasks, cpu: int | None) -> None:
    """Does what it is told until something else comes, and answers how often."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1) if cpu is None else {cpu})
    with ExitStack() as stack:
        work = tasks(stack)
        line.send("ready")
        while task := line.recv():
            done = 0
            while not line.poll():
                work[task]()
                done += 1
            line.recv()
            line.send(done)


@contextmanager
def second_process(tasks: Tasks, cpu: int | None) -> Iterator[Connection]:
    """Ready to be told one of its tasks; ends with the block."""
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_other, args=(far, tasks, cpu), daemon=True)
    process.start()
    far.close()
    assert near.recv() == "ready"
    try:
        yield near
    finally:
        with suppress(BrokenPipeError):
            near.send("")
        process.join(10)


def back_to_back(call: Work) -> Timed:
    """A chunk of calls."""
    return time_calls(call, CHUNK)


def paced(call: Work) -> Timed:
    """A few calls, a millisecond of sleep before each: what is late for one is not hidden by thousands that are not."""
    samples = []
    for _ in range(10):
        time.sleep(1e-3)
        samples.append(time_calls(call, 1))
    return np.concatenate(samples)


def sample(
    call: Work, seconds: float, line: Connection, task: str = IDLE, chunk: Callable[[Work], Timed] = back_to_back
) -> Block:
    """Runs until the time is over and the second process has finished what it was doing then."""
    if task != IDLE:
        line.send(task)
    chunks, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        chunks.append(chunk(call))
    done = 0
    if task != IDLE:
        line.send("stop")
        while not line.poll():
            chunks.append(chunk(call))
        done = line.recv()
    samples = np.concatenate(chunks)
    return {**percentiles(samples), "runs": len(samples), "done": done}
