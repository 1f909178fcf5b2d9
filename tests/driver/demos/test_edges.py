"""The model file that comes with Burst."""

import sys
from pathlib import Path

import numpy as np
from onnx.reference import ReferenceEvaluator

import driver
from driver.demos import EDGES

ROOT = Path(__file__).parents[3]


def test_its_script_writes_it(monkeypatch):
    """examples/edge_model.py makes the same bytes."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import edge_model

    assert edge_model.edges().SerializeToString() == EDGES.read_bytes()


def test_it_finds_edges(home):
    """On the file's own runtime, and in this process, as ONNX's reference evaluator does."""
    image = np.random.default_rng(7).random((1, 3, 64, 64), np.float32)
    (expected,) = ReferenceEvaluator(str(EDGES)).run(None, {"image": image})
    for devices in (["cpu"], None):
        with driver.compile(driver.load(EDGES), devices=devices) as compiled:
            np.testing.assert_allclose(compiled.run(image=image)["edges"], expected, rtol=1e-5, atol=1e-6)
