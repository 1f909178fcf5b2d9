"""Operations that move elements without changing them, and look-ups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from driver.devices.litert.lower.node import MAX_RANK, LiteRtNode, quantisation
from driver.devices.lowering.errors import require
from driver.nn.ops.axes import one_axis
from driver.nn.ops.slices import paddings

if TYPE_CHECKING:
    from collections.abc import Callable


def reshape(node: LiteRtNode) -> None:
    """RESHAPE, SQUEEZE, EXPAND_DIMS: the shape of the result says all."""
    node.reshape(node.read(0), node.write(), node.output().shape)


def transpose(node: LiteRtNode) -> None:
    """Lower TRANSPOSE: an omitted permutation reverses the axes."""
    rank = len(node.input(0).shape)
    order = node.call.values(1) if node.call.given(1) else list(range(rank))[::-1]
    node.emit("TRANSPOSE", [node.read(0), node.integers(order)], [node.write()], "Transpose")


def concatenation(node: LiteRtNode) -> None:
    """Lower CONCATENATION, after bringing inputs to the scale of the output."""
    count = len(node.operation.inputs) - 1
    sources = [node.requantised(i) for i in range(count)]
    fields = {"axis": node.call.integer(count), "fusedActivationFunction": 0}
    node.emit("CONCATENATION", sources, [node.write()], "Concatenation", **fields)


def split(node: LiteRtNode) -> None:
    """Into equal parts."""
    count = len(node.operation.outputs)
    axis = node.integers(np.array(one_axis(node.call.integer(1), len(node.input(0).shape))))
    results = [node.write(n) for n in range(count)]
    node.emit("SPLIT", [axis, node.read(0)], results, "Split", numSplits=count)


def tile(node: LiteRtNode) -> None:
    """Repeat along each axis."""
    node.emit("TILE", [node.read(0), node.integers(node.call.values(1))], [node.write()], "Tile")


def shuffle(node: LiteRtNode) -> None:
    """CHANNEL_SHUFFLE as a transposition of two axes, between those before and those after."""
    shape, groups = node.input(0).shape, node.call.integer(1)
    axis = one_axis(node.call.integer(2), len(shape))
    before, after, each = math.prod(shape[:axis]), math.prod(shape[axis + 1 :]), shape[axis] // groups
    apart = node.like_input(0, (before, groups, each, after))
    shuffled = node.like_input(0, (before, each, groups, after))
    node.reshape(node.read(0), apart, (before, groups, each, after))
    node.emit("TRANSPOSE", [apart, node.integers((0, 2, 1, 3))], [shuffled], "Transpose")
    node.reshape(shuffled, node.write(), shape)


def slice_(node: LiteRtNode) -> None:
    """Lower SLICE: the sizes are those of the result."""
    inputs = [node.read(0), node.integers(node.call.values(1)), node.integers(node.output().shape)]
    node.emit("SLICE", inputs, [node.write()], "Slice")


def strided_slice(node: LiteRtNode) -> None:
    """Lower STRIDED_SLICE: the bits of the masks mean the same in TFLite."""
    call, rank = node.call, len(node.input(0).shape)
    require(min(call.values(3)) > -(2**31), "TFLite cannot negate its stride")
    inputs = [node.read(0), *(node.integers(call.values(i)) for i in (1, 2, 3))]
    kept = (1 << rank) - 1
    masks = {"beginMask": call.integer(4) & kept, "endMask": call.integer(5) & kept}
    node.emit("STRIDED_SLICE", inputs, [node.write()], "StridedSlice", **masks, shrinkAxisMask=call.integer(6) & kept)


def pad(node: LiteRtNode) -> None:
    """PAD with real zeros, PAD_V2 with a stored number."""
    require(len(node.input(0).shape) <= MAX_RANK, "its rank is above 4")
    inputs = [node.read(0), node.integers(paddings(node.call, 1, len(node.input(0).shape)))]
    if node.operation.type == "PAD":
        node.emit("PAD", inputs, [node.write()], "Pad")
    else:
        node.emit("PADV2", [*inputs, _scalar(node, 2)], [node.write()], "PadV2")


def _scalar(node: LiteRtNode, i: int) -> int:
    """Steering input `i` as a tensor like input 0."""
    source = node.input(0)
    type_ = node.type_of(source)
    value = node.call.matrix(i).reshape(1)
    if type_ == "INT8" and source.type.stored_dtype == np.uint8:
        value = value - 128
    return node.graph.writer.constant(type_, value.astype(type_.lower()), quantisation(source, type_))


def gather(node: LiteRtNode) -> None:
    """TFLite checks the indices in private memory, where no other process can write them."""
    axis = one_axis(node.call.integer(1), len(node.input(0).shape))
    node.emit("GATHER", [node.read(0), node.read_private(2)], [node.write()], "Gather", axis=axis)


def embedding_lookup(node: LiteRtNode) -> None:
    """Look up rows of input 1."""
    node.emit("GATHER", [node.read(1), node.read_private(0)], [node.write()], "Gather", axis=0)


def hashtable_lookup(node: LiteRtNode) -> None:
    """Look up rows by keys, as they are stored: what is missing has zero bytes."""
    inputs = [node.read_private(0), node.read_private(1), node.read(2, _raw(node, 2))]
    node.emit("HASHTABLE_LOOKUP", inputs, [node.write(0, _raw(node, 2)), node.write(1, "UINT8")])


def _raw(node: LiteRtNode, i: int) -> str:
    type_ = node.type_of(node.input(i))
    return "UINT8" if type_ == "INT8" else type_


TABLE: dict[str, Callable[[LiteRtNode], None]] = {
    "RESHAPE": reshape,
    "SQUEEZE": reshape,
    "EXPAND_DIMS": reshape,
    "TRANSPOSE": transpose,
    "CONCATENATION": concatenation,
    "SPLIT": split,
    "TILE": tile,
    "CHANNEL_SHUFFLE": shuffle,
    "SLICE": slice_,
    "STRIDED_SLICE": strided_slice,
    "PAD": pad,
    "PAD_V2": pad,
    "GATHER": gather,
    "EMBEDDING_LOOKUP": embedding_lookup,
    "HASHTABLE_LOOKUP": hashtable_lookup,
}
