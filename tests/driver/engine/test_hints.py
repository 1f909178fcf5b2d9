"""A driver hears of bursts that open and end, whatever ends them, and of rest; its failures there harm no client."""

import subprocess
import time

import numpy as np
import pytest

import driver
from driver.client.discovery import Place, runtime_dir

LISTENING = "burst_test_devices.listening:Listening"
IMPROVING = "burst_test_devices.listening:Improving"
RUDE = "burst_test_devices.listening:Rude"
X = np.ones((1, 4), np.float32)
QUICK = 0.2
CLIENT = """
import signal, sys
import numpy as np
import driver
m = driver.ModelBuilder()
x = m.input("float32", (1, 4))
m.output(m.operation("ADD", x, x, 0))
device = driver.connect(sys.argv[1])
burst = device.prepare(m.build(), preference="low_power").burst()
burst.run(np.ones((1, 4), np.float32))
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def bursts(place, heard):
    """What the driver has heard of bursts."""
    return lambda: [line["what"] for line in heard("burst_began", "burst_ended")]


def opened(device, kit, **how):
    return device.prepare(kit.add_model(), **how).burst()


def test_a_burst_that_is_closed(bursts, heard, kit):
    """The driver hears of it before the burst's first execution, with the model's preference, and when it has ended."""
    with driver.connect(LISTENING) as device:
        with opened(device, kit, preference="sustained_speed") as burst:
            assert bursts() == ["burst_began"]
            burst.run(X)
        kit.until(lambda: bursts() == ["burst_began", "burst_ended"])
        (began,) = heard("burst_began")
        assert began["preference"] == "sustained_speed"
        order = [line["what"] for line in heard("burst_began", "run", "burst_ended")]
        assert order == ["burst_began", "run", "burst_ended"]


ENDINGS = {
    "dropped": lambda device, prepared, burst: burst.clear(),
    "device closed": lambda device, prepared, burst: device.close(),
    "model and burst dropped": lambda device, prepared, burst: (prepared.clear(), burst.clear()),
}


@pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)
def test_other_endings(bursts, kit, end):
    """Each ends it once, also for two bursts on a model that two clients share."""
    with driver.connect(LISTENING) as other, opened(other, kit) as stays, driver.connect(LISTENING) as device:
        stays.run(X)
        prepared = [device.prepare(kit.add_model())]
        burst = [prepared[0].burst()]
        burst[0].run(X)
        assert bursts() == ["burst_began"] * 2
        end(device, prepared, burst)
        if not device.is_closed:
            device.call("turns")  # tells what was dropped
        kit.until(lambda: bursts() == ["burst_began"] * 2 + ["burst_ended"])
        stays.run(X)
    kit.until(lambda: bursts().count("burst_ended") == 2)


@pytest.mark.integration
def test_a_client_that_is_killed(bursts, heard, kit):
    """kill -9 in the middle of a burst: the driver hears of the end while the device serves others."""
    with driver.connect(LISTENING) as device:
        client = kit.python(CLIENT, LISTENING, stdout=subprocess.PIPE, text=True)
        assert client.stdout.readline() == "ready\n"
        assert bursts() == ["burst_began"]
        assert heard("burst_began")[0]["preference"] == "low_power"
        client.kill()
        kit.until(lambda: bursts() == ["burst_began", "burst_ended"])
        client.wait()
        client.stdout.close()
        assert device.status().takes_work


def test_a_better_model_hears_of_open_bursts(place, heard, kit):
    """When it replaces the first one; the first one hears that they are over, and each hears the end once."""
    with driver.connect(IMPROVING) as device, device.prepare(kit.add_model()) as prepared:
        with prepared.burst() as burst, prepared.burst():
            for _ in range(3):
                burst.run(X)
            kit.until(lambda: prepared.stage == 1 and len(heard("burst_ended")) == 2)
        kit.until(lambda: len(heard("burst_ended")) == 4)
    found = [(line["what"][6:], line["plan"]) for line in heard("burst_began", "burst_ended")]
    assert found[:2] == [("began", "first")] * 2
    assert found[2:6] == [("began", "better"), ("ended", "first")] * 2
    assert found[6:] == [("ended", "better")] * 2


def test_a_burst_that_is_refused_is_no_burst(bursts, kit):
    """Nothing began that did not begin: what a client sends wrong leaves no hint open."""
    with driver.connect(LISTENING) as device, device.prepare(kit.add_model()) as prepared:
        number = prepared.home.number
        with pytest.raises(Exception, match="a burst needs 4 or 5 descriptors"):
            device.call("burst", number, [], [], 0.0, [2])
        with prepared.burst() as burst:
            burst.run(X)
        kit.until(lambda: bursts() == ["burst_began", "burst_ended"])


def test_failures_harm_no_client(configure, heard, kit):
    """A driver that raises in every hint, or exits: each burst runs and ends, the device rests, and the log names the
    driver once for each kind of hint.
    """
    configure(idle_seconds=QUICK)
    with driver.connect(RUDE) as device:
        pid = device.engine_pid
        for _ in range(3):
            with opened(device, kit) as burst:
                np.testing.assert_array_equal(burst.run(X).outputs[0], X + 1)
        kit.until(lambda: len(heard("burst_ended")) == 3)
        rests = len(heard("rest"))
        kit.until(lambda: len(heard("rest")) > rests)
        with device.prepare(kit.add_model()) as prepared:
            kit.until(lambda: len(heard("rest")) > rests + 1)
            prepared.run(X)
        assert device.engine_pid == pid
        log = Place(runtime_dir(), RUDE).log.read_text()
    for what in ("burst_began", "burst_ended", "rest", "rest of a model"):
        assert log.count(f"failed in the hint {what};") == 1
    assert "the driver 'reference' failed" in log


class TestRest:
    """The device's own hint: nothing has run for a while."""

    def test_after_each_use(self, configure, heard, kit):
        """Once after each: then the device is left alone until it is used again, by a burst that has been open."""
        configure(idle_seconds=QUICK)
        with driver.connect(LISTENING) as device, opened(device, kit) as burst:
            for count in (1, 2, 3):
                for _ in range(5):
                    np.testing.assert_array_equal(burst.run(X).outputs[0], X + 1)
                kit.until(lambda count=count: len(heard("rest")) == count)

    def test_a_model_that_was_only_prepared(self, configure, heard, kit):
        """That was work, too."""
        configure(idle_seconds=QUICK)
        with driver.connect(LISTENING) as device, device.prepare(kit.add_model()):
            kit.until(lambda: heard("rest"))

    @pytest.mark.stress  # a machine that pauses for QUICK would make it fail
    @pytest.mark.parametrize("way", ["burst", "plain", "async"])
    def test_not_while_it_is_used(self, configure, heard, kit, way):
        """Requests that never pause for as long as `idle_seconds` keep it awake, though each is bound only once."""
        configure(idle_seconds=QUICK)
        with (
            driver.connect(LISTENING) as device,
            device.prepare(kit.add_model()) as prepared,
            prepared.burst() as burst,
        ):
            request, _ = kit.request([X], 16)
            run = {
                "burst": lambda: burst.execute(request),
                "plain": lambda: prepared.execute(request),
                "async": lambda: prepared.execute_async(request).result(kit.patience),
            }[way]
            run()
            binds, end = len(heard("bind")), time.monotonic() + 5 * QUICK
            while time.monotonic() < end:
                run().raise_for_status()
            assert heard("rest") == []
            assert len(heard("bind")) == binds
            kit.until(lambda: heard("rest"))

    def test_not_during_an_execution(self, configure, heard, kit):
        """One that takes longer than `idle_seconds` is no rest."""
        configure(idle_seconds=QUICK)
        with driver.connect("burst_test_devices.listening:Dozing") as device, opened(device, kit) as burst:
            burst.run(np.full((1, 4), 5 * QUICK, np.float32))
            assert heard("rest") == []
            kit.until(lambda: heard("rest"))
