"""memory: allocating and copying device buffers as in Android's suite, valid and invalid.

A device may reject a valid buffer with GENERAL_FAILURE or RESOURCE_EXHAUSTED: then the test is skipped.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import ErrorStatus, Memory, StatusError
from driver.client.device_buffers import Buffer, BufferDesc, BufferRole
from driver.nn import ModelBuilder
from driver.vts.kit import Test, check, skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.client.prepared_model import RemotePreparedModel
    from driver.nn import Model
    from driver.vts.target import Target

SHAPE, SIZE = (2, 4), 32
INVALID, GENERAL, NONE = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE, ErrorStatus.NONE
_NO_ROOM = frozenset({GENERAL, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT})


def total(dimensions: tuple[int, ...] = SHAPE, dtype: str = "float32", **quantisation: Any) -> Model:
    """Two inputs, and one output of their shape."""
    m = ModelBuilder()
    x, y = (m.input(dtype, dimensions, **quantisation) for _ in range(2))
    m.output(m.operation("ADD", x, y, 0, **quantisation))
    return m.build()


def _scaled() -> Model:
    """A scalar as input 1."""
    m = ModelBuilder()
    m.output(m.operation("ADD", m.input("float32", SHAPE), np.ones(SHAPE, np.float32), m.input("INT32", ())))
    return m.build()


class AllocateCase(NamedTuple):
    """Arguments for one `allocate`."""

    dimensions: tuple[int, ...] = ()
    models: tuple[Callable[[], Model], ...] = (total,)
    inputs: tuple[tuple[Any, ...], ...] = ()
    outputs: tuple[tuple[Any, ...], ...] = ()


_SIGNED = partial(total, dtype="quant8_asymm", scale=0.5, zero_point=10)
_OTHER_SCALE = partial(total, dtype="quant8_asymm", scale=0.25, zero_point=10)
_OTHER_ZERO = partial(total, dtype="quant8_asymm", scale=0.5, zero_point=11)
_OTHERS: dict[str, tuple[Callable[[], Model], Callable[[], Model]]] = {
    "type": (total, _SIGNED),
    "scale": (_SIGNED, _OTHER_SCALE),
    "zero_point": (_SIGNED, _OTHER_ZERO),
    "rank": (total, partial(total, (2, 4, 1))),
    "dimensions": (total, partial(total, (2, 5))),
}

_REFUSED = {
    "no_models": AllocateCase(models=(), inputs=((0, 0, 1.0),)),
    "no_roles": AllocateCase(),
    "model_index": AllocateCase(inputs=((1, 0, 1.0),)),
    "input_index": AllocateCase(inputs=((0, 2, 1.0),)),
    "output_index": AllocateCase(outputs=((0, 1, 1.0),)),
    **{f"frequency_{value:g}": AllocateCase(inputs=((0, 0, value),)) for value in (10.0, 0.0, -0.5)},
    "input_role_twice": AllocateCase(inputs=((0, 0, 1.0), (0, 0, 1.0))),
    "output_role_twice": AllocateCase(outputs=((0, 0, 1.0), (0, 0, 1.0))),
    "desc_rank": AllocateCase((2, 4, 1), inputs=((0, 0, 1.0),)),
    "desc_dimensions": AllocateCase((2, 5), outputs=((0, 0, 1.0),)),
    "desc_of_scalar": AllocateCase((1,), (_scaled,), inputs=((0, 1, 1.0),)),
    **{f"{what}_of_inputs": AllocateCase((), pair, ((0, 0, 1.0), (1, 0, 1.0))) for what, pair in _OTHERS.items()},
    **{f"{what}_of_both": AllocateCase((), pair, ((0, 0, 1.0),), ((1, 0, 1.0),)) for what, pair in _OTHERS.items()},
    **{f"{what}_of_outputs": AllocateCase((), pair, (), ((0, 0, 1.0), (1, 0, 1.0))) for what, pair in _OTHERS.items()},
}


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    for name, wanted in _REFUSED.items():
        yield Test(f"memory/allocate/{name}", partial(refused, wanted))
    yield Test("memory/allocate/foreign_model", foreign_model)
    yield Test("memory/allocate/same_model_twice", same_model_twice)
    yield Test("memory/allocate/malformed", malformed)
    for name, case in _COPIES.items():
        yield Test(f"memory/copy/{name}", case)


# ---- allocate


@contextmanager
def prepared(models: Sequence[Callable[[], Model]], target: Target) -> Iterator[list[RemotePreparedModel]]:
    """Prepare these models, or skip the test."""
    with ExitStack() as stack:
        built = [build() for build in models]
        if not all(all(target.supported(model)) for model in built):
            skip("the device does not support the model")
        yield [stack.enter_context(target.prepared(model)) for model in built]


def refused(wanted: AllocateCase, target: Target) -> None:
    """Arguments that contradict the roles, the models or each other are refused, and the device goes on."""
    with prepared(wanted.models, target) as models:
        numbers = [model.home.number for model in models]
        _check_refused(target, wanted.dimensions, numbers, wanted.inputs, wanted.outputs)


def _check_refused(target: Target, *arguments: Any) -> None:
    try:
        (token,), _ = target.device.call("allocate", *arguments, timeout=target.patience)
    except StatusError as error:
        check(error.status in (INVALID, GENERAL), f"allocate answers {error.status.name}, not INVALID_ARGUMENT")
    else:
        check(False, f"allocate returns buffer {token} for arguments that it must refuse")


def foreign_model(target: Target) -> None:
    """A prepared model of another client is refused."""
    _check_refused(target, (), [2**31], [(0, 0, 1.0)], [])


def same_model_twice(target: Target) -> None:
    """Two indices of one prepared model that name the same role are refused."""
    with prepared([total], target) as (model,):
        _check_refused(target, (), [model.home.number] * 2, [(0, 0, 1.0), (1, 0, 1.0)], [])


def malformed(target: Target) -> None:
    """Arguments of wrong types are refused."""
    with prepared([total], target) as (model,):
        number = model.home.number
        asked: list[tuple[Any, ...]] = [
            ([-1], [number], [(0, 0, 1.0)], []),
            (["4"], [number], [(0, 0, 1.0)], []),
            ([], [number], [(0, 0)], []),
            ([], [number], [(0, None, 1.0)], []),
            ([], [number], [(0, 0, float("nan"))], []),
            ([], [None], [(0, 0, 1.0)], []),
            ([], [number], 7, []),
        ]
        for arguments in asked:
            _check_refused(target, *arguments)


def allocated(
    target: Target,
    models: Sequence[RemotePreparedModel],
    inputs: Sequence[tuple[int, int]],
    outputs: Sequence[tuple[int, int]] = (),
    *,
    dimensions: tuple[int, ...] = (),
) -> Buffer:
    """Allocate a valid buffer, or skip the test."""
    roles = [[BufferRole(model, index) for model, index in side] for side in (inputs, outputs)]
    try:
        return target.device.allocate(BufferDesc(dimensions), models, *roles)
    except StatusError as error:
        check(error.status in _NO_ROOM, f"allocate answers {error.status.name} to valid arguments: {error}")
        skip(f"the device cannot allocate this buffer: {error}")


# ---- copy


def fails(function: Callable[[], object], status: ErrorStatus, what: str) -> None:
    """Check that the block ends with that status. what: names it in the message."""
    found = NONE
    try:
        function()
    except StatusError as error:
        found = error.status
    check(found == status, f"{what} answers {found.name}, not {status.name}")


def value(seed: int = 1) -> Any:
    """A value for a buffer."""
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def check_value(buffer: Buffer, expected: Any) -> None:
    """Check the value of a buffer."""
    found = np.zeros_like(expected)
    buffer.copy_to(found)
    check(found.tobytes() == expected.tobytes(), "the buffer holds other values than were written to it")


def there_and_back(target: Target) -> None:
    """A value copied into a buffer can be copied out of it, any number of times."""
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as buffer:
        for seed in range(3):
            buffer.copy_from(value(seed))
            for _ in range(2):
                check_value(buffer, value(seed))


def wrong_size(target: Target) -> None:
    """Half the size, and twice the size, in both directions."""
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as buffer:
        buffer.copy_from(value())
        for nbytes in (SIZE // 2, 2 * SIZE):
            fails(partial(buffer.copy_to, Memory.create(nbytes)), INVALID, f"copy_to of {nbytes} bytes")
        check_value(buffer, value())
        for nbytes in (SIZE // 2, 2 * SIZE):
            fails(partial(buffer.copy_from, Memory.create(nbytes)), INVALID, f"copy_from of {nbytes} bytes")


def no_value(target: Target) -> None:
    """Reading a buffer that was never written, or after a failed write; the size is checked first."""
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as buffer:
        fails(lambda: buffer.copy_to(Memory.create(2 * SIZE)), INVALID, "copy_to of a wrong size")
        fails(lambda: buffer.copy_to(Memory.create(SIZE)), GENERAL, "copy_to of no value")
        buffer.copy_from(value())
        fails(lambda: buffer.copy_from(Memory.create(2 * SIZE)), INVALID, "copy_from of a wrong size")
        fails(lambda: buffer.copy_to(Memory.create(SIZE)), GENERAL, "copy_to after a failed copy_from")


def wrong_dimensions(target: Target) -> None:
    """Another rank, another dimension, or a 0."""
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as buffer:
        memory = Memory.create(SIZE)
        for dimensions in ((2, 4, 1), (4, 2), (2, 0), (8,)):
            fails(partial(buffer.copy_from, memory, dimensions), INVALID, f"copy_from of {dimensions}")
        buffer.copy_from(memory, SHAPE)


def open_dimensions(target: Target) -> None:
    """A buffer with an open dimension takes any value that specifies it, and no other."""
    with (
        prepared([partial(total, (0, 4))], target) as models,
        allocated(target, models, [(0, 0)]) as buffer,
    ):
        fails(lambda: buffer.copy_from(Memory.create(SIZE)), INVALID, "copy_from without dimensions")
        fails(lambda: buffer.copy_from(Memory.create(SIZE), (0, 4)), INVALID, "copy_from of (0, 4)")
        for rows in (2, 5, 1):
            value = np.full((rows, 4), rows, np.float32)
            buffer.copy_from(value)
            check_value(buffer, value)


_COPIES: dict[str, Callable[[Target], None]] = {
    "there_and_back": there_and_back,
    "wrong_size": wrong_size,
    "no_value": no_value,
    "wrong_dimensions": wrong_dimensions,
    "open_dimensions": open_dimensions,
}
