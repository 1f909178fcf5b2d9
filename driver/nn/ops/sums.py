"""FULLY_CONNECTED, and what it shares with convolutions: weights as floats, exact sums of products, what follows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from ..blocks import Look, each, look_nowhere
from ..model import Operand
from ..operation import Array, Call, OperationType, Signature, Tensor
from ..types import Dimensions, OperandType
from .real import Bounds, accumulator, activation_bounds, clamp, load, round_to

STRIP_BYTES = 1 << 19
"""Work is cut into strips of about this size, so that what one step writes is still in cache for the next."""

EXACT = 2**24
"""Below this float32 holds every integer."""

LARGEST = 255
"""The largest magnitude of an 8-bit value without its zero point."""

_LARGE = 2**22
"""Bytes from which a matrix is not transposed."""


def strips(batch: int, rows: int, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Cut images of `rows` rows into slices of about STRIP_BYTES: several images, or several rows of one."""
    images = max(1, STRIP_BYTES // max(1, rows * row_bytes))
    height = rows if images > 1 else min(rows, max(1, STRIP_BYTES // max(1, row_bytes)))
    for n in range(0, batch, images):
        for top in range(0, rows, height):
            yield slice(n, n + images), slice(top, min(rows, top + height))


def widen(tensor: Tensor, axes: tuple[int, ...], look: Look = look_nowhere) -> Array:
    """Return the weights as floats without their zero point, in a type that sums their products over `axes` exactly.

    8-bit data leaves 16 bits of float32 for the weights of one sum; weights that may change count as the largest.
    """
    data = tensor.data
    if data.dtype.itemsize > 1:
        return data if data.dtype == np.float32 else _as(look, data, np.float32)
    weights = np.empty(data.shape, np.float32)
    each(look, np.subtract, data, np.float32(tensor.zero_point), weights, dtype=np.float32)
    most = LARGEST * int(np.prod([data.shape[i] for i in axes]))
    if most * LARGEST >= EXACT and tensor.fixed:
        most = int(np.abs(weights).sum(axes).max(initial=0.0))  # exact as far as it matters
    return weights if most * LARGEST < EXACT else _as(look, weights, np.float64)


def _as(look: Look, array: Array, dtype: DTypeLike) -> Array:
    result = np.empty(array.shape, dtype)
    each(look, np.copyto, result, array)
    return result


def weight_matrix(tensor: Tensor, look: Look = look_nowhere) -> Array:
    """Return a filter [outputs, ...] as a matrix [terms of one product, outputs].

    BLAS likes its terms in rows, but a large matrix is a view: to transpose it takes longer than to hash it.
    """
    weights = widen(tensor, tuple(range(1, len(tensor.shape))), look)
    matrix = weights.reshape(tensor.shape[0], -1).T
    return matrix if matrix.nbytes >= _LARGE else np.ascontiguousarray(matrix)


def bias_vector(tensor: Tensor, look: Look = look_nowhere) -> Array:
    """Return a bias as floats; float64 for quantised sums, whose biases use all 32 bits."""
    return _as(look, tensor.data, np.float64 if tensor.type == OperandType.TENSOR_INT32 else np.float32)


def output_factor(call: Call) -> float | Array:
    """Return the factor from one unit of an integer sum to steps of the output; per output channel when the
    filter is.
    """
    source, weights, bias, out = call.tensor(0), call.tensor(1), call.tensor(2), call.outputs[0]
    if not out.type.is_quantised:
        return 1.0
    if weights.channel_quant is not None:
        if bias.scale:
            raise ValueError(f"bias scale {bias.scale} has to be 0 beside a filter with a scale per channel")
        return np.array(weights.channel_quant[0], np.float32).astype(np.float64) * source.scale / out.scale
    product = source.scale * weights.scale
    if abs(product - bias.scale) > 1e-6 * min(product, bias.scale):
        raise ValueError(f"bias scale {bias.scale} has to be input scale * filter scale = {product}")
    return product / out.scale


def channel_check(channel: int, inputs: Sequence[Operand], _outputs: Sequence[Operand]) -> str | None:
    """Refuse filters whose scales do not belong to the outputs."""
    quant = inputs[1].channel_quant
    if quant is not None and quant[1] != channel:
        return f"the filter counts channels along dimension {quant[1]}; it has to be {channel}"
    return None


def requantisation_gate(inputs: Sequence[Operand], outputs: Sequence[Operand]) -> int:
    """Return the HAL version: before 1.2 a quantised output had to be coarser than the products it sums."""
    source, weights, out = inputs[0], inputs[1], outputs[0]
    return 2 if out.type.is_quantised and out.scale <= source.scale * weights.scale else 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The steps after the sums: bias, fused activation, the stored form.

    bias: one number per output channel, the last axis of the sums.
    factor: steps of a quantised output per unit of the sums.
    """

    out: Tensor
    bias: Array
    factor: float | Array
    bounds: Bounds

    @classmethod
    def of(cls, call: Call, activation: int) -> "Finish":
        """Make one for a call whose inputs 0, 1 and 2 are data, weights and bias."""
        out = call.outputs[0]
        return cls(out, call.pack(2, bias_vector), output_factor(call), activation_bounds(activation, out))

    def __call__(self, call: Call, sums: Array, view: Array) -> None:
        """Turn `sums`, which may be overwritten, into `view`, a part of the output."""
        if self.out.type.is_quantised:
            self._requantise(call, sums, view)
            return
        call.step(np.add, sums, self.bias, sums)
        clamp(call, sums, self.bounds)
        if sums is not view:
            call.step(np.copyto, view, sums, casting="unsafe")

    def _requantise(self, call: Call, sums: Array, view: Array) -> None:
        """Scale in float64, round half away from zero, add the zero point, clamp."""
        wide = sums
        if sums.dtype != np.float64:
            wide = call.shared("wide", sums.shape, np.float64)
            call.step(np.copyto, wide, sums)  # and then add: quicker than to add two types
        call.step(np.add, wide, self.bias, wide)
        call.step(np.multiply, wide, self.factor, wide)
        round_to(call, wide, view, self.out.zero_point, bounds=self.bounds)


def _dense_shape(call: Call) -> tuple[Dimensions]:
    source, weights, bias = call.shape(0), call.shape(1), call.shape(2)
    if len(weights) != 2 or bias != weights[:1]:
        raise ValueError(f"weights {list(weights)} and bias {list(bias)} have to be [units, inputs] and [units]")
    size = math.prod(source)
    if weights[1] < 1 or size % weights[1]:
        raise ValueError(f"input of {size} elements does not divide into rows of {weights[1]}")
    activation_bounds(call.integer(3))
    return ((size // weights[1], weights[0]),)


def _dense(call: Call) -> None:
    weights = call.pack(1, weight_matrix)
    finish, out = Finish.of(call, call.integer(3)), call.outputs[0]
    result = accumulator(call, out.data, weights.dtype)
    source = call.compact(load(call, 0, dtype=weights.dtype))
    call.step(np.matmul, source.reshape(-1, weights.shape[0]), weights, result)
    finish(call, result, out.data)


OPERATIONS = (
    OperationType(
        "FULLY_CONNECTED",
        9,
        (Signature("f0 q0 h2 s3", "T T B INT32", ranks=(2, 3, 4)),),
        _dense_shape,
        build=_dense,
        pack={1: weight_matrix, 2: bias_vector},
        takes_empty=True,
        gate=requantisation_gate,
    ),
)
