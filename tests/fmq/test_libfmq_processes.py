"""What libfmq's two-process tests verify, items 22 to 31, and that the table in libfmq.md is whole.

The cross-process versions of items 6 to 15 are in test_libfmq.py, whose reader is in another process as well.
"""

import multiprocessing
import os
import re
from pathlib import Path

import numpy as np
import pytest
from fmq_peers import HEAD, TAIL, control_counter, in_a_fork, must_raise, process, write_array
from waiting import PATIENCE, until

import fmq

SYNCHRONIZED, UNSYNCHRONIZED, _ = fmq.Flavour
CAPACITY = 1024
HERE = Path(__file__).parent


@pytest.fixture(params=["u2", "i4"])
def dtype(request):
    return request.param


@pytest.fixture(params=[SYNCHRONIZED, UNSYNCHRONIZED], ids=lambda flavour: flavour.name.lower())
def flavour(request):
    return request.param


def read_when_told(descriptor, n, pipe):
    """Reads what there is whenever it is told to; says Overrun's position, or the first and the last element."""
    with fmq.MessageQueue.open(descriptor).reader() as r:
        pipe.send("here")
        while pipe.recv():
            try:
                elements = r.read(n, 0)
            except fmq.Overrun as error:
                pipe.send(("overrun", error.position))
            else:
                pipe.send((int(elements[0]), int(elements[-1])))


def test_22_readers_recover_from_an_overflow(dtype):
    """Two reader processes, one after the other: each is overrun, told so once, and reads on from where it was told."""
    queue = fmq.MessageQueue.create(dtype, CAPACITY, UNSYNCHRONIZED)
    with queue.writer() as w:
        for _ in range(2):
            ours, theirs = multiprocessing.Pipe()
            with process(read_when_told, queue.descriptor, 16, theirs):
                assert ours.recv() == "here"
                start = w.position
                w.write(np.arange(start, start + CAPACITY) % 30000)
                w.write(np.arange(start + CAPACITY, start + CAPACITY + 16) % 30000)
                ours.send(True)
                what, position = ours.recv()
                assert (what, position) == ("overrun", start + CAPACITY + 16 - CAPACITY // 2)
                ours.send(True)
                assert ours.recv() == (position % 30000, (position + 15) % 30000)
                ours.send(False)


@pytest.mark.parametrize("form", ["long", "short"])
def test_23_blocking_read_write(dtype, form):
    """The other process reads 64 and then all; the write of a whole capacity succeeds because that one drains.

    The long form has a flag that is told of each transfer, the short one has not.
    """
    queue = fmq.MessageQueue.create(dtype, CAPACITY)
    with queue.writer() as w, process(read_both, queue.descriptor, form):
        if form == "long":
            w.notify(queue.event_flag, 2)
        w.write(range(64), PATIENCE)
        w.write(range(CAPACITY), PATIENCE)
        if form == "long":
            assert queue.event_flag.wait(1, PATIENCE) == 1


def read_both(descriptor, form):
    queue = fmq.MessageQueue.open(descriptor)
    with queue.reader() as r:
        if form == "long":
            assert queue.event_flag.wait(2, PATIENCE) == 2
            r.notify(queue.event_flag, 1)
        assert r.read(64, PATIENCE).tolist() == list(range(64))
        assert r.read(CAPACITY, PATIENCE).tolist() == list(range(CAPACITY))


@pytest.mark.parametrize(("reads", "of"), [(1024, 64), (512, 128), (2048, 32)])
def test_24_blocking_read_write_repeat(reads, of):
    """1024 writes of 64 against reads of as much, of twice and of half; then one of the whole capacity."""
    queue = fmq.MessageQueue.create("i8", CAPACITY)
    with queue.reader() as r, process(write_repeatedly, queue.descriptor):
        for i in range(reads):
            assert np.array_equal(r.read(of, PATIENCE), np.arange(i * of, (i + 1) * of))
        assert r.read(CAPACITY, PATIENCE).tolist() == list(range(CAPACITY))


def write_repeatedly(descriptor):
    with fmq.MessageQueue.open(descriptor).writer() as w:
        for i in range(1024):
            w.write(np.arange(i * 64, (i + 1) * 64), PATIENCE)
        w.write(range(CAPACITY), PATIENCE)


def test_25_zero_messages(flavour):
    """Transfers of nothing succeed at once, without a timeout, whatever the queue holds, in both ways."""
    queue = fmq.MessageQueue.create("u2", 4, flavour)
    w, r = queue.writer(), queue.reader()
    for _ in range(2):
        w.write([])
        assert len(r.read(0)) == 0
        with w.reserve(0) as out, r.peek(0) as back:
            assert len(out) == len(back) == 0
        w.try_write([1, 2, 3, 4])


@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("here", ["writer", "reader"])
def test_26_small_input_across_processes(dtype, flavour, here, in_place):
    """16 elements from either side, by copy and in place; when they were read, the writer has its places back."""
    there, back = fmq.MessageQueue.create(dtype, CAPACITY, flavour), fmq.MessageQueue.create(dtype, CAPACITY, flavour)
    with back.reader() as r, there.writer() as w, process(send_back, there.descriptor, back.descriptor, in_place):
        assert r.read(1, PATIENCE)[0] == 0
        if in_place and here == "writer":
            with w.reserve(16, PATIENCE) as span:
                span[:] = range(16)
        else:
            w.write(range(16))
        if in_place and here == "reader":
            with r.peek(16, PATIENCE) as span:
                assert np.array(span).tolist() == list(range(16))
        else:
            assert r.read(16, PATIENCE).tolist() == list(range(16))
        until(lambda: w.available == CAPACITY)


def send_back(there, back, in_place):
    """Says 0 when it has come, then returns 16 elements."""
    with fmq.MessageQueue.open(there).reader() as r, fmq.MessageQueue.open(back).writer() as w:
        w.write([0])
        if in_place:
            with r.peek(16, PATIENCE) as came, w.reserve(16, PATIENCE) as goes:
                goes[:] = np.array(came)
        else:
            w.write(r.read(16, PATIENCE), PATIENCE)


def test_28_unsynchronized_write_when_full_recovers(dtype):
    """The other process is overrun, and reads what is written afterwards."""
    queue = fmq.MessageQueue.create(dtype, CAPACITY, UNSYNCHRONIZED)
    ours, theirs = multiprocessing.Pipe()
    with queue.writer() as w, process(read_when_told, queue.descriptor, CAPACITY // 2, theirs):
        assert ours.recv() == "here"
        w.write(range(CAPACITY))
        assert w.try_write([CAPACITY])
        ours.send(True)
        assert ours.recv() == ("overrun", CAPACITY // 2 + 1)
        for first in (CAPACITY // 2 + 1, CAPACITY + 1):
            ours.send(True)
            assert ours.recv() == (first, first + CAPACITY // 2 - 1)
            w.write(range(CAPACITY + 1, CAPACITY + 1 + CAPACITY // 2)) if first < CAPACITY else None
        ours.send(False)


def test_29_a_forked_reader_is_a_second_reader():
    """Parent and child each read all 16, and each is told of an overrun; a synchronized end stays the parent's."""
    queue, other = (fmq.MessageQueue.create("u2", CAPACITY, each) for each in (UNSYNCHRONIZED, SYNCHRONIZED))
    w, r, synchronized = queue.writer(), queue.reader(), other.reader()
    w.write(range(16))

    def read():
        assert r.read(16, 0).tolist() == list(range(16))

    in_a_fork(read)
    read()
    for _ in range(2):
        w.write(range(CAPACITY))
    in_a_fork(lambda: must_raise(fmq.Overrun, r.read, 1, 0))
    must_raise(fmq.Overrun, r.read, 1, 0)
    in_a_fork(lambda: must_raise(fmq.Closed, synchronized.read, 1, 0))


def test_30_a_damaged_counter():
    """Poked by another process: its own counter is private to the writer, the other ends the channel."""
    queue = fmq.MessageQueue.create("u2", CAPACITY)
    w = queue.writer()
    w.write([1])
    with process(poke, queue.descriptor, HEAD, 2 * CAPACITY - 1):
        pass
    w.write([2])
    assert control_counter(queue, HEAD)[0] == 2
    with process(poke, queue.descriptor, TAIL, 2 * CAPACITY - 1):
        pass
    for _ in range(2):
        must_raise(fmq.Corrupt, w.write, np.zeros(CAPACITY), 1)


def poke(descriptor, offset, value):
    descriptor.region().asarray(np.uint64, 1, offset)[0] = value


PAYLOADS = {
    "bool": "?",
    "byte": "i1",
    "char": "S1",
    "char16": "u2",
    "int": "i4",
    "long": "i8",
    "float": "f4",
    "double": "f8",
    "fixed parcelable": np.dtype([("a", "i1"), ("b", "i8"), ("c", "f4", (3,))], align=True),
    "fixed union as bytes": "V16",
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_31_payload_types(flavour, payload):
    """Each kind of element from another process, bit for bit; an enum is its integer."""
    queue = fmq.MessageQueue.create(payload, CAPACITY, flavour)
    sent = np.frombuffer(bytes(i % 2 for i in range(queue.dtype.itemsize)), queue.dtype)
    with queue.reader() as r, process(write_array, queue.descriptor, sent):
        got = r.read(1, PATIENCE)
        assert (got.dtype, got.tobytes()) == (queue.dtype, sent.tobytes())


def test_31_payloads_that_could_overlap_are_refused():
    """A union of fields is refused when the queue is made, and the message says what to do."""
    union = {"names": ["a", "b"], "formats": ["u4", "f4"], "offsets": [0, 0]}
    with pytest.raises(ValueError, match="dtype"):
        fmq.MessageQueue.create(union, 4)


# ---- the table -----------------------------------------------------------------------------------------------------


def rows():
    """(number, name, state, tests, remark) of each item."""
    lines = [line for line in (HERE / "libfmq.md").read_text().splitlines() if re.match(r"\| \d", line)]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def test_the_table_names_each_item_once():
    """1 to 32, in order, each kept, changed or dropped; what was not simply kept has a reason, what was has a test."""
    assert [int(number) for number, *_ in rows()] == list(range(1, 33))
    for number, name, state, tests, reason in rows():
        assert name, number
        assert state in {"kept", "changed", "dropped"}, number
        assert reason or state == "kept", number
        assert tests or state == "dropped", number


def test_every_test_in_the_table_exists():
    """And every numbered test is in the table, at its number."""
    there = set(re.findall(r"^def (test_\w+)", "".join(path.read_text() for path in HERE.glob("test_*.py")), re.M))
    named = {number: set(re.findall(r"`(test_\w+)`", tests)) for number, _, _, tests, _ in rows()}
    assert set().union(*named.values()) <= there
    for test in there:
        if numbered := re.match(r"test_(\d\d)_", test):
            assert test in named[str(int(numbered[1]))], test
    assert os.path.exists(HERE / "test_libfmq.py")
