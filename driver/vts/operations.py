"""operations: the results of a device, case by case; with unknown output shapes, signed types, and in a burst.

A result is correct within the tolerances of Android's suites, value by value and in double precision.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import ErrorStatus, StatusError
from driver.nn import OPERATIONS, ExtensionType, OperandType, combine_dimensions
from driver.vts.bench import Answer, output_sizes
from driver.vts.kit import Failed, Test, check, skip

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from driver.client.prepared_model import RemotePreparedModel
    from driver.options import Cache
    from driver.vts.bench import Execute
    from driver.vts.cases import Case
    from driver.vts.target import Target


def tests(cases: Iterable[Case], in_bursts: int) -> Iterator[Test]:
    """in_bursts: how many cases of an operation also run in a burst."""
    seen: Counter[str] = Counter()
    for case in cases:
        name, operation = f"operations/{case.name}", case.operations[0]
        yield Test(name, partial(execute, case))
        seen[operation] += not case.must_fail
        if not case.must_fail and seen[operation] <= in_bursts:
            yield Test(f"{name}/burst", partial(execute_in_burst, case))
        if (opened := case.with_open_outputs()) is not None:
            yield Test(f"{name}/dynamic", partial(execute_dynamic, case, opened))
        if (twin := case.signed()) is not None:
            yield Test(f"{name}/signed", partial(execute_twin, case, twin))


def execute(case: Case, target: Target) -> None:
    """Execute on the plain path; a case that must fail may do so at any stage."""
    try:
        with prepared(case, target) as model:
            answer = target.bench.execute(model, case, output_sizes(case), target.patience)
    except StatusError:
        if case.must_fail:
            return
        raise
    if case.must_fail:
        check(answer.status, "it was executed; it must fail")
        check_bare(answer)
    else:
        check_answer(case, answer)


def execute_twin(case: Case, twin: Case, target: Target) -> None:
    """Execute the signed twin, which the device must support exactly if it supports the unsigned case."""
    if set(case.operations) <= OPERATIONS.keys():
        unsigned, signed = (all(target.supported(each.model)) for each in (case, twin))
        which = "unsigned form and not its signed twin" if unsigned else "signed twin and not its unsigned form"
        check(unsigned == signed, f"the device supports the {which}")
    execute(twin, target)


def execute_in_burst(case: Case, target: Target) -> None:
    """Execute in a burst."""
    with prepared(case, target) as model, model.burst(input_shapes=_input_shapes(case)) as burst:
        run: Execute = partial(burst.execute, timeout=target.patience)
        answer = target.bench.execute(model, case, output_sizes(case), target.patience, run=run)
        check_answer(case, answer)
        check(not burst.stats()["runs"]["plain"], "the burst used the plain path")


def execute_dynamic(case: Case, opened: Case, target: Target) -> None:
    """Execute with unknown output dimensions: with enough memory, and with one byte too few for the first output."""
    with prepared(opened, target) as model:
        sizes = output_sizes(case)
        answer = target.bench.execute(model, opened, sizes, target.patience)
        check(answer.status or answer.shapes, "the output shapes are unknown, and the answer has none")
        check_answer(case, answer)
        if sizes[0] > 1:
            short = target.bench.execute(model, opened, [sizes[0] - 1, *sizes[1:]], target.patience)
            check_short(short)


def check_short(answer: Answer) -> None:
    """Check that the device reports the first output as too large for its memory."""
    if answer.status == ErrorStatus.GENERAL_FAILURE:
        skip("the device does not report the size of outputs of unknown shape (GENERAL_FAILURE, which the HAL allows)")
    check(
        answer.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
        f"output 0 is one byte too small, and the answer is {answer.status.name}, not OUTPUT_INSUFFICIENT_SIZE",
    )
    check(answer.shapes, "OUTPUT_INSUFFICIENT_SIZE came without output shapes")
    check(not answer.shapes[0].is_sufficient, "output 0 is one byte too small, and its shape says is_sufficient")
    check(answer.timing == (None, None), "OUTPUT_INSUFFICIENT_SIZE came with a timing")


def check_bare(answer: Answer) -> None:
    """Check that a failure has neither shapes nor a timing."""
    check(not answer.shapes, f"{answer.status.name} came with output shapes")
    check(answer.timing == (None, None), f"{answer.status.name} came with a timing")


def check_timing(answer: Answer, *, is_measured: bool, way: str) -> None:
    """Check that times came only if they were asked for, and that the device's is within the driver's."""
    known = [time for time in answer.timing if time is not None]
    check(is_measured or not known, f"{way}, no timing was requested, and {answer.timing} came")
    check(known == sorted(known), f"{way}, {known[:1]} us on the device are more than {known[1:]} us in the driver")


def check_answer(case: Case, answer: Answer) -> None:
    """Check status, shapes and values."""
    check(not answer.status, f"the device returned {answer.status.name}: {answer.message}")
    check(
        len(answer.shapes) in {0, len(case.expected)},
        f"{len(answer.shapes)} output shapes for {len(case.expected)} outputs",
    )
    for number in range(len(case.expected)):
        if case.expected[number] is not None or case.frequency:
            _check_output(case, answer, number)


def _check_output(case: Case, answer: Answer, number: int) -> None:
    operand, expected = case.outputs[number], case.expected[number]
    count = int(np.prod(operand.dimensions))
    if answer.shapes:
        dimensions, is_sufficient = answer.shapes[number]
        fits = combine_dimensions(operand.dimensions, dimensions) is not None
        check(
            dimensions == operand.dimensions if operand.is_known else fits,
            f"output {number} has dimensions {list(dimensions)}; expected {list(operand.dimensions)}",
        )
        check(is_sufficient, f"output {number} has enough memory, and its shape says is_sufficient is false")
        count = int(np.prod(dimensions))
    elif not operand.is_known:
        raise Failed(f"the shape of output {number} is unknown, and the answer has none")
    nbytes = count * operand.type.element_size
    check(
        nbytes <= answer.outputs[number].nbytes,
        f"the device reports {count} values for output {number}; expected {0 if expected is None else expected.size}",
    )
    complaint = difference(case, number, answer.outputs[number][:nbytes].view(operand.type.dtype))
    check(complaint is None, complaint or "")


@contextmanager
def prepared(case: Case, target: Target, cache: Cache | None = None) -> Iterator[RemotePreparedModel]:
    """Prepare the case's model. Unsupported models are skipped; a supported one must be prepared."""
    extensions = {f"{name}." for name in target.device.extensions}
    known = (*OPERATIONS, *(operation for operation in case.operations if operation.startswith(tuple(extensions))))
    if unknown := [operation for operation in case.operations if operation not in known]:
        skip(f"{', '.join(unknown)}: this driver version has no such operation")
    supported = target.supported(case.model)
    if not all(supported):
        named = zip(case.model.main.operations, supported, strict=False)
        skip(f"{', '.join(sorted({o.type for o, is_one in named if not is_one}))}: not supported by the device")
    with target.prepared(case.model, cache) as model:
        yield model


def _input_shapes(case: Case) -> list[tuple[int, ...] | None]:
    return [None if feed is None else feed.shape for feed in case.feeds]


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
    """Return the tolerance for an output of this type: |found - expected| <= absolute + relative * |expected|.

    Raise ValueError for a type that has no criterion.
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
    expected, operand = case.expected[number], case.outputs[number]
    if case.frequency:
        return _draws(case, found)
    if expected is None:
        return None
    if isinstance(operand.type, ExtensionType):  # only its devices know when two values are near
        return None if found.tobytes() == expected.tobytes() else f"output {number} ({operand.type}) has other bytes"
    kind = operand.base_type
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
