"""Every operation that the onnxruntime device claims, against the reference."""

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

from operation_cases import CASES, forms, pair, pool, transposed

from driver.devices.onnxruntime import OnnxRuntimeDevice
from driver.devices.onnxruntime.lower import LOWERINGS
from driver.interface import BindOptions, Preparation
from driver.nn import Interpreter


@pytest.fixture(scope="module")
def onnxruntime():
    return OnnxRuntimeDevice(threads=1)


def divided(net):
    """By anything, 0 too, and by numbers that quotients are not exact for."""
    x, y = net.x(4, 64), net.x(4, 64)
    net.feeds[0][:2] = net.random.integers(-(2**31), 2**31, (2, 64))
    net.feeds[1][:] = net.random.integers(-3, 4, (4, 64))
    return net.run("DIV", x, y, 0)


def rank(net):
    net.builder.output(net.builder.operation("RANK", net.x(2, 3, 1)))
    return net


def fill(net):
    value = 7 if net.letter == "i" else 1.5
    net.builder.output(net.builder.operation("FILL", np.array([2, 3], np.int32), value))
    return net


def whole_range(name, *more):
    """8-bit sums with terms far beyond the output's range."""
    return lambda net: net.run(name, net.x(8, 64, scale=3.0), net.x(8, 64, scale=0.001), *more, scale=0.01)


def long_sequence(net):
    """Longer than any graph should be unrolled."""
    cell = net.constant(4, 3), net.constant(4, 4, low=-0.2, high=0.2), net.constant(4), net.x(1, 4)
    return net.run("UNIDIRECTIONAL_SEQUENCE_RNN", net.x(1, 300, 3), *cell, 4, 0)


def scattered(name, shape, *parameters, low, high):
    """Of numbers that float32 leaves few digits of."""
    return lambda net: net.run(name, net.x(*shape, low=low, high=high), *parameters)


AXES = np.array([0, 1], np.int32)
WHOLE = (500,) * 4, (1, 1), (1000, 1000)
"""Paddings, strides and extents of windows that see all of a small image, and little else."""

MORE = {
    "ADD": [("qs", whole_range("ADD", 0))],
    "AVERAGE_POOL_2D": [
        ("qs", pool("AVERAGE_POOL_2D", (2, 0, 1, 1, 2, 1, 3, 3, 1))),
        ("fqs", pool("AVERAGE_POOL_2D", (*WHOLE[0], *WHOLE[1], *WHOLE[2], 0))),
    ],
    "DIV": [("i", divided)],
    "ELU": [("fh", lambda net: net.run("ELU", net.x(3, 5), 0.5))],
    "FILL": [("fi", fill)],
    "INSTANCE_NORMALIZATION": [
        ("f", scattered("INSTANCE_NORMALIZATION", (1, 2, 2, 2), 1.0, 0.0, 1e-5, False, low=1000, high=1000.001))
    ],
    "LOG_SOFTMAX": [("f", scattered("LOG_SOFTMAX", (3, 9), 10.0, -1, low=-1e3, high=1e3))],
    "MAXIMUM": [("fq", pair("MAXIMUM", (2, 1, 3, 1, 2, 2), (3, 1, 2, 1, 1), scale=0.06, zero=110))],
    "MUL": [("qs", whole_range("MUL", 0))],
    "MEAN": [("fqs", scattered("MEAN", (300, 300, 2), AXES, 0, low=0, high=1000))],
    "PRELU": [("fhqs", lambda net: net.run("PRELU", net.x(1, 3), net.x(2, 3), scale=0.06))],
    "RANK": [("fiqsb", rank)],
    "REDUCE_SUM": [("f", scattered("REDUCE_SUM", (300, 300, 2), AXES, False, low=0, high=10))],
    "RESIZE_NEAREST_NEIGHBOR": [
        ("f", lambda net: net.run("RESIZE_NEAREST_NEIGHBOR", net.x(1, 5, 5, 1), 9, 512, False))
    ],
    "SOFTMAX": [
        ("qs", lambda net: net.run("SOFTMAX", net.x(5, 1), 1.0)),
        ("f", scattered("SOFTMAX", (3, 9), 10.0, low=-1e3, high=1e3)),
    ],
    "SUB": [("qs", whole_range("SUB", 0))],
    "TRANSPOSE_CONV_2D": [
        ("s", transposed((1, 0, 0, 2))),
        ("fqs", transposed((1,), size=[1, 20, 30, 2])),
        ("fqs", transposed((2,), size=[1, 2, 12, 13], nchw=True)),
    ],
    "UNIDIRECTIONAL_SEQUENCE_RNN": [("f", long_sequence)],
}


ELSEWHERE = ("IF", "WHILE")
"""In a file of their own."""
ALL = {name: [*CASES.get(name, ()), *MORE.get(name, ())] for name in LOWERINGS if name not in ELSEWHERE}


def test_all_are_tried():
    """Each operation that can be lowered has its cases here."""
    assert all(ALL.values())
    assert set(CASES) <= set(LOWERINGS)


@pytest.mark.integration
@pytest.mark.parametrize(("letter", "build"), forms(ALL))
def test_agrees_with_the_reference(onnxruntime, net, agrees, letter, build):
    """Claimed operations give what the reference gives, within the HAL's tolerances, for random data of each type."""
    for seed in range(3):
        assert agrees(onnxruntime, build(net(letter, seed))), f"seed {seed}"


@pytest.mark.parametrize("channel", [None, 0], ids=["one scale", "channel scales"])
@pytest.mark.parametrize("letter", ["q", "s"])
@pytest.mark.parametrize("size", [3, 64, 513])
def test_extreme_products(onnxruntime, net, agrees, letter, channel, size):
    """Sums of products of the largest bytes there are, which saturate where they are added in 16 bits, are exact."""
    for low in (False, True):
        found = net(letter)
        kind = np.iinfo(np.uint8 if letter == "q" else np.int8)
        x = found.x(1, 5, 5, size, scale=0.01, zero=0 if low else 255)
        weights, bias = found.filter(8, 3, 3, size, channel=channel)
        weights.operand.value[...] = np.iinfo(weights.operand.value.dtype).max
        found.run("CONV_2D", x, weights, bias, 1, 1, 1, 0, scale=0.05 * size, zero=128)
        found.feeds[0][...] = kind.max if low else kind.min
        assert agrees(onnxruntime, found)


@pytest.mark.parametrize("letter", ["q", "s"])
def test_halves_are_rounded_away(onnxruntime, net, letter):
    """Averages of two are halves, which the HAL rounds away from zero: not one is off by a step."""
    found = net(letter)
    found.run("AVERAGE_POOL_2D", found.x(1, 32, 32, 4, zero=128), 2, 2, 1, 2, 1, 0)
    model, result = found.model, np.zeros(16 * 32 * 4, np.uint8)
    want = Interpreter(model).bind(found.feeds)
    want.run()
    onnxruntime.prepare(model, Preparation()).bind(found.feeds, [result], BindOptions()).run()
    assert result.tobytes() == want.results[0].array.tobytes()
