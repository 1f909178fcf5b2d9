"""Processes that are killed: whoever waits for one is told at once, and what it held is free."""

import contextlib
import gc
import os
import random
import signal
import statistics
import subprocess
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import stress
from kills import SIDES, kill
from waiting import last

import driver
from burst import PeerDied

X = np.ones((1, 4), np.float32)
FOREVER = np.full((1, 4), 9, np.float32)
PROMPT = 0.1  # seconds


def killer(device, side):
    """A function that kills these processes of a device at the same moment."""
    return partial(kill, device, side)


@pytest.fixture
def slow(home, kit):
    """A connection to a slow device that nobody else uses."""
    with kit.living(kit.odd("Slow")) as device:
        yield device


@pytest.mark.parametrize("side", SIDES)
class TestTold:
    """Who waits gets PeerDied, and the next connection works."""

    def check(self, kit, device, side, wait):
        kit.dies(killer(device, side), wait, PeerDied)
        with driver.connect(kit.odd("Slow")) as successor, successor.prepare(kit.add_model()) as prepared:
            assert prepared.run(X * 0)[0].tolist() == [[1, 1, 1, 1]]

    def test_a_burst_that_expects_its_result(self, slow, kit, side):
        """A burst that has slept until shortly before its result is usually there, polls, and sleeps again."""
        with slow.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
            for _ in range(5):
                burst.run(X * 0.02)
            self.check(kit, slow, side, lambda: burst.run(FOREVER))

    def test_a_burst(self, slow, kit, side):
        """A burst that waits for its result."""
        with slow.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
            burst.run(X * 0)
            self.check(kit, slow, side, lambda: burst.run(FOREVER))
            with pytest.raises(PeerDied, match=r"^the device's process is gone$"):
                burst.run(X)

    def test_a_plain_call(self, slow, kit, side):
        """run on the plain path."""
        with slow.prepare(kit.add_model()) as prepared:
            prepared.run(X * 0)
            self.check(kit, slow, side, lambda: prepared.run(FOREVER))

    def test_preparing(self, slow, kit, side):
        """prepare, which waits for the service, which waits for the engine."""
        self.check(kit, slow, side, lambda: slow.prepare(kit.add_model(relaxed=True)))

    def test_idle(self, slow, kit, side, process):
        """Whoever comes back after a while in which the device died: burst, plain path and connection alike. All say
        the same, again and again, and what failed counts as no run.
        """
        processes = [process(slow.service_pid), process(slow.engine_pid)]
        with slow.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
            burst.run(X * 0), prepared.run(X * 0)
            killer(slow, side)()
            assert all(p.has_ended() for p in processes)
            uses = (lambda: burst.run(X), lambda: prepared.run(X), prepared.burst, lambda: slow.call("free", 0))
            for use in uses * 2:
                with pytest.raises(PeerDied, match=r"^the device's process is gone$"):
                    use()
            assert burst.stats()["runs"] == {"burst": 1, "plain": 0}


@pytest.mark.stress
@pytest.mark.parametrize("side", SIDES)
def test_within_100_ms(place, kit, side):
    """A burst is told within 100 ms in most of nine deaths: a machine may be busy now and then."""
    times = []
    for _ in range(9):
        with (
            driver.connect(kit.odd("Slow")) as device,
            device.prepare(kit.add_model()) as prepared,
            prepared.burst() as burst,
        ):
            burst.run(X * 0)
            times.append(kit.dies(killer(device, side), lambda burst=burst: burst.run(FOREVER), PeerDied))
    assert statistics.median(times) < PROMPT


@pytest.mark.stress
@pytest.mark.parametrize("path", ["burst", "plain", "prepare"])
def test_a_large_engine(place, kit, path):
    """The size of a device does not matter: told within 100 ms although the kernel frees 1.5 GB first."""
    with driver.connect(kit.odd("Ballast")) as device, device.prepare(kit.add_model()) as prepared:
        status = Path(f"/proc/{device.engine_pid}/status").read_text()
        assert int(status.split("VmRSS:")[1].split()[0]) > 1_500_000
        with prepared.burst() as burst:
            prepared.run(X * 0), burst.run(X * 0)
            wait = {
                "burst": lambda: burst.run(FOREVER),
                "plain": lambda: prepared.run(FOREVER),
                "prepare": lambda: device.prepare(kit.add_model(relaxed=True)),
            }[path]
            assert kit.dies(killer(device, "engine"), wait, PeerDied) < PROMPT


@pytest.mark.parametrize("relaxed", [False, True], ids=["run", "prepare"])
def test_crash(place, kit, relaxed):
    """A device that crashes on its own is told like one that was killed, on every path."""
    for path in ("run", "burst"):
        with driver.connect(kit.odd("Crashing")) as device:
            if relaxed:
                with pytest.raises(PeerDied):
                    device.prepare(kit.add_model(relaxed=True))
            elif path == "run":
                with device.prepare(kit.add_model()) as prepared, pytest.raises(PeerDied):
                    prepared.run(X)
            else:
                with device.prepare(kit.add_model()) as prepared, prepared.burst() as burst, pytest.raises(PeerDied):
                    burst.run(X)


def test_waiting_future(slow, kit):
    """An asynchronous execution ends with PeerDied as well, and its callback is called."""
    called = threading.Event()
    with slow.prepare(kit.add_model()) as prepared:
        request, _ = kit.request([FOREVER], 16)
        future = prepared.execute_async(request, callback=lambda _: called.set())
        os.kill(slow.engine_pid, signal.SIGKILL)
        with pytest.raises(PeerDied):
            future.result(kit.patience)
        assert called.wait(kit.patience)


def test_arrays_outlive_the_device(slow, kit, process):
    """What was mapped stays readable when the device is gone."""
    with slow.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        (output,) = burst.run(X * 0).outputs
        engine = process(slow.engine_pid)
        engine.kill()
        assert engine.has_ended()
        assert output.tolist() == [[1, 1, 1, 1]]
        assert burst.inputs[0].tolist() == [[0, 0, 0, 0]]


class Held:
    """What a process holds that could leak: descriptors, threads, and mapped shared memory."""

    def __init__(self, pid):
        self._proc = Path(f"/proc/{pid}")

    def count(self):
        """The number of threads comes from `status`: a listing of `task` skips threads while others end."""
        maps = (self._proc / "maps").read_text().splitlines()
        shared = [line for line in maps if "/memfd:" in line or "/dev/shm/" in line]
        threads = (self._proc / "status").read_text().split("Threads:")[1].split()[0]
        return len(os.listdir(self._proc / "fd")), int(threads), len(shared)

    def returns_to(self, baseline, kit, device):
        """True as soon as it holds no more; between two looks another client's call goes through the device."""

        def look():
            device.call("free", 0)  # goes to the engine and back
            fds, threads, shared = self.count()
            return fds <= baseline[0] and threads <= baseline[1] and shared <= baseline[2]

        return kit.until(look)


def start_idle_monitor(prepared, kit):
    """The engine starts one thread when it first has several requests bound, and keeps it: before the baseline then.

    Whether a client that is gone at once had several bound is a matter of luck.
    """
    requests = [kit.request([X], 16)[0] for _ in range(6)]  # all at once: what is dropped is bound no more
    for request in requests:
        prepared.execute(request)


CLIENT = """
import sys, numpy as np, driver
sys.path.insert(0, sys.argv[1])
from small_models import add_model
device = driver.connect()
models = [device.prepare(add_model(float(n))) for n in range(3)]
bursts = [m.burst(memory=kind, depth=4) for m in models for kind in ("memfd", "posix")]
x = np.zeros((1, 4), np.float32)
for user in (*models, *bursts):
    user.run(x)
futures = [burst.submit(x) for burst in bursts for _ in range(4)]
print("ready", flush=True)
sys.stdin.read()
"""


def client(kit):
    """A process with three models and six bursts, all used, with four requests in flight each."""
    found = kit.python(CLIENT, Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert found.stdout.readline() == b"ready\n"
    return found


@pytest.mark.parametrize("ending", ["killed", pytest.param("exits", marks=pytest.mark.integration)])
def test_dead_client_is_forgotten(place, kit, ending):
    """A client that is gone, by its own will or not, leaves nothing behind in the service or in the engine.

    It has failed with nothing left behind, because of the baseline. A client started the engine's idle monitor after
    the baseline was read: now it runs before. And the first client's process ends before the device notices: a
    baseline with its bursts in it is one that the next client does not exceed.
    """
    with driver.connect() as device, device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        prepared.run(X), burst.run(X)
        start_idle_monitor(prepared, kit)
        held = [Held(device.service_pid), Held(device.engine_pid)]
        counts = []
        for _ in range(2):
            with client(kit) as warm_up:  # threads of pools and of libraries stay once they are there
                warm_up.stdin.close()
            kit.until(lambda: len(device.traces()) == 1)  # of `burst`: the device has noticed its end
            counts.append([h.count() for h in held])
        baseline = [tuple(most) for most in np.max(counts, axis=0).tolist()]
        for _ in range(2):
            with client(kit) as guest:
                assert held[1].count() > baseline[1]
                if ending == "killed":
                    guest.kill()
                else:
                    guest.stdin.close()
            for h, then in zip(held, baseline, strict=True):
                assert h.returns_to(then, kit, device)
        assert burst.run(X).outputs[0].tolist() == prepared.run(X)[0].tolist() == [[2, 2, 2, 2]]


def test_closed_things_are_forgotten(place, kit):
    """A long-lived client that opens and closes models, bursts and pools makes nothing grow, in no process."""
    with driver.connect() as device:
        with device.prepare(kit.add_model()) as prepared:
            start_idle_monitor(prepared, kit)
        held = [Held(device.service_pid), Held(device.engine_pid), Held(os.getpid())]

        def use():
            with device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
                prepared.run(X), burst.run(X)
                request, _ = kit.request([X], 16)
                burst.execute(request), prepared.execute(request)
                for pool in request.pools:
                    device.free_memory(pool)
            with device.prepare(kit.add_model()) as prepared, prepared.burst():
                pass

        use()
        baseline = [h.count() for h in held]
        for _ in range(20):
            use()
        for h, then in zip(held, baseline, strict=True):
            assert h.returns_to(then, kit, device)


def test_models_alone_are_forgotten(place, kit):
    """Models that only ran on the plain path leave no weights mapped."""
    with driver.connect() as device:
        held = Held(device.engine_pid)
        with device.prepare(kit.conv_model()) as prepared:
            prepared.run(np.zeros((1, 8, 8, 3), np.float32))
        baseline = held.count()
        for _ in range(30):
            with device.prepare(kit.conv_model()) as prepared:
                prepared.run(np.zeros((1, 8, 8, 3), np.float32))
        assert held.returns_to(baseline, kit, device)


@pytest.mark.integration
def test_failed_runs_are_forgotten(place, kit):
    """Runs that fail or grow do not pile up memory."""
    with driver.connect() as device, device.prepare(kit.reshape_model()) as prepared:
        with device.prepare(kit.add_model()) as other:
            start_idle_monitor(other, kit)
        held = [Held(device.engine_pid), Held(os.getpid())]
        x = np.ones((2, 3000), np.float32)
        prepared.run(x, np.array([6000, 1], np.int32))
        baseline = [h.count() for h in held]
        for _ in range(20):
            with pytest.raises(driver.GeneralFailure):
                prepared.run(x, np.array([7, 7], np.int32))
            prepared.run(x, np.array([6000, 1], np.int32))
        for h, then in zip(held, baseline, strict=True):
            assert h.returns_to(then, kit, device)


def test_nothing_stays(place, kit, process):
    """After a client, an engine and a service were killed, there is a lock, a log and a socket's name, no more."""
    before = kit.named_memory()
    with driver.connect() as device:
        service, engine = process(device.service_pid), process(device.engine_pid)
        with client(kit) as guest:
            guest.kill()
        engine.kill()
        assert service.has_ended()
    assert place.files() == ["reference.lock", "reference.log"]
    with driver.connect() as device:
        service, engine = process(device.service_pid), process(device.engine_pid)
        service.kill()
        assert service.has_ended()
        assert engine.has_ended()
    assert place.files() == ["reference.lock", "reference.log", "reference.sock"]
    assert kit.until(lambda: kit.named_memory() <= before)
    assert place.pids() == []


WORKER = """
import sys, numpy as np, driver
sys.path.insert(0, sys.argv[1])
from small_models import add_model
x = np.zeros((1, 4), np.float32)
print("ready", flush=True)
while True:
    try:
        with driver.connect() as device, device.prepare(add_model()) as prepared, prepared.burst() as burst:
            for _ in range(20):
                assert prepared.run(x)[0].sum() == burst.run(x).outputs[0].sum() == 4
    except ConnectionError:
        pass
"""


def random_kills(place, kit, seed, rounds):
    """Kills clients, engines and services in turn at random moments; everybody else goes on, and nothing stays."""
    source, worst = random.Random(seed), 0.0
    held, names = Held(os.getpid()), kit.named_memory()
    with connected(kit):
        pass
    baseline = held.count()
    workers = [worker(kit) for _ in range(2)]
    try:
        for n in range(rounds):
            side = ("client", "engine", "service")[n % 3]
            worst = max(worst, one_kill(kit, source, workers, side))
    finally:
        for w in workers:
            with w:
                w.kill()
    kit.until(lambda: not place.pids())
    assert set(place.files()) <= {"reference.lock", "reference.log", "reference.sock"}
    assert kit.until(lambda: kit.named_memory() <= names)
    gc.collect()  # exceptions hold what was in their frames
    assert all(now <= then for now, then in zip(held.count(), baseline, strict=True)), (held.count(), baseline)
    return worst


def worker(kit):
    found = kit.python(WORKER, Path(__file__).parents[1], stdout=subprocess.PIPE)
    assert found.stdout.readline() == b"ready\n"
    return found


def one_kill(kit, source, workers, side):
    """Seconds from the kill until a burst of ours knew; 0 when ours had nothing to do with it."""
    with connected(kit) as (device, burst):
        runs = threading.Event()

        def run():
            while True:
                burst.run(X)
                runs.set()

        def kill():
            runs.wait()
            last(source.random() * 0.01)
            os.kill(getattr(device, f"{side}_pid"), signal.SIGKILL)

        if side == "client":
            victim = workers.pop(source.randrange(len(workers)))
            for _ in range(source.randrange(30)):
                burst.run(X)
            with victim:
                victim.kill()
            workers.append(worker(kit))
            assert burst.run(X).outputs[0].tolist() == [[2, 2, 2, 2]]
            return 0.0
        return kit.dies(kill, run, PeerDied)


@contextlib.contextmanager
def connected(kit):
    """A device with a burst; tries again while the last victim's successors come and go."""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                device = stack.enter_context(driver.connect())
                burst = stack.enter_context(stack.enter_context(device.prepare(kit.add_model())).burst())
                burst.run(X)
                break
            except PeerDied:
                stack.pop_all().close()
        yield device, burst


@pytest.mark.integration
def test_random_kills(place, kit):
    """Six kills of a client, an engine or a service in turn, at random moments (seed 1): nothing leaks."""
    random_kills(place, kit, 1, 6)


@pytest.mark.stress
def test_many_random_kills(place, kit, capsys, tally):
    """Two hundred kills of each side, or as the budget allows: nobody waits in vain, and nothing leaks."""
    seed, rounds = random.SystemRandom().randrange(2**32), stress.times(600)
    with capsys.disabled():
        print(f"\n{rounds} kills, seed {seed}:", end=" ", flush=True)
        worst = random_kills(place, kit, seed, rounds)
        print(f"told within {worst * 1e3:.1f} ms")
    tally("kills of a device or its client", rounds)
    assert worst < 1
