"""What is dropped is told to the device soon, in few messages, and never inside a call or the garbage collector."""

import gc
import os
import threading
import weakref

import pytest
from waiting import PATIENCE

from burst import PeerDied
from burst.dropped import DropList, later


class Told:
    """The messages that a device got."""

    def __init__(self):
        self.messages, self.arrived = [], threading.Semaphore(0)
        self.dropped = DropList(self.tell)

    def tell(self, numbers):
        assert self.dropped.lock.locked()
        self.messages.append(numbers)
        self.arrived.release()


@pytest.fixture
def told():
    return Told()


def test_the_device_is_told_without_another_call(told):
    """Numbers that come close to each other are one message, in their order, sent by another thread."""
    for n in range(50):
        told.dropped.add(n)
    assert told.arrived.acquire(timeout=PATIENCE)
    later(told.arrived.release)  # after all that the thread had to do
    assert told.arrived.acquire(timeout=PATIENCE)
    assert [n for message in told.messages for n in message] == list(range(50))
    assert len(told.messages) < 10


def test_a_call_is_not_disturbed(told):
    """What is dropped during a call is told when the call ends, by the thread that made it."""
    with told.dropped:
        told.dropped.add(1)
        told.dropped.tell_now(2)
        assert told.messages == []
    assert told.messages == [[1, 2]]


def test_the_thread_does_not_wait_for_a_call(told):
    """While one connection is in a call, other devices are told."""
    other = Told()
    with told.dropped:
        told.dropped.add(1)
        other.dropped.add(2)
        assert other.arrived.acquire(timeout=PATIENCE)
        later(other.arrived.release)
        assert other.arrived.acquire(timeout=PATIENCE)
        assert told.messages == []
    assert (told.messages, other.messages) == ([[1]], [[2]])


def test_a_request_takes_many_along(told):
    """When numbers come faster than the thread tells them, the next request on the connection tells them."""
    begun, go_on = threading.Event(), threading.Event()
    later(lambda: (begun.set(), go_on.wait(PATIENCE)))
    assert begun.wait(PATIENCE)
    for n in range(100):
        told.dropped.add(n)
    assert told.dropped.is_due
    with told.dropped:
        pass
    assert told.messages == [list(range(100))]
    go_on.set()


def test_finalizers_may_add(told):
    """The garbage collector may find something in any line, also in a call on the same connection."""

    class Cycle:
        def __init__(self, n):
            self.n, self.me = n, self

        def __del__(self):
            told.dropped.add(self.n)

    with told.dropped:
        for n in range(10):
            Cycle(n)
        gc.collect()
    told.dropped.tell_now()
    assert sorted(n for message in told.messages for n in message) == list(range(10))


def test_the_list_does_not_keep_its_connection():
    """Numbers of a connection that is gone are told to no device."""
    dropped, messages = (told := Told()).dropped, told.messages
    gone = weakref.ref(told)
    del told
    assert gone() is None
    dropped.tell_now(1)
    assert messages == []


def test_a_dead_device_is_no_error_for_the_thread():
    """The thread goes on with the other devices; a caller that frees explicitly gets the error."""

    class Dead(Told):
        def tell(self, numbers):
            super().tell(numbers)
            raise PeerDied("gone")

    dead, well = Dead(), Told()
    dead.dropped.add(1)
    assert dead.arrived.acquire(timeout=PATIENCE)
    well.dropped.add(2)
    assert well.arrived.acquire(timeout=PATIENCE)
    with pytest.raises(PeerDied):
        dead.dropped.tell_now(3)
    with dead.dropped:  # the call that follows notices by itself
        dead.dropped.tell_now(4)


def test_a_forked_child_tells_nothing(told):
    """A child shares its parent's connections, so what it drops is not told."""
    if not (child := os.fork()):
        told.dropped.add(1)
        told.dropped.tell_now(2)
        Told().dropped.add(3)  # starts the child's own thread
        os._exit(len(told.messages))
    assert os.waitpid(child, 0)[1] == 0
    told.dropped.tell_now(5)
    assert told.messages == [[5]]
