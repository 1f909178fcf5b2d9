"""Models with branches and loops, on a device."""

import numpy as np
import pytest
from waiting import at_least

import driver
from burst import ErrorStatus


def loop(step):
    """Counts from its input in steps to 10; for ever when they are 0."""
    condition, body, m = driver.ModelBuilder(), driver.ModelBuilder(), driver.ModelBuilder()
    condition.output(condition.operation("LESS", condition.input("int32", (1,)), np.array([10], np.int32)))
    body.output(body.operation("ADD", body.input("int32", (1,)), np.array([step], np.int32), 0))
    m.output(m.operation("WHILE", condition.build(), body.build(), m.input("int32", (1,))))
    return m.build()


def test_a_loop_on_both_paths(device):
    """Subgraphs travel to the device, and WHILE gives the same by message and by burst."""
    with device.prepare(loop(3)) as model, model.burst() as burst:
        for start in (0, 1, 10, 50):
            expected = start if start >= 10 else start + 3 * -(-(10 - start) // 3)
            x = np.array([start], np.int32)
            assert [model.run(x)[0].item(), burst.run(x).outputs[0].item()] == [expected] * 2


@pytest.mark.parametrize("path", ["plain", "burst"])
def test_a_loop_without_end(device, kit, path):
    """After the loop timeout of the request the status is MISSED_DEADLINE_TRANSIENT; the model can be used again."""
    with device.prepare(loop(0)) as model, model.burst() as burst:
        ends = burst if path == "burst" else model
        request, _ = kit.request([np.array([0], np.int32)], 4)
        with at_least(0.05):
            assert ends.execute(request, loop_timeout=0.05).status == ErrorStatus.MISSED_DEADLINE_TRANSIENT
        request, _ = kit.request([np.array([10], np.int32)], 4)
        result = ends.execute(request)
        assert (result.status, result.outputs[0].item()) == (0, 10)


def test_a_branch_that_fails(device):
    """What fails inside of a subgraph is a failed execution that says where, on the plain path."""
    branch, m = driver.ModelBuilder(), driver.ModelBuilder()
    x, axis = branch.input("float32", (2, 2)), branch.input("int32", (1,))
    branch.output(branch.operation("MEAN", x, axis, 0, dimensions=(2,)))
    inputs = m.input("bool8", (1,)), m.input("float32", (2, 2)), m.input("int32", (1,))
    m.output(m.operation("IF", inputs[0], branch.build(), branch.build(), *inputs[1:]))
    with device.prepare(m.build()) as model:
        arrays = np.ones(1, np.uint8), np.ones((2, 2), np.float32), np.array([7], np.int32)
        with pytest.raises(driver.GeneralFailure, match=r"\(IF\): in its branch: operation 0 \(MEAN\): axis 7"):
            model.run(*arrays)
