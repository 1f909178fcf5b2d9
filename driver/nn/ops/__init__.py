"""The table of all operations.

A new operation takes three things: an `OperationType` in the file of its family (or in a file of its own), made of a
signature, a shape function and a function that builds its kernel; its line in the table below; and a test that carries
its name, in the tests beside the others.
"""

from ..operation import OperationType
from . import axes, conv, dense, depthwise, elementwise, movement, normalise, pool, quantize, resize, transposed

OPERATIONS: dict[str, OperationType] = {
    operation.name: operation
    for operation in (
        axes.MEAN,
        conv.CONV_2D,
        conv.GROUPED_CONV_2D,
        dense.FULLY_CONNECTED,
        depthwise.DEPTHWISE_CONV_2D,
        elementwise.ADD,
        elementwise.DIV,
        elementwise.LOGISTIC,
        elementwise.MUL,
        elementwise.RELU,
        elementwise.RELU1,
        elementwise.RELU6,
        elementwise.SUB,
        elementwise.TANH,
        movement.CONCATENATION,
        movement.PAD,
        movement.RESHAPE,
        movement.SQUEEZE,
        movement.STRIDED_SLICE,
        movement.TRANSPOSE,
        normalise.INSTANCE_NORMALIZATION,
        normalise.L2_NORMALIZATION,
        normalise.LOCAL_RESPONSE_NORMALIZATION,
        normalise.LOG_SOFTMAX,
        normalise.SOFTMAX,
        pool.AVERAGE_POOL_2D,
        pool.L2_POOL_2D,
        pool.MAX_POOL_2D,
        quantize.DEQUANTIZE,
        quantize.QUANTIZE,
        resize.RESIZE_BILINEAR,
        resize.RESIZE_NEAREST_NEIGHBOR,
        transposed.TRANSPOSE_CONV_2D,
    )
}
