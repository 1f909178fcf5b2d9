"""All tests, by category."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from driver.vts import (
    burst,
    caching,
    device,
    extension,
    fenced,
    files,
    graphs,
    memory,
    model,
    operations,
    paths,
    qos,
    request,
    result_queue,
)
from driver.vts.samples import generated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from driver.vts.cases import Case
    from driver.vts.kit import Test

CATEGORIES = ("device", "extension", "model", "request", "operations", "burst", "memory", "caching", "qos")
_EVERYTHING = 10**9


@dataclass(frozen=True, slots=True)
class Scope:
    """How much to test: mutations of how many samples, how many cases of an operation, and how many of them in bursts.

    mixed, alone: random graphs of all operations together, and of each one alone. corruptions: of cache files.
    """

    samples: int
    cases: int
    in_bursts: int
    mixed: int
    alone: int
    corruptions: int


SMOKE = Scope(samples=1, cases=1, in_bursts=1, mixed=20, alone=0, corruptions=20)
USUAL = Scope(samples=3, cases=_EVERYTHING, in_bursts=2, mixed=200, alone=5, corruptions=300)
ALL = Scope(samples=_EVERYTHING, cases=_EVERYTHING, in_bursts=_EVERYTHING, mixed=3000, alone=100, corruptions=10_000)


def catalogue(cases: Iterable[Case] = (), scope: Scope = USUAL) -> Iterator[Test]:
    """Yield every test, with the given cases and the kit's own. Names are unique."""
    names: Counter[str] = Counter()
    chosen = list(_some(chain(cases, generated()), scope.cases))
    for test in chain(
        device.tests(),
        extension.tests(),
        files.tests(),
        model.tests(scope.samples),
        request.tests(scope.samples),
        operations.tests(chosen, scope.in_bursts),
        paths.tests(chosen),
        graphs.tests(scope.mixed, scope.alone),
        burst.tests(),
        result_queue.tests(),
        memory.tests(),
        caching.tests(scope.corruptions),
        qos.tests(),
        fenced.tests(scope.samples),
    ):
        names[test.name] += 1
        yield test if names[test.name] == 1 else type(test)(f"{test.name}#{names[test.name]}", test.run)


def _some(cases: Iterable[Case], most: int) -> Iterator[Case]:
    """Yield at most so many cases of each operation."""
    seen: Counter[str] = Counter()
    for case in cases:
        seen[case.operations[0]] += 1
        if seen[case.operations[0]] <= most:
            yield case
