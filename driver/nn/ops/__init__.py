"""The table of all operations.

A new operation takes three things: an `OperationType` in the file of its family (or in a file of its own), made of a
signature, a shape function and a function that builds its kernel; its line in the table below; and a test that carries
its name, in the tests beside the others.
"""

from ..operation import OperationType
from . import axes, compare, control, conv, dense, elementwise, movement, pool, quantize, resize, unary

OPERATIONS: dict[str, OperationType] = {
    operation.name: operation
    for operation in (
        axes.ARGMAX,
        axes.ARGMIN,
        axes.MEAN,
        axes.REDUCE_ALL,
        axes.REDUCE_ANY,
        axes.REDUCE_MAX,
        axes.REDUCE_MIN,
        axes.REDUCE_PROD,
        axes.REDUCE_SUM,
        compare.EQUAL,
        compare.GREATER,
        compare.GREATER_EQUAL,
        compare.LESS,
        compare.LESS_EQUAL,
        compare.LOGICAL_AND,
        compare.LOGICAL_OR,
        compare.MAXIMUM,
        compare.MINIMUM,
        compare.NOT_EQUAL,
        compare.POW,
        compare.PRELU,
        compare.SELECT,
        control.IF,
        control.WHILE,
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
        movement.CONCATENATION,
        movement.PAD,
        movement.RESHAPE,
        movement.SQUEEZE,
        movement.STRIDED_SLICE,
        movement.TRANSPOSE,
        pool.AVERAGE_POOL_2D,
        pool.MAX_POOL_2D,
        quantize.DEQUANTIZE,
        quantize.QUANTIZE,
        resize.RESIZE_BILINEAR,
        unary.ABS,
        unary.CAST,
        unary.ELU,
        unary.EXP,
        unary.FLOOR,
        unary.HARD_SWISH,
        unary.LOG,
        unary.LOGICAL_NOT,
        unary.NEG,
        unary.RSQRT,
        unary.SIN,
        unary.SQRT,
    )
}
