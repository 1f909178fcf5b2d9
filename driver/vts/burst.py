"""burst: a burst gives the same results as the plain path, in order, and survives any packet."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from burst import Controller, ErrorStatus, Memory
from burst.controller import Packet
from burst.datum import DATUM
from driver.options import PREFERENCES
from driver.vts.bench import JUNK, ArgumentPlace, answer, output_sizes, request
from driver.vts.kit import Failed, Test, check, skip
from driver.vts.operations import check_short, prepared
from driver.vts.request import valid
from driver.vts.samples import SAMPLES, sample
from fmq import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from burst import Request
    from burst.wire import ResultPacket
    from driver.client.prepared_model import RemotePreparedModel
    from driver.client.surface import AnyBurst
    from driver.options import Preference
    from driver.vts.bench import Array
    from driver.vts.cases import Case
    from driver.vts.target import Target

_RUNS, _BURSTS, _DEPTH = 8, 4, 4
_POOL, _UNUSED = 1 << 14, 96  # bytes; pools: more than one message carries
_LATE, _LONG = 10**9, 10**13  # ns
MISSED = {ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT}
_HINT = 1.0  # seconds that a burst may take to open
_JUNK = [
    bytes.fromhex(row).ljust(DATUM, b"\0")
    for row in (
        "00000000 0a000000 0a000000 0a000000 0a000000",  # packetInformation: 10, 10, 10, 10
        "01000000 00000000 00000000 00000000 00000000 0a000000",  # an input with 10 dimensions
        "02000000 00000000",  # an input's dimension 0
        "03000000 00000000 00000000 00000000 00000000 0a000000",  # an output with 10 dimensions
        "04000000 00000000",  # an output's dimension 0
        "05000000 ffffff7f",  # an unknown slot
        "06000000 01000000",  # measureTiming YES
        "ff000000 00000000",  # an unknown element
    )
]


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    for name in SAMPLES:
        yield Test(f"burst/equals_plain/{name}", partial(equal, name))
    yield from (
        Test("burst/malformed/removed", partial(malformed, _removed)),
        Test("burst/malformed/inserted", partial(malformed, _inserted)),
        Test("burst/malformed/replaced", partial(malformed, _replaced)),
        Test("burst/free_memory", free_memory),
        Test("burst/reuse", reuse),
        Test("burst/pools", pools),
        Test("burst/measure", measure),
        Test("burst/deadline", deadline),
        Test("burst/several_at_once", several),
        Test("burst/order", order),
        Test("burst/short_output", short_output),
        Test("burst/reopened", reopened),
    )
    for preference in PREFERENCES:
        yield Test(f"burst/hints/{preference}", partial(hints, preference))


def hints(preference: Preference, target: Target) -> None:
    """The driver hears of each burst, used or not: it survives that, and does not keep the client waiting."""
    case = sample("add")
    with prepared(case, target):
        pass
    with target.prepared(case.model, None, preference) as model:
        expected = plain(model, case, target)
        for is_used in (False, True, False):
            begin = time.monotonic()
            with model.burst() as burst:
                took = time.monotonic() - begin
                check(took < _HINT, f"opening a burst takes {took:.1f} s; a hint of a burst has to return at once")
                if is_used:
                    _same(expected, burst.run(*case.feeds, timeout=target.patience).outputs, f"with {preference}")
        _same(expected, model.run(*case.feeds, timeout=target.patience), f"after bursts with {preference}")


def plain(model: RemotePreparedModel, case: Case, target: Target) -> list[bytes]:
    """Return outputs of the plain path as bytes, for comparison only: they may be wrong."""
    found = target.bench.execute(model, case, output_sizes(case), target.patience)
    check(not found.status, f"on the plain path the device returns {found.status.name}: {found.message}")
    return [output.tobytes() for output in found.outputs]


def equal(name: str, target: Target) -> None:
    """Several inputs in turn: each result equals that of the plain path."""
    with prepared(sample(name), target) as model, model.burst() as burst:
        for seed in range(_RUNS):
            case = sample(name, seed)
            result = burst.run(*case.feeds, timeout=target.patience)
            _same(plain(model, case, target), result.outputs, f"execution {seed} of the burst")


def _same(expected: list[bytes], found: tuple[Array, ...], what: str) -> None:
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        check(a == b.tobytes(), f"{what}: output {number} differs from that of the plain path")


class _Wire(Controller):
    """A burst that can send any bytes. It speaks wire version 1, which has no framing around a packet."""

    def send_raw(self, raw: bytes, timeout: float) -> ResultPacket:
        return self.send(Packet(raw, True, self._caller), timeout)


def malformed(mutants: Callable[[list[bytes]], Iterator[list[bytes]]], target: Target) -> None:
    """Packets with a missing, extra or wrong element get an error, and the burst goes on."""
    with prepared(sample("add"), target) as model:
        asked = valid("add")
        with _Wire(model.configure_burst(0.0), versions=(1,)) as wire:
            packet = bytes(wire.encode(asked, measure=True))
            elements = [packet[n : n + DATUM] for n in range(0, len(packet), DATUM)]
            for mutant in mutants(elements):
                _check_refused(wire.send_raw(b"".join(mutant), target.patience), mutant)
            status = wire.send_raw(packet, target.patience).status
            check(not status, f"after malformed packets, a valid one gets {status.name}")


def _check_refused(result: ResultPacket, mutant: list[bytes]) -> None:
    kinds = [element[0] for element in mutant]
    check(result.status, f"a malformed packet, of elements {kinds}, was executed")
    check(not result.output_shapes, f"a malformed packet, of elements {kinds}, gets output shapes")
    check(result.timing == (None, None), f"a malformed packet, of elements {kinds}, gets a timing")


def _removed(elements: list[bytes]) -> Iterator[list[bytes]]:
    return (elements[:n] + elements[n + 1 :] for n in range(len(elements)))


def _inserted(elements: list[bytes]) -> Iterator[list[bytes]]:
    return ([*elements[:n], junk, *elements[n:]] for n in range(len(elements) + 1) for junk in _JUNK)


def _replaced(elements: list[bytes]) -> Iterator[list[bytes]]:
    return ([*elements[:n], junk, *elements[n + 1 :]] for n, e in enumerate(elements) for junk in _JUNK if junk != e)


def free_memory(target: Target) -> None:
    """Freeing unknown or already freed memory is no error; freed memory can be used again."""
    with prepared(sample("add"), target) as model, model.burst() as burst:
        asked, unknown = valid("add"), Memory.create(64)
        for pool in (unknown, asked.pools[0], None, asked.pools[0], asked.pools[0], unknown, None):
            if pool is not None:
                burst.free_memory(pool)
                continue
            status = burst.execute(asked, timeout=target.patience).status
            check(not status, f"after memory was freed, a valid request gets {status.name}")


def reuse(target: Target) -> None:
    """Memory that comes after freed memory is the memory that the client means, and not the freed one."""
    with prepared(sample("add"), target) as model, model.burst() as burst:
        for seed in range(_RUNS):
            case, pool = sample("add", seed), Memory.create(_POOL)
            asked = request(case, [ArgumentPlace(pool, n << 12) for n in range(3)], output_sizes(case))
            _check_executed(burst, asked, plain(model, case, target), f"after {seed} pools were freed", target=target)
            burst.free_memory(pool)


def pools(target: Target) -> None:
    """Each argument in a pool of its own, named in any order, among pools that the request does not use."""
    unused = [Memory.create(64) for _ in range(_UNUSED)]
    with prepared(sample("add"), target) as model, model.burst() as burst:
        places = [ArgumentPlace(Memory.create(_POOL), 0) for _ in range(3)]
        for seed in range(_RUNS):
            case = sample("add", seed)
            places = places[1:] + places[:1]
            asked = request(case, places, output_sizes(case))
            asked = asked._replace(pools=(*asked.pools, *unused[:: _RUNS - seed]))
            what = f"with the pools in another order, {len(asked.pools)} of them"
            _check_executed(burst, asked, plain(model, case, target), what, target=target)


def _check_executed(burst: AnyBurst, asked: Request, expected: list[bytes], what: str, target: Target) -> None:
    found = answer(partial(burst.execute, timeout=target.patience), asked)
    check(not found.status, f"{what}, a valid request gets {found.status.name}: {found.message}")
    _same(expected, found.outputs, what)


def measure(target: Target) -> None:
    """Requests that are measured, and others between them: only the results of those have times."""
    with prepared(sample("add"), target) as model, Controller(model.configure_burst(0.0), spin=0.0) as controller:
        asked = valid("add")
        for number in range(_RUNS):
            is_measured = number % 3 == 1
            controller.start(controller.packet(asked, measure=is_measured))
            found = controller.receive(target.patience, measure=True)  # as the result has it, whatever was asked for
            check(not found.status, f"execution {number}, measured or not, gets {found.status.name}")
            if not is_measured:
                check(found.timing == (None, None), f"no timing was requested, and {found.timing} came")
            known = [time for time in found.timing if time is not None]
            check(known == sorted(known), f"{known} us: the device has taken longer than the driver")


def deadline(target: Target) -> None:
    """A request whose deadline has passed is not executed, the ones before and after it are."""
    with prepared(sample("add"), target) as model, Controller(model.configure_burst(0.0), spin=0.0) as controller:
        if controller.version == 1:
            skip("its bursts speak wire version 1, which has no deadlines")
        asked = valid("add")
        place = asked.outputs[0]
        output = asked.pools[place.pool].asarray(np.uint8, place.length, place.offset)
        for ends in (None, clock.now() - _LATE, clock.now() + _LONG, clock.now() - _LATE, None):
            output[:] = JUNK
            controller.start(controller.packet(asked), ends)
            found = controller.receive(target.patience)
            if ends is None or ends > clock.now():
                check(not found.status, f"a request whose deadline is not near gets {found.status.name}")
                continue
            check(found.status in MISSED, f"a request whose deadline has passed gets {found.status.name}")
            check((output == JUNK).all(), "a request whose deadline has passed was executed")
            check(not found.output_shapes, "a request whose deadline has passed gets output shapes")


def several(target: Target) -> None:
    """Several bursts on one model, a thread each: none gets the result of another."""
    with prepared(sample("add"), target) as model, ThreadPoolExecutor(_BURSTS) as threads:
        cases = [sample("add", seed) for seed in range(_BURSTS)]
        expected = [plain(model, case, target) for case in cases]

        def work(number: int) -> None:
            with model.burst() as burst:
                for _ in range(_RUNS):
                    result = burst.run(*cases[number].feeds, timeout=target.patience)
                    _same(expected[number], result.outputs, f"burst {number} of {_BURSTS} at once")

        for future in [threads.submit(work, number) for number in range(_BURSTS)]:
            future.result()


def order(target: Target) -> None:
    """With several requests in flight, results come in the order of the requests."""
    with prepared(sample("add"), target) as model, model.burst(depth=_DEPTH) as burst:
        cases = [sample("add", seed) for seed in range(2 * _DEPTH)]
        expected = [plain(model, case, target) for case in cases]
        for start in range(0, len(cases), _DEPTH):
            futures = [burst.submit(*case.feeds) for case in cases[start : start + _DEPTH]]
            for number, future in enumerate(futures, start):
                _same(expected[number], future.result(target.patience).outputs, f"request {number}, {_DEPTH} in flight")


def short_output(target: Target) -> None:
    """An output that is a byte too small is reported, and the burst goes on."""
    case = sample("add")
    with prepared(case, target) as model, model.burst() as burst:
        pool = Memory.create(1 << 14)
        places = [ArgumentPlace(pool, n << 12) for n in range(len(case.feeds) + 1)]
        (size,) = output_sizes(case)
        run = partial(burst.execute, timeout=target.patience)
        short = answer(run, request(case, places, [size - 1]))
        if short.status == ErrorStatus.GENERAL_FAILURE:
            raise Failed(
                "an output that is a byte too small gets GENERAL_FAILURE, although its shape is known beforehand"
            )
        check_short(short)
        needed = math.prod(short.shapes[0].dimensions) * np.dtype(np.float32).itemsize
        check(needed == size, f"the device reports that output 0 needs {needed} bytes; it needs {size}")
        status = burst.execute(request(case, places, [size]), timeout=target.patience).status
        check(not status, f"after a short output, a valid request gets {status.name}")


def reopened(target: Target) -> None:
    """Bursts on one model are opened and closed in turn; closing one does not affect the next."""
    case = sample("add")
    with prepared(case, target) as model:
        expected = plain(model, case, target)
        for number in range(_BURSTS):
            with model.burst() as burst:
                _same(expected, burst.run(*case.feeds, timeout=target.patience).outputs, f"burst {number} in a row")
