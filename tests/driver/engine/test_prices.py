"""What each thing of a client's costs the engine, by /proc, beside what the ledger counts for it."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

import driver
from burst.channel import close_all
from driver.engine.ledger import PRICES

NUMBER = 40  # of each thing: what the process gets besides is less than one for each
ARENAS = 8 * os.cpu_count()
"""Threads after which the C library makes no more arenas, of two mappings each."""

X = np.zeros((1, 4), np.float32)


def counts(pid):
    """What a process has of what the ledger counts."""
    process = Path(f"/proc/{pid}")
    lines = (process / "maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir(process / "fd")),
        "mappings": len(lines),
        "threads": len(os.listdir(process / "task")),
        "life_words": sum("memfd:fmq-life" in line and " rw-s " in line for line in lines),
    }


class Things:
    """Makes what clients make on one device."""

    def __init__(self, stack, kit):
        self._stack, self._kit = stack, kit
        self.clients = [self.client()]
        self.prepared = self.clients[0].prepare(kit.add_model())
        self.pid = self.clients[0].engine_pid

    def client(self):
        return self._stack.enter_context(driver.connect())

    def plain_path(self, n):
        self._call(self.clients[n], "channel")

    def launches(self, n):
        self._call(self.clients[n], "async")

    def burst(self, _=None):
        return self._stack.enter_context(self.prepared.burst())

    def pools(self, burst):
        assert burst.run(X).outputs[0].tolist() == [[1, 1, 1, 1]]

    def _call(self, client, method):
        _, fds = client.call(method)
        self._stack.callback(close_all, fds)


@pytest.fixture
def things(place, kit):
    with contextlib.ExitStack() as stack:
        made = Things(stack, kit)
        made.clients += [made.client() for _ in range(max(NUMBER, ARENAS))]
        yield made


@pytest.mark.parametrize("kind", ["plain path", "launches", "burst"])
def test_what_the_engine_pays(things, kind):
    """A plain path, a connection for launches and a burst cost the engine what the ledger counts for them."""
    make = {"plain path": things.plain_path, "launches": things.launches, "burst": things.burst}[kind]
    make(NUMBER)  # whatever the first of its kind makes for all
    check(things.pid, PRICES[kind], [make] * NUMBER)


def check(pid, price, makers):
    before = counts(pid)
    kept = [make(n) for n, make in enumerate(makers)]
    cost = {figure: found - before[figure] for figure, found in counts(pid).items()}
    expected = {figure: len(kept) * price.get(figure, 0) for figure in cost}
    assert {figure: found for figure, found in cost.items() if abs(found - expected[figure]) > NUMBER // 4} == {}, (
        f"{cost} for {len(kept)} at {price}"
    )


def test_a_client(things):
    """So does a client."""
    check(things.pid, PRICES["client"], [lambda _: things.client()] * NUMBER)


def test_a_pool(things):
    """So does memory that a burst uses: its descriptor is closed once it is mapped."""
    bursts = [things.burst() for _ in range(NUMBER)]
    twice = {figure: 2 * n for figure, n in PRICES["pool"].items()}  # one for inputs, one for outputs
    check(things.pid, twice, [lambda n: things.pools(bursts[n])] * NUMBER)
