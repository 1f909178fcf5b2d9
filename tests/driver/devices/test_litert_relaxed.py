"""Relaxed models on litert: float16 where it is faster, float32 elsewhere."""

import numpy as np
import pytest
from sent_models import arrived

import driver
from driver.nn import Interpreter
from driver.vts.cache_files import CacheFileSet

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from driver.devices.litert import LiteRtDevice, packed, program
from driver.devices.litert.weights import aligned
from driver.devices.lowering.errors import LibraryFailed
from driver.interface import BindOptions, Preparation

SIZE = 64
TOLERANCE = 5 * 2**-10
"""What the HAL's own tests allow relaxed models, relative and absolute."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Models of any size count as large, so that weights are shared, too."""
    monkeypatch.setattr(program, "LARGE_WEIGHTS", SIZE * SIZE)
    monkeypatch.setattr(packed, "SMALLEST", 0)


def now():
    """No burst wants to run."""


def dense(*, relaxed, rows=1):
    """x times random weights, as a client sends it."""
    weights = np.random.default_rng(3).standard_normal((SIZE, SIZE), np.float32)
    builder = driver.ModelBuilder(relaxed=relaxed)
    x = builder.input("float32", (rows, SIZE))
    builder.output(builder.operation("FULLY_CONNECTED", x, weights, np.zeros(SIZE, np.float32), 0))
    return arrived(builder.build())


def frame(rows=1):
    return np.random.default_rng(4).standard_normal((rows, SIZE)).astype(np.float32)


def output(prepared, rows=1):
    x = frame(rows)
    memory, result = aligned(x.nbytes), aligned(x.nbytes)
    memory[:] = x.reshape(-1).view(np.uint8)
    prepared.bind([memory.view(np.float32).reshape(x.shape)], [result], BindOptions()).run()
    return result.view(np.float32)


def expected(model, rows=1):
    bound = Interpreter(model).bind([frame(rows)])
    bound.run()
    return bound.results[0].array.reshape(-1)


def test_float16_where_weights_are_read_once():
    """The result has the precision of float16: other bits than the strict model's, and within the HAL's tolerance."""
    device, models = LiteRtDevice(threads=1), [dense(relaxed=relaxed) for relaxed in (True, False)]
    relaxed, strict = (output(device.prepare(model, Preparation())) for model in models)
    assert (relaxed != strict).mean() > 0.5
    np.testing.assert_allclose(relaxed, expected(models[0]), rtol=TOLERANCE, atol=SIZE**0.5 * TOLERANCE)
    np.testing.assert_allclose(strict, expected(models[1]), rtol=1e-5, atol=1e-5)


def test_float32_where_weights_are_used_often():
    """A model that uses each weight more than four times computes the same bits, relaxed or not."""
    device = LiteRtDevice(threads=1)
    found = [output(device.prepare(dense(relaxed=relaxed, rows=8), Preparation()), 8) for relaxed in (True, False)]
    assert np.array_equal(*found)


def test_a_restored_model_has_the_same_precision(place):
    """In a device's process a relaxed model computes other bits than a strict one, and the same when restored."""
    x = np.random.default_rng(5).standard_normal((1, 2048)).astype(np.float32)

    def large(*, relaxed):
        builder = driver.ModelBuilder(relaxed=relaxed)
        weights = np.random.default_rng(6).standard_normal((1024, 2048), np.float32)
        given = builder.input("float32", (1, 2048))
        builder.output(builder.operation("FULLY_CONNECTED", given, weights, np.zeros(1024, np.float32), 0))
        return builder.build()

    with driver.connect("litert") as device, CacheFileSet(device.number_of_cache_files_needed()) as files:
        with device.prepare(large(relaxed=False)) as strict:
            (in_float32,) = strict.run(x)
        with device.prepare(large(relaxed=True), cache=files.cache()) as prepared:
            (in_float16,) = prepared.run(x)
        with device.prepare_from_cache(large(relaxed=True), files.cache()) as restored:
            assert np.array_equal(restored.run(x)[0], in_float16)
    assert (in_float16 != in_float32).mean() > 0.5


def test_a_processor_without_float16(monkeypatch):
    """What LiteRT cannot compile for float16 runs in float32."""
    compiled = packed.Compiled

    def without(image, *more):
        if image.half:
            raise LibraryFailed("no float16 here")
        return compiled(image, *more)

    monkeypatch.setattr(packed, "Compiled", without)
    device = LiteRtDevice(threads=1)
    found = [output(device.prepare(dense(relaxed=relaxed), Preparation())) for relaxed in (True, False)]
    assert np.array_equal(*found)
