"""A driver's function as a burst_function: deadline, status, end, and the watch over runs that do not end."""

import ctypes
import threading

import pytest
from waiting import PATIENCE

from burst._core import ffi, lib
from fmq import clock
from fmq.clock import FOREVER

GENERAL_FAILURE = 2
CALL = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64)


@pytest.fixture
def timed():
    """Contexts for Python functions, whose object is the number 11."""
    kept = []

    def timed(function):
        call = CALL(function)
        address = ctypes.cast(call, ctypes.c_void_p).value
        context = lib.burst_timed_new(ffi.cast("driver_function *", address), ffi.cast("void *", 11))
        kept.append((call, context))
        return context

    yield timed
    for _, context in kept:
        lib.burst_timed_free(context)


def test_object_and_deadline_are_handed_on(timed):
    """The function gets its object, and the deadline of the thread that runs."""
    seen = []
    context = timed(lambda *arguments: seen.append(arguments) or 0)
    assert lib.burst_timed_run(context) == 0
    lib.burst_set_due(2**40)
    try:
        assert lib.burst_timed_run(context) == 0
    finally:
        lib.burst_set_due(FOREVER)
    assert seen == [(11, FOREVER), (11, 2**40)]


@pytest.mark.parametrize(("said", "answered"), [(0, 0), (8, 8), (9, GENERAL_FAILURE), (-1, GENERAL_FAILURE)])
def test_statuses(timed, said, answered):
    """A status is handed on; what is none is GENERAL_FAILURE, and what it was is known."""
    context = timed(lambda *_: said)
    assert lib.burst_timed_run(context) == answered
    assert lib.burst_timed_status(context) == said


def test_a_cancelled_context_is_not_called(timed):
    """After a cancellation no run calls the function, and each fails."""
    calls = []
    context = timed(lambda *_: calls.append(1) or 0)
    lib.burst_timed_cancel(context)
    assert [lib.burst_timed_run(context) for _ in range(3)] == [GENERAL_FAILURE] * 3
    assert not calls


def test_checkpoint_tells_of_a_cancellation_and_of_a_deadline(timed):
    """Within a run, the checkpoint is 0 until the run is cancelled or its deadline has passed."""
    told = []

    def work(*_):
        told.append(bool(lib.burst_timed_checkpoint()))
        lib.burst_timed_cancel(context)
        told.append(bool(lib.burst_timed_checkpoint()))
        return 0

    context = timed(work)
    lib.burst_timed_run(context)
    late = timed(lambda *_: told.append(bool(lib.burst_timed_checkpoint())) or 0)
    lib.burst_set_due(clock.now() - 1)
    try:
        lib.burst_timed_run(late)
    finally:
        lib.burst_set_due(FOREVER)
    assert told == [False, True, True]


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_overdue_runs_are_found(timed, how):
    """The watch sleeps while runs end in time, and returns the object of one that goes on after its deadline, or after
    its cancellation."""
    may_end, is_inside, found = threading.Event(), threading.Event(), []

    def hang(*_):
        is_inside.set()
        may_end.wait(PATIENCE)
        return 0

    def run():
        lib.burst_set_due(clock.now() if how == "deadline" else FOREVER)
        lib.burst_timed_run(context)

    context, quick = timed(hang), timed(lambda *_: 0)
    watch = threading.Thread(target=lambda: found.append(lib.burst_timed_overdue(1000)))
    watch.start()
    assert lib.burst_timed_run(quick) == 0
    assert not found
    runner = threading.Thread(target=run)
    runner.start()
    assert is_inside.wait(PATIENCE)
    if how == "cancel":
        lib.burst_timed_cancel(context)
    watch.join(PATIENCE)
    may_end.set()
    runner.join()
    assert found == [ffi.cast("void *", 11)]
