"""Compiled models whose devices renew themselves: models on several devices, and models that are kept."""

import numpy as np
from click.testing import CliRunner
from same_arrays import equal

import driver
from driver.cli.command import burst as command
from driver.devices import device_class
from driver.runtime import capabilities

X = np.arange(4, dtype=np.float32)


def renew(name):
    found = CliRunner().invoke(command, ["renew", name])
    assert found.exit_code == 0, found.output


def test_a_model_on_two_devices(place, runtime_kit, kit):
    """Each step goes over by itself; what the caller holds of earlier results stays as it was."""
    devices = [kit.odd("Picky"), "reference"]
    for name, exec_time in zip(devices, (0.5, 0.9), strict=True):
        capabilities.store(name, device_class(name).version, runtime_kit.speed(exec_time))
    with driver.compile(runtime_kit.mixed_model(), devices) as compiled, compiled.burst() as burst:
        held, before = [(n, burst.run(X + n)) for n in range(5)], place.pids()
        for name in devices:
            renew(name)
            for n in range(5, 20):
                equal(burst.run(X + n).outputs, runtime_kit.mixed(X + n))
        for n, result in held:
            equal(result.outputs, runtime_kit.mixed(X + n))
        assert not set(before) & set(place.pids())
        assert [step["recoveries"] for step in burst.stats()["steps"]] == [0, 0, 0]


def test_a_model_that_is_kept(place, tmp_path, kit):
    """The second engine gets it from the cache."""
    with driver.compile(kit.add_model(), ["reference"], cache_dir=tmp_path) as compiled, compiled.burst() as burst:
        x, (first,) = np.zeros((1, 4), np.float32), compiled.stats()["compilations"]
        equal(burst.run(x).outputs, (x + 1,))
        renew("reference")
        (second,) = compiled.stats()["compilations"]
        assert (first["outcome"], second["outcome"]) == ("saved", "restored")
        for n in range(10):
            equal(burst.run(x + n).outputs, (x + n + 1,))
