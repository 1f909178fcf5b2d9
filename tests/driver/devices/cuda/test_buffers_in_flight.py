"""Several requests on a GPU at a time that share memory: device buffers, pools, values that one hands to the next."""

import itertools
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import Call, Word
from inside import controller_of

import burst
import driver
from burst import GeneralFailure, Memory, Request, RequestArgument
from driver import BufferDesc, BufferRole

DEVICE = "burst_test_devices.gpu:CudaAdd"
N = 4
X = np.arange(1, N + 1, dtype=np.float32)
ROLES = [BufferRole(0, 0)], [BufferRole(0, 0)]
CLIENT = """
import sys
import numpy as np
import driver
sys.path[:0] = sys.argv[1:]
from inside import controller_of
from test_buffers_in_flight import adding, buffer_of, start, step
with driver.connect("burst_test_devices.gpu:CudaAdd") as device, device.prepare(adding()) as prepared:
    a, b = buffer_of(prepared), buffer_of(prepared)
    with prepared.burst() as steps:
        steps.execute(step(a, b))
        steps.execute(step(b, a))
        print("ready", flush=True)
        sys.stdin.readline()
        start(steps, [step(a, b), step(b, a)])
        print("started", flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def prepared(gpu):
    with driver.connect(DEVICE) as device, device.prepare(adding()) as found:
        yield found


def adding(value=1.0):
    """x + value."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (N,))
    builder.output(builder.operation("ADD", x, np.full(1, value, np.float32), 0))
    return builder.build()


def buffer_of(prepared, *others):
    """One with the value X, which the models read and write."""
    models = [prepared, *others]
    roles = [BufferRole(n, 0) for n in range(len(models))]
    found = prepared.device.allocate(BufferDesc(), models, roles, roles)
    found.copy_from(X)
    return found


def value_of(buffer):
    buffer.copy_to(found := np.empty(N, np.float32))
    return found.tolist()


def step(source, target):
    return Request((RequestArgument(),), (RequestArgument(pool=1),), (source, target))


def start(b, requests):
    """Sends all of them, and waits for none."""
    controller = controller_of(b)
    for request in requests:
        controller.start(controller.encode(request))


def received(b, count):
    """The statuses of so many requests that were started."""
    return [controller_of(b).receive(20).status for _ in range(count)]


def test_requests_on_buffers_overlap(prepared, gpu, kit):
    """While the kernel of one goes on, the kernel of the next one is on the stream, also if it reads what the first one
    writes; each reads what the one before it has written.
    """
    a, b = buffer_of(prepared), buffer_of(prepared)
    with prepared.burst() as steps:
        for request in (step(a, b), step(b, a)):
            assert steps.execute(request).status == 0
        launches, gpu[Word.HOLD_KERNELS] = gpu.calls(Call.LAUNCH), 1
        start(steps, [step(a, b), step(b, a)])
        kit.until(lambda: gpu.calls(Call.LAUNCH) == launches + 2)
        kit.until(lambda: gpu[Word.HELD] == 1)
        gpu[Word.HOLD_KERNELS] = 0
        assert received(steps, 2) == [0, 0]
        for _ in range(10):
            start(steps, [step(a, b), step(b, a)])
            assert received(steps, 2) == [0, 0]
    assert value_of(a) == (X + 24).tolist()
    assert value_of(b) == (X + 23).tolist()


def test_a_copy_waits_for_what_is_in_flight(prepared, gpu, kit):
    """The client reads a buffer, or copies it to another one, while a request that writes it goes on: it gets what that
    writes, and never what was there before.
    """
    a, b, c = (buffer_of(prepared) for _ in range(3))
    with prepared.burst() as steps:
        for request in (step(a, b), step(a, b)):
            steps.execute(request)
        a.copy_from(X + 10)
        gpu[Word.HOLD_KERNELS] = 1
        start(steps, [step(a, b)])
        kit.until(lambda: gpu[Word.HELD] == 1)
        waits = gpu.calls(Call.SYNCHRONIZE)

        def go_on():
            kit.until(lambda: gpu.calls(Call.SYNCHRONIZE) > waits)
            gpu[Word.HOLD_KERNELS] = 0

        thread = threading.Thread(target=go_on)
        thread.start()
        c.copy_from(b)
        thread.join()
        assert received(steps, 1) == [0]
    assert value_of(c) == (X + 11).tolist()


def test_another_model_waits_for_what_is_in_flight(prepared, gpu, kit):
    """A model has streams of its own, and reads a buffer only when the other model has written it."""
    with prepared.device.prepare(adding(100.0)) as other:
        a, b, c = (buffer_of(prepared, other) for _ in range(3))
        with prepared.burst() as steps, other.burst() as others:
            for _ in range(2):
                steps.execute(step(a, b))
                others.execute(step(b, c))
            a.copy_from(X + 10)
            launches, gpu[Word.HOLD_KERNELS] = gpu.calls(Call.LAUNCH), 1
            start(steps, [step(a, b)])
            kit.until(lambda: gpu[Word.HELD] == 1)
            start(others, [step(b, c)])
            kit.until(lambda: gpu.calls(Call.LAUNCH) == launches + 2)
            gpu[Word.HOLD_KERNELS] = 0
            assert received(steps, 1) + received(others, 1) == [0, 0]
        assert value_of(c) == (X + 111).tolist()


def test_a_buffer_without_a_value_is_refused_in_flight_too(prepared, gpu):
    """A bound request whose input has lost its value fails by itself, and what it should have written has none."""
    a, b = buffer_of(prepared), buffer_of(prepared)
    with prepared.burst() as steps:
        for request in (step(a, b), step(a, b)):
            steps.execute(request)
        gpu.fail(Call.COPY_IN, 1)
        with pytest.raises(GeneralFailure, match="CUDA_ERROR_INVALID_VALUE"):
            a.copy_from(X)
        result = steps.execute(step(a, b))
        assert result.status == GeneralFailure.status
        with pytest.raises(GeneralFailure, match="has no value"):
            value_of(b)
        a.copy_from(X)
        assert steps.execute(step(a, b)).status == 0
        assert value_of(b) == (X + 1).tolist()


def test_a_launch_that_fails_leaves_no_value(prepared, gpu):
    """An error of CUDA's at the launch is that request's; the buffer has no value until the next one has written it."""
    a, b = buffer_of(prepared), buffer_of(prepared)
    with prepared.burst() as steps:
        for request in (step(a, b), step(a, b)):
            steps.execute(request)
        gpu.fail(Call.LAUNCH, 1)
        assert steps.execute(step(a, b)).status == GeneralFailure.status
        with pytest.raises(GeneralFailure, match="has no value"):
            value_of(b)
        assert steps.execute(step(a, b)).status == 0
        assert value_of(b) == (X + 1).tolist()


@pytest.mark.parametrize("way", ["pinned", "staged"])
def test_a_pool_hands_values_on(prepared, gpu, way):
    """A request whose input is the output of the one before it, in the client's memory, is copied in after that was
    copied out.
    """
    pool = Memory.create(64)
    pool.asarray(np.float32)[:N] = X
    places = [RequestArgument(offset=16 * n, length=16) for n in range(3)]
    chain = [Request((a,), (b,), (pool,)) for a, b in itertools.pairwise(places)]
    if way == "staged":
        gpu.fail(Call.REGISTER, 1)
    with prepared.burst() as steps:
        for request in chain:
            assert steps.execute(request).status == 0
        for n in range(1, 20):
            pool.asarray(np.float32)[:] = 0
            pool.asarray(np.float32)[:N] = X * n
            start(steps, chain)
            assert received(steps, 2) == [0, 0]
            assert pool.asarray(np.float32)[2 * N : 3 * N].tolist() == (X * n + 2).tolist()
        assert (steps.stats()["copied_bytes"]["bulk"] > 0) == (way == "staged")


@pytest.mark.integration
def test_a_client_killed_with_two_in_flight(prepared, gpu, kit):
    """kill -9: its buffers stay until the GPU is done with them; then they are free, and others are served on."""
    kept = buffer_of(prepared)
    used, here = gpu.used, str(Path(__file__).parent)
    tests = str(Path(__file__).parents[3])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with kit.python(CLIENT, here, tests, f"{tests}/driver", **pipes) as client:
        assert client.stdout.readline() == "ready\n"
        held, launches = gpu.used, gpu.calls(Call.LAUNCH)
        assert held > used
        gpu[Word.HOLD_KERNELS] = 1
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "started\n"
        kit.until(lambda: gpu.calls(Call.LAUNCH) == launches + 2)
        client.kill()
        client.wait()
        assert gpu.used == held
        gpu[Word.HOLD_KERNELS] = 0
        kit.until(lambda: gpu.used == used)
    assert value_of(kept) == X.tolist()


def test_an_engine_killed_with_two_in_flight(prepared, gpu, kit):
    """kill -9: the client is told, the memory is free, and the next engine serves."""
    a, b = buffer_of(prepared), buffer_of(prepared)
    with prepared.burst() as steps:
        for request in (step(a, b), step(b, a)):
            steps.execute(request)
        launches, gpu[Word.HOLD_KERNELS] = gpu.calls(Call.LAUNCH), 1
        start(steps, [step(a, b), step(b, a)])
        kit.until(lambda: gpu.calls(Call.LAUNCH) == launches + 2)
        os.kill(prepared.device.engine_pid, 9)
        with pytest.raises(burst.PeerDied):
            received(steps, 1)
        gpu[Word.HOLD_KERNELS] = 0
        kit.until(lambda: not gpu.used)
    with driver.connect(DEVICE) as device, device.prepare(adding()) as again:
        assert again.run(X)[0].tolist() == (X + 1).tolist()
