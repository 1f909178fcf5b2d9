"""Recurrent operations, unrolled step by step (`Sums.run`), and SVDF."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.devices.litert.lower.sums import Sums
from driver.devices.lowering.recurrent import lowerings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from driver.devices.litert.lower.node import LiteRtNode


def svdf(node: LiteRtNode) -> None:
    """Lower SVDF: the window over time moves on by one, and is then weighed."""
    sums, call = Sums(node), node.call
    (batch, _), (filters, memory) = node.input(0).shape, node.input(2).shape
    units = filters // call.integer(5)
    newest = sums.reshaped(sums.dense(sums.input(0), sums.input(1), (batch, filters)), (batch, filters, 1))
    state = sums.reshaped(sums.input(4), (batch, filters, memory))
    zeros = sums.zeros((batch, filters, 1))

    def joined(parts: Sequence[int]) -> int:
        return sums.joined(parts, (batch, filters, memory))

    def part(of: int, start: int) -> list[int]:
        if memory == 1:
            return []
        begin, size = node.integers((0, 0, start)), node.integers((batch, filters, memory - 1))
        return [sums.emit("SLICE", [of, begin, size], (batch, filters, memory - 1), "Slice")]

    window = joined([*part(state, 0), newest])
    weighed = sums.multiply(window, sums.input(2), (batch, filters, memory))
    grouped = sums.reshaped(weighed, (batch, units, filters // units * memory))
    result = sums.emit("SUM", [grouped, node.integers([2])], (batch, units), "Reducer", keepDims=False)
    if call.given(3):
        result = sums.add(result, sums.input(3), (batch, units))
    sums.give(joined([*part(window, 1), zeros]), 0)
    sums.give(sums.activated(result, call.integer(6), (batch, units)), 1)


TABLE: dict[str, Callable[[LiteRtNode], None]] = {**lowerings(Sums), "SVDF": svdf}
