"""Who gets a lane, and when."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import PATIENCE, until

import driver
from burst import DeviceUnavailable, ErrorStatus, MissedDeadlineTransient
from driver.gateways.oip.inference import GivenTensor, ModelPorts
from driver.gateways.oip.lanes import InPlaceCall, Lane, Lanes
from driver.gateways.oip.regions import NO_REGIONS

DONE = SimpleNamespace(status=ErrorStatus.NONE, outputs=(None,), output_shapes=(), raise_for_status=lambda: None)


def _ports():
    m = driver.ModelBuilder()
    x = m.input("float32", (1,))
    m.output(m.operation("ADD", x, x, 0))
    return ModelPorts(m.build())


PORTS = _ports()


class HeldDevice:
    """A prepared model, each of whose executions waits until it is let go. `refuses`: bursts that it does not open."""

    def __init__(self, refuses=0):
        self.running, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.refuses, self.deadlines, self.bursts, self.closed = refuses, [], 0, 0

    def burst(self, **_):
        if self.refuses:
            self.refuses -= 1
            self.running.release()
            assert self.go.acquire(timeout=PATIENCE)
            raise DeviceUnavailable("refused")
        self.bursts += 1
        return self

    def perform(self, job):
        self.deadlines.append(job.wait.by)
        self.running.release()
        assert self.go.acquire(timeout=PATIENCE)
        return DONE

    def close(self):
        self.closed += 1

    def await_running(self):
        assert self.running.acquire(timeout=PATIENCE)


def call(deadline=None):
    return InPlaceCall([GivenTensor("x", "FP32", (1,))], [np.ones(1, np.float32)], [None], NO_REGIONS, deadline)


def await_waiting(lanes, count):
    until(lambda: lanes.waiting == count)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_order(threads):
    """Requests get the one lane in the order in which they came, and open no other."""
    device = HeldDevice()
    lanes = Lanes(device, PORTS, 1)
    far = 1e9  # of the monotonic clock, which has come to that on no machine
    futures = [threads.submit(lanes.execute, call(far))]
    device.await_running()
    for n in range(1, 4):
        futures.append(threads.submit(lanes.execute, call(far + n)))
        await_waiting(lanes, n)
    device.go.release(4)
    for future in futures:
        future.result(PATIENCE)
    assert device.deadlines == [int((far + n) * 1e9) for n in range(4)]
    assert device.bursts == 1
    lanes.close()
    assert device.closed == 1


def test_deadline_in_the_queue(threads):
    """A request is told at its deadline that it was not done, although the lane is still taken; the lane goes on."""
    device = HeldDevice()
    lanes = Lanes(device, PORTS, 1)
    first = threads.submit(lanes.execute, call())
    device.await_running()
    with pytest.raises(MissedDeadlineTransient):
        lanes.execute(call(time.monotonic() + 0.05))
    assert not first.done()
    device.go.release(2)
    first.result(PATIENCE)
    lanes.execute(call())
    assert len(device.deadlines) == 2
    lanes.close()


def test_close(threads):
    """`close` finishes the request that runs and the one that waits, and those that come later are refused."""
    device = HeldDevice()
    lanes = Lanes(device, PORTS, 1)
    found = [threads.submit(lanes.execute, call())]
    device.await_running()
    found.append(threads.submit(lanes.execute, call()))
    await_waiting(lanes, 1)
    closing = threads.submit(lanes.close)
    device.go.release(1)
    device.await_running()
    with pytest.raises(DeviceUnavailable):
        lanes.execute(call())
    assert not closing.done()
    device.go.release(1)
    closing.result(PATIENCE)
    for future in found:
        future.result(PATIENCE)
    assert device.closed == 1


def test_lane_that_cannot_be_opened(threads):
    """The error goes to the request that had to open the lane; the next in the queue opens another and is executed."""
    device = HeldDevice(refuses=1)
    lanes = Lanes(device, PORTS, 1)
    first = threads.submit(lanes.execute, call())
    device.await_running()
    second = threads.submit(lanes.execute, call())
    await_waiting(lanes, 1)
    device.go.release(2)
    with pytest.raises(DeviceUnavailable):
        first.result(PATIENCE)
    second.result(PATIENCE)
    lanes.close()


def test_a_region_ends_while_a_lane_looks():
    """A region that ends just as a lane compares a request with its latest one does that request no harm."""
    executed = []
    burst = SimpleNamespace(perform=lambda job: executed.append(job.request) or DONE, free_memory=lambda _: None)
    lane = Lane(burst, PORTS)

    class EndingRegion(tuple):
        """A place, in whose comparison another region ends, as in another thread. It is empty: in no shared memory."""

        __slots__ = ()

        def __eq__(self, other):
            lane.forget(None)
            return super().__eq__(other)

        __hash__ = tuple.__hash__

    for _ in range(2):
        lane.execute(call()._replace(given=[GivenTensor("x", "FP32", (1,), place=EndingRegion())]))
    assert executed[0] is executed[1]
