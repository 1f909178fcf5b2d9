"""The inputs of an LSTM cell: where each operation has them, which of them belong together, their dimensions."""

from dataclasses import dataclass

from ..operation import Call
from .recurrent import matrix_size, sized

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
        """The number of the input weights of a gate."""
        return self.first + gate

    def recurrent(self, gate: int) -> int:
        """The number of the recurrent weights of a gate."""
        return self.first + 4 + gate

    def peephole(self, gate: int) -> int:
        """The number of the peephole weights of a gate; there is none of CELL."""
        return self.first + 8 + (INPUT, FORGET, None, OUTPUT).index(gate) - (gate == OUTPUT)

    def bias(self, gate: int) -> int:
        """The number of the bias of a gate."""
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
    """The form of a cell that reads `width` elements, and `aux_width` of an auxiliary input, in every step.

    Raises `ValueError` when parts are missing, do not belong together or have other dimensions than they should.
    """
    cells, _ = matrix_size(call, places.weights(FORGET))
    _, units = matrix_size(call, places.recurrent(FORGET))
    gates = _gates(call, places)
    has_peephole = _peephole(call, places, gates)
    has_norm = _all_or_none(call, "layer norm weights", [places.norm + g for g in gates])
    has_projection = call.given(places.projection)
    if not has_projection and call.given(places.projection + 1):
        raise ValueError("a projection bias needs projection weights")
    if not has_projection and units != cells:
        raise ValueError(f"without projection weights the {units} outputs have to be the {cells} cells")
    form = CellForm(gates, has_peephole, has_norm, has_projection, batch, cells, units)
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
