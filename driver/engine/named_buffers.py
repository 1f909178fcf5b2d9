"""The buffers that one request names: checked against their roles, and what an execution makes of their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from burst import GeneralFailure, InvalidArgument
from burst._core import ffi, lib
from driver.engine.device_memory import ManagedBuffer, OperandRole
from driver.nn import combine_dimensions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from burst import OutputShape, Request, RequestArgument


class NamedBuffers:
    """The buffers of a request. `request` is the given one as it would be if they were ordinary memory."""

    def __init__(self, request: Request, found: Mapping[int, ManagedBuffer], model: int) -> None:
        """Check roles. `found`: buffers by the index of their pool. `model`: the number of the model in their roles.

        Raise InvalidArgument.
        """
        twins = {n: buffer.twin or buffer for n, buffer in found.items()}  # what is written
        inputs = [_argument(n, a, found, model, is_input=True) for n, a in enumerate(request.inputs)]
        outputs = [_argument(n, a, twins, model, is_input=False) for n, a in enumerate(request.outputs)]
        self.read = [found[a.pool] for a in inputs if not a.has_no_value and a.pool in found]
        self.written = [(twins[a.pool], n) for n, a in enumerate(outputs) if not a.has_no_value and a.pool in found]
        self._growing = [(b, b.held, n) for b, n in self.written if b.held and b.is_growing]
        self._fixed = [(b, n) for b, n in self.written if not b.is_growing]
        self._swapped = [found[a.pool] for a in outputs if a.pool in found and found[a.pool].twin]
        self._turns = [buffer.turn for buffer in found.values() if buffer.twin]
        self._with_twins = [buffer for buffer in found.values() if buffer.twin]
        check_alone([buffer for buffer, _ in self.written], self.read)
        self._named = list({id(b): b for b in (*found.values(), *twins.values())}.values())
        #: those that have no value until a run has succeeded; of one that the driver updates in place the old one stays
        self.cleared = [buffer for buffer, _ in self.written if not buffer.in_place]
        self._seen, self._versions = ManagedBuffer.changes, [b.version for b in self._named]
        sides = self.read, self.cleared
        reads, writes = (ffi.new("uint32_t *[]", [b.no_value for b in side] or [ffi.NULL]) for side in sides)
        self._words = reads, writes
        self._states = ffi.new("burst_managed *", (ffi.NULL, ffi.NULL, reads, writes, *map(len, sides)))
        self._promised = [
            (f"input {n}", a.dimensions, found[a.pool])
            for n, a in enumerate(request.inputs)
            if a.dimensions and a.pool in found and found[a.pool].is_growing
        ]
        pools = [found[n].pool if n in found else pool for n, pool in enumerate(request.pools)]
        for n, argument in enumerate(outputs):
            if argument.pool in found and found[argument.pool].twin:
                pools.append(twins[argument.pool].pool)
                outputs[n] = argument._replace(pool=len(pools) - 1)
        self.request = request._replace(inputs=tuple(inputs), outputs=tuple(outputs), pools=tuple(pools))

    @property
    def are_fixed(self) -> bool:
        """True if their sizes and places cannot change."""
        return all(buffer.is_fixed and not buffer.in_place for buffer in self._named)

    @property
    def are_known(self) -> bool:
        """True if the sizes of all that it reads are known: an execution to come may write an open one."""
        return all(buffer.has_value or buffer.is_fixed or buffer.is_growing for buffer in self.read)

    @property
    def have_changed(self) -> bool:
        """True if `request` no longer holds: make another object."""
        changes = ManagedBuffer.changes
        if changes == self._seen:  # of all buffers
            return False
        if self._versions != [b.version for b in self._named]:
            return True
        self._seen = changes
        return False

    @property
    def have_turned(self) -> bool:
        """True if buffers in place lie where `request` does not say: make another object, or take the one before."""
        return bool(self._turns) and self._turns != [buffer.turn for buffer in self._with_twins]

    def check_values(self) -> None:
        """Raise GeneralFailure when a buffer that is read has no value."""
        for buffer in self.read:
            buffer.check_value()
        for where, given, buffer in self._promised:
            _check_promise(where, given, buffer.known)

    def begin(self) -> None:
        """Begin an execution: what it writes has no value until `settle`. Raise GeneralFailure."""
        if lib.burst_managed_begin(self._states) or self._promised:
            self.check_values()

    def settle(self, shapes: Sequence[OutputShape]) -> None:
        """Note that the execution has written outputs of these shapes."""
        for buffer, n in self._fixed:
            buffer.settle(shapes[n].dimensions)
        for buffer, held, n in self._growing:  # in each step of a language model there are dozens
            if held.least <= held.buffer.nbytes <= held.most:
                buffer.known, buffer.no_value[0] = shapes[n].dimensions, 0
            else:
                buffer.settle(shapes[n].dimensions)
        for buffer in self._swapped:
            buffer.swap()

    def abandon(self) -> None:
        """Note that the execution has failed: what it should have written has no value."""
        for buffer in self.cleared:
            buffer.abandon()

    def grow(self, shapes: Sequence[OutputShape]) -> bool:
        """Make room for outputs of these shapes. False: memory of the client is too small. Raise GeneralFailure."""
        grown = {n for _, n in self.written}
        if any(not shape.is_sufficient and n not in grown for n, shape in enumerate(shapes)):
            return False
        for buffer, n in self.written:
            if shapes[n].is_sufficient:
                continue
            if buffer.is_fixed or not shapes[n].dimensions:
                raise GeneralFailure(
                    f"output {n} has dimensions {list(shapes[n].dimensions)}, but buffer {buffer.token} "
                    f"{list(buffer.dimensions)}"
                )
            nbytes = buffer.size(shapes[n].dimensions)
            buffer.grow(nbytes, spare=nbytes // 2)  # a value that grows by a row in each run needs new memory seldom
        return True


class _HasToken(Protocol):
    token: int
    in_place: bool


def check_alone(written: Sequence[_HasToken], read: Sequence[_HasToken]) -> None:
    """Raise InvalidArgument if an execution would write a buffer twice, or one that it reads and not in place."""
    taken, among = set[int](), set(map(id, read))
    for buffer in written:
        if id(buffer) in taken or (id(buffer) in among and not buffer.in_place):
            raise InvalidArgument(
                f"buffer {buffer.token} is an output and also an input or another output of this request"
            )
        taken.add(id(buffer))


def _argument(
    n: int, argument: RequestArgument, found: Mapping[int, ManagedBuffer], model: int, *, is_input: bool
) -> RequestArgument:
    """Return the argument as it would be if its buffer were ordinary memory."""
    buffer = None if argument.has_no_value else found.get(argument.pool)
    if buffer is None:
        return argument
    where, given = f"{'input' if is_input else 'output'} {n}", argument.dimensions
    if argument.offset or argument.length:
        raise InvalidArgument(
            f"{where}: {argument.length} bytes at offset {argument.offset} of a buffer; buffers are used whole: "
            "give offset 0 and length 0"
        )
    if OperandRole(model, is_input, n) not in buffer.roles:
        raise InvalidArgument(f"{where}: buffer {buffer.token} was not allocated for that role")
    present = buffer.known if is_input and buffer.has_value else buffer.dimensions
    _check_promise(where, given, present)
    if buffer.is_growing:
        return argument._replace(dimensions=buffer.dimensions if is_input else given)
    length = buffer.size(buffer.known) if is_input and buffer.has_value else buffer.nbytes
    return argument._replace(length=length, dimensions=present if is_input else given)


def _check_promise(where: str, given: tuple[int, ...], present: tuple[int, ...]) -> None:
    """Raise InvalidArgument if the request gives other dimensions than the buffer has."""
    if given and combine_dimensions(present, given) is None:
        raise InvalidArgument(f"{where}: dimensions {list(given)} contradict the buffer's {list(present)}")
