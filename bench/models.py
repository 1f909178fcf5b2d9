"""Models that the benchmarks run: real shapes, seeded weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

SAME, VALID = 1, 2
RELU6 = 3
IMAGE = (1, 224, 224, 3)
CLASSES = 1001
BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
"""Of MobileNetV1 1.0: channels after each pair of a depthwise and a pointwise convolution, and its stride."""

Terms = tuple[Any, Any]
"""Weights and bias, as `ModelBuilder.operation` takes them."""

PIXEL = (1 / 128, 128)  # scale and zero point of quantised images, of what RELU6 leaves, of the last layer, of SOFTMAX
CLAMPED, LOGIT, PROBABILITY = (6 / 255, 0), (0.1, 128), (1 / 256, 0)


@dataclass(frozen=True)
class Layer:
    """One convolution: a filter [outputs, height, width, inputs], or when depthwise [1, height, width, channels]."""

    weights: NDArray[np.float32]
    bias: NDArray[np.float32]
    stride: int = 1
    depthwise: bool = False


def layers(seed: int = 7, width: float = 1.0) -> Iterator[Layer]:
    """The convolutions of MobileNetV1, its channels times `width`; signals neither die in their weights nor explode."""
    rng = np.random.default_rng(seed)

    def layer(shape: tuple[int, ...], stride: int = 1, *, depthwise: bool = False) -> Layer:
        terms, outputs = (9, shape[3]) if depthwise else (int(np.prod(shape[1:])), shape[0])
        weights = rng.standard_normal(shape) * np.sqrt(2 / terms)
        bias = rng.standard_normal(outputs) * 0.1
        return Layer(weights.astype(np.float32), bias.astype(np.float32), stride, depthwise)

    channels = int(32 * width)
    yield layer((channels, 3, 3, 3), 2)
    for full, stride in BLOCKS:
        outputs = int(full * width)
        yield layer((1, 3, 3, channels), stride, depthwise=True)
        yield layer((outputs, 1, 1, channels))
        channels = outputs
    yield layer((CLASSES, 1, 1, channels))


def mobilenet(dtype: str, width: float = 1.0, pixels: int = IMAGE[1]) -> driver.Model:
    """MobileNetV1 as one of FORMS: its channels times `width`, for images of `pixels` x `pixels` (multiples of 32)."""
    if dtype not in FORMS:
        raise ValueError(f"dtype {dtype!r}; give one of {', '.join(FORMS)}")
    m, form = driver.ModelBuilder(), FORMS[dtype]
    x = m.input(form.data, (1, pixels, pixels, 3), **form.parameters(PIXEL))
    *body, last = layers(width=width)
    scale = PIXEL[0]
    for layer in body:
        x = _convolution(m, x, layer, RELU6, scale, CLAMPED, form)
        scale = CLAMPED[0]
    x = m.operation("AVERAGE_POOL_2D", x, VALID, 1, 1, pixels // 32, pixels // 32, 0)
    x = _convolution(m, x, last, 0, scale, LOGIT, form)
    x = m.operation("RESHAPE", x, np.array([1, CLASSES], np.int32))
    m.output(m.operation("SOFTMAX", x, 1.0))
    return m.build()


def _float_terms(_m: Any, layer: Layer, _scale: float) -> Terms:
    return layer.weights, layer.bias


def _tensor_terms(m: Any, layer: Layer, scale: float) -> Terms:
    stored, step, zero_point = quantise(layer.weights)
    product = float(np.float32(scale)) * float(np.float32(step))
    bias = m.constant(np.round(layer.bias / product).astype(np.int32), scale=product)
    return m.constant(stored, scale=step, zero_point=zero_point), bias


def _channel_terms(m: Any, layer: Layer, scale: float) -> Terms:
    axis = 3 if layer.depthwise else 0
    stored, steps = quantise_channels(layer.weights, axis)
    kind = "TENSOR_QUANT8_SYMM_PER_CHANNEL"
    weights = m.constant(stored, dtype=kind, channel_quant=(steps.tolist(), axis))
    return weights, m.constant(np.round(layer.bias / (np.float32(scale) * steps)).astype(np.int32))


@dataclass(frozen=True)
class Form:
    """How data and weights are stored. `terms` adds a layer's weights and bias, for data of a given scale."""

    data: str
    terms: Callable[[Any, Layer, float], Terms]
    offset: int = 0  #: of zero points to those of bytes without a sign

    def parameters(self, of: tuple[float, int]) -> dict[str, Any]:
        """Scale and zero point as a builder takes them: none of floats."""
        return {} if self.data == "float32" else {"scale": of[0], "zero_point": of[1] + self.offset}


FORMS = {
    "float32": Form("float32", _float_terms),
    "quant8": Form("quant8_asymm", _tensor_terms),
    "per-channel": Form("quant8_asymm_signed", _channel_terms, -128),
}
"""Floats; bytes without a sign, a scale for each tensor; bytes with a sign, a scale for each channel of the weights."""

QUANT8 = FORMS["quant8"]


def _convolution(
    m: Any, x: Any, layer: Layer, activation: int, scale: float, result: tuple[float, int], form: Form
) -> Any:
    """One layer; `scale` is that of x, `result` the scale and zero point of what it gives."""
    name, fan = ("DEPTHWISE_CONV_2D", (1,)) if layer.depthwise else ("CONV_2D", ())
    numbers = (SAME, layer.stride, layer.stride, *fan, activation)
    return m.operation(name, x, *form.terms(m, layer, scale), *numbers, **form.parameters(result))


def quantise_channels(weights: NDArray[np.float32], axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Weights in 255 steps around 0, and the steps along `axis`."""
    others = tuple(i for i in range(weights.ndim) if i != axis)
    steps = np.abs(weights).max(axis=others, keepdims=True) / np.float32(127)
    return np.round(weights / steps).astype(np.int8), steps.reshape(-1)


def quantise(weights: NDArray[np.float32]) -> tuple[NDArray[np.uint8], float, int]:
    """Weights in 256 steps between the least and the greatest: as stored, with scale and zero point."""
    low, high = min(0.0, float(weights.min())), max(0.0, float(weights.max()))
    scale = float(np.float32((high - low) / 255))
    zero_point = round(-low / scale)
    return np.clip(np.round(weights / scale) + zero_point, 0, 255).astype(np.uint8), scale, zero_point


Handle = Any
Build = Callable[[driver.ModelBuilder], Handle]
FEATURES = (1, 56, 56, 64)
"""The dimensions of a typical feature map."""


def _rng() -> np.random.Generator:
    return np.random.default_rng(1)


def _float(m: driver.ModelBuilder, shape: tuple[int, ...] = FEATURES) -> Handle:
    return m.input("float32", shape)


def _quant(m: driver.ModelBuilder, shape: tuple[int, ...] = FEATURES) -> Handle:
    return m.input("quant8_asymm", shape, **QUANT8.parameters(PIXEL))


def _weights(*shape: int) -> NDArray[np.float32]:
    return _rng().standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))


def _layer(*shape: int, depthwise: bool = False, quantised: bool = False) -> Build:
    """One convolution of 56 x 56 pixels, or a product when there are two dimensions."""
    layer = Layer(_weights(*shape), np.zeros(shape[3] if depthwise else shape[0], np.float32), depthwise=depthwise)

    def build(m: driver.ModelBuilder) -> Handle:
        x = _quant(m) if quantised else _float(m)
        return _convolution(m, x, layer, RELU6, PIXEL[0], CLAMPED, QUANT8 if quantised else FORMS["float32"])

    return build


def _apply(name: str, *rest: Any, quantised: bool = False, inputs: int = 1, **result: Any) -> Build:
    """An operation on feature maps; `rest` are its other inputs, `result` the parameters of what it gives."""

    def build(m: driver.ModelBuilder) -> Handle:
        return m.operation(name, *((_quant if quantised else _float)(m) for _ in range(inputs)), *rest, **result)

    return build


def _dense(m: driver.ModelBuilder) -> Handle:
    return m.operation("FULLY_CONNECTED", _float(m, (1, 1024)), _weights(1001, 1024), np.zeros(1001, np.float32), 0)


def _dense_of_quantised(m: driver.ModelBuilder) -> Handle:
    stored, step, zero_point = quantise(_weights(1001, 1024))
    bias = m.constant(np.zeros(1001, np.int32), scale=PIXEL[0] * step)
    weights = m.constant(stored, scale=step, zero_point=zero_point)
    return m.operation("FULLY_CONNECTED", _quant(m, (1, 1024)), weights, bias, 0, **QUANT8.parameters(LOGIT))


def _transposed(m: driver.ModelBuilder) -> Handle:
    shape, bias = np.array([1, 56, 56, 32], np.int32), np.zeros(32, np.float32)
    x = _float(m, (1, 28, 28, 64))
    return m.operation("TRANSPOSE_CONV_2D", x, _weights(32, 3, 3, 64), bias, shape, SAME, 2, 2, 0, False)


def _softmax(m: driver.ModelBuilder) -> Handle:
    return m.operation("SOFTMAX", _float(m, (1, CLASSES)), 1.0)


_PADS = np.array([[0, 0], [1, 1], [1, 1], [0, 0]], np.int32)
_ORDER = np.array([0, 3, 1, 2], np.int32)
_STEPS = {"scale": 1 / 32, "zero_point": 128}

CASES: dict[str, Build] = {
    "CONV_2D 1x1": _layer(64, 1, 1, 64),
    "CONV_2D 3x3": _layer(64, 3, 3, 64),
    "DEPTHWISE_CONV_2D 3x3": _layer(1, 3, 3, 64, depthwise=True),
    "TRANSPOSE_CONV_2D 3x3": _transposed,
    "FULLY_CONNECTED": _dense,
    "AVERAGE_POOL_2D 3x3": _apply("AVERAGE_POOL_2D", SAME, 1, 1, 3, 3, 0),
    "MAX_POOL_2D 2x2": _apply("MAX_POOL_2D", VALID, 2, 2, 2, 2, 0),
    "L2_POOL_2D 2x2": _apply("L2_POOL_2D", VALID, 2, 2, 2, 2, 0),
    "L2_NORMALIZATION": _apply("L2_NORMALIZATION"),
    "LOCAL_RESPONSE_NORMALIZATION": _apply("LOCAL_RESPONSE_NORMALIZATION", 2, 1.0, 1e-4, 0.75),
    "SOFTMAX of 1001": _softmax,
    "LOG_SOFTMAX": _apply("LOG_SOFTMAX", 1.0, -1),
    "RESIZE_BILINEAR": _apply("RESIZE_BILINEAR", 112, 112),
    "RESIZE_NEAREST_NEIGHBOR": _apply("RESIZE_NEAREST_NEIGHBOR", 112, 112, False),
    "ADD": _apply("ADD", 0, inputs=2),
    "MUL": _apply("MUL", 0, inputs=2),
    "SUB": _apply("SUB", 0, inputs=2),
    "DIV": _apply("DIV", 0, inputs=2),
    "LOGISTIC": _apply("LOGISTIC"),
    "TANH": _apply("TANH"),
    "RELU6": _apply("RELU6"),
    "MEAN": _apply("MEAN", np.array([1, 2], np.int32), 0),
    "PAD": _apply("PAD", _PADS),
    "TRANSPOSE": _apply("TRANSPOSE", _ORDER),
    "CONV_2D 1x1 of quant8": _layer(64, 1, 1, 64, quantised=True),
    "CONV_2D 3x3 of quant8": _layer(64, 3, 3, 64, quantised=True),
    "DEPTHWISE_CONV_2D 3x3 of quant8": _layer(1, 3, 3, 64, depthwise=True, quantised=True),
    "FULLY_CONNECTED of quant8": _dense_of_quantised,
    "AVERAGE_POOL_2D 3x3 of quant8": _apply("AVERAGE_POOL_2D", SAME, 1, 1, 3, 3, 0, quantised=True),
    "MAX_POOL_2D 2x2 of quant8": _apply("MAX_POOL_2D", VALID, 2, 2, 2, 2, 0, quantised=True),
    "RESIZE_BILINEAR of quant8": _apply("RESIZE_BILINEAR", 112, 112, quantised=True),
    "ADD of quant8": _apply("ADD", 0, inputs=2, quantised=True, **_STEPS),
    "MUL of quant8": _apply("MUL", 0, inputs=2, quantised=True, **_STEPS),
    "LOGISTIC of quant8": _apply("LOGISTIC", quantised=True),
}
"""Single operations at sizes that networks give them, by what a table calls them."""


def single(name: str) -> driver.Model:
    """A model of one operation of CASES."""
    m = driver.ModelBuilder()
    m.output(CASES[name](m))
    return m.build()


def feeds_of(model: driver.Model) -> list[NDArray[Any]]:
    """Seeded inputs: floats around 0, quantised values of all sizes."""
    rng, feeds = _rng(), []
    for operand in (model.main.operands[i] for i in model.main.inputs):
        dtype = operand.type.dtype
        if dtype.kind == "f":
            feeds.append(rng.uniform(-1, 1, operand.dimensions).astype(dtype))
        else:
            info = np.iinfo(dtype)
            feeds.append(rng.integers(info.min, info.max, operand.dimensions, dtype, endpoint=True))
    return feeds
