"""The C core's watch: a socket wait ends when the process behind a life word dies, before the kernel closes its end."""

import gc
import multiprocessing
import os
import select
import signal
import socket

import pytest
from fmq_peers import hold, process
from waiting import until

import fmq
from fmq._core import lib

WRITER_LIFE = 768  # csrc/fmq/layout.h


@pytest.fixture
def watched():
    """(queue, its region, a connected pair of sockets)."""
    with fmq.MessageQueue.create("u1", 8) as queue:
        region, (ours, theirs) = queue.descriptor.region(), socket.socketpair()
        yield queue, region, ours, theirs
        ours.close()
        theirs.close()


def test_a_life_word_says_how_it_stands_with_its_holder(watched):
    """Nobody, alive, released, dead."""
    queue, region, _, _ = watched
    word = region.base + WRITER_LIFE
    assert lib.fmq_life_state(word) == lib.FMQ_NOBODY
    with queue.writer():
        assert lib.fmq_life_state(word) == lib.FMQ_ALIVE
    assert lib.fmq_life_state(word) == lib.FMQ_RELEASED
    ready, theirs = multiprocessing.Pipe()
    with process(hold, queue.descriptor, "writer", theirs, fails=True) as child:
        ready.recv()
        child.kill()
        until(lambda: lib.fmq_life_state(word) == lib.FMQ_DEAD)


def test_a_death_shuts_the_socket_down(watched):
    """Although nobody closes the other end, the wait on it ends."""
    queue, region, ours, _ = watched
    ready, theirs = multiprocessing.Pipe()
    with process(hold, queue.descriptor, "writer", theirs, fails=True) as child:
        ready.recv()
        token = lib.fmq_watch(region.base + WRITER_LIFE, ours.fileno())
        os.kill(child.pid, signal.SIGKILL)
        assert ours.recv(1) == b""
        lib.fmq_unhang(token)


def test_an_unwatched_socket_stays_open(watched):
    """After fmq_unhang a death is none of this socket's business; a token is good once, and a wrong one harmless."""
    queue, region, ours, other = watched
    ready, theirs = multiprocessing.Pipe()
    with process(hold, queue.descriptor, "writer", theirs, fails=True) as child:
        ready.recv()
        gc.collect()
        descriptors = len(os.listdir("/proc/self/fd"))
        token = lib.fmq_watch(region.base + WRITER_LIFE, ours.fileno())
        for wrong in (token, token, -1, 126, 2**30, 2**62):
            lib.fmq_unhang(wrong)
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        child.kill()
        until(lambda: lib.fmq_life_state(region.base + WRITER_LIFE) == lib.FMQ_DEAD)
    other.send(b"x")
    assert ours.recv(1) == b"x"
    assert not select.select([ours], [], [], 0)[0]


def test_a_socket_that_is_none_is_refused(watched):
    """-EBADF, and the table stays as it was."""
    _, region, _, _ = watched
    assert lib.fmq_watch(region.base + WRITER_LIFE, 10**6) < 0
