"""Requests on buffers that the device manages: bound like others, and bound anew when a buffer has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst import GeneralFailure, InvalidArgument, OutputInsufficientSize
from burst._core import ffi, lib
from burst.wire import Token
from driver.engine.binding import BoundRequest
from driver.engine.device_memory import OperandRole
from driver.nn import arena, combine_dimensions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from burst import OutputShape, Request, RequestArgument
    from driver.engine.device_memory import LoadedModel, ManagedBuffer, ManagedBuffers

_RUN = ffi.addressof(lib, "burst_managed_run")
_NATIVE = "burst_function *", "void *"


def execution(loaded: LoadedModel, request: Request, buffers: ManagedBuffers, pace: Callable[[], object]) -> Any:
    """A burst.Execution of a request whose pools are `Memory`, or tokens of buffers.

    Raises InvalidArgument, GeneralFailure.
    """
    arena.source.set(buffers.quota.room)  # this thread works for this client
    found: BoundRequest | ManagedRequest
    if any(isinstance(pool, Token) for pool in request.pools):
        found = ManagedRequest(loaded, request, buffers, pace)
    else:
        found = BoundRequest(loaded.model, loaded.prepared, request, pace)
    found.estimate = loaded.shared.estimate_of(request)
    return found


class ManagedRequest:
    """A burst.Execution on buffers. Before each run it checks whether they have changed."""

    def __init__(
        self, loaded: LoadedModel, request: Request, buffers: ManagedBuffers, pace: Callable[[], object] = lambda: None
    ) -> None:
        """Raises InvalidArgument, GeneralFailure."""
        self._loaded, self._request, self._buffers, self._pace = loaded, request, buffers, pace
        self._bind()
        self.is_static = self._bound.is_static and all(b.is_fixed for b in self._named)
        self.native = self._native() if self.is_static and self._bound.native else None
        self.estimate: Any = None

    @property
    def shapes(self) -> Sequence[OutputShape]:
        """Shapes of the outputs, once it has run."""
        return self._bound.shapes

    @property
    def copied_bytes(self) -> int:
        """Bytes of arguments that each run copies."""
        return self._bound.copied_bytes

    @property
    def checked_bytes(self) -> int:
        """How many of these it copies only to check them."""
        return self._bound.checked_bytes

    def run(self) -> None:
        """Executes. Raises StatusError; the buffers that it should have written are fresh afterwards."""
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

    def _native(self) -> tuple[int, int]:
        """Does not check versions: a buffer of fixed size can only be released, and `release` drops the plans on it."""
        words = [[b.fresh for b in self._read], [b.fresh for b, _ in self._written]]
        reads, writes = (ffi.new("uint32_t *[]", found or [ffi.NULL]) for found in words)
        function, inner = (ffi.cast(kind, n) for kind, n in zip(_NATIVE, self._bound.native or (), strict=True))
        context = ffi.new("burst_managed *", (function, inner, reads, writes, *map(len, words)))
        self._kept = context, reads, writes
        return int(ffi.cast("uintptr_t", _RUN)), int(ffi.cast("uintptr_t", context))

    def cancel(self) -> None:
        """Ends the run in progress as soon as the device can. It will not run again."""
        self._bound.cancel()

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
            if not buffer.is_fixed:  # the others are checked at each run: an execution may still write to them
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
        """The argument as it would be if the buffer were ordinary memory."""
        buffer = None if argument.has_no_value else found.get(argument.pool)
        if buffer is None:
            return argument
        where, given = f"{'input' if is_input else 'output'} {n}", argument.dimensions
        if argument.offset or argument.length:
            raise InvalidArgument(
                f"{where}: {argument.length} bytes at offset {argument.offset} of a buffer; buffers are used whole: "
                "give offset 0 and length 0"
            )
        if OperandRole(self._loaded.number, is_input, n) not in buffer.roles:
            raise InvalidArgument(f"{where}: buffer {buffer.token} was not allocated for that role")
        present = buffer.known if is_input and not buffer.is_fresh else buffer.dimensions
        if given and combine_dimensions(present, given) is None:
            raise InvalidArgument(f"{where}: dimensions {list(given)} contradict the buffer's {list(present)}")
        length = buffer.size(buffer.known) if is_input and not buffer.is_fresh else buffer.nbytes
        return argument._replace(length=length, dimensions=present if is_input else given)

    def _grow(self, error: OutputInsufficientSize) -> None:
        """Grows the buffers to hold the outputs. Raises `error` if memory of the client is too small."""
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
                    f"output {n} has dimensions {list(shapes[n].dimensions)}, but buffer {buffer.token} "
                    f"{list(buffer.dimensions)}"
                ) from error
            buffer.grow(buffer.size(shapes[n].dimensions))


def _check_alone(written: Sequence[ManagedBuffer], read: Sequence[ManagedBuffer]) -> None:
    """Raises InvalidArgument if an execution would write a buffer twice, or one that it reads."""
    for n, buffer in enumerate(written):
        if any(buffer is other for other in (*written[:n], *read)):
            raise InvalidArgument(
                f"buffer {buffer.token} is an output and also an input or another output of this request"
            )
