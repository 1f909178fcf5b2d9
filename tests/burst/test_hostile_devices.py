"""Devices that answer nonsense, break their queue or leave: the request fails, and the burst is not used again."""

import os
import random

import numpy as np
import pytest
import stress

import fmq
from burst import Accepted, ErrorStatus, GeneralFailure, NotSent, OutputShape, Timeout, Timing
from burst.channel import Channel
from burst.datum import DATUM, DATUM_DTYPE
from burst.messages import NO_TIMING
from burst.wire import VERSIONS, RequestPacket, ResultPacket, encode_request, encode_result


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
        with fmq.MessageQueue.open(offer.requests.unannounced()) as queue:
            self.reader = queue.reader()
        with fmq.MessageQueue.open(offer.results.unannounced()) as queue:
            self.writer = queue.writer()
            self.control = offer.results.region().asarray(np.uint64, 512)
        self.life, self.context = fmq.LifePage(), Channel.from_fd(os.dup(offer.context.fileno()))
        return Accepted(offer.versions[0], os.dup(self.life.fd))

    def close(self):
        self.reader.close()
        self.writer.close()
        self.life.close()
        self.context.close()


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


def test_a_late_result_that_is_nonsense(fake, memory):
    """What nobody waited for is looked at, too: nothing more is sent."""
    device, client = fake
    with pytest.raises(Timeout):
        client.run(memory(), timeout=0)
    device.writer.write(np.frombuffer(bytes(48), DATUM_DTYPE))
    with pytest.raises((NotSent, GeneralFailure)):
        client.run(memory(), timeout=20)
    sent = device.reader.read(device.reader.available).tobytes()
    assert sum(sent[n] == 0 for n in range(0, len(sent), DATUM)) == 1, "one request came"
    with pytest.raises(NotSent):
        client.run(memory())


def test_the_same_nonsense_twice(fake, memory, increment, wire):
    """A result that is refused is not taken for the good one before when it comes again."""
    device, client = fake
    packet = client.encode(increment.request(memory()))
    client.version = 2  # of which alone several requests may be on their way
    for _ in range(3):
        client.start(packet)
    client.version = wire
    for number in (1, 2, 3):
        good = ResultPacket(ErrorStatus.NONE, (), NO_TIMING, number if wire > 1 else 0)
        answer = bytearray(encode_result(good, wire))
        if number > 1:
            answer[20] = 1  # padding of packetInformation
        device.writer.write(np.frombuffer(bytes(answer), DATUM_DTYPE))
        assert client.receive(20).status is (ErrorStatus.NONE if number == 1 else ErrorStatus.GENERAL_FAILURE)


def random_answer(rng, wire, number):
    """Often nearly right."""
    shapes = tuple(OutputShape((1,) * rng.randrange(3)) for _ in range(rng.randrange(3)))
    timing = rng.choice([NO_TIMING, Timing(1, 2)])
    raw = bytearray(encode_result(ResultPacket(ErrorStatus.NONE, shapes, timing, number if wire > 1 else 0), wire))
    for _ in range(rng.randrange(3)):
        raw[rng.randrange(len(raw))] = rng.choice([0, 1, 2, 127, 255])
    if rng.random() < 0.1:
        raw *= 2
    return bytes(raw[: len(raw) - DATUM * rng.randrange(2) * (rng.random() < 0.2)]) or bytes(DATUM)


@pytest.mark.parametrize("attempts", [300, pytest.param(stress.times(30_000), marks=pytest.mark.stress)])
def test_random_answers(closing, clients, increment, memory, wire, attempts):
    """Whatever comes in the place of results, a caller gets a result or an error, in time, and a burst that was told
    nonsense is not used again.
    """
    rng, pool, ended = random.Random(20260103), memory(), 0
    for _ in range(attempts):
        device = FakeDevice()
        with clients[1](device, spin=0.0, versions=[wire]) as client:
            packet = client.encode(increment.request(pool), measure=rng.random() < 0.5)
            try:
                for number in range(1, 6):
                    client.start(packet)
                    device.writer.write(np.frombuffer(random_answer(rng, wire, number), DATUM_DTYPE), 0)
                    assert client.receive(20, measure=packet.measure).status in set(ErrorStatus)
            except (GeneralFailure, NotSent):
                ended += 1
                with pytest.raises(NotSent):
                    client.send(packet)
        device.close()
    assert attempts / 4 < ended < attempts
