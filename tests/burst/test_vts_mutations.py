"""What Android's conformance suite (VTS) does to bursts: requests with an element removed, added or replaced, sent as
they are to a device that executes an ADD; and what it asks of results, of validation and of free_memory.
"""

import numpy as np
import pytest

from burst import ErrorStatus, Memory, Request, RequestArgument
from burst.datum import DATUM
from burst.wire import RequestPacket, decode_result, encode_request
from driver.devices.reference import ReferenceDevice
from driver.nn import ModelBuilder
from driver.request import BoundRequest

NO_SLOT = 2**31 - 1


def elements(*rows):
    return [bytes.fromhex(row).ljust(DATUM, b"\0") for row in rows]


BAD = elements(
    "00000000 0a000000 0a000000 0a000000 0a000000",  # packetInformation: 10, 10, 10, 10
    "01000000 00000000 00000000 00000000 00000000 0a000000",  # input with 10 dimensions
    "02000000 00000000",  # input dimension 0
    "03000000 00000000 00000000 00000000 00000000 0a000000",  # output with 10 dimensions
    "04000000 00000000",  # output dimension 0
    "05000000 ffffff7f",  # a slot that stands for nothing
    "06000000 01000000",  # measureTiming YES
)
DIMENSIONS = (2, 4)


@pytest.fixture(scope="module")
def bind():
    """Binds requests to a model of one ADD of two float32 tensors of 2 x 3."""
    builder = ModelBuilder()
    one, other = (builder.input("float32", (2, 3)) for _ in range(2))
    builder.output(builder.operation("ADD", one, other, 0))
    model = builder.build()
    prepared = ReferenceDevice().prepare(model, lambda: None)
    return lambda request: BoundRequest(model, prepared, request)


class Adding:
    """A burst on that model, with a request whose arguments lie in two pools and say their dimensions."""

    def __init__(self, client, pools):
        self.client, self.pools = client, pools
        one, other = (RequestArgument(pool=n, length=24, dimensions=(2, 3)) for n in (0, 1))
        self.request = Request((one, other), (RequestArgument(False, 0, 24, 24, (2, 3)),), tuple(pools))
        self.packet = client.encode(self.request, measure=True)
        self.elements = [self.packet[n : n + DATUM] for n in range(0, len(self.packet), DATUM)]
        assert NO_SLOT not in client._slots._memories

    def check(self):
        """The valid request is executed, with the right result and its timing."""
        arrays = [pool.asarray(np.float32, (2, 3)) for pool in self.pools]
        arrays[0][:], arrays[1][:] = np.random.default_rng(1).random((2, 2, 3))
        output = self.pools[0].asarray(np.float32, (2, 3), 24)
        output[:] = 0
        result = self.client.send(self.packet)
        assert result.status is ErrorStatus.NONE
        assert None not in result.timing
        assert np.array_equal(output, arrays[0] + arrays[1])

    def refuses(self, mutant):
        """One result comes: a failure, without shapes and without times. The output stays as it was."""
        output = self.pools[0].asarray(np.float32, (2, 3), 24)
        output[:] = 7
        for packet in (mutant, fitted(mutant)):
            result = self.client.send(b"".join(packet), timeout=20)
            assert result.status is not ErrorStatus.NONE
            assert (result.output_shapes, result.timing) == ((), (None, None), 0)
        assert (output == 7).all()
        return True


def fitted(mutant):
    """The mutant with the packetSize that it has, which the suite does not do: so that more than the size is wrong."""
    if not mutant:
        return mutant
    first = mutant[0]
    return [first[:4] + len(mutant).to_bytes(4, "little") + first[8:], *mutant[1:]]


@pytest.fixture(params=["here", "service"])
def adding(request, host, service, burst, bind, closing):
    """The device in this process, and in another."""
    configure = host(bind) if request.param == "here" else service(bind)[1]
    return Adding(burst(configure), [closing(Memory.create(4096)) for _ in range(2)])


def test_the_request_has_every_kind_of_element(adding):
    """So that each kind is removed and replaced below, and the request as it is succeeds."""
    assert {element[0] for element in adding.elements} == {element[0] for element in BAD}
    adding.check()


def test_removed(adding):
    """VTS 1: without any one of its elements a request fails."""
    for n in range(len(adding.elements)):
        assert adding.refuses(adding.elements[:n] + adding.elements[n + 1 :]), n
        adding.check()


def test_added(adding):
    """VTS 2: with a bad element added anywhere a request fails."""
    for n in range(len(adding.elements) + 1):
        for bad in BAD:
            assert adding.refuses([*adding.elements[:n], bad, *adding.elements[n:]]), (n, bad)
        adding.check()


def test_replaced(adding):
    """VTS 3: with any one element replaced by a bad one a request fails. A dimension 0 in the place of another is
    legal, and means what the model says.
    """
    for n, element in enumerate(adding.elements):
        for bad in BAD:
            if bad != element and not (bad[0] == element[0] and bad[0] in DIMENSIONS):
                assert adding.refuses([*adding.elements[:n], bad, *adding.elements[n + 1 :]]), (n, bad)
        adding.check()


def test_a_slot_that_stands_for_nothing(adding):
    """VTS 3: a slot that the client never gave out is well-formed, and fails when its memory is asked for."""
    slots = [n for n, element in enumerate(adding.elements) if element[0] == BAD[5][0]]
    for n in slots:
        packet = b"".join([*adding.elements[:n], BAD[5], *adding.elements[n + 1 :]])
        assert adding.client.send(packet).status is ErrorStatus.INVALID_ARGUMENT
        assert adding.client.asked[-1][-1] == NO_SLOT
        adding.check()


def test_sanitised(adding):
    """VTS 5: the padding of every operandInformation in a result is zero, and so is all other padding."""
    adding.check()
    raw = adding.client._exchange(adding.packet)
    found = [raw[n : n + DATUM] for n in range(0, len(raw), DATUM)]
    assert [element[0] for element in found] == [0, 1, 2, 2, 3]
    padding = {0: [*range(1, 8), *range(20, 24)], 1: [*range(1, 8), *range(9, 12), *range(16, 24)]}
    padding |= {2: [*range(1, 8), *range(12, 24)], 3: [*range(1, 8)]}
    assert not any(element[at] for element in found for at in padding[element[0]])
    assert None not in decode_result(raw, 1).timing


@pytest.mark.parametrize("measure", [True, False])
def test_dropped_arguments(adding, measure):
    """VTS 6: without any one of its inputs or its output a request is exactly an INVALID_ARGUMENT."""
    inputs, outputs, pools = adding.request
    drops = [(inputs[:n] + inputs[n + 1 :], outputs) for n in range(len(inputs))] + [(inputs, ())]
    for request in drops:
        packet = adding.client.encode(Request(*request, pools), measure=measure)
        assert adding.client.send(packet) == (ErrorStatus.INVALID_ARGUMENT, (), (None, None), 0)
        adding.check()


def test_free_memory(adding):
    """VTS 7: freeing memory in use, memory that is unknown, and the same memory again, neither crashes nor hangs."""
    adding.check()
    adding.client.free_memory(adding.pools[0])
    adding.client._context.send(["free_memory", 0])
    adding.client._context.send(["free_memory", NO_SLOT])
    adding.client.free_memory(adding.pools[0])
    adding.packet = adding.client.encode(adding.request, measure=True)
    adding.check()


def test_a_request_for_nothing(adding):
    """A well-formed request without arguments and pools does not fit the model: INVALID_ARGUMENT."""
    packet = encode_request(RequestPacket((), (), (), True), 1)
    assert adding.client.send(packet) == (ErrorStatus.INVALID_ARGUMENT, (), (None, None), 0)
