"""Models of a few operations, and the names of devices that do odd things; programs of tests import them, too."""

import numpy as np

import driver


def odd(name):
    return f"burst_test_devices.odd:{name}"


def add_model(constant=1.0, shape=(1, 4), relaxed=False):
    """x + constant."""
    builder = driver.ModelBuilder(relaxed=relaxed)
    x = builder.input("float32", shape)
    builder.output(builder.operation("ADD", x, np.full(4, constant, np.float32), 0))
    return builder.build()


def mul_model():
    """x * x."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (4,))
    builder.output(builder.operation("MUL", x, x, 0))
    return builder.build()


def sum_model(shape=(1, 4)):
    """x + y."""
    builder = driver.ModelBuilder()
    x, y = (builder.input("float32", shape) for _ in range(2))
    builder.output(builder.operation("ADD", x, y, 0))
    return builder.build()


def long_model(n):
    """n times + 1."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (4,))
    one = builder.constant(np.ones(4, np.float32))
    for _ in range(n):
        x = builder.operation("ADD", x, one, 0)
    builder.output(x)
    return builder.build()


def conv_model():
    """A convolution, a pool and a fully connected layer."""
    random = np.random.default_rng(7)
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, 8, 8, 3))
    filters = random.standard_normal((4, 3, 3, 3), np.float32)
    x = builder.operation("CONV_2D", x, filters, np.zeros(4, np.float32), 1, 1, 1, 1)
    x = builder.operation("MAX_POOL_2D", x, 1, 2, 2, 2, 2, 0)
    weights = random.standard_normal((5, 64), np.float32)
    builder.output(builder.operation("FULLY_CONNECTED", x, weights, np.zeros(5, np.float32), 0))
    return builder.build()


def quantised_model():
    """A convolution with a scale per channel."""
    random = np.random.default_rng(8)
    builder = driver.ModelBuilder()
    x = builder.input("quant8_asymm", (1, 6, 6, 2), scale=0.5, zero_point=128)
    scales = (0.25, 0.5, 1.0)
    filters = builder.constant(random.integers(-9, 9, (3, 3, 3, 2), np.int8), channel_quant=(scales, 0))
    bias = builder.constant(np.arange(3, dtype=np.int32))
    builder.output(builder.operation("CONV_2D", x, filters, bias, 1, 1, 1, 0, scale=2.0, zero_point=100))
    return builder.build()


def reshape_model():
    """An output whose shape is an input, and therefore unknown."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (2, 3000))
    builder.output(builder.operation("RESHAPE", x, builder.input("int32", (2,))))
    return builder.build()


def open_model():
    """x + 1, for an x of any number of rows."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (0, 4))
    builder.output(builder.operation("ADD", x, np.ones(4, np.float32), 0))
    return builder.build()


def optional_model():
    """A transposition whose permutation may be omitted: then the axes are reversed."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (2, 3))
    builder.output(builder.operation("TRANSPOSE", x, builder.input("int32", (2,)), dimensions=(0, 0)))
    return builder.build()
