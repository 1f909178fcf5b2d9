"""What a run of a plan says of its deadline, by the times that it saw."""

from types import SimpleNamespace

import pytest

from burst import executor
from burst.errors import MissedDeadlinePersistent, MissedDeadlineTransient
from fmq import clock


@pytest.mark.parametrize(("others", "error"), [(800, MissedDeadlineTransient), (400, MissedDeadlinePersistent)])
def test_the_time_of_others_is_not_the_run_s_own(monkeypatch, others, error):
    """A run of 1000 ns with 500 left misses its deadline for the moment, if others took so much of its time that it
    would have been done without them; else for good. The listener says the same of requests that it knows.
    """
    start = clock.now() + 10**12
    times = iter([start, start, start, start + 1000])  # when it could begin, enters, begins and ends
    monkeypatch.setattr(executor, "monotonic_ns", lambda: next(times))
    plan = SimpleNamespace(run=lambda: None, has_run=True, estimate=None)
    ticket = SimpleNamespace(enter=lambda deadline, estimate: None, leave=lambda: others)
    run = executor.PlanRun(plan, start, start + 500)
    with pytest.raises(error):
        run.in_time(ticket, start + 500)
