"""What is known of the runtime's operators: for which of them the shapes of outputs follow from those of inputs."""

from __future__ import annotations

from enum import IntEnum


class Builtin(IntEnum):
    """Operators by their codes in the schema."""

    ADD = 0
    AVERAGE_POOL_2D = 1
    CONCATENATION = 2
    CONV_2D = 3
    DEPTHWISE_CONV_2D = 4
    DEPTH_TO_SPACE = 5
    DEQUANTIZE = 6
    FLOOR = 8
    FULLY_CONNECTED = 9
    L2_NORMALIZATION = 11
    L2_POOL_2D = 12
    LOCAL_RESPONSE_NORMALIZATION = 13
    LOGISTIC = 14
    LSTM = 16
    MAX_POOL_2D = 17
    MUL = 18
    RELU = 19
    RELU_N1_TO_1 = 20
    RELU6 = 21
    RESHAPE = 22
    RESIZE_BILINEAR = 23
    RNN = 24
    SOFTMAX = 25
    SPACE_TO_DEPTH = 26
    SVDF = 27
    TANH = 28
    CUSTOM = 32
    PAD = 34
    UNIDIRECTIONAL_SEQUENCE_RNN = 35
    GATHER = 36
    BATCH_TO_SPACE_ND = 37
    SPACE_TO_BATCH_ND = 38
    TRANSPOSE = 39
    MEAN = 40
    SUB = 41
    DIV = 42
    SQUEEZE = 43
    UNIDIRECTIONAL_SEQUENCE_LSTM = 44
    STRIDED_SLICE = 45
    BIDIRECTIONAL_SEQUENCE_RNN = 46
    EXP = 47
    TOPK_V2 = 48
    SPLIT = 49
    LOG_SOFTMAX = 50
    BIDIRECTIONAL_SEQUENCE_LSTM = 52
    CAST = 53
    PRELU = 54
    MAXIMUM = 55
    ARG_MAX = 56
    MINIMUM = 57
    LESS = 58
    NEG = 59
    PADV2 = 60
    GREATER = 61
    GREATER_EQUAL = 62
    LESS_EQUAL = 63
    SELECT = 64
    SLICE = 65
    SIN = 66
    TRANSPOSE_CONV = 67
    TILE = 69
    EXPAND_DIMS = 70
    EQUAL = 71
    NOT_EQUAL = 72
    LOG = 73
    SUM = 74
    SQRT = 75
    RSQRT = 76
    SHAPE = 77
    POW = 78
    ARG_MIN = 79
    REDUCE_PROD = 81
    REDUCE_MAX = 82
    PACK = 83
    LOGICAL_OR = 84
    LOGICAL_AND = 86
    LOGICAL_NOT = 87
    UNPACK = 88
    REDUCE_MIN = 89
    FLOOR_DIV = 90
    REDUCE_ANY = 91
    SQUARE = 92
    ZEROS_LIKE = 93
    FILL = 94
    FLOOR_MOD = 95
    RESIZE_NEAREST_NEIGHBOR = 97
    LEAKY_RELU = 98
    SQUARED_DIFFERENCE = 99
    MIRROR_PAD = 100
    ABS = 101
    SPLIT_V = 102
    CEIL = 104
    REVERSE_V2 = 105
    ADD_N = 106
    GATHER_ND = 107
    COS = 108
    ELU = 111
    REVERSE_SEQUENCE = 112
    QUANTIZE = 114
    ROUND = 116
    HARD_SWISH = 117
    WHILE = 119
    SELECT_V2 = 123
    DENSIFY = 124
    BATCH_MATMUL = 126
    CUMSUM = 128
    BROADCAST_TO = 130
    CONV_3D = 132
    HASHTABLE = 136
    REDUCE_ALL = 140
    CONV_3D_TRANSPOSE = 141
    VAR_HANDLE = 142
    GELU = 150
    DYNAMIC_UPDATE_SLICE = 151
    RELU_0_TO_1 = 152
    ATAN2 = 156
    SIGN = 158


_B = Builtin

SHAPED_BY_FIRST = frozenset({_B.SPLIT, _B.TRANSPOSE_CONV, _B.FILL, _B.CONV_3D_TRANSPOSE})
"""Outputs have known shapes if the first input is a constant."""

SHAPED_BY_REST = frozenset(
    {
        *(_B.RESHAPE, _B.RESIZE_BILINEAR, _B.RESIZE_NEAREST_NEIGHBOR, _B.PAD, _B.PADV2, _B.MIRROR_PAD, _B.TILE),
        *(_B.BATCH_TO_SPACE_ND, _B.SPACE_TO_BATCH_ND, _B.TRANSPOSE, _B.MEAN, _B.SUM, _B.REDUCE_PROD, _B.REDUCE_MAX),
        *(_B.REDUCE_MIN, _B.REDUCE_ANY, _B.REDUCE_ALL, _B.STRIDED_SLICE, _B.SLICE, _B.TOPK_V2, _B.ARG_MAX, _B.ARG_MIN),
        *(_B.EXPAND_DIMS, _B.SPLIT_V, _B.BROADCAST_TO),
    }
)
"""Outputs have known shapes if all inputs but the first are constants."""

SHAPED = frozenset(_B) - SHAPED_BY_FIRST - SHAPED_BY_REST - {_B.CUSTOM, _B.WHILE, _B.HASHTABLE, _B.VAR_HANDLE}
"""Shapes of outputs follow from those of inputs."""

STATEFUL = frozenset({_B.HASHTABLE, _B.VAR_HANDLE})
"""What keeps a value from one run to the next."""

CONVOLUTIONS = frozenset({_B.CONV_2D, _B.DEPTHWISE_CONV_2D, _B.FULLY_CONNECTED, _B.TRANSPOSE_CONV, _B.CONV_3D})
"""Operators that multiply by weights, which are their second input."""

UNPACKED = frozenset({_B.DEQUANTIZE, _B.DENSIFY})
"""Operators that turn constants into weights."""
