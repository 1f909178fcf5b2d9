"""ADD, SUB, MUL, DIV with broadcasting, the activations, and what other families of such operations need."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..model import Operand
from ..operation import Array, Call, OperationType, Signature, Tensor, same_as_input
from ..types import Dimensions, OperandType
from .real import accumulator, activation_bounds, load, look_up, quantise, store, table

MAX_RANK = 4
Scaled = Operand | Tensor


def broadcast(a: Dimensions, b: Dimensions) -> Dimensions:
    """Dimensions of an element-wise result: trailing dimensions are equal or one of them is 1."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    result = []
    for x, y in pairs:
        if x not in (1, y) and y != 1:
            raise ValueError(f"dimensions {list(a)} and {list(b)} do not broadcast")
        result.append(y if x == 1 else x)
    return tuple(result)


def real_values(call: Call, index: int) -> Array:
    """A quantised input as real numbers in float64."""
    tensor, values = call.tensor(index), load(call, index, dtype=np.float64)
    if tensor.fixed:
        return values * tensor.scale
    call.step(np.multiply, values, tensor.scale, values)
    return values


def combine(call: Call, function: Callable[..., Any], code: int = 0) -> None:
    """Output 0 = activation(function(input 0, input 1)) in real numbers; `function` takes its result as third."""
    out = call.outputs[0]
    if out.type.is_quantised:
        result = call.scratch(out.shape, np.float64)
        call.step(function, real_values(call, 0), real_values(call, 1), result)
        store(call, result, out.data, code, factor=1.0 / out.scale)
    else:
        result = accumulator(call, out.data)
        call.step(function, load(call, 0), load(call, 1), result)
        store(call, result, out.data, code)


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Apply IEEE arithmetic without the warnings numpy gives for divisions by zero and overflows."""
    with np.errstate(all="ignore"):
        function(*args, **kwargs)


def _binary_shape(call: Call) -> tuple[Dimensions]:
    code, a, b = call.integer(2), call.shape(0), call.shape(1)
    activation_bounds(code)
    if code and call.tensor(0).type == OperandType.TENSOR_INT32:
        raise ValueError(f"fused activation {code} on TENSOR_INT32; use 0 (NONE)")
    if max(len(a), len(b)) > MAX_RANK:
        raise ValueError(f"dimensions {list(a)} and {list(b)} have to be of rank {MAX_RANK} at most")
    return (broadcast(a, b),)


def _binary(function: Callable[..., Any], integer: Callable[..., Any], call: Call) -> None:
    if call.outputs[0].type == OperandType.TENSOR_INT32:
        call.step(integer, call.array(0), call.array(1), call.outputs[0].data)
    else:
        combine(call, function, call.integer(2))


def _product_fault(a: Scaled, b: Scaled, product: Scaled) -> str | None:
    """Why a quantised product cannot be stored: its steps may not be finer than those that the factors make."""
    with np.errstate(over="ignore"):
        if np.float32(product.scale) > np.float32(a.scale) * np.float32(b.scale):
            return None
    return f"output scale {product.scale} has to be above the product of the input scales {a.scale} and {b.scale}"


def _mul_check(inputs: Sequence[Operand], outputs: Sequence[Operand]) -> str | None:
    """The signed form passes validation and fails in the kernel."""
    is_checked = inputs[0].type == OperandType.TENSOR_QUANT8_ASYMM
    return _product_fault(inputs[0], inputs[1], outputs[0]) if is_checked else None


def _mul_shape(call: Call) -> tuple[Dimensions]:
    is_quantised, (out,) = call.tensor(0).type.is_quantised, call.outputs
    if is_quantised and (fault := _product_fault(call.tensor(0), call.tensor(1), out)):
        raise ValueError(fault)
    return _binary_shape(call)


def _arithmetic(
    name: str, code: int, types: str, function: Any, integer: Any = None, shape: Any = _binary_shape, **more: Any
) -> OperationType:
    signature = Signature(types, "T T INT32")
    build = partial(_binary, function, integer or function)
    return OperationType(name, code, (signature,), shape, build, takes_empty=True, **more)


def same_shape(call: Call) -> tuple[Dimensions]:
    """One output with the dimensions of input 0."""
    return (call.shape(0),)


def _fixed_quantisation(
    q: tuple[float, int], s: tuple[float, int], source: Tensor, _result: Tensor
) -> tuple[float, int]:
    return {OperandType.TENSOR_QUANT8_ASYMM: q, OperandType.TENSOR_QUANT8_ASYMM_SIGNED: s}.get(source.type, (0.0, 0))


def _relu(code: int, call: Call) -> None:
    source, out = call.tensor(0), call.outputs[0]
    low, high = activation_bounds(code, out)
    if out.type.is_quantised:
        low, high = int(low or 0), int(high or 0)
    if high is None:
        call.step(np.maximum, source.data, low, out=out.data)
    else:
        call.step(source.data.clip, low, high, out.data)


def _logistic(x: Array, result: Array) -> None:
    """Write 1 / (1 + e^-x); e^-x may overflow to infinity, which gives the right limit."""
    np.negative(x, result)
    np.exp(result, result)
    np.add(result, 1.0, result)
    np.reciprocal(result, result)


def smooth(function: Callable[[Array, Array], Any], call: Call) -> None:
    """Output 0 = function(input 0) in real numbers, 8-bit data by a table; `function` takes its result as second."""
    source, out = call.tensor(0), call.outputs[0]
    if source.type.is_quantised:
        reals = table(source)
        entries = np.empty_like(reals)
        function(reals, entries)
        look_up(call, source, quantise(entries, out).astype(out.type.dtype), out.data)
    else:
        result = accumulator(call, out.data)
        call.step(function, load(call, 0), result)
        store(call, result, out.data, 0)


def _unary(name: str, code: int, types: str, build: Callable[[Call], None], quantisation: Any) -> OperationType:
    return OperationType(
        name, code, (Signature(types, "T"),), same_shape, build, quantisation=quantisation, takes_empty=True
    )


OVER_256 = partial(_fixed_quantisation, (1 / 256, 0), (1 / 256, -128))
OVER_128 = partial(_fixed_quantisation, (1 / 128, 128), (1 / 128, 0))

ADD = _arithmetic("ADD", 0, "f0 q0 h2 s3 i3", np.add)
MUL = _arithmetic("MUL", 18, "f0 q0 h2 s3 i3", np.multiply, shape=_mul_shape, check=_mul_check)
SUB = _arithmetic("SUB", 36, "f1 h2 q2 s3 i3", np.subtract)
DIV = _arithmetic("DIV", 30, "f1 h2 i3", partial(quietly, np.divide), partial(quietly, np.floor_divide))
RELU = _unary("RELU", 19, "f0 q0 h2 s3", partial(_relu, 1), same_as_input)
RELU1 = _unary("RELU1", 20, "f0 q0 h2 s3", partial(_relu, 2), same_as_input)
RELU6 = _unary("RELU6", 21, "f0 q0 h2 s3", partial(_relu, 3), same_as_input)
LOGISTIC = _unary("LOGISTIC", 14, "f0 q0 h2 s3", partial(smooth, _logistic), OVER_256)
TANH = _unary("TANH", 28, "f0 h2 q2 s3", partial(smooth, np.tanh), OVER_128)
