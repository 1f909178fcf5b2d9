"""notify: several queues share one event flag, with bits of their own, and a wait for it ends with its wakers."""

import contextlib
import signal

import numpy as np
import pytest
from fmq_peers import holder, must_raise, process, sleeps, take, thread

import fmq

FLAVOUR_WITH_MOST = fmq.Flavour.BROADCAST  # the largest control pages
NOT_EMPTY, NOT_FULL = 1, 2  # of queue 0; queue i has both bits 2 i places higher


@pytest.fixture
def flag():
    return fmq.EventFlag(fmq.Region.create(4096), 0)


def make(n, flavour=fmq.Flavour.SYNCHRONIZED):
    """Queues in one region, and the flag behind them that they share."""
    size = fmq.MessageQueue.nbytes("i8", 4, FLAVOUR_WITH_MOST)
    region = fmq.Region.create(n * size + 8)
    queues = [fmq.MessageQueue.create("i8", 4, flavour, region=region, offset=i * size) for i in range(n)]
    return region, queues, fmq.EventFlag(region, n * size)


def test_every_transfer_sets_its_bit(flag):
    """Write, reserve, read and peek; not those that transfer nothing, and not the other side's."""
    queue = fmq.MessageQueue.create("i8", 4)
    w, r = queue.writer(), queue.reader()
    w.notify(flag, NOT_EMPTY)
    r.notify(flag, NOT_FULL)
    w.write([1, 2])
    assert flag.wait(3, 0) == NOT_EMPTY
    with w.reserve(1) as span:
        span[:] = 3
        must_raise(fmq.Timeout, flag.wait, 3, 0)
    assert flag.wait(3, 0) == NOT_EMPTY
    r.read(1)
    assert flag.wait(3, 0) == NOT_FULL
    with r.peek(2):
        pass
    assert flag.wait(3, 0) == NOT_FULL
    w.write([])
    r.read(0)
    assert r.try_read(1) is None
    must_raise(fmq.Timeout, flag.wait, 3, 0)


def test_none_ends_it(flag):
    """And another flag takes its place."""
    queue, other = fmq.MessageQueue.create("i8", 4), fmq.EventFlag(fmq.Region.create(4096), 8)
    w = queue.writer()
    w.notify(flag)
    w.notify(other, 4)
    w.write([1])
    assert other.wait(4, 0) == 4
    w.notify(None)
    w.write([2])
    for each, mask in ((flag, 1), (other, 4)):
        must_raise(fmq.Timeout, each.wait, mask, 0)


@pytest.mark.parametrize("mask", [0, -1, 2**32])
def test_an_impossible_mask_is_refused(flag, mask):
    """At once, and what was agreed before stays."""
    w = fmq.MessageQueue.create("i8", 4).writer()
    w.notify(flag, 8)
    with pytest.raises(ValueError, match="mask="):
        w.notify(flag, mask)
    w.write([1])
    assert flag.wait(8, 0) == 8


def test_a_flag_outlives_its_object():
    """An end keeps the flag's memory."""
    w = fmq.MessageQueue.create("i8", 4).writer()
    w.notify(fmq.EventFlag(fmq.Region.create(4096), 0))
    for _ in range(4):
        w.write([1])


@pytest.mark.parametrize("flavour", fmq.Flavour)
def test_one_thread_serves_the_queues_of_three_processes(flavour):
    """It sleeps on one flag; each process's bit says where to read, and every element arrives."""
    region, queues, flag = make(3, flavour)
    readers = [queue.reader() for queue in queues]
    got = [[], [], []]
    with contextlib.ExitStack() as stack:
        for i in range(3):
            stack.enter_context(process(write_and_notify, region, i, 4))
        while sum(map(len, got)) < 12:
            bits = flag.wait(0b10101, 20)
            for i, r in enumerate(readers):
                if bits & NOT_EMPTY << 2 * i:
                    got[i].extend(r.read(r.available, 0))
    assert got == [[10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(3)]


def write_and_notify(region, i, count):
    size = fmq.MessageQueue.nbytes("i8", 4, FLAVOUR_WITH_MOST)
    with fmq.MessageQueue.open(region, offset=i * size).writer() as w:
        w.notify(fmq.EventFlag(region, 3 * size), NOT_EMPTY << 2 * i)
        for k in range(count):
            w.write([10 * i + k], 20)


def test_a_wait_ends_with_the_waker():
    """kill -9: its last bits are delivered first, then PeerDied, asleep or not."""
    region, queues, flag = make(1)
    with queues[0].reader() as r:
        with process(notify_and_die, region, fails=True) as child:
            child.join(20)
            assert flag.wait(NOT_EMPTY, 20, [r]) == NOT_EMPTY
            assert list(r.read(1)) == [1]
            with pytest.raises(fmq.PeerDied):
                flag.wait(NOT_EMPTY, 20, [r])
        take(queues[0], "writer").close()
        with holder(queues[0]) as victim:
            waiting = thread(lambda: must_raise(fmq.PeerDied, flag.wait, NOT_EMPTY, 20, [r]))
            with waiting as sleeper:
                sleeps(sleeper)
                victim.kill()


def notify_and_die(region):
    w = fmq.MessageQueue.open(region).writer()
    w.notify(fmq.EventFlag(region, fmq.MessageQueue.nbytes("i8", 4, FLAVOUR_WITH_MOST)), NOT_EMPTY)
    w.write([1])
    signal.raise_signal(signal.SIGKILL)


def test_a_wait_ends_with_any_of_its_wakers():
    """Three wakers live, one is killed; without it the wait goes on with the others, until one of them closes."""
    _, queues, flag = make(3)
    readers = [queue.reader() for queue in queues]
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(holder(queue)) for queue in queues]
        with thread(lambda: must_raise(fmq.PeerDied, flag.wait, 1, 20, readers)) as sleeper:
            sleeps(sleeper)
            children[1].kill()
        must_raise(fmq.Timeout, flag.wait, 1, 0.01, [readers[0], readers[2]])
        flag.wake(1)
        assert flag.wait(1, 20, readers) == 1


def test_a_wait_ends_with_the_wakers_close():
    """Closed, after its bits."""
    _, (queue,), flag = make(1)
    w, r = queue.writer(), queue.reader()
    w.notify(flag)
    w.write([1])
    w.close()
    assert flag.wait(1, 20, [r]) == 1
    must_raise(fmq.Closed, flag.wait, 1, 20, [r])


def test_a_reader_that_dies_ends_its_writers_wait():
    """Both roles can be the waker."""
    _, (queue,), flag = make(1)
    with queue.writer() as w, holder(queue, "reader") as victim:
        w.write(np.zeros(4))
        with thread(lambda: must_raise(fmq.PeerDied, flag.wait, NOT_FULL, 20, [w])) as sleeper:
            sleeps(sleeper)
            victim.kill()


def test_who_sleeps_in_the_queue_is_told_as_well():
    """A flag's wait and a read wait for the same process: the kernel wakes one, and that one the other."""
    _, (queue,), flag = make(1)
    r = queue.reader()
    with holder(queue) as victim, thread(lambda: must_raise(fmq.PeerDied, flag.wait, 1, 20, [r])) as one:
        sleeps(one)
        with thread(lambda: must_raise(fmq.PeerDied, r.read, 1, 20)) as other:
            sleeps(other)
            victim.kill()


def test_too_many_peers_are_refused(flag):
    """What one system call can watch; the message names the limit."""
    _, (queue,), _ = make(1)
    r = queue.reader()
    must_raise(fmq.Timeout, flag.wait, 1, 0, [r] * 126)
    must_raise(fmq.Timeout, flag.wait, 1, 0.01, [r] * 126)
    with pytest.raises(ValueError, match=r"127 ends.*126"):
        flag.wait(1, 0, [r] * 127)
