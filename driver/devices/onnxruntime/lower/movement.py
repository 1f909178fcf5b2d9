"""Operations that move elements without changing them, look-ups, and what follows from shapes alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from driver.devices.lowering.errors import require
from driver.devices.onnxruntime.lower.node import OrtNode, number_type
from driver.formats.onnx_schema import TYPES
from driver.nn.ops.axes import one_axis
from driver.nn.ops.slices import paddings
from driver.nn.ops.window import image_shape
from driver.nn.types import OperandType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRST, LAST = -(2**63) + 1, 2**63 - 1
"""What ONNX takes for an end beyond all elements."""

LARGEST_TABLE = 1 << 24
"""Comparisons of look-ups with keys: HASHTABLE_LOOKUP makes all at once."""


def reshape(node: OrtNode) -> None:
    """RESHAPE, SQUEEZE, EXPAND_DIMS: the shape of the result says all."""
    raw = node.raw_type(0)
    node.put(node.reshaped(node.read(0, raw), node.output().shape), type_=raw)


def transpose(node: OrtNode) -> None:
    """Lower TRANSPOSE: an omitted permutation reverses the axes."""
    raw, rank = node.raw_type(0), len(node.input(0).shape)
    order = node.call.values(1) if node.call.given(1) else list(range(rank))[::-1]
    node.put(node.emit("Transpose", node.read(0, raw), perm=order), type_=raw)


def concatenation(node: OrtNode) -> None:
    """Lower CONCATENATION, after bringing inputs to the scale of the output."""
    count = len(node.operation.inputs) - 1
    kinds = {node.raw_type(i) for i in range(count)}
    raw = kinds.pop() if len(kinds) == 1 else number_type(node.output())
    sources = [node.requantised(i, raw) for i in range(count)]
    node.put(node.emit("Concat", *sources, axis=node.call.integer(count)), type_=raw)


def split(node: OrtNode) -> None:
    """Into equal parts."""
    raw, count = node.raw_type(0), len(node.operation.outputs)
    axis = one_axis(node.call.integer(1), len(node.input(0).shape))
    sizes = node.integers([node.output(n).shape[axis] for n in range(count)])
    for n, part in enumerate(node.graph.writer.node("Split", [node.read(0, raw), sizes], count, axis=axis)):
        node.put(part, n, raw)


def tile(node: OrtNode) -> None:
    """Repeat along each axis."""
    raw = node.raw_type(0)
    node.put(node.emit("Tile", node.read(0, raw), node.integers(node.call.values(1))), type_=raw)


def rearranged(node: OrtNode, source: str, apart: Sequence[int], order: Sequence[int]) -> str:
    """Return it with axes split into those of `apart`, in another order, and joined to those of output 0."""
    turned = node.emit("Transpose", node.reshaped(source, apart), perm=order)
    return node.reshaped(turned, node.output().shape)


def shuffle(node: OrtNode) -> None:
    """CHANNEL_SHUFFLE as a transposition of two axes, between those before and those after."""
    raw, shape, groups = node.raw_type(0), node.input(0).shape, node.call.integer(1)
    axis = one_axis(node.call.integer(2), len(shape))
    before, after, each = math.prod(shape[:axis]), math.prod(shape[axis + 1 :]), shape[axis] // groups
    node.put(rearranged(node, node.read(0, raw), (before, groups, each, after), (0, 2, 1, 3)), type_=raw)


def sliced(node: OrtNode, source: str, begins: Sequence[int], ends: Sequence[int], steps: Sequence[int]) -> str:
    """Return of every axis the elements from begin to end."""
    axes = list(range(len(begins)))
    return node.emit("Slice", source, *(node.integers(list(values)) for values in (begins, ends, axes, steps)))


def slice_(node: OrtNode) -> None:
    """Lower SLICE: the sizes are those of the result."""
    raw, begins, sizes = node.raw_type(0), node.call.values(1), node.output().shape
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    node.put(sliced(node, node.read(0, raw), begins, ends, steps=[1] * len(begins)), type_=raw)


def strided_slice(node: OrtNode) -> None:
    """Negative numbers count from the end in ONNX, too; masks become numbers beyond all elements."""
    raw, call = node.raw_type(0), node.call
    begins, ends, steps = (call.values(i) for i in (1, 2, 3))
    for axis, step in enumerate(steps):
        if call.integer(4) >> axis & 1:
            begins[axis] = FIRST if step > 0 else LAST
        if call.integer(5) >> axis & 1:
            ends[axis] = LAST if step > 0 else FIRST
    part = sliced(node, node.read(0, raw), begins, ends, steps=steps)
    node.put(node.reshaped(part, node.output().shape), type_=raw)


def padded(node: OrtNode, source: str, raw: str, pads: Sequence[tuple[int, int]]) -> str:
    """Pad with real zeros, which are stored as the zero point."""
    zero = np.array(node.input(0).zero_point, raw.lower() if raw != "FLOAT" else np.float32)
    before, after = zip(*pads, strict=True)
    return node.emit("Pad", source, node.integers([*before, *after]), node.graph.constant(zero))


def pad(node: OrtNode) -> None:
    """PAD, and PAD_V2 with a stored number."""
    raw, rank = _padded_type(node), len(node.input(0).shape)
    pads, source = paddings(node.call, 1, rank), node.read(0, raw)
    if node.operation.type == "PAD":
        node.put(padded(node, source, raw, pads), type_=raw)
        return
    dtype = node.input(0).type.stored_dtype if raw != "FLOAT" else np.dtype(np.float32)
    value = node.graph.constant(node.call.matrix(2).reshape(()).astype(dtype))
    before, after = zip(*pads, strict=True)
    node.put(node.emit("Pad", source, node.integers([*before, *after]), value), type_=raw)


def _padded_type(node: OrtNode) -> str:
    """ONNX Runtime pads no float16."""
    return "FLOAT" if node.input(0).type == OperandType.TENSOR_FLOAT16 else node.raw_type(0)


def indices(node: OrtNode, i: int) -> str:
    """Return indices that ONNX Runtime can check.

    They are in memory of its own, as no other process may write them between the check and the use; those below 0,
    which ONNX counts from the end, become numbers beyond all elements.
    """
    unsigned = node.emit("Cast", node.read(i, "INT32"), to=TYPES["UINT32"])
    return node.emit("Cast", unsigned, to=TYPES["INT64"])


def gather(node: OrtNode) -> None:
    """Gather entries of any axis."""
    raw, axis = node.raw_type(0), one_axis(node.call.integer(1), len(node.input(0).shape))
    node.put(node.emit("Gather", node.table(0, raw), indices(node, 2), axis=axis), type_=raw)


def embedding_lookup(node: OrtNode) -> None:
    """Look up rows of input 1."""
    raw = node.raw_type(1)
    node.put(node.emit("Gather", node.table(1, raw), indices(node, 0), axis=0), type_=raw)


def hashtable_lookup(node: OrtNode) -> None:
    """Look up by comparison: every look-up is compared with every key; what is missing has zero bytes."""
    raw, (keys,), (lookups,) = node.raw_type(2), node.input(1).shape, node.input(0).shape
    require(keys * lookups <= LARGEST_TABLE, "it compares more than 2^24 pairs of keys")
    wanted, known = node.reshaped(node.read(0), (lookups, 1)), node.reshaped(node.read(1), (1, keys))
    alike = node.emit("Cast", node.emit("Equal", wanted, known), to=TYPES["INT32"])
    hit = node.emit("ReduceMax", alike, node.integers([1]), keepdims=0)
    rows = node.emit("Gather", node.table(2, raw), node.emit("ArgMax", alike, axis=1, keepdims=0), axis=0)
    column = (lookups,) + (1,) * (len(node.output().shape) - 1)
    kept = node.emit("Cast", node.reshaped(hit, column), to=TYPES["BOOL"])
    zero = node.graph.constant(np.zeros((), raw.lower() if raw != "FLOAT" else np.float32))
    node.put(node.emit("Where", kept, rows, zero), type_=raw)
    node.put(node.emit("Cast", hit, to=TYPES["UINT8"]), 1)


def depth_to_space(node: OrtNode) -> None:
    """Turn blocks of channels into blocks of pixels."""
    size, nchw, raw = node.call.integer(1), node.call.flag(2), node.raw_type(0)
    n, h, w, c = image_shape(node.input(0).shape, nchw)
    c //= size**2
    apart = (n, size, size, c, h, w) if nchw else (n, h, w, size, size, c)
    order = (0, 3, 4, 1, 5, 2) if nchw else (0, 1, 3, 2, 4, 5)
    node.put(rearranged(node, node.read(0, raw), apart, order), type_=raw)


def space_to_depth(node: OrtNode) -> None:
    """Turn blocks of pixels into blocks of channels."""
    size, nchw, raw = node.call.integer(1), node.call.flag(2), node.raw_type(0)
    n, h, w, c = image_shape(node.input(0).shape, nchw)
    apart = (n, c, h // size, size, w // size, size) if nchw else (n, h // size, size, w // size, size, c)
    order = (0, 3, 5, 1, 2, 4) if nchw else (0, 1, 3, 2, 4, 5)
    node.put(rearranged(node, node.read(0, raw), apart, order), type_=raw)


def batch_to_space(node: OrtNode) -> None:
    """Turn blocks of the batch into blocks of pixels."""
    (y, x), nchw, raw = node.call.values(1), node.call.flag(2), node.raw_type(0)
    n, h, w, c = image_shape(node.input(0).shape, nchw)
    n //= y * x
    apart = (y, x, n, c, h, w) if nchw else (y, x, n, h, w, c)
    order = (2, 3, 4, 0, 5, 1) if nchw else (2, 3, 0, 4, 1, 5)
    node.put(rearranged(node, node.read(0, raw), apart, order), type_=raw)


def space_to_batch(node: OrtNode) -> None:
    """Turn blocks of pixels into blocks of the batch, with paddings."""
    (y, x), nchw, raw = node.call.values(1), node.call.flag(3), _padded_type(node)
    n, h, w, c = image_shape(node.input(0).shape, nchw)
    rows, columns = paddings(node.call, 2, 2)
    pads = [(0, 0), (0, 0), rows, columns] if nchw else [(0, 0), rows, columns, (0, 0)]
    source, h, w = node.read(0, raw), h + sum(rows), w + sum(columns)
    if any(rows + columns):
        source = padded(node, source, raw, pads)
    apart = (n, c, h // y, y, w // x, x) if nchw else (n, h // y, y, w // x, x, c)
    order = (3, 5, 0, 1, 2, 4) if nchw else (2, 4, 0, 1, 3, 5)
    node.put(rearranged(node, source, apart, order), type_=raw)


def rank(node: OrtNode) -> None:
    """Known beforehand."""
    node.put(node.graph.constant(np.array(len(node.input(0).shape), np.int32)))


def fill(node: OrtNode) -> None:
    """Fill with one number everywhere."""
    value = node.graph.constant(node.call.matrix(1).reshape(()))
    node.put(node.emit("Expand", value, node.integers(list(node.output().shape))))


TABLE: dict[str, Callable[[OrtNode], None]] = {
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
    "DEPTH_TO_SPACE": depth_to_space,
    "SPACE_TO_DEPTH": space_to_depth,
    "BATCH_TO_SPACE_ND": batch_to_space,
    "SPACE_TO_BATCH_ND": space_to_batch,
    "RANK": rank,
    "FILL": fill,
}
