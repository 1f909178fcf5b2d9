"""Cuts a model into segments, between which an execution can be ended.

XNNPACK makes one node of all operations that it takes, and LiteRT checks for cancellation only between nodes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from driver.nn.types import byte_size

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from driver.nn import Operation, Subgraph
    from driver.nn.operation import Call

SEGMENT = 190_000_000
"""Multiply-adds of a segment: 4 ms on one thread, at the 569 million in 12 ms of MobileNetV1."""

_ELEMENT = 8
"""The cost of reading and writing an element, in multiply-adds: a NEG of 4 million takes 0.5 ms."""

_LEAST, _MOST = 0.5, 1.5
"""In segments: the range in which a cut moves to where fewer bytes cross it; a model up to `_MOST` is not cut."""


def products(operation: Operation, call: Call) -> int:
    """Return the multiply-adds of an operation, as far as shapes tell."""
    shapes = [() if t is None else t.shape for t in call.inputs]
    result = math.prod(call.outputs[0].shape)
    match operation.type:
        case "CONV_2D" | "GROUPED_CONV_2D":
            return result * math.prod(shapes[1][1:])
        case "DEPTHWISE_CONV_2D":
            return result * math.prod(shapes[1][1:3])
        case "TRANSPOSE_CONV_2D":
            return math.prod(shapes[0]) * math.prod(shapes[1][:3])
        case "FULLY_CONNECTED":
            return result * shapes[1][-1]
        case name if name.endswith(("SVDF", "RNN", "LSTM")):  # each step of each sequence uses all weights
            return math.prod(shapes[0][:-1]) * sum(math.prod(shape) for shape in shapes[1:] if len(shape) == 2)
    return 0


def cost(operation: Operation, call: Call) -> int:
    """Return the cost of an operation, in multiply-adds."""
    moved = sum(math.prod(t.shape) for t in (*call.inputs, *call.outputs) if t is not None and not t.fixed)
    return products(operation, call) + _ELEMENT * moved


def cuts(costs: Sequence[int], crossing: Sequence[int], alone: Collection[int]) -> list[int]:
    """Return the operations that begin a segment, except the first.

    crossing: bytes that cross a cut before each operation. alone: operations that are a segment each.
    """
    borders = sorted({i + k for i in alone for k in (0, 1)} | {0, len(costs)})
    done = [0, *accumulate(costs)]
    found = [i for i in borders if 0 < i < len(costs)]
    for begin, end in pairwise(borders):
        found += _within(begin, end, done, crossing)
    return sorted(found)


def _within(begin: int, end: int, done: Sequence[int], crossing: Sequence[int]) -> list[int]:
    """Return the cuts between operations `begin` and `end`. `done`: the cost of all operations before each."""
    found = []
    while done[end] - done[begin] > _MOST * SEGMENT:
        least, most = done[begin] + _LEAST * SEGMENT, done[begin] + _MOST * SEGMENT
        first = bisect_left(done, least, begin + 1, end)  # the first place behind which enough is done
        last = bisect_right(done, min(most, done[end] - _LEAST * SEGMENT), begin + 1, end)
        ideal = done[begin] + SEGMENT
        begin = min(range(first, last), key=lambda i: (crossing[i], abs(done[i] - ideal)), default=first)
        if done[end] - done[begin] < _LEAST * SEGMENT:  # behind one operation that takes longer
            break
        found.append(begin)
    return found


def crossing(graph: Subgraph, calls: Sequence[Call]) -> list[int]:
    """Return the bytes of the temporaries that exist before each operation and are read from then on."""
    change = [0] * (len(calls) + 1)
    last = {i: n for n, operation in enumerate(graph.operations) for i in operation.inputs}
    for n, (operation, call) in enumerate(zip(graph.operations, calls, strict=True)):
        for i, tensor in zip(operation.outputs, call.outputs, strict=True):
            if last.get(i, n) > n and i not in graph.outputs:
                nbytes = byte_size(tensor.type, tensor.shape)
                change[n + 1] += nbytes
                change[last[i] + 1] -= nbytes
    return list(accumulate(change))[: len(calls)]
