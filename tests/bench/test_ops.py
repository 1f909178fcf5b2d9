"""The models that are measured are what they are called, and both sides of a pair compute the same."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from driver.nn import validate

pytestmark = pytest.mark.integration

BENCH = Path(__file__).parents[2] / "bench"

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each side needs a CPU of its own")


def test_mobilenet_is_itself_in_both_types(models, execute):
    """28 convolutions with 4.2 million weights, as published; quantised, it finds what it finds in floats."""
    image = models.feeds_of(models.mobilenet("quant8"))[0]
    answers = {}
    for dtype in ("float32", "quant8"):
        model = models.mobilenet(dtype)
        validate(model)
        kinds = Counter(operation.type for operation in model.main.operations)
        assert (kinds["CONV_2D"], kinds["DEPTHWISE_CONV_2D"]) == (15, 13)
        weights = [o for o in model.main.operands if o.lifetime.is_constant and len(o.dimensions) == 4]
        assert round(sum(np.prod(o.dimensions) for o in weights) / 1e6, 1) == 4.2
        feed = image if dtype == "quant8" else ((image.astype(np.float32) - 128) / 128)
        answers[dtype] = execute(model, [feed])
    best = np.argsort(answers["float32"][0])[::-1][:5]
    assert answers["quant8"][0].argmax() in best
    with pytest.raises(ValueError, match="quant9"):
        models.mobilenet("quant9")


def test_every_single_operation_runs(models, execute):
    """Each case is a valid model of one operation that gives finite numbers."""
    for name in models.CASES:
        model = models.single(name)
        validate(model)
        assert len(model.main.operations) == 1
        assert np.isfinite(execute(model, models.feeds_of(model)).astype(np.float64)).all(), name


def test_litert_computes_the_same(models, litert, execute):
    """What is written for LiteRT is the same model: outputs agree to one step, or to rounding."""
    for name in models.CASES:
        model = models.single(name)
        feeds = models.feeds_of(model)
        invoke, answer = litert.runnable(model, feeds)
        invoke()
        mine = execute(model, feeds).astype(np.float64)
        limit = 1 if name.endswith("quant8") else 1e-3
        np.testing.assert_allclose(answer().reshape(mine.shape), mine, atol=limit, rtol=1e-3, err_msg=name)


@needs_two_cpus
def test_the_script_tells_what_it_measured_and_what_not(tmp_path, monkeypatch):
    """A row for each operation that is asked for, with LiteRT's side or the reason why there is none."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    target = tmp_path / "out.json"
    command = [sys.executable, BENCH / "ops.py", "--quick", "--json", target, "--only", "ADD", "TANH"]
    subprocess.run(command, capture_output=True, timeout=500, check=True)
    found = json.loads(target.read_text())
    for name in ("ADD", "TANH", "ADD of quant8"):
        (row,) = [row for row in found["subjects"] if row["name"] == name]
        assert all(0 < block["p50_us"] <= block["p99_us"] for block in row["rounds"])
        assert [line[0] for line in found["tables"][0]["rows"]].count(name) == 1
        (theirs,) = [row for row in found["subjects"] if row["name"] == f"{name}, LiteRT"]
        assert bool(row["to_litert"]) != ("error" in theirs)


def test_the_script_asks_for_one_thread(monkeypatch):
    """A comparison of unequal numbers of threads is refused, with what to do."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    done = subprocess.run([sys.executable, BENCH / "ops.py", "--quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "OPENBLAS_NUM_THREADS=1" in done.stderr
