"""What does an honest client feel of a hostile account on the device that it is served with?

    python bench/neighbours.py [--one-engine] [--only ATTACK ...] [--pairs 3] [--json FILE]

A device is served to a group (`burst serve reference --group`), under an account of its own: with an engine for each
account or, by --one-engine, with one that all share, as a GPU's device has it. The honest client has
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
from typing import TYPE_CHECKING

import numpy as np
from measure import Budget, Runs, progress
from question import Question, median

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "driver"), str(TESTS / "hostile")]

import accounts  # noqa: E402 (its folder was just added)
from attacks import ATTACKS  # noqa: E402
from neighbourhood import HOSTILE, neighbourhood  # noqa: E402
from trial import Outcome, wait_for_work  # noqa: E402

from driver.cli.timing import estimate  # noqa: E402

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from measure import Block
    from neighbourhood import Neighbourhood, Talker
    from question import Cell, Figure

    from driver.cli.timing import Estimate

DEVICES = "reference", "burst_test_devices.single:Accelerator"  #: an engine for each account, one for all
ALONE = "alone"
P99, PREPARE = 2.0, 3.0
_PATIENCE = 45.0  # seconds after which the client counts as stuck


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


def block(client: Talker, args: argparse.Namespace) -> Block:
    """The client's figures of a moment. Raises OSError when it was harmed."""
    bursts = client.ask("bursts", args.seconds, patience=_PATIENCE)
    prepares = client.ask("prepares", args.prepares, patience=_PATIENCE)
    if "error" in bursts or "error" in prepares:
        raise OSError(str(bursts if "error" in bursts else prepares))
    figures = {f"{key}_us": bursts[key] * 1e6 for key in ("p50", "p99", "max")}
    return {**figures, "runs": bursts["runs"], "prepare_ms": float(np.median(prepares)) * 1e3}


class Served:
    """A served device and its client; others in their place when an attack has harmed them."""

    def __init__(self, stack: ExitStack, device: str) -> None:
        self._stack, self._device, self._found = stack, device, None

    def both(self) -> tuple[Neighbourhood, Talker]:
        """Whole ones."""
        if self._found is None:
            hood = self._stack.enter_context(neighbourhood(self._device))
            self._found = hood, self._stack.enter_context(hood.tenant())
        return self._found

    def drop(self) -> None:
        """They are harmed."""
        self._stack.close()
        self._found = None


def run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    runs = Runs()
    with ExitStack() as stack:
        served = Served(stack, DEVICES[args.one_engine])
        for number in range(args.pairs):
            _, client = served.both()
            block(client, args)
            runs.add(ALONE, block(client, args))
            for name in args.only[:: -1 if number % 2 else 1]:
                progress(f"round {number + 1} of {args.pairs}", name)
                if name not in runs.errors:
                    try:
                        runs.add(name, attacked(served, name, args))
                    except (AssertionError, OSError, ValueError) as error:
                        runs.drop(name, str(error)[:80])
                        served.drop()
    progress("")
    return runs


def attacked(served: Served, name: str, args: argparse.Namespace) -> Block:
    """The client's figures during an attack, and those beside honest neighbours just before; and whether other
    processes serve the client after it.
    """
    hood, client = served.both()
    before = client.ask("identity")
    with honest_neighbours(hood, 20 * args.seconds):
        beside = block(client, args)
    with attack(hood, name):
        found = block(client, args)
    after = client.ask("identity")
    is_moved = any(before[key] != after.get(key) for key in ("service", "engine"))
    return {**found, "moved": is_moved, "honest_p99_us": beside["p99_us"], "honest_prepare_ms": beside["prepare_ms"]}


def to_honest(key: str) -> Figure:
    """The ratio of an attack's figure to that beside honest neighbours in the same round."""

    def found(runs: Runs, name: str) -> Estimate | None:
        return None if name == ALONE else estimate(runs.values(name, key) / runs.values(name, f"honest_{key}"))

    return found


P99_TO, PREPARE_TO = to_honest("p99_us"), to_honest("prepare_ms")


def of_attacks(cell: Cell) -> Cell:
    """A column of all rows but the first."""
    return lambda runs, name: "" if name == ALONE else cell(runs, name)


def middle(figure: Figure) -> Cell:
    """A column: the median of a ratio."""
    return of_attacks(lambda runs, name: f"{figure(runs, name).median:.2f}")  # type: ignore[union-attr]


def is_moved(runs: Runs, name: str) -> bool:
    """Whether other processes served the client after the attack, in any round."""
    return bool(runs.values(name, "moved").any())


def is_held(runs: Runs, name: str) -> bool:
    """Whether the client kept its processes and its times."""
    p99, prepare = P99_TO(runs, name), PREPARE_TO(runs, name)
    return bool(p99 and prepare and p99.median <= P99 and prepare.median <= PREPARE) and not is_moved(runs, name)


def budgets(runs: Runs, _: argparse.Namespace) -> list[Budget]:
    """For the worst attack of each kind."""

    def worst(figure: Figure) -> Estimate | None:
        found = (figure(runs, name) for name in runs.blocks)
        return max((one for one in found if one), key=lambda one: one.median, default=None)

    return [
        Budget("p99 during the worst attack <= 2 x that beside honest neighbours", worst(P99_TO), P99),
        Budget("prepare during the worst attack <= 3 x that beside honest neighbours", worst(PREPARE_TO), PREPARE),
    ]


def settle(args: argparse.Namespace) -> None:
    """Which attacks, and how long."""
    if why := accounts.missing():
        raise ValueError(why)
    args.only = args.only or list(ATTACKS)
    args.seconds, args.prepares = (0.2, 1) if args.quick else (1.0, 3)


NEIGHBOURS = Question(
    __doc__,
    run,
    {
        "p50 us": median("p50_us", ".1f"),
        "p99 us": median("p99_us", ".1f"),
        "prepare ms": median("prepare_ms", ".1f"),
        "p99 to honest": middle(P99_TO),
        "prepare to honest": middle(PREPARE_TO),
        "same processes": of_attacks(lambda runs, name: "no" if is_moved(runs, name) else "yes"),
        "held": of_attacks(lambda runs, name: "yes" if is_held(runs, name) else "no"),
    },
    options={
        "--only": {
            "nargs": "+",
            "choices": sorted(ATTACKS),
            "metavar": "ATTACK",
            "help": ", ".join(sorted(ATTACKS)),
        },
        "--one-engine": {"action": "store_true", "help": "all accounts share one engine"},
    },
    settle=settle,
    budgets=budgets,
    figures=("p50_us", "p99_us", "max_us", "prepare_ms"),
    estimates={"p99_to": P99_TO, "prepare_to": PREPARE_TO},
    pairs=3,
    is_pinned=False,
)

if __name__ == "__main__":
    NEIGHBOURS.answer()
