"""Runs single operations for the tests of driver.nn: with constant parameters, and with everything fed at run time."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from driver.nn import Interpreter, Model, ModelBuilder, arena, blocks
from driver.nn.operands import constant_operand
from driver.nn.ops import boxes, lookup, lstm, quantised_lstm, resize, rnn, suppression


@dataclass(frozen=True)
class Quantised:
    """A quantised array with its parameters, as an argument of `evaluate`."""

    array: Any
    scale: float = 0.0
    zero_point: int = 0
    channel_quant: tuple[Sequence[float], int] | None = None

    @property
    def real(self) -> np.ndarray:
        """The real numbers that the array stands for."""
        if self.channel_quant is None:
            return (self.array.astype(np.float64) - self.zero_point) * self.scale
        scales, channel = self.channel_quant
        return self.array * np.reshape(scales, [-1 if i == channel else 1 for i in range(self.array.ndim)])


def run_model(model: Model, *inputs: Any, room: int = 1 << 16, again: bool = True) -> tuple[np.ndarray, ...]:
    """Outputs of one run, each written into a buffer of `room` bytes at an odd address.

    again: a second run, over memory that holds something else by then, has to give the same.
    """
    buffers = [np.full(room + 1, 0xAB, np.uint8)[1:] for _ in model.main.outputs]
    allocated: list[np.ndarray] = []
    with mock.patch.object(arena, "memory", partial(_noted, allocated, arena.memory)):
        bound = Interpreter(model).bind(inputs, buffers)
        bound.run()
        first = [buffer.copy() for buffer in buffers]
        for block in (*allocated, *buffers) if again else ():
            block[...] = 0xAB
        bound.run()
    for one, other in zip(first, buffers, strict=True):
        assert not again or (one == other).all(), "what a run leaves in its memory changes the next one"
    _compare_with_small_blocks(model, inputs, first)
    results = []
    for index, buffer, (dimensions, is_sufficient) in zip(model.main.outputs, buffers, bound.shapes, strict=True):
        dtype = model.main.operands[index].type.dtype
        size = int(np.prod(dimensions)) * dtype.itemsize
        assert is_sufficient
        assert (buffer[size:] == 0xAB).all(), "bytes behind the result were written"
        results.append(buffer[:size].view(dtype).reshape(dimensions))
    return tuple(results)


SMALL_BLOCKS = {
    blocks: {"ELEMENTS": 50, "PRODUCTS": 2000, "_SIDE": 4, "_TERMS": 2000, "_PER_ELEMENT": 8},
    boxes: {"BLOCK": 4},
    lookup: {"ELEMENTS": 50, "STRIP": 3},
    lstm: {"ELEMENTS": 50},
    quantised_lstm: {"_BLOCK": 3},
    resize: {"ELEMENTS": 50},
    rnn: {"ELEMENTS": 50},
    suppression: {"BLOCK": 4},
}


def _compare_with_small_blocks(model: Model, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> None:
    """Work that is done in blocks of some elements gives the same; sums of floats, nearly the same."""
    if any(operation.type == "RANDOM_MULTINOMIAL" for operation in model.main.operations):
        return  # it may be without a seed
    buffers = [np.full(buffer.size + 1, 0xAB, np.uint8)[1:] for buffer in expected]
    with contextlib.ExitStack() as stack:
        for module, constants in SMALL_BLOCKS.items():
            stack.enter_context(mock.patch.multiple(module, **constants))
        Interpreter(model).bind(inputs, buffers).run()
    for one, other, index in zip(buffers, expected, model.main.outputs, strict=True):
        dtype = model.main.operands[index].type.dtype
        size = one.size // dtype.itemsize * dtype.itemsize
        given, wanted = (array[:size].view(dtype) for array in (one, other))
        if dtype.kind == "f":
            np.testing.assert_allclose(given, wanted, 1e-3 if dtype == np.float16 else 1e-5, 1e-4)
        else:
            np.testing.assert_array_equal(given, wanted)


def _noted(blocks: list[np.ndarray], memory: Callable[[int], np.ndarray], nbytes: int) -> np.ndarray:
    blocks.append(memory(nbytes))
    return blocks[-1]


@pytest.fixture(name="run_model")
def _run_model() -> Callable[..., tuple[np.ndarray, ...]]:
    return run_model


@pytest.fixture
def quantised() -> type[Quantised]:
    return Quantised


@pytest.fixture(params=["constants", "all inputs"])
def evaluate(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """evaluate(operation, *inputs, **asked of the builder) -> its output, a tuple when there are several."""
    everything_fed = request.param == "all inputs"

    def evaluate(operation: str, *args: Any, **asked: Any) -> Any:
        m, handles, feeds = ModelBuilder(), [], []
        for position, arg in enumerate(args):
            if arg is None:
                handles.append(None)
                continue
            q = arg if isinstance(arg, Quantised) else Quantised(arg)
            parameters = {"scale": q.scale, "zero_point": q.zero_point, "channel_quant": q.channel_quant}
            operand = constant_operand(q.array, **parameters)
            if position == 0 or everything_fed:
                handles.append(m.input(operand.type, operand.dimensions, **parameters))
                feeds.append(operand.value)
            else:
                handles.append(m.constant(q.array, **parameters))
        results = m.operation(operation, *handles, **asked)
        m.output(*(results if isinstance(results, tuple) else (results,)))
        outputs = run_model(m.build(), *feeds)
        return outputs if len(outputs) > 1 else outputs[0]

    return evaluate


@pytest.fixture
def requantise() -> Callable[..., np.ndarray]:
    """requantise(real, scale, zero point, dtype): round half away from zero and clamp, one number at a time."""

    def requantise(real: np.ndarray, scale: float, zero_point: int, dtype: Any = np.uint8) -> np.ndarray:
        info = np.iinfo(dtype)

        def one(x: float) -> int:
            steps = int(abs(x) / scale + 0.5)
            return min(max((steps if x >= 0 else -steps) + zero_point, info.min), info.max)

        return np.array([one(float(x)) for x in np.ravel(real)], dtype).reshape(np.shape(real))

    return requantise
