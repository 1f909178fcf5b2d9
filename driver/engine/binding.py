"""Checks a request against a model and binds its arguments to arrays.

The rules are those of the HAL's request validation; any breach is INVALID_ARGUMENT, and nothing is executed.
Requests on buffers that the device manages are bound like others, and bound anew when a buffer has changed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from burst import (
    ErrorStatus,
    GeneralFailure,
    HardwareBuffer,
    InvalidArgument,
    Memory,
    MissedDeadlineTransient,
    OutputShape,
    Result,
    StatusError,
)
from burst import OutputInsufficientSize as InsufficientSize
from burst._core import ffi, lib
from burst.execution import Execution
from burst.memory import VendorMemory, undecodable
from burst.memory_limits import check_available
from burst.messages import Cause
from burst.request_checks import check_request
from burst.wire import Token
from driver.engine.device_memory import ManagedBuffer
from driver.engine.driver_execution import DriverExecution
from driver.engine.driver_memory import DriverPool
from driver.engine.joining import JoinedRequest, joined
from driver.engine.named_buffers import NamedBuffers
from driver.errors import DriverError, ExecutionFailed, LoopTimeout, OutputInsufficientSize
from driver.interface import BindOptions, BufferArgument
from driver.nn import LONGEST_LOOP_TIMEOUT, LOOP_TIMEOUT, arena, combine_dimensions
from driver.nn.arena import memory
from driver.nn.file_form import takes_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from burst import Request, RequestArgument
    from driver.engine.device_memory import LoadedModel, ManagedBuffers
    from driver.engine.driver_memory import HeldBuffer
    from driver.engine.ledger import Claim
    from driver.engine.quota import Quota
    from driver.interface import BoundExecution, PreparedModel
    from driver.nn import Model, Operand

    Array = NDArray[Any]

_USUAL = BindOptions()


class PoolAccess:
    """The pools of one bound request, what is done before and after each run, and the driver's buffers among them.

    Images are gathered and scattered, and shared pools synchronised. `copied_bytes`: what each run copies, because an
    image has gaps between rows.
    """

    def __init__(self) -> None:
        self._before: list[Callable[[], object]] = []
        self._after: list[Callable[[], object]] = []
        self._synced: dict[Memory, bool] = {}  # whether the run writes to it
        self._shapes: dict[int, tuple[int, ...]] = {}  # of outputs that are images
        self.held: list[HeldBuffer] = []
        self.copied_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._before or self._after or self._synced)

    def uses(self, pool: Memory, *, writes: bool) -> None:
        """Note that the request reads or writes this pool, which is synchronised."""
        self._synced[pool] = writes or self._synced.get(pool, False)

    def hold(self, where: str, argument: RequestArgument, operand: Operand, pool: DriverPool | ManagedBuffer) -> Any:
        """Return what `bind` gets for a driver's buffer, in the place of an array. Raise InvalidArgument."""
        assert pool.held
        if isinstance(pool, DriverPool) and pool.held.buffer.is_linear:
            return self._part(where, argument, operand, pool)
        if argument.offset or argument.length not in {0, pool.nbytes}:
            raise InvalidArgument(
                f"{where}: {argument.length} bytes at offset {argument.offset} of a buffer of the driver; it is used "
                "whole: give offset 0 and length 0"
            )
        self.held.append(pool.held)
        return BufferArgument(pool.held.buffer, _dimensions(where, argument, operand))

    def _part(self, where: str, argument: RequestArgument, operand: Operand, pool: DriverPool) -> BufferArgument:
        """Return an argument at an offset of linear memory that the CPU cannot use. Raise InvalidArgument."""
        assert pool.held
        dimensions, size = _dimensions(where, argument, operand), operand.type.element_size
        nbytes = argument.length or pool.nbytes - argument.offset
        if not 0 <= argument.offset < pool.nbytes or nbytes > pool.nbytes - argument.offset:
            raise InvalidArgument(f"{where}: {nbytes} bytes at {argument.offset} exceed the pool's {pool.nbytes}")
        if argument.offset % size:
            raise InvalidArgument(f"{where}: offset {argument.offset} is not a multiple of the element's {size} bytes")
        if 0 not in dimensions and (needed := math.prod(dimensions) * size) > nbytes and where.startswith("input"):
            raise InvalidArgument(f"{where}: {nbytes} bytes are too few for {list(dimensions)}, which take {needed}")
        self.held.append(pool.held)
        return BufferArgument(pool.held.buffer, dimensions, argument.offset, nbytes)

    def input(self, where: str, argument: RequestArgument, operand: Operand, image: HardwareBuffer) -> Array:
        """Return the image as an input array. Raise InvalidArgument."""
        dimensions = _image_dimensions(where, argument, operand, image)
        found = image.view()
        if found is None:
            found = _staging(image)
            self._before.append(partial(image.gather, found))
            self.copied_bytes += found.nbytes
        return found.reshape(dimensions)

    def output(self, n: int, argument: RequestArgument, operand: Operand, image: HardwareBuffer) -> Array:
        """Return the memory for output `n`, which is this image. Raise InvalidArgument."""
        self._shapes[n] = _image_dimensions(f"output {n}", argument, operand, image)
        found = image.view()
        if found is None:
            found = _staging(image)
            self._after.append(partial(image.scatter, found))
            self.copied_bytes += found.nbytes
        return found.reshape(-1).view(np.uint8)

    def with_image_shapes(self, request: Request) -> Request:
        """Return the request, with the image's shape for each output that is an image."""
        if not self._shapes:
            return request
        outputs = enumerate(request.outputs)
        return request._replace(
            outputs=tuple(a._replace(dimensions=self._shapes.get(n, a.dimensions)) for n, a in outputs)
        )

    def wrap(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return `run` with all this before and after it; `run` itself if there is nothing to do."""
        return partial(self._run, run) if self else run

    def _run(self, run: Callable[[], object]) -> None:
        synced = list(self._synced.items())
        for pool, writes in synced:
            pool.begin(writes=writes)
        try:
            for copy in self._before:
                copy()
            run()
            for copy in self._after:
                copy()
        finally:
            for pool, writes in synced:
                pool.end(writes=writes)


def _staging(image: HardwareBuffer) -> Array:
    """Return memory without gaps for a copy of the image. Raise ResourceExhaustedPersistent."""
    nbytes = math.prod(image.shape) * image.dtype.itemsize
    check_available(nbytes)
    return memory(nbytes).view(image.dtype).reshape(image.shape)


def _image_dimensions(
    where: str, argument: RequestArgument, operand: Operand, image: HardwareBuffer
) -> tuple[int, ...]:
    """Return the operand's dimensions, if the image fits: its own, with more or fewer axes of length 1."""
    if argument.offset or argument.length:
        raise InvalidArgument(
            f"{where}: {argument.length} bytes at offset {argument.offset} of an image; images are used whole: give "
            "offset 0 and length 0"
        )
    if operand.type.is_scalar or operand.type.stored_dtype != image.dtype:
        raise InvalidArgument(
            f"{where}: the operand is {operand.type.name}, but an image in {image.format} has {image.dtype}"
        )
    wanted = combine_dimensions(operand.dimensions, argument.dimensions)
    if wanted is not None and wanted and 0 not in wanted and _long(wanted) == _long(image.shape):
        return wanted
    found = None if wanted is None else combine_dimensions(wanted, image.shape)
    if found is None:
        raise InvalidArgument(
            f"{where}: dimensions {list(argument.dimensions or operand.dimensions)} do not fit: an image in "
            f"{image.format} of "
            f"{image.width} x {image.height} has dimensions {list(image.shape)}"
        )
    return found


def _long(dimensions: tuple[int, ...]) -> list[int]:
    return [d for d in dimensions if d != 1]


def check_arguments(model: Model, request: Request) -> None:
    """Check a request as binding does, without binding it. Raise InvalidArgument.

    Memory that only a device knows is not checked.
    """
    check_request(request.inputs, request.outputs, len(request.pools))
    if all(isinstance(pool, Memory) and not isinstance(pool, VendorMemory) for pool in request.pools):
        _arrays(model, request, PoolAccess())
    else:
        _check_counts(model, request)


def _arrays(model: Model, request: Request, access: PoolAccess) -> tuple[list[Array | None], list[Array]]:
    """Return inputs and outputs, in the request's pools. Raise InvalidArgument."""
    _check_counts(model, request)
    graph = model.main
    is_file = takes_empty(model)
    inputs = [
        _input(n, a, graph.operands[i], request, access=access, is_file=is_file)
        for n, (a, i) in enumerate(zip(request.inputs, graph.inputs, strict=False))
    ]
    outputs = [
        _output(n, a, graph.operands[i], request, access=access)
        for n, (a, i) in enumerate(zip(request.outputs, graph.outputs, strict=False))
    ]
    return inputs, outputs


class BoundRequest(Execution):
    """A request on one prepared model, checked, with its arrays in the pools."""

    claim: Claim | None = None
    """What it costs its client, given back with it."""

    def __init__(
        self,
        model: Model,
        prepared: PreparedModel,
        request: Request,
        options: BindOptions = _USUAL,
        around: Callable[[BoundExecution, Sequence[HeldBuffer]], DriverExecution] = DriverExecution,
    ) -> None:
        """Check and bind. `options`: with the request's loop timeout. `around`: what is done around the execution.

        Raise InvalidArgument for a request that does not fit, GeneralFailure for what cannot be computed.
        """
        access = PoolAccess()
        inputs, outputs = _arrays(model, request, access)
        request = access.with_image_shapes(request)
        try:
            bound = prepared.bind(inputs, outputs, options._replace(loop_timeout=loop_timeout_of(request)))
        except ExecutionFailed as error:
            raise GeneralFailure(str(error)) from error
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
        self._driver = driver = around(bound, access.held)
        #: its inputs and outputs, where nothing but the memory of clients is involved
        self.arrays = None if access or access.held else (inputs, outputs)
        self.is_static = prepared.is_static if bound.is_static is None else bound.is_static
        if self.is_static:
            _check_shapes(request, bound)
        is_fit = self.is_static and all(enough for _, enough in bound.shapes)
        if is_fit and not access:
            self.native = driver.native
            self.launch = driver.launch and partial(_launch, driver.launch)
        told = any(a.dimensions for a in request.outputs) and request
        run = partial(_run_static, driver.run) if self.is_static else partial(_run, told, driver)
        self.run = access.wrap(driver.run if is_fit and bound.is_infallible else run)
        self.copied_bytes = bound.copied_bytes + access.copied_bytes
        self.checked_bytes = bound.checked_bytes

    @property
    def shapes(self) -> Sequence[OutputShape]:  # type: ignore[override]  # follows the driver's
        """The shapes of the outputs, once it has run."""
        return self._driver.shapes

    def failure(self, status: ErrorStatus) -> Exception:
        """Return why `native` has returned that status."""
        return _as_answer(self._driver.failure(status))

    def cancel(self) -> None:
        """End the run in progress as soon as the device can. It will not run again."""
        self._driver.cancel()


def loop_timeout_of(request: Request) -> float:
    """Return the seconds that each WHILE may take."""
    return LOOP_TIMEOUT if request.loop_timeout is None else min(request.loop_timeout / 1e9, LONGEST_LOOP_TIMEOUT)


def _launch(launch: Callable[[int], object], run: int) -> None:
    try:
        launch(run)
    except DriverError as error:
        raise _as_answer(error) from error


def _run_static(run: Callable[[], object]) -> None:
    """Run. The shapes of its outputs never change, and were checked when it was bound."""
    try:
        run()
    except DriverError as error:
        raise _as_answer(error) from error


def _run(request: Request | Literal[False], execution: DriverExecution) -> None:
    try:
        execution.run()
        if request:
            _check_shapes(request, execution)
    except DriverError as error:
        raise _as_answer(error) from error


def _as_answer(error: Exception) -> Exception:
    """Return the status that stands for what a device raises; other errors stay what they are."""
    match error:
        case OutputInsufficientSize():
            shapes = tuple(OutputShape(*shape) for shape in error.shapes)
            return InsufficientSize(str(error), Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (), shapes))
        case LoopTimeout():
            return MissedDeadlineTransient(str(error), cause=Cause("executing"))
        case ExecutionFailed():
            return GeneralFailure(str(error))
    return error


def _check_shapes(request: Request, bound: BoundExecution | DriverExecution) -> None:
    """Raise GeneralFailure where the request gives an output's shape and it is wrong, as the HAL demands."""
    for n, (argument, (found, _)) in enumerate(zip(request.outputs, bound.shapes, strict=True)):
        if argument.dimensions and combine_dimensions(argument.dimensions, found) is None:
            raise GeneralFailure(
                f"output {n}: the request gives dimensions {list(argument.dimensions)}, but its shape is {list(found)}"
            )


def _check_counts(model: Model, request: Request) -> None:
    graph = model.main
    for what, given, expected in (
        ("inputs", request.inputs, graph.inputs),
        ("outputs", request.outputs, graph.outputs),
    ):
        if len(given) != len(expected):
            raise InvalidArgument(f"{len(given)} {what}; the model has {len(expected)}")


def _input(
    n: int, argument: RequestArgument, operand: Operand, request: Request, access: PoolAccess, *, is_file: bool
) -> NDArray[Any] | None:
    if argument.has_no_value:
        return None
    pool = _pool(argument, request)
    if isinstance(pool, Memory) and pool.needs_sync:
        access.uses(pool, writes=False)
    if isinstance(pool, HardwareBuffer):
        return access.input(f"input {n}", argument, operand, pool)
    dims = _dimensions(f"input {n}", argument, operand)
    is_known = 0 not in dims and (dims or operand.type.is_scalar)
    if isinstance(pool, DriverPool | ManagedBuffer) and pool.held and (is_known or pool.held.is_growing):
        return access.hold(f"input {n}", argument, operand, pool)  # type: ignore[no-any-return]
    memory = _memory(f"input {n}", argument, pool)
    if not is_known and not (is_file and _is_empty_or_single(argument, operand)):
        raise InvalidArgument(f"input {n}: dimensions {dims} are not fully known; give them in the request")
    dtype = operand.type.stored_dtype
    needed = math.prod(dims) * dtype.itemsize
    if needed > len(memory):
        raise InvalidArgument(f"input {n}: {len(memory)} bytes are too few for {operand.type.name} {list(dims)}")
    return memory[:needed].view(dtype).reshape(dims)


def _is_empty_or_single(argument: RequestArgument, operand: Operand) -> bool:
    """Return True for an input of a model file without elements, or one element of a tensor of unknown rank."""
    is_ranked = bool(argument.dimensions or operand.dimensions)
    return argument.length == (0 if is_ranked else operand.type.element_size)


def _output(n: int, argument: RequestArgument, operand: Operand, request: Request, access: PoolAccess) -> NDArray[Any]:
    if argument.has_no_value:
        raise InvalidArgument(f"output {n}: only inputs may be omitted")
    pool = _pool(argument, request)
    if not pool.writable:
        raise InvalidArgument(f"output {n}: pool {argument.pool} is read-only; put outputs into a writable pool")
    if isinstance(pool, Memory) and pool.needs_sync:
        access.uses(pool, writes=True)
    if isinstance(pool, HardwareBuffer):
        return access.output(n, argument, operand, pool)
    if isinstance(pool, DriverPool | ManagedBuffer) and pool.held:
        return access.hold(f"output {n}", argument, operand, pool)  # type: ignore[no-any-return]
    _dimensions(f"output {n}", argument, operand)
    return _memory(f"output {n}", argument, pool)


def _dimensions(where: str, argument: RequestArgument, operand: Operand) -> tuple[int, ...]:
    """Return the request's dimensions if it gives them, else the model's. Raise InvalidArgument: they contradict."""
    given, declared = argument.dimensions, operand.dimensions
    if not given:
        return declared
    if operand.type.is_scalar or (declared and len(given) != len(declared)):
        raise InvalidArgument(f"{where}: dimensions {list(given)} differ in rank from the model's {list(declared)}")
    if any(m not in (0, g) for m, g in zip(declared, given, strict=False) if g):
        raise InvalidArgument(f"{where}: dimensions {list(given)} contradict the model's {list(declared)}")
    return given


def _pool(argument: RequestArgument, request: Request) -> Memory:
    pool: Memory = request.pools[argument.pool]
    if isinstance(pool, VendorMemory):
        raise undecodable(pool.kind)
    return pool


def _memory(where: str, argument: RequestArgument, pool: Memory) -> NDArray[np.uint8]:
    """Return the argument's bytes in its pool."""
    if argument.offset + argument.length > pool.nbytes:
        raise InvalidArgument(f"{where}: {argument.length} bytes at {argument.offset} exceed the pool's {pool.nbytes}")
    return pool.asarray(np.uint8, argument.length, argument.offset)


_RUN, _NATIVE = ffi.addressof(lib, "burst_managed_run"), ("burst_function *", "void *")


def execution(
    loaded: LoadedModel, request: Request, buffers: ManagedBuffers, pace: Callable[[], object]
) -> BoundRequest | ManagedRequest | JoinedRequest:
    """Bind a request, whose pools are `Memory`, or tokens of buffers. Raise InvalidArgument, GeneralFailure."""
    charge_thread(buffers.quota)
    found: BoundRequest | ManagedRequest
    if Token in set(map(type, request.pools)):
        found = ManagedRequest(loaded, request, buffers, pace)
    else:
        options = loaded.options(pace)._replace(loop_timeout=loop_timeout_of(request))
        found = _bound(loaded, request, options)
        if together := joined(loaded, found, options):
            return together
    found.estimate = loaded.shared.estimates.of(request)
    return found


def _bound(loaded: LoadedModel, request: Request, options: BindOptions) -> BoundRequest:
    shared = loaded.shared
    return shared.noted(BoundRequest(loaded.model, loaded.prepared, request, options, around=shared.execution))


def charge_thread(quota: Quota) -> None:
    """Have what this thread allocates from now on charged to this client."""
    arena.source.set(quota.room)
    arena.on_accelerator.set(partial(_count_on_gpu, quota))


def _count_on_gpu(quota: Quota, nbytes: int) -> Claim:
    return quota.take("close bursts, or use fewer different requests", gpu_bytes=nbytes)


class ManagedRequest(Execution):
    """A request on buffers. Before each run it checks whether they have changed.

    The value of a buffer is demanded when a run begins, because an execution that is still to come may write it. While
    a buffer of open dimensions has no value, only its role is checked, and the run binds the rest.
    """

    claim: Claim | None = None
    """What it costs its client, given back with it."""

    def __init__(
        self, loaded: LoadedModel, request: Request, buffers: ManagedBuffers, pace: Callable[[], object] = lambda: None
    ) -> None:
        """Bind it, if sizes are known. Raise InvalidArgument, GeneralFailure."""
        self._loaded, self._request, self._buffers, self._options = loaded, request, buffers, loaded.options(pace)
        self._named: NamedBuffers
        self._is_cancelled, self._found = False, cast("Sequence[OutputShape] | None", None)
        self._bound: BoundRequest | None = None
        self._other: tuple[NamedBuffers, BoundRequest | None] | None = None  # for the other turn of buffers in place
        bound = self._bind()
        self.written = ffi.new("uint32_t *[]", [buffer.no_value for buffer in self._named.cleared])
        self.is_static = bound is not None and bound.is_static and self._named.are_fixed
        self.native = self._native(bound.native) if bound and self.is_static and bound.native else None
        begins = bound is not None and self.is_static and bound.launch is not None
        self._is_launched = begins and all(buffer.held for buffer, _ in self._named.written)

    @property
    def launch(self) -> Callable[[int], object] | None:  # type: ignore[override]  # no cycle: no garbage is collected
        """The method that begins what `run` does; None where the driver cannot do so.

        All that is written lies in the driver's own memory: it puts what reads that memory later after this.
        """
        return self._launch if self._is_launched else None

    @property
    def shapes(self) -> Sequence[OutputShape]:  # type: ignore[override]  # follows what is bound
        """The shapes of the outputs, once it has run."""
        if self._found is None:
            self._found = self._bound.shapes if self._bound else ()
        return self._found

    @property
    def copied_bytes(self) -> int:  # type: ignore[override]  # follows what is bound
        """The bytes of arguments that each run copies."""
        return self._bound.copied_bytes if self._bound else 0

    @property
    def checked_bytes(self) -> int:  # type: ignore[override]  # follows what is bound
        """The part of these bytes that it copies only to check them."""
        return self._bound.checked_bytes if self._bound else 0

    def run(self) -> None:
        """Execute. Raise StatusError; the buffers that it should have written have no value afterwards."""
        self._found = None
        if self._named.have_turned:
            self._turn()
        bound = self._bind() if self._bound is None or self._named.have_changed else self._bound
        self._named.begin()
        if bound is None or self._is_cancelled:
            raise GeneralFailure("it was cancelled, or another execution took the value of a buffer that it reads")
        try:
            self._run_or_grow(bound)
            self._named.settle(self.shapes)
        except BaseException:
            self._named.abandon()
            raise

    def _turn(self) -> None:
        """Go on with what is bound to the memory that buffers in place have now, which takes turns with another one."""
        before, self._other = self._other, (self._named, self._bound)
        if before and not before[0].have_turned:
            self._named, self._bound = before
        else:
            self._bind()

    def _run_or_grow(self, bound: BoundRequest) -> None:
        """Run, once more with more room where buffers may have it."""
        try:
            bound.run()
        except InsufficientSize as error:
            if not self._named.grow(error.result.output_shapes if error.result else ()):
                raise
            if (more := self._bind()) is None:
                raise
            more.run()

    def _launch(self, run: int) -> None:
        """Begin a run. Raise StatusError; then the buffers that it writes have no value.

        Else they have one from now on, for requests that come after it: the driver puts them after it, too.
        """
        bound = self._bound
        if bound is None or bound.launch is None or self._is_cancelled or self._named.have_changed:
            raise GeneralFailure("it was cancelled, or a buffer of it was released")
        self._named.begin()
        for buffer, _ in self._named.written:
            buffer.has_value = True  # before it begins: once it has, its end may say otherwise
        try:
            bound.launch(run)
        except BaseException:
            for buffer, _ in self._named.written:
                buffer.has_value = False
            raise

    def _native(self, inner: tuple[int, int]) -> tuple[int, int]:
        """Run without checking versions.

        A buffer of fixed size can only be released, and `release` drops the plans on it.
        """
        reads = ffi.new("uint32_t *[]", [b.no_value for b in self._named.read] or [ffi.NULL])
        function, its = (ffi.cast(kind, n) for kind, n in zip(_NATIVE, inner, strict=True))
        counts = len(self._named.read), len(self._named.written)
        context = ffi.new("burst_managed *", (function, its, reads, self.written, *counts))
        self._kept = context, reads
        return int(ffi.cast("uintptr_t", _RUN)), int(ffi.cast("uintptr_t", context))

    def failure(self, status: ErrorStatus) -> Exception:
        """Return why `native` has returned that status: a buffer that it reads has no value, or the run failed."""
        assert self._bound
        try:
            self._named.check_values()
            return self._bound.failure(status)
        except StatusError as error:
            return error

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._bound:
            self._bound.cancel()

    def _bind(self) -> BoundRequest | None:
        """Bind the request; None while the size of a buffer that it reads is not known.

        Raise InvalidArgument, GeneralFailure; then the buffers that it should have written have no value.
        """
        self._bound = None
        pools = enumerate(self._request.pools)
        found = {n: self._buffers[pool.token] for n, pool in pools if isinstance(pool, Token)}
        try:
            named = self._named = NamedBuffers(self._request, found, self._loaded.number)
            if named.are_known:
                self._bound = _bound(self._loaded, named.request, self._options)
        except Exception:
            for argument in self._request.outputs:
                if not argument.has_no_value and argument.pool in found and not found[argument.pool].in_place:
                    found[argument.pool].has_value = False
            raise
        return self._bound
