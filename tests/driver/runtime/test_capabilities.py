"""Figures about devices are measured, remembered for one version, and never invented."""

import json
import math

import numpy as np
import pytest

import driver
from driver.nn import Interpreter
from driver.protocol.stated_capabilities import all_figures
from driver.runtime import capabilities

FAST = driver.Performance(0.5, 0.25)


def named(devices):
    return {info.name: info for info in devices}


@pytest.mark.integration
def test_nothing_is_known_before_it_was_measured(place, runtime_kit, kit, monkeypatch):
    """driver.devices() has None until compile had to choose; then figures above 0, for this version and no other, and
    nothing is measured again.
    """
    assert named(driver.devices())["reference"].capabilities is None
    driver.compile(kit.add_model(), ["reference"]).close()
    assert named(driver.devices())["reference"].capabilities is None
    driver.compile(kit.add_model(), ["reference", "cpu"]).close()
    info = named(driver.devices())["reference"]
    figures = all_figures(info.capabilities)
    assert all(figure.exec_time > 0 for figure in figures)
    assert info.capabilities.source == "measured"
    assert {"TENSOR_FLOAT32", "TENSOR_FLOAT16", "TENSOR_QUANT8_ASYMM"} <= info.capabilities.operands.keys()
    monkeypatch.setattr(capabilities, "measured", lambda device: pytest.fail("it is measured again"))
    driver.compile(kit.add_model(), ["reference", "cpu"]).close()
    assert capabilities.stored("reference", info.version + " and a half") is None
    assert (place.path / "capabilities").stat().st_mode & 0o77 == 0


def test_what_a_device_does_not_support_has_no_figure(place, kit):
    """It is not guessed from others: operations of that type go elsewhere."""
    with driver.connect(kit.odd("Picky")) as device:
        found = capabilities.measured(device)
    assert "TENSOR_INT32" not in found.operands  # its workload multiplies
    assert "TENSOR_FLOAT32" in found.operands
    graph = kit.mul_model().main
    of_integers = driver.Operand("TENSOR_INT32", (4,))
    other = driver.Subgraph([of_integers] * len(graph.operands), graph.operations, graph.inputs, graph.outputs)
    assert capabilities.Cost(kit.mul_model(), found).of(other, other.operations[0]) == math.inf


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": "1", "cpu": 1, "operands": {"A": [1]}}'])
def test_a_file_that_makes_no_sense_is_not_believed(place, text):
    """It is measured again."""
    capabilities.store("some", "1", driver.Capabilities({"TENSOR_FLOAT32": FAST}))
    (file,) = (place.path / "capabilities").iterdir()
    assert capabilities.stored("some", "1").operands == {"TENSOR_FLOAT32": FAST}
    plain = json.loads(file.read_text())
    file.write_text(text.replace('"cpu": 1', f'"cpu": {json.dumps(plain["cpu"])}'))
    assert capabilities.stored("some", "1") is None


def test_what_an_operation_costs(runtime_kit, kit):
    """By the type of its first input; relaxed models have figures of their own; IF adds the mean of its branches."""
    known = driver.Capabilities(
        {"TENSOR_FLOAT32": driver.Performance(0.5)},
        relaxed_tensor=driver.Performance(0.25),
        if_performance=driver.Performance(3.0),
    )
    for model, expected in (
        (kit.add_model(), [0.5]),
        (kit.add_model(relaxed=True), [0.25]),
        (runtime_kit.if_model(), [0.5, 3.5, 0.5]),
    ):
        cost = capabilities.Cost(model, known)
        assert [cost.of(model.main, operation) for operation in model.main.operations] == expected
        on_cpu = capabilities.Cost(model, None)
        assert on_cpu.of(model.main, model.main.operations[0]) == 1.0


def test_power_is_read_where_the_kernel_tells(tmp_path):
    """The packages' energies are added up, their parts are not; where nothing can be read, power is unknown."""
    assert capabilities.energy_uj(tmp_path) is None
    for name, value in (("intel-rapl:0", 5), ("intel-rapl:1", 7), ("intel-rapl:0:0", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{value}\n")
    assert capabilities.energy_uj(tmp_path) == 12
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("")
    assert capabilities.energy_uj(tmp_path) is None
    assert capabilities.has_power(driver.Capabilities({"A": FAST}, relaxed_tensor=FAST))
    assert not capabilities.has_power(driver.Capabilities({"A": FAST}, driver.Performance(1.0)))


@pytest.mark.parametrize("workload", capabilities.WORKLOADS, ids=lambda workload: workload.figures[-1])
def test_a_workload_runs(workload):
    """On the reference, deterministically."""
    results = []
    for _ in range(2):
        model = workload.build()
        operands = [model.main.operands[i] for i in model.main.inputs]
        bound = Interpreter(model).bind([np.ones(o.dimensions, o.type.dtype) for o in operands])
        bound.run()
        results.append(bound.results[0].data.copy())
    np.testing.assert_array_equal(*results)
