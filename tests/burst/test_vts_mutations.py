"""What Android's conformance suite (VTS) does to bursts: requests with an element removed, added or replaced, sent as
they are to a device that executes an ADD; and what it asks of results, of validation and of free_memory. In version 2 a
packet is as long as it says, so a mutant that was made longer is several packets, and each of them is refused.
"""

import numpy as np
import pytest

from burst import ErrorStatus, Memory, Request, RequestArgument
from burst._core import lib
from burst.controller import Packet
from burst.datum import DATUM
from burst.wire import VERSIONS, decode_result
from driver.devices.reference import ReferenceDevice
from driver.engine.binding import BoundRequest
from driver.interface import Preparation
from driver.nn import ModelBuilder

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
BAD_2 = BAD + elements(
    "07000000 07000000",  # token 7
    "08000000 00000000 0a000000",  # loopTimeout 10 ns
    "09000000 00000000 07000000 00000000 0a000000",  # id 7, and a deadline long ago
)
MAY_STAY_LEGAL = (2, 4, 8)  # a dimension, or a loop timeout, in the place of another


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


@pytest.fixture(scope="module")
def bind():
    """Binds requests to a model of one ADD of two float32 tensors of 2 x 3."""
    builder = ModelBuilder()
    one, other = (builder.input("float32", (2, 3)) for _ in range(2))
    builder.output(builder.operation("ADD", one, other, 0))
    model = builder.build()
    prepared = ReferenceDevice().prepare(model, Preparation())
    return lambda request: BoundRequest(model, prepared, request)


class Adding:
    """A burst on that model, with a request whose arguments lie in two pools and say their dimensions."""

    def __init__(self, client, pools):
        self.client, self.pools, self.version = client, pools, client.version
        self.bad = BAD if self.version == 1 else BAD_2
        one, other = (RequestArgument(pool=n, length=24, dimensions=(2, 3)) for n in (0, 1))
        self.request = Request((one, other), (RequestArgument(False, 0, 24, 24, (2, 3)),), tuple(pools))
        packet = bytes(self.encode(self.request))
        self.elements = [packet[n : n + DATUM] for n in range(0, len(packet), DATUM)]

    def encode(self, request, measure=True):
        return self.client.encode(request, measure=measure)

    def free_memory(self, slot):
        """A slot, in words of the protocol."""
        self.client._context.send(["free_memory", slot])

    def execute(self, packet):
        """The result of one that is as long as it says."""
        return self.client.send(packet, timeout=20) if isinstance(packet, Packet) else self.send(packet)[0]

    def send(self, raw):
        """All results of that packet, and of no other."""
        return [self.client.send_raw(raw, measure=True, timeout=20)]

    def raw_result(self):
        """The bytes of a result that succeeded, with its times."""
        packet = self.encode(self.request)
        lib.burst_send(self.client._caller, packet.data, packet.nbytes)
        return bytes(self.client._reader.read(5, 20))

    def output(self):
        return self.pools[0].asarray(np.float32, (2, 3), 24)

    def check(self):
        """The valid request is executed, with the right result and its timing."""
        arrays = [pool.asarray(np.float32, (2, 3)) for pool in self.pools]
        arrays[0][:], arrays[1][:] = np.random.default_rng(1).random((2, 2, 3))
        self.output()[:] = 0
        result = self.execute(self.encode(self.request))
        assert result.status is ErrorStatus.NONE
        assert None not in result.timing
        assert np.array_equal(self.output(), arrays[0] + arrays[1])

    def refuses(self, mutant):
        """At least one result comes: failures, without shapes and without times. The output stays as it was."""
        self.output()[:] = 7
        for packet in (mutant, fitted(mutant)):
            results = self.send(b"".join(packet))
            assert results
            for result in results:
                assert result.status is not ErrorStatus.NONE
                assert (result.output_shapes, result.timing) == ((), (None, None))
        assert (self.output() == 7).all()
        return True


class Adding2(Adding):
    """The same with a client that sends raw packets of version 2 and matches results by their ids."""

    def free_memory(self, slot):
        self.client.context.send(["free_memory", slot])

    def execute(self, packet):
        self.client.send(packet)
        (result,) = self.client.results(self.client.number)
        return result

    def send(self, raw):
        return self.client.outcome(raw)

    def raw_result(self):
        self.client.send(self.encode(self.request))
        return self.client.exchange()


def fitted(mutant):
    """The mutant with the packetSize that it has, which the suite does not do: so that more than the size is wrong."""
    if not mutant:
        return mutant
    first = mutant[0]
    return [first[:4] + len(mutant).to_bytes(4, "little") + first[8:], *mutant[1:]]


@pytest.fixture(params=["here", "service"])
def adding(request, host, service, burst, lender, bind, closing, wire):
    """The device in this process, and in another."""
    configure = host(bind) if request.param == "here" else service(bind)[1]
    pools = [closing(Memory.create(4096)) for _ in range(2)]
    return Adding(burst(configure), pools) if wire == 1 else Adding2(lender(configure), pools)


def test_the_request_has_every_kind_of_element(adding):
    """So that each kind is removed and replaced below, but for the token, and the request as it is succeeds."""
    assert {element[0] for element in adding.elements} == {element[0] for element in adding.bad} - {7}
    adding.check()


def test_removed(adding):
    """VTS 1: without any one of its elements a request fails."""
    for n in range(len(adding.elements)):
        assert adding.refuses(adding.elements[:n] + adding.elements[n + 1 :]), n
        adding.check()


def test_added(adding):
    """VTS 2: with a bad element added anywhere a request fails. In version 2 what is added behind a request that says
    its length is another packet, and fails alone.
    """
    end = len(adding.elements)
    for n in range(end + 1):
        for bad in adding.bad:
            mutant = [*adding.elements[:n], bad, *adding.elements[n:]]
            if n < end or adding.version == 1:
                assert adding.refuses(mutant), (n, bad)
            else:
                first, second = adding.send(b"".join(mutant))
                assert (first.status, second.status) == (ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE)
                assert adding.send(b"".join(fitted(mutant)))[0].status is not ErrorStatus.NONE
        adding.check()


def test_replaced(adding):
    """VTS 3: with any one element replaced by a bad one a request fails. A dimension 0 in the place of another is
    legal, and means what the model says; a loop timeout in the place of another is, too.
    """
    for n, element in enumerate(adding.elements):
        for bad in adding.bad:
            if bad != element and not (bad[0] == element[0] and bad[0] in MAY_STAY_LEGAL):
                assert adding.refuses([*adding.elements[:n], bad, *adding.elements[n + 1 :]]), (n, bad)
        adding.check()


def test_a_slot_that_stands_for_nothing(adding):
    """VTS 3: a slot that the client never gave out is well-formed, and fails when its memory is asked for."""
    slots = [n for n, element in enumerate(adding.elements) if element[0] == BAD[5][0]]
    for n in slots:
        (result,) = adding.send(b"".join([*adding.elements[:n], BAD[5], *adding.elements[n + 1 :]]))
        assert result.status is ErrorStatus.INVALID_ARGUMENT
        assert adding.client.asked[-1][-1] == NO_SLOT
        adding.check()


def test_sanitised(adding):
    """VTS 5: the padding of every operandInformation in a result is zero, and so is all other padding."""
    adding.check()
    raw = adding.raw_result()
    found = [raw[n : n + DATUM] for n in range(0, len(raw), DATUM)]
    assert [element[0] for element in found] == [0, 1, 2, 2, 3, 4][: 4 + adding.version]
    padding = {0: [*range(1, 8), *range(20, 24)], 1: [*range(1, 8), *range(9, 12), *range(16, 24)]}
    padding |= {2: [*range(1, 8), *range(12, 24)], 3: [*range(1, 8)], 4: [*range(1, 8), *range(16, 24)]}
    assert not any(element[at] for element in found for at in padding[element[0]])
    assert None not in decode_result(raw, adding.version).timing


@pytest.mark.parametrize("measure", [True, False])
def test_dropped_arguments(adding, measure):
    """VTS 6: without any one of its inputs or its output a request is exactly an INVALID_ARGUMENT."""
    inputs, outputs, pools, _ = adding.request
    drops = [(inputs[:n] + inputs[n + 1 :], outputs) for n in range(len(inputs))] + [(inputs, ())]
    for request in drops:
        result = adding.execute(adding.encode(Request(*request, pools), measure))
        assert result[:3] == (ErrorStatus.INVALID_ARGUMENT, (), (None, None))
        adding.check()


def test_free_memory(adding):
    """VTS 7: freeing memory in use, memory that is unknown, and the same memory again, neither crashes nor hangs."""
    adding.check()
    adding.client.free_memory(adding.pools[0])
    adding.free_memory(0)
    adding.free_memory(NO_SLOT)
    adding.client.free_memory(adding.pools[0])
    adding.check()


def test_a_request_for_nothing(adding):
    """A well-formed request without arguments and pools does not fit the model: INVALID_ARGUMENT."""
    result = adding.execute(adding.encode(Request((), (), ())))
    assert result[:3] == (ErrorStatus.INVALID_ARGUMENT, (), (None, None))
