"""Models of one operation for streams of results, and what such a stream is given and tells."""

import numpy as np

import driver

STEP, LIMIT, VALUE, DONE = "input_0", "input_1", "output_0", "output_1"
FEED = {VALUE: STEP}


def counter(by=1.0):
    """value = step + by, and whether that is at least the limit."""
    builder = driver.ModelBuilder()
    step, limit = builder.input("float32", (4,)), builder.input("float32", (4,))
    value = builder.operation("ADD", step, np.full(4, by, np.float32), 0)
    builder.output(value)
    builder.output(builder.operation("GREATER_EQUAL", value, limit))
    return builder.build()


def doubling():
    """x, twice."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (0,))
    builder.output(builder.operation("CONCATENATION", x, x, 0))
    return builder.build()


def begin(limit=1e9):
    return {STEP: np.zeros(4, np.float32), LIMIT: np.full(4, limit, np.float32)}


def numbers(stream, name=VALUE):
    return [int(result.outputs[name][0]) for result in stream]
