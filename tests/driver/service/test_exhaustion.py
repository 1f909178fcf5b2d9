"""Whatever runs out, the client that asks for it gets an error, the others go on, and nothing is left behind."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import accounts
import numpy as np
import pytest
import scarce
from waiting import PATIENCE, until

import driver
from burst import BurstError
from driver import DriverError
from fmq import FmqError

X = np.ones((1, 4), np.float32)
REPEATED = {"recvmsg": 10, "sendmsg": 10}  # so often a process tries
GROUP, OTHER = 61900, 61003
ANSWER = [[2, 2, 2, 2]]
REFUSALS = (BurstError, DriverError, FmqError)


class Device:
    """A device that can be made to run out of things, and a client that has done nothing wrong."""

    def __init__(self, address, scarcity, kit, broker=0):
        """`broker`: its process, if there is one."""
        self.address, self.scarcity, self._kit = address, scarcity, kit
        self._witness = driver.connect(address)
        self._prepared = self._witness.prepare(kit.add_model())
        self._burst = self._prepared.burst()
        self.pids = {"service": self._witness.service_pid, "engine": self._witness.engine_pid}
        self.pids |= {"broker": broker} if broker else {}
        for _ in range(2):
            self.live()
            self.check()
        self.held = self.holds()

    def live(self):
        """A client's life, from its first call to its last."""
        kit = self._kit
        with driver.connect(self.address) as device:
            assert device.supported_operations(kit.add_model()) == [True]
            with device.prepare(kit.add_model(2.0)) as prepared:
                assert prepared.run(X)[0].tolist() == [[3, 3, 3, 3]]
                with prepared.burst() as burst:
                    assert burst.run(X).outputs[0].tolist() == [[3, 3, 3, 3]]
                request, _ = kit.request([X], 16)
                prepared.execute_async(request).result(kit.patience).raise_for_status()
                prepared.execute_fenced(request).result(kit.patience).raise_for_status()

    def go_on(self):
        """The other client is served."""
        assert self._burst.run(X).outputs[0].tolist() == self._prepared.run(X)[0].tolist() == ANSWER

    def check(self):
        """So is a new one, by the same processes."""
        self.go_on()
        with driver.connect(self.address) as device:
            assert (device.service_pid, device.engine_pid) == (self.pids["service"], self.pids["engine"])

    def holds(self):
        """Descriptors, threads and mapped shared memory of each process."""
        found = {}
        for name, pid in self.pids.items():
            found[name, "descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
            found[name, "threads"] = len(os.listdir(f"/proc/{pid}/task"))
            rows = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found[name, "shared memory"] = sum("/memfd:" in row or "/dev/shm/" in row for row in rows)
        return found

    def leaks(self):
        """What it holds more than at first."""
        now = self.holds()
        return {what: (self.held[what], now[what]) for what in now if now[what] > self.held[what]}

    def forgets(self, when):
        """What a client held is gone."""
        until(lambda: not self.leaks(), lambda: f"left behind (before, now): {self.leaks()}, {when}")

    def outcome(self):
        """The error of a life, or None. It ends in any case."""
        errors = []

        def run():
            try:
                self.live()
            except BaseException as error:  # noqa: BLE001 (told by the test)
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the client waits for ever"
        return errors[0] if errors else None

    def close(self):
        for each in (self._burst, self._prepared, self._witness):
            each.close()


@contextlib.contextmanager
def scarce_device(kit, name="reference", *options):
    with tempfile.TemporaryDirectory(prefix="burst-x-", dir="/tmp") as path:
        os.chmod(path, 0o755)
        words = [sys.executable, "-m", "driver.cli", "serve", name, "--dir", f"{path}/run", *options]
        with (
            open(f"{path}/log", "ab") as log,
            scarce.scarce(words, stdout=log, stderr=log, env=os.environ | {"HOME": path}) as (process, scarcity),
        ):
            kit.until(lambda: "is served at" in Path(f"{path}/log").read_text() or process.poll() is not None)
            device = Device(f"{path}/run/{name}.sock", scarcity, kit, process.pid if options else 0)
            try:
                yield device
            finally:
                print(Path(f"{path}/log").read_text())
                device.close()


@pytest.fixture(scope="module")
def device(kit):
    with scarce_device(kit) as found:
        yield found


@pytest.fixture(scope="module")
def group_device(kit):
    with scarce_device(kit, "reference", "--group", str(GROUP)) as found:
        yield found


@pytest.fixture(scope="module", params=["reference", "litert", "onnxruntime"])
def any_device(kit, request):
    with scarce_device(kit, request.param) as found:
        yield found


def calls_of(device, side, call):
    """How many such calls a life takes on that side."""
    with device.scarcity.failing(device.pids[side], call, 2**31) as scarcity:
        device.live()
        return scarcity.count


def fail(device, side, call, n):
    """Has the n-th call of a life fail, and for some kinds those that follow; the thread that made it, and what the
    client got.
    """
    with device.scarcity.failing(device.pids[side], call, n, REPEATED.get(call, 1)) as scarcity:
        error = device.outcome()
        where = scarcity.failed
    assert error is None or isinstance(error, REFUSALS), repr(error)
    device.check()
    device.forgets(f"after {call} {n} of the {side} failed, and the client got {error!r}")
    return where, error


def sweep(device, side, call, every=1):
    """Has calls fail one after the other; how many."""
    ns = range(1, calls_of(device, side, call) + 1, every)
    for n in ns:
        print(side, call, n, *fail(device, side, call, n))
    return len(ns)


@pytest.mark.integration
@pytest.mark.parametrize("side", ["service", "engine"])
@pytest.mark.parametrize("call", ["recvmsg", "clone", "memfd_create"])
def test_a_call_fails(device, side, call):
    """One system call of a client's life fails, in the service or in the engine: the first, and each fourth one. The
    client gets an error, the others go on, and nothing is left behind.
    """
    assert sweep(device, side, call, every=4) > 0


@pytest.mark.integration
def test_lives_leave_nothing_behind(any_device):
    """Models, bursts and connections of clients that are gone are freed while another client's burst lives, in which
    time no garbage is collected.
    """
    for _ in range(3):
        any_device.live()
    any_device.forgets("after three lives")


@pytest.mark.stress
@pytest.mark.parametrize("side", ["service", "engine"])
@pytest.mark.parametrize("call", scarce.CALLS)
def test_any_call_fails(any_device, side, call):
    """The same with each call that needs something of the process or the machine."""
    sweep(any_device, side, call)


@pytest.mark.integration
@pytest.mark.parametrize("side", ["service", "engine"])
@pytest.mark.parametrize("call", ["mmap", "clone", "fcntl"])
def test_calls_fail_from_one_on(device, side, call):
    """All system calls of a kind fail from some moment of a client's life on, until it has ended."""
    most = calls_of(device, side, call)
    for n in range(1, most + 1, 1 + most // 4):
        with device.scarcity.failing(device.pids[side], call, n, 2**31):
            error = device.outcome()
            device.go_on()
        assert error is None or isinstance(error, REFUSALS), repr(error)
        print(side, call, n, repr(error))
        device.check()
        device.live()  # what could not be unmapped then is unmapped now
        device.forgets(f"without {call} from number {n} on")


@pytest.mark.stress
@pytest.mark.parametrize("call", scarce.CALLS)
def test_any_call_of_the_broker_fails(group_device, call):
    """The same where a broker accepts clients."""
    sweep(group_device, "broker", call)


STRANGER = """
import sys, driver
try:
    driver.connect(sys.argv[1]).close()
except driver.DriverError as error:
    print(type(error).__name__, error)
except Exception as error:
    print(type(error).__name__, error)
else:
    print("served")
"""


@pytest.mark.integration
@pytest.mark.parametrize(("uid", "call"), [*enumerate(["accept4", "clone", "socketpair", "pidfd_open"], OTHER)])
def test_the_broker_lacks_something_for_another_account(group_device, uid, call):
    """The client whose account would need a cell is told, and the next one gets it; others do not notice."""
    if why := accounts.missing():
        pytest.skip(why)

    def ask():
        words = accounts.python_as(uid, (GROUP,), STRANGER, group_device.address)
        return subprocess.run(words, capture_output=True, text=True, check=True, cwd="/", timeout=60).stdout

    with group_device.scarcity.failing(group_device.pids["broker"], call, 1) as scarcity:
        said = ask()
        assert scarcity.failed
    assert said.startswith("ResourceExhaustedTransient the device has run out of resources: "), said
    assert ask() == "served\n"
    group_device.check()


@pytest.mark.parametrize("side", ["service", "engine"])
def test_descriptors_run_out(device, side):
    """A process of the device can open no descriptor more, or a few: a client gets an error, whether it is the
    connection, a message that arrives without its descriptors, or memory that is missing. Others go on meanwhile.
    """
    errors = 0
    for n in (0, 1, 2, 3, 5, 8):
        with scarce.descriptors_left(device.pids[side], n):
            error = device.outcome()
            device.go_on()
        assert error is None or isinstance(error, REFUSALS), repr(error)
        errors += error is not None
        print(side, n, repr(error))
        device.check()
        device.forgets(f"with {n} descriptors")
    assert errors > 2
