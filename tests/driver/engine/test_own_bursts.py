"""Bursts that the driver serves itself: with an executor that keeps memory, or a firmware that speaks the queues."""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from inside import open_bursts

from burst import (
    ErrorStatus,
    GeneralFailure,
    Memory,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    PeerDied,
    Request,
    RequestArgument,
    ResourceExhaustedTransient,
)

X = np.ones((1, 4), np.float32)
OWN = ["OwnExecutor", "FromThis", "FromInner", "FirmwareInside", "Firmware", "OldFirmware"]
SLOW = ["SlowExecutor", "SlowFirmware"]


@pytest.fixture
def own(home, kit):
    """own(name): a connection to a device with bursts of its own."""
    opened = []

    def connect(name, module="own_bursts"):
        opened.append(kit.living(f"burst_test_devices.{module}:{name}"))
        return opened[-1]

    yield connect
    for device in opened:
        device.close()


def firmwares(place, device):
    """The processes that a device's engine has started."""
    found = []
    for pid in place.pids():
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if int(words[1]) == device.engine_pid and b"firmware" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
    return found


def mapped(pid, pool):
    """Whether that process has mapped the memory."""
    inode = str(os.fstat(pool.fd).st_ino)
    return any(line.split()[4] == inode for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


@pytest.mark.parametrize("name", OWN)
def test_an_own_burst_computes(own, kit, name):
    """It gives what the plain path gives, request by request, with new inputs and new shapes."""
    with own(name).prepare(kit.open_model()) as model, model.burst() as burst:
        for rows in (1, 3, 3, 1):
            x = np.random.default_rng(rows).random((rows, 4), np.float32)
            assert burst.run(x).outputs[0].tolist() == (x + 1).tolist() == model.run(x)[0].tolist()


@pytest.mark.parametrize("name", OWN)
def test_more_pools_than_a_message_carries(own, kit, name):
    """A request with a hundred pools is answered: their memory is asked for in parts."""
    with own(name).prepare(kit.add_model()) as model, model.burst() as burst:
        pools = [Memory.create(64) for _ in range(100)]
        pools[7].asarray(np.float32, 4)[:] = 5
        argument = RequestArgument(pool=7, length=16), RequestArgument(pool=93, length=16)
        assert burst.execute(Request((argument[0],), (argument[1],), tuple(pools))).status is ErrorStatus.NONE
        assert list(pools[93].asarray(np.float32, 4)) == [6] * 4


@pytest.mark.parametrize("name", OWN)
def test_freed_memory_is_unmapped_in_the_device(own, kit, home, name):
    """free_memory reaches the burst, in whichever process it is, and memory that is used again is mapped again."""
    device = own(name)
    with device.prepare(kit.add_model()) as model, model.burst() as burst:
        request, (x,) = kit.request([X], 16)
        burst.run(X)
        servers = [device.engine_pid, *firmwares(home, device)]

        def are_mapped():
            return [pid for pid in servers if mapped(pid, request.pools[0])]

        for n in range(3):
            x[...] = n
            assert burst.execute(request).status is ErrorStatus.NONE
            assert list(request.pools[1].asarray(np.float32, 4)) == [n + 1] * 4
            assert len(are_mapped()) == 1
            burst.free_memory(request.pools[0])
            kit.until(lambda: not are_mapped())


@pytest.mark.parametrize("name", OWN)
def test_times_and_deadlines(own, kit, name):
    """Times come only when they are asked for; a deadline that has passed is missed, and the next request is served."""
    with own(name).prepare(kit.add_model()) as model, model.burst() as burst:
        request, _ = kit.request([X], 16)
        assert burst.execute(request).timing == (None, None)
        on_device, in_driver = burst.execute(request, measure=True).timing
        assert 0 <= on_device <= in_driver < 10**7
        for _ in range(2):
            with pytest.raises((MissedDeadlineTransient, MissedDeadlinePersistent)):
                burst.execute(request, deadline=time.monotonic() - 1).raise_for_status()
            assert burst.execute(request, deadline=time.monotonic() + 100).status is ErrorStatus.NONE


@pytest.mark.parametrize("name", ["OwnExecutor", "FromThis", "FromInner", "FirmwareInside", "Firmware"])
def test_many_requests_in_flight(own, kit, name):
    """Results come in the order of the requests; wire version 1 has one in flight at a time."""
    with own(name).prepare(kit.add_model()) as model, model.burst(depth=4) as burst:
        for start in range(0, 48, 12):
            futures = [burst.submit(X * n) for n in range(start, start + 12)]
            for n, future in enumerate(futures, start):
                assert future.result(kit.patience).outputs[0].tolist() == [[n + 1] * 4]
            del future, futures  # a burst has so many output buffers


def test_depth_in_wire_version_1(own, kit):
    """A client that wants four requests in flight gets its results all the same."""
    with own("OldFirmware").prepare(kit.add_model()) as model, model.burst(depth=4) as burst:
        futures = [burst.submit(X * n) for n in range(9)]
        assert [float(future.result(kit.patience).outputs[0][0, 0]) for future in futures] == list(range(1, 10))


@pytest.mark.parametrize("name", OWN)
def test_own_bursts_are_counted(own, kit, name):
    """They are bursts of the device like all others: counted, in the traces, and limited."""
    device = own(name)
    kit.until(lambda: not open_bursts(device))
    with device.prepare(kit.add_model()) as model:
        with model.burst() as one, model.burst() as two:
            one.run(X), two.run(X)
            assert open_bursts(device) == 2
            (total,), fds = device.connection.call("traces", 0)
            assert total == len(fds) == 2
            for fd in fds:
                os.close(fd)
        kit.until(lambda: not open_bursts(device))


CLIENT = """
import sys, numpy as np, driver
sys.path.insert(0, sys.argv[1])
from small_models import add_model
device = driver.connect(sys.argv[2])
model = device.prepare(add_model())
bursts = [model.burst(depth=4) for _ in range(3)]
for burst in bursts:
    burst.run(np.zeros((1, 4), np.float32))
futures = [burst.submit(np.full((1, 4), 0.3, np.float32)) for burst in bursts for _ in range(4)]
print("ready", flush=True)
sys.stdin.read()
"""


def held(pid):
    """Descriptors, threads and shared mappings of a process."""
    proc = Path(f"/proc/{pid}")
    shared = sum("/memfd:" in line or "/dev/shm/" in line for line in (proc / "maps").read_text().splitlines())
    threads = int((proc / "status").read_text().split("Threads:")[1].split()[0])
    return len(os.listdir(proc / "fd")), threads, shared


@pytest.mark.integration
@pytest.mark.parametrize("name", SLOW)
def test_a_client_is_killed_in_the_midst_of_runs(own, kit, home, name):
    """kill -9 of a client with requests in flight: its bursts end, nothing of them is left in any process, and others
    go on.
    """
    device = own(name)
    with device.prepare(kit.add_model()) as model, model.burst() as burst:
        burst.run(X * 0)
        servers = [device.engine_pid, *firmwares(home, device)]
        assert len(servers) == 1 + (name == "SlowFirmware")

        def guest():
            address = f"burst_test_devices.own_bursts:{name}"
            found = kit.python(
                CLIENT, Path(__file__).parents[1], address, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert found.stdout.readline() == b"ready\n"
            return found

        baseline = None
        for _ in range(3):  # the first is a warm-up: some threads stay
            with guest() as client:
                assert open_bursts(device) == 4
                client.kill()
            kit.until(lambda: open_bursts(device) == 1)
            if baseline is None:
                baseline = [held(pid) for pid in servers]
            for pid, before in zip(servers, baseline, strict=True):
                kit.until(lambda pid=pid, before=before: np.all(np.array(held(pid)) <= before))
        assert burst.run(X * 0).outputs[0].tolist() == [[1] * 4]


@pytest.mark.parametrize("name", SLOW)
def test_the_device_is_killed(own, kit, home, process, name):
    """kill -9 of the engine: a client that waits gets PeerDied, and the firmware's process ends, too."""
    device = own(name)
    with device.prepare(kit.add_model()) as model, model.burst() as burst:
        burst.run(X * 0)
        firmware = [process(pid) for pid in firmwares(home, device)]

        kit.dies(lambda: os.kill(device.engine_pid, signal.SIGKILL), lambda: burst.run(X * 9), PeerDied)
        assert all(other.has_ended() for other in firmware)


@pytest.mark.integration
@pytest.mark.parametrize("recover", [False, True])
def test_the_firmware_is_killed(own, kit, home, recover):
    """kill -9 of the firmware alone: a client that waits gets PeerDied, or with recover=True its result;
    the device lives on, and its next burst has a new firmware.
    """
    device = own("SlowFirmware")
    engine = device.engine_pid
    with device.prepare(kit.add_model()) as model, model.burst(recover=recover) as burst:
        burst.run(X * 0)
        (firmware,) = firmwares(home, device)

        def kill():
            os.kill(firmware, signal.SIGKILL)

        if recover:
            future = burst.submit(X * 0.2)
            kill()
            assert np.allclose(future.result(kit.patience).outputs[0], 1.2)
        else:
            kit.dies(kill, lambda: burst.run(X * 9), PeerDied)
    with own("SlowFirmware") as again, again.prepare(kit.add_model()) as model:
        assert again.engine_pid == engine
        with model.burst() as burst:
            assert burst.run(X * 0).outputs[0].tolist() == [[1] * 4]
            assert firmware not in firmwares(home, again)
        kit.until(lambda: not open_bursts(again))


WRONG = {
    "Raising": (GeneralFailure, "'wrong' failed to configure a burst: RuntimeError: no channel of the accelerator"),
    "Refusing": (ResourceExhaustedTransient, "'wrong' cannot serve this burst: all 4 channels are taken"),
    "Nonsensical": (GeneralFailure, "'wrong' configure_execution_burst returned 'a burst'; return an ExecutionBurst"),
    "FromNumber": (GeneralFailure, "ValueError: prepared=5: it has no method bind; give a driver.PreparedModel, or"),
    "FromOther": (GeneralFailure, "inputs .'TENSOR_FLOAT16'. .*; give a prepared model with the same inputs"),
    "Hasty": (GeneralFailure, "'wrong' said that this burst had ended before it began"),
    "Stillborn": (GeneralFailure, "'wrong' failed to start a burst: RuntimeError: the accelerator does not start"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_driver_that_cannot_configure_a_burst(own, kit, name):
    """The client gets the error, which names the driver; nothing is left of the burst; and the device goes on."""
    device, (kind, words) = own(name, "wrong_bursts"), WRONG[name]
    with device.prepare(kit.add_model()) as model:
        model.run(X)
        before = None
        for _ in range(4):
            with pytest.raises(kind, match=words):
                model.burst()
            kit.until(lambda: not open_bursts(device))
            if before is None:
                before = np.add(held(device.engine_pid), (0, 1, 0))  # the idle monitor may begin
        kit.until(lambda: np.all(np.array(held(device.engine_pid)) <= before))
        assert model.run(X)[0].tolist() == [[2] * 4]


def test_a_burst_that_cannot_free_memory(own, kit, home):
    """Its client's burst is ended, because it may hold the memory; the log names the driver; other bursts go on."""
    device = own("Deaf", "wrong_bursts")
    with device.prepare(kit.add_model()) as model, model.burst() as burst, model.burst() as other:
        request, _ = kit.request([X], 16)
        assert burst.execute(request).status is ErrorStatus.NONE
        burst.free_memory(request.pools[0])
        kit.until(lambda: open_bursts(device) == 1)
        assert other.run(X).outputs[0].tolist() == [[2] * 4]
        assert any("'wrong' raised in free_memory" in path.read_text() for path in home.path.glob("*.log"))


@pytest.mark.parametrize("name", ["Endless", "Stubborn"])
def test_a_burst_that_never_says_that_it_has_ended(own, kit, home, name):
    """It is counted as ended all the same after a while, in which others go on, and the log names the driver."""
    device = own(name, "wrong_bursts")
    with device.prepare(kit.add_model()) as model:
        with model.burst() as other:
            with model.burst() as burst:
                assert burst.run(X).outputs[0].tolist() == [[2] * 4]
            assert other.run(X).outputs[0].tolist() == [[2] * 4]
            kit.until(lambda: open_bursts(device) == 1)
            assert other.run(X).outputs[0].tolist() == [[2] * 4]
        kit.until(lambda: not open_bursts(device))
        assert any("'wrong' has not ended a burst" in path.read_text() for path in home.path.glob("*.log"))


def test_a_driver_dies_with_a_burst_of_its_own(own, kit, process):
    """A crash in the driver's own burst ends the device; its clients are told, and the next connection works."""
    device = own("Firmware")
    with device.prepare(kit.add_model()) as model, model.burst() as burst:
        burst.run(X)
        engine = process(device.engine_pid)
        engine.kill(signal.SIGSEGV)
        assert engine.has_ended()
        with pytest.raises(PeerDied):
            burst.run(X, timeout=kit.patience)
    with own("Firmware").prepare(kit.add_model()) as model, model.burst() as burst:
        assert burst.run(X).outputs[0].tolist() == [[2] * 4]
