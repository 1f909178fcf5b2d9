"""BATCH_MATMUL as one FULLY_CONNECTED, whose weights need not be constant, per pair of matrices."""

import math

import numpy as np

from driver.errors import ImportFailed

from .call import TfliteCall
from .graph import Ref, dequantised

MOST_PAIRS = 512
"""Limit of matrix pairs in one operator: 12 heads of 42 sequences."""
_PAIR_BYTES = 256
"""Bytes charged per pair, so that only a large file can have many."""


class Factor:
    """One side of a product: matrices [rows, size], where size is the number of terms in each sum."""

    def __init__(self, call: TfliteCall, position: int, *, turned: bool) -> None:
        """turned: the file stores them as [size, rows]."""
        self.call = call
        *self.batch, rows, size = _matrix_shape(call, position)
        self.count = math.prod(self.batch)
        self.rows, self.size = (size, rows) if turned else (rows, size)
        constant = _constant(call, position, turned=turned)
        self.whole = call.weights(position) if constant is None else constant
        if constant is None and turned:
            before = call.reshape(self.whole, (self.count, rows, size))
            self.whole = call.temporary(before, (self.count, size, rows))
            call.emit("TRANSPOSE", before, np.array((0, 2, 1)), to=[self.whole])

    def joined(self) -> Ref:
        """All matrices stacked vertically."""
        shape = self.count * self.rows, self.size
        return self.whole if self._dimensions() == shape else self.call.reshape(self.whole, shape)

    def parts(self) -> list[Ref]:
        """The matrices one by one."""
        whole = self.joined()
        if self.count == 1:
            return [whole]
        pieces = [self.call.temporary(whole, (self.rows, self.size)) for _ in range(self.count)]
        self.call.emit("SPLIT", whole, 0, self.count, to=pieces)
        return pieces

    def _dimensions(self) -> tuple[int, ...]:
        return self.call.graph.operand(self.whole).dimensions


def batch_matmul(call: TfliteCall) -> None:
    """One FULLY_CONNECTED when the second side is one matrix; else one for each pair, and a CONCATENATION."""
    shape = call.result_shape()
    pairs = _pairs(_matrix_shape(call, 0)[:-2], _matrix_shape(call, 1)[:-2])
    left = Factor(call, 0, turned=call.options.AdjX())
    right = Factor(call, 1, turned=not call.options.AdjY())
    target, bias = call.output(), _bias(call, left, right)
    lefts, rights = [left.joined()] if right.count == 1 else left.parts(), right.parts()
    call.graph.source.file.bytes.makes.charge(_PAIR_BYTES * len(pairs))
    rows = math.prod(shape[:-1]) // len(pairs)
    products = [call.temporary(target, (rows, right.rows)) for _ in pairs]
    for (i, k), product in zip(pairs, products, strict=True):
        call.emit("FULLY_CONNECTED", lefts[i], rights[k], bias, 0, to=[product])
    joined = products[0]
    if len(products) > 1:
        joined = call.temporary(target, (rows * len(pairs), right.rows))
        call.emit("CONCATENATION", *products, 0, to=[joined])
    call.reshape(joined, shape, target)


def _matrix_shape(call: TfliteCall, position: int) -> tuple[int, ...]:
    shape = call.shape(position)
    if len(shape) < 2:
        raise ImportFailed(f"input {position} has dimensions {list(shape)}; expected two or more")
    return shape


def _constant(call: TfliteCall, position: int, *, turned: bool) -> Ref | None:
    """A constant side, transposed at load time; None when it is computed or needs no transposition."""
    info = call.tensor(position)
    if info.data is None or not turned:
        return None
    call.graph.source.file.bytes.makes.charge(4 * info.data.size)
    if call.tensor(0).type == "FLOAT32":
        return call.graph.constant(np.ascontiguousarray(dequantised(info).swapaxes(-1, -2)))
    operand = call.graph.operand(call.input(position))
    values = np.ascontiguousarray(info.data.swapaxes(-1, -2))
    return call.graph.constant(values, operand.type, operand.scale, operand.zero_point)


def _pairs(left: tuple[int, ...], right: tuple[int, ...]) -> list[tuple[int, int]]:
    """Index pairs of matrices to multiply, in result order; one pair when the second side is a single matrix."""
    try:
        shape = np.broadcast_shapes(left, right)
    except ValueError:
        raise ImportFailed(f"batches of {list(left)} and {list(right)} matrices do not broadcast") from None
    if math.prod(right) == 1:
        return [(0, 0)]
    if math.prod(shape) > MOST_PAIRS:
        raise ImportFailed(f"{math.prod(shape)} pairs of matrices; the limit is {MOST_PAIRS}")
    numbers = [np.broadcast_to(np.arange(math.prod(d)).reshape(d), shape).reshape(-1) for d in (left, right)]
    return list(zip(*(n.tolist() for n in numbers), strict=True))


def _bias(call: TfliteCall, left: Factor, right: Factor) -> Ref:
    """A zero bias for each product."""
    scale = math.prod(call.graph.operand(side.whole).scale for side in (left, right))
    return call.graph.constant(call.zeros(right.rows, left.whole), scale=scale)
