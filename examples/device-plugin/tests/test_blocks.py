"""The device against numpy, in this process and behind a burst, and under the conformance kit."""

import json
import subprocess
import sys

import numpy as np
import pytest
from burst_blocks import BLOCK, KERNELS, BlocksDevice

import driver
from driver.interface import BindOptions, Preparation
from driver.nn import ExecutionFailed, OutputInsufficientSize

NAME = "burst_blocks:BlocksDevice"


def no_pace():
    """Does not pause."""


def chain(*shapes):
    """RELU6(|x * y| + x) - z, and which arrays it takes."""
    m = driver.ModelBuilder()
    x, y, z = (m.input("float32", shape) for shape in shapes)
    product = m.operation("ABS", m.operation("MUL", x, y, 0))
    m.output(m.operation("SUB", m.operation("ADD", product, x, 3), z, 0))
    arrays = [np.linspace(-3, 3, int(np.prod(s)), dtype=np.float32).reshape(s) for s in shapes]
    return m.build(), arrays


def expected(x, y, z):
    return np.clip(np.abs(x * y) + x, 0, 6) - z


@pytest.mark.parametrize(
    "shapes",
    [
        [(4,)] * 3,
        [(1, 3, 5)] * 3,
        [(2, 1), (1, 3), (2, 3)],
        [(3 * BLOCK + 7,), (1,), (3 * BLOCK + 7,)],
        [(1, 300, 400), (1, 300, 400), (400,)],
    ],
    ids=str,
)
def test_a_chain_is_computed_whatever_its_shapes(shapes):
    """Blocks, what is left over of them, and broadcasting."""
    model, arrays = chain(*shapes)
    out = np.empty(4 * expected(*arrays).size, np.uint8)
    BlocksDevice().prepare(model, Preparation("low_power")).bind(arrays, [out], BindOptions()).run()
    np.testing.assert_allclose(out.view(np.float32).reshape(expected(*arrays).shape), expected(*arrays), rtol=1e-6)


def test_an_output_that_does_not_fit_is_said_and_left_alone():
    """With the shape that it would have, so that the client can come again."""
    model, arrays = chain((4,), (4,), (4,))
    out = np.full(15, 7, np.uint8)
    bound = BlocksDevice().prepare(model, Preparation("low_power")).bind(arrays, [out], BindOptions())
    assert bound.shapes == [((4,), False)]
    with pytest.raises(OutputInsufficientSize):
        bound.run()
    assert set(out) == {7}


def test_shapes_that_do_not_fit_name_the_operation():
    """Shapes are open in the model, and contradict each other in the request."""
    model, _ = chain((0,), (0,), (0,))
    arrays = [np.ones(n, np.float32) for n in (2, 3, 2)]
    with pytest.raises(ExecutionFailed, match="operation 0 \\(MUL\\)"):
        BlocksDevice().prepare(model, Preparation("low_power")).bind(arrays, [np.empty(12, np.uint8)], BindOptions())


def test_it_takes_nothing_that_it_cannot_do():
    """Other types, other operations, and an activation that is known only when it runs."""
    m = driver.ModelBuilder()
    x, halves, activation = m.input("float32", (4,)), m.input("float16", (4,)), m.input("INT32", ())
    m.output(m.operation("ADD", x, x, 0))
    m.output(m.operation("ADD", halves, halves, 0))
    m.output(m.operation("RESHAPE", x, [2, 2]))
    m.output(m.operation("ADD", x, x, activation))
    assert BlocksDevice().supported_operations(m.build()) == [True, False, False, False]


def test_it_serves_a_burst_in_a_process_of_its_own():
    """The same values by `driver.connect`."""
    model, arrays = chain((4,), (4,), (4,))
    with driver.connect(NAME) as device, device.prepare(model) as prepared, prepared.burst() as burst:
        np.testing.assert_allclose(burst.run(*arrays).outputs[0], expected(*arrays), rtol=1e-6)


def test_it_passes_the_conformance_kit():
    """`burst vts` finds nothing wrong, and has tried every operation that it takes."""
    command = [sys.executable, "-m", "driver.cli", "vts", NAME, "--smoke", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["failed"] == 0
    passed = " ".join(t["name"] for t in report["tests"] if t["outcome"] == "passed" and "operations/" in t["name"])
    assert [name for name in KERNELS if name.lower() not in passed.lower()] == []
