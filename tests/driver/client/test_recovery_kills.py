"""Kills at random moments, on either side, with recovery on: nothing is lost, nothing comes twice, nothing leaks.

How long a recovery takes is how long a device takes to start: a third of a second of processor time, one process after
the other. Beside fifteen other programs on two processors each waits seven times as long as it runs, so recoveries take
two to four seconds there, and one has taken six. The kernel counts these waits (/proc/PID/schedstat), and what is
bounded here is the rest: any wait of ours, for a lock, a socket or a timeout, is in it.
"""

import contextlib
import gc
import os
import random
import select
import signal
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import stress
from waiting import last
from xnnpack_driver import built

import driver
from driver.client import recovery

pytestmark = pytest.mark.integration

BOUND = 10.0  # seconds for one process to end
REST = 2.0  # seconds of a recovery in which neither this thread nor the new device waits for a processor
DEPTH = 4
LIMIT = stress.seconds(float(os.environ.get("RECOVERY_SECONDS", "1440")))  # that the stress test may take
SIDES = ("engine", "service", "both", "client")
CRASHES = signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS

FRAMES = """
import sys, numpy as np, driver
from collections import deque
from driver.client import recovery
sys.path.insert(0, sys.argv[1])
from small_models import add_model
recovery._MOST_REVIVALS = 10**6
with driver.connect(sys.argv[2]) as device, device.prepare(add_model()) as prepared:
    with prepared.burst(recover=True, depth=4) as burst:
        print("ready", flush=True)
        pending, n = deque(), 0
        while True:
            n = (n + 1) % 10**6
            pending.append((n, burst.submit(np.full((1, 4), n, np.float32))))
            if len(pending) == 4:
                sent, future = pending.popleft()
                found = future.result().outputs[0].tolist()
                assert found == [[sent + 1.0] * 4], (sent, found)
"""


class Held:
    """What this process and the system hold that could leak."""

    def __init__(self, kit):
        self._kit, self._names = kit, kit.named_memory()
        self._then = self.count()

    def count(self):
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = [line for line in maps if "/memfd:" in line or "/dev/shm/" in line]
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(shared)

    def check(self):
        """Nothing more than at first. Returns the differences: descriptors, threads, mappings, names."""
        gc.collect()  # exceptions hold what was in their frames
        assert self._kit.until(lambda: self._kit.named_memory() <= self._names)
        more = [now - then for now, then in zip(self.count(), self._then, strict=True)]
        assert max(more) <= 0, more
        return [*more, 0]


class Frames:
    """A stream of numbered frames through one burst; every result is looked at, in order."""

    def __init__(self, burst, patience):
        self._burst, self._patience, self._sent, self._pending = burst, patience, 0, deque()
        self.results = 0

    def step(self):
        """One frame in and, while there are as many as may be, the oldest result out. Seconds that it took."""
        begin = time.monotonic()
        self._sent += 1
        future = self._burst.submit(np.full((1, 4), self._sent, np.float32))
        self._pending.append(future)
        if len(self._pending) == DEPTH:
            self._take()
        return time.monotonic() - begin

    def _take(self):
        self.results += 1
        result = self._pending.popleft().result(self._patience)
        assert result.outputs[0].tolist() == [[self.results + 1.0] * 4]

    def finish(self):
        while self._pending:
            self._take()
        assert self.results == self._sent


class Client:
    """Another process that streams frames through a burst of its own, and ends only when it is killed."""

    def __init__(self, kit, address):
        self._process = kit.python(FRAMES, Path(__file__).parents[1], address, stdout=subprocess.PIPE)
        assert self._process.stdout.readline() == b"ready\n"

    def kill(self):
        with self._process as process:
            assert process.poll() is None, "a result was lost, or wrong, or there was an exception"
            process.kill()


class Recovered(NamedTuple):
    """One recovery: seconds of its slowest frame, and how long of these a processor was waited for."""

    slowest: float
    waited: float


def waited(path):
    """Seconds that a thread was ready to run, and another one ran. /proc/PID is the first thread of that process."""
    return int(Path(path, "schedstat").read_text().split()[1]) / 1e9


def one_kill(device, burst, frames, source, strike):
    """What came of it when `strike` happens at a random moment, and the device dies of it; None if it did not."""
    before, own = {device.service_pid, device.engine_pid}, waited("/proc/thread-self")
    recoveries, ends = burst.stats()["recoveries"], threading.Event()
    moment = source.random() * 0.02

    def wait_and_strike():
        last(moment)
        strike()
        ends.set()

    thread = threading.Thread(target=wait_and_strike)
    thread.start()
    slowest = 0.0
    while not ends.is_set():
        slowest = max(slowest, frames.step())
    thread.join()
    for _ in range(2 * DEPTH):  # the last of these was submitted after the death, if it was the device's
        slowest = max(slowest, frames.step())
    if burst.stats()["recoveries"] == recoveries:
        return None
    fresh = {device.service_pid, device.engine_pid} - before
    starting = sum(waited(f"/proc/{pid}") for pid in fresh)
    return Recovered(slowest, waited("/proc/thread-self") - own + starting)


def striker(device, client, side, number):
    def strike():
        if side == "client":
            client.kill()
            return
        for name in ("service_pid", "engine_pid") if side == "both" else (f"{side}_pid",):
            with contextlib.suppress(ProcessLookupError):
                end(getattr(device, name), number)

    return strike


def end(pid, number):
    """Sends a signal and waits until the process has died of it: a crash takes longer than some frames."""
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, number)
        assert select.select([fd], [], [], BOUND)[0]
    finally:
        os.close(fd)


def random_kills(kit, place, seed, rounds, address="reference"):
    """Kills and results, the recovery after each death of the device, and what leaked."""
    with driver.connect(address) as device, device.prepare(kit.add_model()) as prepared:  # starts threads, which stay
        prepared.run(np.zeros((1, 4), np.float32)), prepared.burst().close()
    del device, prepared
    held = Held(kit)
    found = kills_of(kit, place, random.Random(seed), rounds, address)
    kit.until(lambda: not place.pids())
    assert {Path(name).suffix for name in place.files()} <= {".lock", ".log"}
    return *found, held.check()


def kills_of(kit, place, source, rounds, address):
    slow, end = [], time.monotonic() + LIMIT
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(driver.connect(address))
        prepared = stack.enter_context(device.prepare(kit.add_model()))
        burst = stack.enter_context(prepared.burst(recover=True, depth=DEPTH))
        frames, client = Frames(burst, kit.patience), Client(kit, address)
        for n in range(rounds):
            if time.monotonic() > end:
                break
            side = SIDES[source.randrange(4)] if n >= 4 else SIDES[n]
            number = source.choice(CRASHES) if side == "engine" else signal.SIGKILL
            found = one_kill(device, burst, frames, source, striker(device, client, side, number))
            if side == "client":
                client = Client(kit, address)
            elif found:
                slow.append(found)
        frames.finish()
        client.kill()
        most = 2 if address == "reference" else 4  # the others ask a library what it supports, where it may crash
        kit.until(lambda: 2 <= len(place.pids()) <= most)
    return n + 1, frames.results, slow


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """More deaths than anybody should get over are what this is about."""
    monkeypatch.setattr(recovery, "_MOST_REVIVALS", 10**6)


@pytest.fixture(scope="module")
def c_driver(tmp_path_factory):
    """The driver in C of the examples."""
    return str(built(tmp_path_factory.mktemp("device-c")))


def test_random_kills(place, kit):
    """Five kills of an engine, a service, both or a client (seed 4): every result comes once, and is right."""
    check_random_kills(kit, place, "reference")


@pytest.mark.integration
def test_random_kills_of_a_driver_in_c(place, kit, c_driver):
    """The same, and signals that a library raises in its engine when it crashes: another engine serves at once."""
    check_random_kills(kit, place, c_driver)


def check_random_kills(kit, place, address):
    kills, results, slow, _ = random_kills(kit, place, 4, 5, address)
    assert kills == 5
    assert results > kills
    assert len(slow) > 2


@pytest.mark.stress
def test_many_random_kills(place, kit, capsys, tally):
    """Five thousand kills at random moments, or as many as the budget allows: no result is lost, doubled or wrong."""
    check_many_kills(kit, place, capsys, stress.times(5000), "reference", tally)


@pytest.mark.stress
@pytest.mark.integration
def test_many_random_kills_of_a_driver_in_c(place, kit, capsys, c_driver, tally):
    """A thousand kills and crashes of it, of its service or of a client: nothing is lost, and nothing is left."""
    check_many_kills(kit, place, capsys, stress.times(1000), c_driver, tally)


def check_many_kills(kit, place, capsys, rounds, address, tally):
    seed = random.SystemRandom().randrange(2**32)
    with capsys.disabled():
        print(f"\nrecovery, seed {seed}:", end=" ", flush=True)
        kills, results, slow, leaks = random_kills(kit, place, seed, rounds, address)
        slowest = [each.slowest for each in slow]
        rests = [each.slowest - each.waited for each in slow]
        p50, p99 = np.percentile(slowest, [50, 99])
        print(f"{kills} kills, {results} results, {len(slow)} recoveries: one slow frame of")
        print(f"p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, max {max(slowest) * 1e3:.0f} ms,")
        print(f"and without what was waited for a processor {max(rests) * 1e3:.0f} ms;", end=" ")
        print("more fds, threads, mappings, names in /dev/shm: {}, {}, {}, {}".format(*leaks))
    tally("kills with recovery" if address == "reference" else "kills with recovery of a driver in C", kills)
    assert max(rests) < REST
