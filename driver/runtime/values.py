"""Values between the parts of a model that are executed one after the other in this process: where each lies, and its
shape, which may be known only once it is there.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np

from burst import ErrorStatus, GeneralFailure, HardwareBuffer, Memory, Request, RequestArgument, Result
from burst.memory import VendorMemory
from driver.client.layout import nbytes
from driver.client.workspace import FreeList
from driver.nn import combine_dimensions
from driver.runtime.places import check_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from driver.client.job import Job
    from driver.nn import Model, Operand

Way: TypeAlias = "Callable[[Job], Result]"
"""A `perform` of an executor."""

_LEAST = 64  # bytes of a temporary
_GUESS = 4096  # bytes for a value whose size only its execution tells
_MOST_TRIES = 16


class StepValue(NamedTuple):
    """A value, or the place of one that is to come. `pool` None: it is omitted."""

    pool: Any
    offset: int = 0
    length: int = 0
    shape: tuple[int, ...] = ()  #: 0 where it is not known
    is_empty: bool = False  #: it is there, and has no elements
    is_elsewhere: bool = False  #: its place was too small for it, or it had none

    @classmethod
    def of(cls, argument: RequestArgument, pools: Sequence[Any], operand: Operand) -> Self:
        """Return what an argument of a request names."""
        if argument.has_no_value:
            return cls(None)
        shape = combine_dimensions(operand.dimensions, argument.dimensions) or ()
        return cls(pools[argument.pool], argument.offset, argument.length, shape)

    def view(self, size: int) -> NDArray[np.uint8]:
        """Return its bytes. Raise GeneralFailure for memory that only a driver reads."""
        if not isinstance(self.pool, Memory) or isinstance(self.pool, VendorMemory):
            raise GeneralFailure(f"{self.pool!r:.80} cannot be read in this process; IF and WHILE need memory that can")
        if isinstance(self.pool, HardwareBuffer):
            return np.ascontiguousarray(self.pool.read()).reshape(-1).view(np.uint8)[:size]
        return self.pool.asarray(np.uint8, size, self.offset)

    @contextmanager
    def accessed(self, size: int, *, writes: bool = False) -> Iterator[NDArray[np.uint8]]:
        """Give its bytes, which the processor reads or writes meanwhile. Raise GeneralFailure."""
        view, needs_sync = self.view(size), isinstance(self.pool, Memory) and self.pool.needs_sync
        if needs_sync:
            self.pool.begin(writes=writes)
        try:
            yield view
        finally:
            if needs_sync:
                self.pool.end(writes=writes)


class Rooms:
    """Memory for temporaries, used again by later executions. Any thread."""

    def __init__(self) -> None:
        self._free: FreeList[Memory] = FreeList()

    def take(self, size: int) -> Memory:
        """Return memory of at least that size. Raise ResourceExhausted*."""
        room = max(_LEAST, 1 << (size - 1).bit_length() if size else 0)
        return self._free.take(room) or Memory.create(room)

    def give_back(self, rooms: Sequence[Memory]) -> None:
        """Keep memory that nothing uses any more."""
        for room in rooms:
            self._free.put(room.nbytes, room, room.nbytes)

    def clear(self) -> None:
        """Drop all."""
        self._free.clear()


class Temporaries:
    """The temporaries of one execution. After an error they are not used again: a device may still write to them."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms, self._taken = rooms, list[Memory]()

    def place(self, size: int, shape: tuple[int, ...]) -> StepValue:
        """Return a new place of at least that size."""
        room = self._rooms.take(size)
        self._taken.append(room)
        return StepValue(room, 0, room.nbytes, shape, is_elsewhere=True)

    def end(self) -> None:
        """Give all memory back: it has succeeded, and nothing reads its values any more."""
        taken, self._taken = self._taken, []
        self._rooms.give_back(taken)


class PartOfModel:
    """A model that executes values into values: one step, or one graph of an IF or a WHILE. Any thread."""

    def __init__(self, model: Model, perform: Way) -> None:
        self._perform, graph = perform, model.main
        self._inputs = [graph.operands[i] for i in graph.inputs]
        self.outputs = [graph.operands[i] for i in graph.outputs]
        self._sizes = [nbytes(o, o.dimensions) if o.is_known else _GUESS for o in self.outputs]

    def run(
        self, job: Job, inputs: Sequence[StepValue], places: Sequence[StepValue | None], scope: Temporaries
    ) -> tuple[Result, list[StepValue]]:
        """Execute, and return the result with the outputs' values: in their places, or in `scope` where there is none,
        or it is too small.

        Raise what the model's executor raises, and GeneralFailure.
        """
        found = [
            place or scope.place(size, operand.dimensions)
            for place, size, operand in zip(places, self._sizes, self.outputs, strict=True)
        ]
        for _ in range(_MOST_TRIES):
            result = self._perform(job._replace(request=self.request(job.request.loop_timeout, inputs, found)))
            if result.status != ErrorStatus.OUTPUT_INSUFFICIENT_SIZE or not self._grow(found, result, scope):
                break
        if result.status:
            return result, found
        shapes = [shape.dimensions for shape in result.output_shapes] or [o.dimensions for o in self.outputs]
        check_shapes(self.outputs, result.output_shapes)
        values = [_made(*each) for each in zip(found, shapes, self.outputs, strict=True)]
        # What a device has claimed to need counts only where it has succeeded by it, and no more of it than was used.
        self._sizes = [
            max(size, value.length) if value.is_elsewhere else size
            for size, value in zip(self._sizes, values, strict=True)
        ]
        return result, values

    def request(self, loop_timeout: int | None, inputs: Sequence[StepValue], outputs: Sequence[StepValue]) -> Request:
        """Return the request on these values. Raise GeneralFailure for those that cannot be handed over."""
        pools = list({id(v.pool): v.pool for v in (*inputs, *outputs) if v.pool is not None}.values())
        numbers = {id(pool): n for n, pool in enumerate(pools)}
        reads = [_input(v, o, numbers) for v, o in zip(inputs, self._inputs, strict=True)]
        writes = [
            RequestArgument(pool=numbers[id(v.pool)], offset=v.offset, length=v.length, dimensions=_given(v, o))
            for v, o in zip(outputs, self.outputs, strict=True)
        ]
        return Request(tuple(reads), tuple(writes), tuple(pools), loop_timeout)

    def _grow(self, places: list[StepValue], result: Result, scope: Temporaries) -> bool:
        """Find new places for outputs that lacked room. False: none lacked any."""
        has_grown = False
        for n, (operand, shape) in enumerate(zip(self.outputs, result.output_shapes, strict=False)):
            if shape.is_sufficient:
                continue
            size = nbytes(operand, shape.dimensions)
            if size <= places[n].length:  # the device does not know, either
                size = 2 * places[n].length
            places[n], has_grown = scope.place(size, operand.dimensions), True
        return has_grown


def _made(place: StepValue, shape: tuple[int, ...], operand: Operand) -> StepValue:
    """Return the value that an execution has left in that place."""
    length = 0 if isinstance(place.pool, HardwareBuffer) else nbytes(operand, shape)  # an image is used whole
    return place._replace(shape=shape, length=length, is_empty=not operand.type.is_scalar and 0 in shape)


def _given(place: StepValue, operand: Operand) -> tuple[int, ...]:
    """Return the dimensions to be said of an output: what the caller has said where the model leaves them open."""
    return () if operand.is_known else place.shape


def _input(value: StepValue, operand: Operand, numbers: dict[int, int]) -> RequestArgument:
    if value.pool is None:
        return RequestArgument(has_no_value=True)
    if value.is_empty:
        raise GeneralFailure(f"a value of shape {list(value.shape)} has no elements, and no request can carry it")
    if combine_dimensions(operand.dimensions, value.shape) is None:
        raise GeneralFailure(f"a value of shape {list(value.shape)} goes to an input of {list(operand.dimensions)}")
    dimensions = () if operand.is_known else value.shape
    return RequestArgument(
        pool=numbers[id(value.pool)], offset=value.offset, length=value.length, dimensions=dimensions
    )
