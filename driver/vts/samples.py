"""The kit's own models, for tests that do not depend on operations, and generated cases for each operation.

The expected outputs are not fixed here: tests compare one way of executing a model with another.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.nn import OPERATIONS, ExecutionFailed, Interpreter, InvalidModel, ModelBuilder, Value
from driver.nn.operands import operand_type
from driver.vts.cases import Case

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from driver.nn import Model

    Array = NDArray[Any]


def _add() -> Model:
    m = ModelBuilder()
    x, y = (m.input("float32", (2, 3)) for _ in range(2))
    m.output(m.operation("ADD", x, y, 0))
    return m.build()


def _chain() -> Model:
    """Return a model of three operations, a temporary that two of them read, and two outputs."""
    m = ModelBuilder()
    x = m.input("float32", (1, 4))
    y = m.operation("ADD", x, np.ones((1, 4), np.float32), 0)
    z = m.operation("SUB", y, x, 0)
    m.output(m.operation("ADD", y, z, 1), m.operation("RELU", z))
    return m.build()


def _quantised() -> Model:
    m = ModelBuilder()
    x, y = (m.input("quant8_asymm", (3, 5), scale=0.5, zero_point=128) for _ in range(2))
    m.output(m.operation("ADD", x, y, 0, scale=1.0, zero_point=100))
    return m.build()


def _convolution() -> Model:
    m = ModelBuilder()
    x = m.input("float32", (1, 4, 4, 2))
    filters = np.linspace(-1, 1, 3 * 2 * 2 * 2, dtype=np.float32).reshape(3, 2, 2, 2)
    y = m.operation("CONV_2D", x, filters, np.array([1, 2, 3], np.float32), 2, 1, 1, 1)
    m.output(m.operation("MAX_POOL_2D", y, 2, 2, 2, 2, 2, 0))
    return m.build()


def _per_channel() -> Model:
    m = ModelBuilder()
    x = m.input("quant8_asymm", (1, 4, 4, 2), scale=0.5, zero_point=128)
    values = (np.arange(3 * 2 * 2 * 2) - 12).astype(np.int8).reshape(3, 2, 2, 2)
    filters = m.constant(values, channel_quant=((0.25, 0.5, 1.0), 0))
    m.output(m.operation("CONV_2D", x, filters, np.arange(3, dtype=np.int32), 1, 1, 1, 0, scale=2.0, zero_point=100))
    return m.build()


def _joined() -> Model:
    m = ModelBuilder()
    x, y = m.input("float32", (2, 2)), m.input("float32", (2, 3))
    m.output(m.operation("RESHAPE", m.operation("CONCATENATION", x, y, 1), [5, 2]))
    return m.build()


_MODELS = {
    "add": _add,
    "chain": _chain,
    "quantised": _quantised,
    "convolution": _convolution,
    "per_channel": _per_channel,
    "joined": _joined,
}
SAMPLES = tuple(_MODELS)
"""Their names. Each but the first adds one feature that the first lacks."""


@cache
def sample(name: str, seed: int = 0) -> Case:
    """Return one of the samples, with random inputs and the reference's outputs."""
    return case_of(name, _MODELS[name](), seed)


def case_of(name: str, model: Model, seed: int = 0) -> Case:
    """Return a model with random inputs and the reference's outputs. Raise ExecutionFailed, ValueError."""
    random = np.random.default_rng(seed)
    operands = [model.main.operands[i] for i in model.main.inputs]
    feeds = tuple(values(random, o.type.dtype, o.dimensions) for o in operands)
    bound = Interpreter(model).bind(feeds)
    bound.run()
    expected = tuple(np.array(tensor.data).reshape(-1) for tensor in bound.results)
    return Case(name, model, feeds, expected)


def values(random: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return small numbers that every operation accepts: floats between 0.1 and 2, integers from 1 to 5."""
    if dtype.kind == "f":
        return random.uniform(0.1, 2, shape).astype(dtype)
    if dtype == np.uint8:
        return random.integers(120, 140, shape).astype(dtype)
    return random.integers(1, 6, shape).astype(dtype)


# ---- generated cases: each operation in the call forms of a table, wherever it accepts them --------------------------
# This part knows only forms of calls, not operations, so a new operation of `driver.nn` gets its cases without a change
# here. The reference computes the expected outputs.

_SCALE = 0.5
_TYPES = {
    "float32": (0.0, 0),
    "float16": (0.0, 0),
    "int32": (0.0, 0),
    "bool8": (0.0, 0),
    "quant8_asymm": (_SCALE, 128),
    "quant8_asymm_signed": (_SCALE, 0),
}
"""Types of the first input, with the scale and zero point for every tensor of that type."""

_ANYTHING: dict[str, Any] = {}
_QUANTISED: tuple[dict[str, Any], ...] = (
    _ANYTHING,
    {"scale": 1.0, "zero_point": 120},
    {"scale": 1.0, "zero_point": -10},
    {"scale": 1 / 256, "zero_point": 0},
    {"scale": 1 / 256, "zero_point": -128},
    {"scale": 1 / 128, "zero_point": 128},
    {"scale": 1 / 128, "zero_point": 0},
    {"outputs": 3},
)
_OTHERS = (_ANYTHING, {"dtype": "quant8_asymm", "scale": 1.0, "zero_point": 120}, {"outputs": 3})
"""Candidates for the quantisation of outputs, for quantised and other inputs; the first valid one is taken."""

_MATRIX, _IMAGE, _BLOCK = "x 2,3", "x 1,4,4,2", "x 1,4,4,4"
FORMS: tuple[tuple[Any, ...], ...] = (
    (_MATRIX,),
    (_IMAGE,),
    (_MATRIX, "x 2,3"),
    (_MATRIX, "x 2,3", 0),
    (_IMAGE, "x 2", 3),
    (_MATRIX, "x 2,3", 1),
    ("b 2,3", _MATRIX, "x 2,3"),
    (_MATRIX, "x 3"),
    (_MATRIX, 1.0),
    (_MATRIX, 1.0, -1),
    (_MATRIX, 1),
    (_MATRIX, 1, False),
    (_MATRIX, 1, 3),
    (_MATRIX, [1], 1),
    (_MATRIX, [1], True),
    (_MATRIX, [3, 2]),
    (_MATRIX, [1, 0]),
    (_MATRIX, [[0, 1], [1, 0]]),
    (_MATRIX, [[0, 1], [1, 0]], 0.5),
    (_MATRIX, [0, 1], [2, 2]),
    (_MATRIX, [0, 0], [2, 3], [1, 2], 0, 0, 0),
    (_MATRIX, 1, [0, 2, 1]),
    (_IMAGE, [0]),
    (_IMAGE, 2, 2),
    (_IMAGE, 2.0, 2.0),
    (_IMAGE, 8, 8),
    (_IMAGE, 2),
    (_BLOCK, 2),
    (_BLOCK, 2, 3),
    (_BLOCK, 2, False),
    (_IMAGE, [2, 2]),
    (_IMAGE, [2, 2], [[0, 0], [0, 0]]),
    ("x 4,2,2,1", [2, 2]),
    (_IMAGE, 1, 2, 2, 2, 2, 0),
    (_IMAGE, 0, 1, 0, 1, 2, 2, 2, 2, 1),
    (_IMAGE, 2, 0.5, 1.0, 0.5),
    (_MATRIX, "w 4,3", "c 4", 0),
    (_IMAGE, "w 3,2,2,2", "c 3", 2, 1, 1, 0),
    (_IMAGE, "w 1,2,2,2", "c 2", 2, 1, 1, 1, 1),
    (_BLOCK, "w 4,2,2,2", "c 4", 2, 1, 1, 2, 0, False),
    (_IMAGE, "w 3,2,2,2", "c 3", 0, 0, 0, 0, 2, 2, 0, False),
    (_IMAGE, 8, 8, False),
    (_IMAGE, 1.5, 0.5, 0.001, False),
    (_MATRIX, "w 4,3", "w 4,4", "c 4", "x 2,4", 1),
    (_MATRIX, "w 4,3", "w 4,5", "c 4", "x 2,20", 1, 0),
    ("i 3", "x 6,2"),
    (_IMAGE, "w 1,4", False),
    (_IMAGE, "w 1,4", [0], 2, 2, 1.0, 1.0, False),
    (_IMAGE, "w 1,4", [0], 2, 2, 1.0, 1.0, 2, 2, False),
    ("w 1,4", "x 1,4", [0], "w 1,2"),
    ([2, 3], 1.5),
    ("i 2", 1.5),
    ([2, 3], 4),
)
"""Arguments of calls: "x 2,3" is an input of the form's type and these dimensions, "i" one of int32, "b" one of
booleans, "w" constant weights of the form's type, "c" the bias that belongs to them; lists are constant int32 tensors,
numbers are scalars."""

_MOST_FORMS = 2  # per operation and type
_DRAWS = {"RANDOM_MULTINOMIAL"}  # its result is not unique


@cache
def generated() -> tuple[Case, ...]:
    """Return, for each operation of the reference and each type, cases in the first forms that it accepts."""
    names = sorted(OPERATIONS.keys() - _DRAWS)
    return tuple(case for name in names for dtype in _TYPES for case in _cases(name, dtype))


def _cases(operation: str, dtype: str) -> Iterator[Case]:
    kind = operand_type(dtype)
    signatures = [s for s in OPERATIONS[operation].signatures if kind in s.versions()]
    taken = 0
    for form in FORMS:
        if taken == _MOST_FORMS or not any(s.slots(len(form)) for s in signatures):
            continue
        case = _case(operation, dtype, form, f"generated_{operation.lower()}_{dtype}_{taken + 1}")
        if case is not None:
            yield case
            taken += 1


def _case(operation: str, dtype: str, form: Sequence[Any], name: str) -> Case | None:
    for quantisation in _QUANTISED if _TYPES[dtype][0] else _OTHERS:
        try:
            return case_of(name, _model(operation, dtype, form, quantisation))
        except (InvalidModel, ExecutionFailed, ValueError):
            continue
    return None


def _model(operation: str, dtype: str, form: Sequence[Any], quantisation: dict[str, Any]) -> Model:
    builder = ModelBuilder()
    arguments = [_argument(builder, dtype, argument) for argument in form]
    results = builder.operation(operation, *arguments, **quantisation)
    builder.output(*(results if isinstance(results, tuple) else (results,)))
    return builder.build()


def _argument(builder: ModelBuilder, dtype: str, argument: Any) -> Any:
    scale, zero_point = _TYPES[dtype]
    if isinstance(argument, float) and dtype == "float16":
        return builder.constant(np.float16(argument))
    if not isinstance(argument, str):
        return argument
    letter, dims = argument.split()
    shape = tuple(map(int, dims.split(",")))
    return {
        "x": lambda: builder.input(dtype, shape, scale=scale, zero_point=zero_point),
        "i": lambda: builder.input("int32", shape),
        "b": lambda: builder.input("bool8", shape),
        "w": lambda: builder.constant(_ramp(shape), dtype=dtype, scale=scale, zero_point=zero_point),
        "c": lambda: _bias(builder, dtype, shape, scale * scale),
    }[letter]()


def _bias(builder: ModelBuilder, dtype: str, shape: tuple[int, ...], scale: float) -> Value:
    if scale:
        return builder.constant(_ramp(shape), dtype="int32", scale=scale)
    return builder.constant(_ramp(shape), dtype=dtype)


def _ramp(shape: tuple[int, ...]) -> Any:
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.int32).reshape(shape)
