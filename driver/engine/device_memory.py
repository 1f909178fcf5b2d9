"""Buffers that the device manages: the engine's side of the HAL's memory domains.

A buffer is allocated for roles: input or output k of certain prepared models. It has a value once an execution writes
it or a client copies something into it, and none when either of these fails. One without a value cannot be an input.
Dimensions that neither its description nor its roles fix are set by each write.

A buffer may be the driver's own (driver_memory.py). Whether it has a value is kept here.

Requests name a buffer by its token. A token is valid for one client only, and is never used again.
"""

from __future__ import annotations

import math
from itertools import chain, count, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from burst import (
    GeneralFailure,
    HardwareBuffer,
    InvalidArgument,
    Memory,
    StatusError,
)
from burst._core import ffi
from burst.memory import VendorMemory, undecodable
from driver.engine.driver_memory import DriverPool
from driver.engine.footprint import Footprint
from driver.engine.ledger import Claim, price
from driver.interface import BindOptions, BufferRequest, BufferUse
from driver.nn import combine_dimensions
from driver.options import PRIORITIES
from driver.protocol.buffers import BufferKind, BufferState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from driver.engine.driver_memory import DriverMemory, HeldBuffer
    from driver.engine.joining import Joining
    from driver.engine.models import SharedModel
    from driver.engine.quota import MemorySource, Quota
    from driver.interface import PreparedModel
    from driver.nn import Model, Operand
    from driver.protocol.model_memory import ModelBytes

_ALIGNMENT = 64
_LARGE = 2**18
_tokens, _changes = count(1), count(1)


class OperandRole(NamedTuple):
    """An input or output of a prepared model, given by the model's number."""

    model: int
    is_input: bool
    io_index: int

    def __str__(self) -> str:
        return f"{'input' if self.is_input else 'output'} {self.io_index} of prepared model {self.model}"

    def operand(self, model: Model) -> Operand:
        """Return the operand of that role. Raise InvalidArgument for an index that the model does not have."""
        graph = model.main
        side, what = (graph.inputs, "inputs") if self.is_input else (graph.outputs, "outputs")
        if not 0 <= self.io_index < len(side):
            raise InvalidArgument(f"io_index={self.io_index}: model {self.model} has {len(side)} {what}")
        return graph.operands[side[self.io_index]]


class RoleModel(Protocol):
    """A model for whose inputs and outputs a buffer can be allocated."""

    @property
    def number(self) -> int: ...
    @property
    def model(self) -> Model: ...


class LoadedModel(NamedTuple):
    """A client's handle on a prepared model."""

    number: int
    shared: SharedModel
    priority: int  #: of its executions: LOW, MEDIUM or HIGH
    charge: ModelCharge | None = None  #: for its memory; None: it is charged to no client
    own: PreparedModel | None = None  #: that its driver serves a burst with in the place of the shared one
    joining: Joining | None = None  #: None: its executions run alone

    @property
    def model(self) -> Model:
        return (self.own and self.own.prepared_from) or self.shared.model

    @property
    def prepared(self) -> PreparedModel:
        return self.own or self.shared.prepared

    def served_by(self, prepared: PreparedModel) -> LoadedModel:
        """Return the handle on what the driver serves a burst with. Raise ValueError if it has other arguments."""
        if prepared is self.prepared:
            return self  # also when an improved one replaces it
        found = self._replace(own=prepared, joining=None)
        mine, its = (_argument_types(model) for model in (self.model, found.model))
        if mine != its:
            raise ValueError(
                f"prepared={prepared!r:.80}: it has {its}, but the burst's model has {mine}; give a prepared model "
                "with the same inputs and outputs"
            )
        return found

    def options(self, pace: Callable[[], object]) -> BindOptions:
        """Return how requests of this client are bound to it."""
        return BindOptions(priority=PRIORITIES[self.priority], pace=pace)


def _argument_types(model: Model) -> str:
    graph = model.main
    sides = ([str(graph.operands[i].type.name) for i in side] for side in (graph.inputs, graph.outputs))
    return "inputs {} and outputs {}".format(*sides)


class ModelCharge:
    """A charge to the client for what one of its prepared models keeps in memory. Given back when it is dropped."""

    def __init__(self, quota: Quota, mappings: int = 0) -> None:
        """Take the charge. `mappings`: of its memory, beyond those of every model. Raise ResourceExhausted*."""
        self._quota = quota
        self._claims = [quota.take("close prepared models", **price("model", mappings=mappings))]

    def take(self, memory: ModelBytes) -> None:
        """Charge the memory of a model. Raise ResourceExhausted*."""
        self._claims += [self._quota.hold(key, nbytes) for key, nbytes in memory.occupied.items()]

    def take_decoded(self, shared: SharedModel, pace: Callable[[], object]) -> None:
        """Charge what the engine has made of it, too. Raise ResourceExhausted*."""
        shared.footprint = shared.footprint or Footprint.of(shared.model, pace)
        self._claims.append(self._quota.hold(("decoded", id(shared)), shared.footprint.model))


class ManagedBuffer:
    """A buffer that the engine manages. `version` changes whenever requests on it must be bound anew.

    dimensions: what its description and its roles fix. known: the present ones.
    """

    writable = True

    changes = 0
    """Another number whenever the version of any buffer in this process has changed."""

    def __init__(
        self,
        kind: BufferKind,
        dimensions: tuple[int, ...],
        roles: frozenset[OperandRole],
        quota: MemorySource,
        held: HeldBuffer | None = None,
    ) -> None:
        """Allocate. held: a driver's own memory, growing where dimensions are open; None: memory is from `quota`.

        Raise ResourceExhaustedTransient, ResourceExhaustedPersistent.
        """
        self.kind, self.dimensions, self.roles, self._quota = kind, dimensions, roles, quota
        self.token, self.version = next(_tokens), 0
        self.no_value = ffi.new("uint32_t *", 1)  #: 1 while it has none; read and written in C, too
        self.is_fixed = _is_fixed(kind, dimensions)
        self.known, self.held = dimensions, held
        self.in_place = False  #: whether one execution may have it as an input and as an output
        self.twin: ManagedBuffer | None = None  #: its memory for the output of an execution, of one in place
        self.turn = 0  #: changes whenever it has exchanged its memory with its twin's
        self.claim: Claim | None = None  #: what it costs beside its value, until it is gone
        self._array = quota.room(self.size(dimensions) if self.is_fixed and held is None else 0)

    @property
    def has_value(self) -> bool:
        """True if it can be an input."""
        return not self.no_value[0]

    @has_value.setter
    def has_value(self, there: bool) -> None:
        self.no_value[0] = not there

    def size(self, dimensions: tuple[int, ...]) -> int:
        """Return the bytes for that shape."""
        return math.prod(dimensions) * self.kind.type.element_size

    @property
    def state(self) -> BufferState:
        """The present state."""
        return BufferState(self.known if self.has_value else self.dimensions, self.has_value, self.dimensions)

    @property
    def pool(self) -> Any:
        """The object that stands in the pools of a bound request."""
        return self

    @property
    def nbytes(self) -> int:
        """The present capacity."""
        if self.held:
            return self.held.buffer.nbytes if self.is_growing else self.size(self.dimensions)
        return self._array.nbytes

    @property
    def is_growing(self) -> bool:
        """True for memory of the driver's whose value may have any shape: what is bound to it follows it."""
        return self.held is not None and self.held.is_growing

    def asarray(self, dtype: Any, shape: int, offset: int = 0) -> NDArray[Any]:
        """Return a view, like that of a `Memory`."""
        return self._array[offset : offset + shape].view(dtype)

    def settle(self, dimensions: tuple[int, ...]) -> None:
        """Note that it was written: it has a value of that shape now.

        Raise ResourceExhausted* where a driver's value has grown beyond what the client may have.
        """
        held = self.held
        if held is not None and held.is_growing:
            try:
                held.charge_growth()
            except StatusError:
                self.has_value = False
                raise
            self.known = dimensions
        elif dimensions != self.known:
            self.known = dimensions
            self._note_change()
        self.no_value[0] = 0

    def _note_change(self) -> None:
        self.version += 1
        ManagedBuffer.changes = next(_changes)

    def abandon(self) -> None:
        """Have no value, nor memory of the driver's for one: what a failed run left there is charged to nobody."""
        self.has_value = False
        if self.held is not None and self.held.is_growing:
            self.held.drop()

    def grow(self, nbytes: int, spare: int = 0) -> None:
        """Make room for `nbytes`, and `spare` where the client may have that, in a buffer whose size is not fixed.

        A buffer that grows loses its value. Raise ResourceExhausted*.
        """
        if nbytes <= self.nbytes:
            return
        self.has_value = False
        try:
            self._array = self._quota.room(nbytes + spare)
        except StatusError:
            if not spare:
                raise
            self._array = self._quota.room(nbytes)
        self._note_change()

    def be_in_place(self, twin: ManagedBuffer | None) -> None:
        """Let one execution have it as an input and as an output. `twin`: where the output is written; None: the
        driver does without. Raise InvalidArgument where it has not a role of each kind.
        """
        if len({role.is_input for role in self.roles}) < 2:
            raise InvalidArgument("in_place: the buffer needs a role as an input and one as an output")
        self.in_place, self.twin = True, twin

    def swap(self) -> None:
        """Have the value that an execution has just written to the twin."""
        twin = self.twin
        assert twin
        self._array, twin._array = twin._array, self._array
        self.held, twin.held = twin.held, self.held
        self.known, twin.known = twin.known, self.known
        self._quota, twin._quota = twin._quota, self._quota
        self.turn ^= 1
        self.has_value, twin.has_value = True, False

    def release(self) -> None:
        """Free its memory, a driver's once nothing is bound to it. Requests that are bound to it notice."""
        if self.twin:
            self.twin.release()
        self._array, self.held, self.has_value = self._array[:0], None, False
        self._note_change()

    def copy_from(self, memory: Memory, dimensions: tuple[int, ...]) -> None:
        """Copy `memory` in, as a value of that shape; (): as described. Raise StatusError; then it has no value."""
        try:
            found = self._fixed_by(dimensions)
            nbytes = self.size(found)
            _check_size(memory, nbytes, f"{self.kind.type.name} {list(found)}")
            self._write(memory.asarray(), found)
        except Exception:
            self.has_value = False
            raise
        self.settle(found)

    def copy(self, source: ManagedBuffer) -> None:
        """Copy the value of another buffer in.

        Raise InvalidArgument where that is of another kind, GeneralFailure where it has none; StatusError, and has no
        value then, where the dimensions do not fit or the driver fails.
        """
        if source is self:
            return
        if source.kind != self.kind:
            raise InvalidArgument(f"source: a buffer of {source.kind}; buffer {self.token} takes {self.kind}")
        source.check_value()
        try:
            found = self._fixed_by(source.known)
            if not (self.held and source.held and self.held.copy_across(source.held)):
                self._write(source._read(self.size(found)), found)
        except Exception:
            self.has_value = False
            raise
        self.settle(found)

    def _write(self, value: NDArray[np.uint8], dimensions: tuple[int, ...]) -> None:
        """Make the bytes its value, of that shape. It gets room for them where its size is not fixed."""
        if self.held is None:
            self.grow(value.nbytes)
            self._array[: value.nbytes] = value
            return
        if self.is_growing:
            self.held.reshape(dimensions)
        self.held.copy_from(value)

    def _read(self, nbytes: int) -> NDArray[np.uint8]:
        """Return its value; a copy where that has a layout of the driver's own."""
        if self.held is None:
            return self._array[:nbytes]
        found = self.held.in_place(nbytes)
        if found is None:
            found = self._quota.room(nbytes)
            self.held.copy_to(found)
        return found

    def copy_to(self, memory: Memory) -> None:
        """Copy its value out. Raise InvalidArgument, GeneralFailure."""
        nbytes = self.size(self.known) if self.is_fixed or self.has_value else memory.nbytes
        _check_size(memory, nbytes, f"buffer {self.token}")
        self.check_value()
        if not memory.writable:
            raise InvalidArgument("target: the memory is read-only; copy to writable memory")
        if self.held:
            self.held.copy_to(memory.asarray())
        else:
            memory.asarray()[:] = self._array[:nbytes]

    def seal(self, memory: Memory, uid: int) -> bytes:
        """Copy its value out, and return the digest by which `unseal` knows it again. Raise as `copy_to` does."""
        self.copy_to(memory)
        return self._digest(uid)

    def unseal(self, memory: Memory, dimensions: tuple[int, ...], digest: bytes, uid: int) -> None:
        """Make a sealed value its own. Raise GeneralFailure, and have no value, where it is another one; else as
        `copy_from` does.
        """
        self.copy_from(memory, dimensions)
        if self._digest(uid) != digest:  # of what it has now: the client can write to that memory
            self.abandon()
            raise GeneralFailure("the value was not saved by a device of this account, or was changed since")

    def _digest(self, uid: int) -> bytes:
        from driver.engine.cache.records import digest_of_value  # most devices never load blake3

        try:
            value: Any = self._read(self.size(self.known))
            return digest_of_value(uid, str(self.kind), self.known, value)
        except OSError as error:
            raise GeneralFailure(f"the device has no key to know saved values by: {error}") from error

    def check_value(self) -> None:
        """Raise GeneralFailure while it has no value."""
        if not self.has_value:
            raise GeneralFailure(
                f"buffer {self.token} has no value: nothing was written to it, or the last write failed"
            )

    def _fixed_by(self, given: tuple[int, ...]) -> tuple[int, ...]:
        if self.kind.type.is_scalar and given:
            raise InvalidArgument(f"dimensions={list(given)}: {self.kind.type.name} is a scalar and has none")
        if not given and not self.is_fixed:
            raise InvalidArgument(f"dimensions=(): the buffer's are {list(self.dimensions)}; give all of them")
        found = combine_dimensions(self.dimensions, given)
        if found is None or 0 in given:
            raise InvalidArgument(f"dimensions={list(given)} contradict the buffer's {list(self.dimensions)}")
        return found


def _is_fixed(kind: BufferKind, dimensions: tuple[int, ...]) -> bool:
    return kind.type.is_scalar or (bool(dimensions) and 0 not in dimensions)


def _check_size(memory: Memory, nbytes: int, what: str) -> None:
    if isinstance(memory, HardwareBuffer):
        raise GeneralFailure(f"bytes cannot be copied to or from an image in {memory.format}; use a pool of bytes")
    if isinstance(memory, VendorMemory):
        raise undecodable(memory.kind)
    if isinstance(memory, DriverPool) and memory.held:
        raise GeneralFailure(f"bytes cannot be copied to or from memory of kind {memory.kind}; use a pool of bytes")
    if memory.nbytes != nbytes:
        raise InvalidArgument(f"the memory has {memory.nbytes} bytes, but {what} has {nbytes}")


class BufferTerms(NamedTuple):
    """The terms of one buffer, for roles [model index, input or output index, frequency] of `models`."""

    dimensions: tuple[int, ...]
    models: Sequence[LoadedModel]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    in_place: bool = False


class _Wanted(NamedTuple):
    """A buffer that is to be allocated: what it is for, and what a driver is asked for."""

    kind: BufferKind
    roles: frozenset[OperandRole]
    request: BufferRequest
    grows: bool
    in_place: bool

    @classmethod
    def of(cls, terms: BufferTerms) -> Self:
        """Check the roles. Raise InvalidArgument."""
        kind, dimensions, roles = describe(terms.dimensions, terms.models, terms.inputs, terms.outputs)
        sides = (True, terms.inputs), (False, terms.outputs)
        uses = [BufferUse(terms.models[m].prepared, is_input, n, f) for is_input, side in sides for m, n, f in side]
        request = BufferRequest(kind.type, dimensions, tuple(uses))
        return cls(kind, roles, request, grows=not _is_fixed(kind, dimensions), in_place=terms.in_place)


class ManagedBuffers:
    """The buffers of one client, by token."""

    def __init__(self, quota: Quota, driver: DriverMemory | None = None) -> None:
        """Begin without buffers. `quota`: the client's, for its buffers and for the temporaries of its executions.
        `driver`: what may allocate in the engine's place.
        """
        self.quota, self._driver = quota, driver
        self._buffers: dict[int, ManagedBuffer] = {}

    def __getitem__(self, token: int) -> ManagedBuffer:
        """Return the buffer with that token. Raise InvalidArgument."""
        try:
            return self._buffers[token]
        except (KeyError, TypeError):
            raise InvalidArgument(f"token {token!r:.20}: no buffer of this client; it may have been released") from None

    def allocate_all(self, terms: Sequence[BufferTerms]) -> list[ManagedBuffer]:
        """Allocate buffers: all, or none.

        Raise InvalidArgument, ResourceExhaustedTransient, ResourceExhaustedPersistent; GeneralFailure for a driver
        that fails to allocate.
        """
        wanted = [_Wanted.of(each) for each in terms]
        claims = [self.quota.take("release buffers", **price("buffer")) for _ in wanted]
        growing = [each.request for each in wanted if each.grows]
        held = iter(self._driver.allocate_growing(growing, self.quota)) if self._driver else repeat(None)
        found = [self._buffer_of(each, next(held) if each.grows else self._held_of(each)) for each in wanted]
        for buffer, each, claim in zip(found, wanted, claims, strict=True):
            if each.in_place:
                is_one = buffer.held and buffer.held.buffer.in_place
                buffer.be_in_place(None if is_one else self._buffer_of(each, self._held_of(each)))
            buffer.claim = claim
        self._buffers.update((buffer.token, buffer) for buffer in found)
        return found

    def _buffer_of(self, wanted: _Wanted, held: HeldBuffer | None) -> ManagedBuffer:
        return ManagedBuffer(wanted.kind, wanted.request.dimensions, wanted.roles, self.quota, held=held)

    def _held_of(self, wanted: _Wanted) -> HeldBuffer | None:
        """Return the driver's own memory for one, if it has any."""
        if self._driver is None:
            return None
        if wanted.grows:
            return self._driver.allocate_growing([wanted.request], self.quota)[0]
        return self._driver.allocate(wanted.request, self.quota)

    def release(self, token: int) -> None:
        """Free a buffer. Raise InvalidArgument."""
        self[token].release()
        del self._buffers[token]

    def clear(self) -> None:
        """Drop all: the client is gone."""
        self._buffers.clear()


def describe(
    dimensions: tuple[int, ...], models: Sequence[RoleModel], inputs: Sequence[Any], outputs: Sequence[Any]
) -> tuple[BufferKind, tuple[int, ...], frozenset[OperandRole]]:
    """Return what a buffer for these roles is: its kind, the dimensions that are fixed, its roles.

    Raise InvalidArgument for roles that are given twice, do not exist or contradict each other.
    """
    roles = _roles(models, inputs, outputs)
    by_number = {each.number: each.model for each in models}
    operands = [role.operand(by_number[role.model]) for role in roles]
    kind = BufferKind.of(operands[0])
    for role, operand in zip(roles, operands, strict=True):
        if (other := BufferKind.of(operand)) != kind:
            raise InvalidArgument(f"{role} is {other}, and {roles[0]} is {kind}: they cannot share a buffer")
        combined = combine_dimensions(dimensions, operand.dimensions)
        if combined is None:
            raise InvalidArgument(
                f"{role} has dimensions {list(operand.dimensions)}, which contradict {list(dimensions)} from the "
                "description and the other roles"
            )
        dimensions = combined
    if kind.type.is_scalar and dimensions:
        raise InvalidArgument(f"dimensions={list(dimensions)}: {kind.type.name} is a scalar and has none")
    return kind, dimensions, frozenset(roles)


def _roles(models: Sequence[RoleModel], inputs: Sequence[Any], outputs: Sequence[Any]) -> list[OperandRole]:
    roles: list[OperandRole] = []
    sides: Iterable[tuple[bool, Any]] = chain(((True, r) for r in inputs), ((False, r) for r in outputs))
    for is_input, (model, index, frequency) in sides:
        if not 0 <= model < len(models):
            raise InvalidArgument(f"model_index={model}: {len(models)} prepared models were given")
        if not 0 < frequency <= 1:
            raise InvalidArgument(f"frequency={frequency}: must be above 0 and at most 1")
        role = OperandRole(models[model].number, is_input, index)
        if role in roles:
            raise InvalidArgument(f"{role} was given twice")
        roles.append(role)
    if not roles:
        raise InvalidArgument("a buffer needs at least one role of a prepared model")
    return roles
