"""Requests on the plain path that came before: their socket executes and answers them without a step of Python."""

import os
import threading
import weakref
from ctypes import CFUNCTYPE, c_int32, c_size_t, c_void_p, cast
from functools import partial

import msgpack
import pytest
from lane_owners import lane_owner
from waiting import PATIENCE, last, until

from burst import ErrorStatus, GeneralFailure, Memory, OutputShape, PeerDied, Timeout
from burst.channel import Channel
from driver.engine.lane import ClientLane
from driver.engine.lane_reader import LaneReader
from driver.protocol.lane_codec import fields_of, in_turn
from fmq import clock

NONE, FAILED = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE
REQUEST = msgpack.packb([1, [[0, 0, 16, []]], [[0, 64, 16, []]], [0], False, None])
"""Of model 1, on slot 0."""


class CountingReader(LaneReader):
    """Counts the messages that come to Python."""

    handled = 0

    def handle(self, message):
        self.handled += 1
        super().handle(message)


def _act(engine):
    engine.act()


class OneExecution:
    """What a request is bound to: it does what its engine says."""

    is_static, shapes = True, (OutputShape((4,)),)

    def __init__(self, engine):
        self.run, self.cancel = partial(_act, engine), engine.cancelled.set
        self.native, self.failure = engine.native, engine.explain


class Engine:
    """A lane with one model in this process."""

    def __init__(self):
        self.act, self.cancelled = lambda: None, threading.Event()
        self.native = self.explain = None  # as an execution has them
        self.bound = []  # executions, if they still live
        self.lane = ClientLane(lane_owner(lambda _: self._bind, lambda _: None))

    def _bind(self, _):
        execution = OneExecution(self)
        self.bound.append(weakref.ref(execution))
        return execution

    @property
    def living(self):
        """How many executions live."""
        return sum(execution() is not None for execution in self.bound)


class Client:
    """The client's end of a socket, and what serves it."""

    def __init__(self, engine):
        near, self.end = Channel.pair()
        self.reader, self.number = CountingReader(near, engine.lane, lambda: None), 0
        self.reader.start()
        self.memory = Memory.create(128)
        self.end.send(["memory", 0, self.memory.to_wire()], [self.memory.fd])

    def ask(self, deadline=None, fds=()):
        """Send the request."""
        self.number += 1
        self.end.send_raw(in_turn(self.number, deadline, REQUEST), fds)

    def answer(self):
        """The status and the words of the next answer."""
        number, outcome = msgpack.unpackb(self.end.receive(PATIENCE).raw)
        assert number == self.number
        status, _, _, _, text, _ = fields_of(outcome)
        return status, text

    def executed(self, **how):
        """Both."""
        self.ask(**how)
        return self.answer()


@pytest.fixture
def engine():
    found = Engine()
    yield found
    found.lane.stop()
    until(lambda: not found.lane.sockets)


@pytest.fixture
def client(engine):
    """It has executed its request once, so that it is known."""
    found = Client(engine)
    with found.end:
        assert found.executed() == (NONE, "")
        yield found


def test_they_do_not_come_to_python(client):
    """The first one does, behind its memory; all are counted."""
    assert [client.executed() for _ in range(10)] == [(NONE, "")] * 10
    assert client.reader.handled == 2
    assert client.reader.answered == 11


def test_an_error_is_the_answer(engine, client):
    """With its words; the next execution succeeds, and nothing is bound anew."""

    def fail():
        raise ZeroDivisionError("by nothing")

    engine.act = fail
    assert client.executed() == (FAILED, "ZeroDivisionError: by nothing")
    engine.act = lambda: None
    assert client.executed() == (NONE, "")
    assert client.reader.handled == 2
    assert len(engine.bound) == 1


def test_a_c_function_runs_in_the_place_of_python(engine):
    """From the second execution on; what it says goes into the words of the execution."""
    statuses, seen = iter([0, FAILED, 0]), []

    def function(context):
        seen.append(context)
        return next(statuses)

    engine.explain = lambda status: GeneralFailure(f"it has said {status:d}")
    kept = CFUNCTYPE(c_int32, c_size_t)(function)
    engine.native = cast(kept, c_void_p).value, 7
    client = Client(engine)
    with client.end:
        assert client.executed() == (NONE, "")
        engine.act = None  # Python runs nothing more
        answers = [client.executed() for _ in range(3)]
    assert answers == [(NONE, ""), (FAILED, f"it has said {FAILED:d}"), (NONE, "")]
    assert seen == [7] * 3


def test_one_whose_deadline_has_passed_is_not_executed(engine, client):
    """Its client gets the reason."""
    ran = []
    engine.act = lambda: ran.append(1)
    status, text = client.executed(deadline=clock.now() - 1)
    assert status is ErrorStatus.MISSED_DEADLINE_PERSISTENT
    assert "before start" in text
    assert client.executed(deadline=clock.now() + 10**12) == (NONE, "")
    assert ran == [1]


def test_one_that_is_done_too_late_has_missed_its_deadline(engine, client):
    """The client need not look at a clock."""
    engine.act = lambda: last(0.04)
    status, _ = client.executed(deadline=clock.now() + 20_000_000)
    assert status in {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_threads_ends_the_socket(engine, client, error):
    """Other sockets of the lane go on."""

    def end():
        raise error

    other = Client(engine)
    with other.end:
        engine.act = end
        client.ask()
        with pytest.raises(PeerDied):
            client.answer()
        engine.act = lambda: None
        assert other.executed() == (NONE, "")


def test_a_socket_that_sleeps_keeps_no_memory(engine, client):
    """Plans that are dropped meanwhile are freed at once."""
    assert client.executed() == (NONE, "")
    engine.lane.forget_plans()
    assert engine.living == 0
    assert client.executed() == (NONE, "")
    assert engine.living == 1


def test_freed_memory_is_gone(engine, client):
    """Also for a request that was known."""
    client.end.send(["free_memory", 0])
    status, text = client.executed()
    assert status is ErrorStatus.INVALID_ARGUMENT
    assert "no memory is registered as 0" in text
    assert engine.living == 0


def test_two_sockets_execute_it_at_once(engine, client):
    """The second one has a plan of its own, which it leaves for others."""
    begun, may_end = threading.Event(), threading.Event()
    other = Client(engine)
    with other.end:
        engine.act = lambda: begun.set() or may_end.wait(PATIENCE)
        client.ask()
        assert begun.wait(PATIENCE)
        other.ask()
        until(lambda: len(engine.bound) == 2)
        may_end.set()
        assert client.answer() == other.answer() == (NONE, "")


def test_descriptors_that_come_with_one_are_closed(client):
    """It is executed all the same."""
    before = len(os.listdir("/proc/self/fd"))
    assert client.executed(fds=[client.memory.fd] * 3) == (NONE, "")
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert client.executed() == (NONE, "")


def test_the_end_of_the_lane_cancels_it(engine, client):
    """A known request that runs is told to end; its client is not answered."""
    begun, may_end = threading.Event(), threading.Event()

    def hold():
        begun.set()
        may_end.wait(PATIENCE)

    engine.act = hold
    client.ask()
    assert begun.wait(PATIENCE)
    engine.lane.stop()
    assert engine.cancelled.wait(PATIENCE)
    may_end.set()
    with pytest.raises((PeerDied, Timeout)):
        client.answer()


def test_answers_wait_for_a_client_that_does_not_read(client):
    """It gets all of them, in the order of its requests."""
    numbers = iter(range(10**6))
    while client.end.send_at_once(in_turn(number := next(numbers), None, REQUEST)):
        pass
    assert number
    answers = [msgpack.unpackb(client.end.receive(PATIENCE).raw)[0] for _ in range(number)]
    assert answers == list(range(number))
