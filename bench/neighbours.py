"""What does an honest client feel of a hostile account on the device that it is served with?

    python bench/neighbours.py [--only ATTACK ...] [--pairs 3] [--json FILE]

A device is served to a group (`burst serve reference --group`), under an account of its own. The honest client has
another account: ADD on four floats through a burst, back to back, and models of 200 operations that it prepares. In
each round, for each attack of tests/hostile: honest neighbours of a third account run and prepare as fast as they can;
then the attack goes on instead. As an attack may use all processors, there are as many busy neighbours as processors.
Only root can start processes of other accounts.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import Budget, Report, Runs, arguments, conditions, parse, progress, publish, ratio

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "driver"), str(TESTS / "hostile")]

import accounts  # noqa: E402 (its folder was just added)
from attacks import ATTACKS  # noqa: E402
from neighbourhood import HOSTILE, neighbourhood  # noqa: E402
from trial import Outcome, wait_for_work  # noqa: E402

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from neighbourhood import Neighbourhood, Talker

    from driver.cli.timing import Estimate

QUESTION = (
    "What does an honest client feel of a hostile account, beside honest neighbours that use the processors as much?"
)
ALONE, HONEST = "alone", "beside honest neighbours"
P99, PREPARE = 2.0, 3.0
_PATIENCE = 45.0  # seconds after which the client counts as stuck
HEAD = ("", "p50 us", "p99 us", "prepare ms", "p99 to honest", "prepare to honest", "same processes")


@contextmanager
def honest_neighbours(hood: Neighbourhood, seconds: float) -> Iterator[None]:
    """As many as there are processors, busy for at least so long."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            neighbour = stack.enter_context(hood.tenant(HOSTILE))
            neighbour.tell("busy", seconds)
        yield


@contextmanager
def attack(hood: Neighbourhood, name: str) -> Iterator[None]:
    """The attack, from when it is at work."""
    with hood.attacker(name) as attacker:
        wait_for_work(attacker, Outcome(name))
        yield


def block(client: Talker, args: argparse.Namespace) -> dict[str, Any]:
    """The client's figures of a moment. Raises OSError when it was harmed."""
    bursts = client.ask("bursts", args.seconds, patience=_PATIENCE)
    prepares = client.ask("prepares", args.prepares, patience=_PATIENCE)
    if "error" in bursts or "error" in prepares:
        raise OSError(str(bursts if "error" in bursts else prepares))
    figures = {f"{key}_us": bursts[key] * 1e6 for key in ("p50", "p99", "max")}
    return {**figures, "runs": bursts["runs"], "prepare_ms": float(np.median(prepares)) * 1e3}


class Served:
    """A served device and its client; others in their place when an attack has harmed them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._found = stack, None

    def both(self) -> tuple[Neighbourhood, Talker]:
        """Whole ones."""
        if self._found is None:
            hood = self._stack.enter_context(neighbourhood())
            self._found = hood, self._stack.enter_context(hood.tenant())
        return self._found

    def drop(self) -> None:
        """They are harmed."""
        self._stack.close()
        self._found = None


def run(args: argparse.Namespace) -> tuple[Runs, set[str]]:
    """All rounds; and the attacks after which other processes served the client."""
    runs, moved = Runs(), set[str]()
    with ExitStack() as stack:
        served = Served(stack)
        for number in range(args.pairs):
            _, client = served.both()
            block(client, args)
            runs.add(ALONE, block(client, args))
            for name in args.only[:: -1 if number % 2 else 1]:
                progress(f"round {number + 1} of {args.pairs}", name)
                if name not in runs.errors and not measured(served, name, args, runs):
                    moved.add(name)
    progress("")
    return runs, moved


def measured(served: Served, name: str, args: argparse.Namespace, runs: Runs) -> bool:
    """Both blocks of an attack. Whether the same processes serve the client after it."""
    hood, client = served.both()
    before = client.ask("identity")
    try:
        with honest_neighbours(hood, 20 * args.seconds):
            beside = block(client, args)
        with attack(hood, name):
            attacked = block(client, args)
        after = client.ask("identity")
    except (AssertionError, OSError, ValueError) as error:
        runs.drop(name, str(error)[:80])
        served.drop()
        return False
    runs.add(honest(name), beside)
    runs.add(name, attacked)
    return all(before[key] == after.get(key) for key in ("service", "engine"))


def honest(name: str) -> str:
    """The block beside honest neighbours that belongs to an attack."""
    return f"{HONEST} ({name})"


def ratios(runs: Runs, name: str) -> tuple[Estimate, Estimate]:
    """p99, and the time to prepare, to those of the same round beside honest neighbours."""
    return ratio(runs, name, honest(name), "p99_us"), ratio(runs, name, honest(name), "prepare_ms")


def row(runs: Runs, name: str, moved: set[str]) -> dict[str, Any]:
    """Medians over the blocks of an attack."""
    if name in runs.errors:
        return {"name": name, "ours": True, "error": runs.errors[name]}
    found = runs.medians(name, "p50_us", "p99_us", "max_us", "prepare_ms")
    to = (
        {}
        if name == ALONE
        else dict(zip(("p99_to", "prepare_to"), (e._asdict() for e in ratios(runs, name)), strict=True))
    )
    return {"name": name, "ours": name != ALONE, **found, **to, "moved": name in moved, "rounds": runs.blocks[name]}


def line_of(runs: Runs, name: str, moved: set[str]) -> tuple[str, ...]:
    """One line of the table."""
    if name in runs.errors:
        return name, "-", "-", "-", "-", "-", runs.errors[name]
    figures = [f"{np.median(runs.values(name, key)):.1f}" for key in ("p50_us", "p99_us", "prepare_ms")]
    if name == ALONE:
        return name, *figures, "", "", ""
    return name, *figures, *(f"{found.median:.2f}" for found in ratios(runs, name)), "no" if name in moved else "yes"


def budgets(runs: Runs, names: list[str]) -> list[Budget]:
    """For the worst attack of each kind."""
    there = [name for name in names if name in runs.blocks]
    found = {name: ratios(runs, name) for name in there}
    p99, prepare = (max((e[i] for e in found.values()), key=lambda e: e.median, default=None) for i in (0, 1))
    return [
        Budget("p99 during the worst attack <= 2 x that beside honest neighbours", p99, P99),
        Budget("prepare during the worst attack <= 3 x that beside honest neighbours", prepare, PREPARE),
    ]


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, pairs=3)
    parser.add_argument("--only", nargs="+", choices=sorted(ATTACKS), metavar="ATTACK", help=", ".join(sorted(ATTACKS)))
    args = parse(parser)
    if why := accounts.missing():
        parser.error(why)
    args.only = args.only or list(ATTACKS)
    args.seconds, args.prepares = (0.2, 1) if args.quick else (1.0, 3)
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    found = conditions()
    runs, moved = run(args)
    names = [ALONE, *args.only]
    rows = [row(runs, name, moved) for name in names]
    lines = [line_of(runs, name, moved) for name in names]
    publish(args, Report(QUESTION, found, lines, budgets(runs, args.only), {"subjects": rows}, HEAD))


if __name__ == "__main__":
    main()
