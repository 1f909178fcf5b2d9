"""memory: device buffers as inputs and outputs of executions, valid and invalid, on both paths."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import DeviceBuffer, ErrorStatus, Memory, Request, RequestArgument
from driver.nn import ModelBuilder
from driver.vts.domains import (
    GENERAL,
    INVALID,
    NONE,
    SHAPE,
    SIZE,
    allocated,
    check_value,
    fails,
    prepared,
    total,
    value,
)
from driver.vts.kit import Test, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.client.burst import Burst
    from driver.client.device_buffers import Buffer
    from driver.client.prepared_model import RemotePreparedModel
    from driver.nn import Model
    from driver.vts.target import Target


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    for name, use in _USES.items():
        for path in ("plain", "burst"):
            yield Test(f"memory/buffers/{name}/{path}", partial(_on, path, use))


def _pair() -> Model:
    """A model with one input, and two outputs of the same shape."""
    m = ModelBuilder()
    x = m.input("float32", SHAPE)
    m.output(m.operation("RELU", x), m.operation("RELU1", x))
    return m.build()


class _Requester:
    """Executes requests on one of the two paths; their arguments are arrays or device buffers."""

    def __init__(self, target: Target, path: str, stack: ExitStack) -> None:
        self.target, self._path, self._stack = target, path, stack

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
        result = self._executor(model).execute(request, timeout=self.target.patience)
        return result.status, [output.copy() for output in result.outputs if output is not None]

    def _executor(self, model: RemotePreparedModel) -> RemotePreparedModel | Burst:
        if self._path == "plain":
            return model
        operands = [model.model.main.operands[i] for i in model.model.main.inputs]
        shapes = [tuple(d or 1 for d in operand.dimensions) for operand in operands]
        return self._stack.enter_context(model.burst(input_shapes=shapes))

    def check(self, status: ErrorStatus, what: str, *run: Any, **more: Any) -> None:
        """Check the status of an execution."""
        found, _ = self.run(*run, **more)
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
    user.check(INVALID, "an unknown token", model, [value(), DeviceBuffer(2**32 - 1)], [None])


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
    check(status == NONE, f"one buffer as two inputs gets {status.name}")
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
