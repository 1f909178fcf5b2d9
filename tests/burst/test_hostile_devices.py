"""Devices that answer nonsense, break their queue or leave: the request fails, and the burst is not used again."""

import numpy as np
import pytest

import fmq
from burst import GeneralFailure, NotSent
from burst.datum import DATUM_DTYPE
from burst.wire import VERSIONS, RequestPacket, encode_request


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


def nothing(wire):
    """A request where a result is due."""
    return encode_request(RequestPacket((), (), (), False, id=1 if wire > 1 else 0), wire)


class FakeDevice:
    """Takes requests and answers whatever it is told to."""

    def __call__(self, offer):
        with fmq.MessageQueue.open(offer.requests) as queue:
            self.reader = queue.reader()
        with fmq.MessageQueue.open(offer.results) as queue:
            self.writer = queue.writer()
            self.control = offer.results.region().asarray(np.uint64, 512)
        return offer.versions[0]

    def close(self):
        self.reader.close()
        self.writer.close()


@pytest.fixture
def fake(closing, burst):
    device = closing(FakeDevice())
    return device, burst(device)


@pytest.mark.parametrize("answer", [bytes(24), b"\xff" * 48, nothing(1), nothing(2)], ids=range(4))
def test_a_device_that_answers_nonsense(fake, memory, answer):
    """A result that no encoder emits is a GENERAL_FAILURE, and the burst is not used again."""
    device, client = fake
    device.writer.write(np.frombuffer(answer, DATUM_DTYPE))
    assert client.run(memory()).status == 2
    with pytest.raises(NotSent, match="malformed"):
        client.run(memory())


def test_a_device_that_breaks_the_queue(fake, memory):
    """A counter where it cannot be is a failure of this request, and the burst is not used again."""
    device, client = fake
    device.control[128 // 8] = 2**40
    with pytest.raises(GeneralFailure, match="the device ended this burst"):
        client.run(memory())
    with pytest.raises(NotSent):
        client.run(memory())


def test_a_device_that_closes_its_end(fake, memory):
    """A device that closes the result queue has ended the burst."""
    device, client = fake
    device.close()
    with pytest.raises(GeneralFailure, match="the device ended this burst"):
        client.run(memory())
    with pytest.raises(NotSent):
        client.run(memory())
