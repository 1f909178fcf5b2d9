"""Element by element: arithmetic with broadcasting, comparisons, choices, the activations, and what `unary` needs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..blocks import by_element
from ..model import Operand
from ..operation import ANY_RANK, Array, Call, OperationType, Signature, Tensor, same_as_input
from ..types import Dimensions, OperandType
from .real import accumulator, activation_bounds, load, look_up, quantise, requantise_table, store, table

MAX_RANK = 4
Scaled = Operand | Tensor


def broadcast(a: Dimensions, b: Dimensions) -> Dimensions:
    """Return the dimensions of an element-wise result: trailing dimensions are equal or one of them is 1."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    result = []
    for x, y in pairs:
        if x not in (1, y) and y != 1:
            raise ValueError(f"dimensions {list(a)} and {list(b)} do not broadcast")
        result.append(y if x == 1 else x)
    return tuple(result)


def real_values(call: Call, index: int) -> Array:
    """Return a quantised input as real numbers in float64."""
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


@by_element
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
    """Say why a quantised product cannot be stored: its steps may not be finer than those of the factors."""
    with np.errstate(over="ignore"):
        if np.float32(product.scale) > np.float32(a.scale) * np.float32(b.scale):
            return None
    return f"output scale {product.scale} has to be above the product of the input scales {a.scale} and {b.scale}"


def _mul_check(inputs: Sequence[Operand], outputs: Sequence[Operand]) -> str | None:
    """Return what is wrong with the operands. The signed form passes here and fails in the kernel."""
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
    return OperationType(name, code, (signature,), shape, build=build, takes_empty=True, **more)


def same_shape(call: Call) -> tuple[Dimensions]:
    """Return one output with the dimensions of input 0."""
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


@by_element
def logistic(x: Array, result: Array) -> None:
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
        name, code, (Signature(types, "T"),), same_shape, build=build, quantisation=quantisation, takes_empty=True
    )


OVER_256 = partial(_fixed_quantisation, (1 / 256, 0), (1 / 256, -128))
OVER_128 = partial(_fixed_quantisation, (1 / 128, 128), (1 / 128, 0))


def _pair_shape(call: Call) -> tuple[Dimensions]:
    return (broadcast(call.shape(0), call.shape(1)),)


def _truth(call: Call, index: int) -> Array:
    """Return a TENSOR_BOOL8 input as numpy's booleans: every byte but 0 is true."""
    mask = call.scratch(call.shape(index), np.bool_)
    call.step(np.not_equal, call.array(index), 0, mask)
    return mask


def _compare(function: Callable[..., Any], call: Call) -> None:
    a, b = call.tensor(0), call.tensor(1)
    operand = call.array
    if a.type == OperandType.TENSOR_BOOL8:
        operand = partial(_truth, call)
    elif a.type == OperandType.TENSOR_FLOAT16:
        operand = partial(load, call)
    elif a.type.is_quantised and (a.scale, a.zero_point) != (b.scale, b.zero_point):
        operand = partial(real_values, call)
    call.step(function, operand(0), operand(1), call.outputs[0].data.view(np.bool_))


def _logical(function: Callable[..., Any], call: Call) -> None:
    call.step(function, call.array(0), call.array(1), call.outputs[0].data.view(np.bool_))


def _like_output(call: Call, index: int) -> Array:
    """Return an input in the parameters of the output, if they are quantised."""
    source, out = call.tensor(index), call.outputs[0]
    if not out.type.is_quantised or (source.scale, source.zero_point) == (out.scale, out.zero_point):
        return source.data
    requantised = call.scratch(source.shape, out.data.dtype)
    look_up(call, source, requantise_table(source, out), requantised)
    return requantised


def _extreme(function: Callable[..., Any], call: Call) -> None:
    out = call.outputs[0]
    if out.type == OperandType.TENSOR_FLOAT16:
        wide = call.scratch(out.shape)
        call.step(function, load(call, 0), load(call, 1), out=wide)
        call.step(np.copyto, out.data, wide, casting="unsafe")
    else:
        call.step(function, _like_output(call, 0), _like_output(call, 1), out=out.data)


@by_element
def _blend(chosen: Array, bits: Array, a: Array, b: Array, result: Array) -> None:
    """Write `a` where `chosen`, else `b`; `bits` are integers as wide as the numbers, `result` may be `a`.

    Masked bits take a tenth of the time of numpy's choices, which branch at every element.
    """
    a, b, result = (array.view(bits.dtype) for array in (a, b, result))
    np.negative(chosen.view(np.int8), bits)
    np.bitwise_xor(a, b, result)
    np.bitwise_and(result, bits, result)
    np.bitwise_xor(result, b, result)


@by_element
def _leaky(negative: Array, bits: Array, x: Array, alpha: Array, result: Array) -> None:
    """Write alpha * x where x is negative, else x."""
    np.less(x, 0, negative)
    np.multiply(x, alpha, result)
    _blend(negative, bits, result, x, result=result)


def _prelu(call: Call) -> None:
    shape, width = call.shape(0), np.int64 if call.outputs[0].type.is_quantised else np.int32
    combine(call, partial(_leaky, call.scratch(shape, np.bool_), call.scratch(shape, width)))


def _select_shape(call: Call) -> tuple[Dimensions]:
    shapes = [call.shape(i) for i in range(3)]
    if len(set(shapes)) > 1:
        raise ValueError(f"dimensions {', '.join(str(list(s)) for s in shapes)} have to be the same")
    return (shapes[0],)


def _select(call: Call) -> None:
    out = call.outputs[0].data
    chosen, if_true, if_false = _truth(call, 0), _like_output(call, 1), _like_output(call, 2)
    call.step(_blend, chosen, call.scratch(out.shape, f"i{out.itemsize}"), if_true, if_false, out)


def _pair(name: str, code: int, types: str, build: Callable[[Call], None], output: str = "T") -> OperationType:
    return OperationType(name, code, (Signature(types, "T T", output, ranks=ANY_RANK),), _pair_shape, build=build)


def _comparison(name: str, code: int, function: Callable[..., Any]) -> OperationType:
    return _pair(name, code, "b2 f2 h2 i2 q2 s3", partial(_compare, function), output="b")


OPERATIONS = (
    _arithmetic("ADD", 0, "f0 q0 h2 s3 i3", np.add),
    _arithmetic("MUL", 18, "f0 q0 h2 s3 i3", np.multiply, shape=_mul_shape, check=_mul_check),
    _arithmetic("SUB", 36, "f1 h2 q2 s3 i3", np.subtract),
    _arithmetic("DIV", 30, "f1 h2 i3", partial(quietly, np.divide), integer=partial(quietly, np.floor_divide)),
    _unary("RELU", 19, "f0 q0 h2 s3", partial(_relu, 1), quantisation=same_as_input),
    _unary("RELU1", 20, "f0 q0 h2 s3", partial(_relu, 2), quantisation=same_as_input),
    _unary("RELU6", 21, "f0 q0 h2 s3", partial(_relu, 3), quantisation=same_as_input),
    _unary("LOGISTIC", 14, "f0 q0 h2 s3", partial(smooth, logistic), quantisation=OVER_256),
    _unary("TANH", 28, "f0 h2 q2 s3", partial(smooth, np.tanh), quantisation=OVER_128),
    _comparison("EQUAL", 48, np.equal),
    _comparison("GREATER", 53, np.greater),
    _comparison("GREATER_EQUAL", 54, np.greater_equal),
    _comparison("LESS", 58, np.less),
    _comparison("LESS_EQUAL", 59, np.less_equal),
    _pair("LOGICAL_AND", 61, "b2", partial(_logical, np.logical_and)),
    _pair("LOGICAL_OR", 63, "b2", partial(_logical, np.logical_or)),
    _pair("MAXIMUM", 65, "f2 h2 i2 q2 s3", partial(_extreme, np.maximum)),
    _pair("MINIMUM", 66, "f2 h2 i2 q2 s3", partial(_extreme, np.minimum)),
    _comparison("NOT_EQUAL", 68, np.not_equal),
    _pair("POW", 70, "f2 h2", partial(combine, function=partial(quietly, np.power))),
    _pair("PRELU", 71, "f2 h2 q2 s3", _prelu),
    OperationType(
        "SELECT", 84, (Signature("f2 h2 i2 q2 s2", "b T T", of=1, ranks=ANY_RANK),), _select_shape, build=_select
    ),
)
