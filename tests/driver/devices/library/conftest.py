"""A driver in C, and a model for it."""

import numpy as np
import pytest
from c_drivers import compiled

import driver


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """The path of the driver that tests/devices/c/toy.c is."""
    return compiled(tmp_path_factory.mktemp("toy") / "libtoy.so", "toy.c")


@pytest.fixture
def model():
    """(x + 1) * x, of [1, 4] of float32."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 4))
    more = builder.operation("ADD", x, builder.constant(np.ones((1, 4), np.float32)), 0)
    builder.output(builder.operation("MUL", more, x, 0))
    return builder.build()


@pytest.fixture
def x():
    """What the model is fed."""
    return np.arange(4, dtype=np.float32).reshape(1, 4)
