"""Models for several devices, and devices whose speed is settled beforehand."""

from types import SimpleNamespace

import numpy as np
import pytest

import driver
from driver.devices import device_class
from driver.runtime import capabilities

FIGURES = ("FLOAT32", "TENSOR_FLOAT32", "TENSOR_INT32", "TENSOR_BOOL8")


def speed(exec_time, power_usage=None):
    """Capabilities that are the same for everything."""
    figure = driver.Performance(exec_time, power_usage)
    return driver.Capabilities(dict.fromkeys(FIGURES, figure), figure, figure, figure, figure, "measured")


def mixed_model():
    """(x + 1)^2, and that plus (x + 1): the MUL in the middle is what `Picky` does not know."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (4,))
    a = builder.operation("ADD", x, np.ones(4, np.float32), 0)
    b = builder.operation("MUL", a, a, 0)
    c = builder.operation("ADD", b, a, 0)
    builder.output(b, c)
    return builder.build()


def mixed(x):
    """What `mixed_model` makes of it."""
    a = np.asarray(x, np.float32) + np.float32(1)
    return a * a, a * a + a


def if_model(size=4):
    """x * x, then an IF between + 1 and + 2, then * 2; `size` 0 leaves the shape open."""
    builder = driver.ModelBuilder()
    condition, x = builder.input("bool8", (1,)), builder.input("float32", (size,))
    x = builder.operation("MUL", x, x, 0)
    x = builder.operation("IF", condition, _plus(1, size), _plus(2, size), x)
    builder.output(builder.operation("MUL", x, np.full(1, 2, np.float32), 0))
    return builder.build()


def _plus(number, size):
    builder = driver.ModelBuilder()
    x = builder.input("float32", (size,))
    builder.output(builder.operation("ADD", x, np.full(1, number, np.float32), 0))
    return builder.build()


@pytest.fixture(scope="session")
def runtime_kit():
    return SimpleNamespace(speed=speed, mixed_model=mixed_model, mixed=mixed, if_model=if_model)


@pytest.fixture(autouse=True)
def estimated(request, monkeypatch):
    """Nothing is measured: estimates from capabilities decide, and a model may be cut into any number of steps."""
    if not getattr(request.module, "MEASURES", False):
        monkeypatch.setattr("driver.runtime.compilation.can_be_measured", lambda _: False)
        monkeypatch.setattr("driver.runtime.planning.MOST_STEPS", 99)


@pytest.fixture
def settled(shared, monkeypatch, kit):
    """settled("Picky", 0.5): the name of that shared odd device, whose speed is known, so that nobody measures it."""
    shared.enter(monkeypatch)

    def settled(name, exec_time=0.5, power_usage=None):
        address = name if name.islower() or ":" in name else kit.odd(name)
        version = device_class(address).version
        capabilities.store(address, version, speed(exec_time, power_usage))
        return address

    return settled
