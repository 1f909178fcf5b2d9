"""Looking at queues from outside: true to what the kernel knows, and unnoticed by those inside."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
from fmq_peers import asleep, control_word, hold, new_name, process, thread, write_blocks
from waiting import until

import fmq
from fmq.onlooker import Onlooker

WRITER_LIFE, READER_LIFE = 768, 896  # csrc/fmq/layout.h
ROLES = ("writer", "reader")


def test_a_queue_is_described_as_it_is(name):
    """Every field."""
    queue = fmq.MessageQueue.create([("t", "f8"), ("n", "u2", (3,))], 10, name=name)
    writer, reader = queue.writer(), queue.reader()
    writer.write(np.zeros(7, queue.dtype))
    reader.read(2)
    info = fmq.inspect(name)
    assert (info.name, info.dtype, info.capacity) == (name, queue.dtype, 10)
    assert (info.flavour, info.nbytes, info.mode) == (fmq.Flavour.SYNCHRONIZED, 8192, 0o600)
    assert (info.uid, info.created) == (os.geteuid(), os.stat("/dev/shm" + name).st_mtime)
    assert (info.written, info.read, info.unread) == (7, 2, 5)
    assert (info.who, info.is_stale, info.damage) == (("alive", "alive"), False, None)


def test_an_unsynchronized_queue_has_no_one_position_of_reading(name):
    """read and unread are None; its reader is alive while one is there, and nobody otherwise."""
    queue = fmq.MessageQueue.create("u1", 4, fmq.Flavour.UNSYNCHRONIZED, name=name)
    with queue.writer() as writer:
        writer.write([1, 2, 3])
        info = fmq.inspect(name)
        assert (info.written, info.read, info.unread, info.who) == (3, None, None, ("alive", "nobody"))
    first, second = queue.reader(), fmq.MessageQueue.open(name, writable=False).reader()
    assert fmq.inspect(name).who == ("released", "alive")
    first.close()
    assert not fmq.inspect(name).is_stale
    second.close()
    assert fmq.inspect(name).is_stale


def test_a_forked_childs_copy_of_a_reader_counts(name):
    """It goes on reading in the child, so it is somebody there after the parent's has been closed."""
    ours, theirs = multiprocessing.Pipe()
    with fmq.MessageQueue.create("u1", 4, fmq.Flavour.UNSYNCHRONIZED, name=name) as queue, queue.reader():
        child = process(theirs.recv)
        child.__enter__()
    assert fmq.inspect(name).reader == "alive"
    ours.send(None)
    child.__exit__(None, None, None)
    assert fmq.inspect(name).reader == "nobody"


@pytest.mark.parametrize("role", ROLES)
def test_a_role_goes_from_nobody_through_alive_to_released_or_dead(name, role):
    """As the other sees it who only looks."""
    which = ROLES.index(role)
    queue = fmq.MessageQueue.create("u1", 8, name=name)
    assert fmq.inspect(name).who == ("nobody", "nobody")
    assert not fmq.inspect(name).is_stale
    with getattr(queue, role)():
        assert fmq.inspect(name).who[which] == "alive"
    assert fmq.inspect(name).who[which] == "released"
    ready, theirs = multiprocessing.Pipe()
    with process(hold, queue.descriptor, role, theirs, fails=True) as child:
        ready.recv()
        assert fmq.inspect(name).who[which] == "alive"
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: fmq.inspect(name).who[which] == "dead")
    assert fmq.inspect(name).is_stale


@pytest.mark.parametrize(("role", "at"), [("writer", WRITER_LIFE), ("reader", READER_LIFE)])
def test_a_scribbled_life_word_makes_nobody_alive_or_dead(name, role, at):
    """The lock decides: a word that claims life is not believed, nor one that denies it."""
    queue = fmq.MessageQueue.create("u1", 8, name=name)
    word = control_word(queue, at)
    word[0] = 0x80000000 | os.getpid()
    assert fmq.inspect(name).who[ROLES.index(role)] == "dead"
    end = getattr(queue, role)()
    for value in (0, 0x80000000, 0xC0000000):
        held, word[0] = int(word[0]), value
        assert fmq.inspect(name).who[ROLES.index(role)] == "alive"
        word[0] = held
    end.close()


def test_queues_are_those_of_dev_shm_that_are_ours(name):
    """Foreign files are skipped; damaged queues are listed, and say why; nothing is left open."""
    foreign, fifo, damaged, short = (new_name() for _ in range(4))
    fmq.MessageQueue.create("u1", 8, name=name)
    fmq.Region.create(4096, name=foreign)
    os.mkfifo("/dev/shm" + fifo)
    control_word(fmq.MessageQueue.create("u1", 8, name=damaged), 1024)[0] = 1
    fmq.MessageQueue.create("u1", 8, name=short)
    os.truncate("/dev/shm" + short, 100)
    before = os.listdir("/proc/self/fd")
    try:
        found = {info.name: info for info in fmq.queues()}
        assert list(found) == sorted(found)
        assert not {foreign, fifo} & set(found)
        assert (found[name].capacity, found[name].damage) == (8, None)
        assert "hash" in found[damaged].damage
        assert "100 bytes" in found[short].damage
        assert (found[damaged].dtype, found[damaged].is_stale) == (None, False)
        with pytest.raises(fmq.InvalidDescriptor, match="hash"):
            fmq.inspect(damaged)
        assert os.listdir("/proc/self/fd") == before
    finally:
        for leftover in (foreign, fifo, damaged, short):
            os.unlink("/dev/shm" + leftover)


@pytest.mark.parametrize(("at", "value"), [(128, 9), (256, 1), (128, 2**64 - 1)])
def test_counters_that_contradict_each_other_are_damage(name, at, value):
    """More unread than fits, or more read than written."""
    queue = fmq.MessageQueue.create("u1", 8, name=name)
    queue.descriptor.region().asarray(np.uint64, 1, at)[0] = value
    with pytest.raises(fmq.InvalidDescriptor, match="contradict"):
        fmq.inspect(name)


def test_an_unknown_name(name):
    """As for open."""
    with pytest.raises(FileNotFoundError, match=name):
        fmq.inspect(name)


def voluntary_switches(pid):
    """Of all threads of a process: how often they went to sleep."""
    counts = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/status") as status:
            counts += [line.split()[1] for line in status if line.startswith("voluntary")]
    return counts


def sleep_in_a_thread(descriptor, ready):
    """The main thread would wake by itself, every 0.1 s, to look for signals."""
    with fmq.MessageQueue.open(descriptor).reader() as reader, thread(reader.read, 10):
        ready.send(True)
        signal.pause()


def is_asleep(pid):
    states = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/stat") as stat:
            states.append(stat.read().rsplit(")", 1)[1].split()[0])
    return set(states) == {"S"}


@pytest.mark.parametrize("flavour", fmq.Flavour)
def test_looking_disturbs_nobody(name, flavour):
    """Not a byte of the memory changes, and a sleeping reader sleeps on: none of its threads ever runs."""
    queue = fmq.MessageQueue.create("u1", 64, flavour, name=name)
    writer, memory = queue.writer(), queue.descriptor.region().asarray()
    ready, theirs = multiprocessing.Pipe()
    with process(sleep_in_a_thread, queue.descriptor, theirs, fails=True) as child:
        ready.recv()
        asleep(control_word(queue, 384))
        writer.write([1, 2, 3])
        asleep(control_word(queue, 384))
        until(lambda: is_asleep(child.pid))
        before = bytes(memory)
        with Onlooker(name) as onlooker:

            def looks():
                """Fifty times, and returns whether nobody ran: on a busy machine a thread may still be lying down."""
                switches = voluntary_switches(child.pid)
                for _ in range(50):
                    assert fmq.inspect(name).written == 3
                    assert name in [info.name for info in fmq.queues()]
                    onlooker.keep_latest(2)
                    assert list(onlooker.look().elements) == [2, 3]
                return voluntary_switches(child.pid) == switches

            until(looks)
        assert bytes(memory) == before
        child.kill()


# ---- onlookers -------------------------------------------------------------------------------------------------------


def test_an_onlooker_sees_what_is_unread_and_takes_nothing(name):
    """Across the wrap point too."""
    queue = fmq.MessageQueue.create("i8", 8, name=name)
    writer, reader, onlooker = queue.writer(), queue.reader(), Onlooker(name)
    writer.write(np.arange(6))
    assert list(onlooker.look().elements) == [0, 1, 2, 3, 4, 5]
    reader.read(5)
    writer.write(np.arange(6, 12))
    sight = onlooker.look()
    assert (sight.first, list(sight.elements), sight.missed, sight.doubtful) == (6, [6, 7, 8, 9, 10, 11], 0, 0)
    assert len(onlooker.look().elements) == 0
    assert list(reader.read(7, 0)) == [5, 6, 7, 8, 9, 10, 11]


def test_what_the_reader_took_is_missed_or_doubtful(name):
    """Left out and counted, unless it is asked for."""
    queue = fmq.MessageQueue.create("i8", 8, name=name)
    writer, reader = queue.writer(), queue.reader()
    strict, curious = Onlooker(name), Onlooker(name, with_taken=True)
    for first in (0, 5):
        writer.write(np.arange(first, first + 5))
        reader.read(4)
    sight = strict.look()
    assert (sight.first, list(sight.elements), sight.missed, sight.doubtful) == (8, [8, 9], 8, 0)
    sight = curious.look()
    assert (sight.first, list(sight.elements), sight.missed, sight.doubtful) == (2, [2, 3, 4, 5, 6, 7, 8, 9], 2, 6)


def test_what_is_being_overwritten_is_not_shown(name):
    """An open reservation of an unsynchronized queue takes what it covers away from onlookers."""
    queue = fmq.MessageQueue.create("i8", 8, fmq.Flavour.UNSYNCHRONIZED, name=name)
    writer, onlooker = queue.writer(), Onlooker(name)
    writer.write(np.arange(8))
    with writer.reserve(3) as span:
        span[:] = -1
        sight = onlooker.look()
        assert (sight.first, list(sight.elements), sight.missed) == (3, [3, 4, 5, 6, 7], 3)
        span[:] = [8, 9, 10]
    assert list(onlooker.look().elements) == [8, 9, 10]


def test_an_element_that_is_overwritten_between_head_and_tail_is_left_out(name, monkeypatch):
    """The look at tail after the copy decides, for a reader and a writer that came in between."""
    queue = fmq.MessageQueue.create("i8", 4, name=name)
    writer, reader, onlooker = queue.writer(), queue.reader(), Onlooker(name)
    writer.write([0, 1, 2, 3])
    copy = Onlooker._copy

    def copy_and_be_overtaken(self, first, last):
        reader.read(2)
        writer.write([4, 5])
        return copy(self, first, last)

    monkeypatch.setattr(Onlooker, "_copy", copy_and_be_overtaken)
    sight = onlooker.look()
    assert (sight.first, list(sight.elements), sight.missed) == (2, [2, 3], 2)


@pytest.mark.parametrize("flavour", fmq.Flavour)
def test_an_onlooker_of_a_running_stream_sees_only_true_elements(name, flavour):
    """Every element is its own position, however fast the stream runs past; nothing is shown twice."""
    queue = fmq.MessageQueue.create("i8", 50, flavour, name=name)
    onlooker, last, seen, missed = Onlooker(name), 0, 0, 0
    with queue.reader() as reader, process(write_blocks, queue.descriptor, 0, 3000, 7) as child:

        def drain():
            while flavour is not fmq.Flavour.UNSYNCHRONIZED and reader.position < 21000:
                reader.read(7, 10)

        with thread(drain):
            while last < 21000:
                assert child.exitcode in {None, 0}
                sight = onlooker.look()
                assert np.array_equal(sight.elements, np.arange(sight.first, sight.first + len(sight.elements)))
                assert sight.first - sight.missed == last
                last, seen, missed = onlooker.position, seen + len(sight.elements), missed + sight.missed
    assert seen + missed == 21000


def test_an_onlooker_notices_the_end(name):
    """When the name is gone, and everybody who used the queue."""
    queue = fmq.MessageQueue.create("u1", 8, name=name)
    writer, onlooker = queue.writer(), Onlooker(name)
    fmq.unlink(name)
    assert not onlooker.is_over
    writer.close()
    assert onlooker.is_over


def test_a_head_that_goes_back_is_refused(name):
    """Rather than shown as something new."""
    queue = fmq.MessageQueue.create("u1", 8, name=name)
    onlooker = Onlooker(name)
    queue.writer().write([1, 2])
    onlooker.look()
    queue.descriptor.region().asarray(np.uint64, 1, 128)[0] = 1
    with pytest.raises(fmq.Corrupt, match="went back"):
        onlooker.look()
