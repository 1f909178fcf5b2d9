"""Operations of a minute on the reference device: they end with their client, at their deadline and when they are
cancelled, and they let others through.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import driver
from burst import Memory, MissedDeadlinePersistent, Request, RequestArgument

pytestmark = pytest.mark.stress  # how soon, it measures

PROMPT = 0.1  # seconds in which a slot is free again
FREED = 0.1  # seconds in which the memory is, too: half a gigabyte for each execution
WINDOW = 0.03  # seconds for which it has to rest
SIDE, TERMS, UNITS = 256, 512, 1024
ROOM = 1 << 28  # bytes of an output
X = np.ones((1, 4), np.float32)


def convolution():
    """CONV_2D of 0.9 * 10^12 products."""
    m = driver.ModelBuilder()
    x, w = m.input("float32", (1, SIDE, SIDE, TERMS)), m.input("float32", (UNITS, 5, 5, TERMS))
    m.output(m.operation("CONV_2D", x, w, m.input("float32", (UNITS,)), 1, 1, 1, 0))
    return m.build()


def dense():
    """FULLY_CONNECTED of 0.3 * 10^12 products: a single call of BLAS, were it not in blocks."""
    m = driver.ModelBuilder()
    x, w = m.input("float32", (1 << 12, 1 << 13)), m.input("float32", (1 << 13, 1 << 13))
    m.output(m.operation("FULLY_CONNECTED", x, w, m.input("float32", (1 << 13,)), 0))
    return m.build()


MODELS = {"CONV_2D": convolution, "FULLY_CONNECTED": dense}


def request_of(model):
    """All inputs zeros that take no memory."""
    operands = [model.main.operands[i] for i in model.main.inputs]
    sizes = [4 * int(np.prod(operand.dimensions)) for operand in operands]
    pools = [Memory.create(size) for size in (*sizes, ROOM)]
    inputs = tuple(RequestArgument(pool=n, length=size) for n, size in enumerate(sizes))
    return Request(inputs, (RequestArgument(pool=len(sizes), length=ROOM),), tuple(pools))


CLIENT = """
import sys, threading
import driver
sys.path.insert(0, sys.argv[1])
from test_long_operations import MODELS, request_of

model = MODELS[sys.argv[2]]()
with driver.connect("reference") as device, device.prepare(model) as prepared:
    request = request_of(model)
    for _ in range(2):
        if sys.argv[3] == "burst":
            threading.Thread(target=prepared.burst().execute, args=(request,), daemon=True).start()
        else:
            threading.Thread(target=prepared.execute, args=(request,), daemon=True).start()
    print("runs", flush=True)
    sys.stdin.read()
"""


def working(pid):
    """Seconds that the threads of a process have used, all together."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1e9


class Engine:
    """What an engine does, as the kernel sees it."""

    def __init__(self, kit, pid):
        self._kit, self.pid = kit, pid

    def begins(self, seconds=0.3):
        """Waits until it has worked for so long."""
        before = working(self.pid)
        self._kit.until(lambda: working(self.pid) - before > seconds)

    def rests(self, begin):
        """Whether it works no longer, soon after that time: it has given the slots up, and the memory back."""
        while True:
            start, before = time.monotonic(), working(self.pid)
            self._kit.until(lambda: time.monotonic() > start + WINDOW)  # noqa: B023 (called before it changes)
            if working(self.pid) - before < WINDOW / 4:
                return start < begin + PROMPT + FREED
            assert start < begin + 10


@pytest.fixture
def device(place):
    with driver.connect("reference") as device:
        yield device


@pytest.fixture
def engine(device, kit):
    return Engine(kit, device.engine_pid)


@pytest.fixture
def neighbour(kit, place):
    with driver.connect("reference") as device, device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        burst.run(X)
        yield burst


@pytest.mark.parametrize("way", ["burst", "plain"])
@pytest.mark.parametrize("name", MODELS)
def test_a_killed_client_holds_no_slot(kit, engine, neighbour, name, way):
    """While its operations run on all slots, a neighbour's ADD comes back; 0.1 s after kill -9 they have ended."""
    client = kit.python(
        CLIENT, Path(__file__).parent, name, way, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=os.getcwd()
    )
    with client:
        assert client.stdout.readline() == b"runs\n"
        engine.begins()
        for _ in range(5):
            begin = time.monotonic()
            neighbour.run(X)
            assert time.monotonic() - begin < 1
        client.send_signal(signal.SIGKILL)
        assert engine.rests(time.monotonic())
    neighbour.run(X)


@pytest.mark.parametrize("name", MODELS)
def test_a_deadline_ends_it(device, engine, name):
    """It is told at its deadline, and the device works no longer."""
    model = MODELS[name]()
    with device.prepare(model) as prepared:
        end = time.monotonic() + 1
        with pytest.raises(MissedDeadlinePersistent):  # an idle device could not have done it either
            prepared.execute(request_of(model), deadline=end).raise_for_status()
        assert time.monotonic() < end + PROMPT
        assert engine.rests(end)


@pytest.mark.parametrize("name", MODELS)
def test_cancelling_ends_it(device, engine, name):
    """`cancel` of its future ends it."""
    model = MODELS[name]()
    with device.prepare(model) as prepared:
        future = prepared.execute_async(request_of(model))
        engine.begins()
        future.cancel()
        assert engine.rests(time.monotonic())
