"""Data for operations that move elements without looking at them."""

import numpy as np
import pytest

NAMES = {"f": np.float32, "h": np.float16, "q": np.uint8, "s": np.int8, "i": np.int32}


@pytest.fixture
def counting():
    """counting(shape, dtype or its letter): 0, 1, 2... in order."""

    def counting(shape, dtype=np.float32):
        return np.arange(np.prod(shape)).reshape(shape).astype(NAMES.get(dtype, dtype))

    return counting


@pytest.fixture
def move(evaluate, quantised):
    """evaluate, with parameters for 8-bit data."""

    def move(operation, x, *args, **asked):
        return evaluate(operation, quantised(x, 0.5, 3) if x.dtype.itemsize == 1 else x, *args, **asked)

    return move
