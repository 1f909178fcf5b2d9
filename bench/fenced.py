"""What does a chain of 100 executions cost when it is launched with fences, and when each is awaited?

    python bench/fenced.py [--length 100] [--pairs 9] [--json FILE]

ADD of 4 floats, each on the output of the one before it, in one pool. Awaited: the client sends a request when the
result of the one before has come, on the plain path (`execute`) and in a burst (`burst.execute`). Fenced: it launches
all of them with `execute_fenced`, each to wait for the fence of the one before, and then waits for the last fence.
Gated is the same behind an eventfd that is signalled when all are launched: the row is what the device needs for the
chain alone, and what launching cost the client. Per execution; every chain's last output is checked. Client on CPU 0,
device on CPU 1; the awaited plain path stands beside all.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from burst_roundtrip import add_model
from measure import Runs, rounds
from own_device import own_device, pin
from question import Question, against, interval, median, times

from burst import Memory, Request, RequestArgument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from driver import Burst, FencedExecution, RemotePreparedModel

PLAIN, BURST, FENCED, GATED = "awaited, plain path", "awaited, in a burst", "fenced", "fenced, gated: the device alone"
ROW, ONE = 16, 64  # bytes of a value, and where the ones that are added lie
TIMEOUT = 10.0
Chain = list[Request]
Times = tuple[float, float]  # seconds: of the chain, and of them those in which the client had something to do


def chain_of(length: int) -> tuple[Chain, np.ndarray[Any, np.dtype[np.float32]]]:
    """Requests from value to value, and the values."""
    pool = Memory.create(ROW * (length + 1) + ONE)
    pool.asarray(np.float32, 4)[:] = 1
    places = [RequestArgument(offset=ONE + ROW * n, length=ROW) for n in range(length + 1)]
    one = RequestArgument(length=ROW)
    requests = [Request((places[n], one), (places[n + 1],), (pool,)) for n in range(length)]
    return requests, pool.asarray(np.float32, (length + 1, 4), ONE)


def awaited(execute: Callable[[Request], object], chain: Chain) -> Times:
    """One after the other; the client is busy all the time."""
    begin = time.perf_counter()
    for request in chain:
        execute(request)
    seconds = time.perf_counter() - begin
    return seconds, seconds


def launched(prepared: RemotePreparedModel, chain: Chain, gate: int | None) -> list[FencedExecution]:
    """All of them."""
    executions: list[FencedExecution] = []
    for request in chain:
        fences = executions[-1:] or ([] if gate is None else [gate])
        executions.append(prepared.execute_fenced(request, fences))
    return executions


def fenced(prepared: RemotePreparedModel, chain: Chain) -> Times:
    """Launched, and the last one awaited."""
    begin = time.perf_counter()
    executions = launched(prepared, chain, None)
    free = time.perf_counter()
    executions[-1].wait(TIMEOUT)
    return time.perf_counter() - begin, free - begin


def gated(prepared: RemotePreparedModel, chain: Chain) -> Times:
    """From the signal to the last fence."""
    gate = os.eventfd(0)
    before = time.perf_counter()
    executions = launched(prepared, chain, gate)
    begin = time.perf_counter()
    os.eventfd_write(gate, 1)
    executions[-1].wait(TIMEOUT)
    seconds = time.perf_counter() - begin
    os.close(gate)
    return seconds, begin - before


def ways_of(prepared: RemotePreparedModel, burst: Burst) -> dict[str, Callable[[Chain], Times]]:
    """By name."""
    return {
        PLAIN: lambda chain: awaited(prepared.execute, chain),
        BURST: lambda chain: awaited(burst.execute, chain),
        FENCED: lambda chain: fenced(prepared, chain),
        GATED: lambda chain: gated(prepared, chain),
    }


def block(way: Callable[[Chain], Times], length: int, chains: int) -> dict[str, float]:
    """The median chain, per execution."""
    requests, values = chain_of(length)
    times = []
    for _ in range(chains + 1):
        values[...] = 0
        times.append(way(requests))
        if float(values[-1, 0]) != length:
            raise SystemExit(f"bench: a chain of {length} ended with {values[-1, 0]}")
    seconds, busy = np.median(np.array(times[1:]), axis=0) / length * 1e6  # the first one registers the memory
    return {"us": float(seconds), "busy_us": float(busy)}


def run(args: argparse.Namespace) -> Runs:
    """All rounds: every way once, the next round backwards."""
    runs = Runs()
    with ExitStack() as stack:
        device = stack.enter_context(own_device())
        prepared = stack.enter_context(device.prepare(add_model()))
        ways = ways_of(prepared, stack.enter_context(prepared.burst()))
        for name in rounds(args.pairs, list(ways)):
            pin(device)
            runs.add(name, block(ways[name], args.length, args.chains))
    return runs


def settle(args: argparse.Namespace) -> None:
    """A device lets a client have 256 pending."""
    if not 2 <= args.length <= 250:
        raise ValueError("--length: from 2 to 250; a device lets a client have 256 pending")
    args.chains = 2 if args.quick else 20


TO_PLAIN = against(PLAIN, "us")
FENCES = Question(
    __doc__,
    run,
    {
        "us per execution": interval("us"),
        "x awaited, plain path": times(TO_PLAIN, PLAIN),
        "client busy: us per execution": median("busy_us", ".1f"),
    },
    options={"--length": {"type": int, "default": 100, "help": "executions of a chain, up to 250 (default 100)"}},
    settle=settle,
    figures=("us", "busy_us"),
    estimates={"against": TO_PLAIN},
    ours=(FENCED, GATED),
    kept=("length",),
    bars=("us", "us per execution"),
)

if __name__ == "__main__":
    FENCES.answer()
