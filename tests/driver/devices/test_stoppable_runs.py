"""Runs of a library that end when their time is over: who watches them, and what they get."""

import os
import threading

import pytest
from waiting import PATIENCE

from driver.devices.stoppable import Attempt, StoppableRuns
from driver.errors import LoopTimeout


def until_stopped(told):
    """An attempt that runs until it is stopped, and tells when it has begun."""
    stopped = threading.Event()

    def run():
        told.set()
        return "stopped" if stopped.wait(PATIENCE) else None

    return Attempt(run, stopped.set)


def run_for(seconds, told=None):
    """Runs until the loop timeout of so many seconds. The text of what it raised."""
    runs = StoppableRuns(1, seconds)
    with pytest.raises(LoopTimeout) as caught:
        runs.run(lambda: until_stopped(told or threading.Event()), is_long=True, may_repeat=False)
    return str(caught.value)


def threads():
    """How many this process has."""
    return len(os.listdir("/proc/self/task"))


def test_runs_that_end_in_time_start_no_thread():
    """One thread watches all runs: during a hundred there are as many threads as before, and none is stopped."""
    run_for(0.001)
    before = threads()
    seen = set()
    for _ in range(100):
        runs = StoppableRuns(1, PATIENCE)

        def run():
            seen.add(threads())

        assert runs.run(lambda run=run: Attempt(run, pytest.fail), is_long=True, may_repeat=False) is None
    assert seen == {before}


def test_each_run_ends_at_its_own_time():
    """Of runs of several threads the shortest ends first, although it began last, and its end is nobody else's."""
    told, found = threading.Event(), []
    longer = threading.Thread(target=lambda: found.append(run_for(0.5, told)))
    longer.start()
    assert told.wait(PATIENCE)
    assert "0.02 s" in run_for(0.02)
    assert not found
    longer.join(PATIENCE)
    assert "0.5 s" in found[0]


def test_a_forked_child_has_a_watchdog_of_its_own():
    """The parent's thread is not there: the child starts another one."""
    run_for(0.001)
    child = os.fork()
    if not child:
        code = 1
        try:
            run_for(0.02)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
