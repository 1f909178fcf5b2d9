"""Comparison of two results, array by array."""

import numpy as np


def equal(found, expected):
    """Fails unless the arrays are as many, and each has the same elements as its counterpart."""
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
