"""Where a model is cut into segments, between which an execution can be ended.

XNNPACK makes one node of all that it takes, and LiteRT looks whether it is to end between nodes only.
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
"""Products of a segment: 4 ms of one thread, at the 569 million in 12 ms that MobileNetV1 takes."""

_ELEMENT = 8
"""Products in whose time an element is read and written: a NEG of 4 million takes 0.5 ms."""

_LEAST, _MOST = 0.5, 1.5
"""Segments between which a cut may be moved to where less crosses it; a model up to the second is not cut."""


def products(operation: Operation, call: Call) -> int:
    """That an operation adds up, as far as they can be told from shapes."""
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
        case name if name.endswith(("SVDF", "RNN", "LSTM")):  # each step of each sequence meets all weights
            return math.prod(shapes[0][:-1]) * sum(math.prod(shape) for shape in shapes[1:] if len(shape) == 2)
    return 0


def cost(operation: Operation, call: Call) -> int:
    """What an operation takes, in products."""
    moved = sum(math.prod(t.shape) for t in (*call.inputs, *call.outputs) if t is not None and not t.fixed)
    return products(operation, call) + _ELEMENT * moved


def cuts(costs: Sequence[int], crossing: Sequence[int], alone: Collection[int]) -> list[int]:
    """The operations that begin a segment, but for the first.

    crossing: bytes that go on from before each operation. alone: operations that are a segment each.
    """
    borders = sorted({i + k for i in alone for k in (0, 1)} | {0, len(costs)})
    done = [0, *accumulate(costs)]
    found = [i for i in borders if 0 < i < len(costs)]
    for begin, end in pairwise(borders):
        found += _within(begin, end, done, crossing)
    return sorted(found)


def _within(begin: int, end: int, done: Sequence[int], crossing: Sequence[int]) -> list[int]:
    """Cuts of the operations from `begin` to `end`, all of which may be in one segment. `done`: costs before each."""
    found = []
    while done[end] - done[begin] > _MOST * SEGMENT:
        least, most = done[begin] + _LEAST * SEGMENT, done[begin] + _MOST * SEGMENT
        first = bisect_left(done, least, begin + 1, end)  # after which enough was done
        last = bisect_right(done, min(most, done[end] - _LEAST * SEGMENT), begin + 1, end)
        ideal = done[begin] + SEGMENT
        begin = min(range(first, last), key=lambda i: (crossing[i], abs(done[i] - ideal)), default=first)
        if done[end] - done[begin] < _LEAST * SEGMENT:  # behind one operation that takes longer
            break
        found.append(begin)
    return found


def crossing(graph: Subgraph, calls: Sequence[Call]) -> list[int]:
    """Bytes of the temporaries that are there before each operation, and needed from then on."""
    change = [0] * (len(calls) + 1)
    last = {i: n for n, operation in enumerate(graph.operations) for i in operation.inputs}
    for n, (operation, call) in enumerate(zip(graph.operations, calls, strict=True)):
        for i, tensor in zip(operation.outputs, call.outputs, strict=True):
            if last.get(i, n) > n and i not in graph.outputs:
                nbytes = byte_size(tensor.type, tensor.shape)
                change[n + 1] += nbytes
                change[last[i] + 1] -= nbytes
    return list(accumulate(change))[: len(calls)]
