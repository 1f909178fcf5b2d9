"""A GPU that is lost, has no memory left, or never ends: clients are told, and the device comes back."""

import time
from contextlib import ExitStack, closing

import numpy as np
import pytest
from faulty_vulkan import FaultyVulkan

import driver
from burst import BurstError, DeviceUnavailable, MissedDeadlineTransient

pytestmark = pytest.mark.integration

NAME = "onnxruntime-webgpu"
X = np.full(4, 3, np.float32)


@pytest.fixture
def gpu(place, tmp_path):
    return FaultyVulkan(tmp_path, f"{place.path}-home")


def add_model():
    builder = driver.ModelBuilder()
    x = builder.input("float32", (4,))
    builder.output(builder.operation("ADD", x, x, 0))
    return builder.build()


def engine():
    with closing(driver.connect(NAME)) as device:
        return device.connection.engine_pid


def answers(run):
    np.testing.assert_array_equal(run(X)[0], 2 * X)


def test_a_lost_gpu_costs_an_engine(gpu, process):
    """The engine that has lost it ends: a burst that recovers never notices, another client is told, and both go on."""
    with ExitStack() as stack:
        compiled = stack.enter_context(driver.compile(add_model(), devices=[NAME]))
        burst = stack.enter_context(compiled.burst(recover=True))
        other = stack.enter_context(closing(driver.connect(NAME)))
        prepared = stack.enter_context(other.prepare(add_model()))
        answers(lambda x: burst.run(x).outputs)
        answers(prepared.run)
        first = process(other.connection.engine_pid)
        gpu.fail("lost", other.connection.engine_pid)
        answers(lambda x: burst.run(x).outputs)
        assert first.has_ended()
        with pytest.raises(BurstError, match="lost or has no memory left"):
            prepared.run(X)
        with closing(driver.connect(NAME)) as again, again.prepare(add_model()) as anew:
            answers(anew.run)


def test_a_gpu_without_memory_is_told_and_serves_again(gpu, process):
    """The client is told; the engine, whose buffers are unusable then, ends, and the next one has memory."""
    with closing(driver.connect(NAME)) as device, device.prepare(add_model()) as prepared:
        full = process(device.connection.engine_pid)
        gpu.fail("memory", device.connection.engine_pid)
        with pytest.raises(BurstError, match="lost or has no memory left"):
            prepared.run(X)
        assert full.has_ended()
        with closing(driver.connect(NAME)) as again, again.prepare(add_model()) as anew:
            answers(anew.run)


def test_a_kernel_that_never_ends_ends_the_engine(gpu, process):
    """Its client is told at its deadline; the engine ends a second later, and its burst is served by the next one."""
    with driver.compile(add_model(), devices=[NAME]) as compiled, compiled.burst(recover=True) as burst:
        answers(lambda x: burst.run(x).outputs)
        pid = engine()
        hung = process(pid)
        gpu.fail("hang", pid)
        with pytest.raises(MissedDeadlineTransient):
            burst.submit(X, deadline=time.monotonic() + 0.2).result()
        assert hung.has_ended()
        answers(lambda x: burst.run(x).outputs)
        assert engine() != pid


def test_a_gpu_that_comes_back_is_found(gpu, tmp_path, place, kit):
    """A device that was offline from its beginning looks again by itself, while a client holds it."""
    (tmp_path / "driver").rename(tmp_path / "gone")
    with closing(driver.connect(NAME)) as device:
        assert device.status().state == "offline"
        with pytest.raises(DeviceUnavailable, match="WebGPU finds no GPU"):
            device.prepare(add_model())
        (tmp_path / "gone").rename(tmp_path / "driver")

        def is_back():
            try:
                with closing(driver.connect(NAME)) as found:
                    return found.status().takes_work
            except BurstError:  # its engine ends just now
                return False

        kit.until(is_back)
