"""The other process dies: told whatever its size, what it left can be read, and a successor goes on."""

import errno
import multiprocessing
import os
import signal
import statistics
import time

import numpy as np
import pytest
from fmq_peers import DATA_WAIT, SPACE_WAIT, asleep, control_word, hold, hold_fat, process, take, thread
from refused_calls import FUTEX_WAITV, refuse
from waiting import PATIENCE, until

import fmq


@pytest.fixture
def queue():
    with fmq.MessageQueue.create("i8", 8) as made:
        yield made


def time_to_be_told(queue, call, word, victim):
    """Milliseconds from the kill of a real process to PeerDied in a thread that sleeps on it."""
    told = []

    def wait():
        with pytest.raises(fmq.PeerDied) as caught:
            call()
        told.append(time.monotonic())
        assert isinstance(caught.value, ConnectionError)

    with thread(wait):
        asleep(word)
        begin = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
    return (told[0] - begin) * 1e3


WAYS = ["read", "peek", "write", "reserve", "exchange"]


def time_in(queue, what):
    """Milliseconds until such a call tells of its peer's death."""
    victim_role = "reader" if what in ("write", "reserve") else "writer"
    end = queue.writer() if victim_role == "reader" else queue.reader()
    if victim_role == "reader":
        end.write(np.arange(8))
    calls = {
        "read": lambda: end.read(1),
        "peek": lambda: end.peek(1).__enter__(),
        "write": lambda: end.write([1]),
        "reserve": lambda: end.reserve(1).__enter__(),
        "exchange": lambda: fmq.Exchange(fmq.MessageQueue.create("i8", 8).writer(), end)(b""),
    }
    ready, theirs = multiprocessing.Pipe()
    with process(hold, queue.descriptor, victim_role, theirs, fails=True) as victim:
        ready.recv()
        word = control_word(queue, SPACE_WAIT if victim_role == "reader" else DATA_WAIT)
        took = time_to_be_told(queue, calls[what], word, victim)
        assert end.peer == "dead"
    end.close()
    return took


@pytest.mark.parametrize("what", WAYS)
def test_every_wait_ends_with_the_peer(queue, what):
    """A sleeper is told, in each call that can sleep."""
    time_in(queue, what)


@pytest.mark.stress
@pytest.mark.parametrize("what", WAYS)
def test_every_wait_ends_within_100_ms_of_the_peers_death(what):
    """In most of nine cases: a machine may be busy now and then."""
    times = []
    for _ in range(9):
        with fmq.MessageQueue.create("i8", 8) as queue:
            times.append(time_in(queue, what))
    assert statistics.median(times) < 100


@pytest.mark.stress
def test_a_fat_peer_is_no_exception(queue):
    """1 GiB of resident memory takes the kernel a while to free; the sleeper is told before that."""
    end = queue.reader()
    ready, theirs = multiprocessing.Pipe()
    with process(hold_fat, queue.descriptor, "writer", theirs, 2**30, fails=True) as victim:
        ready.recv()
        assert time_to_be_told(queue, lambda: end.read(1), control_word(queue, DATA_WAIT), victim) < 100


def test_a_spinning_wait_is_told_as_well(queue):
    """A window of ten seconds does not outlast the peer: a wait that would be over before it is told."""
    end = queue.reader()
    end.spin = 10
    ready, theirs = multiprocessing.Pipe()
    with process(hold, queue.descriptor, "writer", theirs, fails=True) as victim:
        ready.recv()
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(fmq.PeerDied):
            end.read(1, 9)


def be_told_on_an_old_kernel(descriptor, error, pipe):
    """Sends when it was told."""
    refuse(error, FUTEX_WAITV)
    with fmq.MessageQueue.open(descriptor) as queue, queue.reader() as r:
        r.spin = 0
        with pytest.raises(fmq.PeerDied):
            r.read(1, PATIENCE)
        pipe.send(time.monotonic())


def time_on_an_old_kernel(queue, error):
    """Seconds until a reader there tells of its writer's death."""
    ready, theirs = multiprocessing.Pipe()
    told, tell = multiprocessing.Pipe()
    with process(hold, queue.descriptor, "writer", theirs, fails=True) as victim:
        ready.recv()
        with process(be_told_on_an_old_kernel, queue.descriptor, error, tell):
            asleep(control_word(queue, DATA_WAIT))
            begin = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            assert told.poll(PATIENCE)
            return told.recv() - begin


OLD_KERNELS = pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM], ids=["ENOSYS", "EPERM"])


@OLD_KERNELS
def test_an_old_kernel_is_polled(queue, error):
    """Without futex_waitv, as before Linux 5.16 and in some containers, a sleeper looks."""
    time_on_an_old_kernel(queue, error)


@pytest.mark.stress
@OLD_KERNELS
def test_an_old_kernel_is_polled_20_times_a_second(error):
    """So a death is told within 100 ms there, too, in most of nine cases."""
    times = []
    for _ in range(9):
        with fmq.MessageQueue.create("i8", 8) as queue:
            times.append(time_on_an_old_kernel(queue, error))
    assert statistics.median(times) < 0.1


def test_the_main_thread_is_told_too(queue):
    """Its sleeps are sliced for signals, and end with the peer all the same."""
    end = queue.reader()
    ready, theirs = multiprocessing.Pipe()
    with process(hold, queue.descriptor, "writer", theirs, fails=True) as victim:
        ready.recv()

        def kill():
            asleep(control_word(queue, DATA_WAIT))
            os.kill(victim.pid, signal.SIGKILL)

        with thread(kill), pytest.raises(fmq.PeerDied):
            end.read(1)


def test_what_the_dead_left_can_be_read(queue):
    """All elements that it published, and then PeerDied; asking for more than it left fails without taking any."""
    with queue.reader() as r, process(die_after_writing, queue.descriptor, fails=True) as victim:
        victim.join()
        with pytest.raises(fmq.PeerDied):
            r.read(4)
        assert list(r.read(2)) == [1, 2]
        assert list(r.read(1)) == [3]
        with pytest.raises(fmq.PeerDied):
            r.read(1)
        with pytest.raises(fmq.PeerDied):
            r.try_read(1)


def die_after_writing(descriptor):
    w = fmq.MessageQueue.open(descriptor).writer()
    w.write([1, 2, 3])
    with w.reserve(2) as span:
        span[:] = 9
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_successor_of_the_writer_goes_on_without_a_loss(queue):
    """What the dead writer left is still there, in front of what the new one writes; PeerDied goes away."""
    with queue.reader() as r:
        with process(die_after_writing, queue.descriptor, fails=True) as victim:
            victim.join()
        with pytest.raises(fmq.PeerDied):
            r.read(8, 10)
        w = take(queue, "writer")
        assert (r.peer, w.available) == ("alive", 5)
        w.write([4, 5])
        assert list(r.read(5)) == [1, 2, 3, 4, 5]


def test_a_successor_of_the_reader_goes_on_without_a_loss(queue):
    """The new reader starts behind the last element that the dead one took, however far it had looked."""
    with queue.writer() as w:
        w.write(np.arange(6))
        with process(die_while_peeking, queue.descriptor, fails=True) as victim:
            victim.join()
        with pytest.raises(fmq.PeerDied):
            w.write(np.arange(6, 12))
        r = take(queue, "reader")
        assert r.available == 4
        w.write(np.arange(6, 10))
        assert list(r.read(8)) == list(range(2, 10))


def die_while_peeking(descriptor):
    r = fmq.MessageQueue.open(descriptor).reader()
    r.read(2)
    with r.peek(3):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_waiter_is_served_by_the_successor(queue):
    """After PeerDied, waiting again lasts until the successor writes: the old death is not told twice."""
    with queue.reader() as r:
        with process(die_after_writing, queue.descriptor, fails=True) as victim:
            victim.join()
        r.read(3)
        with process(write_when_free, queue.descriptor):
            until(lambda: r.peer != "dead")
            assert list(r.read(4, 10)) == [0, 1, 2, 3]


def write_when_free(descriptor):
    with take(fmq.MessageQueue.open(descriptor), "writer") as w:
        w.write(np.arange(4))
