"""fileno: readable exactly while a transfer of one element would not wait, for select, epoll and their like."""

import contextlib
import gc
import os
import select
import selectors
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fmq_peers import bridges, holder, must_raise, process, thread, write_array
from waiting import PATIENCE, until

import fmq


@pytest.fixture(params=fmq.Flavour, ids=lambda flavour: flavour.name.lower())
def ends(request):
    """Writer and reader of a queue of four."""
    queue = fmq.MessageQueue.create("i8", 4, request.param)
    w, r = queue.writer(), queue.reader()
    yield w, r
    w.close()
    r.close()


def readable(*ends, seconds=0.0):
    return select.select(ends, [], [], seconds)[0]


def becomes_readable(end):
    """At once or soon: it is another thread that says so."""
    return readable(end, seconds=PATIENCE) == [end]


def test_a_reader_is_readable_while_there_is_something(ends):
    """After each partial read it is as before, after the last one it is not."""
    w, r = ends
    assert not readable(r)
    w.write([1, 2, 3])
    for n in (1, 2):
        assert becomes_readable(r)
        r.read(n)
    assert not readable(r)
    w.write([4])
    assert becomes_readable(r)


def test_a_writer_is_readable_while_there_is_room():
    """To select, both ends are for reading."""
    queue = fmq.MessageQueue.create("i8", 2)
    w, r = queue.writer(), queue.reader()
    assert becomes_readable(w)
    w.write([1])
    assert becomes_readable(w)
    w.write([2])
    assert not readable(w)
    r.read(1)
    assert becomes_readable(w)
    with w.reserve(1):
        pass
    assert not readable(w)


def test_an_unsynchronized_writer_is_always_readable():
    """It never waits."""
    w = fmq.MessageQueue.create("i8", 2, fmq.Flavour.UNSYNCHRONIZED).writer()
    for _ in range(3):
        assert becomes_readable(w)
        w.write([1, 2])


def test_what_does_not_transfer_changes_nothing(ends):
    """try_read of more than there is, a peek that is left, one that times out, a reservation that is dropped."""
    w, r = ends
    r.fileno()
    assert r.try_read(1) is None
    must_raise(fmq.Timeout, r.peek(1, 0.01).__enter__)
    must_raise(fmq.Timeout, r.read, 1, 0.01)
    assert not readable(r)
    w.write([1])
    assert becomes_readable(r)
    assert r.try_read(2) is None
    must_raise(fmq.Timeout, r.read, 2, 0.01)
    assert becomes_readable(r)
    with contextlib.suppress(ZeroDivisionError), r.peek(1):
        _ = 1 / 0
    assert becomes_readable(r)
    with r.peek(1):
        pass
    assert not readable(r)
    w.write([2])
    assert becomes_readable(r)


def test_wait_any_and_select_do_not_disturb_each_other(ends):
    """A wait by other means, in between, costs no wake."""
    w, r = ends
    r.fileno()
    for _ in range(20):
        must_raise(fmq.Timeout, fmq.wait_any, [r], 0)
        must_raise(fmq.Timeout, fmq.wait_any, [r], 0.001)
        w.write([1])
        assert becomes_readable(r)
        assert fmq.wait_any([r], 0) == [r]
        r.read(1)
        assert not readable(r)


def test_a_thread_that_peeks_is_not_left_asleep(ends):
    """Three elements are awaited in place and come one by one, a hundred times: the bridge takes none of the wakes."""
    w, r = ends
    r.fileno()
    r.spin = 0

    def peek():
        with r.peek(3, PATIENCE) as span:
            assert np.array(span).tolist() == [0, 1, 2]

    for _ in range(100):
        with thread(peek):
            for i in range(3):
                w.write([i])
        assert not readable(r)


def test_an_exchange_that_timed_out_does_not_deafen_select():
    """It slept on the same word, and cleared it: the bridge announces itself again."""
    there, back = fmq.MessageQueue.create("u1", 4), fmq.MessageQueue.create("u1", 4)
    r, w = back.reader(), back.writer()
    exchange = fmq.Exchange(there.writer(), r)
    assert not readable(r)
    must_raise(fmq.Timeout, exchange, b"", fmq.clock.deadline_of(0.01))
    w.write([1])
    assert becomes_readable(r)


def test_keep_latest_makes_readable_and_not():
    """Going back finds elements, skipping leaves none."""
    queue = fmq.MessageQueue.create("i8", 4, fmq.Flavour.UNSYNCHRONIZED)
    w, r = queue.writer(), queue.reader()
    w.write([1, 2])
    assert becomes_readable(r)
    r.keep_latest(0)
    assert not readable(r)
    r.keep_latest(1)
    assert becomes_readable(r)
    r.keep_latest(0)
    assert not readable(r)


def test_an_overrun_reader_is_readable():
    """Its read raises Overrun, at once."""
    queue = fmq.MessageQueue.create("i8", 4, fmq.Flavour.UNSYNCHRONIZED)
    w, r = queue.writer(), queue.reader()
    r.fileno()
    for i in range(5):
        w.write([i])
    assert becomes_readable(r)
    must_raise(fmq.Overrun, r.read, 1, 0)
    assert becomes_readable(r)
    assert list(r.read(2)) == [3, 4]
    assert not readable(r)


@pytest.mark.parametrize("flavour", fmq.Flavour)
@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_peer_that_is_gone_makes_readable(flavour, end):
    """Killed or closed: before and after what it left was read; a plain read then says which."""
    queue = fmq.MessageQueue.create("i8", 4, flavour)
    r = queue.reader()
    r.fileno()
    if end == "killed":
        with holder(queue) as victim:
            assert not readable(r)
            victim.kill()
            assert becomes_readable(r)
    else:
        with process(write_array, queue.descriptor, np.array([1])):
            assert becomes_readable(r)
            assert list(r.read(1)) == [1]
            assert becomes_readable(r)
    for _ in range(2):
        must_raise(fmq.PeerDied if end == "killed" else fmq.Closed, r.read, 1, PATIENCE)
        assert becomes_readable(r)


def test_a_writer_whose_reader_is_killed():
    """A full queue's writer becomes readable, and is told."""
    queue = fmq.MessageQueue.create("i8", 4)
    with queue.writer() as w, holder(queue, "reader") as victim:
        w.write([0] * 4)
        assert not readable(w)
        victim.kill()
        assert becomes_readable(w)
        must_raise(fmq.PeerDied, w.write, [1], PATIENCE)


@pytest.mark.parametrize("edge", [0, select.EPOLLET])
def test_epoll_by_level_and_by_edge(ends, edge):
    """By edge: an event per change from waiting to not waiting; a read of all, and the next write is an event again."""
    w, r = ends
    with select.epoll() as poll:
        poll.register(r.fileno(), select.EPOLLIN | edge)
        assert poll.poll(0) == []
        for i in range(20):
            w.write([i, i])
            assert poll.poll(PATIENCE) == [(r.fileno(), select.EPOLLIN)]
            assert bool(poll.poll(0)) == (not edge)
            r.read(2)
            assert poll.poll(0) == []


def test_two_hundred_ends_in_one_epoll():
    """Each is told for itself, by four threads that sleep for 63 ends each."""
    with process(poll_two_hundred):
        pass


def poll_two_hundred():
    pairs = []
    for _ in range(200):
        with fmq.MessageQueue.create("i8", 4) as queue:
            pairs.append((queue.writer(), queue.reader()))
    with selectors.EpollSelector() as poll:
        for i, (_, r) in enumerate(pairs):
            poll.register(r, selectors.EVENT_READ, i)
        assert not poll.select(0)
        for step in (1, 7, 63, 100):
            for i in range(0, 200, step):
                pairs[i][0].write([i])
            told = set()
            while len(told) < len(range(0, 200, step)):
                for key, _ in poll.select(PATIENCE):
                    assert pairs[key.data][1].read(1, 0)[0] == key.data
                    told.add(key.data)
            assert told == set(range(0, 200, step))
            assert not poll.select(0)
    assert bridges() <= 4


def test_a_closed_end_has_no_descriptor(ends):
    """It is gone from the system, and fileno says Closed."""
    w, r = ends
    before = len(os.listdir("/proc/self/fd"))
    w.fileno()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    w.close()
    must_raise(fmq.Closed, w.fileno)
    assert len(os.listdir("/proc/self/fd")) <= before
    r.fileno()


def test_a_descriptor_is_one_per_end(ends):
    """However often it is asked for."""
    _, r = ends
    assert r.fileno() == r.fileno()


def test_a_descriptor_cannot_be_had_inside_a_reservation(ends):
    """Busy, and afterwards as if nothing had been asked."""
    w, r = ends
    with w.reserve(1) as span:
        must_raise(fmq.Busy, w.fileno)
        span[:] = 1
    assert becomes_readable(w)
    assert list(r.read(1)) == [1]


def test_forgotten_ends_are_forgotten_by_the_bridge():
    """No close, only garbage: the descriptor goes, and the bridge does not look at memory that is no more."""
    script = """
import gc, os, fmq
def once():
    queue = fmq.MessageQueue.create("u1", 4)
    ends = queue.writer(), queue.reader()
    return [end.fileno() for end in ends]
once()
gc.collect()
before = len(os.listdir("/proc/self/fd"))
for _ in range(200):
    once()
gc.collect()
assert len(os.listdir("/proc/self/fd")) == before
kept = fmq.MessageQueue.create("u1", 4).reader()
kept.fileno()
"""
    gc.collect()
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_two_processes_by_select_alone():
    """Five hundred blocks; neither side ever sleeps in the queue."""
    queue = fmq.MessageQueue.create("i8", 4)
    with queue.reader() as r, process(write_by_select, queue.descriptor, 500):
        for i in range(500):
            assert becomes_readable(r)
            assert r.read(1, 0)[0] == i


def write_by_select(descriptor, count):
    with fmq.MessageQueue.open(descriptor).writer() as w:
        for i in range(count):
            assert becomes_readable(w)
            w.write([i], 0)
        until(lambda: w.available == w.capacity)


def test_arming_again_wakes_no_thread():
    """The bridge's thread sleeps once for each element that is waited for, not once more when the bell is armed."""

    def child():
        queue = fmq.MessageQueue.create("i8", 4)
        w, r = queue.writer(), queue.reader()
        r.fileno()
        until(lambda: bridges() == 1)
        before = sleeps_of_the_bridge()
        for n in range(300):
            w.write([n])
            assert becomes_readable(r)
            assert list(r.read(1)) == [n]
        assert sleeps_of_the_bridge() - before < 400

    with process(child):
        pass


def sleeps_of_the_bridge():
    """How often that thread has gone to sleep."""
    for task in os.listdir("/proc/self/task"):
        status = Path(f"/proc/self/task/{task}/status").read_text()
        if status.startswith("Name:\tfmq-bridge"):
            return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    raise AssertionError("there is no bridge")


def test_a_bell_that_was_not_heard(ends):
    """Elements that come while nobody looks are one ring; once they are read, the next one rings again."""
    w, r = ends
    assert not readable(r)
    for _ in range(50):
        for n in range(4):
            w.write([n])
        assert becomes_readable(r)
        assert list(r.read(4)) == [0, 1, 2, 3]
        assert not readable(r)
        w.write([9])
        assert becomes_readable(r)
        assert list(r.read(1)) == [9]
        assert not readable(r)
