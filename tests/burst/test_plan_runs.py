"""What is said of an execution's deadline, by the times that were seen: one rule for the listener and for all else."""

import pytest

from burst import ErrorStatus
from burst._core import ffi, lib

NONE, FAILED = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE
TRANSIENT, PERSISTENT = ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT
START = 10**12


def execution(**given):
    """One that was known at START, began then, took 1000 ns, and had 500."""
    times = {"since": START, "known": START, "begun": START, "done": START + 1000, "deadline": START + 500}
    return ffi.new("burst_attempt *", times | given)


@pytest.mark.parametrize(("others", "status"), [(800, TRANSIENT), (400, PERSISTENT)])
def test_the_time_of_others_is_not_the_execution_s_own(others, status):
    """One of 1000 ns with 500 left misses its deadline for the moment, if others took so much of its time that it
    would have been done without them; else for good.
    """
    assert lib.burst_judge_end(execution(waited=others), NONE) == status


def test_a_wait_before_it_began_is_not_taken_off_its_own_time():
    """What it waited for its turn is no part of what it took: so it took 700, and not 400."""
    waited = execution(begun=START + 300, waited=300)
    assert lib.burst_judge_end(waited, NONE) == PERSISTENT
    assert lib.burst_judge_end(execution(begun=START + 300, waited=600), NONE) == TRANSIENT


def test_one_that_was_done_in_time_is_what_it_is():
    """Its own failures too, and those of a loop that took too long."""
    for status in (NONE, FAILED, TRANSIENT, PERSISTENT):
        assert lib.burst_judge_end(execution(deadline=START + 1000), status) == status
        assert lib.burst_judge_end(execution(deadline=2**64 - 1), status) == status


def test_a_failure_after_the_deadline_stays_a_failure():
    """So does what the device says for good."""
    assert lib.burst_judge_end(execution(), FAILED) == FAILED
    assert lib.burst_judge_end(execution(), PERSISTENT) == PERSISTENT


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({}, PERSISTENT),
        ({"is_first": 1}, PERSISTENT),
        ({"waited": 1}, PERSISTENT),
        ({"since": START - 1}, PERSISTENT),
        ({"waited": 800}, TRANSIENT),
        ({"since": START - 600}, TRANSIENT),
    ],
)
def test_of_one_that_was_never_done_its_own_time_counts(given, status):
    """One that was given up misses its deadline for good, unless others took enough of its time."""
    assert lib.burst_judge_end(execution(**given), TRANSIENT) == status


def test_one_that_still_goes_on_has_taken_the_time_until_now():
    """That is long ago here."""
    assert lib.burst_judge_late(execution(done=0), ffi.NULL) == PERSISTENT


def test_the_shortest_so_far_counts():
    """From when it could have begun to its deadline."""
    estimate = ffi.new("burst_estimate *")
    lib.burst_took(estimate, 600, 1)
    assert lib.burst_judge_late(execution(estimate=estimate), ffi.NULL) == PERSISTENT
    assert lib.burst_judge_late(execution(estimate=estimate, since=START - 100), ffi.NULL) == TRANSIENT


def test_the_estimate_learns_its_own_time():
    """Without what others took; nothing of a first one, or of one that was given up."""
    estimate = ffi.new("burst_estimate *")
    lib.burst_judge_end(execution(estimate=estimate, is_first=1), NONE)
    lib.burst_judge_end(execution(estimate=estimate), TRANSIENT)
    lib.burst_judge_end(execution(estimate=estimate), FAILED)
    assert estimate.usual_ns == 0
    lib.burst_judge_end(execution(estimate=estimate, waited=400, deadline=2**64 - 1), NONE)
    assert estimate.usual_ns == 600


class TestBegin:
    """In the thread that executes."""

    def test_it_is_in_time_for_what_it_calls(self):
        """Until it ends, also where it is nested."""
        outer, inner = execution(deadline=2**63, since=0), execution(deadline=2**62, since=0)
        assert lib.burst_begin_attempt(outer, ffi.NULL) == NONE
        assert outer.begun >= outer.since == outer.known
        assert lib.burst_due() == 2**63
        assert lib.burst_begin_attempt(inner, ffi.NULL) == NONE
        assert lib.burst_due() == 2**62
        assert lib.burst_end_attempt(inner, ffi.NULL, NONE) == NONE
        assert lib.burst_due() == 2**63
        assert lib.burst_end_attempt(outer, ffi.NULL, FAILED) == FAILED
        assert lib.burst_due() == 2**64 - 1

    def test_what_comes_too_late_does_not_begin(self):
        """For good, or for the moment if it could have begun before."""
        late = execution(deadline=1, since=0, begun=0)
        assert lib.burst_begin_attempt(late, ffi.NULL) == PERSISTENT
        assert (late.begun, lib.burst_due()) == (0, 2**64 - 1)
        late = execution(deadline=1, since=1, begun=0)
        assert lib.burst_begin_attempt(late, ffi.NULL) == TRANSIENT
