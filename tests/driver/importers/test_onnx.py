"""Files of the ONNX operators: imported, run, and compared with onnxruntime's own result."""

import numpy as np
import pytest
from onnx_cases import CASES

from driver.importers.onnx import reader as onnx
from driver.importers.onnx.table import TABLE

runtime = pytest.importorskip("onnxruntime", reason="no onnxruntime to compare with")


def other_results(data, feeds):
    """What onnxruntime makes of the same file, with nothing fused."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_onnxruntime(run, name):
    """Every case: the same up to rounding."""
    case = CASES[name]
    model = onnx.read(memoryview(case.data))
    results, others = run(model, list(case.feeds.values())), other_results(case.data, case.feeds)
    assert len(results) == len(others)
    for result, other in zip(results, others, strict=True):
        assert result.shape == (other.shape or (1,))
        np.testing.assert_allclose(result, other.reshape(result.shape), rtol=1e-4, atol=case.tolerance)


def test_every_operator_has_a_case():
    """An entry of the table without a file of its own fails here."""
    assert set(TABLE) <= {name.split()[0] for name in CASES}
