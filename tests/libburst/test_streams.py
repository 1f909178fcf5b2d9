"""Results in a stream from libburst: an execution that the device repeats on what it leaves there."""

import contextlib
import ctypes
import errno
import threading
from ctypes import POINTER, byref, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

import numpy as np
import pytest
from libburst_by_ctypes import FOREVER, Outcome, Tensor, checked, handle_of, why
from waiting import PATIENCE

import driver
from driver.protocol.model_codec import encode

pytestmark = pytest.mark.integration

SETS = 4


class Feedback(ctypes.Structure):
    _fields_ = (("output", c_uint32), ("input", c_uint32))


class StreamOptions(ctypes.Structure):
    _fields_ = (
        *((name, c_uint32) for name in ("size", "most", "sets", "n_values")),
        *(("until", c_int64), ("values", POINTER(c_int64)), ("room", c_uint32), ("shapes", POINTER(c_uint32))),
    )


def counter(size=1):
    """value = step + 1, and that once more, and whether it is at least the limit."""
    builder = driver.ModelBuilder()
    step, limit = builder.input("float32", (size,)), builder.input("float32", (1,))
    value = builder.operation("ADD", step, np.ones(1, np.float32), 0)
    builder.output(value)
    builder.output(builder.operation("MUL", value, np.ones(1, np.float32), 0))
    builder.output(builder.operation("GREATER_EQUAL", value, limit))
    return builder.build()


class Counter:
    """Pools for step and limit, and for so many sets of value and done; how a stream is opened, and read."""

    def __init__(self, library):
        self.library, encoded = library, encode(counter())
        self.client = handle_of(library, "burst_connect", b"reference")
        where = [c_uint64(part) for part in encoded.where]
        words = self.client, encoded.fd, *where, c_uint64(FOREVER)
        self.compiled = handle_of(library, "burst_prepare_encoded", *words)
        self.pool, base = c_void_p(), c_void_p()
        nbytes = 8 + 8 * SETS
        checked(library, library.burst_pool_new(c_size_t(nbytes), byref(self.pool), byref(base)))
        memory = (ctypes.c_char * nbytes).from_address(base.value)
        self.inputs = np.frombuffer(memory, np.float32, 2)
        self.values = np.frombuffer(memory, np.float32, 2 * SETS, 8).reshape(SETS, 2)
        self.done = np.frombuffer(memory, np.uint8, 8 * SETS, 8).reshape(SETS, 8)[:, 4]
        self.stream = None

    def open(self, limit=1e9, sets=SETS, feedback=((0, 0),), until=2, deadline=FOREVER, **how):
        """The result of burst_stream_open."""
        self.inputs[:] = 0, limit
        inputs = [Tensor(self.pool, 4 * n, 4, 0, None) for n in range(2)]
        outputs = []
        for n in range(sets):
            outputs += [Tensor(None, 0, 0, 0, None)]
            outputs += [Tensor(self.pool, 8 + 8 * n, 4, 0, None), Tensor(self.pool, 12 + 8 * n, 1, 0, None)]
        pairs = (Feedback * len(feedback))(*(Feedback(*pair) for pair in feedback))
        options = StreamOptions(size=ctypes.sizeof(StreamOptions), sets=sets, until=until, **how)
        self.stream = c_void_p()
        sides = 2, (Tensor * 2)(*inputs), 3, (Tensor * len(outputs))(*outputs), len(pairs), pairs
        given = byref(options), c_uint64(deadline), byref(self.stream)
        return self.library.burst_stream_open(self.compiled, *sides, *given)

    def next(self, deadline=FOREVER):
        """The result of burst_stream_next, the value in its set, and whether another one follows."""
        outcome, where, more = Outcome(), c_uint32(), c_int()
        told = c_uint64(deadline), byref(outcome), byref(where), byref(more)
        result = self.library.burst_stream_next(self.stream, *told)
        return result, int(self.values[where.value, 0]), more.value

    def numbers(self):
        """All values, to the end."""
        found, more = [], 1
        while more:
            result, value, more = self.next()
            checked(self.library, result)
            found.append(value)
        return found

    def close(self):
        if self.stream:
            checked(self.library, self.library.burst_stream_close(self.stream))


@pytest.fixture
def counting(library, device):
    with contextlib.closing(Counter(library)) as made:
        yield made


@pytest.mark.parametrize("sets", [2, 4])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 23])
def test_a_count(counting, most, sets):
    """So many results, each from the one before it; then there is none."""
    checked(counting.library, counting.open(most=most, until=-1, sets=sets))
    assert counting.numbers() == list(range(1, most + 1))
    assert counting.next()[0] == -errno.ENOMSG


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_an_output_that_is_true(counting, limit):
    """The step that makes it true is the last one."""
    checked(counting.library, counting.open(limit))
    assert counting.numbers() == list(range(1, limit + 1))


def test_values_and_shapes(counting):
    """An output that has one of some values; shapes are told as burst_execute tells them."""
    words = (c_uint32 * 6)()
    values = (c_int64 * 2)(-9, 1)
    how = {"until": 2, "n_values": 2, "values": values, "room": 6, "shapes": words}
    checked(counting.library, counting.open(3, **how))
    assert counting.numbers() == [1, 2, 3]
    assert list(words) == [1, 1, 1] * 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"sets": 3}, "3 sets of outputs; an even number from 2 to 64"),
        ({"most": 2**20 + 1}, "at most 1048576"),
        ({"feedback": ((3, 0),)}, "feedback 0: output 3 of 3"),
        ({"feedback": ((0, 2),)}, "input 2 of 2"),
        ({"feedback": ((0, 0), (0, 1))}, "feedback 1: that output or input is in another one"),
        ({"feedback": ()}, "output 0: one that is fed back has no pool, and others have one"),
        ({"until": 0}, "output 0 does not end a stream"),
        ({"n_values": 65}, "65 values"),
        ({"room": 1}, "NULL where room"),
    ],
)
def test_bad_input(counting, asked, said):
    """It is refused by its name, and nothing is sent."""
    assert counting.open(**asked) == -errno.EINVAL
    assert said in why(counting.library)
    counting.stream = None


def test_types_that_do_not_fit(counting):
    """The device says so, and there is no stream."""
    assert counting.open(feedback=((0, 1),)) == 0 or "contradict" in why(counting.library)


def test_a_deadline(counting):
    """One of a call is missed without an end of the stream; a device waits for who does not read."""
    checked(counting.library, counting.open(most=2**20, until=-1))
    assert [counting.next()[1] for _ in range(3)] == [1, 2, 3]
    checked(counting.library, counting.library.burst_stream_close(counting.stream))
    assert counting.next()[0] == -errno.EBADF
    counting.stream = None


def test_one_that_is_closed_while_a_thread_waits(counting, library):
    """The thread gets -ECANCELED."""
    checked(library, counting.open(most=2**20, until=-1))
    ended = []

    def take():
        while (result := counting.next()[0]) == 0:
            pass
        ended.append(result)

    thread = threading.Thread(target=take)
    thread.start()
    stream, counting.stream = counting.stream, counting.stream
    checked(library, library.burst_stream_close(stream))
    thread.join(PATIENCE)
    assert ended[0] in {-errno.ECANCELED, -errno.EBADF}
    counting.stream = None


def test_a_death(counting, device, library):
    """A stream ends with its device: -EPIPE."""
    checked(library, counting.open(most=2**20, until=-1))
    assert counting.next()[0] == 0
    device["engine"].signal(9)
    while (result := counting.next()[0]) == 0:
        pass
    assert result == -errno.EPIPE
