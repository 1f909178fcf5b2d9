"""What a client of a stream does not do: it waits for nothing that the next microseconds will not bring."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STREAM = """
import ctypes, threading
import numpy as np
import driver
waits, pause = ctypes.CDLL(None).timed_waits, threading.Event()
builder = driver.ModelBuilder()
found = builder.input("float32", (100_000,))
for _ in range(4):  # 0.1 to 0.4 ms: longer than the client keeps Python's lock for, and too short to be a long answer
    found = builder.operation("ADD", found, np.ones(1, np.float32), 0)
builder.output(found)
with driver.connect("reference") as device, device.prepare(builder.build()) as prepared, prepared.burst() as burst:
    for frame in range(60):
        if frame == 20:
            before = waits()
        pause.wait(0.002)
        burst.run()
    print(waits() - before)
"""


@pytest.fixture
def counted(tmp_path):
    """Runs a program, and counts its waits that are nearly due when they begin."""
    library = tmp_path / "timed_waits.so"
    source = Path(__file__).with_name("timed_waits.c")
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, source, "-o", library, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    return lambda program: int(subprocess.check_output([sys.executable, "-c", program], env=environment))


@pytest.mark.usefixtures("device")
def test_no_wait_is_due_when_it_begins(counted):
    """A frame of a stream arms no timer for the time in which it keeps Python's lock: that is soon over."""
    assert counted(STREAM) == 0
