"""What the recurrent operations share: activations, the axis of time, auxiliary inputs, products with weights.

Then the inputs of an LSTM cell: where each operation has them, which of them belong together, their dimensions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..blocks import by_element
from ..operation import Array, Call, Signature
from ..types import Dimensions
from .elementwise import logistic
from .real import load
from .sums import weight_matrix

Activation = Callable[[Array, Array], Any]
"""Writes the activation of its first argument to its second, which may be the same array."""

Products = Sequence[tuple[int, int]]
"""(input, weights) pairs by their numbers: what is multiplied and added up before the recurrence."""


@by_element
def _relu(x: Array, out: Array) -> None:
    np.maximum(x, 0.0, out=out)


@by_element
def _relu6(x: Array, out: Array) -> None:
    x.clip(0.0, 6.0, out)


_ACTIVATIONS: dict[int, Activation] = {
    0: np.positive,
    1: _relu,
    3: _relu6,
    4: np.tanh,
    6: logistic,
}


def activation(code: int) -> Activation:
    """Return the function of an activation code as recurrent operations count them."""
    if code not in _ACTIVATIONS:
        raise ValueError(
            f"activation {code} does not exist; use 0 (NONE), 1 (RELU), 3 (RELU6), 4 (TANH) or 6 (SIGMOID)"
        )
    return _ACTIVATIONS[code]


def sized(call: Call, expected: Mapping[int, Dimensions]) -> None:
    """Refuse inputs that are given with other dimensions than `expected`."""
    for index, dimensions in expected.items():
        if call.given(index) and call.shape(index) != dimensions:
            raise ValueError(f"input {index} has dimensions {list(call.shape(index))} instead of {list(dimensions)}")


def matrix_size(call: Call, index: int) -> tuple[int, int]:
    """Return the dimensions of an input that has to be a matrix."""
    shape = call.shape(index)
    if len(shape) != 2:
        raise ValueError(f"input {index} has dimensions {list(shape)}; it has to be a matrix")
    return shape[0], shape[1]


def ranked(call: Call, rank: int) -> None:
    """Refuse an input 0 of another rank, which may have been unknown until now."""
    if len(call.shape(0)) != rank:
        raise ValueError(f"input 0 has dimensions {list(call.shape(0))}; its rank has to be {rank}")


def time_axis(time_major: bool) -> int:
    """Return the axis of time, counted from the end so that it is the same whatever stands before."""
    return -3 if time_major else -2


def batch_size(call: Call, axis: int) -> int:
    """Return how many sequences input 0 holds when `axis` is that of time; a matrix holds one step of each."""
    return call.shape(0)[-5 - axis]


def with_states(inputs: str, outputs: Iterable[tuple[str, str]]) -> tuple[Signature, ...]:
    """Return the signatures of an operation on sequences: pairs of outputs without and, since HAL 1.3, with the final
    states.
    """
    return tuple(
        Signature(types, inputs, slots, ranks=(3,))
        for pair in outputs
        for types, slots in zip(("f2 h2", "f3 h3"), pair, strict=True)
    )


def linked(call: Call, aux: int, weights: tuple[int, int]) -> tuple[bool, int]:
    """Say how the auxiliary input of a bidirectional operation is used, by what is given of it and its two weights.

    Returns whether both directions add its product with their auxiliary weights, and the input that the backward
    direction reads.
    """
    has_aux, forward, backward = (call.given(i) for i in (aux, *weights))
    if forward != backward or forward > has_aux:
        raise ValueError(
            f"auxiliary weights {list(weights)} go with auxiliary input {aux}: give all three, the input alone, or none"
        )
    if has_aux and call.shape(aux)[:-1] != call.shape(0)[:-1]:
        raise ValueError(
            f"input {aux} of dimensions {list(call.shape(aux))} differs from {list(call.shape(0))} in its sequences"
        )
    return forward, aux if has_aux and not forward else 0


def both_outputs(call: Call, is_merged: bool, forward: int, backward: int) -> tuple[Dimensions, ...]:
    """Return the dimensions of the sequences of a bidirectional operation: one with both results in it, or two."""
    if is_merged != len(call.outputs) % 2:
        raise ValueError(f"merge is {is_merged}, which does not go with {len(call.outputs)} outputs")
    head = call.shape(0)[:2]
    return ((*head, forward + backward),) if is_merged else ((*head, forward), (*head, backward))


def halves(call: Call, is_merged: bool, forward: int) -> tuple[Array, Array]:
    """Return where the two directions write their sequences, the forward one `forward` wide."""
    first = call.outputs[0].data
    return (first[..., :forward], first[..., forward:]) if is_merged else (first, call.outputs[1].data)


def ordered(call: Call, index: int) -> Array:
    """Input `index` as float32, its elements in order."""
    source = load(call, index)
    if source.flags.c_contiguous:
        return source
    copy = call.scratch(source.shape)
    call.step(np.copyto, copy, source)
    return copy


def flat(array: Array) -> Array:
    """`array`, its elements in order, as a matrix with a row for each step of each sequence."""
    return array.reshape(-1, array.shape[-1])


def weights(call: Call, index: int) -> Array:
    """Return the weights [outputs, inputs] transposed, as float32; laid out anew only where that is done once."""
    return call.pack(index, weight_matrix) if call.tensor(index).fixed else load(call, index).T


def add_products(call: Call, pairs: Sequence[tuple[Array, Array]], result: Array) -> None:
    """Write the sum of the products of all `pairs`, [.., inputs] and [inputs, outputs], to `result` [.., outputs]."""
    for n, (source, matrix) in enumerate(pairs):
        part = result if n == 0 else call.shared("product", result.shape, np.float32)
        call.step(np.matmul, source, matrix, part)
        if n:
            call.step(np.add, result, part, result)


def stacked(call: Call, indices: Iterable[int]) -> Array:
    """Return the vectors one above the other, as float32 [vectors, 1, elements]."""
    vectors = [call.tensor(i) for i in indices]
    stack = np.empty((len(vectors), 1, *vectors[0].shape), np.float32)  # and no scratch: constants stay in it
    for row, vector in zip(stack, vectors, strict=True):
        if vector.fixed:
            np.copyto(row[0], vector.data)
        else:
            call.step(np.copyto, row[0], vector.data)
    return stack


def give(call: Call, view: Array, result: Array) -> None:
    """Copy `result` to its place in an output unless it is there already."""
    if result is not view:
        call.step(np.copyto, view, result, casting="unsafe")


MOST_CELLS = 1 << 18
"""Elements of the state of one sequence, all of which are renewed at once."""

INPUT, FORGET, CELL, OUTPUT = range(4)
"""The gates, in the order in which operations list them."""


@dataclass(frozen=True)
class Places:
    """The numbers of a cell's inputs among those of an operation.

    first: of 17 that stand in the same order everywhere: input weights and recurrent weights of the four gates,
        peepholes of three, biases of four, projection weights and bias.
    states: output state and cell state.
    norm: layer normalisation weights of the four gates.
    aux: weights of the four gates for an auxiliary input.
    """

    first: int
    states: int
    norm: int
    aux: int | None = None

    def weights(self, gate: int) -> int:
        """Return the number of the input weights of a gate."""
        return self.first + gate

    def recurrent(self, gate: int) -> int:
        """Return the number of the recurrent weights of a gate."""
        return self.first + 4 + gate

    def peephole(self, gate: int) -> int:
        """Return the number of the peephole weights of a gate; there is none of CELL."""
        return self.first + 8 + (INPUT, FORGET, None, OUTPUT).index(gate) - (gate == OUTPUT)

    def bias(self, gate: int) -> int:
        """Return the number of the bias of a gate."""
        return self.first + 11 + gate

    @property
    def projection(self) -> int:
        """The number of the projection weights; their bias follows."""
        return self.first + 15


@dataclass(frozen=True)
class CellForm:
    """Which parts a cell has, and its sizes.

    gates: those it has; without INPUT the input gate is coupled to the forget gate.
    cells, units: elements of the cell state and of the output of one sequence.
    """

    gates: tuple[int, ...]
    has_peephole: bool
    has_norm: bool
    has_projection: bool
    batch: int
    cells: int
    units: int


def examine(call: Call, places: Places, batch: int, width: int, aux_width: int | None = None) -> CellForm:
    """Return the form of a cell that reads `width` elements, and `aux_width` of an auxiliary input, in every step.

    Raise `ValueError` when parts are missing, do not belong together or have other dimensions than they should.
    """
    cells, _ = matrix_size(call, places.weights(FORGET))
    if cells > MOST_CELLS:
        raise ValueError(f"a state of {cells} elements is more than {MOST_CELLS}")
    _, units = matrix_size(call, places.recurrent(FORGET))
    gates = _gates(call, places)
    has_peephole = _peephole(call, places, gates)
    has_norm = _all_or_none(call, "layer norm weights", [places.norm + g for g in gates])
    has_projection = call.given(places.projection)
    if not has_projection and call.given(places.projection + 1):
        raise ValueError("a projection bias needs projection weights")
    if not has_projection and units != cells:
        raise ValueError(f"without projection weights the {units} outputs have to be the {cells} cells")
    form = CellForm(gates, has_peephole, has_norm, has_projection, batch=batch, cells=cells, units=units)
    _check_sizes(call, places, form, width)
    if places.aux is not None:
        _check_aux(call, places.aux, form, aux_width)
    return form


def _gates(call: Call, places: Places) -> tuple[int, ...]:
    has_input = call.given(places.weights(INPUT))
    coupled = not has_input
    if call.given(places.recurrent(INPUT)) != has_input or call.given(places.bias(INPUT)) != has_input:
        raise ValueError("weights, recurrent weights and bias of the input gate have to be given or omitted together")
    if coupled and call.given(places.norm + INPUT):
        raise ValueError("a cell without input gate has no layer norm weights for it")
    return (FORGET, CELL, OUTPUT) if coupled else (INPUT, FORGET, CELL, OUTPUT)


def _peephole(call: Call, places: Places, gates: tuple[int, ...]) -> bool:
    needed = [places.peephole(g) for g in gates if g != CELL]
    has_peephole = _all_or_none(call, "peephole weights", needed)
    if call.given(places.peephole(INPUT)) and not has_peephole:
        raise ValueError("peephole weights of the input gate need those of the other gates")
    return has_peephole


def _all_or_none(call: Call, what: str, indices: list[int]) -> bool:
    given = [call.given(i) for i in indices]
    if any(given) != all(given):
        raise ValueError(f"{what}, inputs {indices}, have to be given or omitted together")
    return all(given)


def _check_sizes(call: Call, places: Places, form: CellForm, width: int) -> None:
    vector = (form.cells,)
    for gate in range(4):
        sized(call, {places.weights(gate): (form.cells, width), places.recurrent(gate): (form.cells, form.units)})
        sized(call, {places.bias(gate): vector, places.norm + gate: vector})
        if gate != CELL:
            sized(call, {places.peephole(gate): vector})
    sized(call, {places.projection: (form.units, form.cells), places.projection + 1: (form.units,)})
    sized(call, {places.states: (form.batch, form.units), places.states + 1: (form.batch, form.cells)})


def _check_aux(call: Call, first: int, form: CellForm, width: int | None) -> None:
    """Auxiliary weights have to be there for the gates that the cell has, or for none."""
    needed = () if width is None else form.gates
    for gate in range(4):
        if call.given(first + gate) != (gate in needed):
            raise ValueError(f"auxiliary weights, inputs {first}..{first + 3}, have to be given for gates {needed}")
        if width is not None:
            sized(call, {first + gate: (form.cells, width)})
