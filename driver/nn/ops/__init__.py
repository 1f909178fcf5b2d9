"""The table of all operations.

A new operation takes two things: an `OperationType` in the `OPERATIONS` of its family (or of a file of its own, listed
below), made of a signature, a shape function and a function that builds its kernel; and a test that carries its name,
in the tests beside the others.
"""

from ..operation import OperationType
from . import (
    axes,
    boxes,
    control,
    conv,
    elementwise,
    lookup,
    lsh,
    lstm,
    movement,
    quantised_lstm,
    resize,
    rnn,
    slices,
    sums,
    suppression,
    unary,
    window,
)

FAMILIES = (
    axes,
    boxes,
    control,
    conv,
    elementwise,
    lookup,
    lsh,
    lstm,
    movement,
    quantised_lstm,
    resize,
    rnn,
    slices,
    sums,
    suppression,
    unary,
    window,
)
OPERATIONS: dict[str, OperationType] = {
    operation.name: operation for family in FAMILIES for operation in family.OPERATIONS
}
