"""The loop of a listener whose plans Python runs: what may happen in a run, and what many runs leave behind."""

import sys
import threading
import weakref

import numpy as np
import pytest
from waiting import PATIENCE

from burst import ErrorStatus, GeneralFailure

NONE, GENERAL_FAILURE = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE


@pytest.fixture
def failing(increment):
    """A class of executions that increment, or raise what `error` is at that moment."""

    class Failing(increment):
        error = None

        def run(self):
            if Failing.error:
                raise Failing.error
            super().run()

    return Failing


def test_an_exception_of_a_known_request_is_the_answer(host, burst, memory, failing):
    """What the run of a known request raises is that request's answer, with its words; the request before it and
    the one behind it succeed, and nothing is bound anew.
    """
    device = host(failing)
    client, pool = burst(device), memory()
    for _ in range(3):
        assert client.run(pool).status is NONE
        failing.error = ZeroDivisionError("by nothing")
        reply = client.run(pool)
        assert reply.status is GENERAL_FAILURE
        text, _ = client.trace.failure(client.sent, int(reply.status))
        assert text == "ZeroDivisionError: by nothing"
        failing.error = None
    assert client.run(pool).status is NONE
    assert device.server.bound == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_exception_that_ends_threads_ends_the_burst(host, burst, memory, failing, error):
    """A run that raises KeyboardInterrupt or SystemExit ends its burst, whose client is told; another burst of the
    process goes on.
    """
    device = host(failing)
    client, pool = burst(device), memory()
    other, other_pool = burst(host(failing.__base__)), memory()
    assert client.run(pool).status is NONE
    failing.error = error
    with pytest.raises(GeneralFailure):
        client.run(pool)
    device.wait_ended()
    assert other.run(other_pool).status is NONE


@pytest.mark.parametrize("requests", [10_000, pytest.param(1_000_000, marks=pytest.mark.stress)])
def test_runs_leave_no_reference(host, burst, memory, increment, requests):
    """As many references to what a run returns, to its execution and to None are left after thousands of requests as
    were there before.
    """
    returned, bound = object(), []

    class Returning(increment):
        def __init__(self, request):
            super().__init__(request)
            bound.append(self)

        def run(self):
            super().run()
            return returned

    client, pool = burst(host(Returning)), memory()
    for _ in range(3):
        client.run(pool)
    (execution,) = bound

    def references():
        client.run(pool)  # the run before it is over
        return sys.getrefcount(returned), sys.getrefcount(execution), sys.getrefcount(None)

    before = references()
    for _ in range(requests):
        assert client.run(pool).status is NONE
    after = references()
    assert after[:2] == before[:2]
    assert abs(after[2] - before[2]) < 1000


def test_a_plan_that_was_freed_is_gone(host, burst, memory, increment):
    """The listener keeps nothing of a plan that its client's free ended, although it waits in C from then on."""
    bound = []

    class Noted(increment):
        def __init__(self, request):
            super().__init__(request)
            bound.append(weakref.ref(self))

    device = host(Noted)
    client, pool, other = burst(device), memory(), memory()
    for _ in range(3):
        client.run(pool)
    client.run(other)  # whose run is the last thing that the listener did
    client.run(pool)
    client.free_memory(pool)
    device.wait_freed()
    client.run(other)
    freed, kept = bound
    assert freed() is None
    assert kept() is not None


def test_numbers_that_overflow_are_no_warning(host, burst, memory, increment):
    """numpy does not warn in a thread that runs requests, neither in the first run of a request nor in later ones."""
    states = []

    class Noting(increment):
        def run(self):
            super().run()
            states.append(set(np.geterr().values()))

    client, pool = burst(host(Noting)), memory()
    for _ in range(3):
        client.run(pool)
    assert states == [{"ignore"}] * 3


def test_shapes_that_change_are_told_by_each_run(host, burst, memory, increment):
    """An execution whose shapes are known only after a run answers with those of that run, each time."""

    class Growing(increment):
        is_static = False
        length = 0

        def run(self):
            super().run()
            Growing.length += 1
            self.shapes = (self.shapes[0]._replace(dimensions=(Growing.length,)),)

    client, pool = burst(host(Growing)), memory()
    for n in range(1, 6):
        assert client.run(pool).output_shapes[0].dimensions == (n,)


def test_a_stop_from_a_thread_while_a_plan_runs(host, burst, memory, increment):
    """A burst that is stopped in the middle of a known request ends when the run does, and its client is told."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(increment):
        runs = 0

        def run(self):
            Slow.runs += 1
            if Slow.runs == 3:
                entered.set()
                assert go_on.wait(PATIENCE)
            super().run()

    device = host(Slow)
    client, pool = burst(device), memory()
    client.run(pool)
    client.run(pool)
    outcome = []

    def third():
        try:
            outcome.append(client.run(pool))
        except GeneralFailure as error:
            outcome.append(error)

    thread = threading.Thread(target=third)
    thread.start()
    assert entered.wait(PATIENCE)
    device.server.stop()
    go_on.set()
    device.wait_ended()
    thread.join(PATIENCE)
    assert isinstance(outcome[0], GeneralFailure)
