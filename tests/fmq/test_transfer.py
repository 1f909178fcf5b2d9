"""Transfers in one process: all or nothing, in order, across the wrap point, for every plain dtype."""

import numpy as np
import pytest

import fmq


def test_read_when_empty(pair):
    """An empty queue has nothing to read: None, Timeout, and nothing changes."""
    w, r = pair()
    assert r.available == 0
    assert r.try_read(2) is None
    with pytest.raises(fmq.Timeout, match="timeout=0"):
        r.read(2, timeout=0)
    w.write([7])
    assert r.try_read(2) is None
    assert list(r.read(1)) == [7]


def test_every_slot_is_usable(pair):
    """Exactly the capacity fits, also when it is odd or one."""
    for capacity in (1, 2, 3, 2048, 2049):
        w, r = pair(capacity=capacity)
        assert w.capacity == r.capacity == capacity
        w.write(np.arange(capacity) % 251)
        assert np.array_equal(r.read(capacity), np.arange(capacity) % 251)


def test_more_than_capacity_is_a_mistake(pair):
    """More than the capacity can never succeed: no Timeout but a ValueError with the number, and nothing moves."""
    w, r = pair()
    w.write([1])
    for call in (
        lambda: w.write(np.zeros(17)),
        lambda: w.try_write(np.zeros(17)),
        lambda: r.read(17),
        lambda: r.try_read(17),
    ):
        with pytest.raises(ValueError, match=r"n=17.*16"):
            call()
    assert list(r.read(1)) == [1]


def test_wrong_counts_are_refused(pair):
    """A negative count names itself."""
    w, r = pair()
    for call in (lambda: r.read(-1), lambda: r.peek(-1).__enter__(), lambda: w.reserve(-1).__enter__()):
        with pytest.raises(ValueError, match="n=-1"):
            call()


def test_zero_elements_succeed_at_once(pair):
    """Nothing is always there, and there is always room for it: no wait, even without a timeout."""
    w, r = pair(capacity=1)
    w.write([1])
    w.write([])
    assert w.try_write([])
    with w.reserve(0) as span:
        assert len(span) == 0
    assert list(r.read(1)) == [1]
    assert len(r.read(0)) == 0
    with r.peek(0) as span:
        assert len(span) == 0


def test_wrap_around(pair):
    """A transfer of the whole capacity crosses the wrap point at every offset."""
    w, r = pair("u4", 7)
    for offset in range(20):
        w.write(np.arange(7) + offset)
        assert np.array_equal(r.read(7), np.arange(7) + offset)
        w.write([offset])
        assert list(r.read(1)) == [offset]


@pytest.mark.parametrize(
    "dtype",
    ["?", "i1", "u2", "<i4", ">i4", "i8", "f2", "f4", "f8", "c16", "S5", "U3", "V24", "M8[ns]",
     np.dtype([("seq", "u8"), ("data", "f4", (3,))]), np.dtype([("a", "u1"), ("b", "f8")], align=True)],
    ids=str,
)  # fmt: skip
def test_every_plain_dtype_crosses(pair, dtype):
    """Any element of a fixed size arrives with the bytes and the dtype that it had, through both ways of transfer."""
    dtype = np.dtype(dtype)
    source = np.frombuffer(bytes(i % 2 for i in range(5 * dtype.itemsize)), dtype)
    w, r = pair(dtype, 8)
    for _ in range(3):
        w.write(source)
        got = r.read(5)
        assert got.dtype == dtype
        assert got.tobytes() == source.tobytes()
        with w.reserve(5) as span:
            span[:] = source
        with r.peek(5) as span:
            assert np.array(span).tobytes() == source.tobytes()


@pytest.mark.parametrize(
    "dtype",
    ["O", [("a", "O")], "V0", [], "S", ("f4", (3,)), {"names": ["a", "b"], "formats": ["u4", "u2"], "offsets": [0, 2]}],
    ids=str,
)
def test_impossible_dtypes_are_refused(dtype):
    """Objects, nothing at all, and what another process could not be told exactly: refused when the queue is made."""
    with pytest.raises(ValueError, match="dtype"):
        fmq.MessageQueue.create(dtype, 8)


@pytest.mark.parametrize("capacity", [0, -1, 2**63, 2**64, 2**1000, 2**40 + 1, 1.5, None])
def test_impossible_capacities_are_refused(capacity):
    """A capacity that no memory can hold is an error that names it, never an overflow."""
    with pytest.raises(ValueError, match="capacity="):
        fmq.MessageQueue.create("u2", capacity)


def test_what_is_written_is_converted_as_numpy_would(pair):
    """Lists, scalars and other dtypes become elements; a matrix is taken in C order; a strided array is compacted."""
    w, r = pair("f4")
    w.write([1, 2])
    w.write(3)
    w.write(np.array([[4, 5], [6, 7]]).T)
    w.write(np.arange(8, 14)[::2])
    assert list(r.read(10)) == [1, 2, 3, 4, 6, 5, 7, 8, 10, 12]


def test_read_only_sources_are_fine(pair):
    """An array that may not be written can be sent."""
    w, r = pair()
    w.write(np.frombuffer(b"abc", np.uint8))
    assert r.read(3).tobytes() == b"abc"


def test_what_was_read_is_the_readers_own(pair):
    """The array from read is private: later traffic does not touch it."""
    w, r = pair(capacity=1)
    w.write([1])
    got = r.read(1)
    w.write([2])
    assert list(got) == [1]
    got[0] = 9
    assert list(r.read(1)) == [2]
