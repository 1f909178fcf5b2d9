"""The door in C++, built where its sources are newer, and servers whose door it is."""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from needed_tools import give_up
from oip_models import Client, rows, write_copies, write_negation, write_ranges, write_sum
from packed_nets import write_net
from waiting import until

from driver.gateways.oip.native_door import VARIABLE, NativeDoor
from driver.gateways.oip.process import InferenceServer, OipOptions

ROOT = Path(__file__).parents[2]
EVERYTHING = OipOptions(shared_memory=True, model_control=True)


def built(*words):
    """The path of the program, which `make` writes where it is older than its sources; other workers wait for that."""
    for tool in ("make", "g++", "pkg-config"):
        if shutil.which(tool) is None:
            give_up(f"apt install {tool}")
    if subprocess.run(["pkg-config", "--exists", "grpc++"], check=False).returncode:
        give_up("apt install libgrpc++-dev")
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build/oip.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ["make", "-s", "-C", "csrc/oip", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return ROOT / f"build/oip{'-sanitized' if words else ''}/burst-oip"


def write_models(folder):
    """Models that run in C++, and some that do not."""
    write_sum(folder / "sum.onnx")
    write_copies(folder / "copies.onnx")
    write_ranges(folder / "ranges.onnx")
    write_sum(folder / "fixed.onnx", (2, 4))
    write_net("beside numbers", folder, "texts.onnx")
    write_negation(folder / "batched" / "1" / "model.onnx", ("rows", "n"))
    (folder / "batched" / "config.pbtxt").write_text("max_batch_size: 4 instance_group { count: 1 }")
    write_negation(folder / "joined" / "1" / "model.onnx", ("rows", "n"))
    (folder / "joined" / "config.pbtxt").write_text("max_batch_size: 4 dynamic_batching { }")
    for version, shape in ((1, (4,)), (2, ("n",))):
        write_negation(folder / "versions" / str(version) / "model.onnx", shape)
    (folder / "versions" / "config.pbtxt").write_text("version_policy { all { } }")


@contextlib.contextmanager
def serving(folder, addresses, program=None, options=EVERYTHING):
    """.its: a server of those models. .doors: in C++. .addresses; `program`: the door in C++, or None: Python's."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if program:
            patch.setenv(VARIABLE, str(program))
        else:
            patch.delenv(VARIABLE, raising=False)
        its = InferenceServer("onnxruntime", folder, addresses, options)
        doors = [door for door in its.doors if isinstance(door, NativeDoor)]
        assert len(doors) == (len(addresses) if program else 0)
        its.begin()
        stack.callback(its.close)
        yield SimpleNamespace(its=its, doors=doors, addresses=its.addresses)


@contextlib.contextmanager
def clean(program, *, sanitized):
    """Ends with an assertion if a program that runs in it, built with sanitizers, has found anything."""
    with tempfile.TemporaryDirectory(prefix="burst-oip-") as place, pytest.MonkeyPatch.context() as patch:
        if sanitized:
            patch.setenv("ASAN_OPTIONS", f"log_path={place}/asan:exitcode=99:detect_leaks=1:handle_abort=1")
            patch.setenv("UBSAN_OPTIONS", f"log_path={place}/ubsan:print_stacktrace=1:halt_on_error=1")
        yield program
        found = [path.read_text() for path in Path(place).iterdir()]
        assert not found, found[0][:4000]


def answered(server, name):
    """How many requests to a model the doors in C++ have answered."""
    return sum(door.counts(served).requests for door in server.doors for served in served_of(server, name))


def served_of(server, name):
    return [each for each in server.its.repository.all() if each.name == name]


def until_here(server, client, name="sum"):
    """Until the door in C++ answers requests to a model, whose inputs are x and y."""

    def is_here():
        client.sum(rows(), rows(), model=name)
        return answered(server, name)

    until(is_here)


@contextlib.contextmanager
def unix_and_python(program):
    """.native, .python: clients of servers of the same folder, in C++ and in Python. .server: the one in C++."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="burst-oip-"))
        folder = Path(place) / "models"
        write_models(folder)
        server = stack.enter_context(serving(folder, [f"unix:{place}/native", "127.0.0.1:0"], program))
        other = stack.enter_context(serving(folder, [f"unix:{place}/python"]))
        native, python = Client(server.addresses[0]), Client(other.addresses[0])
        stack.callback(python.close)
        stack.callback(native.close)
        until_here(server, native)
        until_here(server, native, "fixed")
        yield SimpleNamespace(
            native=native, python=python, server=server, other=other, folder=folder, place=Path(place)
        )


def numbered(text):
    """What is said, without the numbers of bytes in memory that differ from one moment to the next."""
    return re.sub(r"hold \d+ MiB", "hold some MiB", text)


def descriptors(pid):
    """How many a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))
