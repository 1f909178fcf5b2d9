"""A device that lies after `hello`: to calls, on the callback, and in results. The client gets an error."""

import ctypes
import errno
import os
import random
import signal
import socket
from ctypes import byref, c_uint64, c_void_p

import msgpack
import pytest
from libburst_by_ctypes import FOREVER, Adder, Options, adder, checked, handle_of, why
from lying_device import LyingDevice
from waiting import until
from wire_packets import GOLDEN, RESULTS, random_packet

from burst.messages import NO_TIMING, ErrorStatus
from burst.wire import ResultPacket, encode_result

pytestmark = pytest.mark.integration
GOOD = ResultPacket(ErrorStatus.NONE, (), NO_TIMING)


@pytest.fixture
def liar(place):
    """liar(**answers): the device, at a socket in `place`."""
    made = []

    def make(**answers):
        made.append(LyingDevice(f"{place}/liar{len(made)}.sock", **answers))
        return made[-1]

    yield make
    for device in made:
        device.close()


class Victim(Adder):
    """A burst on such a device, as far as it comes. `result`: of the last step."""

    def __init__(self, library, path):
        self.library, self.n = library, 4
        self.client = handle_of(library, "burst_connect_path", path.encode())
        self.model, self.compiled, self.controller = adder(library), c_void_p(), c_void_p()
        self.result = library.burst_prepare(self.client, self.model, c_uint64(FOREVER), byref(self.compiled))
        if self.result == 0:
            options = Options(size=ctypes.sizeof(Options), depth=4)
            self.result = library.burst_open(self.compiled, byref(options), byref(self.controller))
        if self.result == 0:
            self.pool, self.values = self.new_pool()
            self.request = self.new_request(self.pool)


def test_a_forked_child_does_not_keep_the_connection(library, liar):
    """The device sees that its client leaves, although a child of it lives, which has copies of all descriptors."""
    device = liar()
    client = handle_of(library, "burst_connect_path", device.path.encode())
    if not (child := os.fork()):
        signal.pause()
    try:
        checked(library, library.burst_disconnect(client))
        assert device.is_left.wait(20)
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


LIES = {
    "prepare": [None, [], [0], [0, "one"], [0, [1]], [9, "x"], [4], [4, 5], [0, -(2**63)]],
    "burst": [None, [], [0], [0, 3], [0, 0], [0, "2"], [0, 2], [2, "no"]],  # [0, 2] comes without a life page
}


@pytest.mark.parametrize(("method", "answer"), [(name, lie) for name in LIES for lie in LIES[name]], ids=str)
def test_calls_that_are_answered_with_lies(library, liar, method, answer):
    """A status, or -EBADMSG or -EPIPE with a reason."""
    device = liar(**{method: answer})
    victim = Victim(library, device.path)
    if (method, answer) == ("prepare", [0, -(2**63)]):
        assert victim.result == 0  # a number is the device's own matter
    else:
        assert victim.result in {-errno.EBADMSG, -errno.EPIPE, 2, 4}
        assert why(library)
    for close, handle in [("compiled_free", victim.compiled), ("close", victim.controller)]:
        assert getattr(library, f"burst_{close}")(handle) in {0, -errno.EINVAL}
    checked(library, library.burst_disconnect(victim.client))
    checked(library, library.burst_builder_free(victim.model))


QUESTIONS = [
    b"",
    b"\xc1",
    msgpack.packb(["get_memories"]),
    msgpack.packb(["get_memories", list(range(73))]),
    msgpack.packb(["get_memories", ["0"]]),
    msgpack.packb(["give_memories", [0]]),
    msgpack.packb([["get_memories", [0]]]),
    b"\x92\xacget_memories\xdd\xff\xff\xff\xff",
]


@pytest.mark.parametrize("question", QUESTIONS, ids=range(len(QUESTIONS)))
def test_questions_that_are_none(library, liar, question):
    """The callback ends, and no memory was handed over."""
    device = liar()
    victim = Victim(library, device.path)
    assert victim.result == 0
    device.callback.send(question)
    raw, fds, *_ = socket.recv_fds(device.callback, 65536, 72)
    assert (raw, fds) == (b"", [])
    checked(library, library.burst_close(victim.controller))
    checked(library, library.burst_disconnect(victim.client))


def test_a_slot_that_was_freed_is_refused(library, liar):
    """Memory goes out while a request names it, and never again afterwards."""
    device = liar()
    victim = Victim(library, device.path)
    ask = msgpack.packb(["get_memories", [0]])
    device.callback.send(ask)
    raw, fds, *_ = socket.recv_fds(device.callback, 65536, 72)
    assert (msgpack.unpackb(raw), len(fds)) == ([0, [["ashmem", 48, True]]], 1)
    os.close(fds[0])
    checked(library, library.burst_request_free(victim.request))
    device.callback.send(ask)
    raw, fds, *_ = socket.recv_fds(device.callback, 65536, 72)
    assert (msgpack.unpackb(raw)[0], fds) == (4, [])
    checked(library, library.burst_close(victim.controller))


@pytest.mark.parametrize("answer", [bytes(24), b"\xff" * 48, encode_result(GOOD._replace(id=7), 2)], ids=range(3))
def test_results_that_are_none(library, liar, answer):
    """-EBADMSG or -EPROTO, and the burst is of no more use."""
    device = liar()
    victim = Victim(library, device.path)
    assert victim.submit()[0] == 0
    device.answer(answer)
    assert victim.wait()[0] in {-errno.EBADMSG, -errno.EPROTO}
    assert victim.run() == victim.submit()[0] == victim.wait()[0]
    checked(library, library.burst_close(victim.controller))


def test_noise_in_results(library, liar):
    """Damaged results, one for each of two hundred requests: refused, or an outcome whose shapes can be asked for."""
    rng, refused = random.Random(5), 0
    good = [golden.data for golden in GOLDEN if golden.direction == RESULTS[2]]
    good += [RESULTS[2].encode(random_packet(rng, RESULTS[2])) for _ in range(20)]
    device = liar()
    victim = Victim(library, device.path)
    options = Options(size=ctypes.sizeof(Options), depth=4)
    sent = 0
    for _ in range(200):
        assert victim.submit()[0] == 0
        sent += 1
        packet = bytearray(rng.choice(good))
        packet[-16:-8] = sent.to_bytes(8, "little")
        for _ in range(rng.randrange(3)):
            packet[rng.randrange(len(packet) - 24)] = rng.choice([0, 1, 2, 255, rng.randrange(256)])
        device.answer(packet)
        result, outcome = victim.wait()
        if result >= 0:
            assert result == outcome.status <= 8
            assert all(library.burst_output_shape(victim.controller, i, None, 0) >= 0 for i in range(outcome.n_shapes))
            continue
        assert result in {-errno.EBADMSG, -errno.EPROTO}
        refused += 1
        checked(library, library.burst_close(victim.controller))
        checked(library, library.burst_request_free(victim.request))
        checked(library, library.burst_open(victim.compiled, byref(options), byref(victim.controller)))
        victim.request, sent = victim.new_request(victim.pool), 0
    assert 10 < refused < 190
    until(lambda: victim.count()["in_flight"] == 0)
    checked(library, library.burst_close(victim.controller))
