"""How a test waits for what has no event of its own, and the one limit for what never comes."""

import contextlib
import os
from time import monotonic, sleep

PATIENCE = 60.0  # seconds, on a machine as busy as it may be; no test compares a clock with anything else
EAGER, NAP = 100, 5e-4  # looks in a row, then a pause between two: whom the test waits for may need this processor


def until(condition, say=lambda: "it never came true"):
    """What `condition()` returns, as soon as that is true; `say()` tells what did not come."""
    end, looks = monotonic() + PATIENCE, 0
    while not (found := condition()):
        assert monotonic() < end, f"{say()}: {condition}"
        looks += 1
        if looks < EAGER:
            os.sched_yield()
        else:
            sleep(NAP)
    return found


def nested(*durations):
    """Asserts that each lasts at least as long as the one before, which lies in it.

    A busy machine makes the outer one longer, and never shorter.
    """
    assert list(durations) == sorted(durations)


@contextlib.contextmanager
def at_least(seconds):
    """What runs in it does not end before its time."""
    begin = monotonic()
    yield
    nested(seconds, monotonic() - begin)


def last(seconds):
    """Takes so long, as a device's work does; a test itself waits for an event."""
    sleep(seconds)
