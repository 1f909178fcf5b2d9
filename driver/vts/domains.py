"""memory: allocating, copying and executing on device buffers as in Android's suite, valid and invalid.

A device may reject a valid buffer with GENERAL_FAILURE or RESOURCE_EXHAUSTED: then the test is skipped.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import DeviceBuffer, ErrorStatus, Memory, Request, RequestArgument, Result, StatusError
from driver.client.device_buffers import Buffer, BufferDesc, BufferRole
from driver.nn import ModelBuilder
from driver.vts.kit import Test, check, skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.client.prepared_model import RemotePreparedModel
    from driver.client.surface import AnyBurst
    from driver.nn import Model
    from driver.vts.target import Target


SHAPE, SIZE = (2, 4), 32
INVALID, GENERAL, NONE = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE, ErrorStatus.NONE
_NO_ROOM = frozenset({GENERAL, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT})


def total(dimensions: tuple[int, ...] = SHAPE, dtype: str = "float32", **quantisation: Any) -> Model:
    """Return a model of two inputs, and one output of their shape."""
    m = ModelBuilder()
    x, y = (m.input(dtype, dimensions, **quantisation) for _ in range(2))
    m.output(m.operation("ADD", x, y, 0, **quantisation))
    return m.build()


def _scaled() -> Model:
    """Return a model with a scalar as input 1."""
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
    for side in ("input", "output"):
        yield Test(f"memory/allocate/null_model/{side}", partial(null_model, side == "input"))
        yield Test(f"memory/allocate/dead_model/{side}", partial(dead_model, side == "input"))
    yield Test("memory/allocate/same_model_twice", same_model_twice)
    yield Test("memory/allocate/malformed", malformed)
    for name, case in _COPIES.items():
        yield Test(f"memory/copy/{name}", case)
    for name, use in _USES.items():
        for path in ("plain", "async", "burst", *(() if name in _OPEN else ("fenced",))):
            yield Test(f"memory/buffers/{name}/{path}", partial(_on, path, use))


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


def _check_role_refused(target: Target, number: int | None, is_input: bool) -> None:
    role = [(0, 0, 1.0)]
    _check_refused(target, (), [number], role if is_input else [], [] if is_input else role)


def null_model(is_input: bool, target: Target) -> None:
    """No prepared model is refused, alone and beside one, as number 0 and as nil; the buffers of others go on."""
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as buffer:
        buffer.copy_from(value())
        (model,) = models
        for nothing in (0, None):
            _check_role_refused(target, nothing, is_input)
            _check_refused(target, (), [model.home.number, nothing], [(0, 0, 1.0), (1, 1, 1.0)], [])
        check_value(buffer, value())


def dead_model(is_input: bool, target: Target) -> None:
    """A prepared model that was freed is refused; one that lives is not."""
    with prepared([total], target) as (dead,):
        number = dead.home.number
    _check_role_refused(target, number, is_input)
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as buffer:
        _check_role_refused(target, number, is_input)
        buffer.copy_from(value())
        check_value(buffer, value())


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
    """Return a value for a buffer."""
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def check_value(
    buffer: Buffer, expected: Any, otherwise: str = "the buffer holds other values than were written to it"
) -> None:
    """Check the value of a buffer. otherwise: what is wrong if it has another one."""
    found = np.zeros_like(expected)
    buffer.copy_to(found)
    check(found.tobytes() == expected.tobytes(), otherwise)


def there_and_back(target: Target) -> None:
    """A value copied into a buffer can be copied out of it, any number of times."""
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as buffer:
        for seed in range(3):
            buffer.copy_from(value(seed))
            for _ in range(2):
                check_value(buffer, value(seed))


def wrong_size(target: Target) -> None:
    """Half the size is refused, and so is twice the size, in both directions."""
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as buffer:
        buffer.copy_from(value())
        for nbytes in (SIZE // 2, 2 * SIZE):
            fails(partial(buffer.copy_to, Memory.create(nbytes)), INVALID, f"copy_to of {nbytes} bytes")
        check_value(buffer, value())
        for nbytes in (SIZE // 2, 2 * SIZE):
            fails(partial(buffer.copy_from, Memory.create(nbytes)), INVALID, f"copy_from of {nbytes} bytes")


def no_value(target: Target) -> None:
    """A buffer cannot be read before it was written, nor after a failed write; the size is checked first."""
    with prepared([total], target) as models, allocated(target, models, [(0, 0)]) as buffer:
        fails(lambda: buffer.copy_to(Memory.create(2 * SIZE)), INVALID, "copy_to of a wrong size")
        fails(lambda: buffer.copy_to(Memory.create(SIZE)), GENERAL, "copy_to of no value")
        buffer.copy_from(value())
        fails(lambda: buffer.copy_from(Memory.create(2 * SIZE)), INVALID, "copy_from of a wrong size")
        fails(lambda: buffer.copy_to(Memory.create(SIZE)), GENERAL, "copy_to after a failed copy_from")


def wrong_dimensions(target: Target) -> None:
    """Another rank, another dimension, or a 0 is refused."""
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


def wrong_size_open(target: Target) -> None:
    """Half the size of a value, and twice the size, are refused in both directions, where dimensions are open."""
    with (
        prepared([partial(total, (0, 4))], target) as models,
        allocated(target, models, [(0, 0)]) as buffer,
    ):
        for nbytes in (SIZE // 2, 2 * SIZE):
            what = f"copy_from of {nbytes} bytes as {SHAPE}"
            fails(partial(buffer.copy_from, Memory.create(nbytes), SHAPE), INVALID, what)
        buffer.copy_from(value())
        for nbytes in (SIZE // 2, 2 * SIZE):
            fails(partial(buffer.copy_to, Memory.create(nbytes)), INVALID, f"copy_to of {nbytes} bytes")
        check_value(buffer, value())


_COPIES: dict[str, Callable[[Target], None]] = {
    "there_and_back": there_and_back,
    "wrong_size": wrong_size,
    "wrong_size_open": wrong_size_open,
    "no_value": no_value,
    "wrong_dimensions": wrong_dimensions,
    "open_dimensions": open_dimensions,
}


# ---- buffers as inputs and outputs of executions, on every path ------------------------------------------------------


def _pair() -> Model:
    """Return a model with one input, and two outputs of the same shape."""
    m = ModelBuilder()
    x = m.input("float32", SHAPE)
    m.output(m.operation("RELU", x), m.operation("RELU1", x))
    return m.build()


class _Requester:
    """Executes requests on one of the paths; their arguments are arrays or device buffers."""

    def __init__(self, target: Target, path: str, stack: ExitStack) -> None:
        self.target, self.path, self._stack = target, path, stack

    def prepare(self, build: Callable[[], Model]) -> RemotePreparedModel:
        """Prepare a model until the end of the test."""
        return self._stack.enter_context(prepared([build], self.target))[0]

    def buffer(self, models: Sequence[RemotePreparedModel], *roles: Any, **more: Any) -> Buffer:
        """Allocate a buffer until the end of the test; arguments as for `allocated`."""
        return self._stack.enter_context(allocated(self.target, models, *roles, **more))

    def run(
        self, model: RemotePreparedModel, inputs: Sequence[Any], outputs: Sequence[DeviceBuffer | None], **more: Any
    ) -> tuple[ErrorStatus, list[Any]]:
        """Execute; returns the status and the outputs in plain memory. more: fields of arguments on buffers."""
        memory = Memory.create(4096)
        pools: list[Any] = [memory]
        arguments: list[RequestArgument] = []
        for n, given in enumerate((*inputs, *outputs)):
            if isinstance(given, DeviceBuffer):
                pools += [] if any(pool is given for pool in pools) else [given]
                place = next(i for i, pool in enumerate(pools) if pool is given)
                arguments.append(RequestArgument(pool=place, **more))
                continue
            if given is not None:
                memory.asarray(np.float32, given.shape, 64 * n)[...] = given
            dimensions = () if given is None else given.shape
            arguments.append(RequestArgument(pool=0, offset=64 * n, length=64, dimensions=dimensions))
        request = Request(tuple(arguments[: len(inputs)]), tuple(arguments[len(inputs) :]), tuple(pools))
        try:
            result = self._executed(model, request)
        except StatusError as error:  # a fenced execution that was not launched
            return error.status, []
        return result.status, [output.copy() for output in result.outputs if output is not None]

    def _executed(self, model: RemotePreparedModel, request: Request) -> Result:
        patience = self.target.patience
        match self.path:
            case "plain":
                return model.execute(request, timeout=patience)
            case "async":
                return model.execute_async(request).result(patience)
            case "fenced":
                return model.execute_fenced(request).result(patience)
            case _:
                return self._burst(model).execute(request, timeout=patience)

    def _burst(self, model: RemotePreparedModel) -> AnyBurst:
        operands = [model.model.main.operands[i] for i in model.model.main.inputs]
        shapes = [tuple(d or 1 for d in operand.dimensions) for operand in operands]
        return self._stack.enter_context(model.burst(input_shapes=shapes))

    def check(self, status: ErrorStatus, what: str, *run: Any, **more: Any) -> None:
        """Check the status of an execution."""
        found, _ = self.run(*run, **more)
        self.expect(status, found, what)

    def expect(self, status: ErrorStatus, found: ErrorStatus, what: str) -> None:
        """Check a status. A device may refuse to run a valid request fenced."""
        if self.path == "fenced" and (status, found) == (NONE, GENERAL):
            skip("the device does not run it fenced (GENERAL_FAILURE, which the HAL allows)")
        check(found == status, f"{what} gets {found.name}, not {status.name}")


def _on(path: str, use: Callable[[_Requester], None], target: Target) -> None:
    with ExitStack() as stack:
        use(_Requester(target, path, stack))


def chained(user: _Requester) -> None:
    """The output of one execution is the input of the next, without a copy through the client."""
    model = user.prepare(total)
    states = [user.buffer([model], [(0, 1)], [(0, 0)]) for _ in range(2)]
    states[0].copy_from(np.zeros(SHAPE, np.float32))
    for n in range(4):
        user.check(NONE, "a valid request", model, [value(), states[n % 2]], [states[1 - n % 2]])
    expected = np.zeros(SHAPE, np.float32)
    for _ in range(4):
        (expected,) = model.run(value(), expected, timeout=user.target.patience)
    check_value(states[0], expected)


def unknown_token(user: _Requester) -> None:
    """A token that this client does not own is rejected."""
    model = user.prepare(total)
    for token in (2**32 - 1, *(() if user.path == "burst" else (0,))):  # a burst has no word for 0
        unknown = DeviceBuffer(token)
        user.check(INVALID, f"an input of token {token}", model, [value(), unknown], [None])
        user.check(INVALID, f"an output of token {token}", model, [value(), value()], [unknown])


def released(user: _Requester) -> None:
    """A released buffer is unknown, even to requests that used it before."""
    model = user.prepare(total)
    buffer = user.buffer([model], [(0, 1)])
    buffer.copy_from(value())
    token = DeviceBuffer(buffer.token)
    user.check(NONE, "a valid request", model, [value(), token], [None])
    buffer.close()
    user.check(INVALID, "the token of a released buffer", model, [value(), token], [None])


def undeclared_role(user: _Requester) -> None:
    """A buffer is rejected in a role that it was not allocated for: another model, index or direction."""
    model, other = user.prepare(total), user.prepare(total)
    reads, writes = user.buffer([model], [(0, 0)]), user.buffer([model], [], [(0, 0)])
    reads.copy_from(value())
    user.check(INVALID, "a buffer of another model", other, [reads, value()], [None])
    user.check(INVALID, "a buffer for another input", model, [value(), reads], [None])
    user.check(INVALID, "an output in a buffer for an input", model, [value(), value()], [reads])
    user.check(NONE, "an output in its buffer", model, [value(), value()], [writes])
    user.check(INVALID, "an input in a buffer for an output", model, [writes, value()], [None])


def fresh_input(user: _Requester) -> None:
    """A buffer cannot be an input before it has a value."""
    model = user.prepare(total)
    buffer = user.buffer([model], [(0, 0)], [(0, 0)])
    user.check(GENERAL, "an input without a value", model, [buffer, value()], [None])
    user.check(NONE, "an output in that buffer", model, [value(), value()], [buffer])
    user.check(NONE, "an input with a value", model, [buffer, value()], [None])
    fails(lambda: buffer.copy_from(Memory.create(1)), INVALID, "copy_from of a wrong size")
    user.check(GENERAL, "an input that has lost its value", model, [buffer, value()], [None])


def used_twice(user: _Requester) -> None:
    """One buffer may be two inputs, but not input and output, and not two outputs."""
    model, pair = user.prepare(total), user.prepare(_pair)
    buffer = user.buffer([model, pair], [(0, 0), (0, 1)], [(0, 0), (1, 0), (1, 1)])
    buffer.copy_from(value())
    status, outputs = user.run(model, [buffer, buffer], [None])
    user.expect(NONE, status, "one buffer as two inputs")
    expected = model.run(value(), value(), timeout=user.target.patience)
    check(outputs[0].tobytes() == expected[0].tobytes(), "one buffer as two inputs gives another value than two arrays")
    user.check(INVALID, "one buffer as input and output", model, [buffer, value()], [buffer])
    user.check(INVALID, "one buffer as two outputs", pair, [value()], [buffer, buffer])


def places_in_it(user: _Requester) -> None:
    """A buffer is used whole, with its own dimensions."""
    model = user.prepare(total)
    buffer = user.buffer([model], [(0, 0)])
    buffer.copy_from(value())
    run = model, [buffer, value()], [None]
    user.check(INVALID, "an offset in a buffer", *run, offset=4)
    user.check(INVALID, "a length in a buffer", *run, length=SIZE)
    user.check(INVALID, "other dimensions than the buffer's", *run, dimensions=(4, 2))
    user.check(INVALID, "another rank than the buffer's", *run, dimensions=(2, 4, 1))
    user.check(NONE, "the buffer's dimensions", *run, dimensions=SHAPE)


def open_shape(user: _Requester) -> None:
    """Open dimensions follow the value from execution to execution."""
    model = user.prepare(partial(total, (0, 4)))
    reads, writes = user.buffer([model], [(0, 0)]), user.buffer([model], [], [(0, 0)])
    for rows in (2, 3, 1):
        value = np.full((rows, 4), rows, np.float32)
        reads.copy_from(value)
        user.check(NONE, f"{rows} rows", model, [reads, value], [writes])
        check_value(writes, model.run(value, value, timeout=user.target.patience)[0])


def shape_conflict(user: _Requester) -> None:
    """An output whose shape does not match its buffer is rejected."""
    model = user.prepare(partial(total, (0, 4)))
    buffer = user.buffer([model], [], [(0, 0)], dimensions=(2, 4))
    three = np.ones((3, 4), np.float32)
    user.check(GENERAL, "an output of another shape than its buffer's", model, [three, three], [buffer])
    user.check(NONE, "an output of its buffer's shape", model, [three[:2], three[:2]], [buffer])


_USES: dict[str, Callable[[_Requester], None]] = {
    "chained": chained,
    "unknown_token": unknown_token,
    "released": released,
    "undeclared_role": undeclared_role,
    "fresh_input": fresh_input,
    "used_twice": used_twice,
    "places_in_it": places_in_it,
    "open_shape": open_shape,
    "shape_conflict": shape_conflict,
}
_OPEN = ("open_shape", "shape_conflict")
"""Those with output shapes that are not known beforehand, as they have to be for fenced executions."""
