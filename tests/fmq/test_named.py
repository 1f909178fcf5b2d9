"""Queues with a name survive restarts of either side in any order, tell stale from live, and are private."""

import contextlib
import multiprocessing
import os
import signal
import stat
import sys

import numpy as np
import pytest
from fmq_peers import in_a_fork, new_name, process, take
from waiting import until

import fmq

ROLES = ("writer", "reader")
UNUSUAL = 4096 * 1237  # bytes, as no other test has them


@pytest.fixture(params=["posix_ipc", "system calls"], autouse=True)
def way(request, monkeypatch):
    """Memory is opened and unlinked by posix_ipc, and by fmq itself where that is not installed."""
    if request.param == "system calls":
        monkeypatch.setitem(sys.modules, "posix_ipc", None)
    elif not getattr(sys, "_is_gil_enabled", lambda: True)():
        pytest.skip("posix_ipc would switch the GIL on")
    else:
        pytest.importorskip("posix_ipc")


@pytest.fixture
def queue(name):
    return fmq.MessageQueue.create("i8", 16, name=name)


def write_and_hang(name, numbers, ready):
    writer = take(fmq.MessageQueue.open(name), "writer")
    writer.write(numbers, 10)
    ready.send(True)
    signal.pause()


def read_and_hang(name, n, ready):
    reader = take(fmq.MessageQueue.open(name), "reader")
    ready.send(list(reader.read(n, 10)))
    signal.pause()


def killed(target, *args):
    """Runs target in another process until it has said something, and kills it; returns what it said."""
    ours, theirs = multiprocessing.Pipe()
    with process(target, *args, theirs, fails=True) as child:
        said = ours.recv()
        os.kill(child.pid, signal.SIGKILL)
    return said


def lives(name):
    return fmq.inspect(name).who


# ---- restarts --------------------------------------------------------------------------------------------------------


def test_a_new_writer_goes_on_where_a_killed_one_stopped(queue, name):
    """The reader gets everything of both, in order, and is told of the death in between."""
    reader = queue.reader()
    killed(write_and_hang, name, [0, 1, 2])
    assert list(reader.read(2, 10)) == [0, 1]
    with pytest.raises(fmq.PeerDied):
        reader.read(2, 10)
    writer = take(fmq.MessageQueue.open(name), "writer")
    writer.write([3, 4])
    assert list(reader.read(3, 10)) == [2, 3, 4]
    assert (writer.position, reader.position) == (5, 5)


def test_a_new_reader_goes_on_where_a_killed_one_stopped(queue, name):
    """What the dead reader took is gone, what it did not take is there."""
    writer = queue.writer()
    writer.write(np.arange(10))
    assert killed(read_and_hang, name, 4) == [0, 1, 2, 3]
    writer.write([10])
    reader = take(fmq.MessageQueue.open(name), "reader")
    assert list(reader.read(7, 10)) == [4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("order", [ROLES, ROLES[::-1]])
@pytest.mark.parametrize("first_killed", ROLES)
def test_both_are_killed_and_both_come_back(queue, name, first_killed, order):
    """In whatever order they die and return, the unread elements are still there."""
    steps = {"writer": (write_and_hang, name, [0, 1, 2, 3, 4]), "reader": (read_and_hang, name, 2)}
    if first_killed == "reader":
        killed(write_and_hang, name, [0, 1])
        steps["writer"] = write_and_hang, name, [2, 3, 4]
    for role in sorted(ROLES, key=lambda role: role != first_killed):
        killed(*steps[role])
    until(lambda: lives(name) == ("dead", "dead"))
    assert fmq.inspect(name).is_stale
    assert fmq.inspect(name).unread == 3
    queue.close()
    ends = {role: take(fmq.MessageQueue.open(name), role) for role in order}
    ends["writer"].write([5])
    assert list(ends["reader"].read(4, 10)) == [2, 3, 4, 5]
    assert not fmq.inspect(name).is_stale


def test_both_leave_in_good_order_and_come_back(queue, name):
    """The same, without a death."""
    with queue.writer() as writer, queue.reader():
        writer.write([1, 2])
    assert lives(name) == ("released", "released")
    assert list(fmq.MessageQueue.open(name).reader().read(2, 0)) == [1, 2]


def test_readers_of_an_unsynchronized_queue_survive_its_writer(name):
    """A new writer goes on, and every reader sees the elements of both."""
    with fmq.MessageQueue.create("i8", 16, fmq.Flavour.UNSYNCHRONIZED, name=name) as queue:
        readers = [queue.reader() for _ in range(2)]
    killed(write_and_hang, name, [0, 1])
    take(fmq.MessageQueue.open(name), "writer").write([2])
    assert [list(reader.read(3, 10)) for reader in readers] == [[0, 1, 2]] * 2


# ---- names -----------------------------------------------------------------------------------------------------------


def test_unlink_while_in_use(queue, name):
    """Those inside go on with their queue; a newcomer makes a new one of that name, and they never meet."""
    writer, reader = queue.writer(), queue.reader()
    fmq.unlink(name)
    with pytest.raises(FileNotFoundError, match=name):
        fmq.MessageQueue.open(name)
    newcomer = fmq.MessageQueue.create("f4", 4, name=name)
    newcomer.writer().write([0.5])
    writer.write([7])
    assert list(reader.read(1, 10)) == [7]
    assert list(newcomer.reader().read(1, 10)) == [0.5]


def make(name, start, told):
    start.wait()
    try:
        made = fmq.MessageQueue.create("i8", 16, name=name)
    except FileExistsError:
        told.put("lost")
    else:
        made.writer().write([os.getpid()])
        told.put("won")


@pytest.mark.integration
def test_of_many_creators_of_one_name_one_wins():
    """The others get FileExistsError, and never a queue that is half made."""
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        name, start, told = new_name(), context.Event(), context.Queue()
        with process(make, name, start, told), process(make, name, start, told), process(make, name, start, told):
            start.set()
            assert sorted(told.get(timeout=20) for _ in range(3)) == ["lost", "lost", "won"]
        assert fmq.inspect(name).written == 1
        fmq.unlink(name)


def test_a_creator_that_is_killed_on_the_way_leaves_nothing(name):
    """The memory gets its name as the last step; before that the kernel alone knows it."""
    ours, theirs = multiprocessing.Pipe()
    with process(create_and_hang, name, theirs, fails=True) as child:
        assert ours.recv() == UNUSUAL
        os.kill(child.pid, signal.SIGKILL)
    with os.scandir("/dev/shm") as entries:  # others come and go there meanwhile
        assert UNUSUAL not in {size_of(entry) for entry in entries}
    fmq.MessageQueue.create("u1", 8, name=name)


def size_of(entry):
    with contextlib.suppress(FileNotFoundError):
        return entry.stat().st_size


def create_and_hang(name, ready):
    def prepare(region):
        ready.send(region.nbytes)
        signal.pause()

    fmq.Region.create(UNUSUAL, name=name, prepare=prepare)


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_the_mode_is_0600_whatever_the_umask(name, umask):
    """Nobody else may read it, and the owner always may."""
    old = os.umask(umask)
    try:
        fmq.MessageQueue.create("u1", 8, name=name)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat("/dev/shm" + name).st_mode) == 0o600
    assert fmq.inspect(name).mode == 0o600
    assert fmq.MessageQueue.open(name).capacity == 8


def test_a_name_of_another_user_is_refused(queue, name, monkeypatch):
    """Even when its mode would allow us in; and it is not listed."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for opened in (fmq.MessageQueue.open, fmq.inspect):
        with pytest.raises(fmq.InvalidDescriptor, match="belongs to uid"):
            opened(name)
    assert name not in [info.name for info in fmq.queues()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_cannot_open_it(queue, name):
    """The kernel refuses, because of the mode."""

    def as_somebody_else():
        os.setgroups([])
        os.setuid(65534)
        for opened in (fmq.MessageQueue.open, fmq.inspect):
            with pytest.raises(PermissionError, match=name):
                opened(name)
        assert name not in [info.name for info in fmq.queues()]
        with pytest.raises(PermissionError, match="may not remove it"):
            fmq.unlink(name)
        own = new_name()
        fmq.MessageQueue.create("u1", 8, name=own)  # which takes no privilege
        assert fmq.inspect(own).uid == 65534
        fmq.unlink(own)

    in_a_fork(as_somebody_else)


# ---- what a refused creator is told ----------------------------------------------------------------------------------


def refusal(name):
    with pytest.raises(FileExistsError) as told:
        fmq.MessageQueue.create("u1", 8, name=name)
    return str(told.value)


def test_create_says_that_nobody_has_used_the_queue_there(queue, name):
    """Made, and no role taken yet."""
    assert "was never used" in refusal(name)


def test_create_says_who_is_alive(queue, name):
    """And so it offers no unlink."""
    writer = queue.writer()
    text = refusal(name)
    assert name in text
    assert "the writer is alive, the reader is yet to come" in text
    assert "fmq.unlink" not in text
    assert writer.peer == "nobody"


def test_create_says_that_the_queue_there_is_stale(queue, name):
    """Who was there, what is unread, and the two ways out."""
    killed(write_and_hang, name, [1, 2])
    until(lambda: lives(name)[0] == "dead")
    text = refusal(name)
    assert "stale queue (the writer is dead, the reader is yet to come, 2 elements are unread)" in text
    assert "open it to go on, or fmq.unlink it" in text


def test_create_says_that_what_is_there_is_no_queue(name):
    """Somebody else's file."""
    fmq.Region.create(4096, name=name)
    assert "not by a queue that can be used" in refusal(name)
