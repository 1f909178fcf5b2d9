"""Memory domains: buffers that a device manages for its client, as the HAL's `allocate` makes them.

What an execution leaves in such a buffer the next one can read there: no byte of it passes through the client. A buffer
is an input or an output of a request where a `Memory` could be, as a whole:

    state = device.allocate(BufferDesc(), [prepared], [BufferRole(0, 1)], [BufferRole(0, 0)])
    Request(inputs=(RequestArgument(pool=0, length=640), RequestArgument(pool=1)), …, pools=(memory, state))
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np

from burst import BuffersLost, DeviceBuffer, InvalidArgument, Memory
from burst.backing import fill_holes
from burst.request_checks import check_pool
from driver.client import buffer_file
from driver.protocol.buffers import BufferKind, BufferState
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.client.connection import Connection
    from driver.client.prepared_model import RemotePreparedModel
    from driver.client.remote_executor import RemoteExecutor
    from driver.nn import Model

_NOWHERE = object()
_AT_ONCE = 256  # buffers in one call, whose message has at most 64 KiB


class BufferDesc(NamedTuple):
    """A wish for a buffer beyond its roles.

    dimensions: () is as the roles say; 0 where they stay open. in_place: one request may name it as an input and as an
    output; the input is the value of before, which stays if the execution fails. It needs a role of each kind.
    """

    dimensions: tuple[int, ...] = ()
    in_place: bool = False


class BufferRole(NamedTuple):
    """A use of a buffer: of the prepared model of that index in `allocate`, its input or output `io_index`.

    `frequency`: in which part of all executions it is used so, more than 0 and at most 1.
    """

    model_index: int
    io_index: int
    frequency: float = 1.0


def kind_of(
    models: Sequence[Model], input_roles: Sequence[BufferRole], output_roles: Sequence[BufferRole]
) -> BufferKind:
    """Return the kind of a buffer for these roles, which are valid."""
    role = (*input_roles, *output_roles)[0]
    graph = models[role.model_index].main
    return BufferKind.of(graph.operands[(graph.inputs if input_roles else graph.outputs)[role.io_index]])


class Buffer(Closing):
    """A memory for inputs and outputs of models, which a request names as a whole. Made by `allocate`.

    It has no value until an execution, or `copy_from`, has written one, nor after one of these has failed.
    """

    to_send = "copy it to a `Memory`, which can be sent, or allocate another one"

    token: int  #: in messages
    kind: BufferKind
    is_on_device: bool  #: and not in shared memory
    in_place = False  #: whether one request may name it as an input and as an output

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions of its value; without one, the fixed ones, 0 where open. Raises StatusError, PeerDied."""
        return self.state().dimensions

    @property
    def has_value(self) -> bool:
        """True if it can be an input. Raises StatusError, PeerDied."""
        return self.state().has_value

    @property
    def is_fresh(self) -> bool:
        """True if it has no value: the opposite of `has_value`. Raises StatusError, PeerDied."""
        return not self.has_value

    def copy_from(self, source: Buffer | Memory | NDArray[Any], dimensions: Sequence[int] = ()) -> None:
        """Make all of `source` its value. An array or a buffer says its own dimensions.

        Between buffers of one device the value does not leave that device; otherwise it comes through this process.

        Raise StatusError: INVALID_ARGUMENT where bytes or dimensions do not fit (then it has no value), or where
        `source` is a buffer of another type or quantisation; GENERAL_FAILURE where `source` is a buffer without a
        value. BuffersLost, ValueError for a buffer that is lost or closed; PeerDied.
        """
        if isinstance(source, Buffer):
            self._copy(source)
            return
        if isinstance(source, Memory):
            self.write(source, tuple(dimensions))
            return
        array = np.ascontiguousarray(source)
        memory = Memory.create(max(1, array.nbytes))
        memory.asarray(np.uint8, array.nbytes)[:] = array.reshape(-1).view(np.uint8)
        self.write(memory, tuple(dimensions) or source.shape)  # an array of a scalar has no dimensions, its copy one

    def copy_to(self, target: Buffer | Memory | NDArray[Any]) -> None:
        """Write its value to all of `target`.

        Raise StatusError (INVALID_ARGUMENT where the sizes differ, GENERAL_FAILURE when it has no value), PeerDied;
        for a buffer what that one's `copy_from` raises.
        """
        if isinstance(target, Buffer):
            target.copy_from(self)
        elif isinstance(target, Memory):
            self.read(target)
        else:
            memory = Memory.create(max(1, target.nbytes))
            self.read(memory)
            target[...] = memory.asarray(target.dtype, target.shape)

    def _copy(self, source: Buffer) -> None:
        if source is self or self.copied_inside(source):
            return
        if source.kind != self.kind:
            raise InvalidArgument(f"source: a buffer of {source.kind}; buffer {self.token} takes {self.kind}")
        state = source.state()
        memory = Memory.create(max(1, math.prod(state.dimensions) * self.kind.type.element_size))
        source.read(memory)
        self.write(memory, state.dimensions)

    def fork(self) -> Buffer:
        """Return another buffer for the same roles, with this one's value: two sequences go on from one beginning.

        It counts as a buffer of its own; a device that changes no value, as those of ONNX Runtime that grow, shares it.
        Raise as `allocate` and `copy_from` do, and ValueError when the models that it was allocated for are gone.
        """
        found = self.another()
        try:
            found.copy_from(self)
        except BaseException:
            found.close()
            raise
        return found

    def save(self, path: str | Path) -> None:
        """Write its value to a file, from which `restore` takes it, also after the death of the device.

        Raise StatusError, PeerDied as `copy_to` does, OSError.
        """
        state = self.state()
        memory = Memory.create(max(1, math.prod(state.dimensions) * self.kind.type.element_size))
        digest = self.seal(memory)
        buffer_file.write(path, self.kind, state.dimensions, memory, digest=digest)

    def restore(self, path: str | Path) -> None:
        """Make the value in a file its own, if `save` wrote it for a device of this account, and it is as it was.

        Raise StatusError: INVALID_ARGUMENT for other files, types and dimensions, GENERAL_FAILURE for a file that was
        changed; OSError, PeerDied.
        """
        saved = buffer_file.read(path, self.kind)
        self.unseal(saved.memory, saved.dimensions, saved.digest)

    @abstractmethod
    def another(self) -> Buffer:
        """Return a buffer for the same roles, without a value."""

    @abstractmethod
    def seal(self, memory: Memory) -> bytes:
        """Write its value to all of `memory`, and return the digest of it that its device knows again."""

    @abstractmethod
    def unseal(self, memory: Memory, dimensions: tuple[int, ...], digest: bytes) -> None:
        """Make all of `memory` its value, of these dimensions, if that is the digest. Raise GeneralFailure."""

    @abstractmethod
    def state(self) -> BufferState:
        """Return its present state. Raise StatusError, PeerDied."""

    @abstractmethod
    def write(self, memory: Memory, dimensions: tuple[int, ...]) -> None:
        """Make all of `memory` its value."""

    @abstractmethod
    def read(self, memory: Memory) -> None:
        """Write its value to all of `memory`."""

    def copied_inside(self, source: Buffer) -> bool:
        """Copy the value of `source` without bringing it to this process. False: not possible."""
        del source
        return False

    @abstractmethod
    def check(self, connection: Connection | None) -> None:
        """Raise BuffersLost, ValueError, InvalidArgument unless a request over this connection can name it."""


class RemoteBuffer(DeviceBuffer, Buffer):
    """A buffer on a device. It is released when it is closed, or let go.

    It belongs to one life of the device: after the device's death, using it raises BuffersLost.
    """

    is_on_device = True

    def __init__(self, connection: Connection, token: int, kind: BufferKind, again: Callable[[], Buffer]) -> None:
        """Use `device.allocate`. `again`: allocates another one for the same roles."""
        super().__init__(token)
        self._connection, self.kind, self._again = connection, kind, again
        self.place: object = connection  #: over which it can be used; of a closed one no connection

    def check(self, connection: Connection | None) -> None:
        """Raise BuffersLost, or ValueError, unless it can be used over this connection."""
        if self.place is _NOWHERE:
            raise closed(self.token)
        if connection is not self._connection:
            raise BuffersLost(
                f"buffer {self.token} belongs to a device that died, or to another connection; allocate it there"
            )

    def state(self) -> BufferState:
        return BufferState.from_wire(*self._call("buffer_state", self.token))

    def write(self, memory: Memory, dimensions: tuple[int, ...]) -> None:
        self._call("copy_from", self.token, list(dimensions), memory.to_wire(), fds=[self._sent(memory)])

    def read(self, memory: Memory) -> None:
        self._call("copy_to", self.token, memory.to_wire(), fds=[self._sent(memory)])

    def another(self) -> Buffer:
        return self._again()

    def seal(self, memory: Memory) -> bytes:
        return bytes(self._call("seal", self.token, memory.to_wire(), fds=[self._sent(memory)])[0])

    def unseal(self, memory: Memory, dimensions: tuple[int, ...], digest: bytes) -> None:
        self._call("unseal", self.token, list(dimensions), digest, memory.to_wire(), fds=[self._sent(memory)])

    def _sent(self, memory: Memory) -> int:
        if self._connection.is_foreign:
            fill_holes(memory.fd)
        return memory.fd

    def copied_inside(self, source: Buffer) -> bool:
        if not (isinstance(source, RemoteBuffer) and source._connection is self._connection):
            return False
        source.check(self._connection)
        self._call("copy", source.token, self.token)
        return True

    def _call(self, method: str, *arguments: object, fds: Sequence[int] = ()) -> list[Any]:
        self.check(self._connection)
        return self._connection.call(method, *arguments, fds=fds)[0]

    def close(self) -> None:
        """Free its memory on the device. Harmless when done twice, and when the device is gone."""
        if self.place is not _NOWHERE:
            self.place = _NOWHERE
            self._connection.buffers.discard(self)
            self._connection.free("release", self.token)

    def __del__(self) -> None:
        if self.place is not _NOWHERE:
            self._connection.drop("release", self.token)


class BufferWish(NamedTuple):
    """The arguments of `RemoteDevice.allocate` for one buffer."""

    desc: BufferDesc
    models: Sequence[RemotePreparedModel | RemoteExecutor]
    input_roles: Sequence[BufferRole] = ()
    output_roles: Sequence[BufferRole] = ()

    def to_wire(self, connection: Connection) -> list[object]:
        """Return the arguments of the call. Raise InvalidArgument for a model that is not there."""
        homes = [prepared.present_home() for prepared in self.models]
        for n, home in enumerate(homes):
            if home.connection is not connection:
                raise InvalidArgument(f"prepared_models[{n}] was prepared on another device or connection than this")
        more = [True] if self.desc.in_place else []
        numbers = [home.number for home in homes]
        return [self.desc.dimensions, numbers, list(self.input_roles), list(self.output_roles), *more]

    def granted(self, connection: Connection, token: int) -> RemoteBuffer:
        """Return the buffer with that token."""
        desc, inputs, outputs = self.desc, self.input_roles, self.output_roles
        again = partial(_allocated_again, desc, [ref(each.remote) for each in self.models], inputs, outputs)
        found = RemoteBuffer(connection, token, kind_of([each.model for each in self.models], inputs, outputs), again)
        found.in_place = desc.in_place
        connection.buffers.add(found)
        return found


class _ComingBuffer:
    """A buffer that the device is asked for."""


def allocated(connection: Connection, wishes: Sequence[BufferWish]) -> list[Buffer]:
    """Allocate buffers over this connection: all, or none. Raise StatusError, PeerDied."""
    connection.buffers.add(coming := _ComingBuffer())
    rows, found = [wish.to_wire(connection) for wish in wishes], list[Buffer]()
    for begin in range(0, len(rows), _AT_ONCE):
        some = rows[begin : begin + _AT_ONCE]
        tokens, _ = connection.call("allocate_all", *some) if len(some) > 1 else connection.call("allocate", *some[0])
        found += [wish.granted(connection, n) for wish, n in zip(wishes[begin:], tokens, strict=False)]
    del coming
    return found


def _allocated_again(
    desc: BufferDesc,
    models: Sequence[Callable[[], RemoteExecutor | None]],
    input_roles: Sequence[BufferRole],
    output_roles: Sequence[BufferRole],
) -> Buffer:
    """Allocate once more. Raise as `allocate`, and ValueError where a model is gone. It keeps none of them alive."""
    found = [model for each in models if (model := each())]
    if len(found) < len(models):
        raise ValueError("the models that this buffer was allocated for are gone: keep them as long as you fork it")
    return found[0].device.allocate(desc, found, input_roles, output_roles)


def closed(token: int) -> ValueError:
    """Return the error about a buffer that its owner has closed."""
    return ValueError(f"buffer {token} is closed; allocate another")


def check_buffers(pools: Sequence[object], connection: Connection | None) -> None:
    """Raise TypeError, ValueError, BuffersLost for what cannot be a pool of a request there.

    `connection`: to the device; None: to this process.
    """
    for n, pool in enumerate(pools):
        # These first, because an abstract class takes long to say whose instance something is.
        kind = type(pool)
        if kind is RemoteBuffer and pool.place is connection:  # type: ignore[attr-defined]
            continue
        if kind is Memory and not pool.is_closed:  # type: ignore[attr-defined]
            continue
        if isinstance(pool, Buffer):
            pool.check(connection)
        else:
            check_pool(n, pool)
