"""The broadcast flavour: one writer, up to 64 readers, each gets all; the slowest living one holds the writer up."""

import asyncio
import contextlib
import errno
import multiprocessing
import os
import pickle
import random
import resource
import select
import signal
import time

import numpy as np
import pytest
import stress
from fmq_peers import (
    DATA_WAIT,
    HEAD,
    SPACE_WAIT,
    asleep,
    control_counter,
    control_word,
    holder,
    must_raise,
    new_name,
    process,
    sleeps,
    take,
    thread,
)
from refused_calls import FUTEX_WAITV, refuse
from waiting import PATIENCE, until

import fmq
from fmq._core import lib

SEATS_AT, LINE, CAPACITY = 4096, 128, 8


@pytest.fixture
def queue():
    with fmq.MessageQueue.create("i8", CAPACITY, fmq.Flavour.BROADCAST) as made:
        yield made


def tail_of(queue, seat):
    return control_counter(queue, SEATS_AT + LINE * seat)


# ---- everything arrives --------------------------------------------------------------------------------------------


def test_each_reader_gets_all_from_when_it_came(queue):
    """A late joiner begins with what is written from then on."""
    with queue.writer() as w, queue.reader() as one:
        w.write([1, 2])
        with queue.reader() as two:
            w.write([3])
            assert one.read(3).tolist() == [1, 2, 3]
            assert two.read(1).tolist() == [3]
            assert two.available == one.available == 0


def test_without_a_reader_the_writer_is_free(queue):
    """It writes rings full, and its peer is nobody."""
    with queue.writer() as w:
        for _ in range(5):
            w.write(range(CAPACITY), 0)
        assert w.peer == "nobody"
        assert w.readers == ()
        with queue.reader() as r:
            assert w.peer == "alive"
            assert r.available == 0


def test_the_slowest_reader_holds_the_writer_up(queue):
    """And no other; whatever the order in which they read."""
    with queue.writer() as w, queue.reader() as fast, queue.reader() as slow:
        w.write(range(CAPACITY))
        fast.read(CAPACITY)
        assert not w.try_write([8])
        assert w.available == 0
        slow.read(3)
        assert w.available == 3
        w.write([8, 9, 10], 0)
        assert not w.try_write([11])


def read_numbers(descriptor, count, ready, sizes):
    """Every element is its own position, from wherever this process came."""
    with fmq.MessageQueue.open(descriptor).reader() as r:
        at = r.position
        ready.send(at)
        while at < count:
            n = min(sizes[at % len(sizes)], count - at)
            assert r.read(n, 20).tolist() == list(range(at, at + n))
            at += n


@pytest.mark.parametrize("memory", ["memfd", "posix", "named"])
def test_processes_read_a_whole_stream(memory):
    """Three processes, two of which come late: nothing is missing, doubled or out of order, in each kind of memory."""
    name = new_name() if memory == "named" else None
    kind = None if memory == "named" else memory
    with fmq.MessageQueue.create("i8", 50, fmq.Flavour.BROADCAST, name=name, memory=kind) as queue, queue.writer() as w:
        try:
            ready, theirs = multiprocessing.Pipe()
            with contextlib.ExitStack() as stack:
                at = 0
                for sizes in ((1, 5), (7,), (20, 1, 3)):
                    stack.enter_context(process(read_numbers, queue.descriptor, 3000, theirs, sizes))
                    assert ready.recv() == at
                    for _ in range(20):
                        w.write(range(at, at + 13), 20)
                        at += 13
                while at < 3000:
                    n = min(17, 3000 - at)
                    w.write(range(at, at + n), 20)
                    at += n
        finally:
            if name:
                fmq.unlink(name)


def test_spans_and_numpy_arrays(queue):
    """Reserve and peek work as elsewhere; a peek that is left by an exception takes nothing."""
    with queue.writer() as w, queue.reader() as r, queue.reader() as other:
        w.write([0, 1, 2])
        r.read(3)
        other.read(3)
        with w.reserve(7) as span:
            span[:] = np.arange(7)
        with contextlib.suppress(KeyError), r.peek(7):
            raise KeyError
        with r.peek(7) as span:
            assert [*span.first, *span.second] == list(range(7))
        assert other.read(7, out=np.empty(7, "i8")).tolist() == list(range(7))


def test_sixty_four_readers_and_no_more(queue):
    """A seat is free again when its reader closes; the error says what to do."""
    with queue.writer() as w, contextlib.ExitStack() as stack:
        readers = [stack.enter_context(queue.reader()) for _ in range(64)]
        must_raise(fmq.RoleTaken, queue.reader)
        w.write([7])
        assert [r.read(1)[0] for r in readers] == [7] * 64
        readers[20].close()
        assert len(w.readers) == 63
        with queue.reader() as again:
            w.write([8])
            assert again.read(1)[0] == 8
            assert len(w.readers) == 64


# ---- sleeping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["read", "peek", "wait_any", "select", "async"])
def test_each_way_to_wait_for_an_element(queue, how):
    """Two readers sleep in the same way, and one write ends both waits."""
    with queue.writer() as w, queue.reader() as one, queue.reader() as two:
        ways = {
            "read": lambda r: r.read(1, 20),
            "peek": lambda r: r.peek(1, 20).__enter__(),
            "wait_any": lambda r: fmq.wait_any([r], 20),
            "select": lambda r: select.select([r], [], [], 20)[0].index(r),
            "async": lambda r: asyncio.run(r.read_async(1)),
        }
        for r in (one, two):
            r.spin = 0
        with thread(ways[how], one), thread(ways[how], two):
            asleep(control_word(queue, DATA_WAIT))
            w.write([1])


@pytest.mark.parametrize("how", ["write", "reserve", "wait_any", "select", "async"])
@pytest.mark.parametrize("end", ["read", "close"])
def test_each_way_to_wait_for_room(queue, how, end):
    """The last of two slow readers reads, or leaves: the writer goes on at once."""
    with queue.writer() as w, queue.reader() as one, queue.reader() as two:
        w.spin = 0
        w.write(range(CAPACITY))
        ways = {
            "write": lambda: w.write([1], 20),
            "reserve": lambda: w.reserve(1, 20).__enter__(),
            "wait_any": lambda: fmq.wait_any([w], 20),
            "select": lambda: select.select([w], [], [], 20)[0].index(w),
            "async": lambda: asyncio.run(w.write_async([1])),
        }
        with thread(ways[how]) as runner:
            asleep(control_word(queue, SPACE_WAIT))
            one.read(3)
            assert runner.is_alive()
            two.read(1) if end == "read" else two.close()


def test_readers_that_are_not_waited_for_wake_no_process(queue):
    """A fast reader that reads while the writer waits for a slow one makes no system call: the word stays odd."""
    with queue.writer() as w, queue.reader() as fast, queue.reader() as slow:
        w.spin = 0
        w.write(range(CAPACITY))
        fast.read(4)
        word = control_word(queue, SPACE_WAIT)
        with thread(w.write, [1, 2], 20):
            announced = asleep(word) and int(word[0])
            fast.read(1)
            fast.read(1)
            assert word[0] == announced
            slow.read(2)


def test_idle_readers_cost_nothing(queue):
    """Eight sleep until they have something to read: no thread of theirs wakes in between."""
    ready, theirs = multiprocessing.Pipe()
    word = control_word(queue, DATA_WAIT)
    with queue.writer() as w, contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(process(sleep_and_tell, queue.descriptor, theirs))
            ready.recv()
        asleep(word)
        with queue.reader() as r:
            must_raise(fmq.Timeout, r.read, 1, 0.3)
        w.write([1])
        assert max(ready.recv() for _ in range(8)) <= 5


def sleep_and_tell(descriptor, pipe):
    """How often the thread that reads has gone to sleep, which the main thread's waits do in slices."""

    def read():
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        r.read(1, PATIENCE)
        pipe.send(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

    with fmq.MessageQueue.open(descriptor).reader() as r, thread(read) as reading:
        sleeps(reading)
        pipe.send("here")


# ---- deaths and evictions -------------------------------------------------------------------------------------------


def test_a_killed_reader_holds_the_writer_up_for_a_moment(queue):
    """kill -9: the sleeping writer goes on; the other reader has everything."""
    with queue.writer() as w, queue.reader() as r, holder(queue, "reader") as child:
        w.spin = 0
        w.write(range(CAPACITY))
        r.read(CAPACITY)
        with thread(w.write, [8], PATIENCE):
            asleep(control_word(queue, SPACE_WAIT))
            os.kill(child.pid, signal.SIGKILL)
        assert r.read(1)[0] == 8
        assert [state.is_alive for state in w.readers] == [True]


def test_readers_are_told_of_the_writers_death_and_go_on_with_its_successor(queue):
    """All of them, with the elements before the news."""
    readers = [queue.reader() for _ in range(3)]
    with process(write_and_die, queue.descriptor, fails=True) as child:
        child.join()
    for r in readers:
        assert r.read(3).tolist() == [1, 2, 3]
        must_raise(fmq.PeerDied, r.read, 1, 10)
    with take(queue, "writer") as w:
        w.write([4])
        assert [r.read(1)[0] for r in readers] == [4, 4, 4]
    for r in readers:
        must_raise(fmq.Closed, r.read, 1, 10)
        r.close()


def write_and_die(descriptor):
    with fmq.MessageQueue.open(descriptor).writer() as w:
        w.write([1, 2, 3])
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_stopped_reader_is_named_and_evicted(queue):
    """SIGSTOP: the error names its pid; without it the writer goes on; when it continues, it is told."""
    ready, theirs = multiprocessing.Pipe()
    with queue.writer() as w, process(read_when_told, queue.descriptor, theirs) as child:
        ready.recv()
        os.kill(child.pid, signal.SIGSTOP)
        w.write(range(CAPACITY))
        with pytest.raises(fmq.Timeout, match=f"process {child.pid} has 8 elements unread.*evict") as caught:
            w.write([8], 0.05)
        assert caught.value.reader.pid == child.pid
        assert [(state.pid, state.unread, state.is_alive) for state in w.readers] == [(child.pid, CAPACITY, True)]
        w.evict(caught.value.reader)
        w.write(range(CAPACITY), 0)
        assert w.readers == ()
        ready.send("go on")
        os.kill(child.pid, signal.SIGCONT)
        assert ready.recv() == "Evicted"


def read_when_told(descriptor, pipe):
    with fmq.MessageQueue.open(descriptor).reader() as r:
        pipe.send("here")
        pipe.recv()
        try:
            r.read(1)
        except fmq.Closed as error:
            pipe.send(type(error).__name__)


def test_an_eviction_ends_the_waits_of_both_sides(queue):
    """A writer that sleeps for that reader goes on; a reader that sleeps is told. Any thread may evict."""
    with queue.writer() as w, queue.reader() as r:
        w.spin = r.spin = 0
        w.write(range(CAPACITY))
        with thread(w.write, [1], 20):
            asleep(control_word(queue, SPACE_WAIT))
            w.evict(w.readers[0])
        must_raise(fmq.Evicted, r.read, 1)
        with queue.reader() as sleeper, thread(must_raise, fmq.Evicted, sleeper.read, 1, 20):
            asleep(control_word(queue, DATA_WAIT))
            w.evict(w.readers[0])


def test_a_peek_that_is_evicted_takes_nothing(queue):
    """What it has read may have been overwritten meanwhile."""
    with queue.writer() as w, queue.reader() as r:
        w.write(range(CAPACITY))
        with pytest.raises(fmq.Evicted), r.peek(2):
            w.evict(w.readers[0])


def test_the_next_reader_in_an_evicted_ones_seat_stays(queue):
    """What was said of one reader is not said of the next, also by an old ReaderState."""
    with queue.writer() as w:
        first = queue.reader()
        (state,) = w.readers
        w.evict(state)
        first.close()
        with queue.reader() as next_one:
            w.evict(state)
            w.write([5])
            assert next_one.read(1)[0] == 5
        must_raise(ValueError, w.evict, fmq.ReaderState(1, 0, 0, True, 64, 1))


def test_readers_are_of_broadcast_queues(pair):
    """Elsewhere the writer does not know them."""
    w, _ = pair()
    must_raise(ValueError, lambda: w.readers)
    must_raise(ValueError, fmq.Exchange, *(fmq.MessageQueue.create("u1", 8, 3).writer(), pair()[1]))
    assert isinstance(pickle.loads(pickle.dumps(fmq.Evicted("x"))), fmq.Closed)


def hold_unmarked(descriptor, pipe):
    """A reader whose death the kernel does not mark: its walk meets a page that is gone."""
    with fmq.MessageQueue.open(descriptor).reader():
        page = os.memfd_create("broken")
        os.ftruncate(page, 4096)
        assert lib.fmq_life_hold(page, 0, 1) >= 0
        os.ftruncate(page, 0)
        pipe.send("here")
        signal.pause()


def test_a_reader_whose_death_is_not_marked_is_found_by_its_lock(queue):
    """The writer goes on within 1.1 s, though the word still says that the reader lives."""
    ready, theirs = multiprocessing.Pipe()
    with queue.writer() as w, process(hold_unmarked, queue.descriptor, theirs, fails=True) as child:
        ready.recv()
        w.write(range(CAPACITY))
        with thread(w.write, [1], 1.1):
            asleep(control_word(queue, SPACE_WAIT))
            os.kill(child.pid, signal.SIGKILL)
        region = queue.descriptor.region()
        assert lib.fmq_life_state(region.base + SEATS_AT + 24) == lib.FMQ_ALIVE, "it was marked: this shows nothing"


def work_on_an_old_kernel(descriptor, pipe):
    """Writes until a reader dies that holds it up, and then reads what another process writes."""
    refuse(errno.ENOSYS, FUTEX_WAITV)
    queue = fmq.MessageQueue.open(descriptor)
    with queue.writer() as w:
        w.spin = 0
        w.write(range(CAPACITY))
        pipe.send("full")
        w.write([1], 20)
        assert fmq.wait_any([w], 20) == [w]
    pipe.send("written")
    pipe.recv()  # there is another writer
    with queue.reader() as r:
        r.spin = 0
        assert r.read(1, 20)[0] == 5


def test_an_old_kernel_is_polled(queue):
    """Without futex_waitv: a death is found all the same, and sleeps end."""
    ready, theirs = multiprocessing.Pipe()
    with holder(queue, "reader") as child, process(work_on_an_old_kernel, queue.descriptor, theirs):
        assert ready.recv() == "full"
        asleep(control_word(queue, SPACE_WAIT))
        os.kill(child.pid, signal.SIGKILL)
        assert ready.recv() == "written"
        with take(queue, "writer") as w:
            ready.send("go on")
            asleep(control_word(queue, DATA_WAIT))
            w.write([5])


# ---- readers that lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["beyond head", "back", "far back", "huge"])
def test_an_impossible_tail_costs_its_reader_alone(queue, lie):
    """The writer drops that reader, which gets Corrupt; the other one misses nothing."""
    with queue.writer() as w, queue.reader() as liar, queue.reader() as other:
        for i in range(3):
            w.write(range(4 * i, 4 * i + 4))
            liar.read(4)
            other.read(4)
        w.write(range(CAPACITY))
        assert not w.try_write([1])  # it has looked at both
        tail_of(queue, 0)[0] = {"beyond head": 21, "back": 11, "far back": 1, "huge": 2**63}[lie]
        other.read(CAPACITY)
        w.write(range(CAPACITY), 0)
        assert other.read(CAPACITY, 0).tolist() == list(range(CAPACITY))
        must_raise(fmq.Corrupt, liar.read, 1, 0)
        assert len(w.readers) == 1


def test_a_head_that_lies_is_refused(queue):
    """By each reader, for itself."""
    with queue.writer() as w, queue.reader() as r:
        w.write([1])
        control_counter(queue, HEAD)[0] = 2**40
        for _ in range(2):
            must_raise(fmq.Corrupt, r.read, 4, 0)


# ---- kills -----------------------------------------------------------------------------------------------------------


def come_and_go(descriptor, seed):
    """Joins, reads for a while and leaves, again and again, until it is killed."""
    rng, queue = random.Random(seed), fmq.MessageQueue.open(descriptor)
    while True:
        with queue.reader() as r:
            r.spin = rng.choice((0, 20e-6))
            at = r.position
            for _ in range(rng.randrange(60)):
                n = rng.choice((1, 3, 8))
                assert r.read(n, 20).tolist() == list(range(at, at + n))
                at += n


def kill_readers(count, seed):
    """Readers come and go, and are killed at random moments, also on their way. One stays and misses nothing."""
    rng = random.Random(seed)
    queue = fmq.MessageQueue.create("i8", 50, fmq.Flavour.BROADCAST)
    at = worst = 0
    with queue.writer() as w, queue.reader() as steady:
        w.spin = 0
        for _ in range(count):
            with contextlib.ExitStack() as stack:
                children = [
                    stack.enter_context(process(come_and_go, queue.descriptor, rng.random(), fails=True))
                    for _ in range(2)
                ]
                for child in children:
                    for _ in range(rng.randint(1, 300)):
                        n = rng.choice((1, 7, 20))
                        w.write(range(at, at + n), 20)
                        assert steady.read(n, 0).tolist() == list(range(at, at + n))
                        at += n
                    assert child.exitcode is None, "a reader missed something"
                    os.kill(child.pid, signal.SIGKILL)
                    began = time.monotonic()
                    for _ in range(4):  # more than a ring, in parts that a reader who wants eight cannot block
                        w.write(range(at, at + 20), 20)
                        assert steady.read(20, 0).tolist() == list(range(at, at + 20))
                        at += 20
                    worst = max(worst, time.monotonic() - began) if child is children[-1] else worst
        until(lambda: len(w.readers) == 1)
    return worst


@pytest.mark.integration
def test_readers_that_come_go_and_die():
    """Ten pairs, at seeded moments; the writer goes on."""
    kill_readers(10, 1)


@pytest.mark.stress
def test_readers_that_come_go_and_die_for_long(tally):
    """The same with 300 pairs, from a printed seed; it goes on long before the kernel has closed a dead one's files."""
    tally("kills of a broadcast queue's readers", rounds := stress.times(300))
    seed = random.randrange(2**32)
    worst = kill_readers(rounds, seed)
    print(f"seed {seed}: {rounds} pairs, went on after {worst * 1e3:.1f} ms at worst")
    assert worst < 1


# ---- who looks from outside ----------------------------------------------------------------------------------------


def test_an_inspection_shows_each_reader(name):
    """Who is how far; the slowest one's numbers are the queue's."""
    with fmq.MessageQueue.create("i8", CAPACITY, fmq.Flavour.BROADCAST, name=name) as queue, queue.writer() as w:
        assert fmq.inspect(name).who == ("alive", "nobody")
        with queue.reader() as one, queue.reader():
            w.write(range(5))
            one.read(2)
            info = fmq.inspect(name)
            assert info.who == ("alive", "alive")
            assert [(r.pid, r.position, r.unread) for r in info.readers] == [(os.getpid(), 2, 3), (os.getpid(), 0, 5)]
            assert (info.written, info.read, info.unread) == (5, 0, 5)
            must_raise(FileExistsError, fmq.MessageQueue.create, "i8", 8, fmq.Flavour.BROADCAST, name)
