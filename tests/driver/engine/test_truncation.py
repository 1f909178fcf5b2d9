"""A client that takes memory away hurts only itself: touching what was truncated would end a process with SIGBUS."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from inside import controller_of, model_number_of, reader_of, taken_queue, writer_of
from unsealed import unsealed_queue

import driver
import fmq
from burst import Memory, NotSent, Request, RequestArgument, StatusError
from burst.datum import DATUM_DTYPE
from driver.client.job import Job
from driver.client.workspace import KnownRequest
from driver.engine.limits import limits

A = np.ones((1, 4), np.float32)


@pytest.fixture
def adder():
    m = driver.ModelBuilder()
    x, y = m.input("float32", (1, 4)), m.input("float32", (1, 4))
    m.output(m.operation("ADD", x, y, 0))
    with driver.connect() as device, device.prepare(m.build()) as prepared:
        yield prepared


def request_in(memory):
    return Request(
        (RequestArgument(offset=0, length=16), RequestArgument(offset=64, length=16)),
        (RequestArgument(offset=128, length=16),),
        (memory,),
    )


@pytest.mark.parametrize("path", ["burst", "plain"])
def test_a_truncated_pool_reads_as_zeros_and_the_device_lives(adder, path):
    """POSIX memory cannot be sealed; a request whose pool has been cut off is executed on zeros, and others go on."""
    request = request_in(Memory.create(4096, "posix"))
    with adder.burst() as burst:
        execute = burst.execute if path == "burst" else adder.execute
        assert execute(request).status == 0
        os.ftruncate(request.pools[0].fd, 0)
        controller = controller_of(burst)
        if path == "burst":
            assert controller.send(controller.encode(request)).status == 0  # execute() would look at the outputs
        else:
            lane = adder.device.connection.lane
            assert lane.execute(model_number_of(adder), Job(request), KnownRequest(request)).status == 0
    np.testing.assert_array_equal(adder.run(A, A)[0], A + A)


def test_truncated_queues_end_the_burst_and_not_the_device(adder):
    """The listener of a burst whose queue was cut off finds it corrupt or silent; the device and other bursts go on."""
    with adder.burst(memory="posix") as burst, adder.burst() as other:
        fds = [os.dup(end._role._file.fd) for end in (writer_of(controller_of(burst)), reader_of(controller_of(burst)))]
        assert burst.run(A, A).status == 0
        controller = controller_of(burst)
        packet = controller.encode(request_in(Memory.create(4096)))
        queue = writer_of(controller_of(burst))._place.control
        for fd in fds:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, queue.nbytes)  # for our own sake: zeros, no SIGBUS here
            os.close(fd)
        with pytest.raises((StatusError, NotSent, TimeoutError, ConnectionError)):
            controller.send(packet, timeout=0.5)
        np.testing.assert_array_equal(other.run(A, A).outputs[0], A + A)
    np.testing.assert_array_equal(adder.run(A, A)[0], A + A)


@pytest.mark.parametrize("what", ["memfd", "posix", "unsealed"])
@pytest.mark.parametrize("uid", [os.getuid(), os.getuid() + 1])
def test_whose_queues_may_be_truncated(what, uid):
    """Those of the device's own account: from another account's client the engine takes what is sealed, looking before
    any process of the device attaches it.
    """
    made = unsealed_queue()[2] if what == "unsealed" else fmq.MessageQueue.create(DATUM_DTYPE, 64, memory=what)
    wire, fds = made.descriptor.to_wire()
    client, message = SimpleNamespace(uid=uid, _limits=limits()), SimpleNamespace(fds=[os.dup(fd) for fd in fds])
    if uid == os.getuid() or what == "memfd":
        assert taken_queue(client, wire, message).capacity == 64
    else:
        with pytest.raises(fmq.InvalidDescriptor, match="not sealed against shrinking"):
            taken_queue(client, wire, message)
