"""The kit's own models, for tests that do not depend on operations.

The expected outputs are not fixed here: tests compare one way of executing a model with another.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.nn import Interpreter, ModelBuilder
from driver.vts.cases import Case

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from driver.nn import Model

    Array = NDArray[Any]


def _add() -> Model:
    m = ModelBuilder()
    x, y = (m.input("float32", (2, 3)) for _ in range(2))
    m.output(m.operation("ADD", x, y, 0))
    return m.build()


def _chain() -> Model:
    """Three operations, a temporary that two of them read, and two outputs."""
    m = ModelBuilder()
    x = m.input("float32", (1, 4))
    y = m.operation("ADD", x, np.ones((1, 4), np.float32), 0)
    z = m.operation("SUB", y, x, 0)
    m.output(m.operation("ADD", y, z, 1), m.operation("RELU", z))
    return m.build()


def _quantised() -> Model:
    m = ModelBuilder()
    x, y = (m.input("quant8_asymm", (3, 5), scale=0.5, zero_point=128) for _ in range(2))
    m.output(m.operation("ADD", x, y, 0, scale=1.0, zero_point=100))
    return m.build()


def _convolution() -> Model:
    m = ModelBuilder()
    x = m.input("float32", (1, 4, 4, 2))
    filters = np.linspace(-1, 1, 3 * 2 * 2 * 2, dtype=np.float32).reshape(3, 2, 2, 2)
    y = m.operation("CONV_2D", x, filters, np.array([1, 2, 3], np.float32), 2, 1, 1, 1)
    m.output(m.operation("MAX_POOL_2D", y, 2, 2, 2, 2, 2, 0))
    return m.build()


def _per_channel() -> Model:
    m = ModelBuilder()
    x = m.input("quant8_asymm", (1, 4, 4, 2), scale=0.5, zero_point=128)
    values = (np.arange(3 * 2 * 2 * 2) - 12).astype(np.int8).reshape(3, 2, 2, 2)
    filters = m.constant(values, channel_quant=((0.25, 0.5, 1.0), 0))
    m.output(m.operation("CONV_2D", x, filters, np.arange(3, dtype=np.int32), 1, 1, 1, 0, scale=2.0, zero_point=100))
    return m.build()


def _joined() -> Model:
    m = ModelBuilder()
    x, y = m.input("float32", (2, 2)), m.input("float32", (2, 3))
    m.output(m.operation("RESHAPE", m.operation("CONCATENATION", x, y, 1), [5, 2]))
    return m.build()


_MODELS = {
    "add": _add,
    "chain": _chain,
    "quantised": _quantised,
    "convolution": _convolution,
    "per_channel": _per_channel,
    "joined": _joined,
}
SAMPLES = tuple(_MODELS)
"""Their names. Each but the first adds one feature that the first lacks."""


@cache
def sample(name: str, seed: int = 0) -> Case:
    """One of the samples, with random inputs and the reference's outputs."""
    return case_of(name, _MODELS[name](), seed)


def case_of(name: str, model: Model, seed: int = 0) -> Case:
    """A model with random inputs and the reference's outputs. Raises ExecutionFailed, ValueError."""
    random = np.random.default_rng(seed)
    operands = [model.main.operands[i] for i in model.main.inputs]
    feeds = tuple(values(random, o.type.dtype, o.dimensions) for o in operands)
    bound = Interpreter(model).bind(feeds)
    bound.run()
    expected = tuple(np.array(tensor.data).reshape(-1) for tensor in bound.results)
    return Case(name, model, feeds, expected)


def values(random: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Small numbers that every operation accepts: floats between 0.1 and 2, and integers from 1 to 5, never 0."""
    if dtype.kind == "f":
        return random.uniform(0.1, 2, shape).astype(dtype)
    if dtype == np.uint8:
        return random.integers(120, 140, shape).astype(dtype)
    return random.integers(1, 6, shape).astype(dtype)
