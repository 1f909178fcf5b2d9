"""The part `behind` of qos.py: a request at high priority behind 24 at low priority of the same client, on every way.

All 24 are in flight when the one at high priority is made. Its time is compared with that of the same in a burst behind
one other, right before: there all 24 come through one burst, which holds one slot of two, so the other one is free.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from measure import Budget, Runs, Subject, interleave, percentiles, progress, spell, times_floor
from own_device import own_device

import driver
from burst import Memory, Request, RequestArgument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import Any

    from measure import Block

OTHERS, BURSTS, LIMIT = 24, 3, 1.3
REQUESTS = 3  # of each block
HEAD = (f"at high priority, behind {OTHERS}", "p50 ms", "p99 ms", "p99.9 ms", "x a slot free")
FLOOR, *WAYS = "burst behind one", "burst behind three", "execute, in threads", "execute_async", "execute_fenced"


def request(shape: Sequence[int]) -> Request:
    """On pools of its own."""
    nbytes = 4 * int(np.prod(shape))
    argument = RequestArgument(length=nbytes)
    return Request((argument,), (argument._replace(pool=1),), (Memory.create(nbytes), Memory.create(nbytes)))


class Client:
    """One client with a model at low and one at high priority."""

    def __init__(self, stack: ExitStack, models: dict[str, driver.Model], shape: Sequence[int]) -> None:
        device = stack.enter_context(driver.connect("litert"))
        prepared = {role: stack.enter_context(device.prepare(models[role], priority=role)) for role in models}  # type: ignore[arg-type]
        low, high = prepared["low"], prepared["high"]
        threads = stack.enter_context(ThreadPoolExecutor(OTHERS))
        others, one = [request(shape) for _ in range(OTHERS)], request(shape)
        behind = [stack.enter_context(low.burst(depth=OTHERS)) for _ in range(BURSTS)]
        ahead = stack.enter_context(high.burst())

        def each(call: Callable[[Request], Any]) -> list[Any]:
            return [call(other) for other in others]

        self._ways: dict[str, tuple[Callable[[], list[Any]], Callable[[], object]]] = {
            FLOOR: (lambda: [behind[0].submit() for _ in others], ahead.run),
            WAYS[0]: (lambda: [behind[n % BURSTS].submit() for n in range(OTHERS)], ahead.run),
            WAYS[1]: (lambda: each(partial(threads.submit, low.execute)), partial(high.execute, one)),
            WAYS[2]: (lambda: each(low.execute_async), lambda: high.execute_async(one).result()),
            WAYS[3]: (lambda: each(low.execute_fenced), lambda: high.execute_fenced(one).result()),
        }
        for way in self._ways:
            self.block(way)

    def block(self, way: str) -> Block:
        """Some requests at high priority, each behind all others."""
        begin_others, run = self._ways[way]
        took = np.empty(REQUESTS)
        for n in range(REQUESTS):
            pending = begin_others()
            time.sleep(0.01)  # all are on the device, and some run
            begin = time.perf_counter_ns()
            run()
            took[n] = time.perf_counter_ns() - begin
            while pending:  # and keep no result: a burst has only so many outputs
                pending.pop().result()
        return percentiles(took)


def run(args: argparse.Namespace, models: dict[str, driver.Model], shape: Sequence[int]) -> Runs:
    """All rounds. `models`: by priority, "low" and "high", of inputs and outputs of that shape."""
    with ExitStack() as stack:
        stack.enter_context(own_device("litert"))
        client = Client(stack, models, shape)
        subjects = [Subject(way, partial(client.block, way), FLOOR, is_ours=True) for way in WAYS]
        return interleave(subjects, {FLOOR: partial(client.block, FLOOR)}, args.pairs, progress)


def table(runs: Runs) -> list[tuple[str, ...]]:
    """A line for each way."""
    lines = []
    for way in (FLOOR, *WAYS):
        times = [f"{np.median(runs.values(way, key)) / 1e3:.2f}" for key in ("p50_us", "p99_us", "p999_us")]
        lines.append((way, *times, "" if way == FLOOR else spell(times_floor(runs, way))))
    return lines


def budgets(runs: Runs) -> list[Budget]:
    """As soon as where a slot is free."""
    return [Budget(f"{way}: <= {LIMIT} x of that with a slot free", times_floor(runs, way), LIMIT) for way in WAYS]
