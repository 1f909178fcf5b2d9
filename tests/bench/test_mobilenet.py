"""MobileNetV1 is what it is called in every form; the scripts that measure it say what they promise."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import driver
from driver.nn import Interpreter, validate

BENCH = Path(__file__).parents[2] / "bench"

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each side needs a CPU of its own")


@pytest.fixture
def models(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import models

    return models


@pytest.fixture
def litert(models):
    pytest.importorskip("ai_edge_litert")
    import litert

    return litert


def execute(model, feed):
    bound = Interpreter(model).bind([feed])
    bound.run()
    return np.array(bound.results[0].data)


def test_every_convolution_has_a_scale_per_channel(models):
    """28 convolutions of bytes with a sign find what the floats they were made of find."""
    model = models.mobilenet("per-channel")
    validate(model)
    operands = model.main.operands
    assert operands[model.main.inputs[0]].type.name == "TENSOR_QUANT8_ASYMM_SIGNED"
    filters = [o for o in operands if o.lifetime.is_constant and len(o.dimensions) == 4]
    assert Counter(len(o.channel_quant[0]) == o.dimensions[o.channel_quant[1]] for o in filters) == {True: 28}
    image = models.feeds_of(model)[0]
    exact = execute(models.mobilenet("float32"), image.astype(np.float32) / 128)
    assert execute(model, image)[0].argmax() in np.argsort(exact[0])[::-1][:5]


def test_a_thin_mobilenet_is_a_fraction_of_it(models):
    """Width 0.25 at 128 pixels has the 0.47 million weights that were published for it."""
    model = models.mobilenet("float32", 0.25, 128)
    validate(model)
    weights = sum(np.prod(o.dimensions) for o in model.main.operands if o.lifetime.is_constant and o.dimensions)
    assert round(weights / 1e6, 2) == 0.47


def test_the_file_that_is_written_is_the_same_model(models, litert, tmp_path):
    """Read back by the importer and by LiteRT itself, a scale per channel included, it computes the same."""
    model = models.mobilenet("per-channel", 0.25, 128)
    feed = models.feeds_of(model)[0]
    path = tmp_path / "net.tflite"
    path.write_bytes(litert.written(model))
    mine = execute(model, feed).astype(int)
    np.testing.assert_array_equal(execute(driver.load(path), feed), mine)
    invoke, answer = litert.prepared(model, [feed])
    invoke()
    np.testing.assert_allclose(answer().reshape(mine.shape), mine, atol=1)
