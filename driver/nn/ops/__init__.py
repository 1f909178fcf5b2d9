"""The table of all operations.

A new operation takes three things: an `OperationType` in the file of its family (or in a file of its own), made of a
signature, a shape function and a function that builds its kernel; its line in the table below; and a test that carries
its name, in the tests beside the others.
"""

from ..operation import OperationType
from . import axes, conv, dense, elementwise, lstm, movement, pool, quantised_lstm, quantize, resize, rnn, svdf

OPERATIONS: dict[str, OperationType] = {
    operation.name: operation
    for operation in (
        axes.MEAN,
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
        lstm.BIDIRECTIONAL_SEQUENCE_LSTM,
        lstm.LSTM,
        lstm.UNIDIRECTIONAL_SEQUENCE_LSTM,
        movement.CONCATENATION,
        movement.PAD,
        movement.RESHAPE,
        movement.SQUEEZE,
        movement.STRIDED_SLICE,
        movement.TRANSPOSE,
        pool.AVERAGE_POOL_2D,
        pool.MAX_POOL_2D,
        quantised_lstm.QUANTIZED_16BIT_LSTM,
        quantised_lstm.QUANTIZED_LSTM,
        quantize.DEQUANTIZE,
        quantize.QUANTIZE,
        resize.RESIZE_BILINEAR,
        rnn.BIDIRECTIONAL_SEQUENCE_RNN,
        rnn.RNN,
        rnn.UNIDIRECTIONAL_SEQUENCE_RNN,
        svdf.SVDF,
    )
}
