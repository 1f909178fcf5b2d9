"""The memory of a burst: input sets that take turns, and output sets that nobody gets while somebody holds them."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from burst import ResultsHeld
from driver.client.workspace import InputSet, OutputSet, Shapes
from driver.fork import lost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst import Memory, OutputShape, Request
    from burst.controller import Packet
    from driver.nn import Model
    from driver.options import Options

_SPARE = 16  # output sets beyond the depth that results may hold


class EncodedRequest(NamedTuple):
    """A request on one input set and one output set, encoded."""

    inputs: InputSet
    outputs: Outputs
    request: Request
    packet: Packet


class Outputs(OutputSet):
    """An output set of a burst."""

    next: Outputs  #: whose turn it is after this one

    def lay_out(self, sizes: Sequence[int]) -> None:
        """As always; requests that were encoded for the old memory are forgotten."""
        super().lay_out(sizes)
        self.number = 0  #: of the request that used it last
        self.is_busy = False  #: a request that is in flight writes to it
        self.encoded: dict[InputSet, EncodedRequest] = {}  #: requests on it


class Buffers:
    """Made as they are needed, and kept."""

    def __init__(self, model: Model, shapes: Shapes, depth: int) -> None:
        self._model, self._shapes, self._most = model, shapes, depth + _SPARE
        self.inputs = InputSet(model, shapes)  #: of the next request
        self.lent: InputSet | None = None  #: that `run` could not wait for, and that the next request may have, too
        self._free: deque[InputSet] = deque()
        self._last = Outputs(model)
        self._last.next = self._last
        self._outputs, self._numbers = [self._last], count(1)
        self._partners: dict[InputSet, Outputs] = {}

    def next_inputs(self) -> None:
        """The present ones belong to a request now; until `give_back`."""
        self.inputs = self._free.popleft() if self._free else InputSet(self._model, self._shapes)

    def give_back(self, inputs: InputSet) -> None:
        """The request that they belonged to is done with them."""
        if inputs is self.lent:
            self.lent = None
        elif inputs is not self.inputs:
            self._free.append(inputs)

    def free_outputs(self) -> Outputs:
        """A set that nobody holds and no request writes to. Raises ResultsHeld when there is none."""
        found = self._last.next  # usually the one that was used longest ago
        while found.is_busy or found.is_held():
            if found is self._last:
                found = self._new_outputs()
                break
            found = found.next
        found.number = next(self._numbers)
        self._last = found
        return found

    def outputs_for(self, inputs: InputSet) -> Outputs:
        """The same, and the one that these inputs had last if it is free: the device knows that pair."""
        found = self._partners.get(inputs)
        if found is None or found.is_busy or found.is_held():
            found = self._partners[inputs] = self.free_outputs()
        else:
            found.number = next(self._numbers)
            self._last = found
        return found

    def _new_outputs(self) -> Outputs:
        if len(self._outputs) >= self._most:
            raise ResultsHeld(
                f"all {len(self._outputs)} output buffers are held by the results of requests "
                f"{', '.join(str(number) for number in sorted(o.number for o in self._outputs))}: copy what you keep "
                "(result.outputs[0].copy()) and let the results go"
            )
        new = Outputs(self._model, max((o.sizes for o in self._outputs), key=sum))
        new.next, self._last.next = self._last.next, new
        self._outputs.append(new)
        return new

    def forget_requests(self) -> None:
        """A new device knows none that was encoded."""
        for outputs in self._outputs:
            outputs.encoded.clear()

    def close(self) -> None:
        """Nobody gets any more. They refer to each other, and would stay until garbage is collected."""
        self.forget_requests()
        self._partners.clear()
        self._last = lost(_closed)
        for outputs in self._outputs:
            outputs.next = self._last

    def grow(self, outputs: Outputs, shapes: tuple[OutputShape, ...]) -> Memory | None:
        """Makes room for outputs of these shapes; the old memory, or None when there was room already."""
        sizes = outputs.needed(shapes)
        if sizes is None:
            return None
        old = outputs.memory
        outputs.lay_out(sizes)
        return old


def buffers_for(model: Model, options: Options) -> Buffers:
    """Of a burst with these options. Raises ValueError for an open shape that the options leave out."""
    if options.input_shapes is not None:
        return Buffers(model, tuple(options.input_shapes), options.depth)
    operands = [model.main.operands[i] for i in model.main.inputs]
    for n, operand in enumerate(operands):
        if not operand.is_known:
            raise ValueError(f"input {n} has the open shape {operand.dimensions}; give it with burst(input_shapes=…)")
    return Buffers(model, tuple(operand.dimensions for operand in operands), options.depth)


def _closed() -> None:
    raise ValueError("this burst is closed; open another")
