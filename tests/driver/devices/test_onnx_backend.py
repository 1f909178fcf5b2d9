"""ONNX's own backend tests, through `driver.load` and the onnxruntime device in another process.

bench/onnx_backend.py runs all 2,000 of them.
"""

from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

BENCH = Path(__file__).parents[3] / "bench"
MODULES = """bitshift compress if_ identity isnan loop lstm nonmaxsuppression nonzero optionalhaselement rangeop resize
scan scatternd sequenceinsert sequence_map split splittosequence string_concat string_split stringnormalizer
tfidfvectorizer topk unique where ai_onnx_ml.label_encoder"""


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import onnx_backend

    return onnx_backend


def test_what_passes_in_onnx_runtime_passes_here(connect, backend):
    """Loops, branches, sizes that are data, scalars, empty tensors, strings, sequences and optional values."""
    cases = [*backend.cases_of(MODULES.split()), *backend.cases("simple")]
    verdicts = backend.judged(connect("onnxruntime"), cases)
    assert [verdict for verdict in verdicts if verdict.kind == "failed"] == []
    counts = Counter(verdict.kind for verdict in verdicts)
    assert counts["passed"] > 130
    refused = {verdict.reason.split(":")[0] for verdict in verdicts if verdict.kind == "refused"}
    assert not refused & {"string", "sequence", "optional", "map"}


def test_a_wrong_result_is_found(connect, backend, monkeypatch):
    """A case fails where the device computes other bytes, another shape, or nothing."""
    case = next(case for case in backend.cases_of(["topk"]) if case.name == "test_top_k")
    real = backend.through
    for wrong in (
        lambda *given: [array + 1 for array in real(*given)],
        lambda *given: [array.reshape(-1) for array in real(*given)],
        lambda *given: real(*given[:2], []),
    ):
        monkeypatch.setattr(backend, "through", wrong)
        assert backend.judged(connect("onnxruntime"), [case])[0].kind == "failed"
