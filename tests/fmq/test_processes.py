"""Two real processes: every way to start one, every way to transfer, data intact and in order."""

import multiprocessing
import os

import numpy as np
import pytest
from fmq_peers import METHODS, echo, exchange_all, process, read_blocks, write_array, write_blocks

import fmq


@pytest.mark.integration
@pytest.mark.parametrize("memory", ["memfd", "posix"])
@pytest.mark.parametrize("method", METHODS)
def test_small_input_from_another_process(method, memory):
    """A descriptor is a legal argument of Process with every start method and kind of memory."""
    queue = fmq.MessageQueue.create("i4", 1024, memory=memory)
    with queue.reader() as r, process(write_array, queue.descriptor, np.arange(16, dtype="i4"), method=method):
        assert list(r.read(16, 10)) == list(range(16))


@pytest.mark.parametrize("method", METHODS)
def test_small_input_to_another_process(method):
    """The other direction; afterwards all places are free again."""
    queue = fmq.MessageQueue.create("i8", 1024)
    with queue.writer() as w, process(read_blocks, queue.descriptor, 1, 16, method=method):
        w.write(np.arange(16))
        w.reserve(1024, 10).__enter__()


def test_a_descriptor_travels_through_a_multiprocessing_queue():
    """It pickles with its file descriptor, also to a process that runs already."""
    queue = fmq.MessageQueue.create("i8", 64)
    ours, theirs = multiprocessing.Pipe()
    with queue.reader() as r, process(write_where_told, theirs):
        ours.send(queue.descriptor)
        assert list(r.read(3, 10)) == [1, 2, 3]


def write_where_told(pipe):
    write_array(pipe.recv(), np.array([1, 2, 3]))


def test_a_name_is_enough(name):
    """Programs that share nothing but a name meet in a queue."""
    queue = fmq.MessageQueue.create([("seq", "u4"), ("data", "f4", (3,))], 8, name=name)
    block = np.zeros(2, queue.dtype)
    block["data"] = 1.5
    with queue.reader() as r, process(write_array, name, block):
        got = r.read(2, 10)
        assert got.dtype == queue.dtype
        assert np.array_equal(got, block)


@pytest.mark.parametrize(("writes", "reads"), [(64, 64), (512, 64), (64, 512), (1000, 1024)])
def test_blocks_of_any_size_against_blocks_of_any_size(writes, reads):
    """Blocking writes of one size serve blocking reads of another; the full ring makes both wait."""
    total = writes * reads * max(1, 65536 // (writes * reads))
    queue = fmq.MessageQueue.create("i8", 2048)
    with queue.reader() as r, process(write_blocks, queue.descriptor, 0, total // writes, writes):
        for i in range(total // reads):
            assert np.array_equal(r.read(reads, 10), np.arange(i * reads, (i + 1) * reads))
        assert r.available == 0


def test_a_full_queue_drains_through_the_other_process():
    """A write of the whole capacity succeeds only because the reader emptied the ring."""
    queue = fmq.MessageQueue.create("i8", 64)
    with queue.writer() as w, process(read_blocks, queue.descriptor, 3, 64):
        for i in range(3):
            w.write(np.arange(i * 64, (i + 1) * 64), 10)


@pytest.mark.parametrize("spin", [0, 1e-3])
def test_ping_pong(spin):
    """Round trips through two queues, sleeping or spinning."""
    there, back = fmq.MessageQueue.create("u4", 4), fmq.MessageQueue.create("u4", 4)
    with process(echo, there.descriptor, back.descriptor, 500), there.writer() as w, back.reader() as r:
        w.spin = r.spin = spin
        for i in range(500):
            w.write([i], 10)
            assert r.read(1, 10)[0] == i


@pytest.mark.integration
@pytest.mark.parametrize("method", METHODS)
def test_exchange(method):
    """One message each way in one call, of any length up to the capacity, each answered by its own answer."""
    there, back = fmq.MessageQueue.create("u1", 300), fmq.MessageQueue.create("u1", 300)
    with there.writer() as w, back.reader() as r:
        call = fmq.Exchange(w, r)
        with process(exchange_all, there.descriptor, back.descriptor, 300, method=method):
            for i in range(1, 301):
                packet = os.urandom(i)
                assert call(packet) == packet[::-1]


@pytest.mark.parametrize("dtype", ["?", "i1", "U1", "u2", "i4", "i8", "f4", "f8", [("a", "u1"), ("b", "f8")]], ids=str)
def test_payload_types_across_processes(dtype):
    """Each kind of element arrives bit for bit."""
    queue = fmq.MessageQueue.create(dtype, 32)
    sent = np.zeros(20, queue.dtype)
    sent.view(np.uint8)[:: queue.dtype.itemsize] = 1
    with queue.reader() as r, process(write_array, queue.descriptor, sent):
        assert r.read(20, 10).tobytes() == sent.tobytes()
