"""What libfmq's own tests verify, item by item; libfmq.md says which are kept as they are, which changed, and why.

Most run over both flavours, one memory or two, transfers by copy or in place, and with the reader here or in another
process.
"""

import gc
import multiprocessing
import os
import resource

import numpy as np
import pytest
from fmq_peers import must_raise, process, thread
from waiting import PATIENCE

import fmq

SYNCHRONIZED, UNSYNCHRONIZED, _ = fmq.Flavour
CAPACITY, CONTROL = 2048, 4096
NOT_FULL, NOT_EMPTY = 1, 2


class Copying:
    """One end, with libfmq's manners: nothing waits, and what cannot be done is False or None."""

    def __init__(self, end):
        self.end = end

    def available(self):
        return self.end.available

    def put(self, values):
        return self.end.try_write(values)

    def get(self, n):
        elements = self.end.try_read(n)
        return None if elements is None else elements.tolist()


class InPlace(Copying):
    """The same by begin and commit."""

    def put(self, values):
        try:
            with self.end.reserve(len(values), 0) as span:
                assert len(span.first) + len(span.second) == len(values)
                span[:] = values
        except fmq.Timeout:
            return False
        return True

    def get(self, n):
        try:
            with self.end.peek(n, 0) as span:
                return [span.first[i].item() for i in range(len(span.first))] + span.second.tolist()
        except fmq.Timeout:
            return None


class Remote:
    """An end in another process, which does what it is told."""

    def __init__(self, pipe):
        self.pipe = pipe

    def ask(self, method, *arguments):
        self.pipe.send((method, arguments))
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def available(self):
        return self.ask("available")

    def get(self, n):
        return self.ask("get", n)


def obey(descriptor, way, pipe):
    """The other process of a Remote."""
    with fmq.MessageQueue.open(descriptor).reader() as reader:
        side = way(reader)
        pipe.send("here")
        while order := pipe.recv():
            method, arguments = order
            try:
                pipe.send(getattr(side, method)(*arguments))
            except (fmq.FmqError, ValueError) as error:
                pipe.send(error)


def make_queue(dtype, capacity, flavour=SYNCHRONIZED, memories=1):
    """In one memory, or with the ring in a second one."""
    if memories == 1:
        return fmq.MessageQueue.create(dtype, capacity, flavour)
    control, ring = fmq.Region.create(CONTROL), fmq.Region.create(capacity * np.dtype(dtype).itemsize)
    return fmq.MessageQueue.create(dtype, capacity, flavour, region=control, ring=ring)


@pytest.fixture(params=[SYNCHRONIZED, UNSYNCHRONIZED], ids=lambda flavour: flavour.name.lower())
def flavour(request):
    return request.param


@pytest.fixture(params=[1, 2], ids=["one memory", "two memories"])
def memories(request):
    return request.param


@pytest.fixture(params=[Copying, InPlace], ids=["copy", "in place"])
def way(request):
    return request.param


@pytest.fixture(params=["here", "there"])
def ends(request, flavour, memories, way):
    """Writer and reader of a queue of 2048 small numbers."""
    queue = make_queue("u2", CAPACITY, flavour, memories)
    with queue.writer() as w:
        if request.param == "here":
            with queue.reader() as r:
                yield way(w), way(r)
            return
        ours, theirs = multiprocessing.Pipe()
        with process(obey, queue.descriptor, way, theirs):
            assert ours.recv() == "here"
            yield way(w), Remote(ours)
            ours.send(None)


only = pytest.mark.parametrize


# ---- in one process there, in one and in two here ------------------------------------------------------------------


def test_01_queue_size_too_large(flavour):
    """Half of all memory and one more element of two bytes: an error that names it, no crash."""
    with pytest.raises(ValueError, match="capacity=9223372036854775808"):
        fmq.MessageQueue.create("u2", 2**63, flavour)
    with pytest.raises(ValueError, match="capacity="):
        make_queue_of_two_small_memories(2**63, flavour)


def make_queue_of_two_small_memories(capacity, flavour):
    region, ring = fmq.Region.create(CONTROL), fmq.Region.create(CONTROL)
    return fmq.MessageQueue.create("u2", capacity, flavour, region=region, ring=ring)


def test_02_blocking_small_input_by_hand(flavour):
    """A thread waits for NOT_EMPTY on the queue's flag; the writer writes and wakes; the reader reads and wakes."""
    queue = fmq.MessageQueue.create("u1", CAPACITY, flavour)
    w, r, flag = queue.writer(), queue.reader(), queue.event_flag

    def read():
        assert flag.wait(NOT_EMPTY, PATIENCE) == NOT_EMPTY
        assert r.try_read(64).tolist() == list(range(64))
        flag.wake(NOT_FULL)

    with thread(read):
        w.write(range(64), 0)
        flag.wake(NOT_EMPTY)
        assert flag.wait(NOT_FULL, PATIENCE) == NOT_FULL


def test_03_blocking_small_input(flavour):
    """The same by waiting transfers, beside a flag outside the queue on which NOT_FULL was set before."""
    queue = fmq.MessageQueue.create("u1", CAPACITY, flavour)
    w, r, flag = queue.writer(), queue.reader(), fmq.EventFlag(fmq.Region.create(4096), 0)
    flag.wake(NOT_FULL)
    w.notify(flag, NOT_EMPTY)
    r.notify(flag, NOT_FULL)
    with thread(lambda: r.read(64, PATIENCE)):
        w.write(range(64), PATIENCE)
    assert flag.wait(NOT_FULL | NOT_EMPTY, PATIENCE) == NOT_FULL | NOT_EMPTY


def test_04_blocking_time_out(flavour):
    """A wait for a bit that nobody sets ends with Timeout, and so does a read that nobody serves."""
    queue = fmq.MessageQueue.create("u1", CAPACITY, flavour)
    must_raise(fmq.Timeout, queue.event_flag.wait, NOT_EMPTY, 0.05)
    must_raise(fmq.Timeout, queue.reader().read, 1, 0.05)


def test_05_queue_size_odd(flavour, memories):
    """2049 one-byte elements: the flag keeps its alignment, because it lies in front of them, and transfers wait."""
    queue = make_queue("u1", 2049, flavour, memories)
    w, r = queue.writer(), queue.reader()
    with thread(lambda: r.read(64, PATIENCE)):
        w.write(range(64), PATIENCE)
    queue.event_flag.wake(1)
    assert queue.event_flag.wait(1, 0) == 1


def test_06_small_input(ends):
    """16 elements there and back; in place the parts' lengths add up, and each element has its slot."""
    w, r = ends
    assert w.put(range(16))
    assert r.available() == 16
    assert r.get(16) == list(range(16))
    assert r.available() == 0


def test_07_read_when_empty(ends):
    """Nothing to read: None, at once, and nothing changes."""
    w, r = ends
    assert r.available() == 0
    assert r.get(2) is None
    assert w.put([7])
    assert r.get(2) is None
    assert r.get(1) == [7]


@only("flavour", [SYNCHRONIZED], indirect=True)
def test_08_write_when_full(ends):
    """A full queue takes nothing more, and its contents stay as they are."""
    w, r = ends
    assert w.put(range(CAPACITY))
    assert w.available() == 0
    assert not w.put([1])
    assert r.get(CAPACITY) == list(range(CAPACITY))


def test_09_large_input(ends):
    """Exactly the capacity is written and read. More than it can never be: ValueError, and the queue is as it was."""
    w, r = ends
    assert w.put(range(CAPACITY))
    assert r.get(CAPACITY) == list(range(CAPACITY))
    for call in (lambda: w.put(range(2 * CAPACITY)), lambda: r.get(2 * CAPACITY)):
        with pytest.raises(ValueError, match=r"n=4096.*2048"):
            call()
    assert r.available() == 0
    assert r.get(1) is None


@only("flavour", [SYNCHRONIZED], indirect=True)
def test_10_a_failed_write_leaves_the_data(ends):
    """A write that does not fit, or never could, changes nothing of a full queue."""
    w, r = ends
    assert w.put(range(CAPACITY))
    assert not w.put([9] * CAPACITY)
    must_raise(ValueError, w.put, [9] * 2 * CAPACITY)
    assert r.get(CAPACITY) == list(range(CAPACITY))


def test_11_multiple_reads_and_writes(ends):
    """One write of 500 serves five reads of 100, and the reverse."""
    w, r = ends
    assert w.put(range(500))
    assert [r.get(100) for _ in range(5)] == np.arange(500).reshape(5, 100).tolist()
    assert all(w.put(range(i, i + 100)) for i in range(0, 500, 100))
    assert r.get(500) == list(range(500))


def test_12_wrap_around(ends):
    """After an advance of capacity - 1 a transfer of the whole capacity crosses the wrap point."""
    w, r = ends
    assert w.put(range(CAPACITY - 1))
    assert r.get(CAPACITY - 1) == list(range(CAPACITY - 1))
    assert w.put(range(CAPACITY))
    assert r.get(CAPACITY) == list(range(CAPACITY))


@only("flavour", [UNSYNCHRONIZED], indirect=True)
def test_14_a_full_unsynchronized_queue_is_overwritten(ends):
    """The writer knows no reader, so all places are free for it; the next read is told what it lost."""
    w, r = ends
    assert w.put(range(CAPACITY))
    assert w.available() == CAPACITY
    assert w.put([1])
    with pytest.raises(fmq.Overrun) as told:
        r.get(CAPACITY)
    assert told.value.lost > 0


@only("flavour", [UNSYNCHRONIZED], indirect=True)
def test_15_an_overflowing_write_is_told_and_got_over(ends):
    """Nothing is returned, and reading goes on at the oldest whole element with half a ring of distance."""
    w, r = ends
    assert w.put(range(CAPACITY))
    assert w.put(range(CAPACITY))
    must_raise(fmq.Overrun, r.get, 1)
    assert r.available() == CAPACITY // 2
    assert r.get(CAPACITY // 2) == list(range(CAPACITY // 2, CAPACITY))
    assert w.put([5])
    assert r.get(1) == [5]


def wired(queue, **changed):
    """The queue's descriptor as somebody else may send it, with some parts changed."""
    (_, dtype, flavour, grantors), fds = queue.descriptor.to_wire()
    said = {"dtype": dtype, "grantors": grantors} | changed
    return fmq.Descriptor.from_wire([2, said["dtype"], flavour, said["grantors"]], [os.dup(fd) for fd in fds])


@only(
    ("rows", "said"),
    [
        ([[0, 0, 4096]] * 3, "overlap"),
        ([[0, 0, 4096], [5, 4096, 4096]], "grantors"),
        ([[0, 0, 4096], [0, 4096, 0xFFFFF041]], "memory has only"),
        ([[0, 0, 0xFFFFF041], [0, 4096, 4096]], "memory has only"),
    ],
)
def test_16_hand_made_grantors(flavour, rows, said):
    """An index without a descriptor and an extent beyond the memory are refused, and here overlapping parts are too."""
    with pytest.raises(fmq.InvalidDescriptor, match=said):
        fmq.MessageQueue.open(wired(make_queue("u2", CAPACITY, flavour), grantors=rows))


def test_17_negative_and_huge_numbers(flavour):
    """An element size or an extent below zero, and a quarter of all memory: refused, no overflow."""
    queue = make_queue("u2", CAPACITY, flavour)
    for changed in ({"dtype": "'<V-2'"}, {"grantors": [[0, 0, 4096], [0, 4096, -4096]]}):
        with pytest.raises(fmq.InvalidDescriptor):
            fmq.MessageQueue.open(wired(queue, **changed))
    with pytest.raises(ValueError, match="capacity="):
        fmq.MessageQueue.create("u2", 2**62, flavour)


def test_18_a_changed_element_size_is_refused(flavour):
    """Two bytes said to be eight; the unchanged copy is good."""
    queue = make_queue("u2", CAPACITY, flavour)
    with pytest.raises(fmq.InvalidDescriptor, match="dtype"):
        fmq.MessageQueue.open(wired(queue, dtype="'<u8'"))
    assert fmq.MessageQueue.open(wired(queue)).capacity == CAPACITY


def test_19_failed_creations_leak_no_descriptor():
    """More of them than a process may have descriptors, of every kind."""
    with process(fail_often):
        pass


def fail_often():
    limit = 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    queue = make_queue("u2", CAPACITY)
    gc.collect()  # what the tests before left to it
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(limit + 2):
        must_raise(ValueError, fmq.MessageQueue.create, "u2", 2**63)
        must_raise(ValueError, make_queue_of_two_small_memories, 2**20, SYNCHRONIZED)
        must_raise(ValueError, lambda: wired(queue, grantors=[[5, 0, 1]] * 3))
        must_raise(ValueError, fmq.MessageQueue.open, wired(queue, dtype="'<u8'"))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_20_two_memories(flavour):
    """A descriptor that is none, and a ring eight bytes short, are refused; eight bytes more than needed are fine."""
    control = fmq.Region.create(CONTROL)
    with pytest.raises(OSError, match="Bad file descriptor"):
        fmq.Region.from_fd(os.dup(3000), 4096)
    for extra, fits in ((-8, False), (0, True), (8, True)):
        ring = fmq.Region.create(2 * CAPACITY + extra)
        if fits:
            w = fmq.MessageQueue.create("u2", CAPACITY, flavour, region=control, ring=ring).writer()
            w.write(range(CAPACITY))
            w.close()
        else:
            with pytest.raises(ValueError, match="only 4088"):
                fmq.MessageQueue.create("u2", CAPACITY, flavour, region=control, ring=ring)
