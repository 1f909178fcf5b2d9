"""Devices that answer nonsense, break their queue or leave: the request fails, and the burst is not used again."""

import contextlib
import ctypes
import os
import random
import select
import socket

import numpy as np
import pytest
import stress
from slow_to_close import SlowToClose

import fmq
from burst import (
    Accepted,
    Controller,
    ErrorStatus,
    GeneralFailure,
    Memory,
    NotSent,
    OutputShape,
    PeerDied,
    Request,
    RequestArgument,
    Timeout,
    Timing,
)
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


@pytest.mark.parametrize("attempts", [150, pytest.param(stress.times(30_000), marks=pytest.mark.stress)])
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


class Asking(FakeDevice):
    """It asks for memory on the callback, and does with the answers what a test says."""

    def __call__(self, offer):
        self.callback = Channel.from_fd(os.dup(offer.callback.fileno()))
        return super().__call__(offer)

    def close(self):
        self.callback.close()
        super().close()


@pytest.fixture
def askers(closing, memory):
    """Two devices of one client, each with a burst that has a slot 0."""
    found = []
    for _ in range(2):
        device = closing(Asking())
        client = closing(Controller(device))
        pool = memory()
        client.encode(Request((), (RequestArgument(length=4),), (pool,)))
        found.append((device, client, pool))
    return found


def handed_over(device, slots=(0,)):
    with contextlib.closing(device.callback.call(["get_memories", list(slots)], timeout=20)) as answer:
        return answer.body[0], len(answer.fds)


def test_a_device_that_does_not_read_what_it_asked_for_holds_no_other_one(askers):
    """Its callback ends when there is no room for an answer; the thread that serves all devices goes on."""
    (deaf, *_), (other, *_) = askers
    deaf.callback.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with contextlib.suppress(PeerDied):
        while True:
            deaf.callback.send(["get_memories", [0] * 72])
            assert handed_over(other) == (0, 1)
    assert handed_over(other) == (0, 1)


def test_a_descriptor_that_takes_long_to_close_holds_no_other_device(askers):
    """Sent with a question, where none belongs, it ends the callback; the thread that serves all devices goes on."""
    (slow, *_), (other, *_) = askers
    with contextlib.closing(SlowToClose()) as descriptor:
        slow.callback.send(["get_memories", [0]], [descriptor.fileno()])
        descriptor.leave()
        assert handed_over(other) == (0, 1)
        with pytest.raises(PeerDied):
            slow.callback.receive(20)


def test_memory_is_handed_over_without_the_lock_of_python(askers):
    """While a thread of the client holds the global lock, its device gets the memory that it asks for."""
    device, *_ = askers[0]
    libc = ctypes.PyDLL(None)  # its calls keep the lock
    device.callback.send(["get_memories", [0]])
    entry = (ctypes.c_int * 2)(device.callback.fileno(), select.POLLIN)
    assert libc.poll(entry, 1, 20_000) == 1  # nothing of Python has run since the question
    with contextlib.closing(device.callback.receive(20)) as answer:
        assert (answer.body[0], len(answer.fds)) == (0, 1)


def test_memory_under_a_number_that_something_else_got(askers):
    """A pool that its owner closes is not handed over, and neither is what gets its descriptor's number."""
    device, _, pool = askers[0]
    fd = pool.fd
    pool.close()
    assert handed_over(device) == (4, 0)
    other = Memory.create(4096)
    os.dup2(other.fd, fd)
    try:
        assert handed_over(device) == (4, 0)
    finally:
        os.close(fd)
