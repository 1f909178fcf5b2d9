"""Every operation on operands of a hundred megabytes, in shapes that leave as little as possible to cut."""

import numpy as np

import driver

N = 1 << 25  # elements
SIDE, HALF = 1 << 12, 1 << 13  # SIDE * HALF is N
LONG, WIDE = (N,), (1, N)
IMAGE = (1, 1 << 11, 1 << 11, 8)


def f(m, *shape, name=None):
    return m.input("float32", shape, name=name)


def q(m, *shape):
    return m.input("quant8_asymm", shape, scale=0.5, zero_point=3)


def i(m, *shape):
    return m.input("int32", shape)


def random(m, *shape):
    """Not zeros."""
    return f(m, *shape, name="random")


def unary(name):
    return lambda m: m.operation(name, random(m, *LONG))


def truths(name):
    return lambda m: m.operation(name, m.input("bool8", (SIDE, 1)), m.input("bool8", (1, HALF)))


def binary(name, *more):
    return lambda m: m.operation(name, random(m, SIDE, 1), random(m, 1, HALF), *more)


def integers(name):
    return lambda m: m.operation(name, i(m, *LONG), i(m, *LONG), 0)


def reduced(name, dtype="float32"):
    return {
        f"{name} whole": lambda m: m.operation(name, m.input(dtype, LONG), np.array([0], np.int32), KEEP[name]),
        f"{name} columns": lambda m: m.operation(
            name, m.input(dtype, (N // 4, 4)), np.array([0], np.int32), KEEP[name]
        ),
    }


KEEP = dict.fromkeys(("REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "REDUCE_SUM"), False)
KEEP["MEAN"] = 0
FLOATS = ("ABS", "EXP", "FLOOR", "HARD_SWISH", "LOG", "NEG", "RSQRT", "SIN", "SQRT", "RELU", "RELU1", "RELU6")
PAIRS = ("EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "NOT_EQUAL", "MAXIMUM", "MINIMUM", "POW", "PRELU")


def lstm(m, batch, width, cells, units, time=None):
    """The inputs of LSTM and of UNIDIRECTIONAL_SEQUENCE_LSTM, with a projection."""
    source = (batch, width) if time is None else (time, batch, width)
    inputs = [f(m, *source)]
    inputs += [f(m, cells, width) for _ in range(4)] + [f(m, cells, units) for _ in range(4)]
    inputs += [None] * 3 + [f(m, cells) for _ in range(4)] + [f(m, units, cells), None]
    inputs += [f(m, batch, units), f(m, batch, cells), 4, 0.0, 0.0]
    return inputs


def both_lstm(m, time, batch, width, cells):
    half = [f(m, cells, width) for _ in range(4)] + [f(m, cells, cells) for _ in range(4)]
    half += [None] * 3 + [f(m, cells) for _ in range(4)] + [None, None]
    states = [f(m, batch, cells) for _ in range(4)]
    more = [None] * 9
    return [f(m, time, batch, width), *half, *half, *states, *more, 4, 0.0, 0.0, True, True, *[None] * 8]


def quantised_lstm(m, batch, width, cells):
    byte = {"scale": 0.01}
    weights = [m.input("TENSOR_QUANT8_SYMM", (cells, width), **byte) for _ in range(4)]
    weights += [m.input("TENSOR_QUANT8_SYMM", (cells, cells), **byte) for _ in range(4)]
    biases = [i(m, cells) for _ in range(4)]
    state = m.input("quant8_asymm_signed", (batch, cells), scale=2.0**-11)
    cell = m.input("TENSOR_QUANT16_SYMM", (batch, cells), scale=2.0**-11)
    source = m.input("quant8_asymm_signed", (batch, width), scale=0.01)
    peepholes, norms = ([m.input("TENSOR_QUANT16_SYMM", (cells,), **byte) for _ in range(n)] for n in (3, 4))
    projection = m.input("TENSOR_QUANT8_SYMM", (cells, cells), **byte), i(m, cells)
    states = [source, *weights, *peepholes, *biases, *projection, state, cell]
    return [*states, *norms, *[0.0] * 2, *[0.001] * 4, 0, 0.01]


def square_lstm(m, batch, width, units):
    byte = {"scale": 0.01, "zero_point": 100}
    weights = [m.input("quant8_asymm", (units, width), **byte) for _ in range(4)]
    weights += [m.input("quant8_asymm", (units, units), **byte) for _ in range(4)]
    biases = [m.input("int32", (units,), scale=float(np.float32(0.01)) / 128) for _ in range(4)]
    values = {"scale": 1 / 128, "zero_point": 128}
    source, state = (m.input("quant8_asymm", (batch, size), **values) for size in (width, units))
    return [source, *weights, *biases, m.input("TENSOR_QUANT16_SYMM", (batch, units), scale=2.0**-11), state]


def convolution(name, source, filter_, outputs, *more):
    return lambda m: m.operation(name, f(m, *source), f(m, *filter_), f(m, outputs), 1, 1, 1, *more)


def counting(m, size):
    """WHILE: twenty times + 1 on a large array."""
    condition, body = driver.ModelBuilder(), driver.ModelBuilder()
    n, _ = condition.input("int32", (1,)), condition.input("float32", (size,))
    condition.output(condition.operation("LESS", n, np.array([5], np.int32)))
    n, x = body.input("int32", (1,)), body.input("float32", (size,))
    body.output(body.operation("ADD", n, np.array([1], np.int32), 0), body.operation("ADD", x, x, 0))
    return m.operation("WHILE", condition.build(), body.build(), i(m, 1), f(m, size))


def branch(m, size):
    one = driver.ModelBuilder()
    one.output(one.operation("TANH", one.input("float32", (size,))))
    return m.operation("IF", m.input("bool8", (1,)), one.build(), one.build(), f(m, size))


def regions(name, *more):
    return lambda m: m.operation(
        name, f(m, 1, SIDE, SIDE, 2), np.array([[0, 0, SIDE - 1, SIDE - 1]] * 2, np.float32),
        np.zeros(2, np.int32), 512, 512, 1.0, 1.0, *more, False,
    )  # fmt: skip


CASES = {
    **{name: unary(name) for name in (*FLOATS, "TANH", "LOGISTIC")},
    **{name: binary(name) for name in PAIRS},
    **{name: binary(name, 0) for name in ("ADD", "MUL", "SUB", "DIV")},
    **{f"{name} of integers": integers(name) for name in ("ADD", "DIV")},
    "ADD of quant8": lambda m: m.operation("ADD", q(m, *LONG), q(m, *LONG), 0, scale=0.7),
    "POW in halves": lambda m: m.operation("POW", m.input("float16", LONG), m.input("float16", LONG)),
    **{name: truths(name) for name in ("LOGICAL_AND", "LOGICAL_OR")},
    "LOGICAL_NOT": lambda m: m.operation("LOGICAL_NOT", m.input("bool8", LONG)),
    "ELU": lambda m: m.operation("ELU", random(m, *LONG), 1.0),
    "CAST": lambda m: m.operation("CAST", random(m, *LONG), dtype="int32"),
    "QUANTIZE": lambda m: m.operation("QUANTIZE", random(m, *LONG), dtype="quant8_asymm", scale=0.1, zero_point=3),
    "DEQUANTIZE": lambda m: m.operation("DEQUANTIZE", q(m, *LONG)),
    "SELECT": lambda m: m.operation("SELECT", m.input("bool8", LONG), f(m, *LONG), f(m, *LONG)),
    **{k: v for name in KEEP for k, v in reduced(name, "bool8" if name[-3:] in ("ALL", "ANY") else "float32").items()},
    **{name: lambda m, name=name: m.operation(name, random(m, *LONG), 0) for name in ("ARGMAX", "ARGMIN")},
    "ARGMAX of columns": lambda m: m.operation("ARGMAX", f(m, N // 4, 4), 0),
    "SOFTMAX": lambda m: m.operation("SOFTMAX", random(m, *WIDE), 1.0),
    "SOFTMAX of columns": lambda m: m.operation("SOFTMAX", f(m, N // 4, 4), 1.0, 0),
    "LOG_SOFTMAX": lambda m: m.operation("LOG_SOFTMAX", random(m, *WIDE), 1.0, 1),
    "L2_NORMALIZATION": lambda m: m.operation("L2_NORMALIZATION", random(m, *WIDE)),
    "LOCAL_RESPONSE_NORMALIZATION": lambda m: m.operation(
        "LOCAL_RESPONSE_NORMALIZATION", f(m, 1, 1, 1, N // 8), N // 16, 1.0, 1.0, 0.5
    ),
    "INSTANCE_NORMALIZATION": lambda m: m.operation("INSTANCE_NORMALIZATION", f(m, *IMAGE), 1.0, 0.0, 1e-3, True),
    "AXIS_ALIGNED_BBOX_TRANSFORM": lambda m: m.operation(
        "AXIS_ALIGNED_BBOX_TRANSFORM", f(m, 1 << 10, 4), f(m, 1 << 10, N >> 10), i(m, 1 << 10), f(m, 1, 2)
    ),
    "HEATMAP_MAX_KEYPOINT": lambda m: m.operation(
        "HEATMAP_MAX_KEYPOINT", f(m, 1, SIDE, SIDE, 2), f(m, 1, 4), False
    ),
    "HEATMAP_MAX_KEYPOINT of many": lambda m: m.operation(
        "HEATMAP_MAX_KEYPOINT", f(m, N // 64, 2, 2, 16), f(m, N // 64, 4), False
    ),
    "IF": lambda m: branch(m, N),
    "WHILE": lambda m: counting(m, N),
    "CONV_2D": convolution("CONV_2D", (1, 64, 1 << 10, 64), (256, 5, 5, 64), 256, 0),
    "CONV_2D 1x1": convolution("CONV_2D", (1, 1, 1 << 15, 256), (512, 1, 1, 256), 512, 0),
    "CONV_2D of one pixel": convolution("CONV_2D", (1, 1, 1, HALF), (SIDE, 1, 1, HALF), SIDE, 0),
    "CONV_2D of large filters": lambda m: m.operation(
        "CONV_2D", f(m, 1, 1 << 10, 1 << 10, 4), f(m, 2, 1 << 10, 1 << 10, 4), f(m, 2), 2, 1, 1, 0
    ),
    "CONV_2D of quant8": lambda m: m.operation(
        "CONV_2D", q(m, 1, 1 << 8, 1 << 8, 64), m.input("quant8_asymm", (256, 3, 3, 64), scale=0.5),
        m.input("int32", (256,), scale=0.25), 1, 1, 1, 0, scale=9.0, zero_point=3,
    ),
    "GROUPED_CONV_2D": convolution("GROUPED_CONV_2D", (1, 64, 1 << 10, 64), (256, 5, 5, 16), 256, 4, 0, False),
    "DEPTHWISE_CONV_2D": convolution("DEPTHWISE_CONV_2D", (1, 256, 1 << 10, 64), (1, 7, 7, 64), 64, 1, 0),
    "DEPTHWISE_CONV_2D of a large filter": convolution(
        "DEPTHWISE_CONV_2D", (1, 128, 128, 4), (1, 127, 127, 4), 4, 1, 0
    ),
    "TRANSPOSE_CONV_2D": lambda m: m.operation(
        "TRANSPOSE_CONV_2D", f(m, 1, 64, 1 << 10, 64), f(m, 64, 4, 4, 64), f(m, 64),
        np.array([1, 128, 1 << 11, 64], np.int32), 1, 2, 2, 0, False,
    ),
    "TRANSPOSE_CONV_2D of one pixel": lambda m: m.operation(
        "TRANSPOSE_CONV_2D", f(m, 1, 1, 1, 64), f(m, 2, 500, 500, 64), f(m, 2),
        np.array([1, 500, 500, 2], np.int32), 2, 1, 1, 0, False,
    ),
    "GATHER": lambda m: m.operation("GATHER", f(m, 4, N // 4), 0, i(m, 3)),
    "GATHER of many": lambda m: m.operation("GATHER", f(m, 100), 0, i(m, N)),
    "GATHER of columns": lambda m: m.operation("GATHER", f(m, SIDE, 4), 1, i(m, HALF)),
    "EMBEDDING_LOOKUP": lambda m: m.operation("EMBEDDING_LOOKUP", i(m, 1 << 15), f(m, 100, 1 << 10)),
    "HASHTABLE_LOOKUP": lambda m: m.operation("HASHTABLE_LOOKUP", i(m, 1 << 22), i(m, 1 << 20), f(m, 1 << 20, 8)),
    "TOPK_V2": lambda m: m.operation("TOPK_V2", random(m, *LONG), 1000),
    "TOPK_V2 of as many as can be": lambda m: m.operation("TOPK_V2", random(m, *LONG), 1 << 19),
    "RANDOM_MULTINOMIAL": lambda m: m.operation(
        "RANDOM_MULTINOMIAL", random(m, 8, 1 << 20), 1 << 14, np.array([1, 2], np.int32)
    ),
    "LSH_PROJECTION": lambda m: m.operation("LSH_PROJECTION", f(m, 16, 2), f(m, 1 << 15, 1 << 9), None, 3),
    "LSH_PROJECTION of short rows": lambda m: m.operation("LSH_PROJECTION", f(m, 1, 2), f(m, N // 4, 1), None, 3),
    "LSTM": lambda m: m.operation("LSTM", *lstm(m, 1 << 9, 1 << 10, 1 << 10, 1 << 10)),
    "LSTM of one sequence": lambda m: m.operation("LSTM", *lstm(m, 1, 64, 1 << 18, 64)),
    "LSTM of many": lambda m: m.operation("LSTM", *lstm(m, 1 << 17, 16, 64, 64)),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": lambda m: m.operation(
        "UNIDIRECTIONAL_SEQUENCE_LSTM", *lstm(m, 1 << 6, 1 << 9, 1 << 9, 1 << 9, time=1 << 6), True, *[None] * 4
    ),
    "BIDIRECTIONAL_SEQUENCE_LSTM": lambda m: m.operation(
        "BIDIRECTIONAL_SEQUENCE_LSTM", *both_lstm(m, 1 << 6, 1 << 6, 1 << 9, 1 << 9), outputs=1
    ),
    "QUANTIZED_LSTM": lambda m: m.operation(
        "QUANTIZED_LSTM", *quantised_lstm(m, 1 << 10, 1 << 10, 1 << 10), scale=2.0**-11
    ),
    "QUANTIZED_16BIT_LSTM": lambda m: m.operation(
        "QUANTIZED_16BIT_LSTM", *square_lstm(m, 1 << 10, 1 << 10, 1 << 10)
    ),
    "RNN": lambda m: m.operation(
        "RNN", f(m, SIDE, 1 << 10), f(m, 1 << 10, 1 << 10), f(m, 1 << 10, 1 << 10), f(m, 1 << 10),
        f(m, SIDE, 1 << 10), 4,
    ),
    "UNIDIRECTIONAL_SEQUENCE_RNN": lambda m: m.operation(
        "UNIDIRECTIONAL_SEQUENCE_RNN", f(m, 8, SIDE, 1 << 9), f(m, 1 << 9, 1 << 9), f(m, 1 << 9, 1 << 9),
        f(m, 1 << 9), f(m, SIDE, 1 << 9), 4, 1,
    ),
    "BIDIRECTIONAL_SEQUENCE_RNN": lambda m: m.operation(
        "BIDIRECTIONAL_SEQUENCE_RNN", f(m, 8, SIDE, 256),
        *[x for _ in range(2) for x in (f(m, 256, 256), f(m, 256, 256), f(m, 256), f(m, SIDE, 256))],
        None, None, None, 4, True, True, outputs=1,
    ),
    "SVDF": lambda m: m.operation(
        "SVDF", f(m, 1 << 10, 1 << 10), f(m, 1 << 10, 1 << 10), f(m, 1 << 10, 32), None, f(m, 1 << 10, 1 << 15), 1, 1
    ),
    "TRANSPOSE": lambda m: m.operation("TRANSPOSE", f(m, SIDE, HALF), np.array([1, 0], np.int32)),
    "CONCATENATION": lambda m: m.operation("CONCATENATION", f(m, 1, N // 2), f(m, 1, N // 2), 1),
    "SPLIT": lambda m: m.operation("SPLIT", f(m, *WIDE), 1, 2, outputs=2),
    "TILE": lambda m: m.operation("TILE", f(m, SIDE, 1), np.array([1, HALF], np.int32)),
    "CHANNEL_SHUFFLE": lambda m: m.operation("CHANNEL_SHUFFLE", f(m, *WIDE), 2, 1),
    "RESHAPE": lambda m: m.operation("RESHAPE", f(m, *LONG), np.array([SIDE, HALF], np.int32)),
    "SQUEEZE": lambda m: m.operation("SQUEEZE", f(m, *WIDE), np.array([0], np.int32)),
    "EXPAND_DIMS": lambda m: m.operation("EXPAND_DIMS", f(m, *LONG), 0),
    "RANK": lambda m: m.operation("RANK", f(m, *LONG)),
    "FILL": lambda m: m.operation("FILL", np.array([SIDE, HALF], np.int32), 1.5),
    "RESIZE_BILINEAR": lambda m: m.operation("RESIZE_BILINEAR", f(m, 1, 64, 64, 8), 1 << 11, 1 << 11),
    "RESIZE_BILINEAR of one row": lambda m: m.operation("RESIZE_BILINEAR", f(m, 1, 1, 64, 8), 1 << 22, 1),
    "RESIZE_NEAREST_NEIGHBOR": lambda m: m.operation(
        "RESIZE_NEAREST_NEIGHBOR", f(m, 1, 8, 64, 64), 1 << 11, 1 << 11, True
    ),
    "ROI_ALIGN": regions("ROI_ALIGN", 0, 0),
    "ROI_POOLING": regions("ROI_POOLING"),
    "SLICE": lambda m: m.operation("SLICE", f(m, *LONG), np.array([3], np.int32), np.array([N - 3], np.int32)),
    "STRIDED_SLICE": lambda m: m.operation(
        "STRIDED_SLICE", f(m, *LONG), *(np.array([n], np.int32) for n in (0, N, 2)), 0, 0, 0
    ),
    "PAD": lambda m: m.operation("PAD", f(m, *LONG), np.array([[7, 7]], np.int32)),
    "PAD_V2": lambda m: m.operation("PAD_V2", f(m, *LONG), np.array([[7, 7]], np.int32), 1.5),
    "DEPTH_TO_SPACE": lambda m: m.operation("DEPTH_TO_SPACE", f(m, 1, 1 << 11, 1 << 10, 16), 4),
    "SPACE_TO_DEPTH": lambda m: m.operation("SPACE_TO_DEPTH", f(m, *IMAGE), 4),
    "BATCH_TO_SPACE_ND": lambda m: m.operation(
        "BATCH_TO_SPACE_ND", f(m, 4, 1 << 10, 1 << 10, 8), np.array([2, 2], np.int32)
    ),
    "SPACE_TO_BATCH_ND": lambda m: m.operation(
        "SPACE_TO_BATCH_ND", f(m, *IMAGE), np.array([2, 2], np.int32), np.array([[2, 2], [2, 2]], np.int32)
    ),
    "FULLY_CONNECTED": lambda m: m.operation(
        "FULLY_CONNECTED", f(m, 1 << 11, 1 << 11), f(m, 1 << 12, 1 << 11), f(m, 1 << 12), 0
    ),
    "FULLY_CONNECTED of one row": lambda m: m.operation(
        "FULLY_CONNECTED", f(m, 1, HALF), f(m, SIDE, HALF), f(m, SIDE), 0
    ),
    "FULLY_CONNECTED of long rows": lambda m: m.operation(
        "FULLY_CONNECTED", f(m, 4, N // 4), f(m, 4, N // 4), f(m, 4), 0
    ),
    "FULLY_CONNECTED of quant8": lambda m: m.operation(
        "FULLY_CONNECTED", q(m, 1 << 10, HALF), m.input("quant8_asymm", (SIDE, HALF), scale=0.5),
        m.input("int32", (SIDE,), scale=0.25), 0, scale=9.0,
    ),
    "BOX_WITH_NMS_LIMIT": lambda m: m.operation(
        "BOX_WITH_NMS_LIMIT", random(m, 1 << 17, 2), f(m, 1 << 17, 8), i(m, 1 << 17), 0.0, 50, 2, 0.5, 0.5, 0.1
    ),
    "DETECTION_POSTPROCESSING": lambda m: m.operation(
        "DETECTION_POSTPROCESSING", random(m, 1, 1 << 18, 91), f(m, 1, 1 << 18, 4), f(m, 1 << 18, 4),
        1.0, 1.0, 1.0, 1.0, True, 10, 1, 2, 0.5, 0.5, False,
    ),
    "DETECTION_POSTPROCESSING, fast": lambda m: m.operation(
        "DETECTION_POSTPROCESSING", random(m, 1, 1 << 18, 91), f(m, 1, 1 << 18, 4), f(m, 1 << 18, 4),
        1.0, 1.0, 1.0, 1.0, False, 10, 1, 2, 0.5, 0.5, False,
    ),
    "GENERATE_PROPOSALS": lambda m: m.operation(
        "GENERATE_PROPOSALS", random(m, 1, 1 << 7, 1 << 7, 16), f(m, 1, 1 << 7, 1 << 7, 64), f(m, 16, 4), f(m, 1, 2),
        1.0, 1.0, -1, 50, 0.5, 0.0, False,
    ),
    "AVERAGE_POOL_2D": lambda m: m.operation("AVERAGE_POOL_2D", f(m, *IMAGE), 1, 1, 1, 99, 99, 0),
    "L2_POOL_2D": lambda m: m.operation("L2_POOL_2D", f(m, *IMAGE), 1, 1, 1, 9, 9, 0),
    "MAX_POOL_2D": lambda m: m.operation("MAX_POOL_2D", f(m, *IMAGE), 1, 1, 1, 99, 99, 0),
}  # fmt: skip


def prepared(name):
    """The model of a case, and what it is fed: zeros that take no memory, and random numbers where they matter."""
    m, rng = driver.ModelBuilder(), np.random.default_rng(1)
    found = CASES[name](m)
    m.output(*(found if isinstance(found, tuple) else (found,)))
    model, feeds = m.build(), []
    for index in model.main.inputs:
        operand = model.main.operands[index]
        is_random = isinstance(operand.extra, dict) and operand.extra.get("name") == "random"
        array = np.zeros(operand.dimensions, operand.type.dtype)
        feeds.append(rng.standard_normal(operand.dimensions, np.float32) if is_random else array)
    return model, feeds
