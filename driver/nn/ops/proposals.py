"""GENERATE_PROPOSALS: anchors at every cell of a feature map, moved by what was predicted there, best first."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..operation import Array, Call, OperationType, Signature, copy_results, declared, same_as_input
from ..types import Dimensions, OperandType
from .boxes import EIGHTH, eighths, expect_eighths, expect_shape, reals, stored, transform
from .suppression import hard, suppress
from .window import NHWC_FROM_NCHW, image_shape, stored_shape


def _check(call: Call, cells: Dimensions) -> None:
    """Refuse dimensions that do not go with scores for `cells` [batches, height, width, anchors]."""
    batches, height, width, anchors = cells
    expect_shape(call, 1, *stored_shape(batches, height, width, anchors * 4, call.flag(10)))
    expect_shape(call, 2, anchors, 4)
    expect_shape(call, 3, batches, 2)
    tensor = call.tensor(2)
    if call.tensor(0).type == OperandType.TENSOR_QUANT8_ASYMM:  # the HAL leaves the parameters to the signed form
        expect_eighths(call, 2, 3)
    elif not all(tensor.scale > 0 for tensor in (tensor, call.tensor(3)) if tensor.type.is_quantised):
        raise ValueError("quantised anchors and image sizes need a scale above 0")


@np.errstate(all="ignore")
def _shape(call: Call) -> Sequence[Dimensions]:
    cells = image_shape(call.shape(0), call.flag(10))
    _check(call, cells)
    strides = np.array([call.real(5), call.real(4)] * 2, np.float32)
    scores, deltas = (_by_cell(call, index) for index in (0, 1))
    anchors = _anchors(reals(call.array(2), call.tensor(2)), cells[1], cells[2], strides)
    sizes = reals(call.array(3), call.tensor(3))
    found = [_propose(call, *image, anchors) for image in zip(scores, deltas, sizes[:, None], strict=True)]
    rows = [np.full(len(best), b, np.int32) for b, (best, _) in enumerate(found)]
    best, boxes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    proposed = replace(call.outputs[1], scale=EIGHTH, zero_point=0)
    results = (stored(best, call.tensor(0)), stored(boxes, proposed), np.concatenate(rows))
    call.results = results
    return [result.shape for result in results]


def _by_cell(call: Call, index: int) -> Array:
    """Input `index` as float32 [batches, height * width, values of a cell]."""
    data = call.array(index)
    ordered = data.transpose(NHWC_FROM_NCHW) if call.flag(10) else data
    return reals(ordered, call.tensor(index)).reshape(data.shape[0], -1, ordered.shape[3])


def _anchors(anchors: Array, height: int, width: int, strides: Array) -> Array:
    """The anchors [anchors, 4] of all cells: [height * width * anchors, 4]."""
    y, x = np.mgrid[:height, :width].astype(np.float32)
    offsets = np.stack((x, y, x, y), axis=-1) * strides
    return np.asarray((offsets[:, :, None] + anchors).reshape(-1, 4))


def _propose(call: Call, scores: Array, deltas: Array, size: Array, anchors: Array) -> tuple[Array, Array]:
    """Scores and boxes of one image of `size` [1, 2], best first."""
    before, after, threshold, smallest = call.integer(6), call.integer(7), call.real(8), call.real(9)
    flat = scores.reshape(-1)
    boxes = transform(anchors, deltas.reshape(-1, 1, 4), size)[:, 0]
    best = np.argsort(-flat, kind="stable")[: before if before > 0 else None]
    extent = boxes[best, 2:] - boxes[best, :2]
    centre = boxes[best, :2] + extent / 2
    stays = ((extent > smallest) & (centre < size[:, ::-1])).all(axis=1) & ~np.isnan(flat[best])
    best = best[stays]
    taken, _ = suppress(boxes[best], flat[best], after, hard(threshold))
    return flat[best[taken]], boxes[best[taken]]


GENERATE_PROPOSALS = OperationType(
    "GENERATE_PROPOSALS",
    52,
    (
        Signature("f2 h2", "4*T 2*S INT32 INT32 2*S BOOL", "T T i", ranks=(4,)),
        Signature("q2 s3", "2*T w W 2*S INT32 INT32 2*S BOOL", "T W i", ranks=(4,)),
    ),
    _shape,
    copy_results,
    quantisation=(same_as_input, eighths, declared),
    is_dynamic=True,
)
