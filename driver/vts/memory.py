"""memory: arguments may lie in any pool, at any offset; a device writes to its outputs only."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from burst import ErrorStatus, Memory
from driver.vts import buffers, domains, kinds
from driver.vts.bench import JUNK, ArgumentPlace, answer, output_sizes, refusal, request
from driver.vts.burst import plain
from driver.vts.kit import Test, check
from driver.vts.operations import check_bare, prepared
from driver.vts.samples import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from burst import Request
    from driver.vts.bench import Execute
    from driver.vts.cases import Case
    from driver.vts.target import Target

    Layout = Callable[[int], list[ArgumentPlace]]

_ROOM = 4096  # bytes for each argument: a page
_SAMPLES = ("add", "quantised", "chain")


def _one_pool(offset: int, count: int) -> list[ArgumentPlace]:
    pool = Memory.create(count * _ROOM)
    return [ArgumentPlace(pool, n * _ROOM + offset) for n in range(count)]


def _pool_each(make: Callable[[int], Memory], count: int) -> list[ArgumentPlace]:
    return [ArgumentPlace(make(_ROOM), 64) for _ in range(count)]


def _last_bytes(count: int) -> list[ArgumentPlace]:
    """Arguments without gaps at the end of a pool: a write beyond an output damages the next argument."""
    return [ArgumentPlace(Memory.create(3 * _ROOM), 2 * _ROOM + 64 * n) for n in range(count)]


_LAYOUTS: dict[str, Layout] = {
    "one_pool": partial(_one_pool, 0),
    "one_pool_offset": partial(_one_pool, 64),
    "aligned_to_four": partial(_one_pool, 12),
    "pool_each": partial(_pool_each, Memory.create),
    "posix": partial(_pool_each, partial(Memory.create, kind="posix")),
    "mmap_fd": partial(_pool_each, kinds.part_of_memory),
    "hardware_buffer_blob": partial(_pool_each, kinds.blob),
    "large_pools": _last_bytes,
}


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    for layout in _LAYOUTS:
        for name in _SAMPLES:
            yield Test(f"memory/{layout}/{name}", partial(lay_out, layout, name))
    yield Test("memory/shared_input", shared_input)
    yield Test("memory/out_of_bounds", out_of_bounds)
    yield Test("memory/freed", freed)
    yield from domains.tests()
    yield from buffers.tests()
    yield from kinds.tests()


def lay_out(layout: str, name: str, target: Target) -> None:
    """The same result for any layout, on both paths; the bytes around the outputs stay unchanged."""
    case = sample(name)
    with prepared(case, target) as model, model.burst() as burst:
        expected = plain(model, case, target)
        places = _LAYOUTS[layout](len(case.feeds) + len(case.expected))
        for run in (model.execute, burst.execute):
            _check(case, expected, places, partial(run, timeout=target.patience))


def _check(case: Case, expected: list[bytes], places: Sequence[ArgumentPlace], run: Execute) -> None:
    pools = {place.pool: None for place in places}
    for pool in pools:
        pool.asarray()[:] = JUNK
    asked = request(case, places, output_sizes(case))
    before = {pool: pool.asarray().copy() for pool in pools}
    found = answer(run, asked)
    check(not found.status, f"the device returns {found.status.name}: {found.message}")
    for number, (output, wanted) in enumerate(zip(found.outputs, expected, strict=True)):
        check(output.tobytes() == wanted, f"output {number} differs from that of the first layout")
    for place, argument in zip(places[len(case.feeds) :], asked.outputs, strict=True):
        before[place.pool][argument.offset : argument.offset + argument.length] = JUNK
        place.pool.asarray(np.uint8, argument.length, argument.offset)[:] = JUNK
    for pool, bytes_ in before.items():
        wrong = np.flatnonzero(pool.asarray() != bytes_)
        check(not wrong.size, f"the device wrote to {wrong.size} bytes outside of its outputs, first {wrong[:1]}")


def shared_input(target: Target) -> None:
    """Two inputs may share their bytes."""
    case = sample("add")
    twice = replace(case, feeds=(case.feeds[0], case.feeds[0]))
    with prepared(case, target) as model:
        expected = plain(model, twice, target)
        pool = Memory.create(2 * _ROOM)
        places = [ArgumentPlace(pool, 0), ArgumentPlace(pool, 0), ArgumentPlace(pool, _ROOM)]
        _check(twice, expected, places, partial(model.execute, timeout=target.patience))


def out_of_bounds(target: Target) -> None:
    """An argument that reaches beyond its pool gets INVALID_ARGUMENT on both paths."""
    case = sample("add")
    with prepared(case, target) as model, model.burst() as burst:
        (size,) = output_sizes(case)
        pool = Memory.create(_ROOM)
        asked = request(case, [ArgumentPlace(pool, 0), ArgumentPlace(pool, 64), ArgumentPlace(pool, 128)], [size])
        for offset in (_ROOM - size + 1, _ROOM, 2**31, 2**32 - 1):
            for broken in _moved(asked, offset):
                for run in (model.execute, burst.execute):
                    _check_refused(partial(run, timeout=target.patience), broken, offset)


def _check_refused(run: Execute, broken: Request, offset: int) -> None:
    found = refusal(run, broken)
    check(
        found.status == ErrorStatus.INVALID_ARGUMENT,
        f"an argument at {offset} of a pool of {_ROOM} bytes gets {found.status.name}, not INVALID_ARGUMENT",
    )
    check_bare(found)


def _moved(asked: Request, offset: int) -> Iterator[Request]:
    one, *inputs = asked.inputs
    yield asked._replace(inputs=(one._replace(offset=offset), *inputs))
    yield asked._replace(outputs=(asked.outputs[0]._replace(offset=offset),))


def freed(target: Target) -> None:
    """On the plain path, freeing freed or unknown memory is no error, and the memory can be used again."""
    case = sample("add")
    with prepared(case, target) as model:
        expected, places = plain(model, case, target), _one_pool(0, len(case.feeds) + 1)
        run = partial(model.execute, timeout=target.patience)
        for _ in range(2):
            target.device.free_memory(places[0].pool)
            _check(case, expected, places, run)
            target.device.free_memory(Memory.create(_ROOM))
