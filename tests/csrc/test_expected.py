"""Requests of a higher priority that come while the policy of a run queue decides, deterministically: expected.c."""

import re

import pytest

pytestmark = pytest.mark.integration

RUN_QUEUE = ("burst/deadline.c", "burst/policy.c", "burst/flows.c", "burst/run_queue.c", "fmq/futex.c")


def test_a_free_slot_is_given_whenever_a_higher_priority_begins_to_come(build):
    """Between which two looks of the policy ever: a ticket that may have the slot gets it, and nothing crashes."""
    out = build("expected.c", *RUN_QUEUE, flags=["-include", "scheduled.h"])()
    points = re.fullmatch(r"(\d+) points\n", out)
    assert points
    assert int(points[1]) > 3
