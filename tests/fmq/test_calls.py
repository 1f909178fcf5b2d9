"""The calls that are made in C (csrc/fmq/python): what they take, what they refuse, and what they leave behind."""

import contextlib
import gc
import os
import signal
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from fmq_peers import SPACE_WAIT, asleep, control_word, echo, in_a_fork, must_raise, process, thread

import fmq
from fmq import _hot


def read_only(array):
    array.flags.writeable = False
    return array


# ---- read(out=) ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "<f4", "M8[s]", [("a", "i2"), ("b", "f8", (2,))], "S5", "?", "c16"])
def test_what_is_read_lies_in_the_array_that_was_given(pair, dtype):
    """`out` is returned itself, in any shape with n elements, and holds what was written, in every dtype."""
    w, r = pair(dtype, 16)
    given = np.zeros(6, w.dtype)
    given.view(np.uint8)[:] = np.arange(given.nbytes) % 2
    for shape in ((6,), (2, 3), (1, 6, 1)):
        w.write(given, 0)
        out = np.empty(shape, w.dtype)
        assert r.read(6, out=out) is out
        assert out.tobytes() == given.tobytes()
    w.write(given[:1], 0)
    nothing, one = np.empty((0, 3), w.dtype), np.empty((), w.dtype)
    assert r.read(0, 0, nothing) is nothing
    assert r.read(1, 0, one) is one
    assert one.tobytes() == given[:1].tobytes()


class Mine(np.ndarray):
    pass


def test_arrays_of_an_equal_dtype_and_of_a_subclass_are_taken(pair):
    """`out` need not have the very dtype object of the queue, and may be of a class that is made of ndarray."""
    w, r = pair([("a", "i2"), ("b", "i2")], 16)
    equal = np.dtype([("a", "i2"), ("b", "i2")])
    assert equal is not r.dtype
    w.write(np.array([(1, 2), (3, 4)], equal))
    out = np.empty(1, equal)
    assert r.read(1, out=out) is out
    assert out.tolist() == [(1, 2)]
    mine = np.empty(1, r.dtype).view(Mine)
    assert r.read(1, out=mine) is mine
    assert mine.tolist() == [(3, 4)]


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda: np.empty(2, "f4"), "out: its dtype is float32, the queue's int32"),
        (lambda: np.empty(2, ">i4"), "out: its dtype is >i4, the queue's int32"),
        (lambda: np.empty(3, "i4"), r"out: it has 3 elements, and n=2 are read; pass out\[:2\]"),
        (lambda: np.empty(1, "i4"), "out: it has 1 elements, and n=2"),
        (lambda: read_only(np.empty(2, "i4")), "out: it is read-only; pass one that may be written"),
        (lambda: np.empty(4, "i4")[::2], "out: it is not C-contiguous; read into one that is, and copy"),
        (lambda: [0, 0], r"out: a list is no numpy array; pass numpy.empty\(2, 'int32'\)"),
        (lambda: bytearray(8), "out: a bytearray is no numpy array"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(pair, out, words):
    """ValueError with what is wrong with it and what to do, nothing is taken, and `out` stays as it was."""
    w, r = pair("i4", 8)
    w.write([1, 2, 3])
    given = out()
    before = bytes(np.ascontiguousarray(given))
    with pytest.raises(ValueError, match=words):
        r.read(2, out=given)
    assert r.available == 3
    assert bytes(np.ascontiguousarray(given)) == before
    assert list(r.read(3, 0)) == [1, 2, 3]


def test_reading_into_an_array_allocates_none(pair):
    """A hundred reads into one array need no memory of the size of an array, and each without `out` does."""
    w, r = pair("u1", 65536)
    elements, out = np.ones(65536, "u1"), np.empty(65536, "u1")

    def peak(**how):
        tracemalloc.start()
        for _ in range(100):
            w.write(elements)
            r.read(65536, **how)
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    assert peak(out=out) < 8192
    assert peak() >= 65536


# ---- arguments -----------------------------------------------------------------------------------------------------


def test_arguments_are_taken_by_place_and_by_name(pair):
    """Both ways, and a mistake is a TypeError that names the argument."""
    w, r = pair()
    w.write(timeout=0, elements=[1, 2, 3])
    assert list(r.read(timeout=None, n=1)) == [1]
    with r.peek(timeout=0, n=np.int8(1)) as span:
        assert list(span.first) == [2]
    for call, word in (
        (r.read, "n: this argument is needed"),
        (lambda: r.read(1, 0, None, 2), "4 arguments: at most 3"),
        (lambda: r.read(1, n=1), "'n' is given twice"),
        (lambda: w.write([1], timeut=1), "'timeut' is no argument"),
        (lambda: r.read(1.5), "float"),
        (lambda: r.peek("x"), "str"),
        (lambda: r.read(1, "soon"), "str"),
    ):
        with pytest.raises(TypeError, match=word):
            call()
    assert list(r.read(1)) == [3]


def test_a_tuple_is_elements(pair):
    """What is written may be a tuple, of one element, of several or of none, for each call."""
    w, r = pair()
    for elements in ((), (5,), (1, 2, 3)):
        w.write(elements)
        w.write(elements, 0)
        assert w.try_write(elements)
        assert r.read(3 * len(elements), 0).tolist() == [*elements] * 3
    assert w.try_write((1,) * 16)
    assert not w.try_write((1,))


def test_huge_counts_are_mistakes(pair):
    """A count beyond every machine is beyond the capacity, too, and no memory is asked for."""
    w, r = pair()
    for call in (lambda: r.read(2**62), lambda: r.try_read(10**30), lambda: w.reserve(2**63).__enter__()):
        with pytest.raises(ValueError, match="capacity is 16"):
            call()


class Ends:
    """A number that closes an end when it is asked for its value."""

    def __init__(self, end):
        self.end = end

    def __index__(self):
        self.end.close()
        return 1

    def __float__(self):
        return float(self.__index__())

    def __ge__(self, other):
        return True


def test_an_argument_may_close_the_end(pair):
    """What runs while arguments are read may close the end: then the call is refused, and nothing crashes."""
    for call in (
        lambda r: r.read(Ends(r), 0),
        lambda r: r.read(1, Ends(r)),
        lambda r: r.try_read(Ends(r)),
        lambda r: r.peek(Ends(r), 0).__enter__(),
    ):
        w, r = pair()
        w.write([1])
        must_raise(fmq.Closed, call, r)


def test_what_was_never_made_is_refused():
    """The types of C alone have no end to call, and say so."""
    for call in (
        lambda: _hot.HotReader().read(1),
        lambda: _hot.HotReader().try_read(1),
        lambda: _hot.HotReader().peek(1),
        lambda: _hot.HotWriter().write([1]),
        lambda: _hot.HotWriter().try_write([1]),
        lambda: _hot.HotWriter().reserve(1),
        lambda: _hot.HotExchange().__call__(b""),
        lambda: _hot.HotExchange()._begin_hot(_hot.HotWriter(), _hot.HotReader(), 0),
        lambda: _hot.start(0, 0, 0),
    ):
        must_raise(ValueError, call)
    must_raise(TypeError, type(fmq.MessageQueue.create("u1", 1).writer().reserve(1)))


def test_an_end_begins_once(pair):
    """Neither an end nor an exchange can be given another one's memory later."""
    w, r = pair()
    exchange = fmq.Exchange(w, r)
    must_raise(ValueError, exchange._begin_hot, w, r, 0)
    must_raise(ValueError, w._begin_hot, 1, 1, None, w.dtype, 1, None)


# ---- subclasses ----------------------------------------------------------------------------------------------------


class Counting(fmq.MessageQueueReader):
    """A reader that a program has made its own."""

    count = 0

    def read(self, n, timeout=None, out=None):
        self.count += n
        return super().read(n, timeout, out)


def test_ends_can_be_subclassed(pair):
    """An overridden method reaches the one in C by super(), also from the asynchronous one."""
    with fmq.MessageQueue.create("u1", 8) as queue, queue.writer() as w, Counting(queue._place) as r:
        w.write([1, 2])
        assert r.read(1).tolist() == [1]
        assert r.read(n=1, out=np.empty(1, "u1")).tolist() == [2]
        assert r.count == 2


# ---- blocks --------------------------------------------------------------------------------------------------------


def test_a_block_is_entered_once_at_a_time(pair):
    """What `reserve` returns may be used again after its block, and not inside it; and it has to be entered."""
    w, r = pair()
    block = w.reserve(2, 0)
    must_raise(RuntimeError, lambda: block.__exit__(None, None, None))
    for value in (1, 2):
        with block as span:
            must_raise(RuntimeError, block.__enter__)
            span[:] = value
    assert list(r.read(4, 0)) == [1, 1, 2, 2]


def test_a_span_that_cannot_be_made_reserves_nothing(pair, monkeypatch):
    """When there is no memory for the span's arrays, the reservation is dropped, and the end works on."""
    w, r = pair()

    def fails(*_):
        raise MemoryError

    monkeypatch.setattr("fmq.end.Span", fails)
    must_raise(MemoryError, lambda: w.reserve(1).__enter__())
    w.write([1])
    must_raise(MemoryError, lambda: r.peek(1).__enter__())
    assert list(r.read(1)) == [1]


# ---- spans that are used again -------------------------------------------------------------------------------------


def block(w, r, use=lambda span: None):
    """Two elements through the queue, which is full with them; what `use` makes of the reader's span."""
    with w.reserve(2) as span:
        span[:] = 7
    with r.peek(2) as span:
        return use(span)


@pytest.mark.parametrize(
    "use",
    [lambda span: span, lambda span: span.first, lambda span: span.first[1:], lambda span: span.first.T],
    ids=["span", "first", "slice", "view"],
)
def test_what_a_program_keeps_of_a_span_is_over(pair, use):
    """A later block in the same place does not make it valid again; nothing of it is used a second time."""
    w, r = pair("u1", 2)
    block(w, r)
    kept = block(w, r, use)

    def look(span):
        part = use(span)
        assert part is not kept
        must_raise(fmq.Closed, lambda: np.add(getattr(kept, "first", kept), 1))
        assert (np.add(getattr(part, "first", part), 1) == 8).all()

    for _ in range(3):
        block(w, r, look)
    must_raise(fmq.Closed, lambda: np.add(getattr(kept, "first", kept), 1))


def peak_of(blocks, w, r):
    """Bytes that so many blocks have had allocated at once, and whatever other threads allocated meanwhile."""
    tracemalloc.start()
    for _ in range(blocks):
        block(w, r)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_spans_that_nothing_refers_to_are_used_again(pair):
    """Blocks in the same place need no new objects: a thousand of them leave no more memory at the peak than one."""
    w, r = pair("u1", 2)
    for _ in range(10):
        block(w, r)
    peak = min(peak_of(1000, w, r) for _ in range(5))
    first, again = block(w, r, lambda span: id(span.first)), block(w, r, lambda span: id(span.first))
    assert first == again or not getattr(sys, "_is_gil_enabled", lambda: True)()
    assert peak < 4096


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype) on a NumPy array:DeprecationWarning")  # NumPy 2.5
@pytest.mark.parametrize(
    "change",
    [
        lambda span: setattr(span.first, "shape", (2, 1)),
        lambda span: setattr(span.first, "dtype", "i1"),
        lambda span: setattr(span.first.flags, "writeable", False),
        lambda span: setattr(span, "first", np.zeros(2, "u1")),
        lambda span: setattr(span, "second", span.first),
    ],
    ids=["shape", "dtype", "flags", "first", "second"],
)
def test_what_a_program_changes_of_a_span_is_not_used_again(pair, change):
    """The next block in that place has arrays as they should be."""
    w, r = pair("u1", 2)

    def look(span):
        assert (span.first.shape, span.first.dtype, len(span.second)) == ((2,), np.uint8, 0)
        assert span.first.flags.writeable
        assert span.first.tolist() == [7, 7]

    with contextlib.suppress(AttributeError):
        block(w, r, lambda span: (change(span), None)[1])
    for _ in range(3):
        block(w, r, look)


def test_the_blocks_of_a_closed_end_are_garbage(pair):
    """Spans that an end keeps for later blocks do not keep the end."""

    def live():
        with fmq.MessageQueue.create("u1", 2) as queue:
            block(queue.writer(), queue.reader())

    def counts():
        live()
        gc.collect()
        return sum(isinstance(thing, _hot.HotEnd | fmq.span.SpanArray) for thing in gc.get_objects())

    assert counts() == counts()


# ---- what is left behind -------------------------------------------------------------------------------------------

ROUNDS = 100_000


def every_call(w, r, exchange):
    """One function for each way through C, good and bad."""
    one, out, listed = np.ones(1, "u1"), np.empty(1, "u1"), [1]

    def refused():
        w.write(one)
        for wrong in (np.empty(1, "i4"), listed):
            with contextlib.suppress(ValueError):
                r.read(1, out=wrong)
        r.read(1)

    def raising():
        for call in (lambda: r.read(1, 0), lambda: r.read(99), lambda: r.read(1, -1), lambda: w.write(one, "x")):
            with contextlib.suppress(fmq.Timeout, ValueError, TypeError):
                call()

    def blocks():
        with w.reserve(1) as span:
            span[:] = 1
        with contextlib.suppress(KeyError), r.peek(1):
            raise KeyError
        with r.peek(n=1):
            pass

    return {
        "read": lambda: (w.write(one), r.read(1)),
        "read into": lambda: (w.write(one, timeout=1.0), r.read(n=1, timeout=1, out=out)),
        "try": lambda: (w.try_write(one), r.try_read(1), r.try_read(1)),
        "list": lambda: (w.write(listed), r.read(1)),
        "exchange": lambda: exchange(b"1"),
        "refused": refused,
        "raising": raising,
        "blocks": blocks,
    }, (one, out, listed, r.dtype, w, r, b"1", 0.5)


@pytest.mark.integration
@pytest.mark.parametrize("what", ["read", "read into", "try", "list", "exchange", "refused", "raising", "blocks"])
def test_nothing_is_left_behind(pair, what):
    """After a hundred thousand calls, no object has one reference more, and the memory is what it was."""
    in_a_fork(lambda: nothing_is_left_behind(*pair(), what))  # no other thread runs there


def nothing_is_left_behind(w, r, what):
    calls, objects = every_call(w, r, fmq.Exchange(w, r, hold=1e-5))
    call, rounds = calls[what], ROUNDS if what in ("read", "read into", "try", "exchange") else ROUNDS // 20

    def some(count):
        for _ in range(count):
            call()
        gc.collect()
        return [sys.getrefcount(thing) for thing in objects]

    before = some(100)
    tracemalloc.start()
    some(2000)  # free lists are full
    held = tracemalloc.get_traced_memory()[0]
    after = some(rounds)
    grown = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    assert not [pair for pair in zip(before, after, strict=True) if pair[1] > pair[0]]  # others may let go of a dtype
    assert grown < 32768  # less than a word for each call


def test_ends_and_exchanges_are_garbage_after_their_last_use():
    """Also in a cycle with what they refer to: descriptors and roles are free again."""

    def live():
        queue = fmq.MessageQueue.create("u1", 8)
        w, r = queue.writer(), queue.reader()
        w.exchange = exchange = fmq.Exchange(w, r)  # a cycle
        r.block = r.peek(1)
        exchange(b"1")
        queue.close()

    def counts():
        live()
        gc.collect()
        return sum(isinstance(thing, _hot.HotEnd | _hot.HotExchange) for thing in gc.get_objects())

    assert counts() == counts()


# ---- threads and signals -------------------------------------------------------------------------------------------


def test_a_close_under_threads_that_hold_the_lock():
    """A close in one thread, while others call without a pause and keep the global lock: each ends with Closed."""
    for _ in range(30):
        with fmq.MessageQueue.create("u1", 64) as queue:
            w, r, begun = queue.writer(), queue.reader(), threading.Barrier(4)
            w.hold = r.hold = 1e-3
            out, one = np.empty(1, "u1"), np.ones(1, "u1")

            def calls(call, begun=begun):
                begun.wait(20)
                with contextlib.suppress(fmq.Closed):
                    while True:
                        with contextlib.suppress(fmq.Busy, fmq.Timeout):
                            call()

            with (
                thread(calls, lambda w=w, one=one: w.write(one, 1)),
                thread(calls, lambda r=r, out=out: r.read(1, 1, out)),
                thread(calls, lambda r=r: r.try_read(1)),
            ):
                begun.wait(20)
                r.close()
                w.close()
            assert queue.reader().peer == "released"


def test_a_second_thread_is_busy_and_its_out_stays_as_it_was(pair):
    """A read into an array beside a waiting one: Busy, nothing is written to it, and the first gets its element."""
    with fmq.MessageQueue.create("u1", 4) as queue, queue.writer() as w, queue.reader() as r:
        first, second = np.zeros(1, "u1"), np.zeros(1, "u1")
        with thread(lambda: r.read(1, 20, first)):
            asleep(control_word(queue, 384))
            must_raise(fmq.Busy, r.read, 1, 0, second)
            w.write([7])
        assert (first.tolist(), second.tolist()) == ([7], [0])


def test_ctrl_c_in_a_read_into_an_array(pair):
    """KeyboardInterrupt from inside, `out` and the queue stay as they were, and the next read works."""
    with fmq.MessageQueue.create("u1", 4) as queue, queue.writer() as w, queue.reader() as r:
        out = np.full(2, 5, "u1")

        def interrupt():
            asleep(control_word(queue, 384))
            w.write([1])
            asleep(control_word(queue, 384))
            signal.raise_signal(signal.SIGINT)

        with thread(interrupt), pytest.raises(KeyboardInterrupt):
            r.read(2, out=out)
        assert out.tolist() == [5, 5]
        w.write([2])
        assert r.read(2, out=out).tolist() == [1, 2]


def test_an_end_keeps_the_lock_as_long_as_it_is_told(pair):
    """With `hold`, a busy thread does not run between the wait and its end, at least once in many."""
    w, r = pair()
    for wrong in (-1, 0.1, float("nan")):
        with pytest.raises(ValueError, match=r"hold=.*seconds from 0 to 0\.001"):
            r.hold = wrong
    assert (r.hold, w.hold) == (0, 0)
    with fmq.MessageQueue.create("u4", 8) as there, fmq.MessageQueue.create("u4", 8) as back:
        count = 600
        with process(echo, there.descriptor, back.descriptor, count), there.writer() as w, back.reader() as r:
            runs, over, one, out = [0], threading.Event(), np.ones(1, "u4"), np.empty(1, "u4")

            def busy():
                while not over.is_set():
                    runs[0] += 1
                    os.sched_yield()

            def undisturbed(hold):
                r.hold, seen = hold, 0
                for _ in range(count // 2):
                    w.write(one)
                    before = runs[0]
                    r.read(1, 10, out)
                    seen += runs[0] == before
                return seen

            with thread(busy):
                held = undisturbed(1e-3)
                over.set()
            assert r.hold == 1e-3
            assert held
            undisturbed(0)


@pytest.mark.parametrize("hold_ns", [0, 10_000])
def test_there_and_back_by_a_write_and_a_read(hold_ns):
    """With an echo in another process, polling and sleeping: each element comes back in the array that was given."""
    with fmq.MessageQueue.create("u4", 8) as there, fmq.MessageQueue.create("u4", 8) as back:
        count = 2000
        with process(echo, there.descriptor, back.descriptor, count), there.writer() as w, back.reader() as r:
            r.hold = hold_ns / 1e9
            sent, got = np.empty(1, "u4"), np.empty(1, "u4")
            for i in range(count):
                r.spin = 0 if i % 4 == 0 else 1e-3
                sent[0] = i
                w.write(sent, 10)
                assert r.read(1, 10, got) is got
                assert got[0] == i


def test_a_writer_that_waits_is_woken_by_a_read_into_an_array():
    """The other direction: room that such a read makes wakes the writer."""
    with fmq.MessageQueue.create("u1", 2) as queue, queue.writer() as w, queue.reader() as r:
        w.write([1, 2])
        with thread(lambda: w.write(np.full(2, 3, "u1"), 20)):
            asleep(control_word(queue, SPACE_WAIT))
            assert r.read(2, out=np.empty(2, "u1")).tolist() == [1, 2]
        assert r.read(2).tolist() == [3, 3]
