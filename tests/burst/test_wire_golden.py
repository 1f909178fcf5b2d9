"""Wire versions 1 and 2, byte for byte: packets written by hand from the table, and everything that is near to them."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from burst import wire
from burst.datum import DATUM, FmqRequestDatum, FmqResultDatum
from burst.messages import ErrorStatus

sys.path.insert(0, str(Path(__file__).parent))

import wire_packets
from wire_packets import BAD_ELEMENTS, GOLDEN, accepted, elements

# The payload bytes of each kind that are not padding and may hold more than 0 and 1; of a bool, only its lowest bit is.
PAYLOAD = {
    "request": {
        0: range(4, 20),
        1: range(8, 24),
        2: range(4, 8),
        3: range(8, 24),
        4: range(4, 8),
        5: range(4, 8),
        6: range(4, 8),
        7: range(4, 8),
        8: range(8, 16),
        9: range(8, 24),
    },
    "result": {0: range(8, 20), 1: range(12, 16), 2: range(8, 12), 3: range(8, 24), 4: range(8, 16)},
}
BOOLS = {("request", 1): 4, ("request", 3): 4, ("result", 1): 8}
LAST_KIND = {("request", 1): 6, ("request", 2): 9, ("result", 1): 3, ("result", 2): 4}
POOL_KINDS = {5, 7}

# A golden packet, and where a bad element is as legal: the kind that stood there and the kind that is put there.
MUTANTS = [
    pytest.param(wire_packets.REQUEST_1, {(2, 2), (4, 4), (5, 5), (6, 6)}, id="request1"),
    pytest.param(wire_packets.REQUEST_2, {(2, 2), (4, 4), (5, 5), (7, 5), (6, 6), (8, 8)}, id="request2"),
    pytest.param(wire_packets.RESULT_1, {(2, 2), (3, 3)}, id="result1"),
    pytest.param(wire_packets.RESULT_2, {(2, 2), (3, 3), (4, 4)}, id="result2"),
    pytest.param(wire_packets.INSUFFICIENT_1, {(2, 2)}, id="insufficient1"),
    pytest.param(wire_packets.INSUFFICIENT_2, {(2, 2), (4, 4)}, id="insufficient2"),
    pytest.param(wire_packets.FAILED_1, set(), id="failed1"),
    pytest.param(wire_packets.FAILED_2, {(4, 4)}, id="failed2"),
]
each_mutant = pytest.mark.parametrize(("golden", "legal"), MUTANTS)


def resized(direction, mutant):
    """The mutant with the packetSize that fits it, so that it gets past the first check."""
    at, size = direction.size_at, len(mutant).to_bytes(4, "little")
    return [mutant[0][:at] + size + mutant[0][at + 4 :], *mutant[1:]] if mutant else mutant


def refused_at_any_size(direction, mutant):
    return not any(accepted(direction, b"".join(packet)) for packet in (mutant, resized(direction, mutant)))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: f"{golden.direction}-{len(golden.elements)}")
def test_golden_bytes(golden):
    """Both directions agree with bytes written by hand from the layout."""
    assert golden.direction.encode(golden.packet) == golden.data
    decoded = golden.direction.decode(golden.data)
    assert decoded == golden.packet
    assert type(decoded) is type(golden.packet)
    assert [type(slot) for slot in getattr(decoded, "slots", ())] == [
        type(slot) for slot in getattr(golden.packet, "slots", ())
    ]


@pytest.mark.parametrize(("table", "kind"), [(FmqRequestDatum, "request"), (FmqResultDatum, "result")])
def test_every_kind_is_covered(table, kind):
    """No kind of element can be added without golden bytes, a map of its payload and a bad element."""
    numbers = {datum.number for datum in table}
    assert len(numbers) == len(list(table))
    ours = [golden for golden in GOLDEN if golden.direction.kind == kind]
    assert numbers == {element[0] for golden in ours for element in golden.elements}
    assert numbers == set(PAYLOAD[kind]) == {element[0] for element in BAD_ELEMENTS[kind]}
    for version in wire.VERSIONS:
        last = max(e[0] for golden in ours if golden.direction.version == version for e in golden.elements)
        assert last == LAST_KIND[kind, version]


def test_every_status_has_golden_bytes():
    """All nine in version 2; the five of HAL 1.2 in version 1."""
    assert set(wire_packets.STATUSES_2) == set(ErrorStatus)
    assert set(wire_packets.STATUSES_1) == {status for status in ErrorStatus if status <= ErrorStatus.INVALID_ARGUMENT}


@each_mutant
def test_removed_element(golden, legal):
    """Without any one of its elements a packet is refused, even if packetSize is made to fit."""
    good = golden.elements
    for position in range(len(good)):
        assert refused_at_any_size(golden.direction, good[:position] + good[position + 1 :]), position


@each_mutant
def test_added_element(golden, legal):
    """With any element too many, anywhere, a packet is refused, even if packetSize is made to fit."""
    good = golden.elements
    for position in range(len(good) + 1):
        for element in [*BAD_ELEMENTS[golden.direction.kind], *good]:
            mutant = [*good[:position], element, *good[position:]]
            assert refused_at_any_size(golden.direction, mutant), (position, element)


@each_mutant
def test_replaced_element(golden, legal):
    """With any one element replaced a packet is refused, unless that only changes a value to another legal one."""
    good = golden.elements
    for position, original in enumerate(good):
        for element in BAD_ELEMENTS[golden.direction.kind]:
            packet = b"".join([*good[:position], element, *good[position + 1 :]])
            only_a_value = (original[0], element[0]) in legal
            assert accepted(golden.direction, packet) == only_a_value, (position, element)


@each_mutant
def test_swapped_elements(golden, legal):
    """Two neighbours of different kinds in the wrong order are refused; only pools may stand in any order."""
    good = golden.elements
    for position, (one, two) in enumerate(pairwise(good)):
        if one[0] != two[0]:
            packet = b"".join([*good[:position], two, one, *good[position + 2 :]])
            assert accepted(golden.direction, packet) == ({one[0], two[0]} == POOL_KINDS), position


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: f"{golden.direction}-{len(golden.elements)}")
def test_every_flipped_bit(golden):
    """A single bit that is not payload makes the packet refused. Of payload, it is refused, or decodes to what encodes
    to exactly the flipped bytes."""
    kind = golden.direction.kind
    for byte in range(len(golden.data)):
        number, at = golden.elements[byte // DATUM][0], byte % DATUM
        for bit in range(8):
            flipped = golden.data[:byte] + bytes([golden.data[byte] ^ 1 << bit]) + golden.data[byte + 1 :]
            is_payload = at in PAYLOAD[kind][number] or (BOOLS.get((kind, number)) == at and bit == 0)
            # A discriminator that flips into another kind with the same layout: 5 and 7, the two kinds of pool.
            is_payload |= golden.direction.version > 1 and at == 0 and bit == 1 and number in POOL_KINDS
            assert not accepted(golden.direction, flipped) or is_payload, (byte, bit)


@pytest.mark.parametrize(
    "flips",
    [
        pytest.param((wire_packets.REQUEST_2, 8, 4, b"\1"), id="token"),
        pytest.param((wire_packets.REQUEST_2, 10, 8, b"\0"), id="loop timeout"),
        pytest.param((wire_packets.REQUEST_2, 11, 8, b"\xff"), id="id"),
        pytest.param((wire_packets.REQUEST_2, 11, 16, bytes(8)), id="deadline"),
        pytest.param((wire_packets.REQUEST_2, 8, 0, b"\5\0\0\0\1\0\0\0"), id="slot for token"),
        pytest.param((wire_packets.RESULT_2, 6, 8, bytes(8)), id="id of a result"),
        pytest.param((wire_packets.RESULT_2, 5, 8, bytes(8)), id="time"),
    ],
)
def test_values_that_may_differ(flips):
    """So that refusing is not all that the decoders can do: other values are accepted, and stay as they came."""
    golden, element, offset, data = flips
    changed = wire_packets.patched(golden, element, offset, data)
    assert changed != golden.data
    assert accepted(golden.direction, changed)
    assert golden.direction.decode(changed) != golden.packet


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: f"{golden.direction}-{len(golden.elements)}")
def test_versions_do_not_understand_each_other(golden):
    """A packet of one version is refused by the decoder of the other: what was negotiated is what is spoken."""
    other = golden.direction._replace(version=3 - golden.direction.version)
    assert not accepted(other, golden.data)


@pytest.mark.parametrize(
    "golden",
    [
        wire_packets.REQUEST_1,
        wire_packets.NOTHING_1,
        wire_packets.RESULT_1,
        wire_packets.INSUFFICIENT_1,
        wire_packets.FAILED_1,
    ],
)
def test_version_1_has_no_elements_of_version_2(golden):
    """Discriminators 7, 8 and 9 of requests, and 4 of results, are refused wherever they stand, alone or at the end."""
    kind, good = golden.direction.kind, golden.elements
    legal_in_2 = {"request": wire_packets.REQUEST_2, "result": wire_packets.RESULT_2}[kind].elements
    new = [element for element in legal_in_2 if element[0] > LAST_KIND[kind, 1]]
    assert {element[0] for element in new} == ({7, 8, 9} if kind == "request" else {4})
    for element in new:
        for position in range(len(good)):
            replaced = [*good[:position], element, *good[position + 1 :]]
            assert refused_at_any_size(golden.direction, replaced), (position, element)
            assert refused_at_any_size(golden.direction, [*good[: position + 1], element, *good[position + 1 :]])
    assert refused_at_any_size(golden.direction, [*good, *new])


@pytest.mark.parametrize("status", [status for status in ErrorStatus if status > ErrorStatus.INVALID_ARGUMENT])
def test_statuses_of_hal_1_3_become_general_failure(status):
    """Version 1 has no word for the statuses of HAL 1.3; they arrive as GENERAL_FAILURE, as the HAL does it."""
    packet = wire.ResultPacket(status, (), wire_packets.NO_TIMING)
    assert wire_packets.RESULTS[1].encode(packet) == wire_packets.FAILED_1.data
    two = elements(wire_packets.STATUS_ROWS[2][status].replace("03000000", "02000000", 1), wire_packets.NO_TIMES)
    assert not accepted(wire_packets.RESULTS[1], b"".join(two))
