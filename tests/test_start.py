"""Each process loads few modules when it starts: what it waits for is held by names and numbers, not by a clock."""

import os
import subprocess
import sys

import pytest

ROOMS = {"burst_engine", "fmq", "burst", "driver"}
IMPORTED = {
    *("copy", "dataclasses", "errno", "fnmatch", "graphlib", "importlib", "ipaddress", "ntpath", "pathlib", "signal"),
    "urllib",
}
CONNECTED = IMPORTED | {
    *("array", "atexit", "blake3", "concurrent", "cython_runtime", "fcntl", "gc", "hashlib", "heapq", "json", "locale"),
    *("logging", "mmap", "msgpack", "pwd", "queue", "resource", "select", "selectors", "socket", "string"),
    *("subprocess", "sysconfig", "termios", "threading", "traceback"),
}
LITERT = {"bisect", "cffi", "pycparser"}  # cffi parses the declarations of its library

SERVICE = "import driver.service.process; from driver.devices import device_class; device_class({!r})"
BEGIN = "import driver; driver.connect"
CLIENT = "import driver.client.device; from driver.devices import check_usable; check_usable({!r})"
STARTS = {
    "import": ("import driver", IMPORTED, 24),
    "begin of connect": (BEGIN, CONNECTED, 106),
    "client of reference": (CLIENT.format("reference"), CONNECTED, 165),
    "client of litert": (CLIENT.format("litert"), CONNECTED, 177),
    "client of onnxruntime": (CLIENT.format("onnxruntime"), CONNECTED, 177),
    "reference": (SERVICE.format("reference"), CONNECTED, 235),
    "litert": (SERVICE.format("litert"), CONNECTED | LITERT, 270),
    "onnxruntime": (SERVICE.format("onnxruntime"), CONNECTED, 267),
}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of the standard library load other modules")
@pytest.mark.parametrize("start", STARTS)
def test_what_a_process_loads(start):
    """Beside numpy's: no event loop, no TLS, no metadata of packages, no database, and so many modules of ours. A
    device's service and its engine, which is forked from it, have loaded the same.
    """
    code, most_foreign, most_own = STARTS[start]
    command = f"import sys, numpy; before = set(sys.modules); {code}; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    own = [name for name in loaded if name.split(".")[0] in ROOMS]
    foreign = {name.split(".")[0] for name in loaded if not name.startswith(("_", "numpy"))} - ROOMS
    assert foreign - most_foreign == set()
    assert len(own) <= most_own, own


def test_a_device_starts_while_its_client_loads(tmp_path):
    """The first `connect` of a process has started the device when it comes to the greater part of its own modules."""
    code = f"""
import os, sys
class Looking:
    def find_spec(self, name, *_):
        if name == "driver.client.device":
            print(os.path.exists({str(tmp_path / "reference.sock")!r}))
sys.meta_path.insert(0, Looking())
import driver
with driver.connect() as device:
    print(device.name)
"""
    environment = {**os.environ, "BURST_RUNTIME_DIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["True", "reference"]
