"""Observers: readers of an unsynchronized queue that cannot write to its memory, and so cannot wait."""

import ctypes
import faulthandler
import gc
import os
import signal

import numpy as np
import pytest
from fmq_peers import HEAD, process

import fmq

UNSYNCHRONIZED, CAPACITY = fmq.Flavour.UNSYNCHRONIZED, 8


@pytest.fixture
def queue():
    with fmq.MessageQueue.create("i8", CAPACITY, UNSYNCHRONIZED) as made:
        yield made


def opened_read_only(queue):
    return fmq.MessageQueue.open(queue.descriptor.read_only())


def opened_for_reading(queue):
    return fmq.MessageQueue.open(queue.descriptor, writable=False)


@pytest.fixture(params=[opened_read_only, opened_for_reading, "by name"], ids=lambda way: getattr(way, "__name__", way))
def observed(request, queue, name):
    """(the queue, the same one opened for reading alone)."""
    if request.param == "by name":
        named = fmq.MessageQueue.create("i8", CAPACITY, UNSYNCHRONIZED, name)
        return named, fmq.MessageQueue.open(name, writable=False)
    return queue, request.param(queue)


def test_an_observer_reads(observed):
    """As any reader, as long as it does not have to wait; several at once, beside readers that sleep."""
    queue, opened = observed
    w, one, two = queue.writer(), opened.reader(), opened.reader()
    assert one.try_read(1) is None
    w.write([1, 2])
    assert list(one.read(2, 0)) == list(two.try_read(2)) == [1, 2]
    one.keep_latest(1)
    assert list(one.read(1)) == [2]
    w.write(np.arange(CAPACITY))
    w.write([9])
    with pytest.raises(fmq.Overrun):
        two.try_read(1)


def test_an_observer_that_would_have_to_wait_is_told_the_remedy(observed):
    """It cannot announce that it sleeps; each way of waiting says what to do instead, and reading works on."""
    queue, opened = observed
    r = opened.reader()
    for call in (lambda: r.read(1, 1), lambda: r.read(1), lambda: r.peek(1).__enter__()):
        with pytest.raises(ValueError, match=r"timeout=0.*writable"):
            call()
    for call in (lambda: fmq.wait_any([r], 1), r.fileno):
        with pytest.raises(ValueError, match="open the queue writable"):
            call()
    queue.writer().write([1])
    assert list(r.read(1)) == [1]


def test_an_observer_cannot_take_the_writers_role(observed):
    """Nor set a flag."""
    for call in (observed[1].writer, lambda: observed[1].event_flag):
        with pytest.raises(ValueError, match=r"observing|read-only"):
            call()


@pytest.mark.integration
def test_an_observer_cannot_write_to_the_memory(observed):
    """numpy refuses, and so does the processor."""
    region = observed[1]._place.control
    with pytest.raises(ValueError, match="read-only"):
        region.asarray()[HEAD] = 1
    with process(poke, region, fails=True) as child:
        child.join(20)
        assert child.exitcode == -signal.SIGSEGV


def poke(region):
    faulthandler.disable()
    ctypes.memset(region.asarray().ctypes.data, 1, 1)


def test_opening_for_reading_closes_nothing_else(queue):
    """The attempt to map it writable fails; its descriptor is closed once, and not whatever has its number by then."""
    descriptor = queue.descriptor.read_only()
    for _ in range(3):
        opened = fmq.MessageQueue.open(descriptor)
        gc.collect()
        assert opened._place.control.is_same_memory(queue._place.control)
        spare = os.open("/dev/null", os.O_RDONLY)
        opened.close()
        os.close(spare)


def test_observers_need_an_unsynchronized_queue(queue):
    """The ends of a synchronized queue both write, so what allows only reading is refused, and says so."""
    synchronized = fmq.MessageQueue.create("i8", CAPACITY)
    with pytest.raises(ValueError, match="unsynchronized"):
        synchronized.descriptor.read_only()
    opened = fmq.MessageQueue.open(synchronized.descriptor, writable=False)
    for role in (opened.reader, opened.writer):
        with pytest.raises(ValueError, match="writable=False"):
            role()
    assert queue.descriptor.read_only().capacity == CAPACITY
