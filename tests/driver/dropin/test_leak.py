"""A runtime that loses memory with each run, under a program that runs for long."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

PROGRAM = """
import json, re, sys
import numpy as np
import onnxruntime
from driver.dropin.device_model import connections

def private(pid):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return 1024 * sum(int(kb) for kb in re.findall(r"Private_\\w+: +(\\d+)", file.read()))

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
x = np.zeros((3, 64), np.float32)
def run(times):
    for _ in range(times):
        session.run(None, {"x": x})
run(100)
(device,) = connections.devices()
before = [private(pid) for pid in ("self", device.engine_pid)]
run(400)
print(json.dumps([private(pid) - b for pid, b in zip(("self", device.engine_pid), before)]))
"""


def test_a_leak_is_the_device_s(home, net):
    """A driver loses 100 KB a run: after 400 runs the device has grown by 40 MB, and the program not by 1."""
    words = ["--device", "burst_test_devices.leaking:Leaking", "--", sys.executable, "-c", PROGRAM, net]
    command = [sys.executable, "-m", "burst_engine", "exec", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=300)
    assert ended.returncode == 0, ended.stderr
    program, device = json.loads(ended.stdout)
    assert device > 35e6
    assert program < 1e6


REPLACED = """
import sys
import numpy as np
import onnxruntime
from driver.dropin.device_model import connections

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
feed = {"x": np.ones((3, 64), np.float32)}
expected, engines = session.run(None, feed), set()
while len(engines) < 3:
    assert all(np.array_equal(found, right) for found, right in zip(session.run(None, feed), expected))
    engines |= {device.engine_pid for device in connections.devices()}
"""


def test_a_device_that_has_grown_is_replaced(place, net, tmp_path):
    """At the size that limits.toml allows its engine is ended; the run is the next one's, and none is the program's."""
    limits, report = tmp_path / ".config/burst/limits.toml", tmp_path / "report.json"
    limits.parent.mkdir(parents=True)
    limits.write_text("client_bytes = 30_000_000\nengine_bytes = 100_000_000\n")
    words = ["--device", "burst_test_devices.leaking:Leaking", "--report", str(report)]
    command = [sys.executable, "-m", "burst_engine", "exec", *words, "--", sys.executable, "-c", REPLACED, net]
    environment = os.environ | {"HOME": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert ended.returncode == 0, ended.stderr
    (process,) = json.loads(report.read_text())["processes"]
    assert process["in_process"] == []
    assert "process_runs" not in process["models"][0]
