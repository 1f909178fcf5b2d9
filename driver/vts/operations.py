"""operations: the results of a device, case by case; with unknown output shapes, signed types, and in a burst."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from burst import ErrorStatus, StatusError
from driver.nn import OPERATIONS, combine_dimensions
from driver.vts.accuracy import difference
from driver.vts.bench import Answer, output_sizes
from driver.vts.kit import Failed, Test, check, skip

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
            yield Test(f"{name}/signed", partial(execute, twin))


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


def execute_in_burst(case: Case, target: Target) -> None:
    """Execute in a burst."""
    with prepared(case, target) as model, model.burst(input_shapes=_input_shapes(case)) as burst:
        run: Execute = partial(burst.execute, timeout=target.patience)
        answer = target.bench.execute(model, case, output_sizes(case), target.patience, run)
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
    if unknown := [operation for operation in case.operations if operation not in OPERATIONS]:
        skip(f"{', '.join(unknown)}: this driver version has no such operation")
    supported = target.supported(case.model)
    if not all(supported):
        named = zip(case.model.main.operations, supported, strict=False)
        skip(f"{', '.join(sorted({o.type for o, is_one in named if not is_one}))}: not supported by the device")
    with target.prepared(case.model, cache) as model:
        yield model


def _input_shapes(case: Case) -> list[tuple[int, ...] | None]:
    return [None if feed is None else feed.shape for feed in case.feeds]
