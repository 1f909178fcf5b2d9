"""request: a device refuses every request that does not match its model, on the plain path and in a burst."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from burst import ErrorStatus, Malformed, Memory
from driver.vts import bench
from driver.vts.bench import ArgumentPlace, output_sizes, request
from driver.vts.kit import Test, check, skip
from driver.vts.mutations import request_mutations
from driver.vts.operations import check_bare, prepared
from driver.vts.samples import SAMPLES, sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from burst import Request
    from driver.client.prepared_model import RemotePreparedModel
    from driver.vts.bench import Execute
    from driver.vts.target import Target

_ROOM = 4096  # bytes for each argument


def tests(samples: int) -> Iterator[Test]:
    """samples: how many of the kit's models get mutated requests."""
    for name in SAMPLES[:samples]:
        yield Test(f"request/{name}/valid", partial(execute, name))
        for mutation, _ in request_mutations(valid(name)):
            yield Test(f"request/{name}/{mutation}", partial(refuse, name, mutation))


def valid(name: str) -> Request:
    """Return a request to one of the kit's models, with all arguments in one pool."""
    case = sample(name)
    count = len(case.feeds) + len(case.expected)
    pool = Memory.create(count * _ROOM)
    return request(case, [ArgumentPlace(pool, n * _ROOM) for n in range(count)], output_sizes(case))


def execute(name: str, target: Target) -> None:
    """The unmutated request succeeds on both paths."""
    with prepared(sample(name), target) as model:
        for way, run in _ways(model, target):
            found = bench.answer(run, valid(name))
            check(not found.status, f"{way}, a valid request gets {found.status.name}: {found.message}")


def refuse(name: str, mutation: str, target: Target) -> None:
    """An invalid request gets INVALID_ARGUMENT, and neither shapes nor a timing."""
    with prepared(sample(name), target) as model:
        for way, run in _ways(model, target):
            broken = dict(request_mutations(valid(name)))[mutation]
            try:
                found = bench.refusal(run, broken)
            except Malformed as error:
                skip(f"{way} cannot send this request: {error}")
            check(
                found.status == ErrorStatus.INVALID_ARGUMENT,
                f"{way}, an invalid request gets {found.status.name}, not INVALID_ARGUMENT",
            )
            check_bare(found)


def _ways(model: RemotePreparedModel, target: Target) -> Iterator[tuple[str, Execute]]:
    yield "on the plain path", partial(model.execute, measure=True, timeout=target.patience)
    with model.burst() as burst:
        yield "in a burst", partial(burst.execute, measure=True, timeout=target.patience)
