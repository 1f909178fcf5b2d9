"""memory: what a driver makes of memory of its own: buffers in any layout, handles of kinds that it alone knows.

The kit cannot make a valid handle. It makes wrong ones of each kind that the device's class names: they must be
refused, and the device must go on.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import ErrorStatus, Memory, Request, RequestArgument
from driver.client.device import connect
from driver.client.device_buffers import BufferDesc, BufferRole
from driver.devices import device_class
from driver.errors import DriverError
from driver.vts.bench import refusal
from driver.vts.domains import SHAPE, SIZE, allocated, check_value, prepared, total, value
from driver.vts.kit import Test, check, skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.client.device import RemoteDevice
    from driver.client.device_buffers import Buffer
    from driver.client.prepared_model import RemotePreparedModel
    from driver.vts.target import Target

_INVALID, _GENERAL = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE
_EXHAUSTED = ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT  # a device that counts memory by the size that is claimed
_SHAPES = (1,), (7,), (3, 5), (1, 1, 1, 17), (2, 3, 5, 7), (129, 33)
_DTYPES: dict[str, dict[str, Any]] = {
    "float16": {},
    "int32": {},
    "quant8_asymm": {"scale": 0.5, "zero_point": 10},
    "quant8_asymm_signed": {"scale": 0.5, "zero_point": -3},
}
_SMALL, _LARGE = 2**20, 2**40  # what any device takes from a client, and what the limits of most refuse unasked
_FIELDS = (), (64,), (-(2**63), 2**63 - 1), (2**63 - 1,) * 16


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    for shape in _SHAPES:
        yield Test(f"memory/layout/{'x'.join(map(str, shape))}", partial(laid_out, shape, "float32", {}))
    for dtype, quantisation in _DTYPES.items():
        yield Test(f"memory/layout/{dtype}", partial(laid_out, (3, 5), dtype, quantisation))
    yield Test("memory/copy/between", between)
    yield Test("memory/copy/owned", owned)
    yield Test("memory/copy/apart", apart)
    yield Test("memory/copy/two_clients", two_clients)
    yield Test("memory/own_kind/unknown", unknown)
    for name, make in _DESCRIPTORS.items():
        yield Test(f"memory/own_kind/{name}", partial(hostile, make))


# ---- buffers, in whatever layout


def laid_out(shape: tuple[int, ...], dtype: str, quantisation: dict[str, Any], target: Target) -> None:
    """A value of that shape and type goes in and out, and executions read and write it as they do plain memory: an
    input and an output in buffers, or only one of them.
    """
    with prepared([partial(total, shape, dtype, **quantisation)], target) as models, ExitStack() as stack:
        (model,) = models
        source = stack.enter_context(allocated(target, models, [(0, 0)]))
        result = stack.enter_context(allocated(target, models, [], [(0, 0)]))
        x, y = _values(model, 1), _values(model, 2)
        (expected,) = (found.copy() for found in model.run(x, y, timeout=target.patience))
        source.copy_from(x)
        check_value(source, x)
        burst = stack.enter_context(model.burst())
        for execute in (model.execute, burst.execute):
            for pools in ((source, result), (source, None), (None, result)):
                found = _executed(partial(execute, timeout=target.patience), x, y, pools)
                same = found is None or found.tobytes() == expected.tobytes()
                check(same, f"{_told(pools)} gives another value than plain memory")
                if pools[1] is not None:
                    check_value(result, expected, f"{_told(pools)} leaves another value than plain memory gives")
        check_value(source, x)


def _told(pools: tuple[Any, Any]) -> str:
    inputs, outputs = ("a buffer" if pool else "plain memory" for pool in pools)
    return f"an input in {inputs} with the output in {outputs}"


def _values(model: RemotePreparedModel, seed: int) -> Any:
    operand = model.model.main.operands[model.model.main.inputs[0]]
    small = np.random.default_rng(seed).integers(-20, 20, operand.dimensions)
    return (
        (small + operand.zero_point).clip(0 if operand.type.dtype == np.uint8 else -128, 127).astype(operand.type.dtype)
    )


def _executed(execute: Callable[[Request], Any], x: Any, y: Any, pools: tuple[Buffer | None, Buffer | None]) -> Any:
    """Compute x + y, with x and the sum in buffers or in plain memory; return the sum if that is there."""
    room = 64 + x.nbytes
    memory = Memory.create(3 * room)
    memory.asarray(x.dtype, x.shape, 0)[...] = x
    memory.asarray(y.dtype, y.shape, room // 64 * 64)[...] = y
    places: list[Any] = [memory, *(pool for pool in pools if pool is not None)]
    first = RequestArgument(length=x.nbytes) if pools[0] is None else RequestArgument(pool=1)
    last = (
        RequestArgument(offset=2 * room // 64 * 64, length=x.nbytes)
        if pools[1] is None
        else RequestArgument(pool=len(places) - 1)
    )
    asked = Request((first, RequestArgument(offset=room // 64 * 64, length=y.nbytes)), (last,), tuple(places))
    result = execute(asked)
    check(not result.status, f"{_told(pools)} gets {result.status.name}: {result.message}")
    return None if pools[1] is not None else result.outputs[0]


def between(target: Target) -> None:
    """A value goes from one buffer to another, and stays there when the first one gets another value or is closed."""
    with prepared([total], target) as models, allocated(target, models, [(0, 1)]) as other:
        with allocated(target, models, [(0, 0)]) as buffer:
            buffer.copy_from(value(1))
            other.copy_from(buffer)
            check_value(other, value(1))
            buffer.copy_from(value(2))
            check_value(other, value(1))
        check_value(other, value(1))


def owned(target: Target) -> None:
    """A value is the buffer's own: it stays when the memory that it came from, or went to, gets another value."""
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as buffer:
        memory = Memory.create(SIZE)
        memory.asarray(np.float32, SHAPE)[...] = value(1)
        buffer.copy_from(memory)
        for _ in range(2):
            memory.asarray()[:] = 0
            check_value(buffer, value(1), "the buffer holds what its client has written elsewhere after the copy")
            buffer.copy_to(memory)


def apart(target: Target) -> None:
    """Buffers that live at the same time share no memory, also when others were released in between."""
    with prepared([total], target) as models, ExitStack() as stack:
        kept: list[tuple[Buffer, Any]] = []
        for n in range(6):
            buffer = stack.enter_context(allocated(target, models, [(0, 0)]))
            buffer.copy_from(value(n))
            if n % 3 == 1:
                buffer.close()
            else:
                kept.append((buffer, value(n)))
            for one, expected in kept:
                check_value(one, expected)


def two_clients(target: Target) -> None:
    """The buffers of two clients share no memory, and those of one stay when the other leaves."""
    model = total()
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as ours:
        with closing(connect(target.name)) as other, other.prepare(model) as theirs:
            buffer = _allocated_by(other, theirs)
            ours.copy_from(value(1))
            buffer.copy_from(value(2))
            check_value(ours, value(1))
            check_value(buffer, value(2))
        check_value(ours, value(1))


def _allocated_by(device: RemoteDevice, model: RemotePreparedModel) -> Buffer:
    return device.allocate(BufferDesc(), [model], [BufferRole(0, 0)])


# ---- kinds of memory of the driver's own


def _kinds(target: Target) -> frozenset[str]:
    """Return the kinds that the device's class names. Skip the test where there is none, or only a running device."""
    try:
        found = device_class(target.name).own_memory_kinds
    except DriverError as error:
        skip(f"which kinds of memory are its own cannot be told of a device that only runs: {error}")
    return found or skip("the device names no kind of memory of its own")


@contextmanager
def _opened(open_one: Callable[[], int]) -> Iterator[int]:
    fd = open_one()
    try:
        yield fd
    finally:
        os.close(fd)


def _memfd(nbytes: int) -> int:
    fd = os.memfd_create("burst-vts", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


_DESCRIPTORS: dict[str, Callable[[], int]] = {
    "empty": partial(_memfd, 0),
    "too_short": partial(_memfd, 4096),
    "socket": lambda: socket.socket().detach(),
    "eventfd": partial(os.eventfd, 0),
    "folder": partial(os.open, "/", os.O_RDONLY | os.O_CLOEXEC),
    "read_only": partial(os.open, "/dev/null", os.O_RDONLY | os.O_CLOEXEC),
}


def hostile(open_one: Callable[[], int], target: Target) -> None:
    """A handle that claims more bytes than its descriptor can have is refused with an error, whatever its fields are,
    for each of the driver's own kinds, on both paths. The next request is executed.
    """
    kinds = _kinds(target)
    with _adding(target) as (model, asked), model.burst() as burst:
        for execute in (partial(way, timeout=target.patience) for way in (model.execute, burst.execute)):
            for kind, nbytes, fields in product(kinds, (_SMALL, _LARGE), _FIELDS):
                with _opened(open_one) as fd:
                    bad = Memory.from_handle(fd, nbytes, kind, fields)
                found = refusal(execute, asked._replace(pools=(bad, *asked.pools[1:])))
                is_refused = found.status in {_INVALID, _GENERAL, _EXHAUSTED}
                check(is_refused, f"a wrong handle of kind {kind} gets {found.status.name}")
            after = refusal(execute, asked)
            check(not after.status, f"a valid request gets {after.status.name} after wrong handles: {after.message}")


def unknown(target: Target) -> None:
    """A kind that the driver cannot decode gets GENERAL_FAILURE, on both paths, and on the plain path the kinds that
    there are.

    A driver that serves its bursts itself answers with the status alone.
    """
    with _adding(target) as (model, asked), model.burst() as burst, _opened(partial(_memfd, 4096)) as fd:
        for way in (model.execute, burst.execute):
            bad = Memory.from_handle(fd, 4096, "burst.vts.unknown")
            found = refusal(partial(way, timeout=target.patience), asked._replace(pools=(bad, *asked.pools[1:])))
            check(found.status == _GENERAL, f"an unknown kind of memory gets {found.status.name}")
            is_named = way == burst.execute or "ashmem" in found.message
            check(is_named, f"the error does not name the kinds that are known: {found.message!r:.120}")


@contextmanager
def _adding(target: Target) -> Iterator[tuple[RemotePreparedModel, Request]]:
    """Yield a model, and a valid request with its first input in a pool of its own."""
    with prepared([total], target) as (model,):
        first, rest = Memory.create(64), Memory.create(128)
        arguments = RequestArgument(length=SIZE), RequestArgument(pool=1, length=SIZE)
        yield model, Request(arguments, (RequestArgument(pool=1, offset=64, length=SIZE),), (first, rest))
