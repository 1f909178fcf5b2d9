"""A device that takes no work refuses it on every path, with its reason, and serves again once it can."""

import os
import signal

import numpy as np
import pytest
from click.testing import CliRunner

import driver
from burst import DeviceUnavailable
from driver.cli.command import burst as command
from driver.interface import Capabilities, DeviceStatus, Performance
from driver.runtime import capabilities

X = np.ones((1, 4), np.float32)
MOODY = "burst_test_devices.odd:Moody"


@pytest.fixture
def report(home, kit):
    """Has a device report a status, and waits until it has."""

    def report(device, state, reason=""):
        (home.path / "status").write_text(f"{state} {reason}")
        os.kill(device.engine_pid, signal.SIGUSR1)
        kit.until(lambda: device.status() == (state, reason))

    return report


@pytest.fixture
def device(home):
    with driver.connect(MOODY) as found:
        yield found


@pytest.mark.parametrize("state", ["offline", "busy"])
def test_no_path_executes(state, device, report, kit):
    """run, execute, execute_async, execute_fenced and prepare; and in a burst run, submit and execute. Also what was
    executed before and is bound, in C too. Afterwards all of it works again.
    """
    with device.prepare(kit.add_model()) as prepared, prepared.burst(depth=2) as burst:
        request, _ = kit.request([X], 16)
        ways = {
            "run": lambda: prepared.run(X),
            "execute": lambda: prepared.execute(request).raise_for_status(),
            "execute_async": lambda: prepared.execute_async(request).result(kit.patience).raise_for_status(),
            "execute_fenced": lambda: prepared.execute_fenced(request, []).result(kit.patience).raise_for_status(),
            "burst.run": lambda: burst.run(X),
            "burst.submit": lambda: burst.submit(X).result(kit.patience),
            "burst.execute": lambda: burst.execute(request).raise_for_status(),
            "prepare": lambda: device.prepare(kit.mul_model()).close(),
        }
        for way in ways.values():
            for _ in range(3):
                way()
        report(device, state, "the cable is out")
        said = {}
        for name, way in ways.items():
            with pytest.raises(DeviceUnavailable) as raised:
                way()
            said[name] = str(raised.value)
        assert {f"{state}: the cable is out" in text for text in said.values()} == {True}, said
        report(device, "unknown")
        for way in ways.values():
            way()
        report(device, "available")


def test_its_status_is_seen(device, report, kit, monkeypatch):
    """By `driver.devices()` and `burst devices`, without starting a device that does not run."""
    monkeypatch.setattr("driver.runtime.capabilities.names", lambda: ["reference", MOODY])
    monkeypatch.setattr("driver.cli.devices.names", lambda: ["reference", MOODY])
    assert [found.status for found in driver.devices()] == [DeviceStatus("unknown"), DeviceStatus()]
    report(device, "busy", "another program owns it")
    _, found = driver.devices()
    assert found.status == DeviceStatus("busy", "another program owns it")
    lines = CliRunner().invoke(command, ["devices"]).output
    assert "yes, busy" in lines
    assert f"{MOODY}: busy: another program owns it" in " ".join(lines.split())
    report(device, "available")


def test_a_compiled_model_falls_back_meanwhile(device, report, kit, monkeypatch):
    """Its requests run on the CPU, and so do those of one that is compiled then; it goes back to the device."""
    monkeypatch.setattr("driver.runtime.compilation.can_be_measured", lambda _: False)
    capabilities.store(MOODY, device.version, Capabilities({"TENSOR_FLOAT32": Performance(0.01)}, source="measured"))
    with driver.compile(kit.add_model(), [device, "cpu"]) as compiled, compiled.burst() as burst:
        assert "cpu" not in str(compiled.placement())
        report(device, "offline", "the cable is out")
        assert compiled.run(X)[0].tolist() == [[2, 2, 2, 2]]
        assert burst.run(X).outputs[0].tolist() == [[2, 2, 2, 2]]
        assert compiled.stats()["fallbacks"]["whole"] == 2
        with driver.compile(kit.mul_model(), [device, "cpu"]) as other:
            assert "cpu" in str(other.placement())
        with driver.compile(kit.mul_model(), [device, "reference"]) as other:
            assert other.placement() == [("reference", (0,))]
            assert "the cable is out" in other.stats()["fallbacks"]["reasons"][f"dropped, {MOODY}"]
        report(device, "available")
        before = device.stats()["priorities"]["medium"]["executions"]
        assert compiled.run(X)[0].tolist() == [[2, 2, 2, 2]]
        assert device.stats()["priorities"]["medium"]["executions"] == before + 1


def test_a_state_that_is_none_is_refused():
    """By the device's own call, which names those that there are."""

    class Odd(driver.Device):
        name, version, type = "odd", "1", "CPU"

        def supported_operations(self, model):
            return []

        def prepare(self, model, preparation):
            raise NotImplementedError

    odd, reports = Odd(), []
    odd.on_report = lambda: reports.append(odd.status)
    with pytest.raises(ValueError, match="state='asleep': one of 'available', 'busy', 'offline', 'unknown'"):
        odd.report("asleep")
    odd.report("busy", "warming up")
    assert reports == [("busy", "warming up")]
    assert str(reports[0]) == "busy: warming up"
