"""Bursts of Python: try_submit and poll, which wait for nothing."""

import signal

import numpy as np
import pytest
from held_processes import HeldProcess

import driver
from burst import MissedDeadlinePersistent, MissedDeadlineTransient, PeerDied

X = np.ones((1, 4), np.float32)


@pytest.fixture
def own(place):
    """A device of this test, and its engine, held."""
    with driver.connect("reference") as device:
        engine = HeldProcess(device.engine_pid)
        yield device, engine
        engine.end()


def test_what_cannot_be_now_is_none(own, kit):
    """No room, and no result; then the results are there, in whatever order they are asked for."""
    device, engine = own
    with device.prepare(kit.add_model()) as model, model.burst(depth=2) as burst:
        burst.run(X)
        engine.signal(signal.SIGSTOP)
        first, second = burst.try_submit(X), burst.try_submit(2 * X)
        assert burst.try_submit(X) is None
        assert burst.poll(first) is None
        engine.signal(signal.SIGCONT)
        found = kit.until(lambda: burst.poll(second))
        assert np.array_equal(found.outputs[0], 3 * X)
        assert np.array_equal(burst.poll(first).outputs[0], 2 * X)
        assert burst.stats()["drops"] == 0


def test_poll_raises_what_the_request_got(own, kit):
    """A deadline that has passed, and the death of the device."""
    device, engine = own
    with device.prepare(kit.add_model()) as model, model.burst(depth=2) as burst:
        burst.run(X)
        with pytest.raises((MissedDeadlineTransient, MissedDeadlinePersistent)):
            burst.poll(burst.try_submit(X, deadline=0.0))
        engine.signal(signal.SIGSTOP)
        waiting = burst.try_submit(X)
        engine.signal(signal.SIGKILL)
        with pytest.raises(PeerDied):
            kit.until(lambda: burst.poll(waiting))


def test_a_burst_on_several_devices_has_them_too(connect, kit):
    """And one in this process: all bursts have the same surface."""
    with driver.compile(kit.add_model()) as compiled, compiled.burst(depth=2) as burst:
        future = burst.try_submit(X)
        found = kit.until(lambda: burst.poll(future))
        assert np.array_equal(found.outputs[0], 2 * X)
