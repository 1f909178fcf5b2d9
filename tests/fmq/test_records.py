"""Records: messages of any length on queues of bytes, whole or not at all, in both flavours that lose nothing."""

import asyncio
import os
import random
import select
import signal

import numpy as np
import pytest
from fmq_peers import SPACE_WAIT, asleep, control_word, must_raise, process, take, thread
from waiting import PATIENCE

import fmq

FLAVOURS = (fmq.Flavour.SYNCHRONIZED, fmq.Flavour.BROADCAST)
CAPACITY = 256  # records of more than 112 bytes go in parts of 48


@pytest.fixture(params=FLAVOURS, ids=lambda flavour: flavour.name.lower())
def queue(request):
    with fmq.MessageQueue.create("u1", CAPACITY, request.param) as made:
        yield made


@pytest.fixture
def ends(queue):
    with queue.writer() as w, queue.reader() as r:
        yield fmq.RecordWriter(w), fmq.RecordReader(r)


def record(n):
    return random.Random(n).randbytes(n)


@pytest.mark.parametrize("length", [0, 1, 5, 111, 112, 113, 240, 241])
def test_each_length_crosses(ends, length):
    """Ten times each, so that heads and bytes wrap."""
    out, back = ends
    for _ in range(10):
        with thread(out.send, record(length)):
            assert back.receive(20) == record(length)


def test_a_record_may_be_longer_than_the_ring(ends):
    """A hundred times; the other side reads while it is written."""
    out, back = ends
    with thread(out.send, record(100 * CAPACITY)):
        assert back.receive(20) == record(100 * CAPACITY)


@pytest.mark.parametrize(
    "data",
    [b"abc", bytearray(b"abc"), memoryview(b"abc"), np.frombuffer(b"abc", "u1"), np.arange(6.0)],
    ids=["bytes", "bytearray", "memoryview", "array", "array of floats"],
)
def test_any_buffer_is_sent(ends, data):
    """As its bytes; what arrives is bytes."""
    out, back = ends
    out.send(data)
    received = back.receive()
    assert type(received) is bytes
    assert received == bytes(data)


def test_receives_into_a_buffer(ends):
    """Its length is returned, and what is behind it stays."""
    out, back = ends
    for n in (3, 600):
        room = np.full(n + 2, 7, "u1")
        with thread(out.send, record(n)):
            assert back.receive(20, into=room) == n
        assert room[:n].tobytes() == record(n)
        assert room[n:].tolist() == [7, 7]


def send_each(out, *records):
    for each in records:
        out.send(each, 20)


@pytest.mark.parametrize("n", [50, 600])
def test_a_record_that_is_too_long_is_skipped(queue, n):
    """By `most`, and by `into`; the next one is received."""
    with queue.writer() as w, queue.reader() as r:
        out, back = fmq.RecordWriter(w), fmq.RecordReader(r, most=n - 1)
        for how in ({}, {"into": bytearray(n - 2)}):
            with thread(send_each, out, record(n), b"next"):
                with pytest.raises(fmq.TooLong, match=f"{n} bytes"):
                    back.receive(20, **how)
                assert back.receive(20) == b"next"
        must_raise(ValueError, fmq.RecordReader, r, -1)


def test_a_record_that_was_given_up_is_not_delivered(ends):
    """A record that its writer gave up half way is not delivered, and the next one is."""
    out, back = ends
    must_raise(fmq.Timeout, back.receive, 0)
    sent = record(600)
    must_raise(fmq.Timeout, out.send, sent, 0)  # four parts of it fit
    must_raise(fmq.Timeout, back.receive, 0)
    with thread(out.send, b"next"):  # begins another one; the half record is dropped
        assert back.receive(20) == b"next"


def test_queues_that_have_no_records_are_refused(pair, queue):
    """Of other elements, of the flavour that loses some, or too small; and bytes that are none."""
    for dtype, capacity, flavour in (("u2", 256, 1), ("u1", 256, 2), ("u1", 63, 1)):
        other = fmq.MessageQueue.create(dtype, capacity, flavour)
        must_raise(ValueError, fmq.RecordWriter, other.writer())
        must_raise(ValueError, fmq.RecordReader, other.reader())
    with queue.writer() as w, queue.reader() as r:
        back = fmq.RecordReader(r)
        w.write(np.arange(20))
        for _ in range(2):
            must_raise(fmq.Corrupt, back.receive, 0)


@pytest.mark.parametrize(("bytes_", "total", "flags"), [(300, 300, 3), (10, 5, 1), (5, 10, 3), (5, 2**40, 4)], ids=str)
def test_heads_that_lie_are_refused(queue, bytes_, total, flags):
    """More bytes than the ring has, or than the record; a whole record that is longer than itself; unknown flags."""
    with queue.writer() as w, queue.reader() as r:
        head = np.array([(0x52454300 | flags, bytes_, total)], "u4, u4, u8")
        w.write(np.frombuffer(head.tobytes() + bytes(10), "u1"))
        must_raise(fmq.Corrupt, fmq.RecordReader(r).receive, 0)


def test_a_head_that_promises_too_much_costs_no_memory(queue):
    """Two to the 60th bytes: more than `most`."""
    with queue.writer() as w, queue.reader() as r:
        head = np.array([(0x52454301, 5, 2**60)], "u4, u4, u8")
        w.write(np.frombuffer(head.tobytes() + bytes(5), "u1"))
        must_raise(fmq.TooLong, fmq.RecordReader(r).receive, 0)


def test_a_late_reader_begins_with_a_record():
    """It joins in the middle of one, of which it gets nothing."""
    with fmq.MessageQueue.create("u1", CAPACITY, fmq.Flavour.BROADCAST) as queue, queue.writer() as w:
        out = fmq.RecordWriter(w)
        with queue.reader() as early, thread(send_each, out, record(600), b"whole"):
            asleep(control_word(queue, SPACE_WAIT))
            with queue.reader() as late, thread(expect, late, b"whole"):
                back = fmq.RecordReader(early)
                assert [back.receive(20), back.receive(20)] == [record(600), b"whole"]


def expect(reader, sent):
    assert fmq.RecordReader(reader).receive(20) == sent


def send_half_and_die(descriptor):
    """A record, four parts of a long one, and kill -9."""
    with fmq.MessageQueue.open(descriptor).writer() as w:
        out = fmq.RecordWriter(w)
        out.send(b"whole")
        try:
            out.send(record(600), 0)
        except fmq.Timeout:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_dies_in_the_middle(queue):
    """The records before it arrive, then PeerDied, and no half record; a successor's first record is whole."""
    with queue.reader() as r:
        back = fmq.RecordReader(r)
        with process(send_half_and_die, queue.descriptor, fails=True) as child:
            child.join()
        assert back.receive(PATIENCE) == b"whole"
        must_raise(fmq.PeerDied, back.receive, 10)
        with take(queue, "writer") as w, thread(fmq.RecordWriter(w).send, record(300)):
            assert back.receive(20) == record(300)


def send_all(descriptor, count, seed):
    rng = random.Random(seed)
    with fmq.MessageQueue.open(descriptor).writer() as w:
        out = fmq.RecordWriter(w)
        for _ in range(count):
            out.send(record(rng.randrange(400)), 20)


def test_processes_exchange_records(queue):
    """A thousand of all lengths, from another process."""
    rng = random.Random(1)
    with queue.reader() as r, process(send_all, queue.descriptor, 1000, 1):
        back = fmq.RecordReader(r)
        for _ in range(1000):
            assert back.receive(20) == record(rng.randrange(400))


def test_records_in_asyncio_and_select(queue):
    """Both sides in one loop, and longer than the ring; `fileno` is the end's."""

    async def both(out, back):
        sent, received = await asyncio.gather(out.send_async(record(3000)), back.receive_async())
        assert sent is None
        assert received == record(3000)
        await asyncio.gather(out.send_async(b"short"), back.receive_async())

    with queue.writer() as w, queue.reader() as r:
        out, back = fmq.RecordWriter(w), fmq.RecordReader(r)
        asyncio.run(both(out, back))
        assert not select.select([r], [], [], 0)[0]
        out.send(b"x")
        assert select.select([r], [], [], 20)[0] == [r]
        assert back.receive(0) == b"x"
        assert not select.select([r], [], [], 0)[0]


def test_an_evicted_receiver_is_told():
    """And returns nothing of the record that it was in."""
    queue = fmq.MessageQueue.create("u1", CAPACITY, fmq.Flavour.BROADCAST)
    with queue.writer() as w, queue.reader() as r:
        back, out = fmq.RecordReader(r), fmq.RecordWriter(w)
        with pytest.raises(fmq.Timeout, match="holds the writer up") as caught:
            out.send(record(600), 0)
        w.evict(caught.value.reader)
        must_raise(fmq.Evicted, back.receive, 0)
        out.send(record(600), 0)


def test_a_record_is_lent_where_it_lies(ends):
    """It is no copy, cannot be written to, and is the next one's room when the block has ended."""
    out, back = ends
    for n in range(20):  # some lie around the end of the ring, and are copies
        out.send(record(50 + n))
        with back.receive_in_place(20) as lent:
            assert lent == record(50 + n)
            assert lent.readonly
        with pytest.raises(ValueError, match="released"):
            lent[0]


def test_a_long_record_is_lent_as_a_copy(ends):
    """One in parts, as `receive` has it."""
    out, back = ends
    with thread(out.send, record(3 * CAPACITY)), back.receive_in_place(20) as lent:
        assert lent == record(3 * CAPACITY)


def test_what_is_kept_of_a_lent_record_is_told(ends):
    """The record stays unread, as its room must not be overwritten; without the array it is taken."""
    out, back = ends
    out.send(b"kept")
    kept = []
    with pytest.raises(BufferError), back.receive_in_place(20) as lent:
        kept.append(np.frombuffer(lent, "u1"))
    assert bytes(kept.pop()) == b"kept"
    assert back.receive(20) == b"kept"
    with pytest.raises(fmq.Timeout), back.receive_in_place(0):
        pass


def test_a_record_that_is_too_long_is_not_lent(queue):
    """It is skipped and told, as `receive` does; the next one is there."""
    with queue.writer() as w, queue.reader() as r:
        out, back = fmq.RecordWriter(w), fmq.RecordReader(r, most=3)
        out.send(b"long")
        out.send(b"ok")
        with pytest.raises(fmq.TooLong), back.receive_in_place(20):
            pass
        with back.receive_in_place(20) as lent:
            assert lent == b"ok"


def test_a_lent_record_of_an_evicted_reader_is_not_to_be_believed():
    """Whoever is evicted meanwhile learns it at the end of the block."""
    with fmq.MessageQueue.create("u1", CAPACITY, fmq.Flavour.BROADCAST) as made, made.writer() as w, made.reader() as r:
        fmq.RecordWriter(w).send(b"abc")
        lent = fmq.RecordReader(r).receive_in_place(20)
        assert lent.__enter__() == b"abc"
        w.evict(w.readers[0])
        with pytest.raises(fmq.Evicted):
            lent.__exit__(None, None, None)
