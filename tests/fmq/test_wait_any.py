"""wait_any: one thread sleeps for many ends, of whatever queues and roles, and misses no wake, death or close."""

import contextlib
import os
import signal

import numpy as np
import pytest
from fmq_peers import holder, must_raise, process, sleeps, take, thread, write_array
from waiting import at_least, until

import fmq

COUNTS = [1, 2, 64, 65, 200]


@pytest.fixture
def queues():
    """A function that makes n queues of four elements."""
    made = []

    def make(n=1, flavour=fmq.Flavour.SYNCHRONIZED):
        made.extend(new := [fmq.MessageQueue.create("i8", 4, flavour) for _ in range(n)])
        return new

    yield make
    for queue in made:
        queue.close()


@pytest.fixture
def ends(queues):
    """A function that makes n pairs of ends: writers, readers."""

    def make(n, flavour=fmq.Flavour.SYNCHRONIZED):
        pairs = [(queue.writer(), queue.reader()) for queue in queues(n, flavour)]
        return [w for w, _ in pairs], [r for _, r in pairs]

    return make


@pytest.mark.parametrize("n", COUNTS)
def test_each_end_of_many_ends_the_wait(ends, n):
    """First, last and in between, also beyond what one system call sleeps on; only that end is returned."""
    writers, readers = ends(n)
    for i in {0, n // 2, n - 1}:
        got = []
        with thread(lambda got=got: got.extend(fmq.wait_any(readers, 20))) as sleeper:
            sleeps(sleeper)
            writers[i].write([i])
        assert got == [readers[i]]
        assert list(readers[i].read(1, 0)) == [i]


@pytest.mark.parametrize("n", COUNTS)
def test_a_wait_ends_at_its_deadline(ends, n):
    """Timeout, not early; nothing was taken, and every end works afterwards."""
    writers, readers = ends(n)
    for timeout in (0, 0.02):
        with at_least(timeout), pytest.raises(fmq.Timeout):
            fmq.wait_any(readers, timeout)
    for w, r in zip(writers, readers, strict=True):
        w.write([3])
        assert list(r.read(1, 0)) == [3]


def test_all_that_are_ready_are_returned_in_order(ends):
    """Looking does not sleep, and takes nothing."""
    writers, readers = ends(5)
    for i in (4, 1, 3):
        writers[i].write([i])
    for _ in range(2):
        assert fmq.wait_any(readers, 0) == [readers[1], readers[3], readers[4]]


def test_readers_and_writers_of_both_flavours_mix(ends):
    """A full queue's writer, an empty one's reader, a stream's reader: each is ready for what it does."""
    (full, _), (drain, empty) = ends(2)
    (stream,), (listener,) = ends(1, fmq.Flavour.UNSYNCHRONIZED)
    full.write(np.zeros(4))
    mixed = [full, empty, listener]
    must_raise(fmq.Timeout, fmq.wait_any, mixed, 0)
    for step, ready in ((lambda: drain.read(4), full), (lambda: stream.write([1]), listener)):
        with thread(lambda ready=ready: assert_equal(fmq.wait_any(iter(mixed), 20), [ready])) as sleeper:
            sleeps(sleeper)
            step()
        listener.keep_latest(0)
        full.write(np.zeros(full.available))
    assert fmq.wait_any([stream, *mixed], 0) == [stream]


def assert_equal(a, b):
    assert a == b


def test_an_overrun_reader_is_ready(ends):
    """Its read goes through at once: it raises Overrun."""
    (w,), (r,) = ends(1, fmq.Flavour.UNSYNCHRONIZED)
    for i in range(5):
        w.write([i])
    for _ in range(2):
        assert fmq.wait_any([r], 0) == [r]
    with pytest.raises(fmq.Overrun) as told:
        r.read(1, 0)
    assert (told.value.lost, told.value.position) == (3, 3)


def test_one_of_several_processes_writes(queues):
    """And one of several is killed: its end is ready, and says PeerDied; the other one goes on."""
    a, b = queues(2)
    readers = [a.reader(), b.reader()]
    with holder(a) as victim:
        with process(write_array, b.descriptor, np.array([7])):
            assert fmq.wait_any(readers, 20) == [readers[1]]
            assert list(readers[1].read(1, 20)) == [7]
        must_raise(fmq.Closed, readers[1].read, 1, 20)
        other = take(b, "writer")
        with thread(lambda: assert_equal(fmq.wait_any(readers, 20), [readers[0]])) as sleeper:
            sleeps(sleeper)
            victim.kill()
        must_raise(fmq.PeerDied, readers[0].read, 1, 20)
        other.write([8])
        assert readers[1] in fmq.wait_any(readers, 0)


@pytest.mark.parametrize("n", COUNTS)
def test_a_peers_close_makes_its_end_ready(ends, n):
    """Asleep or not."""
    writers, readers = ends(n)
    with thread(lambda: assert_equal(fmq.wait_any(readers, 20), [readers[-1]])) as sleeper:
        sleeps(sleeper)
        writers[-1].close()
    must_raise(fmq.Closed, readers[-1].read, 1, 20)


@pytest.mark.parametrize("flavour", fmq.Flavour)
@pytest.mark.parametrize("n", [1, 3, 65])
def test_an_end_that_is_closed_while_waited_for_is_ready(ends, n, flavour):
    """close does not hang, the wait ends, and the end says Closed; the others work on."""
    writers, readers = ends(n, flavour)
    with thread(lambda: assert_equal(fmq.wait_any(readers, 20), [readers[-1]])) as sleeper:
        sleeps(sleeper)
        readers[-1].close()
    must_raise(fmq.Closed, fmq.wait_any, readers, 20)
    for w, r in zip(writers[:-1], readers[:-1], strict=True):
        w.write([1])
        assert list(r.read(1, 0)) == [1]


def test_an_end_that_another_thread_uses_is_busy(ends):
    """Busy at once, the other thread goes on undisturbed, and none of the ends stays taken."""
    writers, readers = ends(2)
    with thread(lambda: readers[1].read(1, 20)) as sleeper:
        until(lambda: readers_busy(readers[1]))
        sleeps(sleeper)
        must_raise(fmq.Busy, fmq.wait_any, readers, 20)
        writers[0].write([1])
        assert fmq.wait_any(readers[:1], 0) == [readers[0]]
        writers[1].write([2])
    with readers[0].peek(1):
        must_raise(fmq.Busy, fmq.wait_any, readers, 20)


def readers_busy(reader):
    try:
        return reader.available < 0
    except fmq.Busy:
        return True


def test_ends_that_are_waited_for_are_busy(ends):
    """For everybody else, until the wait is over."""
    writers, readers = ends(1)
    with thread(lambda: fmq.wait_any(readers, 20)) as sleeper:
        until(lambda: readers_busy(readers[0]))
        sleeps(sleeper)
        must_raise(fmq.Busy, readers[0].read, 1)
        writers[0].write([1])
    assert list(readers[0].read(1, 0)) == [1]


def test_one_end_twice_is_busy(ends):
    """It would be waited for by two."""
    _, (r,) = ends(1)
    must_raise(fmq.Busy, fmq.wait_any, [r, r], 0)


def test_nothing_to_wait_for_is_a_mistake():
    """It would never end."""
    for nothing in ([], iter(())):
        with pytest.raises(ValueError, match="ends="):
            fmq.wait_any(nothing)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_impossible_timeouts_are_refused(ends, timeout):
    """As everywhere; None and infinity wait for ever."""
    writers, readers = ends(1)
    with pytest.raises(ValueError, match="timeout="):
        fmq.wait_any(readers, timeout)
    writers[0].write([1])
    for long in (None, float("inf")):
        assert fmq.wait_any(readers, long) == readers


def test_an_observer_cannot_wait(queues):
    """It cannot announce that it sleeps, and is told what to do; the others are not left taken."""
    (queue,) = queues(1, fmq.Flavour.UNSYNCHRONIZED)
    (other,) = queues(1)
    observer, r = fmq.MessageQueue.open(queue.descriptor.read_only()).reader(), other.reader()
    with pytest.raises(ValueError, match="open the queue writable"):
        fmq.wait_any([r, observer], 1)
    assert r.available == 0


def test_ctrl_c_ends_a_wait(ends):
    """KeyboardInterrupt reaches the program from inside, and the ends work on."""
    (w,), (r,) = ends(1)

    def interrupt():
        until(lambda: readers_busy(r))
        os.kill(os.getpid(), signal.SIGINT)

    with thread(interrupt), pytest.raises(KeyboardInterrupt):
        fmq.wait_any([r], 20)
    w.write([1])
    assert fmq.wait_any([r], 0) == [r]


def test_the_main_thread_waits_past_its_slices(ends):
    """Its sleeps are cut for signals at 0.1 s; the wait goes on."""
    (w,), (r,) = ends(1)
    with thread(late, w):
        assert fmq.wait_any([r], 20) == [r]


def late(w):
    with contextlib.suppress(fmq.Timeout):
        fmq.EventFlag(fmq.Region.create(4096), 0).wait(1, 0.25)  # passes time in this thread
    w.write([1])


def test_a_thousand_rounds_between_two_processes(queues):
    """Each of four queues in turn, asleep at any moment: no wake is lost."""
    four = queues(4)
    readers = [queue.reader() for queue in four]
    with process(write_in_turn, [queue.descriptor for queue in four], 1000):
        got = [0] * 4
        while sum(got) < 1000:
            for r in fmq.wait_any([r for i, r in enumerate(readers) if got[i] < 250], 20):
                i = readers.index(r)
                assert r.read(1, 0)[0] == got[i]
                got[i] += 1


def write_in_turn(descriptors, count):
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(fmq.MessageQueue.open(d).writer()) for d in descriptors]
        for i in range(count):
            writers[i % len(writers)].write([i // len(writers)], 20)
