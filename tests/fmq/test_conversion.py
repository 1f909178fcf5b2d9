"""What `write` converts, and what it refuses because the cast would change it."""

import asyncio
import datetime as dt

import numpy as np
import pytest

import fmq

PAIR = [("a", "u1"), ("b", "f4")]
NESTED = [("pixels", "u1", (2,)), ("name", [("text", "U2"), ("number", "i2")])]
INF, NAN = np.inf, np.nan

REFUSED = [
    ([300], "u1"),
    ([-1], "u1"),
    (-1, "u1"),
    (np.int64(300), "u1"),
    (np.array([[1, 2], [3, 256]]), "u1"),
    (np.array([128], "u1"), "i1"),
    (np.array([1, 2, 70000])[::2], "i2"),
    ([1.9], "u1"),
    (np.array([0.5], "f4"), "i8"),
    (np.array([2147483648.0], "f4"), "i4"),
    ([2.0**63], "i8"),
    ([2.0**64], "u8"),
    ([NAN], "i4"),
    ([INF], "u1"),
    ([NAN], "?"),
    ([2], "?"),
    ([1e300], "f4"),
    ([-1e5], "f2"),
    ([2**53 + 1], "f8"),
    ([2**64 - 1], "f8"),
    ([2**24 + 1], "f4"),
    ([2**70], "u8"),
    ([1 + 2j], "f4"),
    ([1 + 2j], "i4"),
    ([1e300j], "c8"),
    (["abc"], "U2"),
    ([b"abc"], "S2"),
    (["\xe9"], "S2"),
    (["x"], "u1"),
    ([None], "u1"),
    (np.array([1, 300], object), "u1"),
    ([dt.datetime(2026, 1, 1, 7)], "M8[D]"),
    (np.array([1500], "m8[ms]"), "m8[s]"),
    ([(300, 1)], PAIR),
    ([(1.9, 1)], PAIR),
    ([(1, 1e300)], PAIR),
    ([1, 2], PAIR),
    ([np.arange(2)], PAIR),
    (np.zeros(2), PAIR),
    (np.zeros(2, [("b", "f4"), ("a", "u1")]), PAIR),
    ([np.zeros(2, [("b", "f4"), ("a", "u1")])[0]], PAIR),
    (np.array([(300, 1)], [("a", "i4"), ("b", "f4")]), PAIR),
    ([([1, 256], ("ab", 1))], NESTED),
    ([([1, 2], ("abc", 1))], NESTED),
    ([([1, 2], ("ab", 2**15))], NESTED),
]

TAKEN = [
    ([0, 255], "u1"),
    (7, "u1"),
    (np.array([[1, 2], [3, 4]]), "u1"),
    (np.arange(6).reshape(2, 3).T, "f4"),
    (np.array([1, 258], ">i2"), "<i2"),
    ([3.0, -0.0], "i2"),
    ([True, False], "f4"),
    ([0, 1.0], "?"),
    ([NAN, INF, -INF], "f4"),
    ([2**24, -(2**24)], "f4"),
    ([2**63], "f8"),
    (np.array([1], object), "u1"),
    ([1.5, 2j], "c8"),
    (["ab", "c"], "S2"),
    ([b"ab"], "U2"),
    (bytearray(b"abc"), "u1"),
    ([dt.date(2026, 1, 1)], "M8[D]"),
    (np.array(["2026-01-01", "NaT"], "M8[ns]"), "M8[D]"),
    ([(1, 2), (3, 4)], PAIR),
    ((1, 2), PAIR),
    (np.array([(1, 2)], [("a", "i8"), ("b", "f8")]), PAIR),
    ([([1, 2], ("ab", 1))], NESTED),
    ([], "u1"),
    ([], PAIR),
]


@pytest.fixture(scope="module")
def ends():
    """A writer and a reader of a queue of that type."""

    def pair(dtype):
        queue = fmq.MessageQueue.create(dtype, 16)
        return queue.writer(), queue.reader()

    return pair


@pytest.mark.parametrize(("elements", "dtype"), REFUSED)
def test_what_would_change_is_refused(ends, elements, dtype):
    """`write`, `try_write` and a span raise ValueError, and nothing is written."""
    writer, reader = ends(dtype)
    for write in (writer.write, writer.try_write):
        with pytest.raises(ValueError, match=r"^elements"):
            write(elements)
    with pytest.raises(ValueError, match=r"^elements"), writer.reserve(1) as span:
        span[:] = elements
    assert reader.try_read(1) is None


@pytest.mark.parametrize(("elements", "dtype"), TAKEN)
def test_what_stays_the_same_is_taken(ends, elements, dtype):
    """The reader gets the same values in C order, as numpy itself converts them."""
    writer, reader = ends(dtype)
    expected = np.asarray(elements, dtype).reshape(-1)
    for write in (writer.write, writer.try_write):
        write(elements)
        np.testing.assert_array_equal(reader.read(expected.size), expected)


def test_a_float_becomes_the_nearest(ends):
    """0.1 has no exact value in either type; what is read is what numpy rounds it to."""
    writer, reader = ends("f4")
    writer.write([0.1, 1e-300])
    assert reader.read(2).tolist() == [float(np.float32(0.1)), 0.0]


def test_the_error_names_the_element_and_what_to_do(ends):
    """Its index, its value, what it would have become, and the type that could hold it."""
    writer, _ = ends("u1")
    with pytest.raises(ValueError, match=r"elements\[1, 0\]: 300 would be 44 in this queue of uint8.*queue of int64"):
        writer.write([[1, 2], [300, 4]])


async def _written(writer, elements):
    await writer.write_async(elements)


def test_a_coroutine_refuses_it_too(ends):
    """`write_async` raises the same error."""
    writer, reader = ends("u1")
    with pytest.raises(ValueError, match="would be 44"):
        asyncio.run(_written(writer, [300]))
    asyncio.run(_written(writer, np.array([30])))
    assert reader.read(1).tolist() == [30]


def test_nothing_between_fields_is_sent(ends):
    """The bytes between the fields of converted records are zeros, and not what lay in this process's memory."""
    padded = np.dtype([("a", "u1"), ("b", "i8")], align=True)
    writer, reader = ends(padded)
    writer.write([(1, 2)] * 16)
    assert not reader.read(16).view("u1").reshape(16, 16)[:, 1:8].any()
