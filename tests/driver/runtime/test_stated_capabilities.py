"""What a driver states about its device is believed, shown as stated, and never measured; nonsense is told to it."""

import json
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from burst_test_devices.stating import STATED
from click.testing import CliRunner

import driver
from burst import GeneralFailure
from driver.cli.command import burst as command
from driver.protocol.stated_capabilities import from_wire, to_wire
from driver.runtime import capabilities, measuring

STATING = "burst_test_devices.stating:Stating"
ASKED = "burst_test_devices.stating:Asked"
FAST, SLOW = "0.125", "8.0"
MEASURES = True


@pytest.fixture
def unmeasured(place, monkeypatch):
    """Nothing can be measured here, neither devices nor models."""

    def measured(*_):
        raise AssertionError("it was measured")

    monkeypatch.setattr(capabilities, "measured", measured)
    monkeypatch.setattr("driver.runtime.compilation.seconds_of", measured)
    monkeypatch.setattr(measuring, "seconds_of", measured)
    return place


@pytest.fixture
def state(place):
    """Has the device state this, in Python."""
    return (place.path / "stated").write_text


@pytest.fixture
def installed(monkeypatch):
    """Only this device is installed."""
    module = import_module("driver.devices")
    found = EntryPoints([EntryPoint("stating", STATING, module.GROUP)])
    monkeypatch.setattr(module, "entries", lambda: found)


def device_of(compiled):
    return compiled.placement()[0][0]


def stating(time):
    return f"Capabilities({{'TENSOR_FLOAT32': Performance({time})}})"


def test_it_decides_where_models_are_not_measured(unmeasured, state, kit):
    """A model of open size goes where the statement says, each time that the driver states something else."""
    for time, expected in ((FAST, ASKED), (SLOW, "cpu"), (FAST, ASKED)):
        state(stating(time))
        with driver.compile(kit.open_model(), [ASKED, "cpu"]) as compiled:
            placement = compiled.placement()
            assert (device_of(compiled), placement.capabilities) == (expected, {ASKED: "stated"})
            assert str(placement).endswith(f"; by capabilities: {ASKED} stated")


def test_a_models_own_seconds_decide_whatever_is_stated(place, state, kit, monkeypatch):
    """They are measured on each candidate, also on one that states that it is fast."""
    monkeypatch.setattr(capabilities, "measured", lambda _: pytest.fail("the device was measured"))
    monkeypatch.setattr("driver.runtime.compilation.seconds_of", lambda *_: next(seconds))
    state(stating(FAST))
    seconds = iter([2e-3, 1e-3])
    with driver.compile(kit.add_model(), [ASKED, "cpu"]) as compiled:
        placement = compiled.placement()
        assert (device_of(compiled), placement.capabilities) == ("cpu", {ASKED: "stated"})
        assert placement.figures.seconds == {ASKED: 2e-3, "cpu": 1e-3}


def test_what_is_not_stated_is_not_measured(unmeasured, kit):
    """All figures of a device have one source: a type without a figure costs infinitely much."""
    with driver.connect(STATING) as device:
        assert capabilities.of(device) == STATED
        assert capabilities.stored(STATING, device.version).source == "stated"
    relaxed = capabilities.Cost(kit.add_model(), STATED._replace(operands={}))
    assert relaxed.of(kit.add_model().main, kit.add_model().main.operations[0]) == float("inf")


def test_a_driver_that_stops_stating_is_measured(place, state, kit, monkeypatch):
    """And the other way round: what was measured gives way to a statement."""
    monkeypatch.setattr(capabilities, "_BUDGET", 0.0)
    state("None")
    with driver.connect(ASKED) as device:
        assert capabilities.of(device).source == "measured"
        state(stating(FAST))
        assert capabilities.of(device).source == "stated"
        state("None")
        assert capabilities.of(device).source == "measured"
        assert capabilities.stored(ASKED, device.version).source == "measured"


def test_it_is_known_without_starting_the_device(place, installed):
    """By driver.devices() and `burst devices`, which name the source."""
    (info,) = driver.devices()
    assert info.capabilities == STATED
    (found,) = json.loads(CliRunner().invoke(command, ["devices", "--json"]).output)
    assert found["capabilities"]["source"] == "stated"
    assert found["capabilities"]["operands"] == {"TENSOR_FLOAT32": {"exec_time": 0.125, "power_usage": 0.5}}
    shown = CliRunner().invoke(command, ["devices"], env={"COLUMNS": "120"}).output
    assert [line.split("│")[2].strip() for line in shown.splitlines() if "source" in line] == ["stated"]
    assert "0.12 (0.50)" in shown
    assert place.pids() == []


def test_measure_does_not_measure_it(unmeasured, monkeypatch):
    """`burst devices --measure` times requests, and shows what is stated."""
    monkeypatch.setattr("driver.cli.devices._SECONDS", 0.02)
    monkeypatch.setattr("driver.cli.devices.names", lambda: [STATING])
    (found,) = json.loads(CliRunner().invoke(command, ["devices", "--measure", "--json"]).output)
    assert (found["reason"], found["capabilities"]["source"]) == ("", "stated")
    assert found["measured"]["plain path"]["p50_us"] > 0


NONSENSE = {
    "a mapping": ("{'TENSOR_FLOAT32': Performance(1.0)}", "driver.Capabilities"),
    "a list": ("Capabilities([('TENSOR_FLOAT32', Performance(1.0))])", "capabilities.operands"),
    "nan": (stating("float('nan')"), "TENSOR_FLOAT32: exec_time nan"),
    "negative": (stating("-2.0"), "TENSOR_FLOAT32: exec_time -2.0"),
    "zero": (stating("0"), "TENSOR_FLOAT32: exec_time 0"),
    "infinite": (stating("float('inf')"), "TENSOR_FLOAT32: exec_time inf"),
    "a word": (stating("'fast'"), "TENSOR_FLOAT32: exec_time 'fast'"),
    "power": (stating("1.0, -1.0"), "TENSOR_FLOAT32: power_usage -1.0"),
    "a bare number": ("Capabilities({'TENSOR_FLOAT32': 0.5})", "TENSOR_FLOAT32 0.5: state a driver.Performance"),
    "a type": ("Capabilities({'TENSOR_FLOAT': Performance(1.0)})", "'TENSOR_FLOAT': state the HAL's name"),
    "relaxed": ("Capabilities({}, relaxed_scalar=Performance(-1.0))", "relaxed_scalar: exec_time -1.0"),
    "an error": ("1 / 0", "failed to state its capabilities: division by zero"),
}


@pytest.mark.parametrize(("stated", "words"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_told(unmeasured, state, kit, stated, words):
    """With the driver's name and the value; `compile` goes on without the device, and says why."""
    state(stated)
    with driver.connect(ASKED) as device, pytest.raises(GeneralFailure) as refused:
        device.stated_capabilities()
    assert words in str(refused.value)
    assert "driver 'asked'" in str(refused.value)
    with driver.compile(kit.open_model(), [ASKED, "cpu"]) as compiled:
        assert device_of(compiled) == "cpu"
        assert words in str(compiled.stats()["fallbacks"])


def test_nonsense_of_a_class_is_told_without_starting_it(place, installed, monkeypatch):
    """driver.devices() has it as the reason why the device cannot be used; the others are listed all the same."""
    from burst_test_devices.stating import Stating

    monkeypatch.setattr(Stating, "capabilities", STATED._replace(while_performance=driver.Performance(-3.0)))
    (info,) = driver.devices()
    assert "the driver 'stating' states while_performance: exec_time -3.0" in info.missing
    assert "while_performance: exec_time -3.0" in CliRunner().invoke(command, ["devices"]).output


@pytest.mark.parametrize(
    "values", [[[["A", 1.0]]], [1, 2, 3, 4, 5], [[["A", 1.0, None]], None, None, None], [None] * 5]
)
def test_a_device_of_another_account_is_not_believed_blindly(values):
    """What comes through the socket is checked again."""
    assert from_wire("far", to_wire(STATED)) == STATED
    assert from_wire("far", to_wire(None)) is None
    with pytest.raises(GeneralFailure, match="the driver 'far' states capabilities"):
        from_wire("far", values)
