"""What an application may give for an input that is no tensor of numbers."""

import numpy as np
import pytest

from driver.client.packed_inputs import blank_input, input_value
from driver.nn.tensors import TensorInfo
from driver.protocol.packed_values import pack

MAPS = "seq(map(string,tensor(float)))"


def tensor(kind, shape=None):
    return TensorInfo("x", np.dtype(object), shape, kind=kind)


def test_values_in_others():
    """A sequence of maps, an optional sequence of tensors: each part is checked by its own type."""
    assert input_value("x", tensor(MAPS), [{"a": 1.0}, {"b": 2}]) == [{"a": 1.0}, {"b": 2}]
    with pytest.raises(ValueError, match=r"x\[1\] has the key 2; map\(string,tensor\(float\)\) takes keys of string"):
        input_value("x", tensor(MAPS), [{"a": 1.0}, {2: 2}])
    found = input_value("x", tensor("optional(seq(tensor(int64)))"), [[1, 2], np.array(3)])
    assert [each.tolist() for each in found] == [[1, 2], 3]
    with pytest.raises(ValueError, match=r"x\[0\] has dtype float64; the model takes int64"):
        input_value("x", tensor("seq(tensor(int64))"), [[1.5]])


def test_bytes_by_columns():
    """An array that lies by columns is decoded in its own order, and stays as it was."""
    given = np.asfortranarray(np.array([[b"a", b"b"], ["c", b"d"]], object))
    assert input_value("x", tensor("tensor(string)", (None, 2)), given).tolist() == [["a", "b"], ["c", "d"]]
    assert given[0, 0] == b"a"


@pytest.mark.parametrize("kind", ["tensor(string)", MAPS, "map(int64,tensor(float))", "optional(tensor(float))"])
def test_what_stands_for_zeros(kind):
    """It is a value of its kind."""
    pack(
        input_value(
            "x", tensor(kind, (None,) if kind == "tensor(string)" else None), blank_input(tensor(kind, (None,)))
        )
    )
