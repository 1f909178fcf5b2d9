"""The weak points of libfmq's design, one test for each: what could happen there cannot happen here.

The stress versions are tests/csrc; here are quick ones, with real processes where a process matters.
"""

import contextlib
import fcntl
import mmap
import os
import re
import signal
import subprocess
import sys

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
    holder,
    must_raise,
    process,
    sleeps,
    take,
    thread,
)
from waiting import at_least, until

import fmq

UNSYNCHRONIZED = fmq.Flavour.UNSYNCHRONIZED
LIFE_LINES = {"writer_life": 768, "reader_life": 896}


@pytest.fixture
def queue():
    with fmq.MessageQueue.create("i8", 8) as made:
        yield made


@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
def test_no_torn_reads_reported_as_success(in_place):
    """1. A process overwrites as fast as it can; of thousands of reads that succeed, none is a mix of two writes.

    Every element is 512 bytes of one number, and that number is its position in the stream.
    """
    queue, elements, good, overruns = fmq.MessageQueue.create("V512", 8, UNSYNCHRONIZED), 4, 0, 0
    over = control_word(queue, EVENT)
    with queue.reader() as r, process(overwrite, queue.descriptor):
        while good < 3000 or overruns < 10:
            position = r.position
            try:
                words = read_words(r, elements, in_place)
            except fmq.Overrun:
                overruns += 1
            else:
                good += 1
                assert (words == np.arange(position, position + elements)[:, None]).all(), "a torn read"
        over[0] = 1
    print(f"{good} reads, {overruns} overruns, 0 torn")


def read_words(r, n, in_place):
    if not in_place:
        return r.read(n, 20).view("i8").reshape(n, 64)
    with r.peek(n, 20) as span:
        return np.array(span).view("i8").reshape(n, 64)


def overwrite(descriptor):
    queue = fmq.MessageQueue.open(descriptor)
    over, number = control_word(queue, EVENT), 0
    with queue.writer() as w:
        while not over[0]:
            n = number % 3 + 1
            block = np.repeat(np.arange(number, number + n), 64).view("V512")
            w.write(block)
            number += n


@pytest.mark.parametrize("what", ["queue", "stream", "event flag"])
def test_no_wake_is_lost_after_a_peer_dies_between_or_and_futex(what):
    """2. The waker said that it would wake, and died before it did: the death itself, or the next waker, wakes."""
    queue = fmq.MessageQueue.create("i8", 8, UNSYNCHRONIZED if what == "stream" else fmq.Flavour.SYNCHRONIZED)
    region, r = queue.descriptor.region(), queue.reader()
    r.spin = 0
    with holder(queue) as waker:
        if what == "event flag":
            wait, word = (lambda: queue.event_flag.wait(1, 20)), region.asarray(np.uint32, 1, EVENT + 4)
        else:
            wait, word = (lambda: must_raise(fmq.PeerDied, r.read, 1, 20)), region.asarray(np.uint32, 1, DATA_WAIT)
        with thread(wait) as sleeper:
            asleep(word)
            sleeps(sleeper)
            if what == "event flag":
                region.asarray(np.uint32, 1, EVENT)[0] |= 1  # the bit is set, and the system call was never made
                queue.event_flag.wake(1)
            else:
                word[0] = 0  # it says awake already
                waker.kill()


def test_a_short_or_truncated_region_is_refused_not_sigbus(queue):
    """4. Sizes are compared with the kernel's word, sealed memory cannot shrink, and a guard is there for the rest."""
    plain, (fd,) = queue.descriptor.to_wire()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    short = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    os.ftruncate(short, 4096)
    unsealed = os.dup(short)
    with pytest.raises(fmq.InvalidDescriptor, match="not sealed"):
        fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, [unsealed]))
    fcntl.fcntl(short, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(fmq.InvalidDescriptor, match="only 4096"):
        fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, [short]))
    with process(survive_truncation):
        pass


def survive_truncation():
    fmq.region.guard()
    queue = fmq.MessageQueue.create("u1", 8192, memory="posix")
    w, r = queue.writer(), queue.reader()
    w.write(np.ones(8192))
    os.ftruncate(queue.descriptor.fds[0], 4096)
    assert not r.read(8192, 0)[4096:].any()


def test_truncation_while_no_mapping_is_left():
    """4. The guard holds where the process has as many mappings as it may have, however often it has to act."""
    with process(survive_truncation_without_mappings):
        pass


def survive_truncation_without_mappings():
    fmq.region.guard()
    page, memories = mmap.PAGESIZE, [os.memfd_create("pool") for _ in range(40)]
    for fd in memories:
        os.ftruncate(fd, 3 * page)
    regions = [fmq.region.Region.from_fd(os.dup(fd), 3 * page, sealed=False) for fd in memories]
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(mmap.mmap(-1, page))
    must_raise(OSError, mmap.mmap, -1, page)
    for fd, region in zip(memories, regions, strict=True):
        os.ftruncate(fd, 0)
        assert not region.asarray()[[page, 0, 3 * page - 1]].any()
    must_raise(OSError, mmap.mmap, -1, page)
    taken.clear()


def test_a_bus_error_that_is_sent_ends_a_guarded_process():
    """4. The guard repeats an access that failed; where none did, it is no reason to live on."""
    code = "import fmq.region, os; fmq.region.guard(); os.kill(os.getpid(), 7); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, b"")


@pytest.mark.parametrize("flavour", fmq.Flavour)
@pytest.mark.parametrize("lie", [2**63, 2**64 - 1, 2**32], ids=hex)
def test_counters_are_not_trusted(lie, flavour):
    """5. A peer's counter where it cannot be ends the channel, for good; one's own is never read back."""
    queue = fmq.MessageQueue.create("i8", 8, flavour)
    w, r = queue.writer(), queue.reader()
    w.write([1, 2])
    if flavour is fmq.Flavour.SYNCHRONIZED:
        control_counter(queue, TAIL)[0] = lie
        for _ in range(2):
            must_raise(fmq.Corrupt, w.write, [0] * 8, 1)
        control_counter(queue, HEAD)[0] = lie
    else:
        counter_and_begin = queue.descriptor.region().asarray("u8", 2, HEAD)
        counter_and_begin[:] = lie
        w.write([3])
        assert counter_and_begin.tolist() == [3, 3], "the writer's own are private"
        counter_and_begin[int(flavour is fmq.Flavour.UNSYNCHRONIZED)] = lie
    for _ in range(2):
        must_raise(fmq.Corrupt, r.read, 4, 0)


def test_commit_and_counts_are_checked(queue):
    """6. Counts are compared with the reservation, the capacity and zero, before anything is multiplied or added."""
    from fmq._core import ffi, lib

    w, r = queue.writer(), queue.reader()
    spans = ffi.new("fmq_spans *")
    for end, n in ((w, 3), (r, 1)):
        assert lib.fmq_reserve(end.handle, n, spans, 0, 0) == 0
        assert lib.fmq_commit(end.handle, n + 1) < 0
        w.write([1, 2]) if end is w else None
    assert r.available == 2
    for n in (2**63, 2**64 - 1, 2**61 + 1):
        assert lib.fmq_reserve(r.handle, n, spans, 0, 0) < 0
        must_raise(ValueError, r.read, n)
        must_raise(ValueError, w.reserve(n).__enter__)
    with w.reserve(2) as span:
        for index in (2, -3, 2**62):
            must_raise(IndexError, span.first.__getitem__, index)
        span[:] = [3, 4]
    assert list(r.read(4, 0)) == [1, 2, 3, 4]


def test_attaching_late_loses_nothing(queue):
    """7a. Whoever comes later finds what was written before, at each open and with each role."""
    with queue.writer() as w:
        w.write([1, 2, 3])
    for expected in (1, 2):
        with fmq.MessageQueue.open(queue.descriptor).reader() as r:
            assert list(r.read(1, 0)) == [expected]
    with fmq.MessageQueue.open(queue.descriptor).writer() as w:
        assert w.available == 7
    assert list(queue.reader().read(1, 0)) == [3]


def test_role_misuse_is_detected(queue):
    """7b. Two writers, or two readers of a synchronized queue, are refused, in one process and in two."""
    for role in ("writer", "reader"):
        with holder(queue, role):
            must_raise(fmq.RoleTaken, getattr(queue, role))
        end = take(queue, role)
        must_raise(fmq.RoleTaken, getattr(fmq.MessageQueue.open(queue.descriptor), role))
        end.close()
    stream = fmq.MessageQueue.create("i8", 8, UNSYNCHRONIZED)
    with holder(stream):
        must_raise(fmq.RoleTaken, stream.writer)
        assert [stream.reader() for _ in range(3)]


def test_flavour_is_checked(queue):
    """7c. At run time, against the memory itself."""
    plain, (fd,) = queue.descriptor.to_wire()
    plain[2] = int(UNSYNCHRONIZED)
    with pytest.raises(fmq.InvalidDescriptor, match=r"flavour.*UNSYNCHRONIZED.*SYNCHRONIZED"):
        fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, [os.dup(fd)]))
    for flavour in (0, 4, "unsynchronized"):
        with pytest.raises(ValueError, match=f"flavour={flavour!r}.*UNSYNCHRONIZED"):
            fmq.MessageQueue.create("i8", 8, flavour)


def test_no_false_sharing(queue):
    """8. What one side writes, and the elements, lie in lines of 128 bytes that the other side never writes."""
    region = queue.descriptor.region()
    w, r = queue.writer(), queue.reader()
    before = region.asarray().copy()
    w.write([1])
    lines = changed_lines(before, region)
    assert HEAD // 128 in lines
    assert {line for line in lines if line < 32} == {HEAD // 128}
    assert 32 in lines, "the ring begins on a page of its own"
    before = region.asarray().copy()
    r.read(1)
    assert changed_lines(before, region) == {TAIL // 128}
    assert len({at // 128 for at in (0, HEAD, TAIL, DATA_WAIT, SPACE_WAIT, EVENT, *LIFE_LINES.values())}) == 8


def changed_lines(before, region):
    return {int(at) // 128 for at in np.nonzero(before != region.asarray())[0]}


def test_one_clock_and_no_stray_semantics(queue):
    """9. An empty mask is an error both ways, other bits end no wait, and a timed wait looks before it says timeout."""
    flag, word = queue.event_flag, control_word(queue, EVENT)
    for call in (flag.wake, flag.wait):
        must_raise(ValueError, call, 0)
    flag.wake(2)
    must_raise(fmq.Timeout, flag.wait, 1, 0.01)
    for _ in range(200):  # the bit comes around the deadline, without a wake: it is delivered now or it stays
        word[0] = 0
        with thread(lambda: word.__setitem__(0, 1)):
            try:
                got = flag.wait(1, 1e-5)
            except fmq.Timeout:
                got = 0
        assert got + word[0] == 1
    with queue.reader() as r, queue.writer() as w:
        must_raise(fmq.Timeout, r.read, 1, 1e-9)
        w.write([1])
        assert list(r.read(1, 1e-9)) == [1], "a deadline that has passed hides nothing"
    with at_least(0.05):
        must_raise(fmq.Timeout, flag.wait, 1, 0.05)


@pytest.mark.parametrize("how", ["EPERM", "EACCES"])
def test_read_only_attach_by_eperm_and_eacces(how):
    """10. Memory that was sealed against new writers, or opened for reading, is attached as an observer, alike."""
    queue = fmq.MessageQueue.create("i8", 8, UNSYNCHRONIZED)
    plain, (fd,) = queue.descriptor.to_wire()
    w = queue.writer()
    if how == "EACCES":
        theirs = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    else:
        theirs, w = sealed_copy(queue)
    descriptor = fmq.Descriptor.from_wire(plain, [theirs])
    r = fmq.MessageQueue.open(descriptor).reader()
    w.write([1, 2])
    assert list(r.read(2, 0)) == [1, 2]
    must_raise(ValueError, r.read, 1, 1)
    with pytest.raises(fmq.InvalidDescriptor, match="not writable"):
        fmq.MessageQueue.open(descriptor, writable=True)


def sealed_copy(queue):
    """The queue in memory that nobody can map for writing any more, and its writer, which did before."""
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(queue.descriptor.region().asarray()))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    writer = fmq.MessageQueue.open(fmq.Region.from_fd(os.dup(fd))).writer()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x10)  # F_SEAL_FUTURE_WRITE
    return fd, writer


def test_one_mapping_per_queue_and_no_thundering_herd():
    """11. A queue is one mapping, and a flag wakes those who wait for its bit, not all who wait."""

    def mapped():
        with open("/proc/self/maps") as maps:
            return len(re.findall(r"memfd:fmq", maps.read()))

    before = mapped()
    queues = [fmq.MessageQueue.create("i8", 8) for _ in range(10)]
    assert mapped() - before <= 10
    flag, woken = queues[0].event_flag, []
    sleepers = control_word(queues[0], EVENT + 4)

    def wait(bit):
        flag.wait(1 << bit, 20)
        woken.append(bit)

    with thread(wait, 0) as a, thread(wait, 1) as b, thread(wait, 2) as c:
        until(lambda: sleepers[0] == 3)
        for each in (a, b, c):
            sleeps(each)
        flag.wake(1 << 1)
        b.join(20)
        assert woken == [1]
        assert sleepers[0] == 2
        flag.wake(0b101)
    assert sorted(woken) == [0, 1, 2]
