"""Do clients that wait for a saturated burst only so long get as much of it as clients that it turns away at once?

    python bench/goodput.py [--pairs 9] [--seconds 2] [--clients 32] [--patience 0.05] [--json FILE]

Tasks of one event loop ask one burst again and again, each for an answer within `--patience`, and together for more
than the device can do. An answer is good when it comes in that time. The clients tell the burst by `submit(deadline=)`
with policy "reject", and come again after 5 ms when they are turned away; by `run_async(timeout=)`; or not at
all, and give up by `asyncio.timeout`. `free` is one client that waits as long as it takes: what the device can do.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from measure import conditions
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import driver
from burst import Busy
from driver.cli.timing import estimate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Ask = Callable[[float], Awaitable[object]]

QUESTION = "Do clients that wait for a saturated burst only so long get as much as those that it turns away at once?"
HEAD = ("", "good a second", "missed a second", "to submit")
ELEMENTS, LAYERS = 200_000, 100
REST = 5e-3  # seconds until a client comes again that was turned away
WAYS = ("submit", "run_async", "asyncio.timeout")


def model() -> driver.Model:
    """Some milliseconds of additions, with a checkpoint after each."""
    m = driver.ModelBuilder()
    found = m.input("float32", (ELEMENTS,))
    for _ in range(LAYERS):
        found = m.operation("ADD", found, np.ones(1, np.float32), 0)
    m.output(found)
    return m.build()


def asking(way: str, burst: driver.Burst, patience: float) -> Ask:
    """One request in that way, which has to be answered `patience` seconds from its beginning."""

    async def submit(begin: float) -> None:
        try:
            future = burst.submit(deadline=begin + patience)
        except Busy as error:
            await asyncio.sleep(REST)
            raise TimeoutError from error
        await future

    async def told(_: float) -> None:
        await burst.run_async(timeout=patience)

    async def untold(_: float) -> None:
        async with asyncio.timeout(patience):
            await burst.run_async()

    return dict(zip(WAYS, (submit, told, untold), strict=True))[way]


async def good_answers(ask: Ask, clients: int, seconds: float) -> tuple[int, int]:
    """How many came, and how many did not."""
    found = [0, 0]
    end = time.monotonic() + seconds

    async def client() -> None:
        while (begin := time.monotonic()) < end:
            try:
                await ask(begin)
                found[0] += 1
            except TimeoutError:
                found[1] += 1
            await asyncio.sleep(0)

    await asyncio.gather(*(client() for _ in range(clients)))
    return found[0], found[1]


def alone(burst: driver.Burst, seconds: float) -> float:
    """Answers a second to one client that waits."""
    begin, n = time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        burst.run()
        n += 1
    return n / (time.monotonic() - begin)


def rows(good: dict[str, list[float]], missed: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """A line for each way; `free` is what the device can do."""
    lines = [("one that waits", f"{np.median(good['free']):.0f}", "", "")]
    for way in WAYS:
        ratio = spell(estimate(np.divide(good[way], good["submit"])))
        lines.append((way, f"{np.median(good[way]):.0f}", f"{np.median(missed[way]):.0f}", ratio))
    return lines


def budgets(good: dict[str, list[float]]) -> list[Budget]:
    """Waiting must not cost a client its answers."""
    against = {way: estimate(np.divide(good[way], good["submit"])) for way in WAYS[1:]}
    return [Budget(f"{way} >= 0.9 x submit", found, 0.9, at_least=True) for way, found in against.items()]


def main() -> None:
    """Measures, prints, writes."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--patience", type=float, default=0.05)
    args = parse(parser)
    seconds = 0.2 if args.quick else args.seconds
    found = conditions()
    good: dict[str, list[float]] = {way: [] for way in ("free", *WAYS)}
    missed: dict[str, list[float]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        prepared = stack.enter_context(stack.enter_context(driver.connect("reference")).prepare(model()))
        bursts = {
            way: stack.enter_context(prepared.burst(depth=2, policy="reject" if way == "submit" else "block"))
            for way in WAYS
        }
        single = stack.enter_context(prepared.burst())
        alone(single, 0.2)
        for n in range(args.pairs):
            progress(f"round {n + 1} of {args.pairs}")
            good["free"].append(alone(single, seconds))
            for way in WAYS if n % 2 else reversed(WAYS):
                ask = asking(way, bursts[way], args.patience)
                came, not_there = asyncio.run(good_answers(ask, args.clients, seconds))
                good[way].append(came / seconds)
                missed[way].append(not_there / seconds)
        progress("")
    publish(args, Report(QUESTION, found, rows(good, missed), budgets(good), {"good": good, "missed": missed}, HEAD))


if __name__ == "__main__":
    main()
