"""A model that is kept has its preference and its priority with it, as the HAL says of prepareModelFromCache_1_3."""

import os
import signal

import numpy as np
import pytest

import driver
from burst import InvalidArgument
from driver.vts.cache_files import CacheFileSet

KEEPING = "burst_test_devices.listening:KeepingModels"
X = np.ones((1, 4), np.float32)


def restored_as(device, model, files, heard, **given):
    """Preference and priority with which the device runs the restored model."""
    seen = len(heard("burst_began"))
    with device.prepare_from_cache(model, files.cache(), **given) as restored, restored.burst() as burst:
        assert burst.run(X).outputs[0].tolist() == (X + 1).tolist()
        assert restored.run(X)[0].tolist() == (X + 1).tolist()
    (began,) = heard("burst_began")[seen:]
    return began["preference"], heard("bind")[-1]["priority"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_restored_model_is_as_it_was_kept(place, heard, kit, is_killed):
    """Without a word of the caller, each of the two is that of the saved model, also in the device's next life; what
    the caller gives counts instead.
    """
    model = kit.add_model()
    with driver.connect(KEEPING) as device, CacheFileSet(device.number_of_cache_files_needed()) as files:
        terms = {"preference": "sustained_speed", "priority": "high"}
        with device.prepare(model, cache=files.cache(), **terms) as prepared:
            assert prepared.home.declined == ""
        if is_killed:
            for pid in (device.service_pid, device.engine_pid):
                os.kill(pid, signal.SIGKILL)
        with kit.living(KEEPING) as living:
            assert restored_as(living, model, files, heard) == ("sustained_speed", "high")
            assert restored_as(living, model, files, heard, priority="low") == ("sustained_speed", "low")
            assert restored_as(living, model, files, heard, preference="low_power") == ("low_power", "high")
            given = {"preference": "fast_single_answer", "priority": "medium"}
            assert restored_as(living, model, files, heard, **given) == ("fast_single_answer", "medium")


def test_the_last_one_that_was_kept_counts(place, heard, kit):
    """A model that is prepared again for the same files, with other terms, is restored with these."""
    model = kit.add_model()
    with driver.connect(KEEPING) as device, CacheFileSet(device.number_of_cache_files_needed()) as files:
        for priority in ("low", "high"):
            device.prepare(model, cache=files.cache(), priority=priority).close()
            assert restored_as(device, model, files, heard) == ("fast_single_answer", priority)


def test_only_restoring_takes_what_was_kept(device, kit):
    """A preparation names both: nothing was kept before it."""
    with pytest.raises(ValueError, match="preference=None"):
        device.prepare(kit.add_model(), preference=None)
    for wrong in ({"preference": "haste"}, {"priority": "urgent"}):
        with pytest.raises(ValueError, match=next(iter(wrong.values()))):
            device.prepare_from_cache(kit.add_model(), driver.Cache(bytes(32), [], []), **wrong)
    with pytest.raises(InvalidArgument):
        device.prepare_from_cache(kit.add_model(), driver.Cache(bytes(32), [], []))
