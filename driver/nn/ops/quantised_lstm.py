"""QUANTIZED_LSTM (int8) and QUANTIZED_16BIT_LSTM (uint8): cells in integers, as fixed-point hardware computes them.

Sums of products are taken in floats wide enough to be exact; everything else is int64.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from ..blocks import Look, product
from ..operation import Array, Call, OperationType, Quantisation, Signature, Tensor
from ..types import Dimensions
from .fixed_point import (
    INT8,
    INT16,
    high_product,
    inverse_root,
    logistic,
    quantised_multiplier,
    saturate,
    scaled,
    shift_right,
    tanh,
)
from .real import load
from .recurrent import CELL, FORGET, INPUT, MOST_CELLS, OUTPUT, CellForm, Places, examine, matrix_size, sized
from .sums import weight_matrix

Multiplier = tuple[int, int]
Function = Callable[[Array], Array]

_BLOCK = 1 << 14
"""Elements of the state that are renewed between two looks, at least those of one sequence."""

_PLACES = Places(first=1, states=18, norm=20)


def _ratio(a: float, b: float, c: float) -> Multiplier:
    """Return a * b / c, computed in float32."""
    return quantised_multiplier(float(np.float32(a) * np.float32(b) / np.float32(c)))


def _product(look: Look, x: Array, matrix: Array) -> Array:
    """Return a sum of products of integers that are held as floats."""
    total = np.empty((len(x), matrix.shape[1]), np.result_type(x, matrix))
    product(look, x, matrix, total)
    return total.astype(np.int64)


def _rows(batch: int, cells: int) -> Iterable[slice]:
    """Yield the sequences, as many at a time as make a block: what is computed for each element takes a hundred
    calls.
    """
    count = max(1, _BLOCK // cells)
    return (slice(start, start + count) for start in range(0, batch, count))


def _normalised(weights: Array, bias: Array, scale: Multiplier, x: Array) -> Array:
    """Layer normalisation; `scale` is the multiplier of its result."""
    count = x.shape[-1]
    total = x.sum(-1, keepdims=True) * 1024
    mean = np.sign(total) * (abs(total) // count)
    variance = (np.square(x).sum(-1, keepdims=True) * (2**20 // count) - np.square(mean)) >> 20
    normal = scaled(1024 * x - mean, inverse_root(variance))
    return saturate(scaled(shift_right(normal * weights + bias, 10), scale))


def _gate_value(
    look: Look,
    products: Sequence[tuple[Array, Array, Multiplier]],
    peephole: tuple[Array, Multiplier] | None,
    norm: Function | None,
    squash: Function,
    rows: slice,
    cell: Array,
) -> Array:
    """Compute one gate of some sequences, from products of (values, weights, multiplier), peephole (weights,
    multiplier), norm and activation.
    """
    total = np.zeros_like(cell)
    for values, matrix, multiplier in products:
        look()
        total = saturate(total + scaled(_product(look, values[rows], matrix), multiplier))
    if peephole is not None:
        weights, multiplier = peephole
        total = saturate(total + scaled(cell * weights, multiplier))
    return squash(total if norm is None else norm(total))


def _projected(
    look: Look, matrix: Array, bias: Array | int, multiplier: Multiplier, zero_point: int, limit: int, hidden: Array
) -> Array:
    """Project the hidden state to the output: `zero_point` of the output and its largest size."""
    total = _product(look, hidden.astype(matrix.dtype), matrix) + bias
    return _limited(saturate(scaled(total, multiplier) + zero_point, INT8), limit)


def _step(
    gates: Mapping[int, Callable[[slice, Array], Array]],
    state: Array,
    power: int,
    cell_limit: int,
    hidden_scale: tuple[Multiplier, int],
    projection: Function | None,
    outputs: Sequence[Array],
) -> None:
    """Compute one step of a cell.

    power: log2 of the scale of the cell state. cell_limit: the largest cell state, 0 for any.
    hidden_scale: multiplier and zero point of the hidden state.
    """
    for rows in _rows(*state.shape):
        cell = state[rows].astype(np.int64)
        forget, new = gates[FORGET](rows, cell), gates[CELL](rows, cell)
        enter = gates[INPUT](rows, cell) if INPUT in gates else INT16.max - forget
        cell = saturate(shift_right(forget * cell, 15) + shift_right(enter * new, 30 + power))
        cell = _limited(cell, cell_limit)
        multiplier, zero_point = hidden_scale
        raw = gates[OUTPUT](rows, cell) * tanh(cell, 15 + power)
        hidden = saturate(scaled(raw, multiplier) - zero_point, INT8)
        result = hidden if projection is None else projection(hidden + zero_point)
        for out, value in zip(outputs, (result, cell, result), strict=True):
            np.copyto(out[rows], value, casting="unsafe")


def _limited(x: Array, limit: int) -> Array:
    return x.clip(-limit, limit) if limit else x


def _limit(clip: float, scale: float, largest: int) -> int:
    """Return a clip in units of `scale`; 0 when there is none."""
    if not clip >= 0:
        raise ValueError(f"clip {clip} has to be at least 0")
    return int(min(float(np.float32(clip) / np.float32(scale)), largest))


def _expect(tensor: Tensor, what: str, scale: float, zero_point: int) -> None:
    """Refuse a tensor with another scale or zero point."""
    if (tensor.scale, tensor.zero_point) != (scale, zero_point):
        raise ValueError(
            f"{what} has scale {tensor.scale} and zero point {tensor.zero_point}; "
            f"they have to be {scale} and {zero_point}"
        )


def _form(call: Call) -> CellForm:
    batch, width = matrix_size(call, 0)
    return examine(call, _PLACES, batch, width)


def _power(scale: float) -> int:
    """Return the exponent of the scale of a cell state, which has to be a power of two."""
    power = round(math.log2(scale))
    if abs(math.log2(scale) - power) > 1e-3 or not -15 <= power <= -9:
        raise ValueError(f"the scale {scale} of the cell state has to be a power of two in 2^-15..2^-9")
    return power


def _shape(call: Call) -> Sequence[Dimensions]:
    _form(call)
    states = [call.tensor(_PLACES.states + i) for i in (0, 1, 0)]
    for number, (out, state) in enumerate(zip(call.outputs, states, strict=True)):
        _expect(out, f"output {number}", state.scale, state.zero_point)
    _power(states[1].scale)
    return tuple(state.shape for state in states)


def _gate(call: Call, form: CellForm, gate: int) -> Callable[[slice, Array], Array]:
    """Return a gate whose sums of products have the scale that the operation names."""
    scale = call.real(26 + gate)
    products = []
    for values, index in ((0, _PLACES.weights(gate)), (_PLACES.states, _PLACES.recurrent(gate))):
        matrix = call.pack(index, weight_matrix)
        multiplier = _ratio(call.tensor(index).scale, call.tensor(values).scale, scale)
        products.append((load(call, values, dtype=matrix.dtype), matrix, multiplier))
    peephole = norm = None
    if form.has_peephole and gate != CELL:
        weights = call.tensor(_PLACES.peephole(gate))
        peephole = weights.data, _ratio(call.tensor(_PLACES.states + 1).scale, weights.scale, scale)
    if form.has_norm:
        weights = call.tensor(_PLACES.norm + gate)
        factor = quantised_multiplier(weights.scale * 2**12)
        norm = partial(_normalised, weights.data, call.array(_PLACES.bias(gate)), factor)
    return partial(_gate_value, call.look, products, peephole, norm, tanh if gate == CELL else logistic)


def _projection(call: Call, hidden_scale: float) -> Function | None:
    index, clip = _PLACES.projection, call.real(25)
    weights = call.inputs[index]
    limit = _limit(clip, 1.0 if weights is None else weights.scale, INT8.max)
    if weights is None:
        return None
    state = call.tensor(_PLACES.states)
    bias = call.array(index + 1) if call.given(index + 1) else 0
    multiplier = _ratio(weights.scale, hidden_scale, state.scale)
    return partial(_projected, call.look, call.pack(index, weight_matrix), bias, multiplier, state.zero_point, limit)


def _build(call: Call) -> None:
    form, state = _form(call), call.tensor(_PLACES.states + 1)
    zero_point, scale = (call.integer(30) + 128) % 256 - 128, call.real(31)
    call.step(
        _step,
        gates={gate: _gate(call, form, gate) for gate in form.gates},
        state=state.data,
        power=_power(state.scale),
        cell_limit=_limit(call.real(24), state.scale, INT16.max),
        hidden_scale=(_ratio(2.0**-30, 1.0, scale), zero_point),
        projection=_projection(call, scale),
        outputs=[out.data for out in call.outputs],
    )


def _square_shape(call: Call) -> Sequence[Dimensions]:
    """Return the shapes of QUANTIZED_16BIT_LSTM: outputs are the states, inputs 13 and 14; all parameters are
    prescribed.
    """
    (batch, width), (units, _) = matrix_size(call, 0), matrix_size(call, 1)
    sized(call, dict.fromkeys(range(1, 5), (units, width)) | dict.fromkeys(range(5, 9), (units, units)))
    sized(call, dict.fromkeys(range(9, 13), (units,)) | {13: (batch, units), 14: (batch, units)})
    weights = call.tensor(1)
    _prescribed(call, {0: _VALUES, 13: _CELL_STATE, 14: _VALUES})
    _prescribed(call, dict.fromkeys(range(2, 9), (weights.scale, weights.zero_point)))
    _prescribed(call, dict.fromkeys(range(9, 13), (weights.scale / 128, 0)))
    return call.shape(13), call.shape(14)


def _prescribed(call: Call, parameters: Mapping[int, tuple[float, int]]) -> None:
    for index, (scale, zero_point) in parameters.items():
        _expect(call.tensor(index), f"input {index}", scale, zero_point)


def _square_step(
    look: Look,
    values: Array,
    gates: Sequence[tuple[Array, Array, Array]],
    multiplier: Multiplier,
    state: Array,
    cell_out: Array,
    result_out: Array,
) -> None:
    """Compute one step of a cell of QUANTIZED_16BIT_LSTM.

    values: input and last output side by side. gates: of INPUT, FORGET, CELL and OUTPUT, the recurrent weights above
    the input weights, and the bias.

    The weights stand in the opposite order of the values they are multiplied with. Models are made for that.
    """

    for rows in _rows(*state.shape):
        given = values[rows]

        def total(recurrent: Array, weights: Array, bias: Array, given: Array = given) -> Array:
            look()
            split = len(recurrent)
            products = _product(look, given[:, :split], recurrent) + _product(look, given[:, split:], weights)
            return saturate(scaled(products + bias, multiplier))

        enter, forget, new, emit = (squash(total(*gate)) for gate, squash in zip(gates, _SQUASHES, strict=True))
        cell = state[rows].astype(np.int64)
        cell = saturate(shift_right(high_product(enter, new, 15), 4) + high_product(forget, cell, 15))
        result = high_product(emit, tanh(saturate(cell * 2)), 15)
        np.copyto(cell_out[rows], cell, casting="unsafe")
        np.copyto(result_out[rows], 128 + saturate(shift_right(result, 8), INT8), casting="unsafe")


def _square_build(call: Call) -> None:
    batch, width = call.shape(0)
    units = call.shape(14)[1]
    if units > MOST_CELLS:
        raise ValueError(f"a state of {units} elements is more than {MOST_CELLS}")
    gates = [(call.pack(5 + g, weight_matrix), call.pack(1 + g, weight_matrix), call.array(9 + g)) for g in range(4)]
    values = call.scratch((batch, width + units), np.result_type(*gates[0][:2]))
    for index, part in ((0, values[:, :width]), (14, values[:, width:])):
        call.step(np.subtract, call.array(index), 128.0, part)
    multiplier = quantised_multiplier(4096 * call.tensor(9).scale)
    call.step(
        _square_step, call.look, values, gates, multiplier, call.array(13), *(tensor.data for tensor in call.outputs)
    )


_SQUASHES = (logistic, logistic, tanh, logistic)
_VALUES = 1 / 128, 128
_CELL_STATE = 2.0**-11, 0


def _always(scale: float, zero_point: int) -> Quantisation:
    return lambda _source, _result: (scale, zero_point)


OPERATIONS = (
    OperationType(
        "QUANTIZED_LSTM",
        95,
        (
            Signature(
                "s3",
                "s y? 3*y y? 3*y 3*w? i? 3*i y? i? s w 4*w? 2*FLOAT32 4*FLOAT32 INT32 FLOAT32",
                "s w s",
                ranks=(2,),
            ),
        ),
        _shape,
        build=_build,
        pack=dict.fromkeys((*range(1, 9), 16), weight_matrix),
    ),
    OperationType(
        "QUANTIZED_16BIT_LSTM",
        73,
        (Signature("q2", "9*q 4*i w q", "w q", ranks=(2,)),),
        _square_shape,
        build=_square_build,
        quantisation=(_always(*_CELL_STATE), _always(*_VALUES)),
        pack=dict.fromkeys(range(1, 9), weight_matrix),
    ),
)
