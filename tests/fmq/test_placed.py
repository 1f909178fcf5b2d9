"""Queues that are placed in a region: many in one mapping, or a ring in memory of its own."""

import contextlib
import gc
import os
import re

import numpy as np
import pytest
from fmq_peers import METHODS, holder, in_a_fork, must_raise, process, take

import fmq

CONTROL, ALIGNMENT = 4096, 128


def held(nbytes):
    """(descriptors, mappings of so much shared memory) of this process; the pages of life words are smaller."""
    gc.collect()  # of tests before this one
    with open("/proc/self/maps") as maps:
        lines = re.findall(r"^(\S+) .* (\S+) .*memfd:fmq", maps.read(), re.MULTILINE)
    sizes = [int(end, 16) - int(begin, 16) for begin, end in (addresses.split("-") for addresses, _ in lines)]
    return len(os.listdir("/proc/self/fd")), sum(size >= nbytes for size in sizes)


def echo_placed(region, offsets, n):
    """The other side of pairs of queues: sends back what comes."""
    for there, back in offsets:
        incoming, outgoing = (fmq.MessageQueue.open(region, offset=at) for at in (there, back))
        with incoming.reader() as r, outgoing.writer() as w:
            w.write(r.read(n, 20), 20)


@pytest.mark.parametrize("method", METHODS)
def test_a_hundred_queues_in_one_region_reach_another_process(method):
    """One descriptor crosses, with the region, and every queue is used in both directions."""
    size = fmq.MessageQueue.nbytes("i8", 5)
    region = fmq.Region.create(100 * size)
    queues = [fmq.MessageQueue.create("i8", 5, region=region, offset=i * size) for i in range(100)]
    pairs = [(i * size, (i + 1) * size) for i in range(0, 100, 2)]
    with process(echo_placed, region, pairs, 5, method=method), contextlib.ExitStack() as stack:
        writers = [stack.enter_context(queue.writer()) for queue in queues[::2]]
        ends = list(zip(writers, [stack.enter_context(queue.reader()) for queue in queues[1::2]], strict=True))
        for i, (w, _) in enumerate(ends):
            w.write(np.arange(i, i + 5))
        for i, (_, r) in enumerate(ends):
            assert r.read(5, 20).tolist() == list(range(i, i + 5))


def test_a_placed_queue_costs_no_descriptor_and_no_mapping():
    """A hundred queues with both ends: one mapping of the memory, one more descriptor for all their roles' locks."""
    in_a_fork(place_a_hundred)  # no other thread opens or closes anything there


def place_a_hundred():
    size = fmq.MessageQueue.nbytes("u1", 1000)
    region = fmq.Region.create(100 * size)
    with fmq.MessageQueue.create("u1", 1) as first, first.writer(), first.reader():
        pass  # a process opens some descriptors once
    before = held(region.nbytes)
    queues = [fmq.MessageQueue.create("u1", 1000, region=region, offset=i * size) for i in range(100)]
    ends = [(queue.writer(), queue.reader()) for queue in queues]
    descriptors, mappings = held(region.nbytes)
    assert (descriptors - before[0], mappings - before[1]) == (1, 0)
    for i, (w, r) in enumerate(ends):
        w.write([i] * 1000)
        assert set(r.read(1000)) == {i}
        w.close()
        r.close()
    assert held(region.nbytes) == before


@pytest.mark.parametrize("flavour", fmq.Flavour)
def test_neighbours_do_not_touch(flavour):
    """Full queues side by side, of sizes that are rounded up: each holds its own."""
    shapes = [("V3", 5), ("u1", 1), ("f8", 16), ("V7", 11)]
    sizes = [fmq.MessageQueue.nbytes(*shape, flavour) for shape in shapes]
    assert all(size % ALIGNMENT == 0 for size in sizes)
    region = fmq.Region.create(sum(sizes))
    places = [sum(sizes[:i]) for i in range(4)]
    queues = [
        fmq.MessageQueue.create(*s, flavour, region=region, offset=at) for s, at in zip(shapes, places, strict=True)
    ]
    ends = [(queue.writer(), queue.reader()) for queue in queues]
    for i, (w, _) in enumerate(ends):
        w.write(np.full(w.capacity * w.dtype.itemsize, i + 1, np.uint8).view(w.dtype))
    for i, (_, r) in enumerate(ends):
        assert set(r.read(r.capacity).tobytes()) == {i + 1}


def test_a_place_where_a_queue_is_in_use_is_refused():
    """By this process or another one; it is free again when nobody uses it, also after a kill."""
    region = fmq.Region.create(fmq.MessageQueue.nbytes("u1", 8))
    queue = fmq.MessageQueue.create("u1", 8, region=region)
    for role in ("writer", "reader"):
        end = take(queue, role)
        with pytest.raises(ValueError, match=r"offset=0.*in use.*another offset"):
            fmq.MessageQueue.create("u1", 8, region=region)
        end.close()
        with holder(queue, role) as child:
            with pytest.raises(ValueError, match="in use"):
                fmq.MessageQueue.create("u1", 8, region=region)
            child.kill()
            child.join()
        fmq.MessageQueue.create("u1", 8, region=region)


@pytest.mark.parametrize("offset", [1, 64, -128, CONTROL - 8], ids=str)
def test_a_misaligned_place_is_refused(offset):
    """The message names the offset and what it has to be a multiple of."""
    with pytest.raises(ValueError, match=rf"offset={offset}.*128"):
        fmq.MessageQueue.create("u1", 8, region=fmq.Region.create(3 * CONTROL), offset=offset)


def test_a_place_that_is_too_small_is_refused():
    """By one byte; the message says what is there. Exactly enough is enough."""
    with pytest.raises(ValueError, match="only 4103"):
        fmq.MessageQueue.create("u1", 8, region=fmq.Region.create(CONTROL + 7))
    with pytest.raises(ValueError, match="only 8199"):
        fmq.MessageQueue.create("u1", 8, region=fmq.Region.create(2 * CONTROL + 7), offset=CONTROL)
    for at in (0, CONTROL):
        region = fmq.Region.create(at + CONTROL + 8)
        w = fmq.MessageQueue.create("u1", 8, region=region, offset=at).writer()
        w.write(range(8))


def test_arguments_that_contradict_each_other_are_refused():
    """A place needs a region, and a region has its name and kind already."""
    region = fmq.Region.create(3 * CONTROL)
    read_only = fmq.Region.from_fd(os.dup(region.fd), writable=False)
    for how in ({"offset": 128}, {"ring": region}):
        with pytest.raises(ValueError, match="placed in a region"):
            fmq.MessageQueue.create("u1", 8, **how)
    for how in ({"name": "/x"}, {"memory": "memfd"}):
        with pytest.raises(ValueError, match="region says"):
            fmq.MessageQueue.create("u1", 8, region=region, **how)
    with pytest.raises(ValueError, match="read-only"):
        fmq.MessageQueue.create("u1", 8, region=read_only)
    with pytest.raises(ValueError, match="overlap"):
        fmq.MessageQueue.create("u1", 8, region=region, ring=region)


@pytest.mark.parametrize("offset", [0, 128, CONTROL, 2 * CONTROL, -128, 2**63])
def test_where_no_queue_is_none_is_opened(offset):
    """Zeros, the middle of a queue, the end, and beyond."""
    region = fmq.Region.create(3 * CONTROL)
    if offset == 128:
        fmq.MessageQueue.create("u1", 8, region=region)
    with pytest.raises(ValueError, match=r"memory|offset"):
        fmq.MessageQueue.open(region, offset=offset)


def test_a_placed_queue_has_a_descriptor_like_any_other():
    """Which names its place; closing the queue leaves the region to its owner."""
    region = fmq.Region.create(4 * CONTROL)
    queue = fmq.MessageQueue.create("i8", 8, region=region, offset=CONTROL)
    queue.close()
    opened = fmq.MessageQueue.open(queue.descriptor)
    plain, fds = queue.descriptor.to_wire()
    again = fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, [os.dup(fd) for fd in fds]))
    with opened.writer() as w, again.reader() as r:
        w.write([5])
        assert list(r.read(1)) == [5]
        must_raise(fmq.RoleTaken, queue.writer)
        queue.event_flag.wake(1)
        assert again.event_flag.wait(1, 0) == 1


@pytest.mark.parametrize("flavour", fmq.Flavour)
def test_a_ring_elsewhere_crosses_to_another_process(flavour):
    """Control page in one memory, elements in another: both descriptors travel."""
    control, ring = fmq.Region.create(3 * CONTROL), fmq.Region.create(10 * 8)
    queue = fmq.MessageQueue.create("i8", 10, flavour, region=control, ring=ring)
    back = fmq.MessageQueue.create("i8", 10)
    with back.reader() as r, queue.writer() as w, process(echo_one, queue.descriptor, back.descriptor):
        assert r.read(1, 20)[0] == 0
        w.write(np.arange(10))
        assert r.read(10, 20).tolist() == list(range(10))
    assert ring.asarray("i8").tolist() == list(range(10))


def echo_one(there, back):
    """Says 0 when it has come, then sends ten elements back."""
    with fmq.MessageQueue.open(there).reader() as r, fmq.MessageQueue.open(back).writer() as w:
        w.write([0])
        w.write(r.read(10, 20), 20)


def test_a_named_region_holds_several_queues(name):
    """Programs that share nothing but a name find each at its offset."""
    places = {
        flavour: sum(fmq.MessageQueue.nbytes("i8", 4, f) for f in fmq.Flavour if f < flavour) for flavour in range(1, 5)
    }
    region = fmq.Region.create(places[4], name=name)
    for flavour in fmq.Flavour:
        fmq.MessageQueue.create("i8", 4, flavour, region=region, offset=places[flavour])
    opened = fmq.Region.open(name)
    assert [fmq.MessageQueue.open(opened, offset=places[f]).flavour for f in fmq.Flavour] == list(fmq.Flavour)
    assert fmq.MessageQueue.open(name).flavour is fmq.Flavour.SYNCHRONIZED


def test_a_region_is_mapped_for_writing_or_it_is_not():
    """writable asks for no more and no less than the region has; a read-only region makes observers."""
    region = fmq.Region.create(2 * CONTROL)
    queue = fmq.MessageQueue.create("u1", 8, fmq.Flavour.UNSYNCHRONIZED, region=region)
    read_only = fmq.Region.from_fd(os.dup(region.fd), writable=False)
    for mapped, asked in ((region, False), (read_only, True)):
        with pytest.raises(ValueError, match=f"writable={asked}"):
            fmq.MessageQueue.open(mapped, writable=asked)
    observer = fmq.MessageQueue.open(read_only, writable=False).reader()
    queue.writer().write([4])
    assert list(observer.read(1)) == [4]


def test_nbytes_says_what_is_needed():
    """A control page and the ring, rounded up; impossible queues need nothing but an error."""
    assert fmq.MessageQueue.nbytes("u1", 1) == CONTROL + ALIGNMENT
    assert fmq.MessageQueue.nbytes("u4", 32) == CONTROL + ALIGNMENT
    assert fmq.MessageQueue.nbytes("u4", 33) == CONTROL + 2 * ALIGNMENT
    for dtype, capacity in (("O", 1), ("u1", 0), ("u1", 2**63)):
        with pytest.raises(ValueError, match=r"dtype|capacity"):
            fmq.MessageQueue.nbytes(dtype, capacity)
