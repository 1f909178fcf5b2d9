"""What is dropped while a request is in flight: garbage collection of a cycle takes no memory from it."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys, weakref
import numpy as np
import driver

builder = driver.ModelBuilder()
x = builder.input("float32", (1, 4))
builder.output(builder.operation("ADD", x, np.ones((1, 4), np.float32), 0))
with driver.connect("burst_test_devices.odd:Slow") as device, device.prepare(builder.build()) as prepared:
    for seconds in (0.05, 0.2, 0.4):
        burst = prepared.burst(depth=2)
        burst.run(np.zeros((1, 4), np.float32))
        for _ in range(2):
            burst.submit(np.full((1, 4), seconds, np.float32))
        gone, pipeline = weakref.ref(burst), weakref.ref(burst.source)
        cycle = [burst]
        cycle.append(cycle)
        del burst, cycle
        gc.collect()
        assert gone() is None
        assert pipeline() is not None
    while pipeline():
        prepared.run(np.zeros((1, 4), np.float32))
print("ended")
"""


@pytest.mark.integration
def test_a_burst_in_a_cycle(place):
    """Its requests are completed in the thread for what was dropped; its queues are mapped until then."""
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr
