"""driver.retry: again only what passes, after the hint, and never past the end."""

import time
from functools import partial

import numpy as np
import pytest

import driver
from burst import GeneralFailure, MissedDeadlinePersistent, MissedDeadlineTransient, ResourceExhaustedTransient
from burst.messages import Cause


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self):
        self.now, self.waits = 1000.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setitem(driver.retry.__globals__, "time", clock)
    return clock


def failing(*errors):
    """A function that raises these, one after the other, and then returns how often it was called."""
    calls = []

    def function():
        calls.append(None)
        if len(calls) <= len(errors):
            raise errors[len(calls) - 1]
        return len(calls)

    function.calls = calls
    return function


def busy(seconds=0.5):
    return ResourceExhaustedTransient("queue_length=8", cause=Cause(None, None, seconds))


def test_a_success_is_returned_at_once(clock):
    """Nothing is waited for when nothing fails."""
    assert driver.retry(failing(), attempts=3) == 1
    assert clock.waits == []


def test_it_waits_as_the_error_says_with_jitter(clock):
    """The hint and up to as much again, doubled with each failure in a row."""
    assert driver.retry(failing(busy(), busy(), busy()), attempts=9) == 4
    assert all(0.5 * 2**n <= wait < 2**n for n, wait in enumerate(clock.waits))
    waits = set()
    for _ in range(20):
        clock.waits.clear()
        driver.retry(failing(busy()), attempts=2)
        waits.update(clock.waits)
    assert len(waits) > 10


def test_an_error_without_a_hint_has_its_classs_own(clock):
    """The stated default."""
    driver.retry(failing(MissedDeadlineTransient()), attempts=2)
    assert 0.01 <= clock.waits[0] < 0.02


def test_attempts_are_the_most_calls(clock):
    """The last error comes out, and nothing is waited for after it."""
    function = failing(*[busy() for _ in range(9)])
    with pytest.raises(ResourceExhaustedTransient):
        driver.retry(function, attempts=3)
    assert len(function.calls) == 3
    assert len(clock.waits) == 2


@pytest.mark.parametrize("limit", [{"timeout": 4.0}, {"until": 1004.0}, {"timeout": 4.0, "until": 2000.0}])
def test_no_call_begins_after_the_end(clock, limit):
    """A wait that would go past the end is not begun: the error comes out earlier."""
    with pytest.raises(ResourceExhaustedTransient):
        driver.retry(failing(*[busy() for _ in range(99)]), **limit)
    assert clock.now < 1004.0
    assert clock.waits


@pytest.mark.parametrize("error", [MissedDeadlinePersistent(), GeneralFailure("x"), ValueError("x")])
def test_what_does_not_pass_is_raised_at_once(clock, error):
    """Persistent errors, and anything else."""
    function = failing(error)
    with pytest.raises(type(error)):
        driver.retry(function, attempts=5)
    assert len(function.calls) == 1
    assert clock.waits == []


def test_on_says_what_passes(clock):
    """Other classes, which have no hint, and then not the usual ones."""
    assert driver.retry(failing(OSError()), attempts=2, on=OSError) == 2
    assert 0.01 <= clock.waits[0] < 0.02
    with pytest.raises(ResourceExhaustedTransient):
        driver.retry(failing(busy()), attempts=2, on=OSError)


@pytest.mark.parametrize("limits", [{}, {"attempts": 0}])
def test_it_needs_a_limit(limits):
    """Without one it might go on for ever."""
    with pytest.raises(ValueError, match="attempts"):
        driver.retry(lambda: None, **limits)


def test_a_run_prepare_and_execution_that_passes(slow, kit):
    """A run that the device could not do in time is done when there is time: `run`, a burst's, and a preparation."""
    x, seconds = np.zeros((1, 4), np.float32), iter([1e-4, 20.0, 1e-4, 20.0])

    def deadline():
        return time.monotonic() + next(seconds)

    request, _ = kit.request([x], 16)

    def execute():
        result = slow.execute(request, deadline=deadline())
        result.raise_for_status()
        return result

    missed = MissedDeadlineTransient, MissedDeadlinePersistent
    assert driver.retry(execute, attempts=4, on=missed).status == 0
    prepare = partial(slow.device.prepare, kit.add_model())
    with driver.retry(lambda: prepare(deadline=deadline()), attempts=4, on=missed) as found:
        assert found.run(x)[0].tolist() == [[1, 1, 1, 1]]
