"""Devices that are broken in one way: each category can fail, and no other one does over it."""

import re

import pytest

from driver import DeviceFailed
from driver.vts import CATEGORIES, SMOKE, Report, Target, catalogue, run

pytestmark = pytest.mark.integration

ADD = "operations/generated_add_float32_1"
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
    "Lazy": {
        "operations": "values are wrong",
        "burst": "differs from that of the plain path",
        "device": "gets another result than a single thread",
        "memory": "the buffer holds other values than were written to it",
        "qos": "a chain's output differs",
    },
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
    "broken_memory:Unswapped": {
        "operations": "values are wrong",
        "memory": "the buffer holds other values than were written to it",
    },
    "broken_memory:Halved": {
        "operations": "values are wrong",
        "memory": "the buffer holds other values than were written to it",
    },
    "broken_memory:Guarded": {
        "operations": "values are wrong",
        "memory": "an input in a buffer with the output in a buffer leaves another value",
    },
    "broken_memory:Shared": {
        "operations": "values are wrong",
        "memory": "a buffer with the output in plain memory gives another value",
    },
    "broken_memory:Aliasing": {
        "operations": "values are wrong",
        "memory": "holds what its client has written elsewhere after the copy",
    },
    "broken_memory:Believing": {"memory": "a wrong handle of kind com.example.block gets NONE"},
    "broken_memory:Crashing": {"memory": "the device died"},
    "Boastful": {
        "operations": "asynchronously, no timing was requested, and (3, 2) came",
        "qos": "no timing was requested, and (3, 2) came",
    },
}
FEW = re.compile(
    r"operations/generated_(add|mul|tanh)_|model/[a-z]+/(valid|operand-type|listing|second-writer)|memory/(?!allocate)|"
    r"caching/(save|token|bit|changed|counts/\w+_more)|(?!operations|model|memory|caching)"
).match


EXACTLY = {
    "broken_paths:Hollow": {
        f"{ADD}/async": "output 0 (TENSOR_FLOAT32): 6 of 6 values are wrong",
        f"{ADD}/blobs": "asynchronously, output 0",
        f"{ADD}/buffers": "asynchronously, output 0",
        f"{ADD}/deadlines": "output 0 (TENSOR_FLOAT32): 6 of 6 values are wrong",
    },
    "broken_paths:Garrulous": {
        f"{ADD}/async": "asynchronously, no timing was requested, and (3, 2) came",
        f"{ADD}/deadlines": "no timing was requested, and (3, 2) came",
    },
    "broken_paths:Hasty": {
        f"{ADD}/fenced": "output 0 (TENSOR_FLOAT32): 6 of 6 values are wrong",
        f"{ADD}/blobs": "fenced, output 0",
        f"{ADD}/buffers": "fenced, output 0",
        f"{ADD}/deadlines": "output 0 (TENSOR_FLOAT32): 6 of 6 values are wrong",
    },
    "broken_paths:Exhausted": dict.fromkeys(
        (f"{ADD}/fenced", f"{ADD}/blobs", f"{ADD}/buffers", f"{ADD}/deadlines"), "RESOURCE_EXHAUSTED_TRANSIENT"
    ),
    "broken_paths:Hopeful": {f"{ADD}/fenced": "a fenced execution without known output shapes gets a fence"},
    "broken_paths:Private": {f"{ADD}/blobs": "on the plain path, output 0 (TENSOR_FLOAT32): 6 of 6 values are wrong"},
    "broken_memory:Guarded": {f"{ADD}/buffers": "on the plain path, output 0"},
    "broken_paths:Curt": {f"{ADD}/deadlines": "asynchronously, with the deadline 'now', the status is GENERAL_FAILURE"},
    "broken_paths:Impatient": {f"{ADD}/deadlines": "preparing by the deadline "},
    "broken_paths:Lenient": {
        f"memory/allocate/{what}_model/{side}": "allocate returns buffer"
        for what in ("null", "dead")
        for side in ("input", "output")
    },
    "broken_paths:Elastic": {"memory/copy/wrong_size_open": "copy_from of 16 bytes as (2, 4) answers NONE"},
    "wrong_bursts:Cheerful": {"burst/short_queue/add": "a result of 6 elements, in a queue of 5, gets NONE"},
    "wrong_bursts:Halving": {"burst/short_queue/add": "it has 6 elements, and its queue has room for 5"},
    "wrong_bursts:Leaking": {
        "burst/zeroed/add": "element 1 of a result, OPERAND_INFORMATION, is not zero in bytes [9]",
        "burst/short_queue/add": "a result cannot be read: element 1: OPERAND_INFORMATION has padding that is not 0",
        **dict.fromkeys((f"{ADD}/burst", f"{ADD}/deadlines"), "GENERAL_FAILURE"),  # usual clients do not take it
    },
    "broken_caches:Rehashing": {
        "caching/changed_while_saved/code": "the device restores a model that computes a different result"
    },
    "Circular": {
        "model/cycle/data": "supported_operations accepts an invalid model",
        "model/cycle/subgraphs": "supported_operations accepts an invalid model",
    },
}
"""By device: the tests that find what is wrong with it. Of those that stand beside them, no other one fails."""
BESIDE = re.compile(
    rf"{ADD}/|model/cycle/|memory/(allocate/(no|null|dead)_|copy/)|burst/(short_queue|zeroed)/add|caching/changed_while"
).match


@pytest.fixture
def report(shared, monkeypatch):
    """Runs the kit against one of the broken devices, with few of the operations and mutations and no graph."""
    shared.enter(monkeypatch)

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
    failed = [(outcome.category, outcome.name, outcome.message) for outcome in found.of_kind("failed")]
    assert {category for category, _, _ in failed} == BROKEN[name].keys(), failed
    for category, words in BROKEN[name].items():
        assert any(words in o.message for o in found.of_kind("failed") if o.category == category)


@pytest.mark.parametrize("name", EXACTLY)
def test_the_tests_that_are_about_it_find_it(report, name):
    """And no others: the same tests pass on a device that is right in that."""
    found = {outcome.name: outcome.message for outcome in report(name, chosen=BESIDE).of_kind("failed")}
    assert found.keys() == EXACTLY[name].keys()
    for test, words in EXACTLY[name].items():
        assert words in found[test]


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
    (failed,) = report("broken_caches:Waiting", "caching/", patience=5.0, chosen=str).of_kind("failed")
    assert failed.name == "caching/locked"
    assert failed.message.startswith("the device does not answer")


def test_a_device_that_hangs_costs_its_test_alone(report):
    """What does not answer in time fails, and the next test finds a device that does."""
    plain = re.compile(r"operations/generated_(add|mul|tanh)_[^/]*(/burst|/dynamic)?$").match
    found = report("Hanging", "operations/", patience=3.0, chosen=plain)
    failed = found.of_kind("failed")
    said = {o.message[:26] for o in failed}
    assert "the device does not answer" in said
    assert said <= {"the device does not answer", "the device returned MISSED"}  # by a deadline
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
