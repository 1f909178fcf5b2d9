"""Memory that holds the arguments of one execution: where `run` and a burst put their arrays."""

from __future__ import annotations

import math
import threading
from collections import deque
from functools import partial
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from weakref import ref

import numpy as np

from burst import (
    DeviceBuffer,
    GeneralFailure,
    HardwareBuffer,
    Memory,
    OutputShape,
    Request,
    RequestArgument,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.client.buffers import EncodedRequest
    from driver.nn import Model, Operand


_ALIGN = 64  # bytes: what the fast devices need, and a cache line
_FIRST_GUESS = 4096  # bytes for an output whose size only its execution tells
_INPUTS, _OUTPUTS = 0, 1  # pools of every request that is made here
_MOST_FREE, _MOST_BYTES = 16, 2**27  # in one free list
_T = TypeVar("_T")
Shapes = tuple[tuple[int, ...] | None, ...]


class InputSet:
    """The inputs of one request, each on a 64-byte boundary of one sealed memfd.

    `arrays` are typed views, None for an input that is omitted.
    """

    def __init__(self, model: Model, shapes: Shapes) -> None:
        """`shapes`: of the inputs; None omits one."""
        operands = [model.main.operands[i] for i in model.main.inputs]
        lengths = [0 if s is None else nbytes(o, s) for o, s in zip(operands, shapes, strict=True)]
        *places, end = _offsets(lengths)
        self.memory = Memory.create(max(end, 1))  # a model may have no inputs
        each = list(zip(operands, shapes, places, lengths, strict=True))
        self.arguments = tuple(_argument(*of_one) for of_one in each)
        self.arrays = tuple(
            None if shape is None else self.memory.asarray(operand.type.dtype, shape, place)
            for operand, shape, place, _ in each
        )

    def fill(self, arrays: Sequence[Any]) -> int:
        """Copies arrays into the inputs, all or none; returns how many bytes that were.

        Takes what speaks the buffer protocol or DLPack. Raises ValueError naming the input that does not fit.
        """
        if len(arrays) != len(self.arrays):
            raise ValueError(f"{len(arrays)} inputs were given; the model takes {len(self.arrays)}")
        pairs = [
            (place, checked(n, array, place.dtype, place.shape))
            for n, (array, place) in enumerate(zip(arrays, self.arrays, strict=True))
            if place is not None
        ]
        for place, array in pairs:
            place[...] = array
        return sum(place.nbytes for place, _ in pairs)


class OutputSet:
    """The outputs of one request, and whether the caller still holds them.

    A result, one of its arrays, a view of one or what was exported by DLPack keeps a reference to one of our arrays;
    so their reference counts tell.
    """

    next: OutputSet  #: in the ring of a burst's `Buffers`

    def __init__(self, model: Model, sizes: Sequence[int] | None = None) -> None:
        """`sizes`: bytes to reserve for each; by default what the model says."""
        self._operands = [model.main.operands[i] for i in model.main.outputs]
        self.lay_out(sizes or [_output_size(o) for o in self._operands])

    def lay_out(self, sizes: Sequence[int]) -> None:
        """New memory for outputs of these sizes in bytes. Arrays on the old one stay valid."""
        self.sizes = tuple(sizes)
        *self._places, end = _offsets(sizes)
        self.memory = Memory.create(end)
        # With a base that is no array, views of our arrays refer to them and not past them.
        self._bytes: Any = self.memory.asarray().data
        self.arguments = tuple(
            RequestArgument(pool=_OUTPUTS, offset=offset, length=length)
            for offset, length in zip(self._places, sizes, strict=True)
        )
        self.shapes: Sequence[OutputShape] | None = None  #: for which
        self.given: list[NDArray[Any]] = []  #: arrays were made
        self.is_busy = False  #: a request of a burst that is in flight writes to it
        self.number = 0  #: of the request of a burst that used it last
        self.encoded: dict[InputSet, EncodedRequest] = {}  #: requests of a burst on this memory

    def arrays(self, shapes: Sequence[OutputShape]) -> tuple[NDArray[Any], ...]:
        """Typed views; `shapes` may be empty when the model knows them all. The same ones again for the same shapes."""
        if self.shapes is not shapes:
            if self.shapes != shapes:
                self.given = [self._view(n, shapes[n].dimensions if shapes else None) for n in range(len(self.sizes))]
            self.shapes = shapes
        return tuple(self.given)

    def _view(self, n: int, dimensions: tuple[int, ...] | None) -> NDArray[Any]:
        operand = self._operands[n]
        dims = operand.dimensions if dimensions is None else dimensions
        if nbytes(operand, dims) > self.sizes[n]:
            raise GeneralFailure(f"the device reports shape {dims} for output {n}, which does not fit the buffer")
        return np.ndarray(dims, operand.type.dtype, self._bytes, self._places[n])

    def is_held(self) -> bool:
        """Whether the caller still refers to one of the arrays that were given out last."""
        for array in self.given:  # noqa: SIM110 (any(…) takes four times as long, and this is in every run)
            if getrefcount(array) > _OURS:
                return True
        return False

    def needed(self, shapes: Sequence[OutputShape]) -> tuple[int, ...] | None:
        """Sizes that outputs of these shapes need, or None when there is room for them."""
        sizes = [nbytes(o, shape.dimensions) for o, shape in zip(self._operands, shapes, strict=False)]
        if len(sizes) != len(self.sizes) or all(size <= room for size, room in zip(sizes, self.sizes, strict=True)):
            return None
        return tuple(map(max, sizes, self.sizes))


def _references_of_ours() -> int:
    """What `getrefcount` counts in `is_held` when the caller holds no array."""
    for array in [np.empty(1)]:
        count = getrefcount(array)
    return count


_OURS = _references_of_ours()


class Workspace:
    """Inputs and outputs of one request."""

    def __init__(self, inputs: InputSet, outputs: OutputSet) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._combine()

    @classmethod
    def create(cls, model: Model, shapes: Shapes) -> Self:
        """A new one for inputs of these shapes. Raises ResourceExhaustedPersistent, ResourceExhaustedTransient."""
        return cls(InputSet(model, shapes), OutputSet(model))

    def _combine(self) -> None:
        pools = self.inputs.memory, self.outputs.memory
        self.request = Request(self.inputs.arguments, self.outputs.arguments, pools)

    @property
    def nbytes(self) -> int:
        """Of its memory."""
        return self.inputs.memory.nbytes + self.outputs.memory.nbytes

    def grow(self, shapes: Sequence[OutputShape]) -> bool:
        """Makes room for outputs of these shapes; False when there was room already."""
        sizes = self.outputs.needed(shapes)
        if sizes is None:
            return False
        self.outputs.lay_out(sizes)
        self._combine()
        return True


class FreeList(Generic[_T]):
    """Memory that no execution uses, by a key, for the next execution with the same key. Any thread.

    The least recently used is dropped when there are more than 16, or more than 128 MiB in all; the last one stays,
    however large.
    """

    def __init__(self) -> None:
        self._lock, self._nbytes = threading.Lock(), 0
        self._free: deque[tuple[object, _T, int]] = deque()  # the last one was used last

    def take(self, key: object) -> _T | None:
        """What was put here under that key last; None when there is nothing."""
        with self._lock:
            for n in range(len(self._free) - 1, -1, -1):
                found, item, nbytes = self._free[n]
                if found == key:
                    del self._free[n]
                    self._nbytes -= nbytes
                    return item
        return None

    def put(self, key: object, item: _T, nbytes: int) -> None:
        """No execution uses it any more."""
        dropped = []
        with self._lock:
            self._free.append((key, item, nbytes))
            self._nbytes += nbytes
            while len(self._free) > _MOST_FREE or (self._nbytes > _MOST_BYTES and len(self._free) > 1):
                dropped.append(self._free.popleft())
                self._nbytes -= dropped[-1][2]

    def clear(self) -> None:
        """Drops all."""
        with self._lock:
            free, self._free, self._nbytes = self._free, deque(), 0
        free.clear()


class KnownRequest:
    """The request that was sent last, with the views of its outputs. It does not keep the request's memory alive."""

    def __init__(self, request: Request) -> None:
        self._inputs, self._outputs, pools, self._loop_timeout = request
        end = partial(_end, ref(self))
        self._pools, self._watched = tuple(map(id, pools)), [ref(pool, end) for pool in pools]
        self._lives = True  # all of its pools do, so that no other pool has the id of one
        self._views: tuple[Sequence[OutputShape], tuple[Any, ...]] | None = None

    def is_of(self, request: Request) -> bool:
        """Whether it is this one, or names the same arguments and pools."""
        inputs, outputs, pools, loop_timeout = request
        return (
            inputs is self._inputs
            and outputs is self._outputs
            and loop_timeout == self._loop_timeout
            and tuple(map(id, pools)) == self._pools
            and self._lives
        )

    def outputs(self, model: Model, request: Request, shapes: Sequence[OutputShape]) -> tuple[NDArray[Any], ...]:
        """As `output_views`; for the same shapes the same ones again."""
        known = self._views
        if known and known[0] == shapes:
            return known[1]
        views = output_views(model, request, shapes)
        if not any(isinstance(pool, HardwareBuffer) for pool in request.pools):  # some are copied with each look
            self._views = shapes, views
        return views

    def end(self) -> None:
        """The application has dropped one of its pools. The views would keep that mapped."""
        self._lives, self._views = False, None


def _end(known: ref[KnownRequest], _: ref[Any]) -> None:
    if found := known():
        found.end()


def output_views(model: Model, request: Request, shapes: Sequence[OutputShape]) -> tuple[NDArray[Any], ...]:
    """Typed views of a request's outputs in its pools, None where that is a buffer.

    `shapes` may be empty when the model knows them all.
    """
    operands = [model.main.operands[i] for i in model.main.outputs]
    return tuple(
        _view(request.pools[a.pool], o.type.dtype, shapes[n].dimensions if shapes else o.dimensions, a.offset)
        for n, (o, a) in enumerate(zip(operands, request.outputs, strict=True))
    )


def _view(pool: Memory | DeviceBuffer, dtype: Any, shape: tuple[int, ...], offset: int) -> Any:
    if not isinstance(pool, Memory):
        return None
    return pool.read().reshape(shape) if isinstance(pool, HardwareBuffer) else pool.asarray(dtype, shape, offset)


def input_shapes(model: Model, given: Sequence[Any]) -> Shapes:
    """The shape of each input: the model's, or the given array's where that leaves it open. Raises ValueError."""
    operands = [model.main.operands[i] for i in model.main.inputs]
    if len(given) != len(operands):
        raise ValueError(f"{len(given)} inputs were given; the model takes {len(operands)}")
    return tuple(_shape(n, o, g) for n, (o, g) in enumerate(zip(operands, given, strict=True)))


def _shape(n: int, operand: Operand, given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    if operand.is_known:
        return operand.dimensions
    return given if isinstance(given, tuple) else np.shape(given)


def checked(n: int, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The array, if it is just what input `n` takes. Nothing is converted silently. Raises ValueError."""
    if array is None:
        raise ValueError(f"input {n} is None, but the burst was opened with this input; give an array of shape {shape}")
    found = _as_array(n, array, dtype, shape)
    if found.dtype != dtype and not (found.dtype == np.bool_ and dtype == np.uint8):
        raise ValueError(
            f"input {n} has dtype {found.dtype}; the model takes {dtype}: convert it with .astype('{dtype}')"
        )
    if found.shape != shape:
        raise ValueError(f"input {n} has shape {found.shape}; the model takes {shape}")
    return found


def _as_array(n: int, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Without a copy, if it can be. Bytes have no shape of their own, and take the input's when they fill it.

    Arrow's buffers have no type either; those who take one out of an array know what it holds.
    """
    if isinstance(array, bytes | bytearray) or _is_arrow_buffer(array):
        is_typed = isinstance(array, bytes | bytearray) or len(array) % dtype.itemsize
        flat = np.frombuffer(array, np.uint8 if is_typed else dtype)
        return flat.reshape(shape) if flat.size == math.prod(shape) else flat
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        return np.asarray(array)
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"input {n} cannot be read by DLPack: {error}; bring it to the CPU's memory") from error


def _is_arrow_buffer(array: object) -> bool:
    kind = type(array)
    return kind.__name__.endswith("Buffer") and kind.__module__.partition(".")[0] == "pyarrow"


def nbytes(operand: Operand, shape: tuple[int, ...]) -> int:
    """Of an operand of that shape."""
    return math.prod(shape) * operand.type.element_size


def _output_size(operand: Operand) -> int:
    """Bytes to reserve for an output."""
    return nbytes(operand, operand.dimensions) if operand.is_known else _FIRST_GUESS


def _argument(operand: Operand, shape: tuple[int, ...] | None, offset: int, length: int) -> RequestArgument:
    if shape is None:
        return RequestArgument(has_no_value=True)
    dimensions = () if shape == operand.dimensions else shape
    return RequestArgument(pool=_INPUTS, offset=offset, length=length, dimensions=dimensions)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each part begins, and where the last one ends."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-max(size, 1) // _ALIGN) * _ALIGN)
    return places
