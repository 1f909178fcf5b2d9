"""Renewals, and kills of whatever processes there are at random moments: no request is lost, wrong or given twice."""

import contextlib
import itertools
import os
import random
import signal

import numpy as np
import pytest
import stress

from driver.client.recovery import Revivals


def frame(n):
    return np.array([[n, 1, 2, 3]], np.float32)


@pytest.mark.parametrize(
    "count", [pytest.param(3, marks=pytest.mark.integration), pytest.param(1000, marks=pytest.mark.stress)]
)
def test_kills_at_random_moments(place, kit, monkeypatch, tally, count):
    """With four in flight; a burst that recovers has each result once, in order, whichever engine is killed."""
    monkeypatch.setattr(Revivals, "count", lambda *_: None)
    chance, numbers, pending = random.Random(count), itertools.count(), []
    with kit.living("reference") as device, device.prepare(kit.add_model()) as prepared:  # noqa: SIM117
        with prepared.burst(recover=True, depth=4) as burst:
            for _ in range(times := count if count < 10 else stress.times(count)):
                with contextlib.suppress(Exception):  # it may just have been killed
                    device.connection.call("renew", "a test")
                # so many requests take about twice as long as a renewal
                for left in range(chance.randrange(20_000), -1, -1):
                    n = next(numbers) % 10**6
                    pending.append((n, burst.submit(frame(n))))
                    if len(pending) == 4:
                        number, future = pending.pop(0)
                        assert np.array_equal(future.result().outputs[0], frame(number) + 1)
                    if not left and (pids := place.pids()):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(chance.choice(pids), signal.SIGKILL)
            for number, future in pending:
                assert np.array_equal(future.result().outputs[0], frame(number) + 1)
    tally("renewals under load", times)
