"""An execution that waits for its fences holds up nothing else: no answer, no cancellation, and no other client."""

import contextlib
import os

import numpy as np
import pytest
from frames import HELD, frame
from waiting import PATIENCE

import driver
from burst import ErrorStatus, Memory, Request, RequestArgument
from driver import FenceState

WAITS = 1000
ROW = 16  # bytes


@pytest.fixture
def fences():
    """Two eventfds that are not signalled yet."""
    with contextlib.ExitStack() as stack:
        found = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(2)]
        for fd in found:
            stack.callback(os.close, fd)
        yield found


class Client:
    """A client of the device, with a request that takes no time and one that lasts until it is cancelled."""

    def __init__(self, stack, kit):
        device = stack.enter_context(driver.connect(kit.odd("Slow")))
        self.prepared = stack.enter_context(device.prepare(kit.add_model()))
        self.quick, _ = kit.request([frame(0, 1)], ROW)
        self.long, _ = kit.request([frame(HELD, 1)], ROW)

    def is_answered(self):
        """Plainly, asynchronously and by a fence."""
        assert self.prepared.execute(self.quick, timeout=PATIENCE).status == ErrorStatus.NONE
        assert self.prepared.execute_async(self.quick).result(PATIENCE).status == ErrorStatus.NONE
        assert self.prepared.execute_fenced(self.quick).wait(PATIENCE) == FenceState.SIGNALED

    def can_cancel(self):
        """The device has room for one asynchronous execution: for the next one as soon as it heard of the cancel."""
        future = self.prepared.execute_async(self.long)
        refused = self.prepared.execute_async(self.quick).result(PATIENCE)
        assert refused.status == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
        assert future.cancel()
        assert self.prepared.execute_async(self.quick).result(PATIENCE).status == ErrorStatus.NONE


def row(memory, n):
    """From the first row of a memory to another one."""
    source, target = (RequestArgument(offset=ROW * at, length=ROW) for at in (0, n))
    return Request((source,), (target,), (memory,))


def test_a_thousand_waits(kit, configure, fences):
    """One of them never ends. Everything else is answered while all wait, and while that one does."""
    configure(client_launched=WAITS + 1, client_async=1)
    gate, never = fences
    memory = Memory.create(ROW * (WAITS + 1))
    with contextlib.ExitStack() as stack:
        client, neighbour = (Client(stack, kit) for _ in range(2))
        waits = [
            client.prepared.execute_fenced(row(memory, n), [gate if n > 1 else never]) for n in range(1, WAITS + 1)
        ]
        for each in (client, neighbour):
            each.is_answered()
            each.can_cancel()
        assert {wait.wait(0) for wait in waits} == {FenceState.ACTIVE}
        os.eventfd_write(gate, 1)
        assert {wait.wait(PATIENCE) for wait in waits[1:]} == {FenceState.SIGNALED}
        for each in (client, neighbour):
            each.is_answered()
            each.can_cancel()
        assert waits[0].wait(0) == FenceState.ACTIVE
        assert np.array_equal(memory.asarray(np.float32, (WAITS + 1, 4))[:, 0], [0, 0, *[1] * (WAITS - 1)])
