"""reserve and peek: elements in place, one or two spans, kept or dropped as a whole."""

import contextlib

import numpy as np
import pytest
from fmq_peers import must_raise

import fmq


def advance(w, r, n):
    w.write(np.zeros(n))
    r.read(n)


def test_a_span_is_visible_at_its_end_and_at_once(pair):
    """Nothing of a reservation is seen while its block runs, all of it afterwards."""
    w, r = pair()
    with w.reserve(3) as span:
        span[:] = [1, 2, 3]
        assert r.available == 0
    assert list(r.read(3)) == [1, 2, 3]


def test_a_block_that_raises_leaves_nothing(pair):
    """An exception passes through, what was reserved is dropped, what was peeked stays; both ends stay usable."""
    w, r = pair()

    def fail_in(transaction):
        with transaction as span:
            span.first[:] = 1 / 0

    must_raise(ZeroDivisionError, fail_in, w.reserve(3))
    assert r.available == 0
    w.write([5, 6])
    must_raise(ZeroDivisionError, fail_in, r.peek(2))
    assert list(r.read(2)) == [5, 6]


def test_spans_split_at_the_wrap_point(pair):
    """The two parts' lengths add up, and lie where the ring ends and begins, for every offset."""
    w, r = pair("u4", 8)
    for offset in range(16):
        with w.reserve(8) as span:
            assert len(span.first) == 8 - offset % 8
            assert len(span.first) + len(span.second) == len(span) == 8
            span[:] = np.arange(8) + offset
        with r.peek(8) as span:
            assert list(np.array(span)) == list(range(offset, offset + 8))
            assert list(np.concatenate((span.first, span.second))) == list(range(offset, offset + 8))
        advance(w, r, 1)


def test_a_span_is_in_the_ring_itself(pair):
    """Zero copy: what the reader's span shows is the memory that the writer's span filled."""
    w, r = pair()
    with w.reserve(2) as span:
        span[:] = [1, 2]
        written = np.asarray(span.first)  # a plain view, which nothing can take back
    with r.peek(2) as span:
        written[0] = 9
        assert list(span.first) == [9, 2]


USES = {
    "read": lambda a: a[0],
    "write": lambda a: a.__setitem__(0, 1),
    "assign": lambda a: a.__setitem__(slice(None), 1),
    "fill": lambda a: a.fill(1),
    "iterate": list,
    "add": lambda a: a + 1,
    "add in place": lambda a: a.__iadd__(1),
    "as output": lambda a: np.add(np.uint8(1), np.uint8(2), out=a),
    "reduce": lambda a: a.sum(),
    "function": np.mean,
    "print as a list": lambda a: a.tolist(),
    "bytes": lambda a: a.tobytes(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(
    "part", [lambda a: a, lambda a: a[1:], lambda a: a.reshape(2, 2)[0]], ids=["", "slice", "view"]
)
@pytest.mark.parametrize("ends", ["commit", "error"])
def test_a_span_cannot_be_used_after_its_block(pair, ends, part, use):
    """Its memory is the other side's: every use of its arrays, or of views of them, raises; nothing is written."""
    w, r = pair()
    with contextlib.suppress(ZeroDivisionError), w.reserve(4) as span:
        span[:] = [1, 2, 3, 4]
        kept = part(span.first)
        use(part(span.first))  # is allowed here
        span[:] = [1, 2, 3, 4]
        if ends == "error":
            _ = 1 / 0
    with pytest.raises((fmq.Closed, ValueError), match=r"committed or left|read-only"):
        use(kept)
    if ends == "commit":
        assert list(r.read(4)) == [1, 2, 3, 4]


def test_copies_of_a_span_live_on(pair):
    """What was copied or calculated from a span is the caller's."""
    w, _ = pair("f4")
    with w.reserve(3) as span:
        span[:] = [1, 2, 3]
        kept = [span.first.copy(), span.first.astype("f8"), span.first * 1, np.array(span), span.first[[0, 1, 2]]]
        total = span.first.sum()
    assert total == 6
    assert [list(copy + 0) for copy in kept] == [[1, 2, 3]] * 5


def test_assignment_broadcasts_to_the_whole_length(pair):
    """span[:] takes a scalar or values of its length, and nothing else."""
    w, r = pair("f4", 4)
    advance(w, r, 3)
    with w.reserve(4) as span:
        span[:] = 2.5
    assert list(r.read(4)) == [2.5] * 4
    with pytest.raises(ValueError, match="broadcast"), w.reserve(4) as span:
        span[:] = [1, 2, 3]
    with pytest.raises(IndexError, match=r"\.first"), w.reserve(4) as span:
        span[0:2] = 1
    assert r.available == 0


def test_a_span_converts_to_a_copy_only(pair):
    """np.array(span) is in order and private; a view of two parts cannot be had and says so."""
    w, r = pair("u1", 4)
    advance(w, r, 3)
    w.write([1, 2, 3])
    with r.peek(3) as span:
        assert np.array(span, dtype="f8").tolist() == [1, 2, 3]
        with pytest.raises(ValueError, match="copy=False"):
            np.asarray(span, copy=False)


def test_an_element_of_a_span(pair):
    """span[i] counts over both parts, and iteration yields each; what is no element is an IndexError."""
    w, r = pair("u1", 4)
    advance(w, r, 3)
    w.write([1, 2, 3])
    with r.peek(3) as span:
        assert (len(span.first), len(span.second)) == (1, 2)
        assert (span[0], span[1], span[2], span[-1], span[-3], list(span)) == (1, 2, 3, 3, 1, [1, 2, 3])
        for wrong in (3, -4, slice(None), "x"):
            with pytest.raises(IndexError, match=r"span\["):
                span[wrong]


def test_reservations_beyond_the_capacity_are_mistakes(pair):
    """As with read and write, more than the capacity is a ValueError and moves nothing."""
    w, r = pair()
    for transaction in (w.reserve(17), r.peek(17)):
        with pytest.raises(ValueError, match="n=17"):
            transaction.__enter__()
    assert w.available == 16


def test_no_room_and_no_elements(pair):
    """A reservation that cannot be had now is a Timeout, and leaves no reservation behind."""
    w, r = pair()
    with pytest.raises(fmq.Timeout):
        r.peek(1, 0).__enter__()
    w.write(np.zeros(16))
    with pytest.raises(fmq.Timeout):
        w.reserve(1, 0).__enter__()
    r.read(16)
    w.write([1])


def test_nothing_but_commit_may_follow_a_reservation(pair):
    """Inside the block the same end is Busy: two open transactions would share their memory."""
    w, r = pair()
    w.write([1, 2, 3])
    with w.reserve(1), pytest.raises(fmq.Busy):
        w.write([5])
    with r.peek(1), pytest.raises(fmq.Busy):
        r.peek(1).__enter__()
    assert list(r.read(2)) == [2, 3]


def test_both_ends_may_hold_a_span_at_once(pair):
    """A reservation of the writer and one of the reader are disjoint and do not wait for each other."""
    w, r = pair(capacity=2)
    w.write([1])
    with w.reserve(1) as out, r.peek(1) as back:
        out[:] = 2
        assert list(back.first) == [1]
    assert list(r.read(1)) == [2]


def test_closing_inside_a_reservation_drops_it(pair):
    """The role is gone at once, so what was reserved may not be published by the end that lost it."""
    w, r = pair()
    with pytest.raises(fmq.Closed), w.reserve(2):
        w.close()
    assert r.available == 0
