"""Memory that holds the arguments of one execution: where `run` and a burst put their arrays."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import islice
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar
from weakref import ref

import numpy as np

from burst import (
    DeviceBuffer,
    ErrorStatus,
    GeneralFailure,
    HardwareBuffer,
    Memory,
    OutputShape,
    Request,
    Result,
    Timing,
)
from burst._core import ffi
from burst._hot import copy_alike
from burst.memory import VendorMemory
from burst.messages import NO_TIMING
from driver.client.layout import Shapes, first_shape, layouts_of, nbytes
from driver.client.names import by_position, named
from driver.client.packed_inputs import PackedPlace, input_value, packed_shape
from driver.nn import combine_dimensions
from driver.nn.file_form import PACKED, takes_empty
from driver.protocol.packed_values import room_for, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.client.buffers import EncodedRequest
    from driver.nn import Model, Operand
    from driver.nn.tensors import TensorInfo
    from driver.options import InputShapes


MOST_KNOWN = 128
"""Requests that a client knows, and a socket has encoded: as many as the device has plans of. One more, and all go."""

_MOST_NEWEST = 4  # requests that a client takes along when it moves to another engine
_MOST_FREE, _MOST_BYTES = 16, 2**27  # in one free list
_OF_PYTHON = int, float, list, tuple  # numbers that have no dtype of their own
_T = TypeVar("_T")


class InputSet:
    """The inputs of one request, each on a 64-byte boundary of one sealed memfd.

    `arrays` are typed views, None for an input that is omitted, a `PackedPlace` for one that is no tensor of numbers,
    and an OpenInput for one whose shape is NOT_GIVEN.
    """

    _optional = 0  # so many of the last inputs may be left out

    def __init__(self, model: Model, shapes: Shapes, memory: Memory | None = None) -> None:
        """Lay inputs out. `shapes`: None omits one. `memory`: is used if it suffices."""
        layouts = layouts_of(model)
        layout = layouts.of_inputs(model, shapes)
        self.shapes, self.names, self._optional = shapes, layouts.names, layouts.optional
        is_enough = memory is not None and memory.nbytes >= layout.nbytes
        self.memory = memory if memory is not None and is_enough else Memory.create(layout.nbytes)
        self.arguments = layout.arguments
        views: list[Any] = [
            stands if view is None else self.memory.asarray(*view)
            for stands, view in zip(layout.instead, layout.views, strict=True)
        ]
        for n in layouts.packed:
            if views[n] is not None:
                views[n] = PackedPlace(said_input(n, self.names[n]), model.inputs[n], views[n])
        self.arrays: tuple[Any, ...] = layouts.named_inputs(views)

    def given(self) -> dict[str, Any]:
        """Return the arrays by name, without those that are omitted; none where these are not the last."""
        there = [(name, array) for name, array in zip(self.names, self.arrays, strict=True) if array is not None]
        return dict(there) if tuple(name for name, _ in there) == self.names[: len(there)] else {}

    def fill(self, arrays: Sequence[Any]) -> int:
        """Copy arrays into the inputs, all or none; return how many bytes that were.

        Takes what speaks the buffer protocol or DLPack. Raise ValueError naming the input that does not fit.
        """
        arrays = by_position(arrays, self.names, self._optional)
        if len(arrays) != len(self.arrays):
            raise ValueError(_wrong_count(len(arrays), self.names))
        if (all_of_them := copy_alike(self.arrays, arrays)) >= 0:
            return all_of_them
        pairs, copied = [], 0
        for n, (place, array) in enumerate(zip(self.arrays, arrays, strict=True)):
            if type(place) is PackedPlace:
                pairs.append(place.packed(array))
                copied += pairs[-1][1].nbytes
            elif isinstance(place, np.ndarray):
                pairs.append((place, fitting(_Input(n, self.names[n], place.dtype, place.shape), array)))
                copied += place.nbytes
        for place, array in pairs:
            place[...] = array
        return copied


class _OutputPlace:
    """The base of an output's array, and so of each view of it: each view refers to the output.

    It is no array and no view of one, past which numpy would look for the base of a view.
    """

    def __init__(self, memory: NDArray[np.uint8], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._memory, data = memory, (memory.ctypes.data + offset, False)
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": data}


class OutputSet:
    """The outputs of one request, and whether the caller still holds them.

    A result, one of its arrays, a view of one or what was exported by DLPack keeps a reference to one of our arrays;
    so their reference counts tell.
    """

    next: OutputSet  #: in the ring of a burst's `Buffers`

    def __init__(self, model: Model, sizes: Sequence[int] | None = None) -> None:
        """Reserve memory. `sizes`: bytes for each; by default what the model says."""
        self._layouts = layouts = layouts_of(model)
        self._operands: Sequence[Operand] = layouts.outputs
        self.named, self._has_packed = layouts.named_outputs, layouts.has_packed_outputs
        self.lay_out(sizes)

    def lay_out(self, sizes: Sequence[int] | None) -> None:
        """Take new memory for outputs of these sizes in bytes. Arrays on the old one stay valid."""
        self.sizes, self._places, size, self.arguments = self._layouts.of_outputs(sizes)
        self.memory = Memory.create(size)
        self._bytes = self.memory.asarray()
        self.begin()

    def begin(self) -> None:
        """Begin with memory that nothing has used."""
        self.shapes: Sequence[OutputShape] | None = None  #: for which
        self.given: tuple[NDArray[Any], ...] = ()  #: arrays were made
        self.ready: Result | None = None  #: of these arrays, without times
        self.is_ready = False  #: `Burst.run` has that result, too
        self.is_busy = False  #: a request of a burst that is in flight writes to it
        self._number = ffi.new("uint64_t *")
        self.number_at = int(ffi.cast("uintptr_t", self._number))
        self.encoded: dict[InputSet, EncodedRequest] = {}  #: requests of a burst on this memory

    def arrays(self, shapes: Sequence[OutputShape]) -> tuple[Any, ...]:
        """Return typed views, the same for the same shapes; `shapes` may be empty when the model knows them all."""
        if self._has_packed:  # values of this run, which refer to no memory
            found = self.named(self._view(n, shape.dimensions) for n, shape in enumerate(shapes))
            self.given = tuple(array for n, array in enumerate(found) if self._operands[n].type != PACKED)
            return found
        if self.shapes is not shapes:
            if self.shapes != shapes:
                dimensions = [each.dimensions for each in shapes or self._operands]
                self.given = self.named([self._view(n, dims) for n, dims in enumerate(dimensions)])
                self.ready, self.is_ready = None, False
            self.shapes = shapes
        return self.given

    def result(self, shapes: Sequence[OutputShape], timing: Timing) -> Result:
        """Return the result of a request that succeeded: without times the same one again. Raise GeneralFailure."""
        arrays = self.arrays(shapes)
        if timing is not NO_TIMING or self._has_packed:
            return Result(ErrorStatus.NONE, arrays, tuple(shapes), timing)
        if self.ready is None or self.ready.output_shapes is not shapes:
            self.ready, self.is_ready = Result(ErrorStatus.NONE, arrays, tuple(shapes), timing), False
        return self.ready

    @property
    def number(self) -> int:
        """The number of the burst's request that used it last."""
        return int(self._number[0])

    @number.setter
    def number(self, number: int) -> None:
        self._number[0] = number

    def _view(self, n: int, dims: tuple[int, ...]) -> Any:
        operand = self._operands[n]
        dtype = operand.type.dtype
        if math.prod(dims) * dtype.itemsize > self.sizes[n]:
            raise GeneralFailure(f"the device reports shape {dims} for output {n}, which does not fit the buffer")
        if operand.type == PACKED:
            return _unpacked(n, self._bytes[self._places[n] :][: math.prod(dims)])
        return np.asarray(_OutputPlace(self._bytes, self._places[n], dtype, dims))

    def is_in_use(self) -> bool:
        """Return True if a request in flight writes to it, or the caller holds a part of its last result."""
        return self.is_busy or self.is_held()

    def is_held(self) -> bool:
        """Return True if the caller still refers to one of the arrays that were given out last."""
        if not self.given:
            return False
        if getrefcount(self.given) > _OF_ATTRIBUTE + (self.ready is not None):
            return True
        if self.ready is not None and getrefcount(self.ready) > _OF_ATTRIBUTE + self.is_ready:
            return True
        for array in self.given:  # noqa: SIM110 (any(…) takes four times as long, and this is in every run)
            if getrefcount(array) > _OF_ARRAY:
                return True
        return False

    def needed(self, shapes: Sequence[OutputShape]) -> tuple[int, ...] | None:
        """Return the sizes that outputs of these shapes need, or None when there is room for them."""
        sizes = [nbytes(o, shape.dimensions) for o, shape in zip(self._operands, shapes, strict=False)]
        if len(sizes) != len(self.sizes) or all(size <= room for size, room in zip(sizes, self.sizes, strict=True)):
            return None
        return tuple(map(max, sizes, self.sizes))


class _Kept:
    def __init__(self) -> None:
        self.given = (np.empty(1),)


def _references_of_ours(kept: _Kept) -> tuple[int, int]:
    """Return what `getrefcount` counts in `is_held` when the caller holds nothing: for attribute and array."""
    for array in kept.given:
        of_array = getrefcount(array)
    return getrefcount(kept.given), of_array


_OF_ATTRIBUTE, _OF_ARRAY = _references_of_ours(_Kept())


class Workspace:
    """A request's inputs and outputs."""

    def __init__(self, inputs: InputSet, outputs: OutputSet) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._combine()

    @classmethod
    def create(cls, model: Model, shapes: Shapes) -> Self:
        """Return a new one for inputs of these shapes.

        Raise ResourceExhaustedPersistent, ResourceExhaustedTransient.
        """
        return cls(InputSet(model, shapes), OutputSet(model))

    def _combine(self) -> None:
        pools = self.inputs.memory, self.outputs.memory
        self.request = Request(self.inputs.arguments, self.outputs.arguments, pools)

    @property
    def nbytes(self) -> int:
        """The size of its memory."""
        return self.inputs.memory.nbytes + self.outputs.memory.nbytes

    def grown_for(self, result: Result) -> Request | None:
        """Return the request with room for the outputs of a result that lacked room. None: it lacked something else."""
        sizes = self.outputs.needed(result.output_shapes)
        if sizes is None:
            return None
        self.outputs.lay_out(sizes)
        self._combine()
        return self.request


class FreeList(Generic[_T]):
    """A list of memory that no execution uses, by a key, for the next execution with that key. Any thread.

    The least recently used is dropped when there are more than 16, or more than 128 MiB in all; the last one stays,
    however large.
    """

    def __init__(self) -> None:
        self._lock, self._nbytes = threading.Lock(), 0
        self._free: deque[tuple[object, _T, int]] = deque()  # the last one was used last

    def take(self, key: object) -> _T | None:
        """Return what was put here under that key last; None when there is nothing."""
        with self._lock:
            for n in range(len(self._free) - 1, -1, -1):
                found, item, nbytes = self._free[n]
                if found == key:
                    del self._free[n]
                    self._nbytes -= nbytes
                    return item
        return None

    def put(self, key: object, item: _T, nbytes: int) -> None:
        """Keep memory that no execution uses any more."""
        dropped = []
        with self._lock:
            self._free.append((key, item, nbytes))
            self._nbytes += nbytes
            while len(self._free) > _MOST_FREE or (self._nbytes > _MOST_BYTES and len(self._free) > 1):
                dropped.append(self._free.popleft())
                self._nbytes -= dropped[-1][2]

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            free, self._free, self._nbytes = self._free, deque(), 0
        free.clear()


class KnownViews(NamedTuple):
    """The arrays of a request's outputs, and their shapes. seen: outputs in memory; in_memory: the shapes of these."""

    arrays: tuple[Any, ...]
    shapes: Sequence[OutputShape]
    seen: list[int]
    in_memory: list[OutputShape]


class KnownRequest:
    """A request that was sent, with its outputs' views. It does not keep the request's memory alive."""

    def __init__(self, request: Request) -> None:
        self._inputs, self._outputs, pools, self._loop_timeout = request
        end = partial(_end, ref(self))
        self._pools, self._watched = tuple(map(id, pools)), [ref(pool, end) for pool in pools]
        self._lives = True  # all of its pools do, so that no other pool has the id of one
        self._views: KnownViews | None = None
        self._success: tuple[Result, Result] | None = None  # as it came, and with the views

    def request(self) -> Request | None:
        """Return the request again while its memory lives."""
        pools = tuple(pool for each in self._watched if (pool := each()) is not None)
        is_whole = self._lives and len(pools) == len(self._watched)
        return Request(self._inputs, self._outputs, pools, self._loop_timeout) if is_whole else None

    def is_of(self, request: Request) -> bool:
        """Return True if it is this one, or names the same arguments and pools."""
        inputs, outputs, pools, loop_timeout = request
        return (
            inputs is self._inputs
            and outputs is self._outputs
            and loop_timeout == self._loop_timeout
            and tuple(map(id, pools)) == self._pools
            and self._lives
        )

    def success(self, model: Model, request: Request, result: Result) -> Result:
        """Return the result with the outputs; for the same result, with the same views, the same one again."""
        known = self._success
        if known and known[0] is result:
            return known[1]
        whole = result._replace(outputs=self.outputs(model, request, result.output_shapes))
        if self._views and self._views.arrays is whole.outputs:
            self._success = result, whole
        return whole

    def outputs(self, model: Model, request: Request, shapes: Sequence[OutputShape]) -> tuple[NDArray[Any], ...]:
        """Return what `output_views` does; for the same shapes the same ones again. Those in buffers have no views."""
        known = self._views
        if known and (shapes is known.shapes or known.in_memory == ([shapes[n] for n in known.seen] if shapes else [])):
            return known.arrays
        views = output_views(model, request, shapes)
        is_packed = any(model.main.operands[i].type == PACKED for i in model.main.outputs)
        # Some images are copied with each look; packed values are made with each.
        if not is_packed and not any(isinstance(pool, HardwareBuffer) for pool in request.pools):
            seen = [n for n, a in enumerate(request.outputs) if not isinstance(request.pools[a.pool], DeviceBuffer)]
            self._views = KnownViews(views, shapes, seen, [shapes[n] for n in seen] if shapes else [])
        return views

    def end(self) -> None:
        """Drop the views, which would keep memory mapped: the application has dropped one of its pools."""
        self._lives, self._views, self._success = False, None, None


class KnownRequests:
    """The requests that were sent lately. Any thread may use it."""

    def __init__(self) -> None:
        self._last: KnownRequest | None = None
        self._all: dict[tuple[float | int | None, ...], KnownRequest] = {}

    def of(self, request: Request) -> KnownRequest:
        """Return what is known of a request."""
        last = self._last
        if last and last.is_of(request):
            return last
        inputs, outputs, pools, loop_timeout = request
        key = id(inputs), id(outputs), loop_timeout, *map(id, pools)
        found = self._all.pop(key, None)  # the newest is the last one
        if found is None or not found.is_of(request):
            if len(self._all) >= MOST_KNOWN:
                self._all = {}
            found = KnownRequest(request)
        self._all[key] = self._last = found
        return found

    def newest(self) -> list[Request]:
        """Return the few that were sent last, the newest first, of those whose memory still lives."""
        newest = reversed(list(self._all.values()))
        return list(islice((request for known in newest if (request := known.request())), _MOST_NEWEST))


def _end(known: ref[KnownRequest], _: ref[Any]) -> None:
    if found := known():
        found.end()


def output_views(model: Model, request: Request, shapes: Sequence[OutputShape]) -> tuple[Any, ...]:
    """Return typed views of a request's outputs in its pools, None for a buffer, or memory that only a driver maps.

    `shapes` may be empty when the model knows them all.
    """
    operands = [model.main.operands[i] for i in model.main.outputs]
    views = [
        _view(request.pools[a.pool], o.type.dtype, shapes[n].dimensions if shapes else o.dimensions, a.offset)
        for n, (o, a) in enumerate(zip(operands, request.outputs, strict=True))
    ]
    for n, (operand, view) in enumerate(zip(operands, views, strict=True)):
        if operand.type == PACKED and view is not None:
            views[n] = _unpacked(n, view)
    return named(tuple(tensor.name for tensor in model.outputs))(views)


def _unpacked(n: int, view: NDArray[np.uint8]) -> Any:
    """Return the value of output `n`. Raise GeneralFailure."""
    try:
        return unpack(view)
    except ValueError as error:
        raise GeneralFailure(f"output {n} {error}") from None


def _view(pool: Memory | DeviceBuffer, dtype: Any, shape: tuple[int, ...], offset: int) -> Any:
    if not isinstance(pool, Memory) or isinstance(pool, VendorMemory):
        return None
    return pool.read().reshape(shape) if isinstance(pool, HardwareBuffer) else pool.asarray(dtype, shape, offset)


class _Input(NamedTuple):
    """An input as messages name it, with what it takes."""

    number: int
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  #: 0 where it is open; () also where the rank is

    def __str__(self) -> str:
        return said_input(self.number, self.name)


def said_input(number: int, name: str) -> str:
    """Return an input in words, for messages."""
    return f"input {number} ({name!r})" if name != f"input_{number}" else f"input {number}"


def _wrong_count(given: int, names: Sequence[str]) -> str:
    return f"{given} inputs were given; the model takes {len(names)}: {', '.join(names) or 'none'}"


def input_shapes(model: Model, given: Sequence[Any]) -> Shapes:
    """Return the shape of each input: the model's, or the given array's where that leaves it open. Raise ValueError.

    `given`: arrays or shapes, by position or in one dict.
    """
    layouts = layouts_of(model)
    given = by_position(given, layouts.names, layouts.optional)
    if len(given) != len(layouts.inputs):
        raise ValueError(_wrong_count(len(given), layouts.names))
    pairs = zip(layouts.inputs, given, strict=True)
    if not layouts.is_open:
        return tuple([None if g is None else o.dimensions for o, g in pairs])
    return tuple([_shape(n, model.inputs[n], o, g) for n, (o, g) in enumerate(pairs)])


def fitted_inputs(model: Model, given: Sequence[Any]) -> tuple[NDArray[Any] | None, ...]:
    """Return the arrays as the model takes them, by position, in the shapes of `input_shapes`. Raise ValueError."""
    shapes, tensors = input_shapes(model, given), model.inputs
    arrays = by_position(given, tuple(tensor.name for tensor in tensors), model.optional)
    return tuple(
        None
        if shape is None
        else input_value(said_input(n, tensor.name), tensor, array)
        if tensor.kind
        else fitting(_Input(n, tensor.name, tensor.dtype, shape), array)
        for n, (tensor, shape, array) in enumerate(zip(tensors, shapes, arrays, strict=True))
    )


def shapes_of(model: Model, given: InputShapes | None, where: str = "burst(input_shapes=…)") -> Shapes:
    """Return the shapes of the inputs: those of the model where nothing is given; `where` they are given.

    Raise ValueError for a shape that stays open, or that contradicts.
    """
    operands, tensors = [model.main.operands[i] for i in model.main.inputs], model.inputs
    if given is None:
        for n, operand in enumerate(operands):
            if not operand.is_known and operand.type != PACKED and not tensors[n].optional:
                its = _Input(n, tensors[n].name, operand.type.dtype, operand.dimensions)
                raise ValueError(f"{its} has the open shape {_said(operand.dimensions)}; give it with {where}")
        return tuple(None if t.optional else first_shape(o) for o, t in zip(operands, tensors, strict=True))
    by_name = (dict(given),) if isinstance(given, Mapping) else tuple(given)
    shapes = tuple(by_position(by_name, tuple(tensor.name for tensor in tensors), model.optional))
    if len(shapes) != len(operands):
        raise ValueError(f"{where}: {len(shapes)} shapes were given; the model has {len(operands)} inputs")
    for n, (operand, shape) in enumerate(zip(operands, shapes, strict=True)):
        if shape is None or tuple(shape) == operand.dimensions or operand.type == PACKED:
            continue
        if combine_dimensions(operand.dimensions, shape) is None or (0 in shape and not takes_empty(model)):
            its = _Input(n, tensors[n].name, operand.type.dtype, operand.dimensions)
            raise ValueError(f"{where}: {its} cannot be {shape}; the model says {_said(operand.dimensions)}")
    pairs = zip(operands, shapes, strict=True)
    return tuple(
        None if shape is None else (room_for(math.prod(shape)),) if operand.type == PACKED else tuple(shape)
        for operand, shape in pairs
    )


def _shape(n: int, tensor: TensorInfo, operand: Operand, given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    if operand.is_known:
        return operand.dimensions
    if operand.type == PACKED:
        return packed_shape(said_input(n, tensor.name), tensor, given)
    shape: tuple[int, ...] = given if isinstance(given, tuple) else np.shape(given)
    if combine_dimensions(operand.dimensions, shape) is None and shape != operand.dimensions:
        its = _Input(n, tensor.name, operand.type.dtype, operand.dimensions)
        raise ValueError(f"{its} has shape {shape}; the model takes {_said(operand.dimensions)}")
    return shape


def _said(dimensions: tuple[int, ...]) -> str:
    """Return dimensions with a ? where they are open."""
    return f"({', '.join(str(d or '?') for d in dimensions)}{',' if len(dimensions) == 1 else ''})"


def fitting(its: _Input, given: Any) -> NDArray[Any]:
    """Return the array, if it is what the input takes.

    Of an array only integers are converted, if the values fit; numbers and lists of Python take the input's dtype, if
    they mean the same there. Raise ValueError.
    """
    if given is None:
        raise ValueError(f"{its} is None, but this input is not omitted; give an array of shape {its.shape}")
    found = _as_array(its.number, given, its.dtype, its.shape)
    is_bytes = {found.dtype, its.dtype} == {np.dtype(np.bool_), np.dtype(np.uint8)}  # of booleans: 0 is False
    if found.dtype != its.dtype and not is_bytes:
        found = _converted(its, found, is_array=not isinstance(given, _OF_PYTHON))
    if found.shape != its.shape:
        if found.size == 1 and its.shape in {(), (1,)} and found.ndim <= 1:
            return found.reshape(its.shape)
        raise ValueError(f"{its} has shape {found.shape}; the model takes {its.shape}")
    return found


def _converted(its: _Input, found: NDArray[Any], *, is_array: bool) -> NDArray[Any]:
    to, kind = its.dtype, found.dtype.kind
    if to.kind == "f" and not is_array and kind in "biuf":
        return found.astype(to)
    if to.kind not in "biu" or kind not in ("iu" if is_array else "biu"):
        raise ValueError(f"{its} has dtype {found.dtype}; the model takes {to}: convert it with .astype('{to}')")
    least, most = (0, 1) if to.kind == "b" else (np.iinfo(to).min, np.iinfo(to).max)
    if found.size and not least <= found.min() <= found.max() <= most:
        wrong = found[(found < least) | (found > most)].flat[0] if found.ndim else found
        raise ValueError(f"{its} holds {wrong}; the model takes {to}, from {least} to {most}")
    return found.astype(to)


def _as_array(n: int, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array, without a copy if possible. Bytes have no shape, and take the input's when they fill it.

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
