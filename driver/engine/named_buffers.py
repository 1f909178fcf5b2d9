"""The buffers that one request names: checked against their roles, and what an execution makes of their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from burst import GeneralFailure, InvalidArgument
from driver.engine.device_memory import OperandRole
from driver.nn import combine_dimensions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from burst import OutputShape, Request, RequestArgument
    from driver.engine.device_memory import ManagedBuffer


class NamedBuffers:
    """The buffers of a request. `request` is the given one as it would be if they were ordinary memory."""

    def __init__(self, request: Request, found: Mapping[int, ManagedBuffer], model: int) -> None:
        """Check roles. `found`: buffers by the index of their pool. `model`: the number of the model in their roles.

        Raise InvalidArgument.
        """
        inputs = [_argument(n, a, found, model, is_input=True) for n, a in enumerate(request.inputs)]
        outputs = [_argument(n, a, found, model, is_input=False) for n, a in enumerate(request.outputs)]
        self.read = [found[a.pool] for a in inputs if not a.has_no_value and a.pool in found]
        self.written = [(found[a.pool], n) for n, a in enumerate(outputs) if not a.has_no_value and a.pool in found]
        check_alone([buffer for buffer, _ in self.written], self.read)
        self._named = list(found.values())
        self._versions = [b.version for b in self._named]
        self._promised = [
            (f"input {n}", a.dimensions, found[a.pool])
            for n, a in enumerate(request.inputs)
            if a.dimensions and a.pool in found and found[a.pool].is_growing
        ]
        pools = tuple(found[n].pool if n in found else pool for n, pool in enumerate(request.pools))
        self.request = request._replace(inputs=tuple(inputs), outputs=tuple(outputs), pools=pools)

    @property
    def are_fixed(self) -> bool:
        """True if their sizes cannot change."""
        return all(buffer.is_fixed for buffer in self._named)

    @property
    def are_known(self) -> bool:
        """True if the sizes of all that it reads are known: an execution to come may write an open one."""
        return all(buffer.has_value or buffer.is_fixed or buffer.is_growing for buffer in self.read)

    @property
    def have_changed(self) -> bool:
        """True if `request` no longer holds: make another object."""
        return self._versions != [b.version for b in self._named]

    def check_values(self) -> None:
        """Raise GeneralFailure when a buffer that is read has no value."""
        for buffer in self.read:
            buffer.check_value()
        for where, given, buffer in self._promised:
            _check_promise(where, given, buffer.known)

    def begin(self) -> None:
        """Begin an execution: what it writes has no value until `settle`. Raise GeneralFailure."""
        for buffer, _ in self.written:
            buffer.has_value = False
        self.check_values()

    def settle(self, shapes: Sequence[OutputShape]) -> None:
        """Note that the execution has written outputs of these shapes."""
        for buffer, n in self.written:
            buffer.settle(shapes[n].dimensions)

    def abandon(self) -> None:
        """Note that the execution has failed: what it should have written has no value."""
        for buffer, _ in self.written:
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


def check_alone(written: Sequence[_HasToken], read: Sequence[_HasToken]) -> None:
    """Raise InvalidArgument if an execution would write a buffer twice, or one that it reads."""
    for n, buffer in enumerate(written):
        if any(buffer is other for other in (*written[:n], *read)):
            raise InvalidArgument(
                f"buffer {buffer.token} is an output and also an input or another output of this request"
            )


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
