"""A peer that breaks the protocol: Corrupt, for this end, for good; never a crash, a hang or invented elements."""

import ctypes
import platform
import threading

import numpy as np
import pytest
from fmq_peers import (
    DATA_WAIT,
    EVENT,
    HEAD,
    SPACE_WAIT,
    TAIL,
    asleep,
    control_counter,
    control_word,
    must_raise,
    process,
    thread,
)

import fmq

CAPACITY = 8
FUTEX_WAKE = 1


@pytest.fixture
def queue():
    with fmq.MessageQueue.create("u1", CAPACITY) as made:
        yield made


def lost(call):
    """The call raises Corrupt, now and ever after."""
    for _ in range(2):
        with pytest.raises(fmq.Corrupt):
            call()


@pytest.mark.parametrize("head", [CAPACITY + 4, 2**63, 2**64 - 1, 2**32, 2], ids=hex)
def test_a_head_where_it_cannot_be(queue, head):
    """Beyond what the ring holds, or behind what was read: the reader notices before it believes an element."""
    w, r = queue.writer(), queue.reader()
    w.write([1, 2, 3])
    r.read(3)
    control_counter(queue, HEAD)[0] = head
    lost(lambda: r.read(1, 1))
    lost(lambda: r.available)
    lost(lambda: r.peek(1, 0).__enter__())


@pytest.mark.parametrize("tail", [4, 2**63, 2**64 - 1, 100], ids=hex)
def test_a_tail_where_it_cannot_be(queue, tail):
    """In front of the head, or going backwards: the writer notices before it overwrites an element."""
    w, r = queue.writer(), queue.reader()
    w.write([1, 2, 3])
    control_counter(queue, TAIL)[0] = tail
    lost(lambda: w.write(np.zeros(CAPACITY), 1))
    lost(lambda: w.available)
    lost(lambda: w.reserve(CAPACITY, 0).__enter__())
    assert list(r.read(3, 0)) == [1, 2, 3]


def test_a_counter_that_goes_backwards(queue):
    """What was once seen stays seen: a head that moves back by one is a lie even if it is in range."""
    w, r = queue.writer(), queue.reader()
    w.write([1, 2, 3])
    assert r.available == 3
    control_counter(queue, HEAD)[0] = 2
    lost(lambda: r.available)


def test_a_lie_ends_a_sleep(queue):
    """The sleeper that is woken to a lie is told."""
    r = queue.reader()
    r.spin = 0
    with thread(lambda: lost(lambda: r.read(1, 10))):
        asleep(control_word(queue, DATA_WAIT))
        control_counter(queue, HEAD)[0] = 2**60
        control_word(queue, DATA_WAIT + 4)[0] = 1  # seen as an event flag, the wait word has a sleeper
        fmq.EventFlag(queue.descriptor.region(), DATA_WAIT).wake(2)


def test_elements_seen_before_the_lie_are_still_delivered(queue):
    """They were checked when they were seen, so they are read out; then Corrupt."""
    w, r = queue.writer(), queue.reader()
    w.write([1, 2])
    assert r.available == 2
    control_counter(queue, HEAD)[0] = 2**60
    assert list(r.read(2, 0)) == [1, 2]
    lost(lambda: r.read(1, 0))


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_a_new_end_refuses_damaged_counters(queue, role):
    """A successor does not start on counters that contradict each other, and leaves the role free."""
    queue.writer().close()
    control_counter(queue, TAIL)[0] = 5
    with pytest.raises(fmq.Corrupt):
        getattr(queue, role)()
    control_counter(queue, TAIL)[0] = 0
    getattr(queue, role)()


def test_my_own_counter_is_not_believed_from_shared_memory(queue):
    """Scribbling over a side's own counter changes nothing for that side: it keeps a private one."""
    w, r = queue.writer(), queue.reader()
    w.write([1])
    control_counter(queue, HEAD)[0] = 2**50
    w.write([2])
    assert list(r.read(2, 0)) == [1, 2]


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_peer_that_wakes_for_nothing_again_and_again(queue, what):
    """More than a thousand wakes without progress in one wait are an attack: Corrupt, not a thread kept busy."""
    w, r = queue.writer(), queue.reader()
    w.spin = r.spin = 0
    w.write(np.zeros(CAPACITY if what == "write" else 0))
    word, over = control_word(queue, SPACE_WAIT if what == "write" else DATA_WAIT), threading.Event()
    libc, futex = ctypes.CDLL(None), {"x86_64": 202, "aarch64": 98}[platform.machine()]

    def keep_clearing():
        while not over.is_set():
            word[0] = 0
            libc.syscall(futex, ctypes.c_void_p(word.ctypes.data), FUTEX_WAKE, 1, None, None, 0)

    with thread(keep_clearing):
        try:
            with pytest.raises(fmq.Corrupt):
                r.read(1, 20) if what == "read" else w.write([1], 20)
        finally:
            over.set()


def test_a_peer_process_that_scribbles_kills_the_channel_only(queue):
    """Random words over the counters from another process: Corrupt here, and this process goes on."""
    with queue.reader() as r, process(scribble, queue.descriptor):
        must_raise(fmq.Corrupt, read_for_ever, r)
        control_word(queue, EVENT)[0] = 1


def read_for_ever(r):
    while True:
        r.read(1, 10)


def scribble(descriptor):
    region, rng = descriptor.region(), np.random.default_rng(3)
    head, over = region.asarray(np.uint64, 1, HEAD), region.asarray(np.uint32, 1, EVENT)
    while not over[0]:
        head[0] = rng.integers(2**62)
