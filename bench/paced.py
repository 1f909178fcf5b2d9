"""What does another process cost a stream: calls that come 10 to 120 times a second, and work for a while?

    python bench/paced.py [--rates 30 …] [--works 3000 …] [--peers all|none|zmq …] [--json FILE]

A camera's frames, not calls back to back: between two frames both processes sleep, processors go idle and caches cool.
Each subject runs in turns, frame by frame, with the same work in the client's own process. "Costs" is the difference of
the two medians: what the other process costs beyond the work. Processor time is that of both processes for one frame,
over that of the frames in process. Nothing is pinned, but for the two floors (peers/paced.c) that say so. The work is
spinning_device.py's: as many microseconds of arithmetic as the first input says.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from measure import HERE, NotMeasured, Runs, compile_c, conditions, figures_of, scratch
from own_device import own_device
from spinning_device import work_of
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import driver
from driver.cli.timing import estimate, order_of_round

sys.path.append(str(HERE / "peers"))
from frames import PEERS, in_turns

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    from measure import Block

    from driver.cli.timing import Estimate

QUESTION = "What does another process cost a stream?"
RATES, WORKS = (10, 30, 60, 120), (0, 300, 3000, 15000)
USUAL = 30, 3000  # the rate and the work of the budgets
ONE, TWO, ANY = "floor: one processor", "floor: two processors", "floor: any processor"
BURST, SLEEPING, PYTHON = "burst", 'burst, "low_power"', "burst, device in Python"
FLOORS = {ONE: (0, 0), TWO: (0, 1), ANY: (-1, -1)}
DEVICES = {BURST: "Spinning", SLEEPING: "Spinning", PYTHON: "SpinningInPython"}
HEAD = ("frames a second, work", "", "p50 us", "p99 us", "costs us", "x one processor", "p99 x own", "CPU x own")


class Pace(NamedTuple):
    """A stream: frames a second, and microseconds of work for each."""

    hz: float
    work: float

    @property
    def text(self) -> str:
        """For the table."""
        return f"{self.hz:g}/s, {self.work / 1e3:g} ms"


def in_microseconds(row: dict[str, float]) -> Block:
    """The figures of one block."""
    found = {f"{key.removesuffix('_ns')}_us": value / 1e3 for key, value in row.items()}
    return {**found, "max_us": found["p99_us"], "costs_us": found["p50_us"] - found["own_p50_us"]}


def floor(binary: Path, name: str, pace: Pace, frames: int) -> Block:
    """A block of peers/paced.c."""
    numbers = (*FLOORS[name], pace.hz, pace.work, frames)
    done = subprocess.run([binary, *map(str, numbers)], check=True, capture_output=True, timeout=120)
    return in_microseconds(json.loads(done.stdout))


def peer(name: str, pace: Pace, frames: int) -> Block:
    """A block of one of peers/frames.py. Raises NotMeasured."""
    command = [sys.executable, HERE / "peers" / "frames.py", name, *map(str, (pace.hz, pace.work, frames))]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=180)
    return in_microseconds(figures_of(json.loads(done.stdout)))


def model() -> driver.Model:
    """An ADD, which a spinning device does not add."""
    m = driver.ModelBuilder()
    x, y = m.input("float32", (1, 4)), m.input("float32", (1, 4))
    m.output(m.operation("ADD", x, y, 0))
    return m.build()


def ours(stack: ExitStack, name: str) -> Callable[[Pace, int], Block]:
    """What runs a block of a burst, on a device of its own."""
    device = stack.enter_context(own_device(f"spinning_device:{DEVICES[name]}"))
    prepared = stack.enter_context(
        device.prepare(model(), preference="low_power" if name == SLEEPING else "fast_single_answer")
    )
    burst = stack.enter_context(prepared.burst())
    processes = device.service_pid, device.engine_pid

    def block(pace: Pace, frames: int) -> Block:
        for array, value in zip(burst.inputs, (pace.work, 0), strict=True):
            array[:] = value
        own = work_of(pace.work)
        in_turns((burst.run, own), pace.hz, 3, processes)
        return in_microseconds(in_turns((burst.run, own), pace.hz, frames, processes))

    return block


def subjects(stack: ExitStack, args: argparse.Namespace) -> dict[str, Callable[[Pace, int], Block]]:
    """By name: what runs a block."""
    binary = compile_c(stack.enter_context(scratch()) / "paced", HERE / "peers" / "paced.c")
    floors: dict[str, Callable[[Pace, int], Block]] = {name: partial(floor, binary, name) for name in FLOORS}
    peers: dict[str, Callable[[Pace, int], Block]] = {name: partial(peer, name) for name in args.peers}
    return {**floors, **{name: ours(stack, name) for name in DEVICES}, **peers}


def measure(args: argparse.Namespace) -> dict[Pace, Runs]:
    """Every subject once a round and pace; the order turns."""
    found = {pace: Runs() for pace in args.paces}
    with ExitStack() as stack:
        blocks = subjects(stack, args)
        for number in range(args.pairs):
            for pace, runs in found.items():
                frames = max(2, round(args.seconds * pace.hz / 2))
                for name in order_of_round(list(blocks), number):
                    if name in runs.errors:
                        continue
                    progress(f"round {number + 1} of {args.pairs}", f"{pace.text}: {name}")
                    try:
                        runs.blocks.setdefault(name, []).append(blocks[name](pace, frames))
                    except NotMeasured as why:
                        runs.drop(name, str(why))
    progress("")
    return found


def paired(runs: Runs, name: str, key: str, other: str, other_key: str) -> Estimate | None:
    """The ratio of two figures of the same round."""
    if not runs.has(name, other):
        return None
    return estimate(runs.values(name, key) / runs.values(other, other_key))


def ratios(runs: Runs, name: str) -> dict[str, Estimate | None]:
    """What the table and the budgets say."""
    return {
        "costs_to_one": paired(runs, name, "costs_us", ONE, "costs_us"),
        "p99_to_own": paired(runs, name, "p99_us", name, "own_p99_us"),
        "cpu_to_own": paired(runs, name, "cpu_us", name, "own_cpu_us"),
    }


def row(pace: Pace, runs: Runs, name: str) -> dict[str, Any]:
    """For the JSON."""
    found = {"name": name, "pace": pace.text, "ours": name in DEVICES}
    if name in runs.errors:
        return {**found, "error": runs.errors[name]}
    against = {key: value and value._asdict() for key, value in ratios(runs, name).items()}
    return {**found, **against, "rounds": runs.blocks[name]}


def line(pace: Pace, runs: Runs, name: str) -> tuple[str, ...]:
    """One line of the table."""
    if name in runs.errors:
        return pace.text, name, "-", "-", runs.errors[name][:40], "", "", ""
    figures = [f"{np.median(runs.values(name, key)):.0f}" for key in ("p50_us", "p99_us")]
    costs = spell(estimate(runs.values(name, "costs_us")))
    return pace.text, name, *figures, costs, *(spell(found) for found in ratios(runs, name).values())


def budgets(runs: Runs, pace: Pace) -> list[Budget]:
    """Of a burst, in a stream as a camera's."""
    found = ratios(runs, BURST)
    return [
        Budget(f"{pace.text}: costs over the floor's on one processor", found["costs_to_one"], 1.5),
        Budget(f"{pace.text}: CPU time of both processes over that in process", found["cpu_to_own"], 1.03),
        Budget(f"{pace.text}: p99 over that in process", found["p99_to_own"], 1.5),
    ]


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, pairs=5)
    parser.add_argument("--rates", type=float, nargs="+", metavar="HZ", help=f"frames a second (default {RATES})")
    parser.add_argument("--works", type=float, nargs="+", metavar="US", help=f"microseconds of work (default {WORKS})")
    parser.add_argument("--peers", nargs="+", default=["all"], help=f"all, none, or some of {', '.join(PEERS)}")
    parser.add_argument("--seconds", type=float, default=4, help="for one block (default 4)")
    args = parse(parser)
    chosen = {"all": list(PEERS), "none": []}.get(args.peers[0], args.peers)
    if unknown := set(chosen) - set(PEERS):
        parser.error(f"--peers: no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    args.peers = chosen
    args.paces = [Pace(hz, work) for hz in args.rates or RATES for work in args.works or WORKS if work * hz < 0.95e6]
    if not (args.rates or args.works):  # a cross through the usual one: all of them would take an hour
        args.paces = [pace for pace in args.paces if USUAL[0] == pace.hz or USUAL[1] == pace.work]
    if args.quick:
        args.seconds, args.paces = 0.2, args.paces[:1] if args.rates else [Pace(120, 300), Pace(*USUAL)]
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    found = measure(args)
    names = [*FLOORS, *DEVICES, *args.peers]
    lines = [line(pace, runs, name) for pace, runs in found.items() for name in names]
    rows = [row(pace, runs, name) for pace, runs in found.items() for name in names]
    held = [budget for pace, runs in found.items() if pace == USUAL for budget in budgets(runs, pace)]
    publish(args, Report(QUESTION, conditions(), lines, held, {"subjects": rows}, HEAD))


if __name__ == "__main__":
    main()
