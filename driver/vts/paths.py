"""operations: each case on the other paths of the HAL: asynchronously, fenced, by deadlines, in other kinds of memory.

`operations/<case>` and `operations/<case>/burst` are in operations.py. A device may refuse to run a valid request
fenced, or to allocate a buffer, with GENERAL_FAILURE: then the test is skipped.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import Controller, ErrorStatus, Request, RequestArgument, Result, StatusError
from driver.options import PRIORITIES
from driver.vts.bench import JUNK, Answer, ArgumentPlace, answer, output_sizes, refusal, request
from driver.vts.burst import MISSED
from driver.vts.domains import allocated
from driver.vts.kit import Failed, Test, check, skip
from driver.vts.memory import blob
from driver.vts.operations import check_answer, check_timing, prepared
from driver.vts.qos import DEADLINES, PREFERENCE
from driver.vts.raw_lane import RawLane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from driver.client.device_buffers import Buffer
    from driver.client.fenced import FencedExecution
    from driver.client.prepared_model import RemotePreparedModel
    from driver.nn import Operand
    from driver.vts.cases import Case
    from driver.vts.target import Target

_MEASURED = (False, True)
_INVALID, _GENERAL = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE


def tests(cases: Iterable[Case]) -> Iterator[Test]:
    """Yield the tests of each case that must not fail."""
    for case in cases:
        if not case.must_fail:
            for name, execute in _WAYS.items():
                yield Test(f"operations/{case.name}/{name}", partial(execute, case))


# ---- ways to execute a request, whatever memory it is in


def _in_turn(model: RemotePreparedModel, target: Target, request: Request, *, measure: bool = False) -> Result:
    return model.execute(request, measure, target.patience)


def _launched(model: RemotePreparedModel, target: Target, request: Request, *, measure: bool = False) -> Result:
    return model.execute_async(request, measure).result(target.patience)


def _fenced(model: RemotePreparedModel, target: Target, request: Request, *, measure: bool = False) -> Result:
    """Execute it twice: the second execution waits for the fence of the first. Return the result that failed first."""
    first = model.execute_fenced(request, measure=measure)
    try:
        second = model.execute_fenced(request, [first], measure=measure)
    except StatusError:
        found = first.result(target.patience)
        if found.status:  # its fence was in error before the second execution was launched
            return found
        raise
    found = first.result(target.patience)
    return found if found.status else second.result(target.patience)


def _is_known(case: Case) -> bool:
    """Return True if the model says the shape of every output, as fenced executions need."""
    return all(operand.is_known for operand in case.outputs)


# ---- the tests


def asynchronous(case: Case, target: Target) -> None:
    """Execute in the background, measured and not; several executions of the model are in flight."""
    sizes = output_sizes(case)
    with prepared(case, target) as model:
        for measure in _MEASURED:
            run = partial(_launched, model, target, measure=measure)
            found = target.bench.execute(model, case, sizes, target.patience, run=run)
            check_answer(case, found)
            check_timing(found, is_measured=measure, way="asynchronously")


def fenced(case: Case, target: Target) -> None:
    """Execute behind the fence of another execution, measured and not. Without known output shapes it is refused."""
    with prepared(case, target) as model:
        if not _is_known(case):
            asked = target.bench.request(model, case, output_sizes(case))
            _check_no_fence(partial(model.execute_fenced, asked))
            return
        for measure in _MEASURED:
            run = partial(_fenced, model, target, measure=measure)
            found = target.bench.execute(model, case, output_sizes(case), target.patience, run=run)
            _skip_refused(found, "run it fenced")
            check_answer(case, found)
            check_timing(found, is_measured=measure, way="fenced")
    opened = case.with_open_outputs()
    if opened is not None and all(target.supported(opened.model)):
        with target.prepared(opened.model) as model:
            asked = target.bench.request(model, opened, output_sizes(case))
            _check_no_fence(partial(model.execute_fenced, asked))


def _check_no_fence(launch: Callable[[], FencedExecution]) -> None:
    try:
        launch()
    except StatusError as error:
        found = error.status.name
        check(error.status == _INVALID, f"a fenced execution without known output shapes gets {found}")
    else:
        raise Failed("a fenced execution without known output shapes gets a fence, not INVALID_ARGUMENT")


def _skip_refused(found: Answer, what: str) -> None:
    if found.status == _GENERAL:
        skip(f"the device does not {what} (GENERAL_FAILURE, which the HAL allows): {found.message}")


def in_blobs(case: Case, target: Target) -> None:
    """Execute with each argument in a hardware buffer of its own, of format blob."""
    sizes = output_sizes(case)
    places = [ArgumentPlace(blob(feed.nbytes if feed is not None and feed.nbytes else 1), 0) for feed in case.feeds]
    places += [ArgumentPlace(blob(size), 0) for size in sizes]
    with prepared(case, target) as model:
        for way, execute in _ways_of(case):
            for place in places[len(case.feeds) :]:
                place.pool.asarray()[:] = JUNK
            found = answer(partial(execute, model, target), request(case, places, sizes))
            _check_in_memory(case, found, way)


def _ways_of(case: Case) -> list[tuple[str, Callable[..., Result]]]:
    ways: list[tuple[str, Callable[..., Result]]] = [("on the plain path", _in_turn), ("asynchronously", _launched)]
    return [*ways, ("fenced", _fenced)] if _is_known(case) else ways


def _check_in_memory(case: Case, found: Answer, way: str) -> None:
    if way == "fenced":
        _skip_refused(found, "run it fenced")
    try:
        check_answer(case, found)
    except Failed as error:
        raise Failed(f"{way}, {error}") from None


def in_buffers(case: Case, target: Target) -> None:
    """Execute with each argument in a buffer of the device, allocated for that role."""
    with prepared(case, target) as model, ExitStack() as stack:

        def allocate(side: int, index: int, dimensions: tuple[int, ...]) -> Buffer:
            roles = [[(0, index)], []] if side == 0 else [[], [(0, index)]]
            return stack.enter_context(allocated(target, [model], roles[0], roles[1], dimensions=dimensions))

        inputs = [None if feed is None else allocate(0, n, feed.shape) for n, feed in enumerate(case.feeds)]
        outputs = [allocate(1, n, _fixed(o.dimensions)) for n, o in enumerate(case.outputs)]
        for buffer, feed in zip(inputs, case.feeds, strict=True):
            if buffer is not None and feed is not None:
                buffer.copy_from(feed)
        asked = _on_buffers(inputs, outputs)
        for way, execute in _ways_of(case):
            for buffer, operand in zip(outputs, case.outputs, strict=True):
                if operand.is_known:
                    buffer.copy_from(_junk(operand))
            found = refusal(partial(execute, model, target), asked)
            held = (
                ()
                if found.status
                else tuple(_read(b, o.type.dtype) for b, o in zip(outputs, case.outputs, strict=True))
            )
            _check_in_memory(case, replace(found, outputs=held), way)


def _junk(operand: Operand) -> Any:
    count = math.prod(operand.dimensions) * operand.type.element_size
    return np.full(count, JUNK, np.uint8).view(operand.type.dtype).reshape(operand.dimensions)


def _fixed(dimensions: tuple[int, ...]) -> tuple[int, ...]:
    """Return dimensions, () if some are unknown."""
    return () if 0 in dimensions else dimensions


def _on_buffers(inputs: list[Buffer | None], outputs: list[Buffer]) -> Request:
    pools: list[Any] = [buffer for buffer in (*inputs, *outputs) if buffer is not None]
    numbers = iter(range(len(pools)))
    arguments = [
        RequestArgument(has_no_value=True) if b is None else RequestArgument(pool=next(numbers)) for b in inputs
    ]
    return Request(tuple(arguments), tuple(RequestArgument(pool=next(numbers)) for _ in outputs), tuple(pools))


def _read(buffer: Buffer, dtype: Any) -> Any:
    """Return the bytes of a buffer's value; an empty one cannot be copied, for there is no memory of 0 bytes."""
    found = np.zeros(buffer.dimensions, dtype)
    if found.size:
        buffer.copy_to(found)
    return found.reshape(-1).view(np.uint8)


# ---- deadlines


def by_deadlines(case: Case, target: Target) -> None:
    """Prepare at each priority and by each deadline, and execute by each deadline on all four paths.

    What is done is right; what is not done in time says so; nothing is late for a deadline that never comes.
    """
    with prepared(case, target):
        pass
    for number, priority in enumerate(PRIORITIES):
        _prepare(case, target, f"at priority {priority}", (PREFERENCE, None, number), may_miss=False)
    for name, deadline in DEADLINES.items():
        _prepare(case, target, f"by the deadline {name!r}", (PREFERENCE, deadline()), may_miss=name != "unlimited")
    with prepared(case, target) as model:
        asked = target.bench.request(model, case, output_sizes(case))
        with RawLane(model, asked) as lane, Controller(model.configure_burst(0.0), spin=0.0) as controller:
            ways: dict[str, Callable[[int, float], Result]] = {
                "on the plain path": lane.in_turn,
                "asynchronously": lane.launched,
                "in a burst": partial(_in_burst, controller, asked),
            }
            if _is_known(case):
                ways["fenced"] = lane.fenced
            for way, name in product(ways, DEADLINES):
                found = answer(partial(_by, ways[way], name, target.patience), asked)
                _check_by(case, found, way, name)


def _by(run: Callable[[int, float], Result], deadline: str, patience: float, asked: Request) -> Result:
    for place in asked.outputs:
        asked.pools[place.pool].asarray(np.uint8, place.length, place.offset)[:] = JUNK
    return run(DEADLINES[deadline](), patience)


def _in_burst(controller: Controller, asked: Request, deadline: int, patience: float) -> Result:
    """Send it whatever its deadline is: the device judges that."""
    controller.start(controller.packet(asked), deadline)
    found = controller.receive(patience, measure=True)  # as the result has it, whatever was asked for
    return Result(found.status, (), found.output_shapes, found.timing)


def _prepare(case: Case, target: Target, what: str, options: tuple[Any, ...], *, may_miss: bool) -> None:
    try:
        with target.prepared(case.model, None, *options):
            pass
    except StatusError as error:
        is_missed = may_miss and error.status in MISSED
        check(is_missed, f"preparing {what} gets {error.status.name}")


def _check_by(case: Case, found: Answer, way: str, name: str) -> None:
    if way == "fenced" and found.status == _GENERAL:
        return  # the device does not run it fenced, which the HAL allows
    may_miss = name != "unlimited"
    what = f"{way}, with the deadline {name!r},"
    if found.status in MISSED and may_miss:
        check(not found.shapes, f"{what} {found.status.name} came with output shapes")
    else:
        check(not found.status, f"{what} the status is {found.status.name}: {found.message}")
        check_answer(case, found)
    check(found.timing == (None, None), f"{what} no timing was requested, and {found.timing} came")


_WAYS: dict[str, Callable[[Case, Target], None]] = {
    "async": asynchronous,
    "fenced": fenced,
    "blobs": in_blobs,
    "buffers": in_buffers,
    "deadlines": by_deadlines,
}
