"""A connection with reconnect=True finds its device again once the old process has ended."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import driver
from burst import BuffersLost, Memory, PeerDied, Request, RequestArgument
from driver.client.other_process import OtherProcess
from driver.errors import DeviceFailed

X = np.ones((1, 4), np.float32)


def killed(device, process):
    """Kill the device's processes, and wait until they are gone."""
    for pid in (device.service_pid, device.engine_pid):
        process(pid).kill()


def test_the_next_preparation_connects_again(place, kit, process):
    """The first call on what lived in the old process says that it died; its buffers are lost for good."""
    with driver.connect("reference", reconnect=True) as device:
        before = device.prepare(kit.add_model())
        buffer = device.allocate(driver.BufferDesc(), [before], [driver.BufferRole(0, 0)])
        old = device.engine_pid
        killed(device, process)
        with pytest.raises(PeerDied):
            before.run(X)
        after = device.prepare(kit.add_model())
        assert device.engine_pid != old
        np.testing.assert_array_equal(after.run(X)[0], X + 1)
        request = Request((RequestArgument(),), (RequestArgument(pool=1, length=16),), (buffer, Memory.create(64)))
        with pytest.raises(BuffersLost):
            after.execute(request)
        np.testing.assert_array_equal(before.run(X)[0], X + 1)  # it is prepared again, as after a recovery


@pytest.mark.parametrize("ask", ["supported_operations", "explain", "status", "stats", "stated_capabilities"])
def test_a_question_connects_again(place, kit, process, ask):
    """Whatever is asked first."""
    with driver.connect("reference", reconnect=True) as device:
        old = device.engine_pid
        killed(device, process)
        ask = getattr(device, ask)
        ask(*[kit.add_model()] * (ask.__name__ in {"supported_operations", "explain"}))
        assert device.engine_pid != old


@pytest.mark.parametrize("asks_again", [False, True])
@pytest.mark.parametrize("ask", ["call", "supported_operations", "explain", "status"])
def test_a_stopped_service_holds_nobody_up(place, kit, ask, asks_again):
    """What is asked of it says which process is stopped, also to the client that has started it."""
    arguments = {"call": ["turns"], "status": []}.get(ask, [kit.add_model()])
    with driver.connect("reference", reconnect=asks_again) as device, ThreadPoolExecutor(1) as pool:
        os.kill(device.service_pid, signal.SIGSTOP)
        kit.until(lambda: OtherProcess.of(device.service_pid).is_stopped)
        try:
            timeout = {"timeout": 0.2} if ask == "call" else {}
            asked = pool.submit(getattr(device, ask), *arguments, **timeout)
            with pytest.raises(DeviceFailed, match=rf"its process {device.service_pid} \(.*\) is stopped"):
                asked.result(kit.patience)
        finally:
            os.kill(device.service_pid, signal.SIGCONT)


def test_otherwise_it_stays_dead(place, kit, process):
    """Without reconnect=True, and once it is closed."""
    for reconnect in (False, True):
        device = driver.connect("reference", reconnect=reconnect)
        killed(device, process)
        if reconnect:
            device.close()
        with pytest.raises(PeerDied):
            device.prepare(kit.add_model())
        device.close()


def test_a_model_that_crashes_in_preparation_is_prepared_once(place, kit):
    """A device that dies of a preparation is not asked to do it again: the error is the caller's."""
    with driver.connect(kit.odd("Crashing"), reconnect=True) as device:
        for _ in range(2):
            with pytest.raises(PeerDied):
                device.prepare(kit.add_model(relaxed=True))
        assert all(device.supported_operations(kit.add_model()))
