"""memory: buffers that the device manages, in every way that Android's suite uses and misuses them.

A device may have no room for a valid buffer, and say GENERAL_FAILURE or RESOURCE_EXHAUSTED: then the test is skipped.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import DeviceBuffer, ErrorStatus, Memory, Request, RequestArgument, StatusError
from driver.domains import Buffer, BufferDesc, BufferRole
from driver.nn import ModelBuilder
from driver.vts.kit import Test, check, skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.nn import Model
    from driver.prepared import RemotePreparedModel
    from driver.session import Burst
    from driver.vts.target import Target

_SHAPE, _SIZE = (2, 4), 32
_INVALID, _GENERAL, _NONE = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE, ErrorStatus.NONE
_NO_ROOM = frozenset({_GENERAL, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT})


def _sum(dimensions: tuple[int, ...] = _SHAPE, dtype: str = "float32", **quantisation: Any) -> Model:
    """Two inputs, and one output of their shape."""
    m = ModelBuilder()
    x, y = (m.input(dtype, dimensions, **quantisation) for _ in range(2))
    m.output(m.operation("ADD", x, y, 0, **quantisation))
    return m.build()


def _pair() -> Model:
    """One input, and two outputs of its shape."""
    m = ModelBuilder()
    x = m.input("float32", _SHAPE)
    m.output(m.operation("RELU", x), m.operation("RELU1", x))
    return m.build()


def _scaled() -> Model:
    """A scalar as input 1."""
    m = ModelBuilder()
    m.output(m.operation("ADD", m.input("float32", _SHAPE), np.ones(_SHAPE, np.float32), m.input("INT32", ())))
    return m.build()


class Wanted(NamedTuple):
    """Something that `allocate` is asked for."""

    dimensions: tuple[int, ...] = ()
    models: tuple[Callable[[], Model], ...] = (_sum,)
    inputs: tuple[tuple[Any, ...], ...] = ()
    outputs: tuple[tuple[Any, ...], ...] = ()


_SIGNED = partial(_sum, dtype="quant8_asymm", scale=0.5, zero_point=10)
_OTHER_SCALE = partial(_sum, dtype="quant8_asymm", scale=0.25, zero_point=10)
_OTHER_ZERO = partial(_sum, dtype="quant8_asymm", scale=0.5, zero_point=11)
_OTHERS: dict[str, tuple[Callable[[], Model], Callable[[], Model]]] = {
    "type": (_sum, _SIGNED),
    "scale": (_SIGNED, _OTHER_SCALE),
    "zero_point": (_SIGNED, _OTHER_ZERO),
    "rank": (_sum, partial(_sum, (2, 4, 1))),
    "dimensions": (_sum, partial(_sum, (2, 5))),
}

_REFUSED = {
    "no_models": Wanted(models=(), inputs=((0, 0, 1.0),)),
    "no_roles": Wanted(),
    "model_index": Wanted(inputs=((1, 0, 1.0),)),
    "input_index": Wanted(inputs=((0, 2, 1.0),)),
    "output_index": Wanted(outputs=((0, 1, 1.0),)),
    **{f"frequency_{value:g}": Wanted(inputs=((0, 0, value),)) for value in (10.0, 0.0, -0.5)},
    "input_role_twice": Wanted(inputs=((0, 0, 1.0), (0, 0, 1.0))),
    "output_role_twice": Wanted(outputs=((0, 0, 1.0), (0, 0, 1.0))),
    "desc_rank": Wanted((2, 4, 1), inputs=((0, 0, 1.0),)),
    "desc_dimensions": Wanted((2, 5), outputs=((0, 0, 1.0),)),
    "desc_of_scalar": Wanted((1,), (_scaled,), inputs=((0, 1, 1.0),)),
    **{f"{what}_of_inputs": Wanted((), pair, ((0, 0, 1.0), (1, 0, 1.0))) for what, pair in _OTHERS.items()},
    **{f"{what}_of_both": Wanted((), pair, ((0, 0, 1.0),), ((1, 0, 1.0),)) for what, pair in _OTHERS.items()},
    **{f"{what}_of_outputs": Wanted((), pair, (), ((0, 0, 1.0), (1, 0, 1.0))) for what, pair in _OTHERS.items()},
}


def tests() -> Iterator[Test]:
    """All of them, whatever the scope: they take milliseconds."""
    for name, wanted in _REFUSED.items():
        yield Test(f"memory/allocate/{name}", partial(refused, wanted))
    yield Test("memory/allocate/foreign_model", foreign_model)
    yield Test("memory/allocate/same_model_twice", same_model_twice)
    yield Test("memory/allocate/malformed", malformed)
    for name, case in _COPIES.items():
        yield Test(f"memory/copy/{name}", case)
    for name, use in _USES.items():
        for path in ("plain", "burst"):
            yield Test(f"memory/buffers/{name}/{path}", partial(_on, path, use))


# ---- allocate


@contextmanager
def _prepared(models: Sequence[Callable[[], Model]], target: Target) -> Iterator[list[RemotePreparedModel]]:
    with ExitStack() as stack:
        built = [build() for build in models]
        if not all(all(target.supported(model)) for model in built):
            skip("the device does not support the model")
        yield [stack.enter_context(target.prepared(model)) for model in built]


def refused(wanted: Wanted, target: Target) -> None:
    """What contradicts the roles, the models or itself is refused, and the device goes on."""
    with _prepared(wanted.models, target) as models:
        numbers = [model.home.number for model in models]
        _check_refused(target, wanted.dimensions, numbers, wanted.inputs, wanted.outputs)


def _check_refused(target: Target, *arguments: Any) -> None:
    try:
        (token,), _ = target.device.call("allocate", *arguments, timeout=target.patience)
    except StatusError as error:
        check(error.status in (_INVALID, _GENERAL), f"allocate answers {error.status.name}, not INVALID_ARGUMENT")
    else:
        check(False, f"allocate makes buffer {token} of what it has to refuse")


def foreign_model(target: Target) -> None:
    """A prepared model that this client does not have."""
    _check_refused(target, (), [2**31], [(0, 0, 1.0)], [])


def same_model_twice(target: Target) -> None:
    """Two indices that mean one prepared model, and one role of it."""
    with _prepared([_sum], target) as (model,):
        _check_refused(target, (), [model.home.number] * 2, [(0, 0, 1.0), (1, 0, 1.0)], [])


def malformed(target: Target) -> None:
    """What is not even of the right types is refused as well."""
    with _prepared([_sum], target) as (model,):
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


def _allocate(
    target: Target,
    models: Sequence[RemotePreparedModel],
    inputs: Sequence[tuple[int, int]],
    outputs: Sequence[tuple[int, int]] = (),
    *,
    dimensions: tuple[int, ...] = (),
) -> Buffer:
    """A valid buffer, or the test is skipped."""
    roles = [[BufferRole(model, index) for model, index in side] for side in (inputs, outputs)]
    try:
        return target.device.allocate(BufferDesc(dimensions), models, *roles)
    except StatusError as error:
        check(error.status in _NO_ROOM, f"allocate answers {error.status.name} to what is valid: {error}")
        skip(f"the device has no such buffer: {error}")


# ---- copy


def _fails(function: Callable[[], object], status: ErrorStatus, what: str) -> None:
    found = _NONE
    try:
        function()
    except StatusError as error:
        found = error.status
    check(found == status, f"{what} answers {found.name}, not {status.name}")


def _value(seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal(_SHAPE).astype(np.float32)


def _check_value(buffer: Buffer, expected: Any) -> None:
    found = np.zeros_like(expected)
    buffer.copy_to(found)
    check(np.array_equal(found, expected), "the buffer holds other values than were copied to it, or computed")


def there_and_back(target: Target) -> None:
    """What was copied into a buffer is what comes out of it, as often as one likes."""
    with _prepared([_sum], target) as models, _allocate(target, models, [(0, 0)]) as buffer:
        for seed in range(3):
            buffer.copy_from(_value(seed))
            for _ in range(2):
                _check_value(buffer, _value(seed))


def wrong_size(target: Target) -> None:
    """Half as much, and twice as much: in both directions."""
    with _prepared([_sum], target) as models, _allocate(target, models, [(0, 0)]) as buffer:
        buffer.copy_from(_value())
        for nbytes in (_SIZE // 2, 2 * _SIZE):
            _fails(partial(buffer.copy_to, Memory.create(nbytes)), _INVALID, f"copy_to of {nbytes} bytes")
        _check_value(buffer, _value())
        for nbytes in (_SIZE // 2, 2 * _SIZE):
            _fails(partial(buffer.copy_from, Memory.create(nbytes)), _INVALID, f"copy_from of {nbytes} bytes")


def no_value(target: Target) -> None:
    """Out of a buffer that nobody wrote, or that a copy failed to write; its size is looked at first."""
    with _prepared([_sum], target) as models, _allocate(target, models, [(0, 0)]) as buffer:
        _fails(lambda: buffer.copy_to(Memory.create(2 * _SIZE)), _INVALID, "copy_to of a wrong size")
        _fails(lambda: buffer.copy_to(Memory.create(_SIZE)), _GENERAL, "copy_to of no value")
        buffer.copy_from(_value())
        _fails(lambda: buffer.copy_from(Memory.create(2 * _SIZE)), _INVALID, "copy_from of a wrong size")
        _fails(lambda: buffer.copy_to(Memory.create(_SIZE)), _GENERAL, "copy_to after a failed copy_from")


def wrong_dimensions(target: Target) -> None:
    """Another rank, another dimension, a 0."""
    with _prepared([_sum], target) as models, _allocate(target, models, [(0, 0)]) as buffer:
        memory = Memory.create(_SIZE)
        for dimensions in ((2, 4, 1), (4, 2), (2, 0), (8,)):
            _fails(partial(buffer.copy_from, memory, dimensions), _INVALID, f"copy_from of {dimensions}")
        buffer.copy_from(memory, _SHAPE)


def open_dimensions(target: Target) -> None:
    """A buffer that leaves a dimension open takes any value that says it, and none that does not."""
    with (
        _prepared([partial(_sum, (0, 4))], target) as models,
        _allocate(target, models, [(0, 0)]) as buffer,
    ):
        _fails(lambda: buffer.copy_from(Memory.create(_SIZE)), _INVALID, "copy_from without dimensions")
        _fails(lambda: buffer.copy_from(Memory.create(_SIZE), (0, 4)), _INVALID, "copy_from of (0, 4)")
        for rows in (2, 5, 1):
            value = np.full((rows, 4), rows, np.float32)
            buffer.copy_from(value)
            _check_value(buffer, value)


_COPIES: dict[str, Callable[[Target], None]] = {
    "there_and_back": there_and_back,
    "wrong_size": wrong_size,
    "no_value": no_value,
    "wrong_dimensions": wrong_dimensions,
    "open_dimensions": open_dimensions,
}


# ---- execution


class _User:
    """Executes requests whose arguments are values in memory, or buffers, on one of the two paths."""

    def __init__(self, target: Target, path: str, stack: ExitStack) -> None:
        self.target, self._path, self._stack = target, path, stack

    def prepare(self, build: Callable[[], Model]) -> RemotePreparedModel:
        """A model that lives until the test ends."""
        return self._stack.enter_context(_prepared([build], self.target))[0]

    def buffer(self, models: Sequence[RemotePreparedModel], *roles: Any, **more: Any) -> Buffer:
        """One that lives as long; arguments as of `_allocate`."""
        return self._stack.enter_context(_allocate(self.target, models, *roles, **more))

    def run(
        self, model: RemotePreparedModel, inputs: Sequence[Any], outputs: Sequence[DeviceBuffer | None], **more: Any
    ) -> tuple[ErrorStatus, list[Any]]:
        """The status, and what is in the outputs that are no buffers. `more`: fields of the arguments on buffers."""
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
        result = self._executor(model).execute(request, timeout=self.target.patience)
        return result.status, [output.copy() for output in result.outputs if output is not None]

    def _executor(self, model: RemotePreparedModel) -> RemotePreparedModel | Burst:
        if self._path == "plain":
            return model
        operands = [model.model.main.operands[i] for i in model.model.main.inputs]
        shapes = [tuple(d or 1 for d in operand.dimensions) for operand in operands]
        return self._stack.enter_context(model.burst(input_shapes=shapes))

    def check(self, status: ErrorStatus, what: str, *run: Any, **more: Any) -> None:
        """It answers so."""
        found, _ = self.run(*run, **more)
        check(found == status, f"{what} gets {found.name}, not {status.name}")


def _on(path: str, use: Callable[[_User], None], target: Target) -> None:
    with ExitStack() as stack:
        use(_User(target, path, stack))


def chained(user: _User) -> None:
    """The output of an execution is the input of the next, without a copy through the client."""
    model = user.prepare(_sum)
    states = [user.buffer([model], [(0, 1)], [(0, 0)]) for _ in range(2)]
    states[0].copy_from(np.zeros(_SHAPE, np.float32))
    for n in range(4):
        user.check(_NONE, "a valid request", model, [_value(), states[n % 2]], [states[1 - n % 2]])
    found = np.zeros(_SHAPE, np.float32)
    states[0].copy_to(found)
    check(np.allclose(found, 4 * _value(), rtol=1e-5), "four sums in a row are not four times the value")


def unknown_token(user: _User) -> None:
    """A token that this client does not have."""
    model = user.prepare(_sum)
    user.check(_INVALID, "an unknown token", model, [_value(), DeviceBuffer(2**32 - 1)], [None])


def released(user: _User) -> None:
    """A buffer that was released is unknown, also to requests that used it before."""
    model = user.prepare(_sum)
    buffer = user.buffer([model], [(0, 1)])
    buffer.copy_from(_value())
    token = DeviceBuffer(buffer.token)
    user.check(_NONE, "a valid request", model, [_value(), token], [None])
    buffer.close()
    user.check(_INVALID, "the token of a released buffer", model, [_value(), token], [None])


def undeclared_role(user: _User) -> None:
    """Of another model, another index, or the other direction."""
    model, other = user.prepare(_sum), user.prepare(_sum)
    reads, writes = user.buffer([model], [(0, 0)]), user.buffer([model], [], [(0, 0)])
    reads.copy_from(_value())
    user.check(_INVALID, "a buffer of another model", other, [reads, _value()], [None])
    user.check(_INVALID, "a buffer for another input", model, [_value(), reads], [None])
    user.check(_INVALID, "an output in a buffer for an input", model, [_value(), _value()], [reads])
    user.check(_NONE, "an output in its buffer", model, [_value(), _value()], [writes])
    user.check(_INVALID, "an input in a buffer for an output", model, [writes, _value()], [None])


def fresh_input(user: _User) -> None:
    """A buffer without a value is no input; once it is written, it is."""
    model = user.prepare(_sum)
    buffer = user.buffer([model], [(0, 0)], [(0, 0)])
    user.check(_GENERAL, "an input without a value", model, [buffer, _value()], [None])
    user.check(_NONE, "an output in that buffer", model, [_value(), _value()], [buffer])
    user.check(_NONE, "an input with a value", model, [buffer, _value()], [None])
    _fails(lambda: buffer.copy_from(Memory.create(1)), _INVALID, "copy_from of a wrong size")
    user.check(_GENERAL, "an input without a value any more", model, [buffer, _value()], [None])


def used_twice(user: _User) -> None:
    """As two inputs, which is fine; as input and output, or as two outputs, which is not."""
    model, pair = user.prepare(_sum), user.prepare(_pair)
    buffer = user.buffer([model, pair], [(0, 0), (0, 1)], [(0, 0), (1, 0), (1, 1)])
    buffer.copy_from(_value())
    status, outputs = user.run(model, [buffer, buffer], [None])
    check(status == _NONE, f"one buffer as two inputs gets {status.name}")
    check(np.allclose(outputs[0], 2 * _value()), "one buffer as two inputs is not added to itself")
    user.check(_INVALID, "one buffer as input and output", model, [buffer, _value()], [buffer])
    user.check(_INVALID, "one buffer as two outputs", pair, [_value()], [buffer, buffer])


def places_in_it(user: _User) -> None:
    """A buffer is used as a whole, in its own dimensions."""
    model = user.prepare(_sum)
    buffer = user.buffer([model], [(0, 0)])
    buffer.copy_from(_value())
    run = model, [buffer, _value()], [None]
    user.check(_INVALID, "an offset in a buffer", *run, offset=4)
    user.check(_INVALID, "a length in a buffer", *run, length=_SIZE)
    user.check(_INVALID, "other dimensions than the buffer's", *run, dimensions=(4, 2))
    user.check(_INVALID, "another rank than the buffer's", *run, dimensions=(2, 4, 1))
    user.check(_NONE, "the buffer's dimensions", *run, dimensions=_SHAPE)


def open_shape(user: _User) -> None:
    """Dimensions that are open follow the value, from execution to execution."""
    model = user.prepare(partial(_sum, (0, 4)))
    reads, writes = user.buffer([model], [(0, 0)]), user.buffer([model], [], [(0, 0)])
    for rows in (2, 3, 1):
        value = np.full((rows, 4), rows, np.float32)
        reads.copy_from(value)
        user.check(_NONE, f"{rows} rows", model, [reads, value], [writes])
        _check_value(writes, 2 * value)


def shape_conflict(user: _User) -> None:
    """An output that turns out not to be what its buffer was made for."""
    model = user.prepare(partial(_sum, (0, 4)))
    buffer = user.buffer([model], [], [(0, 0)], dimensions=(2, 4))
    three = np.ones((3, 4), np.float32)
    user.check(_GENERAL, "an output of another shape than its buffer's", model, [three, three], [buffer])
    user.check(_NONE, "an output of its buffer's shape", model, [three[:2], three[:2]], [buffer])


_USES: dict[str, Callable[[_User], None]] = {
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
