"""A peer dies and its life word is not marked: the kernel's walk met a page that it could not touch. Each wait ends all
the same, when the kernel has closed the dead process's files.
"""

import asyncio
import multiprocessing
import os
import select
import signal
import socket
import time

import numpy as np
import pytest
from fmq_peers import DATA_WAIT, SPACE_WAIT, asleep, control_word, process, thread
from waiting import until

import fmq
from fmq._core import lib
from fmq.region import Region
from fmq.role import LIFE_AT, READER, WRITER

ANYWAY = 1.1  # seconds, for a process of less than a GB


def break_walk():
    """From now on the kernel marks none of this process's words at its death."""
    page = os.memfd_create("broken")
    os.ftruncate(page, 4096)
    assert lib.fmq_life_hold(page, 0, 1) >= 0
    os.ftruncate(page, 0)


def hold_unmarked(descriptor, role, ready):
    queue = fmq.MessageQueue.open(descriptor)
    with queue.writer() if role == "writer" else queue.reader():
        break_walk()
        ready.send(True)
        signal.pause()


def read_soon(end):
    poll = select.poll()
    poll.register(end.fileno(), select.POLLIN)
    poll.poll()
    end.read(1)


WAITS = {
    "read": ("writer", lambda end, _: end.read(1)),
    "peek": ("writer", lambda end, _: end.peek(1).__enter__()),
    "write": ("reader", lambda end, _: end.write([1])),
    "exchange": ("writer", lambda end, _: fmq.Exchange(fmq.MessageQueue.create("i8", 8).writer(), end)(b"")),
    "wait_any": ("writer", lambda end, _: fmq.wait_any([end])[0].read(1)),
    "event": ("writer", lambda end, queue: queue.event_flag.wait(1, peers=[end])),
    "select": ("writer", lambda end, _: read_soon(end)),
    "asyncio": ("writer", lambda end, _: asyncio.run(end.read_async(1))),
}


@pytest.fixture(params=["memfd", "named"])
def queue(request):
    name = f"/fmq-test-unmarked-{os.getpid()}-" if request.param == "named" else None
    with fmq.MessageQueue.create("i8", 8, name=name) as made:
        yield made
    if name:
        fmq.unlink(name)


def seconds_to_be_told(queue, what):
    """Until such a wait tells of its peer's death, though the word still says that it lives. The queue works on."""
    role, wait = WAITS[what]
    end = queue.writer() if role == "reader" else queue.reader()
    if role == "reader":
        end.write(np.arange(8))
    told = []

    def run():
        with pytest.raises(fmq.PeerDied):
            wait(end, queue)
        told.append(time.monotonic())

    ready, theirs = multiprocessing.Pipe()
    with process(hold_unmarked, queue.descriptor, role, theirs, fails=True) as victim:
        ready.recv()
        with thread(run):
            if what == "event":
                sleepers = control_word(queue, 644)
                until(lambda: sleepers[0])
            elif what != "select":
                asleep(control_word(queue, SPACE_WAIT if role == "reader" else DATA_WAIT))
            begin = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
        region = queue.descriptor.region()
        state = lib.fmq_life_state(region.base + LIFE_AT[READER if role == "reader" else WRITER])
        assert state == lib.FMQ_ALIVE, "it was marked: this test shows nothing"
        assert end.peer == "dead"
    with queue.reader() if role == "reader" else queue.writer() as successor:
        assert end.peer == "alive"
        if role == "reader":
            assert list(successor.read(8)) == list(range(8))
            end.write([8])
        else:
            successor.write([5])
            assert list(end.read(1)) == [5]
    end.close()
    return told[0] - begin


@pytest.mark.parametrize("what", WAITS)
def test_every_wait_ends_without_a_mark(queue, what):
    """PeerDied, though the word still says that the peer lives; and the queue can be used again."""
    seconds_to_be_told(queue, what)


@pytest.mark.stress
@pytest.mark.parametrize("what", WAITS)
def test_every_wait_ends_soon_without_a_mark(queue, what):
    """Within 1.1 s."""
    assert seconds_to_be_told(queue, what) < ANYWAY


def test_last_words_come_first(queue):
    """What an unmarked dead peer had written is read before its death is told."""
    end, ready = queue.reader(), multiprocessing.Pipe()

    def write_and_wait(descriptor, theirs):
        with fmq.MessageQueue.open(descriptor).writer() as writer:
            break_walk()
            writer.write([1, 2, 3])
            theirs.send(True)
            signal.pause()

    with process(write_and_wait, queue.descriptor, ready[1], fails=True) as victim:
        ready[0].recv()
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: end.peer == "dead")
        assert list(end.read(3)) == [1, 2, 3]
        with pytest.raises(fmq.PeerDied):
            end.read(1)


def test_a_truncated_queue_hides_no_life_page():
    """A process that has a word in a queue that is truncated: its LifePages are marked, whichever came first."""
    near, far = socket.socketpair()

    def victim_main():
        pages = [fmq.LifePage()]
        queue = os.memfd_create("queue")
        os.ftruncate(queue, 4096)
        assert lib.fmq_life_hold(queue, LIFE_AT[WRITER], 0) >= 0
        pages.append(fmq.LifePage())
        os.ftruncate(queue, 0)
        socket.send_fds(far, [b"x"], [page.fd for page in pages])
        signal.pause()

    with near, far, process(victim_main, fails=True) as victim:
        _, fds, *_ = socket.recv_fds(near, 1, 2)
        pages = [Region.from_fd(fd, fmq.LifePage.nbytes, writable=False) for fd in fds]
        os.kill(victim.pid, signal.SIGKILL)
        for page in pages:
            until(lambda page=page: lib.fmq_life_state(page.base) == lib.FMQ_DEAD)
