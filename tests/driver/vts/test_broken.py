"""Devices that are broken in one way: each category can fail, and no other one does over it."""

import re

import pytest

from driver import DeviceFailed
from driver.vts import CATEGORIES, SMOKE, Report, Target, catalogue, run

pytestmark = pytest.mark.integration

BROKEN = {
    "WrongResults": {"operations": "value 0 is"},
    "WrongShapes": {
        "operations": "dimensions [3, 2]; expected [2, 3]",
        "memory": "a valid request gets INVALID_ARGUMENT, not NONE",
    },
    "Generous": {
        "operations": "not OUTPUT_INSUFFICIENT_SIZE",
        "burst": "the answer is NONE, not OUTPUT_INSUFFICIENT_SIZE",
        "memory": "an output of another shape than its buffer's gets NONE, not GENERAL_FAILURE",
    },
    "Liar": {"operations": "this device multiplies nothing"},
    "Mortal": {"operations": "the device died"},
    "Nameless": {"device": "the device's version is empty", "extension": "answers for"},
    "Credulous": {"model": "accepts an invalid model"},
    "Careless": {"request": "an invalid request gets", "qos": "an invalid request gets a fence"},
    "Racy": {
        "device": "gets another result than a single thread",
        "burst": "at once: output 0 differs from that of the plain path",
    },
    "Gullible": {"burst": "was executed"},
    "Lazy": {"burst": "differs from that of the plain path"},
    "Scribbler": {"memory": "the device wrote to 1 bytes outside of its outputs"},
    "broken_caches:Trusting": {"caching": "file 0 with bit 0 flipped: the device restores a model"},
    "broken_caches:Rereading": {
        "caching": "with files that change meanwhile, the device restores a model that computes a different result"
    },
    "broken_caches:Tokenless": {"caching": "an unknown token: the device restores a model"},
    "broken_caches:Forgetful": {"caching": "on the plain path the device returns INVALID_ARGUMENT"},
    "broken_caches:Fussy": {"caching": "2 model files and 1 data files: preparing gets GENERAL_FAILURE"},
    "wrong_bursts:Stale": {"burst": "after 1 pools were freed: output 0 differs from that of the plain path"},
    "wrong_bursts:Sorting": {"burst": "with the pools in another order, 17 of them: output 0 differs"},
    "wrong_bursts:Talkative": {"burst": "no timing was requested, and Timing("},
    "wrong_bursts:Tireless": {"burst": "a request whose deadline has passed gets NONE"},
    "broken_statements:Boundless": {"device": "TENSOR_FLOAT32: exec_time nan"},
    "broken_statements:Silent": {"device": "supports ADD of TENSOR_FLOAT32, and states capabilities for TENSOR_BOOL8"},
    "broken_statements:Dreaming": {"device": "the state is 'asleep', not one of available, busy, offline, unknown"},
    "broken_statements:Needy": {"device": "needs.read_paths is '/dev/dri', not a tuple"},
    "broken_statements:Napping": {"burst": "a hint of a burst has to return at once"},
    "broken_statements:Jumpy": {"burst": "the device died", "qos": "the device died"},
    "broken_statements:Snobbish": {"qos": "the device answered GENERAL_FAILURE"},
    "broken_statements:Unpunctual": {"qos": "preparing 200 operations ends"},
    "broken_statements:Blunt": {"qos": "an execution whose deadline passes while it runs gets GENERAL_FAILURE"},
    "broken_memory:Unswapped": {"memory": "the buffer holds other values than were written to it"},
    "broken_memory:Halved": {"memory": "the buffer holds other values than were written to it"},
    "broken_memory:Guarded": {"memory": "an input in a buffer with the output in a buffer leaves another value"},
    "broken_memory:Shared": {"memory": "a buffer with the output in plain memory gives another value"},
    "broken_memory:Aliasing": {"memory": "holds what its client has written elsewhere after the copy"},
    "broken_memory:Believing": {"memory": "a wrong handle of kind com.example.block gets NONE"},
    "broken_memory:Crashing": {"memory": "the device died"},
    "Boastful": {"qos": "no timing was requested, and (3, 2) came"},
}
FEW = re.compile(
    r"operations/generated_(add|mul|tanh)_|model/[a-z]+/(valid|operand-type|listing|second-writer)|memory/(?!allocate)|"
    r"caching/(save|token|bit|changed|counts/\w+_more)|(?!operations|model|memory|caching)"
).match


@pytest.fixture
def report(shared, monkeypatch):
    """Runs the kit against one of the broken devices, with few of the operations and mutations and no graph."""
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(shared.path))

    def report(name, begin="", patience=20.0, chosen=FEW):
        found = Report(name, "")
        few = [test for test in catalogue(scope=SMOKE) if chosen(test.name) and test.name.startswith(begin)]
        with Target(f"burst_test_devices.{name if ':' in name else f'broken:{name}'}", patience) as target:
            for outcome in run(few, target):
                found.add(outcome)
        return found

    return report


OFTEN = {
    "broken_statements:Boundless",
    "broken_statements:Unpunctual",
    "Generous",
    "Mortal",
    "Nameless",
    "Credulous",
    "Careless",
    "Racy",
    "Scribbler",
    "Boastful",
    "broken_caches:Trusting",
    "broken_memory:Aliasing",
    "broken_memory:Crashing",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.integration if name in OFTEN else pytest.mark.stress) for name in BROKEN],
)
def test_the_kit_finds_what_is_broken(report, name):
    """A device that is broken in one way fails in the categories for that, with words for it, and in no others."""
    found = report(name)
    failed = {category: counts["failed"] for category, counts in found.categories.items() if counts["failed"]}
    assert failed.keys() == BROKEN[name].keys()
    for category, words in BROKEN[name].items():
        assert any(words in o.message for o in found.of_kind("failed") if o.category == category)


@pytest.mark.parametrize("name", ["heap:Dsp", "broken_memory:Buffered"])
def test_memory_of_a_drivers_own_passes(report, name):
    """In a layout of its own, and of a kind of its own: nothing fails, and all that is about such memory is tried."""
    found = report(name, "memory/", chosen=str)
    assert not found.of_kind("failed")
    passed = {outcome.name for outcome in found.of_kind("passed")}
    assert {"memory/own_kind/too_short", "memory/copy/owned", "memory/layout/2x3x5x7"} <= passed


def test_every_category_can_fail():
    """There is none that no broken device fails in, of those that are tried often."""
    assert set().union(*(BROKEN[name] for name in OFTEN)) == set(CATEGORIES)


def test_only_what_is_broken_fails(report):
    """A device that dies in one operation, and promises one that it cannot prepare, does all others well."""
    for name, operation in (("Mortal", "tanh"), ("Liar", "mul")):
        failed = report(name, "operations/").of_kind("failed")
        assert failed
        assert all(o.name.startswith(f"operations/generated_{operation}_") for o in failed)


def test_a_random_graph_shows_what_is_wrong(report):
    """A device that computes something else differs on random graphs; the message has the smallest that shows it."""
    (outcome,) = report("WrongResults", "operations/random_graph/", chosen=str).of_kind("failed")
    operations = [line for line in outcome.message.splitlines() if " -> " in line]
    assert len(operations) == 1


def test_a_device_that_waits_for_a_lock_for_ever_is_found(report):
    """Files that somebody else has locked keep it from answering; all else that it does with files is right."""
    (failed,) = report("broken_caches:Waiting", "caching/", patience=1.5, chosen=str).of_kind("failed")
    assert failed.name == "caching/locked"
    assert failed.message.startswith("the device does not answer")


def test_a_device_that_hangs_costs_its_test_alone(report):
    """What does not answer in time fails, and the next test finds a device that does."""
    found = report("Hanging", "operations/", patience=0.5)
    failed = found.of_kind("failed")
    assert {o.message[:26] for o in failed} == {"the device does not answer"}
    assert all("tanh" in o.name for o in failed)
    assert {o.name.split("_")[1] for o in found.of_kind("passed")} >= {"add", "mul"}


def test_a_device_that_does_not_start_is_not_started_for_ever(monkeypatch):
    """After three failed starts, what is left fails at once, each test with the reason."""
    starts = []

    def connect(name):
        starts.append(name)
        raise DeviceFailed(f"device {name!r} ended while it started")

    monkeypatch.setattr("driver.vts.target.connect", connect)
    tests = [test for test in catalogue(scope=SMOKE) if test.category == "device"]
    outcomes = list(run(tests, Target("reference")))
    assert len(starts) == 3 < len(outcomes)
    assert {(o.outcome, o.message) for o in outcomes} == {("failed", "device 'reference' ended while it started")}
