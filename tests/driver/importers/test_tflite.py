"""Files of the writer: imported, run, and compared with LiteRT's own result."""

import re

import numpy as np
import pytest
from tflite_cases import CASES, OTHERWISE
from tflite_writer import Writer

import driver
from driver.importers.tflite.table import TABLE


def imported(load, data):
    """The model, unless one of its operations is not there yet."""
    try:
        return load(data)
    except driver.ImportFailed as error:
        if missing := re.search(r"the operation (\w+) does not exist here", str(error)):
            pytest.skip(f"no {missing[1]} here")
        raise


def other_results(data, feeds):
    """What LiteRT makes of the same file."""
    litert = pytest.importorskip("ai_edge_litert.interpreter", reason="no ai-edge-litert to compare with")
    interpreter = litert.Interpreter(model_content=data, num_threads=1)
    interpreter.allocate_tensors()
    for detail, feed in zip(interpreter.get_input_details(), feeds, strict=True):
        interpreter.set_tensor(detail["index"], feed)
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


@pytest.mark.integration
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_litert(load, run, name):
    """Every case: the same up to rounding, one unit for quantised results."""
    w, v = Writer(), Writer()
    case, further = OTHERWISE.get(name, (name, np.asarray))
    results = run(imported(load, w.file(CASES[name](w))), w.feeds)
    others = [further(other) for other in other_results(v.file(CASES[case](v)), v.feeds)]
    for result, other in zip(results[: len(others)], others, strict=True):
        assert result.shape == (other.shape or (1,))
        if other.dtype in (np.int8, np.uint8):
            assert np.abs(result.astype(int) - other.reshape(result.shape).astype(int)).max() <= 1
        else:
            np.testing.assert_allclose(result, other.reshape(result.shape), rtol=1e-4, atol=2e-5)


def test_every_operator_has_a_case():
    """An entry of the table without a file of its own fails here."""
    written = {name.split()[0] for name in CASES}
    assert set(TABLE) <= written
