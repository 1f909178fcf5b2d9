"""Models of one operation, by its name: which of them a device is tried with is the device's test's business.

A case is the letters of the types that it is tried with, and a function that completes a `Net` of such a type.
"""

import numpy as np
import pytest


def unary(name, shape=(2, 3, 5), low=-2.0, high=2.0, **quantisation):
    return lambda net: net.run(name, net.x(*shape, low=low, high=high), **quantisation)


def binary(name, a=(2, 3, 4), b=(3, 1), activation=0, low=-2.0, high=2.0, scale=0.1, zero=131):
    def build(net):
        x = net.x(*a, low=low, high=high), net.x(*b, low=low, high=high, scale=0.07, zero=90)
        return net.run(name, *x, activation, scale=scale, zero=zero)

    return build


def pair(name, a=(2, 3, 4), b=(3, 1), alike=False, **quantisation):
    def build(net):
        x = net.x(*a, low=0.1), net.x(*b, **({} if alike else {"scale": 0.04, "zero": 100}))
        return net.run(name, *x, **quantisation)

    return build


def convolution(explicit=None, *, channel=None, zero=128, activation=0, nchw=False, stride=(1, 1), dilation=None):
    def build(net):
        x = net.x(1, 7, 9, 4) if not nchw else net.x(1, 4, 7, 9)
        padding = (1,) if explicit is None else explicit
        more = (nchw, *dilation) if dilation else (nchw,)
        parameters = *padding, *stride, activation, *more
        return net.run("CONV_2D", x, *net.filter(6, 3, 3, 4, channel=channel, zero=zero), *parameters, scale=0.4)

    return build


def grouped(channel=None, nchw=False):
    def build(net):
        x = net.x(2, 7, 9, 4) if not nchw else net.x(2, 4, 7, 9)
        return net.run("GROUPED_CONV_2D", x, *net.filter(6, 3, 3, 2, channel=channel), 1, 2, 2, 2, 0, nchw, scale=0.3)

    return build


def depthwise(explicit=None, *, channel=None, zero=128, nchw=False, fan=2, dilation=None):
    def build(net):
        x = net.x(1, 7, 9, 4) if not nchw else net.x(1, 4, 7, 9)
        padding = (1,) if explicit is None else explicit
        more = (nchw, *dilation) if dilation else (nchw,)
        taps = net.taps(1, 3, 3, 4 * fan, channel=channel, zero=zero)
        return net.run("DEPTHWISE_CONV_2D", x, *taps, *padding, 1, 1, fan, 1, *more, scale=0.2)

    return build


def transposed(padding, *, channel=None, nchw=False, size=None):
    def build(net):
        x = net.x(1, 4, 5, 3) if not nchw else net.x(1, 3, 4, 5)
        target = () if size is None else (np.array(size, np.int32),)
        parameters = *target, *padding, 2, 2, 0, nchw
        return net.run("TRANSPOSE_CONV_2D", x, *net.filter(2, 3, 3, 3, channel=channel), *parameters, scale=0.3)

    return build


def dense(shape=(3, 8), zero=128, activation=0):
    def build(net):
        return net.run("FULLY_CONNECTED", net.x(*shape), *net.filter(5, 8, zero=zero), activation, scale=0.25)

    return build


def dense_of_computed(zero=70):
    """Both factors are inputs, with zero points of their own; nothing is added."""

    def build(net):
        x, weights = net.x(3, 8, zero=90), net.x(5, 8, zero=zero, scale=0.03)
        kind = np.int32 if net.is_quantised else np.float32 if net.letter == "f" else np.float16
        scale = {"scale": float(np.float32(0.05) * np.float32(0.03))} if net.is_quantised else {}
        bias = net.builder.constant(np.zeros(5, kind), **scale)
        return net.run("FULLY_CONNECTED", x, weights, bias, 0, scale=0.25)

    return build


def pool(name, parameters, nchw=False, low=-2.0):
    def build(net):
        x = net.x(2, 7, 8, 3, low=low) if not nchw else net.x(2, 3, 7, 8, low=low)
        return net.run(name, x, *parameters, nchw)

    return build


def resize(name, parameters, shape=(2, 4, 5, 3)):
    return lambda net: net.run(name, net.x(*shape), *parameters)


def reduction(name, axes=(1,), keep=False, shape=(2, 3, 4), low=0.5):
    return lambda net: net.run(
        name, net.x(*shape, low=low), np.array(axes, np.int32), int(keep) if name == "MEAN" else keep
    )


def moved(name, shape, *parameters, **more):
    def build(net):
        values = [np.array(p, np.int32) if isinstance(p, list) else p for p in parameters]
        return net.run(name, net.x(*shape), *values, **more)

    return build


def concatenation(net):
    parts = net.x(2, 3), net.x(2, 1, scale=0.03, zero=60), net.x(2, 2, scale=0.08)
    return net.run("CONCATENATION", *parts, 1, scale=0.06, zero=120)


def padded(value):
    def build(net):
        fill = float(value) if net.letter in "fh" else value - 128 * (net.letter == "s")
        return net.run("PAD_V2", net.x(2, 3), np.array([[1, 2], [0, 1]], np.int32), fill)

    return build


def prelu(net):
    return net.run("PRELU", net.x(1, 2, 2, 3), net.x(1, 1, 3, scale=0.02, zero=100), scale=0.06, zero=110)


def select(net):
    chosen = net.x(2, 3, letter="b")
    return net.run("SELECT", chosen, net.x(2, 3), net.x(2, 3, scale=0.03, zero=50), scale=0.07, zero=110)


def gather(axis):
    return lambda net: net.run("GATHER", net.x(3, 4, 2), axis, net.indices([[1, 0], [2, 1]]))


def embedding(net):
    return net.run("EMBEDDING_LOOKUP", net.indices([2, 0, 2]), net.x(4, 3, 2))


def hashtable(net):
    return net.run("HASHTABLE_LOOKUP", net.indices([5, 7, 1]), net.indices([1, 5, 9]), net.x(3, 4))


def cast(to):
    more = {"scale": 1.0} if to in ("quant8_asymm", "quant8_asymm_signed") else {}
    return lambda net: net.builder and _cast(net, to, more)


def _cast(net, to, more):
    found = net.builder.operation("CAST", net.x(3, 5), dtype=to, **more)
    net.builder.output(found)
    return net


def quantise(to):
    def build(net):
        zero = 100 if to == "quant8_asymm" else -28
        net.builder.output(net.builder.operation("QUANTIZE", net.x(3, 40), dtype=to, scale=0.013, zero_point=zero))
        return net

    return build


def dequantise(to):
    def build(net):
        net.builder.output(net.builder.operation("DEQUANTIZE", net.x(3, 40), dtype=to))
        return net

    return build


def _special(net):
    """Inputs far out of the range of integers, in place of some of those that follow."""
    data = net.data
    net.data = lambda shape, *more: np.resize(
        [1e20, -1e20, np.inf, -np.inf, 2.9, -2.9, 255.5, 2147483648], shape
    ).astype(data(shape, *more).dtype)
    return net


def floor_divided(net):
    return net.run("DIV", net.x(2, 4), np.array([3, -7, 1, -1], np.int32), 0)


def equal_ones(net):
    x = net.x(4, 8)
    net.feeds[0][:] = net.random.integers(-1, 2, (4, 8))
    return net.run("TOPK_V2", x, 5)


def cell(net, width, units):
    """Input weights, recurrent weights, bias and state of an RNN."""
    return (
        net.constant(units, width),
        net.constant(units, units, low=-0.4, high=0.4),
        net.constant(units),
        net.x(2, units),
    )


def rnn(code):
    return lambda net: net.run("RNN", net.x(2, 3), *cell(net, 3, 4), code)


def rnn_sequence(code, major):
    return lambda net: net.run(
        "UNIDIRECTIONAL_SEQUENCE_RNN", net.x(*((5, 2, 3) if major else (2, 5, 3))), *cell(net, 3, 4), code, major
    )


def rnn_both(aux, merged):
    def build(net):
        x = net.x(2, 5, 3)
        cells = *cell(net, 3, 4), *cell(net, 3, 2)
        more = {"crossed": (4, 2), "linked": None}.get(aux)
        found = [None] * 3 if aux is None else [net.x(2, 5, 3)]
        found += [net.constant(u, 3) for u in more] if more else [None] * (3 - len(found))
        return net.run("BIDIRECTIONAL_SEQUENCE_RNN", x, *cells, *found, 4, False, merged, outputs=1 if merged else 2)

    return build


def lstm_parts(net, *, width=3, cells=4, units=4, cifg=False, peephole=False, projection=False):
    """The 17 inputs of a cell that stand together."""
    own = [net.constant(cells, width, low=-0.5, high=0.5) for _ in range(4)]
    recurrent = [net.constant(cells, units, low=-0.5, high=0.5) for _ in range(4)]
    seen, biases = (
        [net.constant(cells) if peephole else None for _ in range(3)],
        [net.constant(cells) for _ in range(4)],
    )
    for parts in (own, recurrent, seen, biases):
        parts[0] = None if cifg else parts[0]
    last = (net.constant(units, cells), net.constant(units)) if projection else (None, None)
    return *own, *recurrent, *seen, *biases, *last


def norms(net, has_norm, cifg=False):
    return [net.constant(4, low=0.5) if has_norm and not (cifg and n == 0) else None for n in range(4)]


PLAIN, FULL = {}, {"cifg": True, "peephole": True, "projection": True, "units": 2}
CLIPS = {False: (0.0, 0.0), True: (0.4, 0.3)}


def lstm(form, has_norm=False):
    def build(net):
        units, parts = form.get("units", 4), lstm_parts(net, **form)
        clips = CLIPS[bool(form)]
        states = net.x(2, units), net.x(2, 4)
        return net.run("LSTM", net.x(2, 3), *parts, *states, 4, *clips, *norms(net, has_norm, "cifg" in form))

    return build


def lstm_sequence(form, major, has_norm):
    def build(net):
        x = net.x(*((5, 2, 3) if major else (2, 5, 3)))
        parts, states = lstm_parts(net, **form), (net.x(2, form.get("units", 4)), net.x(2, 4))
        more = 4, *CLIPS[bool(form)], major, *norms(net, has_norm, "cifg" in form)
        return net.run("UNIDIRECTIONAL_SEQUENCE_LSTM", x, *parts, *states, *more, outputs=3)

    return build


def lstm_both(form, aux, merged):
    def build(net):
        x, cells = net.x(5, 2, 3), (*lstm_parts(net, **form), *lstm_parts(net, **form))
        units = form.get("units", 4)
        states = [net.x(2, n) for n in (units, 4, units, 4)]
        found = [net.x(5, 2, 3)] if aux else [None]
        found += [net.constant(4, 3) if aux else None for _ in range(8)]
        flags = 4, *CLIPS[bool(form)], merged, True
        inputs = x, *cells, *states, *found, *flags, *[None] * 8
        return net.run("BIDIRECTIONAL_SEQUENCE_LSTM", *inputs, outputs=1 if merged else 2)

    return build


def svdf(memory, code, has_bias):
    def build(net):
        bias = net.constant(4) if has_bias else None
        weights = net.constant(8, 3), net.constant(8, memory), bias
        return net.run("SVDF", net.x(2, 3), *weights, net.x(2, 8 * memory), 2, code)

    return build


CASES = {
    "ABS": [("fhi", unary("ABS"))],
    "ADD": [
        ("fhqs", binary("ADD")),
        ("fhqs", binary("ADD", activation=3)),
        ("i", binary("ADD")),
        ("qs", binary("ADD", scale=2.0)),
        ("qs", binary("ADD", scale=0.001)),
    ],
    "ARGMAX": [("fhiqs", moved("ARGMAX", (3, 5, 2), 1)), ("fq", moved("ARGMAX", (7,), 0))],
    "ARGMIN": [("fhiqs", moved("ARGMIN", (3, 5, 2), -2))],
    "AVERAGE_POOL_2D": [
        ("fhqs", pool("AVERAGE_POOL_2D", (1, 1, 1, 3, 3, 0))),
        ("fq", pool("AVERAGE_POOL_2D", (2, 2, 2, 2, 3, 1), nchw=True)),
        ("fs", pool("AVERAGE_POOL_2D", (1, 1, 1, 1, 1, 1, 3, 3, 0))),
        ("fh", pool("AVERAGE_POOL_2D", (2, 0, 1, 1, 2, 1, 3, 3, 1))),
        ("f", pool("AVERAGE_POOL_2D", (2, 0, 1, 1, 2, 1, 3, 3, 0), nchw=True)),
    ],
    "BATCH_TO_SPACE_ND": [("fhqs", moved("BATCH_TO_SPACE_ND", (4, 2, 3, 2), [2, 2]))],
    "BIDIRECTIONAL_SEQUENCE_LSTM": [("fh", lstm_both(PLAIN, False, True)), ("f", lstm_both(PLAIN, True, False))],
    "BIDIRECTIONAL_SEQUENCE_RNN": [
        ("fh", rnn_both(None, True)),
        ("f", rnn_both("crossed", False)),
        ("f", rnn_both("linked", False)),
    ],
    "CAST": [
        ("i", cast("float32")),
        ("i", cast("float16")),
        ("fhi", cast("quant8_asymm")),
        ("fh", cast("int32")),
        ("f", lambda net: _cast(_special(net), "int32", {})),
        ("f", lambda net: _cast(_special(net), "quant8_asymm", {"scale": 1.0})),
        ("f", cast("float16")),
        ("h", cast("float32")),
        ("q", cast("float32")),
        ("q", cast("int32")),
        ("fhib", lambda net: _cast(net, None, {})),
        ("q", cast("quant8_asymm")),
        ("s", lambda net: _cast(net, None, net.quantisation(0.05, 117))),
    ],
    "CHANNEL_SHUFFLE": [
        ("fhqs", moved("CHANNEL_SHUFFLE", (2, 3, 6, 2), 3, 2)),
        ("fq", moved("CHANNEL_SHUFFLE", (6,), 2, -1)),
    ],
    "CONCATENATION": [("fhqs", concatenation)],
    "CONV_2D": [
        ("fhqs", convolution()),
        ("fqs", convolution(activation=1, stride=(2, 3))),
        ("fhqs", convolution((1, 0, 2, 1))),
        ("fqs", convolution((1, 1, 1, 1), nchw=True)),
        ("fqs", convolution((2,), dilation=(2, 1))),
        ("qs", convolution(channel=0)),
        ("qs", convolution((0, 2, 1, 0), channel=0, nchw=True, activation=3)),
        ("qs", convolution(zero=77)),
    ],
    "DEPTHWISE_CONV_2D": [
        ("fhqs", depthwise()),
        ("fqs", depthwise((1, 0, 2, 1), nchw=True)),
        ("qs", depthwise(channel=3)),
        ("qs", depthwise(zero=77)),
        ("fs", depthwise((2,), fan=1, dilation=(2, 2))),
    ],
    "DEPTH_TO_SPACE": [
        ("fhqs", moved("DEPTH_TO_SPACE", (1, 2, 3, 8), 2)),
        ("fq", moved("DEPTH_TO_SPACE", (1, 8, 2, 3), 2, True)),
    ],
    "DEQUANTIZE": [("qs", dequantise("float32")), ("qs", dequantise("float16"))],
    "DIV": [("fh", binary("DIV", low=0.5)), ("i", floor_divided)],
    "ELU": [("fh", lambda net: net.run("ELU", net.x(3, 5), 1.0))],
    "EMBEDDING_LOOKUP": [("fhiqs", embedding)],
    "EQUAL": [("bfhiqs", pair("EQUAL", alike=True)), ("qs", pair("EQUAL"))],
    "EXP": [("fh", unary("EXP"))],
    "EXPAND_DIMS": [("fhiqs", moved("EXPAND_DIMS", (2, 3), -1))],
    "FLOOR": [("fh", unary("FLOOR"))],
    "FULLY_CONNECTED": [
        ("fhqs", dense()),
        ("fqs", dense((2, 3, 4), activation=1)),
        ("qs", dense(zero=60)),
        ("fhqs", dense_of_computed()),
        ("qs", dense_of_computed(zero=128)),
    ],
    "GATHER": [("fhiqs", gather(0)), ("fq", gather(-2))],
    "GREATER": [("bfhiqs", pair("GREATER", alike=True)), ("qs", pair("GREATER"))],
    "GREATER_EQUAL": [("bfhiqs", pair("GREATER_EQUAL", alike=True)), ("qs", pair("GREATER_EQUAL"))],
    "GROUPED_CONV_2D": [("fhqs", grouped()), ("qs", grouped(channel=0)), ("fq", grouped(nchw=True))],
    "HARD_SWISH": [("fhqs", unary("HARD_SWISH", (3, 100), -6, 6, scale=0.04, zero=100))],
    "HASHTABLE_LOOKUP": [("fiq", hashtable)],
    "INSTANCE_NORMALIZATION": [
        ("fh", moved("INSTANCE_NORMALIZATION", (2, 3, 4, 5), 1.5, 0.3, 1e-3, False)),
        ("f", moved("INSTANCE_NORMALIZATION", (2, 3, 4, 5), 0.5, 0.0, 1e-4, True)),
    ],
    "L2_NORMALIZATION": [
        ("fhqs", moved("L2_NORMALIZATION", (1, 2, 3, 6))),
        ("fhqs", moved("L2_NORMALIZATION", (2, 3, 4), 1)),
    ],
    "L2_POOL_2D": [
        ("fh", pool("L2_POOL_2D", (1, 2, 2, 3, 3, 0))),
        ("f", pool("L2_POOL_2D", (2, 1, 1, 2, 2, 0), nchw=True)),
        ("fh", pool("L2_POOL_2D", (2, 0, 1, 1, 2, 1, 3, 3, 1))),
    ],
    "LESS": [("bfhiqs", pair("LESS", alike=True)), ("qs", pair("LESS"))],
    "LESS_EQUAL": [("bfhiqs", pair("LESS_EQUAL", alike=True)), ("qs", pair("LESS_EQUAL"))],
    "LOCAL_RESPONSE_NORMALIZATION": [
        ("fh", moved("LOCAL_RESPONSE_NORMALIZATION", (1, 2, 3, 9), 2, 1.5, 0.4, 0.5)),
        ("fh", moved("LOCAL_RESPONSE_NORMALIZATION", (1, 9, 3, 2), 2, 1.5, 0.4, 0.5, 1)),
        ("f", moved("LOCAL_RESPONSE_NORMALIZATION", (3, 4), 1, 1.0, 0.3, 0.75, 0)),
        ("f", moved("LOCAL_RESPONSE_NORMALIZATION", (3, 4), 2**31 - 1, 1.0, 0.3, 0.75)),
    ],
    "LOG": [("fh", unary("LOG", low=0.1))],
    "LOGICAL_AND": [("b", pair("LOGICAL_AND"))],
    "LOGICAL_NOT": [("b", unary("LOGICAL_NOT"))],
    "LOGICAL_OR": [("b", pair("LOGICAL_OR"))],
    "LOGISTIC": [("fhqs", unary("LOGISTIC"))],
    "LOG_SOFTMAX": [("fh", moved("LOG_SOFTMAX", (2, 5, 3), 2.5, 1)), ("fh", moved("LOG_SOFTMAX", (2, 5, 3), 1.0, 1))],
    "LSTM": [("fh", lstm(PLAIN)), ("f", lstm(FULL)), ("f", lstm(FULL, True)), ("f", lstm({"peephole": True}, True))],
    "MAXIMUM": [("fhiqs", pair("MAXIMUM", scale=0.06, zero=110))],
    "MAX_POOL_2D": [
        ("fhqs", pool("MAX_POOL_2D", (1, 2, 2, 3, 3, 0))),
        ("fhqs", pool("MAX_POOL_2D", (2, 0, 1, 1, 1, 1, 3, 3, 2))),
        ("fq", pool("MAX_POOL_2D", (1, 0, 0, 1, 1, 1, 2, 2, 0), nchw=True)),
    ],
    "MEAN": [
        ("fhqs", reduction("MEAN")),
        ("fq", reduction("MEAN", (0, -1), keep=True)),
        ("fs", reduction("MEAN", (0, 1, 2))),
    ],
    "MINIMUM": [("fhiqs", pair("MINIMUM", scale=0.06, zero=110))],
    "MUL": [("fhqs", binary("MUL", scale=0.06)), ("i", binary("MUL")), ("fq", binary("MUL", activation=2, scale=0.02))],
    "NEG": [("fhi", unary("NEG"))],
    "NOT_EQUAL": [("bfhiqs", pair("NOT_EQUAL", alike=True)), ("qs", pair("NOT_EQUAL"))],
    "PAD": [("fhqs", moved("PAD", (2, 3), [[1, 2], [0, 1]]))],
    "PAD_V2": [("fhqs", padded(3))],
    "POW": [("fh", pair("POW"))],
    "PRELU": [("fhqs", prelu)],
    "QUANTIZE": [("fh", quantise("quant8_asymm")), ("fh", quantise("quant8_asymm_signed"))],
    "REDUCE_ALL": [("b", reduction("REDUCE_ALL"))],
    "REDUCE_ANY": [("b", reduction("REDUCE_ANY", (0, 2), keep=True))],
    "REDUCE_MAX": [("fhqs", reduction("REDUCE_MAX")), ("fq", reduction("REDUCE_MAX", (0, 1, 2)))],
    "REDUCE_MIN": [("fhqs", reduction("REDUCE_MIN", (-1, 0)))],
    "REDUCE_PROD": [("fh", reduction("REDUCE_PROD"))],
    "REDUCE_SUM": [("fh", reduction("REDUCE_SUM", (0, 1), keep=True))],
    "RELU": [("fhqs", unary("RELU"))],
    "RELU1": [("fhqs", unary("RELU1"))],
    "RELU6": [("fhqs", unary("RELU6", high=9.0))],
    "RESHAPE": [("fhqs", moved("RESHAPE", (2, 6), [3, -1, 2]))],
    "RESIZE_BILINEAR": [
        ("fhqs", resize("RESIZE_BILINEAR", (8, 7))),
        ("fhqs", resize("RESIZE_BILINEAR", (8, 7, False, True, False))),
        ("fhqs", resize("RESIZE_BILINEAR", (8, 7, False, False, True))),
        ("fq", resize("RESIZE_BILINEAR", (1.6, 0.8, True), (2, 3, 4, 5))),
    ],
    "RESIZE_NEAREST_NEIGHBOR": [
        ("fhqs", resize("RESIZE_NEAREST_NEIGHBOR", (8, 7, False))),
        ("fq", resize("RESIZE_NEAREST_NEIGHBOR", (8, 7, False, True, False))),
        ("fs", resize("RESIZE_NEAREST_NEIGHBOR", (8, 7, True, False, True), (2, 3, 4, 5))),
    ],
    "RNN": [(letters, rnn(code)) for letters, code in (("fh", 4), ("f", 0), ("f", 1), ("f", 3), ("f", 6))],
    "RSQRT": [("fh", unary("RSQRT", low=0.1))],
    "SELECT": [("fhiqs", select)],
    "SIN": [("fh", unary("SIN"))],
    "SLICE": [("fhiqs", moved("SLICE", (4, 5), [1, 2], [2, -1]))],
    "SOFTMAX": [
        ("fhqs", moved("SOFTMAX", (3, 10), 1.0)),
        ("fhqs", moved("SOFTMAX", (2, 10, 3), 0.7, 1)),
        ("q", moved("SOFTMAX", (5,), 1.0)),
    ],
    "SPACE_TO_BATCH_ND": [("fhqs", moved("SPACE_TO_BATCH_ND", (1, 3, 4, 2), [2, 2], [[1, 0], [0, 2]]))],
    "SPACE_TO_DEPTH": [("fhqs", moved("SPACE_TO_DEPTH", (1, 4, 6, 2), 2))],
    "SPLIT": [("fhiqs", moved("SPLIT", (4, 6), -1, 3, outputs=3))],
    "SQRT": [("fh", unary("SQRT", low=0.1))],
    "SQUEEZE": [("fhqs", moved("SQUEEZE", (1, 3, 1, 2), [0])), ("fq", moved("SQUEEZE", (1, 3, 1), None))],
    "STRIDED_SLICE": [
        ("fhqs", moved("STRIDED_SLICE", (4, 5, 3), [1, -1, 0], [4, 0, 1], [2, -2, 1], 0, 0, 4)),
        ("fq", moved("STRIDED_SLICE", (4, 5), [1, 4], [3, 0], [1, -1], 1, 2, 0)),
    ],
    "SUB": [("fhqs", binary("SUB")), ("i", binary("SUB"))],
    "SVDF": [("fh", svdf(5, 0, True)), ("f", svdf(1, 1, False)), ("f", svdf(2, 4, True))],
    "TANH": [("fhqs", unary("TANH"))],
    "TILE": [("fhiqs", moved("TILE", (2, 3), [2, 3]))],
    "TOPK_V2": [("fhiqs", moved("TOPK_V2", (3, 9), 4)), ("fi", equal_ones)],
    "TRANSPOSE": [("fhqs", moved("TRANSPOSE", (2, 3, 4), [2, 0, 1])), ("fq", moved("TRANSPOSE", (2, 3), None))],
    "TRANSPOSE_CONV_2D": [
        ("fhqs", transposed((1,), size=[1, 8, 10, 2])),
        ("qs", transposed((1,), size=[1, 8, 10, 2], channel=0)),
        ("fq", transposed((2,), size=[1, 2, 9, 11], nchw=True)),
        ("fs", transposed((0, 0, 0, 0))),
        ("fqs", transposed((1, 0, 0, 2), channel=None)),
        ("fq", transposed((2, 1, 2, 2), nchw=True)),
    ],
    "UNIDIRECTIONAL_SEQUENCE_LSTM": [
        ("fh", lstm_sequence(PLAIN, True, False)),
        ("f", lstm_sequence(FULL, False, True)),
    ],
    "UNIDIRECTIONAL_SEQUENCE_RNN": [("fh", rnn_sequence(4, 1)), ("f", rnn_sequence(3, 0))],
}


def forms(cases):
    """Parameters of a test: a letter, and the function that makes the model."""
    return [
        pytest.param(letter, build, id=f"{name}-{number}-{letter}")
        for name, found in cases.items()
        for number, (letters, build) in enumerate(found)
        for letter in letters
    ]


def unknown_rank(net):
    net.builder.output(net.builder.operation("ABS", net.builder.input("float32", ())))
    return net


def boxes(net):
    return net.x(1, 4), net.x(1, 8), net.indices([0]), net.x(1, 2)


def refused(name, letter, build):
    return pytest.param(letter, build, id=name)


REFUSED_BY_ALL = [
    refused("a shape that is data", "f", lambda m: m.computed("RESHAPE", (2, 3), [3, 2])),
    refused("repeats that are data", "f", lambda m: m.computed("TILE", (2, 3), [1, 2])),
    refused("unknown rank", "f", unknown_rank),
    refused("infinite", "f", lambda m: m.run("SOFTMAX", m.x(2, 3), float("inf"))),
    refused("a vast window", "f", lambda m: m.run("MAX_POOL_2D", m.x(1, 4, 4, 1), 1, 1, 1, 2, 2**31 - 1, 0)),
]
