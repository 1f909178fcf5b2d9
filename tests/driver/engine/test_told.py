"""What a device is told: how it is to prepare, what is urgent, and by when it has to be done."""

import numpy as np
import pytest

import driver

LISTENING = "burst_test_devices.listening:Listening"
X = np.ones((1, 4), np.float32)


@pytest.fixture
def device(home, heard):
    with driver.connect(LISTENING) as found:
        yield found


def test_preparation(device, heard, kit):
    """The preference, and the deadline in nanoseconds of CLOCK_MONOTONIC, if there is one."""
    deadline = 1e6 + 0.25  # in eleven days from the start
    device.prepare(kit.add_model(), preference="sustained_speed", deadline=deadline).close()
    device.prepare(kit.mul_model(), preference="low_power", priority="low").close()
    first, second = heard("prepare")
    assert (first["preference"], second["preference"]) == ("sustained_speed", "low_power")
    assert first["deadline"] == pytest.approx(deadline * 1e9, abs=1e3)
    assert second["deadline"] is None


@pytest.mark.parametrize("way", ["plain", "burst", "burst of its own", "in flight", "fenced"])
def test_priority_and_loop_timeout(way, device, heard, kit):
    """Of each client's own prepared model, also where two share one: the device binds for each."""
    model = kit.add_model()
    with device.prepare(model, priority="high") as high, device.prepare(model, priority="low") as low:
        for prepared in (high, low):
            request, _ = kit.request([X], 16)
            if way == "plain":
                prepared.execute(request, loop_timeout=3).raise_for_status()
            elif way == "burst":
                with prepared.burst() as burst:
                    burst.execute(request, loop_timeout=3).raise_for_status()
            elif way == "burst of its own":
                with prepared.burst(loop_timeout=3) as burst:
                    burst.run(X)
            elif way == "in flight":
                with prepared.burst(loop_timeout=3, depth=2) as burst:
                    burst.submit(X).result(kit.patience)
            else:
                prepared.execute_fenced(request, [], loop_timeout=3).result(kit.patience).raise_for_status()
    assert [(line["priority"], line["loop_timeout"]) for line in heard("bind")] == [("high", 3.0), ("low", 3.0)]


def test_deadline(device, heard, kit):
    """The thread that executes asks for the deadline of its execution: on the plain path and in a burst."""
    with device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        deadline = 1e6 + 0.25  # in eleven days from the start
        request, _ = kit.request([X], 16)
        for way in (prepared, burst):
            way.execute(request).raise_for_status()
            way.execute(request, deadline=deadline).raise_for_status()
    ends = [line["deadline"] for line in heard("run")]
    assert (ends[0], ends[2]) == (None, None)
    assert [ends[1], ends[3]] == pytest.approx([deadline * 1e9] * 2, abs=1e3)
