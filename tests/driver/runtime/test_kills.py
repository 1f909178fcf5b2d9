"""Devices that are killed at any moment cost a compiled model nothing but time."""

import itertools
import threading

import numpy as np
import pytest
import stress

import driver
from driver.devices import device_class
from driver.runtime import capabilities

pytestmark = pytest.mark.integration


@pytest.fixture
def devices(place, kit, runtime_kit):
    """Names of three, of which the first is the fastest, and lacks MUL."""
    names = kit.odd("Picky"), "reference", "cpu"
    for name, exec_time in zip(names, (0.5, 0.9), strict=False):
        capabilities.store(name, device_class(name).version, runtime_kit.speed(exec_time))
    return names


def executions(compiled, burst, count):
    """(input, how to get its outputs), on every path by turns, with some in flight."""
    waiting = []
    for n in range(count):
        x = np.full(4, n, np.float32)
        waiting.append((x, burst.submit(x)))
        if n % 3 == 0:
            yield x, burst.run(x).outputs
        if n % 3 == 1:
            yield x, compiled.run(x)
        if len(waiting) > 3:
            x, future = waiting.pop(0)
            yield x, future.result(20).outputs
    for x, future in waiting:
        yield x, future.result(20).outputs


@pytest.mark.parametrize("rounds", [6, pytest.param(stress.times(50), marks=pytest.mark.stress)])
def test_every_execution_has_its_result(devices, place, runtime_kit, rounds):
    """On one device and on several, at every depth, with recovery and without: each result is right, and comes."""
    random = np.random.default_rng(rounds)
    ways = itertools.product([1, 3], [False, True], [devices, (devices[0], "cpu"), devices[1:]])
    for depth, recover, used in itertools.islice(itertools.cycle(ways), rounds):
        killer = threading.Thread(target=place.clear)
        with (
            driver.compile(runtime_kit.mixed_model(), used) as compiled,
            compiled.burst(depth=depth, recover=recover) as burst,
        ):
            moment = int(random.integers(1, 60))
            for n, (x, outputs) in enumerate(executions(compiled, burst, 60)):
                for ours, theirs in zip(outputs, runtime_kit.mixed(x), strict=True):
                    np.testing.assert_array_equal(ours, theirs)
                if n == moment:
                    killer.start()
            killer.join()
