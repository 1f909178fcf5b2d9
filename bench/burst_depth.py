"""Does depth keep producer and device busy at the same time?

    python bench/burst_depth.py [--depth 4] [--json FILE] [--plot FILE]

The device takes 1 ms for a frame, asleep (burst_test_devices.odd:Slow), and the client 1 ms to produce the next one. At
depth 1 the client runs each frame before it produces the next (`run`); at depth 4 it submits frames and takes the
results in order, four in flight at most (`submit`). The producer sleeps, as one does that waits for a camera; or it
computes, in Python on the client's CPU, as one does that decodes. Every result is checked to be its frame's. Client on
CPU 0, device on CPU 1.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from burst_roundtrip import add_model
from measure import Runs, conditions, percentiles, pin_client
from own_device import own_device, pin
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import driver
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from concurrent.futures import Future

    from measure import Block
    from numpy.typing import NDArray

    from burst import Result
    from driver import Burst, RemotePreparedModel
    from driver.cli.timing import Estimate

QUESTION = "Does depth keep producer and device busy at the same time?"
SECONDS = 1e-3  # of the producer, and of the device
HEAD = ("", "frames per s", "x depth 1", "from frame to result: p50 us", "p99 us")
TIMEOUT = 10.0
Arrays = tuple["NDArray[np.float32]", "NDArray[np.float32]"]


def sleep() -> None:
    """A producer that waits."""
    time.sleep(SECONDS)


def compute() -> None:
    """A producer that works."""
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        sum(range(100))


PRODUCERS: dict[str, Callable[[], None]] = {"sleeping producer": sleep, "computing producer": compute}


def frame_of(number: int, arrays: Arrays) -> Arrays:
    """What the device adds: its seconds, and the number of the frame."""
    arrays[1][...] = number
    return arrays


def check(result: Result, number: int) -> None:
    """Fail unless the result is this frame's, and not another's that came out of turn."""
    found = float(result.outputs[0][0, -1])
    if found != number:
        raise SystemExit(f"bench: frame {number} was answered with {found}")


def one_by_one(burst: Burst, produce: Callable[[], None], frames: int, arrays: Arrays) -> list[int]:
    """Produce, run, produce, run. Nanoseconds from each frame to its result."""
    times = []
    for number in range(frames):
        produce()
        begin = time.perf_counter_ns()
        check(burst.run(*frame_of(number, arrays)), number)
        times.append(time.perf_counter_ns() - begin)
    return times


def pipelined(burst: Burst, depth: int, produce: Callable[[], None], frames: int, arrays: Arrays) -> list[int]:
    """Produces while `depth` are in flight, and takes the oldest result before it submits one more."""
    flying: deque[tuple[int, int, Future[Result]]] = deque()
    times = []

    def land() -> None:
        number, begin, future = flying.popleft()
        check(future.result(TIMEOUT), number)
        times.append(time.perf_counter_ns() - begin)

    for number in range(frames):
        produce()
        if len(flying) == depth:
            land()
        begin = time.perf_counter_ns()
        flying.append((number, begin, burst.submit(*frame_of(number, arrays))))
    while flying:
        land()
    return times


def block(burst: Burst, depth: int, produce: Callable[[], None], frames: int) -> Block:
    """So many frames, the pipeline empty before and after."""
    arrays = np.array([[SECONDS, 0, 0, 0]], np.float32), np.zeros((1, 4), np.float32)
    begin = time.perf_counter()
    if depth == 1:
        times = one_by_one(burst, produce, frames, arrays)
    else:
        times = pipelined(burst, depth, produce, frames, arrays)
    return {**percentiles(np.array(times, float)), "frames_per_s": frames / (time.perf_counter() - begin)}


def name_of(producer: str, depth: int) -> str:
    """A row."""
    return f"{producer}, depth {depth}"


def run(args: argparse.Namespace) -> Runs:
    """All rounds: depth 1 and the other beside each other, the next round backwards."""
    runs = Runs()
    with ExitStack() as stack:
        device = stack.enter_context(own_device("burst_test_devices.odd:Slow"))
        prepared: RemotePreparedModel = stack.enter_context(device.prepare(add_model()))
        for number in range(args.pairs):
            for producer, produce in PRODUCERS.items():
                for depth in (1, args.depth)[:: -1 if number % 2 else 1]:
                    name = name_of(producer, depth)
                    progress(f"round {number + 1} of {args.pairs}", name)
                    with prepared.burst(depth=depth) as burst:
                        pin(device)
                        block(burst, depth, produce, 5)
                        runs.blocks.setdefault(name, []).append(block(burst, depth, produce, args.frames))
    progress("")
    return runs


def gain(runs: Runs, producer: str, depth: int) -> Estimate:
    """Frame rate to that of depth 1 in the same round."""
    rates = (runs.values(name_of(producer, d), "frames_per_s") for d in (depth, 1))
    return estimate(next(rates) / next(rates))


def row(runs: Runs, producer: str, depth: int) -> dict[str, Any]:
    """Medians over the blocks of one kind."""
    name = name_of(producer, depth)
    keys = ("frames_per_s", "p50_us", "p99_us")
    return {
        "name": name,
        "ours": depth > 1,
        **{key: float(np.median(runs.values(name, key))) for key in keys},
        "gain": gain(runs, producer, depth)._asdict(),
        "rounds": runs.blocks[name],
    }


def line_of(runs: Runs, producer: str, depth: int) -> tuple[str, ...]:
    """One line of the table."""
    found = row(runs, producer, depth)
    against = "" if depth == 1 else spell(gain(runs, producer, depth))
    return found["name"], f"{found['frames_per_s']:.1f}", against, f"{found['p50_us']:.0f}", f"{found['p99_us']:.0f}"


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--depth", type=int, default=4, help="requests in flight (default 4)")
    args = parse(parser)
    if "depth" not in inspect.signature(driver.RemotePreparedModel.burst).parameters:
        parser.error("this version's bursts have no depth")
    if args.depth < 2:
        parser.error("--depth: at least 2; depth 1 stands beside it")
    args.frames = 20 if args.quick else 400
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    pin_client()
    found = conditions()
    cells = [(producer, depth) for producer in PRODUCERS for depth in (1, args.depth)]
    runs = run(args)
    budgets = [
        Budget(f"{producer}: depth {args.depth} >= 1.9 x depth 1", gain(runs, producer, args.depth), 1.9, at_least=True)
        for producer in PRODUCERS
    ]
    body = {"subjects": [row(runs, *cell) for cell in cells], "depth": args.depth}
    publish(args, Report(QUESTION, found, [line_of(runs, *cell) for cell in cells], budgets, body, HEAD))
    if args.plot:
        import plots

        rates = {row["name"]: row["frames_per_s"] for row in body["subjects"]}
        plots.bars(args.plot, rates, "frames per second", QUESTION)


if __name__ == "__main__":
    main()
