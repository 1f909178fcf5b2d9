"""Exchange, where it differs from a write and a read: what was sent when it fails."""

import pytest

import fmq
from fmq_peers import in_a_fork, thread


@pytest.fixture
def ends(pair):
    """(our writer, our reader, their writer, their reader) of a pair of queues of eight bytes."""
    (w, there), (back, r) = pair(capacity=8), pair(capacity=8)
    return w, r, back, there


def test_a_packet_that_does_not_fit_is_not_sent(ends):
    """BufferError, for one that is too large and for one that finds no room; the other side sees nothing of it."""
    w, r, back, there = ends
    call = fmq.Exchange(w, r)
    with pytest.raises(BufferError):
        call(b"123456789")
    w.write([0] * 6)
    with pytest.raises(BufferError):
        call(b"123")
    assert there.available == 6
    there.read(6)
    back.write([1])
    assert call(b"123") == b"\1"


def test_after_a_timeout_the_packet_is_out(ends):
    """Timeout says that the answer is late, not that the question was not asked, also with a deadline of 0."""
    w, r, back, there = ends
    call = fmq.Exchange(w, r)
    for deadline in (0, 1):
        with pytest.raises(fmq.Timeout):
            call(b"ab", deadline)
        assert there.read(2, 0).tobytes() == b"ab"
    back.write([7])
    assert call(b"") == b"\7"


def test_all_that_has_arrived_is_one_message(ends):
    """The answer is everything its writer published."""
    w, r, back, _ = ends
    back.write([1, 2, 3])
    assert fmq.Exchange(w, r)(b"") == b"\1\2\3"


def test_after_close_nothing_is_sent(ends):
    """Either end's close ends the exchange: Closed, and the ring stays as it was."""
    w, r, _, there = ends
    call = fmq.Exchange(w, r)
    w.close()
    with pytest.raises(fmq.Closed):
        call(b"a")
    assert there.available == 0


def test_a_closed_reader_sends_nothing_either(ends):
    """Nobody could take the answer."""
    w, r, _, there = ends
    call = fmq.Exchange(w, r)
    r.close()
    with pytest.raises(fmq.Closed):
        call(b"a")
    assert there.available == 0


def test_a_forked_child_cannot_use_the_parents_exchange(ends):
    """It is refused like the ends themselves, and the parent's queue stays as it was."""
    w, r, back, there = ends
    call = fmq.Exchange(w, r)
    in_a_fork(lambda: pytest.raises(fmq.Closed, call, b"a", 0))
    assert there.available == 0
    back.write([1])
    assert call(b"a") == b"\1"


def test_the_peers_close_ends_an_exchange(ends):
    """Closed, not silence."""
    w, r, back, there = ends
    with thread(lambda: pytest.raises(fmq.Closed, fmq.Exchange(w, r), b"a")):
        there.read(1, 10)
        back.close()
