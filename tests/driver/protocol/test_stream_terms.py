"""What opens a stream of results, as bytes: what `pack` writes, and nothing else, is read."""

import msgpack
import numpy as np
import pytest

from burst import Malformed
from driver.protocol.stream_terms import MOST_ROOM, MOST_STEPS, Stop, StreamTerms, unpack_terms
from fmq.clock import FOREVER

PLAIN = StreamTerms(number=7, end=FOREVER, most=100, room=4, stop=None, requests=(b"first", b"second", b"third"))
BODY = [7, FOREVER, 100, 4, None, [b"first", b"second"]]


@pytest.mark.parametrize("stop", [None, Stop(0), Stop(3, (2, -1, 2**40))])
def test_it_is_read_as_written(stop):
    """Each part, with and without what ends it."""
    terms = PLAIN._replace(stop=stop)
    assert unpack_terms(terms.pack()) == terms


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (1, -1),
        (2, 0),
        (2, MOST_STEPS + 1),
        (2, True),
        (3, 0),
        (3, MOST_ROOM + 1),
        (4, []),
        (4, [0, [2**63]]),
        (4, [-1, []]),
        (4, [0, [1.0]]),
        (4, [0, [True]]),
        (4, [0, [0] * 65]),
        (5, [b"one"]),
        (5, [b"x"] * (MOST_ROOM + 2)),
        (5, ["a", "b"]),
    ],
)
def test_what_is_refused(at, wrong):
    """Numbers that are out of bounds, and what is of another type."""
    body = [*BODY]
    body[at] = wrong
    raw = PLAIN.pack()[:10] + b"\xcf" + FOREVER.to_bytes(8) + msgpack.packb(body[2:])[1:]
    if at == 1:
        raw = raw[:10] + msgpack.packb(wrong) + raw[19:]
    with pytest.raises(Malformed):
        unpack_terms(raw)


def test_one_way_to_say_it():
    """A number that takes more bytes than it has to, and an end that takes fewer than nine."""
    raw = PLAIN.pack()
    assert unpack_terms(raw) == PLAIN
    longer = raw[:19] + b"\xcc\x64" + raw[20:]
    shorter = raw[:10] + b"\x07" + raw[19:]
    for wrong in (longer, shorter, raw + b"\xc0", raw[:-1]):
        with pytest.raises(Malformed):
            unpack_terms(wrong)


def test_a_stream_that_is_too_long():
    """Its requests do not fit into one message: that is said with what helps."""
    with pytest.raises(Malformed, match="open the burst with a smaller depth"):
        PLAIN._replace(requests=(b"x" * 40_000, b"y" * 40_000)).pack()


def test_the_order_of_requests():
    """The first one once, then the others in turn."""
    assert [PLAIN.request_of(step) for step in range(6)] == [b"first", *[b"second", b"third"] * 2, b"second"]


@pytest.mark.parametrize(
    ("stop", "found", "is_met"),
    [
        (Stop(0), [True, True], True),
        (Stop(0), [True, False], False),
        (Stop(0), [0.5], True),
        (Stop(0), [], False),
        (Stop(0, (2,)), [2, 2], True),
        (Stop(0, (2, 3)), [2, 3], True),
        (Stop(0, (2, 3)), [2, 4], False),
        (Stop(0, (2,)), [], False),
        (Stop(0, (2,)), [2.0], True),
    ],
)
def test_what_ends_a_stream(stop, found, is_met):
    """All elements count, and an output without elements ends nothing."""
    assert stop.is_met(np.array(found)) is is_met
