"""The modules of bench/ that several tests look into."""

from pathlib import Path

import numpy as np
import pytest

from driver.nn import Interpreter

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def models(monkeypatch):
    """bench/models.py."""
    monkeypatch.syspath_prepend(str(BENCH))
    import models

    return models


@pytest.fixture
def litert(models):
    """bench/litert.py, where LiteRT is installed."""
    pytest.importorskip("ai_edge_litert")
    import litert

    return litert


@pytest.fixture
def execute():
    """The first output of a model for these inputs, as the reference computes it."""

    def execute(model, feeds):
        bound = Interpreter(model).bind(feeds)
        bound.run()
        return np.array(bound.results[0].data)

    return execute
