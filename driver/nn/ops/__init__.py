"""The table of all operations.

A new operation takes three things: an `OperationType` in the file of its family (or in a file of its own), made of a
signature, a shape function and a function that builds its kernel; its line in the table below; and a test that carries
its name, in the tests beside the others.
"""

from ..operation import OperationType
from . import (
    axes,
    blocks,
    conv,
    dense,
    elementwise,
    lookup,
    lsh,
    movement,
    pool,
    quantize,
    resize,
    sample,
    shapes,
    slices,
)

OPERATIONS: dict[str, OperationType] = {
    operation.name: operation
    for operation in (
        axes.MEAN,
        blocks.BATCH_TO_SPACE_ND,
        blocks.DEPTH_TO_SPACE,
        blocks.SPACE_TO_BATCH_ND,
        blocks.SPACE_TO_DEPTH,
        conv.CONV_2D,
        conv.DEPTHWISE_CONV_2D,
        dense.FULLY_CONNECTED,
        dense.SOFTMAX,
        elementwise.ADD,
        elementwise.DIV,
        elementwise.LOGISTIC,
        elementwise.MUL,
        elementwise.RELU,
        elementwise.RELU1,
        elementwise.RELU6,
        elementwise.SUB,
        elementwise.TANH,
        lookup.EMBEDDING_LOOKUP,
        lookup.GATHER,
        lookup.HASHTABLE_LOOKUP,
        lsh.LSH_PROJECTION,
        movement.CHANNEL_SHUFFLE,
        movement.CONCATENATION,
        movement.SPLIT,
        movement.TILE,
        movement.TRANSPOSE,
        pool.AVERAGE_POOL_2D,
        pool.MAX_POOL_2D,
        quantize.DEQUANTIZE,
        quantize.QUANTIZE,
        resize.RESIZE_BILINEAR,
        sample.RANDOM_MULTINOMIAL,
        sample.TOPK_V2,
        shapes.EXPAND_DIMS,
        shapes.FILL,
        shapes.RANK,
        shapes.RESHAPE,
        shapes.SQUEEZE,
        slices.PAD,
        slices.PAD_V2,
        slices.SLICE,
        slices.STRIDED_SLICE,
    )
}
