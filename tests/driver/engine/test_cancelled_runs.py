"""Executions that nothing can end, as they are one call of a library's: a client that is gone does not hold its slot
for long, on the devices that run operations by LiteRT and ONNX Runtime.
"""

import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import driver
from burst import Memory, Request, RequestArgument

pytestmark = pytest.mark.integration

ROWS, SIZE = 1 << 14, 1 << 12
X = np.ones((1, 4), np.float32)
CLIENT = """
import sys, threading
import driver
sys.path.insert(0, sys.argv[1])
from test_cancelled_runs import dense, request

# On one thread it lasts for seconds on any processor.
with driver.connect(sys.argv[2]) as device, device.prepare(dense(), preference="low_power") as prepared:
    run = prepared.burst().execute if sys.argv[3] == "burst" else prepared.execute
    thread = threading.Thread(target=run, args=(request(),))
    thread.start()
    print("runs", flush=True)
    thread.join()
    print("done", flush=True)
"""


def dense():
    """FULLY_CONNECTED of 0.3 * 10^12 products, which no library interrupts."""
    m = driver.ModelBuilder()
    x = m.input("float32", (ROWS, SIZE))
    m.output(m.operation("FULLY_CONNECTED", x, np.zeros((SIZE, SIZE), np.float32), np.zeros(SIZE, np.float32), 0))
    return m.build()


def request():
    size = 4 * ROWS * SIZE
    place = [RequestArgument(pool=n, length=size) for n in range(2)]
    return Request(place[:1], place[1:], (Memory.create(size), Memory.create(size)))


@pytest.mark.parametrize("way", ["burst", "plain"])
@pytest.mark.parametrize("name", ["litert", "onnxruntime"])
def test_the_engine_ends_with_a_run_that_cannot(kit, place, process, name, way):
    """After kill -9 of its client the engine ends; a neighbour's burst recovers, and its answers are right."""
    pytest.importorskip({"litert": "ai_edge_litert"}.get(name, name))
    with driver.connect(name) as device, device.prepare(kit.add_model()) as prepared:
        engine = process(device.engine_pid)
        with prepared.burst(recover=True) as neighbour:
            neighbour.run(X)
            client = kit.python(CLIENT, Path(__file__).parent, name, way, stdout=subprocess.PIPE)
            with client:
                assert client.stdout.readline() == b"runs\n"
                before = working(device.engine_pid)
                kit.until(lambda: working(device.engine_pid) - before > 0.5)
                client.send_signal(signal.SIGKILL)
                assert engine.has_ended()
                assert client.stdout.read() == b""
            assert (neighbour.run(X).outputs[0] == 2).all()


def working(pid):
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
