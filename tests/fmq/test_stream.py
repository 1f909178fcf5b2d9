"""The unsynchronized flavour: one writer that never waits, any number of readers, an exact account of what is lost."""

import contextlib
import multiprocessing
import os
import select
import signal

import numpy as np
import pytest
from fmq_peers import (
    DATA_WAIT,
    HEAD,
    asleep,
    collect,
    control_counter,
    control_word,
    in_a_fork,
    must_raise,
    process,
    sleeps,
    take,
    thread,
)
from waiting import until

import fmq

UNSYNCHRONIZED = fmq.Flavour.UNSYNCHRONIZED
CAPACITY = 8


@pytest.fixture
def queue():
    with fmq.MessageQueue.create("i8", CAPACITY, UNSYNCHRONIZED) as made:
        yield made


def test_every_reader_process_gets_every_element():
    """Three processes read the same thousand elements, each at its own pace."""
    queue = fmq.MessageQueue.create("i8", 1000, UNSYNCHRONIZED)
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(3)), strict=True)
    with contextlib.ExitStack() as stack:
        for pipe in theirs:
            stack.enter_context(process(collect, queue.descriptor, pipe, 1000))
        assert [pipe.recv() for pipe in ours] == ["here"] * 3
        with queue.writer() as w:
            for i in range(0, 1000, 125):
                w.write(np.arange(i, i + 125))
            assert [pipe.recv() for pipe in ours] == [list(range(1000))] * 3


def test_sleeping_reader_processes_are_all_woken_by_one_write(queue):
    """One wake is for everybody who sleeps."""
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(3)), strict=True)
    with contextlib.ExitStack() as stack:
        for pipe in theirs:
            stack.enter_context(process(collect, queue.descriptor, pipe, 2))
        assert [pipe.recv() for pipe in ours] == ["here"] * 3
        asleep(control_word(queue, DATA_WAIT))
        queue.writer().write([5, 6])
        assert [pipe.recv() for pipe in ours] == [[5, 6]] * 3


def test_a_new_reader_sees_only_what_is_written_after_it_came(queue):
    """History is not news; keep_latest fetches it for those who want it."""
    w = queue.writer()
    w.write([1, 2, 3])
    r = queue.reader()
    assert (r.available, r.position) == (0, 3)
    assert r.try_read(1) is None
    w.write([4])
    assert list(r.read(1)) == [4]


def test_keep_latest_goes_forwards_and_back(queue):
    """From there on exactly the n newest are unread, whether they were read before or skipped."""
    w, r = queue.writer(), queue.reader()
    w.write(np.arange(6))
    r.keep_latest(2)
    assert (r.available, r.position) == (2, 4)
    assert list(r.read(2)) == [4, 5]
    r.keep_latest(3)
    assert list(r.read(3)) == [3, 4, 5]
    r.keep_latest(0)
    assert r.available == 0


def test_keep_latest_beyond_history_keeps_what_there_is(queue):
    """Before the ring is full that is all of it; afterwards at most a ring."""
    w, r = queue.writer(), queue.reader()
    r.keep_latest(5)
    assert r.available == 0
    w.write(np.arange(3))
    for n in (4, CAPACITY, 10**6):
        r.keep_latest(n)
        assert list(r.read(3)) == [0, 1, 2]
    for i in range(3, 40):
        w.write([i])
    r.keep_latest(10**6)
    assert list(r.read(CAPACITY)) == list(range(32, 40))


def test_keep_latest_leaves_out_what_is_being_overwritten(queue):
    """While the writer has two places reserved, the two oldest elements are no longer whole."""
    w, r = queue.writer(), queue.reader()
    w.write(np.arange(CAPACITY))
    with w.reserve(2):
        r.keep_latest(CAPACITY)
        assert list(r.read(CAPACITY - 2)) == list(range(2, CAPACITY))


@pytest.mark.parametrize("n", [1, 3, CAPACITY])
def test_lost_and_read_are_what_was_written(queue, n):
    """Against a process that writes as fast as it can: every element is read in its place, or counted as lost."""
    total, seen, lost, overruns = 50_000, 0, 0, 0
    head = control_counter(queue, HEAD)
    with queue.reader() as r, process(write_fast, queue.descriptor, total):
        until(lambda: head[0] > 10 * CAPACITY)
        while r.position < total:
            expected = r.position
            block, overrun = read_or_overrun(r, min(n, total - expected))
            if overrun:
                assert overrun.position == r.position == expected + overrun.lost
                lost, overruns = lost + overrun.lost, overruns + 1
            assert np.array_equal(block, np.arange(expected, expected + len(block)))
            seen += len(block)
    assert overruns
    assert seen + lost == total


def read_or_overrun(r, n):
    try:
        return r.read(n, 20), None
    except fmq.Overrun as error:
        return [], error


def write_fast(descriptor, total):
    """Numbers, one by one and in blocks of up to the capacity."""
    with fmq.MessageQueue.open(descriptor).writer() as w:
        number = 0
        while number < total:
            block = min(number % CAPACITY + 1, total - number)
            w.write(np.arange(number, number + block))
            number += block


def test_an_overrun_goes_on_with_distance_from_the_writer(queue):
    """At half a ring, so that the reader is not overrun again at once; nothing was returned."""
    w, r = queue.writer(), queue.reader()
    w.write(np.arange(CAPACITY))
    w.write([CAPACITY])
    assert r.available == CAPACITY + 1
    with pytest.raises(fmq.Overrun) as told:
        r.read(1)
    assert (told.value.lost, told.value.position) == (5, 5)
    assert list(r.read(4)) == [5, 6, 7, 8]


def test_try_read_tells_an_overrun_too(queue):
    """None would mean: later."""
    w, r = queue.writer(), queue.reader()
    for i in range(CAPACITY + 1):
        w.write([i])
    with pytest.raises(fmq.Overrun):
        r.try_read(1)
    assert r.try_read(1) is not None


def test_an_overrun_while_looking_is_told_at_the_end_of_the_block(queue):
    """What was seen in place is to be thrown away; without an overrun the block ends well."""
    w, r = queue.writer(), queue.reader()
    w.write([0, 1, 2])
    with r.peek(3) as span:
        w.write(np.arange(3, CAPACITY))
        assert np.array(span).tolist() == [0, 1, 2]
    w.write(np.arange(CAPACITY, CAPACITY + 3))
    with pytest.raises(fmq.Overrun) as told, r.peek(2):
        w.write(np.arange(11, 16))
    assert told.value.position == r.position
    assert r.read(1)[0] == told.value.position


def test_a_reservation_overwrites_before_it_is_committed(queue):
    """Its places are the oldest elements' places: these are not returned from the moment of the reservation on."""
    w, r = queue.writer(), queue.reader()
    w.write(np.arange(CAPACITY))
    with w.reserve(2) as span:
        assert r.available == CAPACITY
        with pytest.raises(fmq.Overrun):
            r.read(CAPACITY)
        assert list(r.read(4)) == [4, 5, 6, 7]
        span[:] = [8, 9]
        assert r.available == 0
    assert list(r.read(2)) == [8, 9]


def test_a_writer_never_waits(queue):
    """A full ring, no reader, or a reader that does not read: the writer always has room for the capacity."""
    w = queue.writer()
    for _ in range(5):
        w.write(np.arange(CAPACITY))
        assert w.available == CAPACITY
        assert w.try_write([1])
    _idle = queue.reader()
    w.write(np.arange(CAPACITY))
    with w.reserve(CAPACITY) as span:
        span[:] = 1
    assert w.peer == "nobody"


def test_readers_go_on_with_the_writers_successor(queue):
    """What the dead writer left is read, then PeerDied, then the successor's elements at the next positions; Closed."""
    r = queue.reader()
    with process(write_and_die, queue.descriptor, fails=True) as child:
        assert list(r.read(3, 20)) == [1, 2, 3]
        with pytest.raises(fmq.PeerDied):
            r.read(1, 20)
        child.join()
    w = take(queue, "writer")
    assert (w.position, r.peer) == (3, "alive")
    with thread(lambda: w.write([4])):
        assert list(r.read(1, 20)) == [4]
    w.close()
    with pytest.raises(fmq.Closed):
        r.read(1, 20)


def write_and_die(descriptor):
    w = fmq.MessageQueue.open(descriptor).writer()
    w.write([1, 2, 3])
    with w.reserve(2):
        os.kill(os.getpid(), signal.SIGKILL)


def test_every_sleeping_reader_is_told_of_the_writers_death(queue):
    """The kernel wakes one of them, and that one the others, whatever each waits for."""
    readers = [queue.reader() for _ in range(4)]
    with process(write_when_told_and_die, queue.descriptor, fails=True) as child, contextlib.ExitStack() as stack:
        until(lambda: readers[0].peer == "alive")
        for call in (
            lambda: fmq.wait_any(readers[:1], 20),
            lambda: must_raise(fmq.PeerDied, readers[1].read, 1, 20),
            lambda: must_raise(fmq.PeerDied, readers[2].peek(1, 20).__enter__),
            lambda: must_raise(fmq.PeerDied, queue.event_flag.wait, 1, 20, [readers[3]]),
        ):
            sleeps(stack.enter_context(thread(call)))
        child.kill()


def write_when_told_and_die(descriptor):
    _writer = fmq.MessageQueue.open(descriptor).writer()
    signal.pause()


def test_close_ends_one_readers_wait_and_leaves_the_others_asleep(queue):
    """Closed for that one; the others go on sleeping until there is something to read."""
    first, second = queue.reader(), queue.reader()
    first.spin = second.spin = 0
    got = []
    with thread(lambda: got.append(second.read(1, 20)[0])) as other:
        with thread(lambda: must_raise(fmq.Closed, first.read, 1, 20)) as one:
            asleep(control_word(queue, DATA_WAIT))
            sleeps(one)
            sleeps(other)
            first.close()
        sleeps(other)
        assert not got
        queue.writer().write([7])
    assert got == [7]


def test_readers_that_come_and_go_do_not_disturb_a_sleeper(queue):
    """Two thousand of them, while one reader sleeps: it gets its element."""
    with queue.reader() as r, thread(lambda: r.read(1, 30)) as sleeper:
        asleep(control_word(queue, DATA_WAIT))
        for _ in range(2000):
            queue.reader().close()
            sleeps(sleeper)
        queue.writer().write([1])


def test_a_forked_copy_goes_on_by_itself(queue):
    """Parent and child each read all, also with a descriptor for select; a new writer cannot be had by forking."""
    w, r = queue.writer(), queue.reader()
    r.fileno()
    w.write([1, 2, 3])
    assert r.read(1)[0] == 1

    def child():
        assert list(r.read(2, 10)) == [2, 3]
        assert not select.select([r], [], [], 0)[0]
        must_raise(fmq.Closed, w.write, [4])

    in_a_fork(child)
    assert list(r.read(2, 0)) == [2, 3]


# ---- elements and arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 5])
@pytest.mark.parametrize(
    "dtype", ["?", "u1", "V3", "u2", "V7", "f8", "c16", "V24", [("a", "u1"), ("b", "<f8"), ("c", "u2", (3,))]], ids=str
)
def test_every_element_size_and_capacity(dtype, capacity):
    """Elements of odd sizes at odd slots arrive with their bytes, by copy and in place, across the wrap point."""
    queue = fmq.MessageQueue.create(dtype, capacity, UNSYNCHRONIZED)
    size, w, r = queue.dtype.itemsize, queue.writer(), queue.reader()
    for i in range(20):
        n = i % capacity + 1
        source = np.frombuffer(bytes((i + k) % 2 for k in range(n * size)), queue.dtype)
        w.write(source)
        assert r.read(n).tobytes() == source.tobytes()
        with w.reserve(n) as span:
            span[:] = source
        with r.peek(n) as span:
            assert np.array(span).tobytes() == source.tobytes()


def test_capacity_one_loses_all_but_the_last():
    """A ring of one element has no half: after an overrun the next element is the next one written."""
    queue = fmq.MessageQueue.create("i8", 1, UNSYNCHRONIZED)
    w, r = queue.writer(), queue.reader()
    w.write([1])
    w.write([2])
    with pytest.raises(fmq.Overrun) as told:
        r.read(1)
    assert (told.value.lost, told.value.position) == (2, 2)
    r.keep_latest(1)
    assert list(r.read(1)) == [2]


def test_wrong_arguments_name_themselves(queue):
    """Negative counts and more than the capacity; and a synchronized queue has no latest."""
    w, r = queue.writer(), queue.reader()
    for call in (
        lambda: r.read(-1),
        lambda: r.try_read(-1),
        lambda: r.keep_latest(-1),
        lambda: w.reserve(-1).__enter__(),
    ):
        with pytest.raises(ValueError, match="n=-1"):
            call()
    for call in (lambda: r.read(9), lambda: r.peek(9).__enter__(), lambda: w.write(np.zeros(9))):
        with pytest.raises(ValueError, match=r"n=9.*8"):
            call()
    synchronized = fmq.MessageQueue.create("i8", CAPACITY)
    with pytest.raises(ValueError, match="unsynchronized"):
        synchronized.reader().keep_latest(1)
    with pytest.raises(ValueError, match="synchronized"):
        fmq.Exchange(w, synchronized.reader())
    with pytest.raises(ValueError, match="read_only"):
        synchronized.descriptor.read_only()
