"""Models of one operation on random data, run by a device and by the reference."""

import sys
from pathlib import Path

import numpy as np
import pytest

import driver
from driver.interface import BindOptions, Preparation
from driver.nn import Interpreter, OperandType

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "importers")]  # for what writes models

TYPES = {
    "f": "float32",
    "h": "float16",
    "i": "int32",
    "b": "bool8",
    "q": "quant8_asymm",
    "s": "quant8_asymm_signed",
}


class Net:
    """A model of one operation, whose operands have the type of a letter, and what it is fed."""

    def __init__(self, letter, seed=0):
        self.letter, self.random = letter, np.random.default_rng(seed)
        self.builder, self.feeds = driver.ModelBuilder(), []

    @property
    def is_quantised(self):
        return self.letter in "qs"

    def data(self, shape, letter=None, low=-2.0, high=2.0):
        """Random numbers as they are stored; all bytes there are, for 8-bit types."""
        letter = letter or self.letter
        if letter in "qsb":
            raw = self.random.integers(0, 256 if letter != "b" else 3, shape, np.uint8)
            return raw.view(np.int8) if letter == "s" else raw
        if letter == "i":
            return self.random.integers(-1000, 1000, shape, np.int32)
        return self.random.uniform(low, high, shape).astype(TYPES[letter])

    def quantisation(self, scale, zero):
        """`zero` as it is without a sign."""
        return {"scale": scale, "zero_point": zero - 128 * (self.letter == "s")} if self.is_quantised else {}

    def x(self, *shape, letter=None, low=-2.0, high=2.0, scale=0.05, zero=117):
        """An input of the model."""
        letter = letter or self.letter
        self.feeds.append(self.data(shape, letter, low, high))
        quantisation = self.quantisation(scale, zero) if letter in "qs" else {}
        self._scale = quantisation.get("scale", 0.0)
        return self.builder.input(TYPES[letter], shape, **quantisation)

    def indices(self, values):
        """An input of int32."""
        self.feeds.append(np.array(values, np.int32))
        return self.builder.input("int32", self.feeds[-1].shape)

    def constant(self, *shape, scale=0.05, zero=117, low=-2.0, high=2.0):
        found = self.data(shape, None, low, high)
        return self.builder.constant(found, dtype=TYPES[self.letter], **self.quantisation(scale, zero))

    def filter(self, *shape, channel=None, zero=128):
        """Weights, and the bias for so many outputs; `channel`: they have a scale for each entry of that dimension."""
        outputs = shape[channel or 0] if channel is not None else shape[0]
        return self._weights(shape, channel, zero), self._bias(outputs, channel)

    def taps(self, *shape, channel=None, zero=128):
        """Weights and bias of a depthwise convolution."""
        return self._weights(shape, channel, zero), self._bias(shape[3], channel)

    def _weights(self, shape, channel, zero):
        if channel is None:
            weights = self.constant(*shape, scale=0.02, zero=zero, low=-1, high=1)
            self._products = float(np.float32(self._scale) * np.float32(weights.operand.scale))
            return weights
        scales = self.random.uniform(0.005, 0.02, shape[channel]).astype(np.float32)
        raw = self.random.integers(-127, 128, shape).astype(np.int8)
        return self.builder.constant(raw, channel_quant=(scales.tolist(), channel))

    def _bias(self, count, channel):
        if not self.is_quantised:
            return self.constant(count)
        values = self.random.integers(-500, 500, count).astype(np.int32)
        return self.builder.constant(values, scale=self._products if channel is None else 0.0)

    def run(self, name, *args, scale=None, zero=None, **more):
        """The operation; its results are the outputs."""
        if self.is_quantised and scale is not None:
            more |= self.quantisation(scale, 128 if zero is None else zero)
        found = self.builder.operation(name, *args, **more)
        self.builder.output(*(found if isinstance(found, tuple) else (found,)))
        return self

    def computed(self, name, shape, *parameters):
        """The operation, with the last parameter known only when it runs."""
        found = [np.array(p, np.int32) if isinstance(p, list) else p for p in parameters[:-1]]
        return self.run(name, self.x(*shape), *found, self.indices(parameters[-1]))

    @property
    def model(self):
        return self.builder.build()


def results(prepared, model, feeds):
    """What a device's prepared model computes, and what the reference does."""
    expected = Interpreter(model).bind(feeds)
    expected.run()
    arrays = [tensor.array for tensor in expected.results]
    outputs = [np.full(array.nbytes + 128, 0xA5, np.uint8)[-array.ctypes.data % 64 :] for array in arrays]
    bound = prepared.bind(feeds, outputs, BindOptions(1.0))
    bound.run()
    assert [shape for shape, _ in bound.shapes] == [array.shape for array in arrays]
    pairs = zip(outputs, arrays, strict=True)
    return [(raw[: array.nbytes].view(array.dtype).reshape(array.shape), array) for raw, array in pairs]


def disagreement(model, found, expected):
    """By how much the worst element is beyond what the HAL tolerates; 0 or less is agreement."""
    kinds = [model.main.operands[i].type for i in model.main.outputs]
    halves = any(o.type in (OperandType.TENSOR_FLOAT16, OperandType.FLOAT16) for o in model.main.operands)
    return max(_excess(*each, halves) for each in zip(kinds, found, expected, strict=True))


def _excess(kind, found, expected, halves):
    absolute, relative = (1, 0) if kind.is_quantised else (0, 0)
    if kind in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16):
        absolute, relative = (5 * 2**-10,) * 2 if halves else (1e-5, 5 * 2**-23)
    got, want = found.astype(np.float64), expected.astype(np.float64)
    difference = np.abs(np.where(got == want, 0, got - want))  # of infinities, too
    excess = difference - absolute - relative * np.abs(want)
    return float(np.max(np.where(np.isnan(excess), np.inf, excess), initial=-1.0))


@pytest.fixture(scope="session")
def agrees():
    """Whether a device supports a model of one operation, and computes what the reference does."""

    def agrees(device, net):
        model = net.model
        assert device.supported_operations(model) == [True]
        pairs = results(device.prepare(model, Preparation()), model, net.feeds)
        return disagreement(model, [got for got, _ in pairs], [want for _, want in pairs]) <= 0

    return agrees


@pytest.fixture(scope="session")
def net():
    """Net(letter, seed)."""
    return Net
