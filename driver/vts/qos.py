"""qos: deadlines, endless loops, and the timings that a device reports."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from burst import ErrorStatus, InvalidArgument
from driver.nn import Model, Operand, Operation, Subgraph
from driver.options import PREFERENCES
from driver.vts.bench import answer, refusal
from driver.vts.cases import Case
from driver.vts.kit import Failed, Test, check
from driver.vts.operations import check_bare, prepared
from driver.vts.request import valid
from driver.vts.samples import sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.options import Preference
    from driver.vts.bench import Answer
    from driver.vts.target import Target

_MISSED = {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}
_LONG = 3600.0
_LOOP_TIMEOUT = 1e-3
# Below and above the values of the HAL, and of another type.
WRONG_PREFERENCES = {"low_power-1": -1, "sustained_speed+1": len(PREFERENCES), "no_word": "speed"}


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    yield Test("qos/deadline_passed", deadline_passed)
    yield Test("qos/deadline_far", deadline_far)
    yield Test("qos/endless_loop", endless_loop)
    for preference in PREFERENCES:
        yield Test(f"qos/preference/{preference}", partial(preferring, preference))
    for name, wrong in WRONG_PREFERENCES.items():
        yield Test(f"qos/preference/{name}", partial(wrong_preference, wrong))
    for way in ("plain", "burst"):
        yield Test(f"qos/timing/{way}", partial(timing, way))


def deadline_passed(target: Target) -> None:
    """A deadline in the past is missed; the next request is not affected."""
    with prepared(sample("add"), target) as model, model.burst() as burst:
        run = partial(burst.execute, timeout=target.patience)
        for _ in range(2):
            found = refusal(partial(run, deadline=time.monotonic() - 1), valid("add"))
            _check_missed(found, "a request whose deadline has passed")
            status = run(valid("add")).status
            check(not status, f"after a missed deadline, a request without one gets {status.name}")


def _check_missed(found: Answer, what: str) -> None:
    check(found.status in _MISSED, f"{what} gets {found.status.name}, not MISSED_DEADLINE_*")
    check_bare(found)


def deadline_far(target: Target) -> None:
    """A deadline in an hour is met."""
    with prepared(sample("add"), target) as model, model.burst() as burst:
        run = partial(burst.execute, timeout=target.patience, deadline=time.monotonic() + _LONG)
        status = answer(run, valid("add")).status
        check(not status, f"a request whose deadline is in an hour gets {status.name}")


def preferring(preference: Preference, target: Target) -> None:
    """A model with a preference gives the same result as without, on the plain path and in a burst."""
    case = sample("add")
    with prepared(case, target) as model:
        expected = [output.tobytes() for output in model.run(*case.feeds, timeout=target.patience)]
    with target.prepared(case.model, None, preference) as model, model.burst() as burst:
        for outputs in (
            model.run(*case.feeds, timeout=target.patience),
            burst.run(*case.feeds, timeout=target.patience).outputs,
        ):
            check([output.tobytes() for output in outputs] == expected, f"for {preference}, the result differs")


def wrong_preference(wrong: object, target: Target) -> None:
    """An unknown preference gets INVALID_ARGUMENT."""
    try:
        with target.prepared(sample("add").model, None, wrong):
            pass
    except InvalidArgument:
        return
    raise Failed(f"the device prepares a model with the invalid preference {wrong!r}")


def endless_loop(target: Target) -> None:
    """The loop timeout ends an endless WHILE; the device can be used afterwards."""
    case = endless()
    with prepared(case, target) as model, model.burst() as burst:
        ways = partial(model.execute, loop_timeout=_LOOP_TIMEOUT), partial(burst.execute, loop_timeout=_LOOP_TIMEOUT)
        for way in ways:
            found = target.bench.execute(model, case, [4], target.patience, partial(way, timeout=target.patience))
            _check_missed(found, "an endless loop")
    with prepared(sample("add"), target) as model:
        status = model.execute(valid("add"), timeout=target.patience).status
        check(not status, f"after an endless loop, a request gets {status.name}")


def endless() -> Case:
    """WHILE x == x: x grows."""

    def operand(lifetime: str, kind: str = "TENSOR_INT32", value: object = None) -> Operand:
        scalar = kind in {"INT32", "SUBGRAPH"}
        return Operand(kind, () if scalar else (1,), lifetime=lifetime, value=value)

    x, out = operand("SUBGRAPH_INPUT"), operand("SUBGRAPH_OUTPUT")
    none = operand("CONSTANT_COPY", "INT32", np.int32(0))
    one = operand("CONSTANT_COPY", value=np.ones(1, np.int32))
    is_true = operand("SUBGRAPH_OUTPUT", "TENSOR_BOOL8")
    condition = Subgraph([x, is_true], [Operation("EQUAL", (0, 0), (1,))], (0,), (1,))
    body = Subgraph([x, one, none, out], [Operation("ADD", (0, 1, 2), (3,))], (0,), (3,))
    graphs = [operand("SUBGRAPH", "SUBGRAPH", number) for number in range(2)]
    main = Subgraph([*graphs, x, out], [Operation("WHILE", (0, 1, 2), (3,))], (2,), (3,))
    return Case("endless", Model(main, (condition, body)), (np.ones(1, np.int32),), (None,), must_fail=True)


def timing(way: str, target: Target) -> None:
    """Timings come only when requested; the device's is within the driver's, and that within the client's."""
    with prepared(sample("add"), target) as model, model.burst() as burst:
        ways = {"plain": partial(model.execute), "burst": partial(burst.execute)}
        run = partial(ways[way], timeout=target.patience)
        unasked = answer(run, valid("add"))
        check(unasked.timing == (None, None), f"no timing was requested, and {unasked.timing} came")
        begin = time.monotonic()
        asked = answer(partial(run, measure=True), valid("add"))
        ours = (time.monotonic() - begin) * 1e6
        check(not asked.status, f"a measured request gets {asked.status.name}")
        known = [t for t in asked.timing if t is not None]
        if known != sorted(known):
            raise Failed(f"{known[0]} us on the device are more than {known[1]} us in the driver")
        check(all(t <= ours for t in known), f"{known} us are more than the {ours:.0f} us that the client waited")
