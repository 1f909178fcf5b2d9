"""Buffers that the device manages: the engine's side of the HAL's memory domains.

A buffer is made for roles: input or output k of this or that prepared model. It is fresh until an execution has written
it or a client has copied something into it, and fresh again when either of these fails; a fresh buffer is no input.
Dimensions that neither its description nor its roles fix are fixed by use, each time anew.

Requests name a buffer by its token, which means something to one client alone, and never comes back.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import (
    GeneralFailure,
    HardwareBuffer,
    InvalidArgument,
    Memory,
    OutputInsufficientSize,
    ResourceExhaustedPersistent,
)
from burst.wire import Token
from driver.nn import combine_dimensions
from driver.request import BoundRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from burst import OutputShape, Request, RequestArgument
    from driver.interface import PreparedModel
    from driver.nn import Model, Operand, OperandType

_ALIGNMENT = 64
_LARGE = 2**18
_tokens = count(1)


class Kind(NamedTuple):
    """What all roles of a buffer have in common."""

    type: OperandType
    scale: float
    zero_point: int
    channel_quant: Any

    @classmethod
    def of(cls, operand: Operand) -> Kind:
        """Of one operand."""
        return cls(operand.type, operand.scale, operand.zero_point, operand.channel_quant)


class Role(NamedTuple):
    """An input or output of a prepared model, which is known by its number."""

    model: int
    is_input: bool
    io_index: int


class Loaded(NamedTuple):
    """A prepared model of a client."""

    number: int
    model: Model
    prepared: PreparedModel

    def operand(self, role: Role) -> Operand:
        """Raises InvalidArgument for an index that the model does not have."""
        graph = self.model.main
        side, what = (graph.inputs, "inputs") if role.is_input else (graph.outputs, "outputs")
        if not 0 <= role.io_index < len(side):
            raise InvalidArgument(f"io_index={role.io_index}: model {role.model} has {len(side)} {what}")
        return graph.operands[side[role.io_index]]


class Quota:
    """Bytes that the buffers of one client may have."""

    def __init__(self, nbytes: int) -> None:
        self._free, self._limit, self._lock = nbytes, nbytes, threading.Lock()

    def room(self, nbytes: int) -> NDArray[np.uint8]:
        """New memory, given back when the last array on it is gone. Raises ResourceExhaustedPersistent."""
        with self._lock:
            if nbytes > self._free:
                raise ResourceExhaustedPersistent(
                    f"a buffer needs {nbytes} bytes, and {self._free} of the {self._limit} that a client may have are "
                    "free; release others, or raise buffer_bytes in the device's limits"
                )
            self._free -= nbytes
        try:
            block = _block(nbytes)
        except (MemoryError, OSError):
            self._give_back(nbytes)
            raise ResourceExhaustedPersistent(f"the machine has no memory for a buffer of {nbytes} bytes") from None
        weakref.finalize(block, self._give_back, nbytes).atexit = False
        start = -block.ctypes.data % _ALIGNMENT
        return block[start : start + nbytes]

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._free += nbytes


def _block(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed, with room to align it. Large ones are pages of their own: the system has them back at once."""
    if nbytes >= _LARGE:
        pages: Any = mmap.mmap(-1, nbytes)
        return np.frombuffer(pages, np.uint8)
    return np.zeros(nbytes + _ALIGNMENT, np.uint8)


class ManagedBuffer:
    """One buffer. `version` changes with everything that a bound request has to notice before it runs.

    dimensions: that its description and its roles leave it; known: that it has at present.
    """

    writable = True

    def __init__(self, kind: Kind, dimensions: tuple[int, ...], roles: frozenset[Role], quota: Quota) -> None:
        """Raises ResourceExhaustedPersistent."""
        self.kind, self.dimensions, self.roles, self._quota = kind, dimensions, roles, quota
        self.token, self.version, self.is_fresh = next(_tokens), 0, True
        self.is_fixed = kind.type.is_scalar or (bool(dimensions) and 0 not in dimensions)
        self.known = dimensions
        self._array = quota.room(self.size(dimensions) if self.is_fixed else 0)

    def size(self, dimensions: tuple[int, ...]) -> int:
        """Bytes of that shape."""
        return math.prod(dimensions) * self.kind.type.element_size

    @property
    def nbytes(self) -> int:
        """That it has room for."""
        return self._array.nbytes

    def asarray(self, dtype: Any, shape: int, offset: int = 0) -> NDArray[Any]:
        """As of a `Memory`."""
        return self._array[offset : offset + shape].view(dtype)

    def settle(self, dimensions: tuple[int, ...]) -> None:
        """It has a value now, of that shape."""
        self.is_fresh = False
        if dimensions != self.known:
            self.known = dimensions
            self.version += 1

    def grow(self, nbytes: int) -> None:
        """Room for so much, in a buffer whose size is not fixed; what was in it is lost."""
        if nbytes > self.nbytes:
            self.is_fresh = True
            self._array = self._quota.room(nbytes)
            self.version += 1

    def release(self) -> None:
        """Nobody may use it any more; requests that are bound to it notice."""
        self._array, self.is_fresh = self._array[:0], True
        self.version += 1

    def copy_from(self, memory: Memory, dimensions: tuple[int, ...]) -> None:
        """What `memory` holds, as a value of that shape (): as described. Raises InvalidArgument, and is fresh then."""
        try:
            found = self._fixed_by(dimensions)
            nbytes = self.size(found)
            _check_size(memory, nbytes, f"{self.kind.type.name} {list(found)}")
            self.grow(nbytes)
        except Exception:
            self.is_fresh = True
            raise
        self._array[:nbytes] = memory.asarray()
        self.settle(found)

    def copy_to(self, memory: Memory) -> None:
        """Its value. Raises InvalidArgument, GeneralFailure."""
        nbytes = self.size(self.known) if self.is_fixed or not self.is_fresh else memory.nbytes
        _check_size(memory, nbytes, f"buffer {self.token}")
        self.check_value()
        memory.asarray()[:] = self._array[:nbytes]

    def check_value(self) -> None:
        """Raises GeneralFailure while it is fresh."""
        if self.is_fresh:
            raise GeneralFailure(f"buffer {self.token} has no value: nothing was written to it, or that failed")

    def _fixed_by(self, given: tuple[int, ...]) -> tuple[int, ...]:
        if self.kind.type.is_scalar and given:
            raise InvalidArgument(f"dimensions={list(given)}: {self.kind.type.name} has none")
        if not given and not self.is_fixed:
            raise InvalidArgument(f"dimensions=(): those of the buffer are {list(self.dimensions)}; say all of them")
        found = combine_dimensions(self.dimensions, given)
        if found is None or 0 in given:
            raise InvalidArgument(f"dimensions={list(given)}: those of the buffer are {list(self.dimensions)}")
        return found


def _check_size(memory: Memory, nbytes: int, what: str) -> None:
    if isinstance(memory, HardwareBuffer):
        raise GeneralFailure(f"an image in {memory.format} is no memory to copy bytes with; use a pool of bytes")
    if memory.nbytes != nbytes:
        raise InvalidArgument(f"memory of {memory.nbytes} bytes; {what} has {nbytes}")


class ManagedBuffers:
    """All buffers of one client, by token."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: that they may have together."""
        self._quota = Quota(nbytes)
        self._buffers: dict[int, ManagedBuffer] = {}

    def __getitem__(self, token: int) -> ManagedBuffer:
        """Raises InvalidArgument."""
        try:
            return self._buffers[token]
        except (KeyError, TypeError):
            raise InvalidArgument(f"token {token!r:.20}: no buffer of this client; it was released") from None

    def allocate(
        self, dimensions: tuple[int, ...], models: Sequence[Loaded], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> ManagedBuffer:
        """A buffer for roles [model index, input or output index, frequency] of `models`.

        Raises InvalidArgument, ResourceExhaustedPersistent.
        """
        roles = _roles(models, inputs, outputs)
        by_number = {loaded.number: loaded for loaded in models}
        operands = [by_number[role.model].operand(role) for role in roles]
        kind = Kind.of(operands[0])
        for role, operand in zip(roles, operands, strict=True):
            if Kind.of(operand) != kind:
                raise InvalidArgument(f"{role} is {Kind.of(operand)}, and {roles[0]} is {kind}: they share no buffer")
            combined = combine_dimensions(dimensions, operand.dimensions)
            if combined is None:
                raise InvalidArgument(
                    f"{role} has dimensions {list(operand.dimensions)}, which contradict {list(dimensions)} of the "
                    "description and the other roles"
                )
            dimensions = combined
        if kind.type.is_scalar and dimensions:
            raise InvalidArgument(f"dimensions={list(dimensions)}: {kind.type.name} has none")
        buffer = ManagedBuffer(kind, dimensions, frozenset(roles), self._quota)
        self._buffers[buffer.token] = buffer
        return buffer

    def release(self, token: int) -> None:
        """The client needs it no more. Raises InvalidArgument."""
        self[token].release()
        del self._buffers[token]

    def clear(self) -> None:
        """The client is gone."""
        self._buffers.clear()

    def execution(self, loaded: Loaded, request: Request, pace: Callable[[], object]) -> Any:
        """A burst.Execution of a request whose pools are `Memory`, and tokens for buffers.

        Raises InvalidArgument, GeneralFailure.
        """
        if not any(isinstance(pool, Token) for pool in request.pools):
            return BoundRequest(loaded.model, loaded.prepared, request, pace)
        return ManagedRequest(loaded, request, self, pace)


def _roles(models: Sequence[Loaded], inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Role]:
    roles: list[Role] = []
    sides: Iterable[tuple[bool, Any]] = chain(((True, r) for r in inputs), ((False, r) for r in outputs))
    for is_input, (model, index, frequency) in sides:
        if not 0 <= model < len(models):
            raise InvalidArgument(f"model_index={model}: {len(models)} prepared models were given")
        if not 0 < frequency <= 1:
            raise InvalidArgument(f"frequency={frequency}: more than 0, and at most 1")
        role = Role(models[model].number, is_input, index)
        if role in roles:
            raise InvalidArgument(f"{role}: was given twice")
        roles.append(role)
    if not roles:
        raise InvalidArgument("a buffer needs at least one prepared model, and one role for it")
    return roles


class ManagedRequest:
    """A burst.Execution on buffers. What they are at the moment is looked at before each run."""

    native = None

    def __init__(
        self, loaded: Loaded, request: Request, buffers: ManagedBuffers, pace: Callable[[], object] = lambda: None
    ) -> None:
        """Raises InvalidArgument, GeneralFailure."""
        self._loaded, self._request, self._buffers, self._pace = loaded, request, buffers, pace
        self._bind()
        self.is_static = self._bound.is_static and all(b.is_fixed for b in self._named)

    @property
    def shapes(self) -> Sequence[OutputShape]:
        """Of the outputs, once it has run."""
        return self._bound.shapes

    @property
    def copied_bytes(self) -> int:
        """What a run copies of the arguments."""
        return self._bound.copied_bytes

    @property
    def checked_bytes(self) -> int:
        """Of these, what it only copies to look at."""
        return self._bound.checked_bytes

    def run(self) -> None:
        """Executes. Raises StatusError; buffers that it should have written are fresh then."""
        if self._versions != [b.version for b in self._named]:
            self._bind()
        for buffer in self._read:
            buffer.check_value()
        for buffer, _ in self._written:
            buffer.is_fresh = True
        try:
            self._bound.run()
        except OutputInsufficientSize as error:
            self._grow(error)
            self._bind()
            self._bound.run()
        shapes = self._bound.shapes
        for buffer, n in self._written:
            buffer.settle(shapes[n].dimensions)

    def _bind(self) -> None:
        pools = self._request.pools
        found: Mapping[int, ManagedBuffer] = {
            n: self._buffers[pool.token] for n, pool in enumerate(pools) if isinstance(pool, Token)
        }
        inputs = [self._argument(n, a, found, is_input=True) for n, a in enumerate(self._request.inputs)]
        outputs = [self._argument(n, a, found, is_input=False) for n, a in enumerate(self._request.outputs)]
        self._read = [found[a.pool] for a in inputs if not a.has_no_value and a.pool in found]
        self._written = [(found[a.pool], n) for n, a in enumerate(outputs) if not a.has_no_value and a.pool in found]
        _check_alone([b for b, _ in self._written], self._read)
        for buffer in self._read:
            buffer.check_value()
        self._named = list(found.values())
        self._versions = [b.version for b in self._named]
        request = self._request._replace(
            inputs=tuple(inputs), outputs=tuple(outputs), pools=tuple(found.get(n, p) for n, p in enumerate(pools))
        )
        self._bound = BoundRequest(self._loaded.model, self._loaded.prepared, request, self._pace)

    def _argument(
        self, n: int, argument: RequestArgument, found: Mapping[int, ManagedBuffer], *, is_input: bool
    ) -> RequestArgument:
        """As it is when the buffer is an ordinary memory."""
        buffer = None if argument.has_no_value else found.get(argument.pool)
        if buffer is None:
            return argument
        where, given = f"{'input' if is_input else 'output'} {n}", argument.dimensions
        if argument.offset or argument.length:
            raise InvalidArgument(
                f"{where}: {argument.length} bytes at {argument.offset} of a buffer; it is used whole: give 0, 0"
            )
        if Role(self._loaded.number, is_input, n) not in buffer.roles:
            raise InvalidArgument(f"{where}: buffer {buffer.token} was not allocated for that role")
        present = buffer.known if is_input and not buffer.is_fresh else buffer.dimensions
        if given and combine_dimensions(present, given) is None:
            raise InvalidArgument(f"{where}: dimensions {list(given)}, and those of the buffer are {list(present)}")
        length = buffer.size(buffer.known) if is_input and not buffer.is_fresh else buffer.nbytes
        return argument._replace(length=length, dimensions=present if is_input else given)

    def _grow(self, error: OutputInsufficientSize) -> None:
        """Room for what the buffers are to hold. Raises `error` where memory of the client's is too small."""
        shapes = error.result.output_shapes if error.result else ()
        grown = {n for _, n in self._written}
        for n, shape in enumerate(shapes):
            if not shape.is_sufficient and n not in grown:
                raise error
        for buffer, n in self._written:
            if shapes[n].is_sufficient:
                continue
            if buffer.is_fixed or not shapes[n].dimensions:
                raise GeneralFailure(
                    f"output {n} is {list(shapes[n].dimensions)}, and buffer {buffer.token} {list(buffer.dimensions)}"
                ) from error
            buffer.grow(buffer.size(shapes[n].dimensions))


def _check_alone(written: Sequence[ManagedBuffer], read: Sequence[ManagedBuffer]) -> None:
    """Raises InvalidArgument where an execution would write what it reads, or twice."""
    for n, buffer in enumerate(written):
        if any(buffer is other for other in (*written[:n], *read)):
            raise InvalidArgument(f"buffer {buffer.token} is an output, and an input or another output, too")
