"""Small networks that devices are measured with: the blocks of a MobileNet, and the other kinds of operations alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driver.nn import ModelBuilder

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.nn import Model, Value

_SIDE, _CHANNELS, _BLOCKS = 32, 16, 3
_SCALE = 1 / 16


class Workload(NamedTuple):
    """A model, and what its time says something about."""

    build: Callable[[], Model]
    figures: tuple[str, ...]  #: HAL names of operand types, or fields of `Capabilities`


def mobile(dtype: str, *, relaxed: bool = False) -> Model:
    """Depthwise separable convolutions of "float32", "float16", "quant8_asymm" or "quant8_asymm_signed"."""
    net = _Net(dtype, ModelBuilder(relaxed=relaxed))
    x = net.builder.input(dtype, (1, _SIDE, _SIDE, _CHANNELS), **net.quantisation)
    for _ in range(_BLOCKS):
        x = net.depthwise(x)
        x = net.pointwise(x)
    x = net.builder.operation("AVERAGE_POOL_2D", x, 2, 1, 1, _SIDE, _SIDE, 0)
    net.builder.output(x)
    return net.builder.build()


class _Net:
    """Layers with seeded weights."""

    def __init__(self, dtype: str, builder: ModelBuilder) -> None:
        self.builder, self._random = builder, np.random.default_rng(1)
        self._dtype = {"float32": np.float32, "float16": np.float16, "quant8_asymm": np.uint8}.get(dtype, np.int8)
        self._zero = 128 if self._dtype is np.uint8 else 0
        self._is_quantised = dtype.startswith("quant8")
        self.quantisation: dict[str, Any] = {"scale": _SCALE, "zero_point": self._zero} if self._is_quantised else {}

    def depthwise(self, x: Value) -> Any:
        weights, bias = self._weights(1, 3, 3, _CHANNELS), self._bias()
        return self.builder.operation("DEPTHWISE_CONV_2D", x, weights, bias, 1, 1, 1, 1, 3, **self.quantisation)

    def pointwise(self, x: Value) -> Any:
        weights, bias = self._weights(_CHANNELS, 1, 1, _CHANNELS), self._bias()
        return self.builder.operation("CONV_2D", x, weights, bias, 1, 1, 1, 3, **self.quantisation)

    def _weights(self, *shape: int) -> Value:
        values = self._random.standard_normal(shape) / 8
        if self._is_quantised:
            values = np.round(values / _SCALE) + self._zero
        return self.builder.constant(values.astype(self._dtype), **self.quantisation)

    def _bias(self) -> Value:
        if self._is_quantised:
            return self.builder.constant(np.zeros(_CHANNELS, np.int32), scale=_SCALE * _SCALE)
        return self.builder.constant(np.zeros(_CHANNELS, self._dtype))


def _integers() -> Model:
    """Arithmetic on int32."""
    builder = ModelBuilder()
    x = builder.input("int32", (256, 1024))
    y = builder.operation("ADD", x, x, 0)
    builder.output(builder.operation("MUL", y, x, 0))
    return builder.build()


def _booleans() -> Model:
    builder = ModelBuilder()
    x = builder.input("bool8", (256, 1024))
    builder.output(builder.operation("LOGICAL_OR", builder.operation("LOGICAL_NOT", x), x))
    return builder.build()


def _branch() -> Model:
    """An IF between two additions."""
    builder = ModelBuilder()
    condition, x = builder.input("bool8", (1,)), builder.input("float32", (64, 64))
    builder.output(builder.operation("IF", condition, _plus(1.0), _plus(2.0), x))
    return builder.build()


def _plus(number: float) -> Model:
    builder = ModelBuilder()
    x = builder.input("float32", (64, 64))
    builder.output(builder.operation("ADD", x, np.full((1, 1), number, np.float32), 0))
    return builder.build()


def _loop() -> Model:
    """A WHILE of eight rounds."""
    condition, body, builder = ModelBuilder(), ModelBuilder(), ModelBuilder()
    x = condition.input("float32", (1,))
    condition.output(condition.operation("LESS", x, np.full(1, 8, np.float32)))
    body.output(body.operation("ADD", body.input("float32", (1,)), np.ones(1, np.float32), 0))
    builder.output(builder.operation("WHILE", condition.build(), body.build(), builder.input("float32", (1,))))
    return builder.build()


WORKLOADS = (
    Workload(lambda: mobile("float32"), ("FLOAT32", "TENSOR_FLOAT32")),
    Workload(lambda: mobile("float32", relaxed=True), ("relaxed_scalar", "relaxed_tensor")),
    Workload(lambda: mobile("quant8_asymm"), ("TENSOR_QUANT8_ASYMM",)),
    Workload(lambda: mobile("quant8_asymm_signed"), ("TENSOR_QUANT8_ASYMM_SIGNED",)),
    Workload(lambda: mobile("float16"), ("FLOAT16", "TENSOR_FLOAT16")),
    Workload(_integers, ("INT32", "TENSOR_INT32")),
    Workload(_booleans, ("BOOL", "TENSOR_BOOL8")),
    Workload(_branch, ("if_performance",)),
    Workload(_loop, ("while_performance",)),
)
