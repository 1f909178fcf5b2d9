"""The kernel's walk of a dead process's life words comes to a page that it cannot touch, and marks none behind it.

So the words of a device are on pages of its own, which no client can take away, and every wait has a second way to end.
"""

import asyncio
import os
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from inside import controller_of, life_word_of

import driver
from burst import PeerDied
from driver.monitor import Watcher
from fmq._core import lib

X = np.ones((1, 4), np.float32)
FOREVER = np.full((1, 4), 9, np.float32)
PROMPT, ANYWAY = 0.1, 1.1  # seconds: with the mark; without, for an engine of less than a GB
HERE = Path(__file__).parents[1]

ATTACKER = """
import os, sys, numpy as np, driver
sys.path.insert(0, sys.argv[2])
from small_models import add_model
from unsealed import truncate_queues
device = driver.connect(sys.argv[1])
prepared = device.prepare(add_model())
truncate_queues(prepared)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def attacked(home, kit):
    """A device, a burst of ours on it, and a neighbour of the same account that opened a burst after it, on
    unsealed queues, and truncated them while the listener slept on them.
    """
    with kit.living(kit.odd("Slow")) as device, device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        burst.run(X * 0)
        with kit.python(ATTACKER, kit.odd("Slow"), HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
            assert neighbour.stdout.readline() == b"done\n"
            yield device, prepared, burst, neighbour
            neighbour.kill()


def killed(device, *pids):
    def kill():
        for pid in pids or (device.service_pid, device.engine_pid):
            os.kill(pid, signal.SIGKILL)

    return kill


def told_by_the_mark(attacked, kit):
    """Seconds until our burst is told of the device's death."""
    device, _, burst, _ = attacked
    took = kit.dies(killed(device), lambda: burst.run(FOREVER), PeerDied)
    assert lib.fmq_life_state(life_word_of(controller_of(burst))) == lib.FMQ_DEAD
    return took


def test_a_neighbour_that_truncates_its_queues(attacked, kit):
    """Our burst is told of the device's death, by the mark."""
    told_by_the_mark(attacked, kit)


@pytest.mark.stress
def test_a_neighbour_delays_nothing(attacked, kit):
    """Our burst is told within 100 ms."""
    assert told_by_the_mark(attacked, kit) < PROMPT


def test_a_listener_that_sleeps_on_a_page_that_is_gone(attacked, kit):
    """It ends with its client, and so does the thread that stops it: no futex call reaches a page that is gone."""
    device, _, burst, neighbour = attacked
    assert len(device.traces()) == 2
    neighbour.kill()
    kit.until(lambda: len(device.traces()) == 1)
    before = cpu_seconds(device.engine_pid)
    for _ in range(20):
        burst.run(X * 0.01)
    assert cpu_seconds(device.engine_pid) - before < 0.15, "a thread of the engine turns round and round"


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- every wait, without a mark -------------------------------------------------------------------------------------


@pytest.fixture
def unmarked(home, kit):
    """A device whose engine's life words the kernel will not mark."""
    with kit.living(kit.odd("Unmarked")) as device, device.prepare(kit.add_model()) as prepared:
        yield device, prepared


def in_burst(_, prepared, kit):
    burst = prepared.burst()
    burst.run(X * 0)
    return lambda: burst.run(FOREVER)


def expecting(_, prepared, kit):
    burst = prepared.burst()
    for _ in range(5):
        burst.run(X * 0.02)
    return lambda: burst.run(FOREVER)


def submitted(_, prepared, kit):
    burst = prepared.burst(depth=4)
    burst.run(X * 0)
    futures = [burst.submit(FOREVER) for _ in range(3)]
    return futures[0].result


def awaited(_, prepared, kit):
    burst = prepared.burst()
    burst.run(X * 0)
    return lambda: asyncio.run(burst.run_async(FOREVER))


def plain(_, prepared, kit):
    prepared.run(X * 0)
    return lambda: prepared.run(FOREVER)


def asynchronous(_, prepared, kit):
    future = prepared.execute_async(kit.request([FOREVER], 16)[0])
    return lambda: future.result(kit.patience)


def fenced(_, prepared, kit):
    execution = prepared.execute_fenced(kit.request([FOREVER], 16)[0])
    return lambda: execution.result(kit.patience)


def preparing(device, prepared, kit):
    prepared.run(X * 0)
    return lambda: device.prepare(kit.add_model(relaxed=True))


EACH_WAIT = pytest.mark.parametrize(
    "wait", [in_burst, expecting, submitted, awaited, plain, asynchronous, fenced, preparing], ids=lambda f: f.__name__
)


def told_without_a_mark(unmarked, kit, wait):
    """Seconds until the wait ends. Then the device serves again."""
    device, prepared = unmarked
    with prepared.burst() as beside:
        beside.run(X * 0)
        call = wait(device, prepared, kit)
        took = kit.dies(killed(device, device.engine_pid), call, PeerDied)
        word = life_word_of(controller_of(beside))
        assert lib.fmq_life_state(word) == lib.FMQ_ALIVE, "it was marked: this test shows nothing"
        with pytest.raises(PeerDied):
            beside.run(X * 0)
    with driver.connect(kit.odd("Unmarked")) as successor, successor.prepare(kit.add_model()) as again:
        assert again.run(X * 0)[0].tolist() == [[1, 1, 1, 1]]
    return took


@EACH_WAIT
def test_every_wait_ends_without_a_mark(unmarked, kit, wait):
    """The engine dies, its life words still say that it lives, and the wait ends all the same."""
    told_without_a_mark(unmarked, kit, wait)


@pytest.mark.stress
@EACH_WAIT
def test_every_wait_ends_soon_without_a_mark(unmarked, kit, wait):
    """Within 1.1 s, for an engine of less than a GB."""
    assert told_without_a_mark(unmarked, kit, wait) < ANYWAY


def test_a_watcher_notices_without_a_mark(unmarked, kit):
    """What follows a device by its census sees that it has ended, too."""
    device, prepared = unmarked
    prepared.run(X * 0)
    watcher = Watcher([kit.odd("Unmarked")])
    assert len(watcher.sample().devices) == 1
    killed(device, device.engine_pid)()
    kit.until(lambda: not watcher.sample().devices)


def test_two_threads_and_a_loop_at_once(unmarked, kit):
    """One death ends the waits of several bursts of a process, however they wait."""
    device, prepared = unmarked
    calls = [wait(device, prepared, kit) for wait in (in_burst, awaited, submitted, plain)]
    ends = []

    def run(call):
        with pytest.raises(PeerDied):
            call()
        ends.append(call)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        state = Path(f"/proc/self/task/{thread.native_id}/stat")
        kit.until(lambda state=state: state.read_text().split()[2] == "S")
    killed(device, device.engine_pid)()
    for thread in threads:
        thread.join(kit.patience)
    assert len(ends) == 4
