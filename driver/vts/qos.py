"""qos: deadlines, priorities, endless loops, and the timings that a device reports."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import Controller, ErrorStatus, InvalidArgument, Memory, NotSent, Result, StatusError
from driver.nn import Model, ModelBuilder, Operand, Operation, Subgraph
from driver.options import PREFERENCES, PRIORITIES
from driver.protocol.lane_codec import with_loop_timeout
from driver.vts.bench import ArgumentPlace, answer, refusal, request
from driver.vts.burst import MISSED
from driver.vts.cases import Case
from driver.vts.kit import Failed, Test, check, skip
from driver.vts.operations import check_bare, prepared
from driver.vts.raw_lane import RawLane
from driver.vts.request import valid
from driver.vts.samples import sample
from fmq import clock
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from burst import Request
    from driver.client.prepared_model import RemotePreparedModel
    from driver.vts.bench import Answer
    from driver.vts.target import Target

_LONG = 3600.0
_LOOP_TIMEOUT = 1e-3
# Below and above the values of the HAL, and of another type.
WRONG_PREFERENCES = {"low_power-1": -1, "sustained_speed+1": len(PREFERENCES), "no_word": "speed"}
PREFERENCE = "fast_single_answer"
_SHORT = 5_000_000  # ns
_MANY, _NEAR, _GRACE = 200, 300_000_000, 2.0  # operations; ns until a deadline; seconds after it
_LOOP, _ROOM = 1.0, 64  # seconds that a loop may take; bytes for an argument
DEADLINES: dict[str, Callable[[], int]] = {
    "now": clock.now,
    "short": lambda: clock.now() + _SHORT,
    "unlimited": lambda: FOREVER,
}
WRONG_PRIORITIES = {"low-1": -1, "high+1": len(PRIORITIES)}


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    yield Test("qos/deadline_passed", deadline_passed)
    yield Test("qos/deadline_far", deadline_far)
    yield Test("qos/endless_loop", endless_loop)
    for preference in PREFERENCES:
        yield Test(f"qos/preference/{preference}", partial(preferring, f"for {preference}", (preference,)))
    for name, wrong in WRONG_PREFERENCES.items():
        yield Test(f"qos/preference/{name}", partial(refused, f"preference {wrong!r}", (wrong,)))
    for way in ("plain", "burst"):
        yield Test(f"qos/timing/{way}", partial(timing, way))
    for name in DEADLINES:
        yield Test(f"qos/deadline/prepare/{name}", partial(preparation, name))
        for way in ("plain", "burst"):
            yield Test(f"qos/deadline/{way}/{name}", partial(execution, way, name))
    yield Test("qos/deadline/prepare/long", long_preparation)
    for way in ("plain", "burst"):
        yield Test(f"qos/deadline/{way}/in_the_middle", partial(in_the_middle, way))
    for number, priority in enumerate(PRIORITIES):
        options = (PREFERENCE, None, number)
        yield Test(f"qos/priority/{priority}", partial(preferring, f"at priority {number}", options))
    for name, number in WRONG_PRIORITIES.items():
        options = (PREFERENCE, None, number)
        yield Test(f"qos/priority/{name}", partial(refused, f"priority {number}", options))


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
    check(found.status in MISSED, f"{what} gets {found.status.name}, not MISSED_DEADLINE_*")
    check_bare(found)


def deadline_far(target: Target) -> None:
    """A deadline in an hour is met."""
    with prepared(sample("add"), target) as model, model.burst() as burst:
        run = partial(burst.execute, timeout=target.patience, deadline=time.monotonic() + _LONG)
        status = answer(run, valid("add")).status
        check(not status, f"a request whose deadline is in an hour gets {status.name}")


def preferring(what: str, options: tuple[Any, ...], target: Target) -> None:
    """A preference or a priority does not change the result, on the plain path and in a burst."""
    case = sample("add")
    with prepared(case, target) as model:
        expected = [output.tobytes() for output in model.run(*case.feeds, timeout=target.patience)]
    with target.prepared(case.model, None, *options) as model, model.burst() as burst:
        for outputs in (
            model.run(*case.feeds, timeout=target.patience),
            burst.run(*case.feeds, timeout=target.patience).outputs,
        ):
            check([output.tobytes() for output in outputs] == expected, f"{what}, the result differs")


def refused(what: str, options: tuple[Any, ...], target: Target) -> None:
    """An unknown preference or priority gets INVALID_ARGUMENT, and no prepared model."""
    try:
        with target.prepared(sample("add").model, None, *options):
            pass
    except InvalidArgument:
        return
    raise Failed(f"the device prepares a model with the invalid {what}")


def endless_loop(target: Target) -> None:
    """The loop timeout ends an endless WHILE; the device can be used afterwards."""
    case = endless()
    with prepared(case, target) as model, model.burst() as burst:
        ways = partial(model.execute, loop_timeout=_LOOP_TIMEOUT), partial(burst.execute, loop_timeout=_LOOP_TIMEOUT)
        for way in ways:
            found = target.bench.execute(model, case, [4], target.patience, run=partial(way, timeout=target.patience))
            _check_missed(found, "an endless loop")
    with prepared(sample("add"), target) as model:
        status = model.execute(valid("add"), timeout=target.patience).status
        check(not status, f"after an endless loop, a request gets {status.name}")


def endless() -> Case:
    """Return the model WHILE x == x: x grows."""

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


# ---- deadlines and priorities as in Android's suite, sent directly, so that the device itself must judge them:
# the usual client does not send a request whose deadline has passed.


def preparation(name: str, target: Target) -> None:
    """A preparation either finishes or misses its deadline; only in the first case there is a prepared model."""
    if not all(target.supported(sample("add").model)):
        skip("ADD: not supported by the device")
    try:
        with target.prepared(sample("add").model, None, PREFERENCE, DEADLINES[name]()) as model:
            _check_answer(model, target)
    except StatusError as error:
        _check_status(error.status, name)


def execution(way: str, name: str, target: Target) -> None:
    """An execution either finishes or misses its deadline; the next one is not affected."""
    ask = _plain if way == "plain" else _burst
    with prepared(sample("add"), target) as model:
        for _ in range(2):
            _check_status(ask(model, valid("add"), DEADLINES[name](), target.patience), name)
        _check_answer(model, target)


def long_preparation(target: Target) -> None:
    """The device gives a preparation up that cannot be done by its deadline, instead of finishing it first."""
    model = _chain(_MANY)
    if not all(target.supported(model)):
        skip("ADD: not supported by the device")
    end, status = clock.now() + _NEAR, ErrorStatus.NONE
    try:
        with target.prepared(model, None, PREFERENCE, end):
            pass
    except StatusError as error:
        status = error.status
    late = (clock.now() - end) / 1e9
    check(status in {ErrorStatus.NONE, *MISSED}, f"with a deadline that is too near, preparing gets {status.name}")
    check(late < _GRACE, f"preparing {_MANY} operations ends {late:.1f} s after its deadline, with {status.name}")


def _chain(length: int) -> Model:
    builder = ModelBuilder()
    x: Any = builder.input("float32", (2, 2))
    for n in range(length):
        x = builder.operation("ADD", x, np.full((2, 2), n, np.float32), 0)
    builder.output(x)
    return builder.build()


def in_the_middle(way: str, target: Target) -> None:
    """A deadline that passes while an execution runs is missed; the driver says so, too, and not that it has failed."""
    case, ask = endless(), _plain if way == "plain" else _burst
    pool = Memory.create(2 * _ROOM)
    places = [ArgumentPlace(pool, n * _ROOM) for n in range(2)]
    asked = with_loop_timeout(request(case, places, [4]), _LOOP)
    with prepared(case, target) as model:
        begin = time.monotonic()
        try:
            status = ask(model, asked, clock.now() + int(_LOOP / 4 * 1e9), target.patience)
        except NotSent as error:  # a burst of wire version 1
            skip(str(error))
        took = time.monotonic() - begin
        check(status in MISSED, f"an execution whose deadline passes while it runs gets {status.name}")
        check(took < _LOOP + _GRACE, f"it ends {took:.1f} s after it began, {_LOOP:g} s being its loop timeout")
    with prepared(sample("add"), target) as model:
        _check_answer(model, target)


def _check_status(status: ErrorStatus, name: str) -> None:
    allowed = {ErrorStatus.NONE} | (set() if name == "unlimited" else MISSED)
    check(status in allowed, f"with the deadline {name!r}, the status is {status.name}")


def _check_answer(model: RemotePreparedModel, target: Target) -> None:
    status = model.execute(valid("add"), timeout=target.patience).status
    check(not status, f"afterwards a request without a deadline gets {status.name}")


def _plain(model: RemotePreparedModel, request: Request, deadline: int, patience: float) -> ErrorStatus:
    with plain_path(model, request) as execute:
        return execute(deadline, patience).status


@contextmanager
def plain_path(model: RemotePreparedModel, request: Request) -> Iterator[Callable[[int | None, float], Result]]:
    """Open a connection for one request; returns a function of deadline and patience.

    The function returns the device's own answer, however late; a caller of `execute` stops waiting at the deadline.
    Raise PeerDied, Timeout.
    """
    with RawLane(model, request) as lane:
        yield lane.in_turn


def _burst(model: RemotePreparedModel, request: Request, deadline: int, patience: float) -> ErrorStatus:
    with Controller(model.configure_burst(0.0), spin=0.0) as controller:
        controller.start(controller.packet(request), deadline)
        return ErrorStatus(controller.receive(patience).status)
