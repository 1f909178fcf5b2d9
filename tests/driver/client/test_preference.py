"""What a model is prepared for: how both sides wait, how deep bursts are, and how many threads an execution has."""

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from inside import controller_of, pipeline_of
from sent_models import sent

import driver
from burst import InvalidArgument
from driver.devices.litert import LiteRtDevice
from driver.devices.onnxruntime import OnnxRuntimeDevice
from driver.engine.models import ModelStore, ModelUse
from driver.interface import Preparation
from driver.options import PREFERENCES
from driver.protocol.model_codec import encode

X = np.zeros((1, 4), np.float32)
HZ, FRAMES = 100, 8


def pause(seconds):
    """Rare requests are what is to be tested, so this does wait."""
    threading.Event().wait(seconds)


def run_time(tids):
    """Nanoseconds on a CPU of these threads of ours and of others, as the scheduler counts them."""
    return sum(int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0]) for pid, tid in tids)


def spent(burst):
    """Nanoseconds of CPU of both sides together, for two requests each hundredth of a second, one after the other."""
    burst.run(X)
    page = controller_of(burst).trace.page.device
    tids = [(os.getpid(), threading.get_native_id()), (page.pid, page.tid)]
    before = run_time(tids)
    for _ in range(FRAMES):
        pause(1 / HZ)
        burst.run(X)
        burst.run(X)
    return (run_time(tids) - before) / FRAMES


@pytest.fixture
def apart(two_cpus):
    """Gives each side a CPU of its own: who shares one with its peer does not poll."""
    ours, theirs = two_cpus

    def keep_apart(engine):
        for tid in os.listdir(f"/proc/{engine}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(tid), {theirs})
        os.sched_setaffinity(0, {ours})

    return keep_apart


@pytest.mark.stress
def test_low_power_takes_less(place, kit, apart):
    """At 100 pairs of requests a second a burst for low power takes less CPU time, on both sides together, than a fast
    one: in the best of some tries that take turns, as whatever else runs makes both dearer.
    """
    with driver.connect() as device:
        apart(device.engine_pid)
        with (
            device.prepare(kit.add_model()).burst() as fast,
            device.prepare(kit.add_model(), preference="low_power").burst() as low,
        ):
            tries = [(spent(fast), spent(low)) for _ in range(10)]
    fast, low = (min(found) for found in zip(*tries, strict=True))
    assert low < fast - 10e3  # of the 50 us that the device polls after each


@pytest.mark.parametrize(
    ("preference", "spin", "depth"),
    [("low_power", 0.0, 1), ("fast_single_answer", 50e-6, 1), ("sustained_speed", 50e-6, 4)],
)
def test_defaults_of_bursts(device, kit, preference, spin, depth):
    """How a burst waits and how deep it is follow from the preference, unless the caller says it."""
    with device.prepare(kit.add_model(), preference=preference) as prepared:
        with prepared.burst() as burst:
            options = pipeline_of(burst).options
            assert (options.spin, options.depth) == (spin, depth)
            futures = [burst.submit(X + n) for n in range(6)]
            assert [future.result().outputs[0][0, 0] for future in futures] == [1, 2, 3, 4, 5, 6]
            assert burst.run(X).outputs[0].tolist() == [[1, 1, 1, 1]]
        with prepared.burst(depth=2, spin=1e-3) as burst:
            assert pipeline_of(burst).options[:1] + pipeline_of(burst).options[4:5] == (1e-3, 2)


def large_model():
    """A product of matrices that is worth several threads: 33 million products."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (32, 1024))
    weights = np.ones((1024, 1024), np.float32)
    builder.output(builder.operation("FULLY_CONNECTED", x, weights, np.zeros(1024, np.float32), 0))
    return builder.build()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (LiteRtDevice, {"low_power": 1, "fast_single_answer": 4, "sustained_speed": 4}),
        (OnnxRuntimeDevice, {"low_power": 1, "fast_single_answer": 4, "sustained_speed": 1}),
    ],
)
def test_threads(monkeypatch, tmp_path, kind, expected):
    """Low power has one thread; sustained speed has one where executions of a model go on at the same time."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found, model = {}, large_model()
    for preference in PREFERENCES:
        prepared = kind().prepare(model, Preparation(preference))
        found[preference] = prepared.only_program.threads
    assert found == expected
    assert kind(threads=3).threads_for(0, "low_power") == 1


def threads_of(pid):
    return len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU: LiteRT has one thread for anything")
def test_threads_of_a_device(place, kit):
    """The preference reaches the device: for low power a large model starts no threads there, for a fast answer it
    does.
    """
    model = large_model()
    x = np.ones((32, 1024), np.float32)
    with driver.connect("litert") as device, contextlib.ExitStack() as stack:
        stack.enter_context(device.prepare(kit.add_model()).burst()).run(X)  # what all bursts share is there then
        counts = [threads_of(device.engine_pid)]
        for preference in ("low_power", "fast_single_answer"):
            burst = stack.enter_context(device.prepare(model, preference=preference).burst())
            assert burst.run(x).outputs[0][0, 0] == 1024
            counts.append(threads_of(device.engine_pid))
    low_power, fast = np.diff(counts)
    assert low_power == 1  # the burst's listener
    assert fast > 1


class TestModels:
    """Equal models for different preferences are not one."""

    class Device:
        """Notes what it is asked for."""

        name = "notes"
        hal_version = driver.Device.hal_version

        def __init__(self):
            self.asked = []

        def prepare(self, model, preparation):
            self.asked.append(preparation.preference)
            return Shared()

    def test_each_has_its_own(self, kit):
        """Clients share a model when they prefer the same, and its bytes in any case."""
        device, model = self.Device(), kit.add_model()
        models = ModelStore(device)

        def prepare(preference):
            return models.prepare(*sent(model), lambda: None, ModelUse(preference))

        one, two, again = map(prepare, ("low_power", "sustained_speed", "low_power"))
        assert one is again
        assert one is not two
        assert one.region is two.region
        assert device.asked == ["low_power", "sustained_speed"]


class Shared:
    """A prepared model that serves all."""

    serves_all = True


@pytest.mark.parametrize("wrong", [-1, 3, "LOW_POWER", "", None, ["low_power"], 0])
def test_refused(device, kit, wrong):
    """A client that sends another preference than the three gets INVALID_ARGUMENT, and the device goes on."""
    model = encode(kit.add_model())
    with pytest.raises(InvalidArgument, match="preference="):
        device.call("prepare", model.where, None, None, wrong, fds=model.fds)
    if wrong is not None:  # which stands for that of the saved model
        with pytest.raises(InvalidArgument, match="preference="):
            device.call("restore", None, b"", wrong, fds=model.fds)
    assert device.call("prepare", model.where, None, None, "low_power", fds=model.fds)[0]
    assert device.call("prepare", model.where, fds=model.fds)[0]
    with pytest.raises(ValueError, match="preference="):
        device.prepare(kit.add_model(), preference=wrong)
