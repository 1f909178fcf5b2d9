"""Roles: one writer, one reader, held by the kernel for as long as their process lives and no longer."""

import contextlib
import multiprocessing
import os
import signal

import pytest
from fmq_peers import METHODS, hold, in_a_fork, must_raise, process, take

import fmq

ROLES = ["writer", "reader"]


@pytest.fixture
def queue():
    with fmq.MessageQueue.create("u1", 16) as made:
        yield made


@pytest.mark.parametrize("role", ROLES)
def test_a_role_returns_after_close(queue, role):
    """At once, with what was in the queue."""
    w = queue.writer()
    w.write([1, 2])
    w.close()
    for _ in range(3):
        getattr(queue, role)().close()
    assert queue.reader().available == 2


@pytest.mark.parametrize("role", ROLES)
def test_a_role_returns_when_its_end_is_forgotten(queue, role):
    """An end that is garbage releases what it held, and the other side is told."""
    other = getattr(queue, {"writer": "reader", "reader": "writer"}[role])()
    end = getattr(queue, role)()
    assert other.peer == "alive"
    del end
    assert other.peer == "released"
    getattr(queue, role)()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("role", ROLES)
def test_another_process_holds_its_role_until_it_is_killed(queue, role, method):
    """RoleTaken while it lives, in whatever way it was started; after kill -9 the role is free."""
    ready, theirs = multiprocessing.Pipe()
    with process(hold, queue.descriptor, role, theirs, method=method, fails=True) as child:
        assert ready.recv() == 16
        with pytest.raises(fmq.RoleTaken):
            getattr(queue, role)()
        os.kill(child.pid, signal.SIGKILL)
        take(queue, role)


@pytest.mark.parametrize("role", ROLES)
def test_a_named_queue_knows_its_roles_too(name, role):
    """Two opens of one name exclude each other."""
    end = getattr(fmq.MessageQueue.create("u1", 8, name=name), role)()
    with pytest.raises(fmq.RoleTaken):
        getattr(fmq.MessageQueue.open(name), role)()
    end.close()
    getattr(fmq.MessageQueue.open(name), role)()


def test_a_forked_child_cannot_use_its_parents_ends(queue):
    """Every call is refused in the child, and the parent's end and the queue stay as they were."""
    w, r = queue.writer(), queue.reader()
    w.write([1])

    def child():
        for call in (
            lambda: w.write([9]),
            lambda: r.read(1),
            lambda: r.available,
            lambda: w.reserve(1).__enter__(),
            lambda: w.peer,
        ):
            with pytest.raises(fmq.Closed, match="fork"):
                call()
        w.close()
        r.close()

    in_a_fork(child)
    assert (w.peer, r.peer) == ("alive", "alive")
    assert list(r.read(1, 0)) == [1]


def test_a_fork_inside_a_reservation_publishes_nothing_in_the_child(queue):
    """The child leaves the block with Closed; the parent's reservation goes on."""
    w, r = queue.writer(), queue.reader()
    with contextlib.ExitStack() as block:
        span = block.enter_context(w.reserve(2))
        in_a_fork(lambda: must_raise(fmq.Closed, block.close))
        assert r.available == 0
        span[:] = 3
    assert list(r.read(2, 0)) == [3, 3]


def test_a_forked_child_does_not_keep_its_parents_role(queue):
    """While the child lives, the parent may close and another may take the role."""
    ours, theirs = multiprocessing.Pipe()
    w = queue.writer()
    with process(theirs.recv):
        w.close()
        queue.writer().write([1])
        ours.send(None)


def test_a_forked_child_can_take_roles_of_its_own(queue):
    """It is a process like any other, with a life of its own that ends with it and not with its parent."""
    w = queue.writer()

    def child():
        with fmq.MessageQueue.open(queue.descriptor).reader() as r:
            assert list(r.read(1, 10)) == [5]

    w.write([5])
    in_a_fork(child)
    assert w.peer == "released"
    kept = []
    in_a_fork(lambda: kept.append(fmq.MessageQueue.open(queue.descriptor).reader()))
    assert w.peer == "dead"


def test_a_parents_death_is_told_although_its_child_lives(queue):
    """A grandchild that inherited everything does not keep a dead parent's role alive."""
    ready, theirs = multiprocessing.Pipe()
    r = queue.reader()
    with process(parent_of_an_orphan, queue.descriptor, theirs, fails=True) as parent:
        orphan = ready.recv()
        assert r.peer == "alive"
        os.kill(parent.pid, signal.SIGKILL)
        with pytest.raises(fmq.PeerDied):
            r.read(1, 10)
        take(queue, "writer")
        os.kill(orphan, signal.SIGKILL)


def parent_of_an_orphan(descriptor, ready):
    writer = fmq.MessageQueue.open(descriptor).writer()
    orphan = os.fork()
    if orphan:
        ready.send(orphan)
    while writer:
        signal.pause()
