"""Inputs that can be told from one another, for models that add 1, and what came of them."""

from functools import partial

import numpy as np

HELD = 9.0  # seconds: longer than any test lets it last


def frame(seconds, number):
    """An input of the slow device: how long it takes, and what it is."""
    return np.array([[seconds, number, number + 1, number + 2]], np.float32)


def number_of(result):
    """Of the frame that it is the result of; all of it is looked at."""
    values = result.outputs[0][0, 1:]
    assert values.tolist() == [values[0] + i for i in range(3)]
    return int(values[0]) - 1


def held(burst, number, **limits):
    """Submits a frame that the slow device executes until the test releases it: its future, and what releases it."""
    (array,) = burst.inputs
    array[...] = frame(HELD, number)
    return burst.submit(**limits), partial(array.__setitem__, (0, 0), 0)
