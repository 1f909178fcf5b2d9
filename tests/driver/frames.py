"""Inputs that can be told from one another, for models that add 1, and what came of them."""

import numpy as np


def frame(seconds, number):
    """An input of the slow device: how long it takes, and what it is."""
    return np.array([[seconds, number, number + 1, number + 2]], np.float32)


def number_of(result):
    """Of the frame that it is the result of; all of it is looked at."""
    values = result.outputs[0][0, 1:]
    assert values.tolist() == [values[0] + i for i in range(3)]
    return int(values[0]) - 1
