"""qos: fenced executions wait for fences, signal a fence, and are refused before they get one."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from burst import ErrorStatus, Result, StatusError
from driver.protocol.fences import ERROR_COUNT, FenceState
from driver.vts.bench import answer
from driver.vts.kit import Failed, Test, check, skip
from driver.vts.mutations import request_mutations
from driver.vts.operations import prepared
from driver.vts.request import valid
from driver.vts.samples import SAMPLES, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from burst import Request
    from driver.client.fenced import FencedExecution
    from driver.vts.target import Target

_CHAIN = 5


def tests(samples: int) -> Iterator[Test]:
    """samples: how many of the kit's models get mutated requests; every other test runs once."""
    for name in SAMPLES:
        for measure in (False, True):
            yield Test(f"qos/fenced/{name}{'/measured' if measure else ''}", partial(execute, name, measure))
    for name in SAMPLES[:samples]:
        for mutation, _ in request_mutations(valid(name)):
            yield Test(f"qos/fenced/{name}/{mutation}", partial(refuse, name, mutation))
    for test in (null_fence, chain, fence_that_fails, fence_that_has_failed, information_too_early):
        yield Test(f"qos/fenced/{test.__name__}", test)


def execute(name: str, measure: bool, target: Target) -> None:
    """A fenced execution gives the outputs of the plain path, and consistent timings only when requested."""
    with prepared(sample(name), target) as model:
        executions = []

        def run(request: Request) -> Result:
            executions.append(model.execute_fenced(request, measure=measure))
            return _awaited(executions[0], target)

        found = answer(run, valid(name))
        check(not found.status, f"a fenced execution gets {found.status.name}: {found.message}")
        plain = answer(partial(model.execute, timeout=target.patience), valid(name))
        same = [a.tobytes() == b.tobytes() for a, b in zip(found.outputs, plain.outputs, strict=True)]
        check(all(same), "a fenced execution's outputs differ from those of the plain path")
        _, launched, fenced = executions[0].info()
        known = [t for t in (fenced.time_in_driver, launched.time_in_driver) if t is not None]
        check(measure or not known, f"no timing was requested, and {known} came")
        check(known == sorted(known), f"{known[:1]} us since the fences are more than {known[1:]} us since the launch")
        check(
            launched.time_on_device is None or not known or launched.time_on_device <= known[0],
            f"{launched.time_on_device} us on the device are more than {known[:1]} us in the driver",
        )


def _awaited(execution: FencedExecution, target: Target) -> Result:
    result = execution.result(target.patience)
    if result.status == ErrorStatus.GENERAL_FAILURE:
        skip("the device does not run it fenced (GENERAL_FAILURE, which the HAL allows)")
    return result


def refuse(name: str, mutation: str, target: Target) -> None:
    """An invalid request gets INVALID_ARGUMENT, and no fence."""
    with prepared(sample(name), target) as model:
        broken = dict(request_mutations(valid(name)))[mutation]
        _check_refused(lambda: model.execute_fenced(broken), "an invalid request")


def _check_refused(launch: Callable[[], FencedExecution], what: str) -> None:
    try:
        launch()
    except StatusError as error:
        check(
            error.status == ErrorStatus.INVALID_ARGUMENT,
            f"{what} gets {error.status.name} from executeFenced, not INVALID_ARGUMENT",
        )
    else:
        raise Failed(f"{what} gets a fence from executeFenced, not INVALID_ARGUMENT")


def null_fence(target: Target) -> None:
    """A null handle among the fences gets INVALID_ARGUMENT."""
    with prepared(sample("add"), target) as model:
        _check_refused(lambda: model.execute_fenced(valid("add"), [None]), "a null fence")


def chain(target: Target) -> None:
    """Executions that wait for each other run in order, and none before the fence of the first."""
    with prepared(sample("add"), target) as model, _eventfd() as gate:
        executions: list[FencedExecution] = []
        first = valid("add")
        requests = [_follower(first, n) for n in range(_CHAIN)]
        for n, one in enumerate(requests):
            executions.append(model.execute_fenced(one, [executions[-1] if n else gate]))
        states = {execution.wait(0) for execution in executions}
        check(states == {FenceState.ACTIVE}, f"the chain's fence is not signalled, and its own are {states}")
        os.eventfd_write(gate, 1)
        result = _awaited(executions[-1], target)
        check(not result.status, f"the last execution of a chain gets {result.status.name}: {result.message}")
        states = {execution.wait(0) for execution in executions}
        check(states == {FenceState.SIGNALED}, f"the last execution of a chain is done, and the fences are {states}")
        found = result.outputs[0].tobytes()
        again = valid("add")
        for one in requests:
            result = model.execute(one._replace(pools=again.pools), timeout=target.patience)
        check(found == result.outputs[0].tobytes(), "a chain's output differs from that of its requests run in order")


def _follower(first: Request, n: int) -> Request:
    """Return the request for x + y, where x is the previous result; two places are used in turn."""
    (x, y), (out,) = first.inputs, first.outputs
    read, written = (out.offset, x.offset) if n % 2 else (x.offset, out.offset)
    return first._replace(inputs=(x._replace(offset=read), y), outputs=(out._replace(offset=written),))


def fence_that_fails(target: Target) -> None:
    """An execution does not run when one of its fences goes into error; nor does any that waits for it."""
    with prepared(sample("add"), target) as model, _eventfd() as gate:
        first = model.execute_fenced(valid("add"), [gate])
        second = model.execute_fenced(valid("add"), [first])
        os.eventfd_write(gate, ERROR_COUNT)
        for execution in (first, second):
            state = execution.wait(target.patience)
            check(
                state == FenceState.ERROR,
                f"a fence was set to error, and the fence of the execution that waits for it is {state}",
            )
            status = execution.info().status
            check(
                status == ErrorStatus.GENERAL_FAILURE,
                f"after a fence in error, its status is {status.name}",
            )


def fence_that_has_failed(target: Target) -> None:
    """A fence that is already in error gets INVALID_ARGUMENT."""
    with prepared(sample("add"), target) as model, _eventfd() as gate:
        os.eventfd_write(gate, ERROR_COUNT)
        _check_refused(lambda: model.execute_fenced(valid("add"), [gate]), "a fence in error")


def information_too_early(target: Target) -> None:
    """Before its fence is signalled, an execution reports GENERAL_FAILURE and no times."""
    with prepared(sample("add"), target) as model, _eventfd() as gate:
        execution = model.execute_fenced(valid("add"), [gate], measure=True)
        status, *times = execution.info()
        check(status == ErrorStatus.GENERAL_FAILURE, f"before the end its status is {status.name}, not GENERAL_FAILURE")
        check(all(t == (None, None) for t in times), f"before the end it has times: {times}")
        os.eventfd_write(gate, 1)
        result = _awaited(execution, target)
        check(not result.status, f"after its fence it gets {result.status.name}")


@contextmanager
def _eventfd() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
