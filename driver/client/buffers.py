"""The memory of a burst: input sets that take turns, and output sets that are free when no result is held on them.

Each input memory has an output set of its own, and is used again once no result is held on that: so a burst sends as
many different requests as it has pairs, however many it has in flight, and the device knows them all.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from burst import ResultsHeld
from driver.client.burst_requests import CLOSED
from driver.client.layout import Shapes, layouts_of
from driver.client.workspace import InputSet, OutputSet, input_shapes, shapes_of
from driver.fork import unusable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst import Memory, OutputShape, Request
    from burst.controller import Packet
    from driver.nn import Model
    from driver.options import Options

_MOST_SHAPES = 16  # sets of input shapes that one input memory is laid out for
_SPARE = 16  # output sets beyond the depth that results may hold
_SPARE_BYTES = 1 << 24  # inputs that the sets may have which stand beside held results


class EncodedRequest(NamedTuple):
    """A request on one input set and one output set, encoded."""

    inputs: InputSet
    outputs: OutputSet
    request: Request
    packet: Packet


class RequestBuffers(Protocol):
    """The memory of a burst's requests: what a pipeline needs of `Buffers`."""

    inputs: InputSet  #: of the next request, for the shapes that were given last
    lent: InputSet | None  #: of a `run` that gave up waiting: the next request may have them, too

    def fill(self, arrays: Sequence[Any]) -> int:
        """Copy arrays into the inputs, all or none, and return how many bytes that were. Raise ValueError.

        Where the model leaves shapes open, the inputs are laid out for the arrays' shapes first.
        """

    def next_inputs(self) -> None:
        """Make other inputs the present ones: these belong to a request until `give_back`."""

    def give_back(self, inputs: InputSet) -> None:
        """Take inputs back: the request that they belonged to is done with them."""

    def free_outputs(self) -> OutputSet:
        """Return a set that neither the caller holds nor a request writes to. Raise ResultsHeld when there is none."""

    def outputs_for(self, inputs: InputSet) -> OutputSet:
        """Return such a set, the one that these inputs had last if it is free: the device knows that pair."""

    def grow(self, outputs: OutputSet, shapes: tuple[OutputShape, ...]) -> Memory | None:
        """Make room for outputs of these shapes. Return the old memory, or None when there was room already."""

    def requests(self) -> list[EncodedRequest]:
        """Return the encoded requests."""

    def forget_requests(self) -> None:
        """Forget the encoded requests: a new device knows none of them."""

    def close(self) -> None:
        """Free the memory: no request gets any more."""


class Buffers:
    """The memory of a burst's requests, made when it is needed, and kept."""

    def __init__(self, model: Model, shapes: Shapes, depth: int) -> None:
        self._model, self._most = model, depth + _SPARE  #: pairs
        self._in_turn = depth + 2  #: pairs: of requests in flight, of the next one, of a result that is looked at
        self._is_open = layouts_of(model).is_open
        self._layouts: dict[Memory, dict[Shapes, InputSet]] = {}  # the one that was used last comes last
        self._partners: dict[Memory, OutputSet] = {}
        self._outputs: list[OutputSet] = []  # `close` finds none where there was no memory for the inputs
        self.inputs = self._laid_out(InputSet(model, shapes))
        self.lent: InputSet | None = None
        self._free: deque[InputSet] = deque()
        self._last = OutputSet(model)
        self._last.next = self._last
        self._outputs.append(self._last)

    def fill(self, arrays: Sequence[Any]) -> int:
        if self._is_open and (shapes := input_shapes(self._model, arrays)) != self.inputs.shapes:
            self._lay_out(shapes)
        return self.inputs.fill(arrays)

    def _lay_out(self, shapes: Shapes) -> None:
        """Lay the present input memory out for these shapes, or larger memory where it does not suffice."""
        memory = self.inputs.memory
        known = self._layouts[memory]
        found = known.pop(shapes, None)
        if found is None:
            found = InputSet(self._model, shapes, memory)
            if found.memory is not memory:
                self._partners.pop(memory, None)
                for old in self._layouts.pop(memory).values():
                    self._forget(old)
            elif len(known) >= _MOST_SHAPES:
                self._forget(known.pop(next(iter(known))))
        self.inputs = self._laid_out(found)

    def _laid_out(self, inputs: InputSet) -> InputSet:
        self._layouts.setdefault(inputs.memory, {})[inputs.shapes] = inputs
        return inputs

    def _forget(self, inputs: InputSet) -> None:
        for outputs in self._outputs:
            outputs.encoded.pop(inputs, None)

    def next_inputs(self) -> None:
        free, shapes = self._free, self.inputs.shapes
        for n, inputs in enumerate(free):  # usually the first one
            if self._has_free_partner(inputs):
                del free[n]
                self.inputs = inputs
                return
        count = len(self._layouts)
        may_be_more = count < self._most and count * self.inputs.memory.nbytes < _SPARE_BYTES
        is_new = not free or count < self._in_turn or may_be_more
        self.inputs = self._laid_out(InputSet(self._model, shapes)) if is_new else free.popleft()

    def _has_free_partner(self, inputs: InputSet) -> bool:
        outputs = self._partners.get(inputs.memory)
        return outputs is None or not outputs.is_in_use()

    def give_back(self, inputs: InputSet) -> None:
        if inputs is self.lent:
            self.lent = None
        elif inputs is not self.inputs:
            self._free.append(inputs)

    def free_outputs(self) -> OutputSet:
        found = self._last.next  # usually the one that was used longest ago
        while found.is_in_use():
            if found is self._last:
                found = self._new_outputs()
                break
            found = found.next
        self._last = found
        return found

    def outputs_for(self, inputs: InputSet) -> OutputSet:
        found = self._partners.get(inputs.memory)
        if found is None:
            found = self._partners[inputs.memory] = self._unpaired_outputs()
        elif found.is_in_use():
            return self.free_outputs()
        self._last = found
        return found

    def _unpaired_outputs(self) -> OutputSet:
        """Return outputs that are free and no partner of other inputs; else such as are free. Raise ResultsHeld."""
        for outputs in self._outputs:
            if outputs not in self._partners.values() and not outputs.is_in_use():
                return outputs
        return self._new_outputs() if len(self._outputs) < self._most else self.free_outputs()

    def _new_outputs(self) -> OutputSet:
        if len(self._outputs) >= self._most:
            raise ResultsHeld(
                f"all {len(self._outputs)} output buffers are held by the results of requests "
                f"{', '.join(str(number) for number in sorted(o.number for o in self._outputs))}: copy what you keep "
                "(result.outputs[0].copy()) and let the results go"
            )
        new = OutputSet(self._model, max((o.sizes for o in self._outputs), key=sum))
        new.next, self._last.next = self._last.next, new
        self._outputs.append(new)
        return new

    def requests(self) -> list[EncodedRequest]:
        return [encoded for outputs in list(self._outputs) for encoded in list(outputs.encoded.values())]

    def forget_requests(self) -> None:
        for outputs in self._outputs:
            outputs.encoded.clear()

    def close(self) -> None:
        # The output sets refer to each other, and would stay until garbage is collected.
        self.forget_requests()
        self._partners.clear()
        self._last = unusable(_closed)
        for outputs in self._outputs:
            outputs.next = self._last

    __del__ = close

    def grow(self, outputs: OutputSet, shapes: tuple[OutputShape, ...]) -> Memory | None:
        sizes = outputs.needed(shapes)
        if sizes is None:
            return None
        old = outputs.memory
        outputs.lay_out(sizes)
        return old


def buffers_for(model: Model, options: Options) -> Buffers:
    """Return the buffers of a burst with these options. Raise ValueError for shapes that do not fit the model.

    Inputs whose shapes are open and not given stay out until arrays are given.
    """
    if options.input_shapes is not None:
        return Buffers(model, shapes_of(model, options.input_shapes), options.depth)
    return Buffers(model, layouts_of(model).first_shapes, options.depth)


def _closed() -> None:
    raise ValueError(CLOSED)
