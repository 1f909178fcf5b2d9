"""Many bursts on one device: each gets its results, none is forgotten, and what one costs is small and given back."""

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest
import stress

X = np.zeros((1, 4), np.float32)
MOST = {"threads": 1, "fds": 12, "mappings": 12}  # of one burst, on either side

CLIENT = """
import os, sys, threading, time, numpy as np, driver
sys.path.insert(0, sys.argv[1])
from small_models import add_model, odd
number, bursts, pace = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
counts, wrong = [0] * bursts, []
with driver.connect(odd("Slow")) as device:
    prepared = [device.prepare(add_model(float(number * bursts + k))) for k in range(bursts)]
    opened = [p.burst(depth=1 + k % 3) for k, p in enumerate(prepared)]
    for burst in opened:
        burst.run(np.zeros((1, 4), np.float32))
    print("ready", flush=True)
    end = float(sys.stdin.readline())

    def work(k):
        n = 0
        while time.monotonic() < end:
            n += 1
            x = np.full((1, 4), n % 1000, np.float32)
            x[0, 0] = pace
            out = opened[k].run(x).outputs[0][0, 1:]
            if not (out == n % 1000 + number * bursts + k).all():
                wrong.append((k, n, out.tolist()))
        counts[k] = n

    threads = [threading.Thread(target=work, args=(k,)) for k in range(bursts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(*counts, len(wrong), flush=True)
    sys.stdin.readline()
"""


def costs(pid):
    """Threads, descriptors and mappings of a process."""
    mappings = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": sum("memfd" in line or "fmq" in line for line in mappings),
    }


def use(burst):
    assert burst.run(X).outputs[0].tolist() == [[1, 1, 1, 1]]
    assert burst.submit(X).result().outputs[0].tolist() == [[1, 1, 1, 1]]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("processes", "bursts", "seconds", "pace", "ratio"),
    [
        pytest.param(4, 2, 1.0, 5e-3, 1 / 2, id="8"),
        pytest.param(16, 4, 20.0, 3e-2, 1 / 2, id="64", marks=pytest.mark.stress),
        pytest.param(16, 4, 20.0, 0.0, 1 / 8, id="64 without a pause", marks=pytest.mark.stress),
    ],
)
def test_from_many_processes(connect, kit, processes, bursts, seconds, pace, ratio, capsys):
    """Bursts of many processes at once: each gets its own results, and the slowest at least half of the fastest's.

    Unless all of them want more than the CPUs give: then the kernel decides, and we only look that nobody starves.
    """
    device = connect("Slow")
    before = costs(device.engine_pid)
    here, pipes = Path(__file__).parents[1], {"stdin": -1, "stdout": -1, "text": True}
    clients = [kit.python(CLIENT, here, k, bursts, pace, **pipes) for k in range(processes)]
    try:
        assert [client.stdout.readline() for client in clients] == ["ready\n"] * processes
        end = time.monotonic() + seconds
        for client in clients:
            print(end, file=client.stdin, flush=True)
        each = {what: n - before[what] for what, n in costs(device.engine_pid).items()}
        lines = [[int(word) for word in client.stdout.readline().split()] for client in clients]
    finally:
        for client in clients:
            client.communicate()
    counts = [n for *some, _ in lines for n in some]
    with capsys.disabled():
        print(
            f"\n{processes * bursts} bursts of {processes} processes, {seconds} s:",
            f"{min(counts)} to {max(counts)} requests each",
        )
        print("on the device for each:", {what: round(n / processes / bursts, 1) for what, n in each.items()})
    assert [wrong for *_, wrong in lines] == [0] * processes
    assert len(counts) == processes * bursts
    assert min(counts) >= ratio * max(counts)
    for what, most in MOST.items():
        assert each[what] <= (most + 2) * processes * bursts  # and a connection for each client


@pytest.mark.parametrize("depth", [1, 4])
def test_cost_of_one(device, kit, depth, capsys):
    """Threads, descriptors and mappings of a burst, on both sides, are few, and all come back."""
    with device.prepare(kit.add_model()) as prepared:
        with prepared.burst() as first:
            use(first)
        pids = {"client": os.getpid(), "device": device.engine_pid, "service": device.service_pid}
        gc.collect()
        kit.until(lambda: costs(device.engine_pid)["threads"] == len(os.listdir(f"/proc/{device.engine_pid}/task")))
        before = {side: costs(pid) for side, pid in pids.items()}
        bursts = [prepared.burst(depth=depth) for _ in range(8)]
        for burst in bursts:
            use(burst)
        during = {side: costs(pid) for side, pid in pids.items()}
        each = {side: {w: (during[side][w] - before[side][w]) / 8 for w in MOST} for side in pids}
        with capsys.disabled():
            print(f"\none burst of depth {depth}:", each)
        for burst in bursts:
            burst.close()
        del bursts, burst
        gc.collect()
        for side, pid in pids.items():
            for what, most in MOST.items():
                assert each[side][what] <= most
            kit.until(lambda pid=pid, side=side: all(costs(pid)[w] <= before[side][w] for w in MOST))
        assert each["client"]["threads"] == 0
        assert each["service"] == {"threads": 0, "fds": 0, "mappings": 0}


def resident(pid):
    """Bytes of memory that are its own."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_", "Anonymous:")))


@pytest.mark.parametrize("cycles", [100, pytest.param(stress.times(12_000), marks=pytest.mark.stress)])
def test_open_and_close(device, kit, cycles, capsys):
    """Opening, using and closing bursts again and again leaves nothing on either side."""
    pids = (os.getpid(), device.engine_pid, device.service_pid)
    with device.prepare(kit.add_model()) as prepared:

        def cycle(n):
            with prepared.burst(depth=1 + n % 4, policy=("block", "reject", "latest")[n % 3]) as burst:
                use(burst)
                if n % 5 == 0:
                    burst.submit(X)  # left in flight

        for n in range(30):
            cycle(n)
        gc.collect()
        before, memory = [costs(pid) for pid in pids], [resident(pid) for pid in pids]
        for n in range(cycles):
            cycle(n)
        gc.collect()
        for pid, was in zip(pids, before, strict=True):
            kit.until(lambda pid=pid, was=was: all(n <= was[what] + 2 for what, n in costs(pid).items()))
        grown = [resident(pid) - was for pid, was in zip(pids, memory, strict=True)]
        with capsys.disabled():
            print(f"\n{cycles} bursts opened and closed; grown by (bytes, client, engine, service):", grown)
        assert max(grown) < 8 * 2**20 + 100 * cycles


def test_closed_without_close(device, kit):
    """A burst that is let go without being closed is closed."""
    with device.prepare(kit.add_model()) as prepared:
        use(prepared.burst())
        gc.collect()
        before = costs(device.engine_pid)["threads"]  # perhaps with the last one's
        bursts = [prepared.burst() for _ in range(4)]
        for burst in bursts:
            use(burst)
        kit.until(lambda: before + 3 <= costs(device.engine_pid)["threads"] <= before + 4)
        del bursts, burst
        gc.collect()
        kit.until(lambda: costs(device.engine_pid)["threads"] <= before)
