"""The kit against the reference device, and what the kit brings along."""

import numpy as np
import pytest

from driver.nn import OPERATIONS
from driver.vts import ALL, CATEGORIES, SMOKE, USUAL, Target, catalogue, run
from driver.vts.qos import endless
from driver.vts.samples import SAMPLES, generated, sample


@pytest.fixture
def outcomes(shared, monkeypatch):
    """outcomes(categories) -> what the reference device does in them."""
    shared.enter(monkeypatch)

    def of(categories):
        with Target("reference") as target:
            return list(run([test for test in catalogue(scope=SMOKE) if test.category in categories], target))

    return of


@pytest.mark.integration
def test_the_reference_passes(outcomes):
    """Nothing fails, and every category but the mutations, which other tests try, has tests that pass."""
    categories = set(CATEGORIES) - {"model", "request"}
    found = outcomes(categories)
    assert [o for o in found if o.outcome == "failed"] == []
    assert {o.category for o in found if o.outcome == "passed"} == categories


@pytest.mark.integration
@pytest.mark.parametrize("name", ["OwnExecutor", "FromThis", "FromInner", "FirmwareInside", "Firmware", "OldFirmware"])
def test_devices_that_serve_bursts_themselves_pass(shared, monkeypatch, name):
    """With an executor of their own, or a firmware in a thread or a process, all that the kit does in bursts holds."""
    shared.enter(monkeypatch)
    tests = [test for test in catalogue(scope=SMOKE) if "burst" in test.name or test.category in {"request", "qos"}]
    with Target(f"burst_test_devices.own_bursts:{name}") as target:
        found = list(run(tests, target))
    # What is no buffer of a driver in its own process is unknown to a firmware that speaks wire version 2.
    failed = {o.name for o in found if o.outcome == "failed" and not (name == "Firmware" and "/buffers/" in o.name)}
    assert failed == set()
    assert sum(o.outcome == "passed" for o in found) > len(tests) / 2


@pytest.mark.integration
def test_what_does_not_apply_is_skipped_with_a_reason(outcomes):
    """The reference has one file, of data: no code to leave out or to change, and no file to exchange it with."""
    found = outcomes({"caching"})
    assert [o for o in found if o.outcome == "failed"] == []
    assert {o.name: o.message for o in found if o.outcome == "skipped"} == {
        "caching/counts/model_file_less": "the counts would be those that the device needs",
        "caching/swapped": "this device has no two different files",
        "caching/changed_meanwhile/code": "this device has no model files",
        "caching/changed_while_saved/code": "this device has no model files",
    }


def test_a_device_that_keeps_nothing_is_skipped(shared, monkeypatch):
    """With the reason that it gives."""
    shared.enter(monkeypatch)
    tests = [test for test in catalogue(scope=SMOKE) if test.category == "caching"]
    with Target("burst_test_devices.broken:WrongResults") as target:
        found = {o.message for o in run(tests, target) if o.outcome == "skipped" and "save_and_restore" in o.name}
    assert found == {"the device does not store this model: the device does not cache this model"}


def test_names_begin_with_a_category_and_are_unique():
    """In every scope, and each scope has the one before in it."""
    smoke, usual, everything = ([t.name for t in catalogue(scope=s)] for s in (SMOKE, USUAL, ALL))
    for names in (smoke, usual, everything):
        assert len(set(names)) == len(names)
        assert {name.split("/")[0] for name in names} == set(CATEGORIES)
    assert set(smoke) < set(usual) < set(everything)


def test_the_table_of_forms_reaches_the_operations():
    """Every operation whose inputs are plain tensors, scalars and lists has a case, in more types than one."""
    cases = generated()
    reached = {case.operations[0] for case in cases}
    assert reached >= {"ADD", "CONV_2D", "MEAN", "PAD", "QUANTIZE", "SOFTMAX", "STRIDED_SLICE", "TRANSPOSE"}
    assert len(reached) >= 0.6 * len(OPERATIONS)
    types = {case.model.main.operands[case.model.main.inputs[0]].type for case in cases if case.operations == ["ADD"]}
    assert len(types) >= 4


@pytest.mark.integration
def test_generated_cases_are_the_same_every_time():
    """Whoever reports a failure can have it again."""
    for one, other in zip(generated(), generated.__wrapped__(), strict=True):
        assert one.name == other.name
        assert all(np.array_equal(a, b) for a, b in zip(one.feeds, other.feeds, strict=True))


def test_samples_differ_by_seed():
    """Or comparing one execution with another would compare a thing with itself."""
    for name in SAMPLES:
        assert not np.array_equal(sample(name, 1).feeds[0], sample(name, 2).feeds[0])


def test_the_endless_loop_is_well_formed():
    """It refers to its condition and its body, by their numbers, and to nothing else."""
    model = endless().model
    assert [o.value for o in model.main.operands if o.type.name == "SUBGRAPH"] == [0, 1]
    assert [graph.operations[0].type for graph in (model.main, *model.referenced)] == ["WHILE", "EQUAL", "ADD"]
