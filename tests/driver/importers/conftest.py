"""What the tests of importers share: a file's bytes as a model, and its results here and in LiteRT."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import driver
from driver.nn import Interpreter


@pytest.fixture
def load(tmp_path):
    """load(data) -> the operations of a .tflite file with these bytes."""

    def load(data):
        path = tmp_path / "model.tflite"
        path.write_bytes(data)
        return driver.load(path, form="operations")

    return load


@pytest.fixture
def run():
    """run(model, arrays) -> the arrays of its outputs; states that are not given begin as zeros."""

    def run(model, feeds):
        operands = [model.main.operands[i] for i in model.main.inputs]
        arrays = [
            np.ascontiguousarray(feed, o.type.dtype).reshape([*feed.shape] or [1])
            for o, feed in zip(operands, feeds, strict=False)
        ]
        arrays += [np.zeros(o.dimensions, o.type.dtype) for o in operands[len(arrays) :]]
        bound = Interpreter(model).bind(arrays)
        bound.run()
        return [np.array(tensor.data) for tensor in bound.results]

    return run
