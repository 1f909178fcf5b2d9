"""When a result is correct: the tolerances of Android's suites, value by value and in double precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.nn import OperandType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from driver.vts.cases import Case

_EXACT, _ONE_STEP, _THREE_STEPS = (0.0, 0.0), (1.0, 0.0), (3.0, 0.0)
_SINGLE = (float(np.float32(1e-5)), 5 * 2.0**-23)
_HALF = (5 * 2.0**-10, 5 * 2.0**-10)
_LIMITS = {
    OperandType.TENSOR_FLOAT32: _SINGLE,
    OperandType.TENSOR_FLOAT16: _HALF,
    OperandType.TENSOR_INT32: _ONE_STEP,
    OperandType.INT32: _ONE_STEP,
    OperandType.TENSOR_QUANT8_ASYMM: _ONE_STEP,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: _ONE_STEP,
    OperandType.TENSOR_QUANT8_SYMM: _ONE_STEP,
    OperandType.TENSOR_QUANT16_ASYMM: _ONE_STEP,
    OperandType.TENSOR_QUANT16_SYMM: _ONE_STEP,
    OperandType.TENSOR_BOOL8: _EXACT,
}
"""(absolute, relative) tolerance for each type that an output may have."""
_BYTES = {
    OperandType.TENSOR_QUANT8_ASYMM,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    OperandType.TENSOR_QUANT8_SYMM,
}


def limits(case: Case, kind: OperandType) -> tuple[float, float]:
    """Tolerance for an output of this type: |found - expected| <= absolute + relative * |expected|.

    Raises ValueError for a type that has no criterion.
    """
    if kind not in _LIMITS:
        raise ValueError(f"there is no tolerance for outputs of type {kind.name}")
    if kind == OperandType.TENSOR_FLOAT32 and case.is_half():
        return _HALF
    if kind in _BYTES and "mobilenet" in case.name:
        return _THREE_STEPS
    return _LIMITS[kind]


def difference(case: Case, number: int, found: NDArray[Any]) -> str | None:
    """Describe the error of output `number`; None when it is correct. found: its flat values in the operand's dtype."""
    expected, kind = case.expected[number], case.outputs[number].type
    if case.frequency:
        return _draws(case, found)
    if expected is None:
        return None
    if found.size != expected.size:
        return f"output {number} has {found.size} values; expected {expected.size}"
    absolute, relative = limits(case, kind)
    a, b = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        wrong = ~((np.abs(a - b) <= absolute + relative * np.abs(b)) | (a == b))
    if not wrong.any():
        return None
    first = int(np.argmax(wrong))
    return (
        f"output {number} ({kind.name}): {np.count_nonzero(wrong)} of {wrong.size} values are wrong; "
        f"value {first} is {a[first]:.9g} and should be {b[first]:.9g}"
    )


def _draws(case: Case, found: NDArray[Any]) -> str | None:
    """Compare the frequency of each class with its softmax, row by row."""
    chances = case.feeds[0]
    assert chances is not None
    logits = chances.astype(np.float64).reshape(-1, chances.shape[-1])
    softmax = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax /= softmax.sum(axis=1, keepdims=True)
    draws = found.reshape(len(logits), -1)
    if draws.min() < 0 or draws.max() >= logits.shape[1]:
        return f"a class outside 0..{logits.shape[1] - 1} was drawn"
    for row, (drawn, expected) in enumerate(zip(draws, softmax, strict=True)):
        off = np.abs(np.bincount(drawn, minlength=len(expected)) / len(drawn) - expected)
        if (worst := int(np.argmax(off))) >= 0 and off[worst] > case.frequency:
            return f"row {row}: class {worst} is drawn {off[worst]:.3g} off its probability {expected[worst]:.3g}"
    return None
