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

    def lane_socket(self, n):
        _, fds = self.clients[n].call("lane")
        self._stack.callback(close_all, fds)

    def launches(self, n):
        """The first launch of a client. It is refused, so nothing else comes of it."""
        with pytest.raises(driver.InvalidArgument, match="are null"):
            self.models[n].execute_fenced(self._requests[n], [None])

    def execute(self):
        """Once in turn, for each client: the launch needs no new socket, memory or plan."""
        self.models = [client.prepare(self._kit.add_model()) for client in self.clients]
        self._requests = [self._kit.request([X], X.nbytes)[0] for _ in self.clients]
        for model, request in zip(self.models, self._requests, strict=True):
            assert model.execute(request).status == 0

    def burst(self, _=None):
        return self._stack.enter_context(self.prepared.burst())

    def pools(self, burst):
        assert burst.run(X).outputs[0].tolist() == [[1, 1, 1, 1]]


@pytest.fixture
def things(place, kit):
    with contextlib.ExitStack() as stack:
        made = Things(stack, kit)
        made.clients += [made.client() for _ in range(max(NUMBER, ARENAS))]
        yield made


@pytest.mark.parametrize("kind", ["lane socket", "launches", "burst"])
def test_what_the_engine_pays(things, kind):
    """A socket of a lane, the first launch on one and a burst cost the engine what the ledger counts for them."""
    make = {"lane socket": things.lane_socket, "launches": things.launches, "burst": things.burst}[kind]
    if kind == "launches":
        things.execute()
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
