"""`burst devices`: what it says of devices that work, that do not, and that others run."""

from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints

import pytest

import driver
from driver.devices.litert import LiteRtDevice
from driver.runtime import capabilities


@pytest.fixture
def entries(monkeypatch):
    """Installs these devices, and no others."""

    module = import_module("driver.devices")  # which the function hides

    def install(**places):
        found = EntryPoints(EntryPoint(name, place, module.GROUP) for name, place in places.items())
        monkeypatch.setattr(module, "entries", lambda: found)

    return install


@pytest.mark.integration
def test_lists_without_starting(command, shared):
    """Name, version, type, feature level, cache files; the devices that run, and those that do not."""
    before = shared.pids()
    found = {device["name"]: device for device in command("devices", "--json").json()}
    assert shared.pids() == before
    assert set(found) >= {"litert", "onnxruntime", "reference"}
    assert found["litert"]["cache_files"] == {"model": 2, "data": 0}
    assert {device["feature_level"] for device in found.values()} == {30}
    none = {"read_paths": [], "write_paths": [], "system_calls": [], "one_engine": None}
    assert found["reference"]["needs"] == none
    assert "/proc/cpuinfo" in found["litert"]["needs"]["read_paths"]
    with driver.connect("reference"):
        found = {device["name"]: device for device in command("devices", "--json").json()}
    assert found["reference"]["runs"]
    assert found["reference"]["reason"] == ""


def test_a_device_that_cannot_be_loaded_says_why(command, entries):
    """It is in the list with its reason, and the others are, too."""
    entries(broken="no_such_module:Device", reference="driver.devices.reference:ReferenceDevice")
    found = {device["name"]: device for device in command("devices", "--json").json()}
    assert "No module named 'no_such_module'" in found["broken"]["reason"]
    assert found["reference"]["type"] == "CPU"
    assert "broken: name='broken' is not installed: No module named 'no_such_module'" in command("devices").out


def test_an_older_driver_says_so(command, entries):
    """Its feature level is that of the HAL that it speaks, with Android's numbers, and a line of its own says it."""
    entries(old="burst_test_devices.odd:Old", reference="driver.devices.reference:ReferenceDevice")
    found = {device["name"]: device["feature_level"] for device in command("devices", "--json").json()}
    assert found == {"old": 27, "reference": 30}
    shown = command("devices").out
    assert "All other installed devices accept models of the HAL 1.0 to 1.3 (feature level 30)." in shown
    assert "old: models of the HAL up to 1.0 (feature level 27)" in shown


def test_measures(command, entries, monkeypatch):
    """--measure starts a device, has its capabilities as the HAL has them, and times a request on each way."""
    monkeypatch.setattr("driver.cli.devices._SECONDS", 0.02)
    monkeypatch.setattr(capabilities, "_BUDGET", 0.0)
    entries(reference="driver.devices.reference:ReferenceDevice")
    (found,) = command("devices", "--measure", "--json").json()
    assert found["capabilities"]["operands"]["TENSOR_FLOAT32"]["exec_time"] > 0
    assert found["capabilities"]["if_performance"]["exec_time"] > 0
    for way in ("burst, polling", "burst, sleeping", "plain path"):
        assert 0 < found["measured"][way]["p50_us"] <= found["measured"][way]["p99_us"]
    assert found["measured"]["seconds_to_connect"] > 0
    shown = command("devices").out
    assert "TENSOR_QUANT8_ASYMM_SIGNED" in shown


def test_a_device_that_does_not_start_is_told(command, entries):
    """--measure ends with 1, and says where to look; without it, the device can only be listed."""
    entries(elsewhere="driver.devices.reference:ReferenceDevice")  # nothing of that name where it is started
    assert command("devices", "--json").json()[0]["reason"] == ""
    (found,) = command("devices", "--measure", "--json", ends=1).json()
    assert "ended while it started; its log is" in found["reason"]
    assert "name='elsewhere': no such device" in found["reason"]  # the end of that log


def test_a_device_that_is_not_installed_is_no_failure(command, entries, monkeypatch, place):
    """It is listed with its extra; --measure starts no process for it, and does not end with 1 because of it."""
    entries(litert="driver.devices.litert:LiteRtDevice")
    monkeypatch.setattr(LiteRtDevice, "missing", lambda: "a part is missing")
    (found,) = command("devices", "--measure", "--json").json()
    assert (found["is_installed"], found["measured"]) == (False, None)
    assert "not installed: a part is missing; " in found["reason"]
    assert "not installed" in command("devices").out
    assert place.pids() == []


def test_a_device_that_runs_no_addition_is_healthy(command, entries):
    """--measure has what it can of one that runs other models alone, says so in a line, and ends with 0."""
    name = "burst_test_devices.odd:Special"
    entries(**{name: name})
    (found,) = command("devices", "--measure", "--json").json()
    assert (found["reason"], list(found["measured"])) == ("", ["seconds_to_connect"])
    assert "(ADD)" in found["unmeasured"]


def test_lists_what_others_serve(command, entries, monkeypatch, tmp_path):
    """The sockets in the folder of `burst serve`; where nobody listens any more, that is the reason."""
    entries()
    monkeypatch.setattr("driver.cli.devices.DEFAULT_DIR", tmp_path)
    (tmp_path / "litert.sock").touch()
    (found,) = command("devices", "--json").json()
    assert found["name"] == str(tmp_path / "litert.sock")
    assert "start it again with `burst serve`" in found["reason"]


NARROW = 80
STATED = driver.Capabilities({"TENSOR_QUANT8_ASYMM_SIGNED": driver.Performance(0.125, 1234.5)}, source="stated")


def test_no_value_is_lost_in_80_columns(command, entries, unfolded, monkeypatch):
    """Also with as many devices as there are, whose names are long: what has no room is folded."""
    names = [f"onnxruntime-of-a-vendor-{number}" for number in range(8)]
    entries(**dict.fromkeys(names, "driver.devices.reference:ReferenceDevice"))
    monkeypatch.setattr(capabilities, "known", lambda *_: STATED)
    found = command("devices", "--json").json()
    shown = command("devices", columns=NARROW).out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= NARROW
    listed, figures = shown.split("Capabilities: ")
    assert unfolded(listed)[:3] == [
        "".join(names),
        "CPU" * len(names),
        "".join(device["version"].replace(" ", "") for device in found),
    ]
    assert unfolded(figures) == ["sourceTENSOR_QUANT8_ASYMM_SIGNED", *["stated0.12(1234.50)"] * len(names)]
    assert all(name in command("devices", columns=400).out for name in names)  # in one line, where there is room
