"""reserve and peek: elements in place, one or two spans, kept or dropped as a whole."""

import numpy as np
import pytest

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
    with pytest.raises(ZeroDivisionError), w.reserve(3) as span:
        span[:] = 1
        1 / 0  # noqa: B018
    assert r.available == 0
    w.write([5, 6])
    with pytest.raises(ZeroDivisionError), r.peek(2):
        1 / 0  # noqa: B018
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
        written = span.first
    with r.peek(2) as span:
        written[0] = 9
        assert list(span.first) == [9, 2]


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
    with w.reserve(1) as span, pytest.raises(fmq.Busy):
        span[:] = 4
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
    with pytest.raises(fmq.Closed), w.reserve(2) as span:
        span[:] = 1
        w.close()
    assert r.available == 0
