"""A library's call as a burst_function: copies around it, its status, and calls that take turns."""

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest
from waiting import PATIENCE, until

from burst._core import ffi, lib
from fmq import clock

GENERAL_FAILURE, MISSED_DEADLINE_TRANSIENT = 2, 5
CALL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_void_p,
)


@pytest.fixture
def foreign():
    """Contexts for Python functions, each with copies (to, from) before and after, and a step for each limit in ns.

    They share a turn.
    """
    turn, kept = ffi.new("burst_turn *"), []
    lib.burst_turn_init(turn)

    def foreign(function, before=(), after=(), limits=(0,)):
        context, call = ffi.new("burst_foreign *"), CALL(function)
        address = ctypes.cast(call, ctypes.c_void_p).value
        context.function, context.turn = ffi.cast("foreign_function *", address), turn
        context.object = ffi.cast("void *", 11)
        given, results = ffi.cast("void *", 13), ffi.cast("void *", 15)
        table = ffi.new("burst_step[]", [(12 + n, 14, 16, given, results, limit) for n, limit in enumerate(limits)])
        context.steps, context.n_steps = table, len(table)
        lists = [[(pointer(to), pointer(source), source.nbytes) for to, source in pairs] for pairs in (before, after)]
        copies = [ffi.new("burst_copy[]", found) for found in lists]
        context.before, context.n_before = copies[0], len(before)
        context.after, context.n_after = copies[1], len(after)
        kept.append((call, copies, before, after, table))
        return context

    return foreign


def pointer(array):
    return ffi.cast("void *", array.ctypes.data)


def test_arguments_and_copies(foreign):
    """The call gets its six arguments between the copies before and the copies after it."""
    source, place, result, target = (np.zeros(4, np.int32) for _ in range(4))
    source[:] = range(4)
    seen = []

    def call(*arguments):
        seen.append(arguments)
        result[:] = place * 2
        return 0

    context = foreign(call, before=[(place, source)], after=[(target, result)])
    assert lib.burst_foreign_run(context) == 0
    assert seen == [(11, 12, 14, 13, 16, 15)]
    assert target.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("status", [1, 3, -5])
def test_a_failed_call(foreign, status):
    """The library's word is kept, the answer is GENERAL_FAILURE, and nothing is copied out of what was not computed."""
    result, target = np.ones(2, np.int32), np.zeros(2, np.int32)
    context = foreign(lambda *_: status, after=[(target, result)])
    assert lib.burst_foreign_run(context) == 2
    assert (context.status, target.tolist()) == (status, [0, 0])


def test_turns(foreign):
    """A call begins when no other of its turn runs."""
    inside, may_leave, entered = threading.Event(), threading.Event(), []

    def call(*_):
        entered.append(threading.get_native_id())
        inside.set()
        may_leave.wait(PATIENCE)
        return 0

    contexts = [foreign(call), foreign(call)]
    threads = [threading.Thread(target=lib.burst_foreign_run, args=(context,)) for context in contexts]
    threads[0].start()
    assert inside.wait(PATIENCE)
    threads[1].start()
    until(lambda: _waits_for_lock(threads[1].native_id))
    assert len(entered) == 1
    may_leave.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(entered) == 2


def _waits_for_lock(thread):
    return thread is not None and Path(f"/proc/self/task/{thread}/stat").read_text().split()[2] == "S"


def test_steps(foreign):
    """Calls are made one after the other, until one fails."""
    seen, statuses = [], [0, 0, 7]

    def call(_, number, *_more):
        seen.append(number)
        return statuses[number - 12]

    context = foreign(call, limits=(0, 0, 0, 0))
    assert lib.burst_foreign_run(context) == GENERAL_FAILURE
    assert (seen, context.status, context.ended) == ([12, 13, 14], 7, 0)
    statuses[2:] = [0, 0]
    assert lib.burst_foreign_run(context) == 0
    assert (seen[3:], context.status) == ([12, 13, 14, 15], 0)


def test_cancelled_between_steps(foreign):
    """No step begins after a cancel, nothing is copied out, and that is so for good; others of the turn go on."""
    seen, result, target = [], np.ones(2, np.int32), np.zeros(2, np.int32)

    def call(_, number, *_more):
        seen.append(number)
        if number == 13:
            lib.burst_foreign_cancel(context)
        return 0

    context = foreign(call, after=[(target, result)], limits=(0, 0, 0))
    for _ in range(2):
        assert lib.burst_foreign_run(context) == GENERAL_FAILURE
        assert (seen, context.ended, context.status) == ([12, 13], lib.BURST_CANCELLED, 0)
    assert target.tolist() == [0, 0]
    assert lib.burst_foreign_run(foreign(lambda *_: 0)) == 0


def test_cancelled_in_the_midst_of_a_step(foreign):
    """A library that asks is told to end once the run is cancelled."""
    told = []

    def call(*_):
        told.append(lib.burst_foreign_ends(context.turn))
        lib.burst_foreign_cancel(context)
        told.append(lib.burst_foreign_ends(context.turn))
        return 3

    context = foreign(call)
    assert lib.burst_foreign_run(context) == GENERAL_FAILURE
    assert (told, context.ended) == ([False, True], lib.BURST_CANCELLED)


def test_a_limit(foreign):
    """A step that may take so long is told to end after that, which is another status; its time begins with it."""
    limit, begins = 20_000_000, []

    def call(_, number, *_more):
        begins.append(clock.now())
        while number == 13 and not lib.burst_foreign_ends(context.turn):
            assert clock.now() < begins[0] + PATIENCE * 1e9
        return 3 if number == 13 else 0

    context = foreign(call, limits=(0, limit))
    for _ in range(2):
        begins.clear()
        assert lib.burst_foreign_run(context) == MISSED_DEADLINE_TRANSIENT
        assert context.ended == lib.BURST_TIMED_OUT
        assert clock.now() - begins[1] >= limit
