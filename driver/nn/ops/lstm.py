"""LSTM, UNIDIRECTIONAL_SEQUENCE_LSTM, BIDIRECTIONAL_SEQUENCE_LSTM: one cell, whose inputs stand in different places."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..blocks import ELEMENTS, Look, product
from ..operation import Array, Call, OperationType, Signature
from ..types import Dimensions
from .elementwise import logistic
from .real import accumulator, load
from .recurrent import (
    CELL,
    FORGET,
    INPUT,
    OUTPUT,
    Activation,
    CellForm,
    Places,
    activation,
    add_products,
    batch_size,
    both_outputs,
    examine,
    flat,
    give,
    halves,
    linked,
    ordered,
    ranked,
    stacked,
    time_axis,
    weights,
    with_states,
)
from .sums import weight_matrix

TINY = 1e-8
"""What layer normalisation adds to a variance, which may be 0."""

BLOCK = 1 << 19
"""Elements that enter the gates in the steps of one block, unless a single step has more."""

_ORDER = (CELL, INPUT, FORGET, OUTPUT)
"""The gates as they are computed: one that takes the activation, then those that take the sigmoid."""

SINGLE = Places(first=1, states=18, norm=23)
_SEQUENCE = Places(first=1, states=18, norm=24)
_FORWARD = Places(first=1, states=35, norm=53, aux=40)
_BACKWARD = Places(first=18, states=37, norm=57, aux=44)
_AUX = 39


@dataclass(frozen=True)
class _Settings:
    """The scalars of an operation: `act` is for cell gate and cell state; a clip of 0 is none."""

    act: Activation
    cell_clip: float
    projection_clip: float

    @classmethod
    def of(cls, call: Call, first: int) -> "_Settings":
        """Read activation code, cell clip and projection clip, inputs `first` and following."""
        clips = [call.real(first + 1), call.real(first + 2)]
        if not all(clip >= 0 for clip in clips):
            raise ValueError(f"cell clip and projection clip {clips} have to be at least 0")
        return cls(activation(call.integer(first)), *clips)


@dataclass(frozen=True)
class LstmDirection:
    """One pass over a sequence: the cell, the inputs it reads, the axis of time and whether time runs backward."""

    places: Places
    axis: int
    source: int = 0
    aux: int | None = None
    backward: bool = False

    def form(self, call: Call) -> CellForm:
        """Return the form of the cell, after a look at all its inputs."""
        aux_width = None if self.aux is None else call.shape(self.aux)[-1]
        return examine(call, self.places, batch_size(call, self.axis), call.shape(self.source)[-1], aux_width=aux_width)

    def blocks(self, time: int, length: int) -> Iterable[slice]:
        """Yield the steps in blocks of `length`, in the order in which they are walked."""
        starts = range(0, time, length)
        return (slice(i, i + length) for i in (reversed(starts) if self.backward else starts))

    def turned(self, steps: Array) -> Array:
        """Consecutive steps, time first, in the order in which they are walked."""
        return steps[::-1] if self.backward else steps

    def products(self, gate: int) -> list[tuple[int, int]]:
        """Return the inputs that enter a gate in every step."""
        own = [(self.source, self.places.weights(gate))]
        return own if self.aux is None or self.places.aux is None else [*own, (self.aux, self.places.aux + gate)]


@dataclass(frozen=True)
class _FloatCell:
    """A cell bound to arrays. Gates are in `_ORDER`; peepholes are those of all but the cell gate.

    state: the cell state, from step to step. gates: room for those of one step.
    norm: weights and biases; without it, biases are in what enters the gates.
    projection: weights, bias and room for what they project.
    """

    settings: _Settings
    state: Array
    gates: Array
    recurrent: Sequence[Array]
    peephole: Array | None
    norm: tuple[Array, Array] | None
    projection: tuple[Array, Array | None, Array] | None

    def run(self, look: Look, last: Array, sums: Array, results: Array) -> None:
        """Compute some steps, as many sequences at once as one call of numpy may go over.

        last: the output before them. sums: what enters the gates [time, gates, batch, cells], but for the recurrence.
        results: their outputs [time, batch, units].
        """
        gates, batch, cells = self.gates.shape
        count = max(1, ELEMENTS // (4 * gates * cells))
        if count >= batch:
            self._run(look, last, sums, results)
            return
        for start in range(0, batch, count):
            rows = slice(start, start + count)
            self._of(rows)._run(look, last[rows], sums[:, :, rows], results[:, rows])

    def _of(self, rows: slice) -> "_FloatCell":
        """Return the same cell for some of the sequences."""
        projection = self.projection and (*self.projection[:2], self.projection[2][rows])
        return replace(self, state=self.state[rows], gates=self.gates[:, rows], projection=projection)

    def _run(self, look: Look, last: Array, sums: Array, results: Array) -> None:
        often = max(1, ELEMENTS // max(self.gates.size, sum(weight.size for weight in self.recurrent)))
        for number, (entering, result) in enumerate(zip(sums, results, strict=True)):
            if number % often == 0:
                look()
            for weight, gate in zip(self.recurrent, self.gates, strict=True):
                product(look, last, weight, gate)
            np.add(self.gates, entering, self.gates)
            self._renew_state()
            if self.projection is None:
                self._emit(result)
            else:
                self._project(look, *self.projection, result)
            last = result

    def _renew_state(self) -> None:
        """Make the new cell state from the gates; the output gate waits for that when it has a peephole."""
        gates, cell = self.gates, self.state
        last = len(gates) - (self.peephole is not None)
        if self.peephole is not None:
            gates[1:last] += self.peephole[:-1] * cell
        self._normalise(slice(0, last))
        self.settings.act(gates[0], gates[0])
        logistic(gates[1:last], gates[1:last])
        new, forget = gates[0], gates[-2]
        np.multiply(cell, forget, cell)
        enter = gates[1] if len(gates) == len(_ORDER) else np.subtract(1.0, forget, forget)
        np.multiply(new, enter, new)
        np.add(cell, new, cell)
        _clip(cell, self.settings.cell_clip)

    def _emit(self, result: Array) -> None:
        """Make what the cell gives from its new state and the output gate, in `result`."""
        gates = self.gates
        if self.peephole is not None:
            gates[-1] += self.peephole[-1] * self.state
            self._normalise(slice(len(gates) - 1, None))
            logistic(gates[-1], gates[-1])
        self.settings.act(self.state, gates[0])
        np.multiply(gates[0], gates[-1], result)

    def _project(self, look: Look, matrix: Array, bias: Array | None, hidden: Array, result: Array) -> None:
        self._emit(hidden)
        product(look, hidden, matrix, result)
        if bias is not None:
            np.add(result, bias, result)
        _clip(result, self.settings.projection_clip)

    def _normalise(self, which: slice) -> None:
        if self.norm is None:
            return
        part, (weight, bias) = self.gates[which], self.norm
        part -= part.mean(-1, keepdims=True)
        part /= np.sqrt(np.square(part).mean(-1, keepdims=True) + TINY)
        part *= weight[which]
        part += bias[which]


def _clip(array: Array, limit: float) -> None:
    if limit > 0:
        array.clip(-limit, limit, array)


def _projection(call: Call, places: Places, form: CellForm) -> tuple[Array, Array | None, Array] | None:
    if not form.has_projection:
        return None
    bias = places.projection + 1
    hidden = call.scratch((form.batch, form.cells))
    return weights(call, places.projection), load(call, bias) if call.given(bias) else None, hidden


def _cell(
    call: Call, places: Places, form: CellForm, order: Sequence[int], settings: _Settings, biases: Array
) -> _FloatCell:
    return _FloatCell(
        settings,
        call.scratch((form.batch, form.cells)),
        call.scratch((len(order), form.batch, form.cells)),
        [weights(call, places.recurrent(g)) for g in order],
        peephole=stacked(call, (places.peephole(g) for g in order[1:])) if form.has_peephole else None,
        norm=(stacked(call, (places.norm + g for g in order)), biases) if form.has_norm else None,
        projection=_projection(call, places, form),
    )


def _pass(
    call: Call, sources: Mapping[int, Array], way: LstmDirection, settings: _Settings, view: Array
) -> tuple[Array, Array]:
    """Append one pass over a sequence that writes to `view` [.., .., units], and return its final states.

    It goes in blocks of so many steps that what enters their gates stays in the cache.
    """
    form, places = way.form(call), way.places
    order = [g for g in _ORDER if g in form.gates]
    biases = stacked(call, (places.bias(g) for g in order))
    cell, result = _cell(call, places, form, order, settings=settings, biases=biases), accumulator(call, view)
    products = [[(sources[x], weights(call, w)) for x, w in way.products(g)] for g in order]
    length = max(1, BLOCK // (len(order) * form.batch * form.cells))
    last, outputs = load(call, places.states), np.moveaxis(result, way.axis, 0)
    call.step(np.copyto, cell.state, load(call, places.states + 1))
    for block in way.blocks(len(outputs), length):
        steps = (slice(None),) * (way.axis + 3) + (block,)
        sums = call.shared("sums", (len(order), *result[steps].shape[:-1], form.cells), np.float32)
        for pairs, total in zip(products, sums, strict=True):
            add_products(call, *_aligned([(x[steps], matrix) for x, matrix in pairs], total))
        if not form.has_norm:
            call.step(np.add, sums, biases[:, None], sums)
        results = way.turned(outputs[block])
        call.step(cell.run, call.look, last, way.turned(np.moveaxis(sums, way.axis, 0)), results)
        last = results[-1]
    give(call, view, result)
    return last, cell.state


def _aligned(pairs: list[tuple[Array, Array]], total: Array) -> tuple[list[tuple[Array, Array]], Array]:
    """Return the arguments of `add_products`, as matrices where all steps of a block lie in order."""
    if not all(x.flags.c_contiguous for x, _ in pairs):
        return pairs, total
    return [(flat(x), matrix) for x, matrix in pairs], flat(total)


def _single_shape(call: Call) -> Sequence[Dimensions]:
    _Settings.of(call, 20)
    ranked(call, 2)
    form = LstmDirection(SINGLE, time_axis(True)).form(call)
    state, cell = (form.batch, form.units), (form.batch, form.cells)
    return ((form.batch, len(form.gates) * form.cells), state, cell, state)


def _single(call: Call) -> None:
    scratch, state_out, cell_out, output = (tensor.data for tensor in call.outputs)
    way = LstmDirection(SINGLE, time_axis(True))
    state, cell = _pass(call, {0: ordered(call, 0)[None]}, way, _Settings.of(call, 20), view=output[None])
    give(call, state_out, state)
    give(call, cell_out, cell)
    call.step(scratch.fill, 0)


def sequence_way(call: Call) -> LstmDirection:
    """Return the pass of UNIDIRECTIONAL_SEQUENCE_LSTM."""
    return LstmDirection(_SEQUENCE, time_axis(call.flag(23)))


def _sequence_shape(call: Call) -> Sequence[Dimensions]:
    _Settings.of(call, 20)
    ranked(call, 3)
    form = sequence_way(call).form(call)
    return ((*call.shape(0)[:2], form.units), call.shape(18), call.shape(19))[: len(call.outputs)]


def _sequence(call: Call) -> None:
    states = _pass(call, {0: ordered(call, 0)}, sequence_way(call), _Settings.of(call, 20), view=call.outputs[0].data)
    for tensor, state in zip(call.outputs[1:], states, strict=False):
        give(call, tensor.data, state)


def both_ways(call: Call) -> tuple[LstmDirection, LstmDirection]:
    """Return the two passes of BIDIRECTIONAL_SEQUENCE_LSTM."""
    is_crossed, source = linked(call, _AUX, (40 + FORGET, 44 + FORGET))
    axis, aux = time_axis(call.flag(52)), _AUX if is_crossed else None
    return LstmDirection(_FORWARD, axis, 0, aux), LstmDirection(_BACKWARD, axis, source, aux, backward=True)


def _both_shape(call: Call) -> Sequence[Dimensions]:
    _Settings.of(call, 48)
    ranked(call, 3)
    forward, backward = (way.form(call).units for way in both_ways(call))
    sequences = both_outputs(call, call.flag(51), forward, backward)
    return (*sequences, *(call.shape(i) for i in range(35, 39)))[: len(call.outputs)]


def _both(call: Call) -> None:
    settings, ways = _Settings.of(call, 48), both_ways(call)
    sources = {i: ordered(call, i) for i in {i for way in ways for i, _ in way.products(FORGET)}}
    views = halves(call, call.flag(51), call.shape(35)[-1])
    passes = [_pass(call, sources, way, settings, view=view) for way, view in zip(ways, views, strict=True)]
    if len(call.outputs) > 2:
        for tensor, state in zip(call.outputs[-4:], (s for states in passes for s in states), strict=True):
            give(call, tensor.data, state)


_PARTS = "T? 3*T T? 3*T 4*T? 3*T 2*T?"
"""The 17 inputs of a cell that stand together."""

_PACKED = (*range(1, 9), 16)


OPERATIONS = (
    OperationType(
        "LSTM",
        16,
        (Signature("f0 h2", f"T {_PARTS} 2*T INT32 2*S", "T T T T", ((2, "4*T?"),), ranks=(2,)),),
        _single_shape,
        build=_single,
        pack=dict.fromkeys(_PACKED, weight_matrix),
    ),
    OperationType(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        92,
        with_states(f"T {_PARTS} 2*T INT32 2*S BOOL 4*T?", (("T", "T T T"),)),
        _sequence_shape,
        build=_sequence,
        pack=dict.fromkeys(_PACKED, weight_matrix),
    ),
    OperationType(
        "BIDIRECTIONAL_SEQUENCE_LSTM",
        42,
        with_states(
            f"T {_PARTS} {_PARTS} 4*T T? 8*T? INT32 2*S 2*BOOL 8*T?", (("T", "T T T T T"), ("T T", "T T T T T T"))
        ),
        _both_shape,
        build=_both,
        pack=dict.fromkeys((*_PACKED, *(17 + i for i in _PACKED), *range(40, 48)), weight_matrix),
    ),
)
