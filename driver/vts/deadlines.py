"""qos: deadlines and priorities as in Android's suite, sent directly, so that the device itself must judge them.

The usual client does not send a request whose deadline has passed.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from burst import Controller, ErrorStatus, InvalidArgument, Result, StatusError
from burst.channel import Channel, pack
from driver.options import PRIORITIES
from driver.protocol.plain_codec import decode_answer, encode_request, with_deadline
from driver.vts.kit import Failed, Test, check
from driver.vts.operations import prepared
from driver.vts.request import valid
from driver.vts.samples import sample
from fmq import clock
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from burst import Request
    from driver.client.prepared_model import RemotePreparedModel
    from driver.vts.target import Target

_PREFERENCE = "fast_single_answer"
_SHORT = 5_000_000  # ns
_MISSED = {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}
_DEADLINES: dict[str, Callable[[], int]] = {
    "now": clock.now,
    "short": lambda: clock.now() + _SHORT,
    "unlimited": lambda: FOREVER,
}
WRONG_PRIORITIES = {"low-1": -1, "high+1": len(PRIORITIES)}


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    for name in _DEADLINES:
        yield Test(f"qos/deadline/prepare/{name}", partial(preparation, name))
        for way in ("plain", "burst"):
            yield Test(f"qos/deadline/{way}/{name}", partial(execution, way, name))
    for priority in PRIORITIES:
        yield Test(f"qos/priority/{priority}", partial(preferred, PRIORITIES.index(priority)))
    for name, wrong in WRONG_PRIORITIES.items():
        yield Test(f"qos/priority/{name}", partial(refused, wrong))


def preparation(name: str, target: Target) -> None:
    """A preparation either finishes or misses its deadline; only in the first case there is a prepared model."""
    try:
        with target.prepared(sample("add").model, None, _PREFERENCE, _DEADLINES[name]()) as model:
            _check_answer(model, target)
    except StatusError as error:
        _check_status(error.status, name)


def execution(way: str, name: str, target: Target) -> None:
    """An execution either finishes or misses its deadline; the next one is not affected."""
    ask = _plain if way == "plain" else _burst
    with prepared(sample("add"), target) as model:
        for _ in range(2):
            _check_status(ask(model, valid("add"), _DEADLINES[name](), target.patience), name)
        _check_answer(model, target)


def _check_status(status: ErrorStatus, name: str) -> None:
    allowed = {ErrorStatus.NONE} | (set() if name == "unlimited" else _MISSED)
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

    The function returns the device's own answer, however late; `PlainClient` would stop waiting at the deadline. Raises
    PeerDied, Timeout.
    """
    _, (fd, life_fd) = model.device.call("channel")
    with Channel.from_fd(fd) as channel:
        channel.watch(life_fd)
        for slot, pool in enumerate(request.pools):
            channel.send(["memory", slot, pool.to_wire()], [pool.fd])
        slots = list(range(len(request.pools)))
        raw = pack(["execute", *encode_request(model.home.number, request, slots, measure=False)])

        def execute(deadline: int | None, patience: float) -> Result:
            channel.send_raw(raw if deadline is None else with_deadline(raw, deadline))
            return Result(*decode_answer(channel.receive(patience).raw))

        yield execute


def _burst(model: RemotePreparedModel, request: Request, deadline: int, patience: float) -> ErrorStatus:
    with Controller(model.configure_burst(0.0), spin=0.0) as controller:
        controller.start(controller.packet(request), deadline)
        return ErrorStatus(controller.receive(patience).status)


def preferred(priority: int, target: Target) -> None:
    """A model of any priority gives the same result."""
    case = sample("add")
    with prepared(case, target) as model:
        expected = [output.tobytes() for output in model.run(*case.feeds, timeout=target.patience)]
    with target.prepared(case.model, None, _PREFERENCE, None, priority) as model, model.burst() as burst:
        for outputs in (
            model.run(*case.feeds, timeout=target.patience),
            burst.run(*case.feeds, timeout=target.patience).outputs,
        ):
            check([output.tobytes() for output in outputs] == expected, f"at priority {priority}, the result differs")


def refused(priority: int, target: Target) -> None:
    """An unknown priority gets INVALID_ARGUMENT, and no prepared model."""
    try:
        with target.prepared(sample("add").model, None, _PREFERENCE, None, priority):
            pass
    except InvalidArgument:
        return
    raise Failed(f"the device prepares a model with the invalid priority {priority}")
