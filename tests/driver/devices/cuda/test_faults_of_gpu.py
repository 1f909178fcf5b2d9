"""What goes wrong with a GPU, on a fake: memory runs out, work never ends, the context is lost, a process is killed.

In each case the clients are told, the engine comes back, and the GPU's memory is free again.
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from fake_cuda import Call, FakeCuda, Word

import burst
import driver

DEVICE = "burst_test_devices.gpu:CudaAdd"
N = 1024
CLIENT = """
import sys
import time
import numpy as np
import driver
builder = driver.ModelBuilder()
x = builder.input("float32", (1024,))
builder.output(builder.operation("ADD", x, np.full(1, 1, np.float32), 0))
with driver.connect("burst_test_devices.gpu:CudaAdd") as device, device.prepare(builder.build()) as prepared:
    with prepared.burst() as b:
        for _ in range(3):
            b.run(np.zeros(1024, np.float32))
        print("ready", flush=True)
        sys.stdin.readline()
        b.run(np.zeros(1024, np.float32))
"""


@pytest.fixture
def fake(tmp_path):
    """A GPU for the engine of this test alone."""
    return FakeCuda(tmp_path)


@pytest.fixture
def gpu(place, fake):
    """A device on it."""
    fake.configure()
    with driver.connect(DEVICE) as device:
        yield device


def model(constant=1):
    builder = driver.ModelBuilder()
    x = builder.input("float32", (N,))
    builder.output(builder.operation("ADD", x, np.full(1, constant, np.float32), 0))
    return builder.build()


@pytest.fixture
def b(gpu):
    """A burst that has run, so that its requests are bound."""
    with gpu.prepare(model()) as prepared, prepared.burst(depth=2) as found:
        for _ in range(4):
            found.run(np.zeros(N, np.float32))
        yield found


def serves(b):
    """Whether a run gives the right answer."""
    return bool((b.run(np.full(N, 4, np.float32)).outputs[0] == 5).all())


def serves_again():
    """Whether a client that comes now is served; the old engine may be about to end."""
    try:
        with driver.connect(DEVICE) as device, device.prepare(model()) as prepared, prepared.burst() as b:
            return serves(b)
    except (burst.PeerDied, driver.DeviceFailed):
        return False


def test_no_memory_is_a_status(gpu, fake):
    """A request for which the GPU has no memory gets RESOURCE_EXHAUSTED_TRANSIENT; others go on, and later ones."""
    with gpu.prepare(model()) as prepared, prepared.burst() as b:
        fake[Word.TOTAL] = fake.used
        with pytest.raises(burst.ResourceExhaustedTransient, match="CUDA_ERROR_OUT_OF_MEMORY"):
            b.run(np.zeros(N, np.float32))
        fake[Word.TOTAL] = 1 << 30
        assert serves(b)


def test_a_kernel_that_never_ends(b, fake, kit):
    """A second after the deadline of its request the engine ends: the client is told, and a new engine serves it."""
    first = fake.pids
    fake[Word.HOLD_KERNELS] = 1
    with pytest.raises((burst.PeerDied, burst.MissedDeadlineTransient, burst.MissedDeadlinePersistent, burst.Timeout)):
        b.submit(np.zeros(N, np.float32), deadline=time.monotonic() + 0.3).result()
    kit.until(lambda: not first & fake.pids)
    fake[Word.HOLD_KERNELS] = 0
    kit.until(serves_again)
    assert fake.contexts == 1


def test_a_lost_context_ends_the_engine(b, fake, kit):
    """Once the context is lost, CUDA calls no host function any more: the engine notices, ends, and comes back."""
    first = fake.pids
    fake[Word.HOLD_KERNELS] = 1
    future = b.submit(np.zeros(N, np.float32))
    kit.until(lambda: fake[Word.HELD])
    fake[Word.LOST] = 999
    with pytest.raises((burst.PeerDied, burst.StatusError)):
        future.result()
    kit.until(lambda: not first & fake.pids)
    fake[Word.LOST] = fake[Word.HOLD_KERNELS] = 0
    kit.until(serves_again)


@pytest.mark.parametrize("step", ["prepare", "bind", "allocate"])
def test_a_context_lost_while_nothing_runs(place, fake, kit, step):
    """Whatever a client asks for next finds it: the engine ends at once, and the next one serves."""
    fake.configure()
    with driver.connect(DEVICE) as device, device.prepare(model()) as prepared:
        first = fake.pids
        fake[Word.LOST] = 719
        steps = {
            "prepare": lambda: device.prepare(model(2)),
            "bind": lambda: prepared.run(np.zeros(N, np.float32)),
            "allocate": lambda: device.allocate(driver.BufferDesc(), [prepared], [driver.BufferRole(0, 0)], []),
        }
        with pytest.raises((burst.PeerDied, burst.StatusError, driver.DeviceFailed)):
            steps[step]()
        kit.until(lambda: not first & fake.pids)
        fake[Word.LOST] = 0
    kit.until(serves_again)


def test_a_fault_at_the_launch_ends_the_engine(b, fake, kit):
    """A call that says that the context is lost, is believed at once."""
    fake.fail(Call.LAUNCH, 700)
    with pytest.raises((burst.PeerDied, burst.StatusError)):
        b.run(np.zeros(N, np.float32))
    kit.until(serves_again)


def test_a_call_that_fails_is_that_requests_alone(b, fake):
    """An error that leaves the context as it was fails one request, by its name; the engine goes on."""
    before = fake.calls(Call.CONTEXT)
    fake.fail(Call.LAUNCH, 1)
    with pytest.raises(burst.GeneralFailure, match="CUDA_ERROR_INVALID_VALUE"):
        b.run(np.zeros(N, np.float32))
    assert serves(b)
    assert fake.calls(Call.CONTEXT) == before


def test_an_engine_killed_in_the_midst_of_a_copy(b, fake, kit, place):
    """kill -9 while a copy reads the client's memory: the client is told, and a new engine serves; nothing is left."""
    first = fake.pids
    fake[Word.HOLD_IN] = 1
    copies = fake.calls(Call.COPY_IN)
    future = b.submit(np.zeros(N, np.float32))
    kit.until(lambda: fake.calls(Call.COPY_IN) > copies)
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises((burst.PeerDied, burst.StatusError)):
        future.result()
    kit.until(lambda: not first & fake.pids)
    fake[Word.HOLD_IN] = 0
    kit.until(serves_again)
    assert fake.contexts == 1


@pytest.mark.integration
def test_a_client_killed_in_the_midst_of_a_copy(b, fake, kit):
    """Its memory stays pinned until the copy has ended; then all that it had is free, and others are served on."""
    used, registered = fake.used, fake.registered
    with subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout.readline() == b"ready\n"
        before = fake.registered
        assert before > registered
        fake[Word.HOLD_OUT] = 1
        copies = fake.calls(Call.COPY_OUT)
        client.stdin.write(b"\n")
        client.stdin.flush()
        kit.until(lambda: fake.calls(Call.COPY_OUT) > copies)
        client.kill()
        client.wait()
        assert fake.registered == before
        fake[Word.HOLD_OUT] = 0
        kit.until(lambda: (fake.used, fake.registered) == (used, registered))
    assert serves(b)


@pytest.mark.integration
def test_a_copy_of_a_dead_client_that_never_ends(b, fake, kit):
    """The engine ends a second after the client: only so is the memory free again. Others get a new one."""
    first = fake.pids
    with subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout.readline() == b"ready\n"
        fake[Word.HOLD_OUT] = 1
        copies = fake.calls(Call.COPY_OUT)
        client.stdin.write(b"\n")
        client.stdin.flush()
        kit.until(lambda: fake.calls(Call.COPY_OUT) > copies)
        client.kill()
    kit.until(lambda: not first & fake.pids)
    fake[Word.HOLD_OUT] = 0
    kit.until(serves_again)
