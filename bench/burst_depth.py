"""Does depth keep producer and device busy at the same time?

    python bench/burst_depth.py [--depth 4] [--json FILE] [--plot FILE]
    python bench/burst_depth.py goodput [--pairs 9] [--seconds 2] [--clients 32] [--patience 0.05] [--json FILE]
    python bench/burst_depth.py rotation [--pairs 9] [--json FILE]

The device takes 1 ms for a frame, asleep (burst_test_devices.odd:Slow), and the client 1 ms to produce the next one. At
depth 1 the client runs each frame before it produces the next (`run`); at depth 4 it submits frames and takes the
results in order, four in flight at most (`submit`). The producer sleeps, as one does that waits for a camera; or it
computes, in Python on the client's CPU, as one does that decodes. Every result is checked to be its frame's. Client on
CPU 0, device on CPU 1.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from burst_roundtrip import add_model
from measure import Budget, Runs, ask, percentiles, progress, rounds, seconds_in_flight
from own_device import own_device, pin
from question import Question, against, interval, median, times

import driver
from burst import Busy
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Future

    from measure import Block
    from numpy.typing import NDArray

    from burst import Result
    from driver import Burst, RemotePreparedModel
    from driver.cli.timing import Estimate

    Ask = Callable[[float], Awaitable[object]]

SECONDS = 1e-3  # of the producer, and of the device
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
                        runs.add(name, block(burst, depth, produce, args.frames))
    progress("")
    return runs


def gain(runs: Runs, producer: str, depth: int) -> Estimate:
    """Frame rate to that of depth 1 in the same round."""
    rates = (runs.values(name_of(producer, d), "frames_per_s") for d in (depth, 1))
    return estimate(next(rates) / next(rates))


def budgets_of_depth(runs: Runs, args: argparse.Namespace) -> list[Budget]:
    """Both sides are busy at the same time."""
    return [
        Budget(f"{producer}: depth {args.depth} >= 1.9 x depth 1", gain(runs, producer, args.depth), 1.9, at_least=True)
        for producer in PRODUCERS
    ]


def settle(args: argparse.Namespace) -> None:
    """Depth 1 stands beside the other."""
    if "depth" not in inspect.signature(driver.RemotePreparedModel.burst).parameters:
        raise ValueError("this version's bursts have no depth")
    if args.depth < 2:
        raise ValueError("--depth: at least 2; depth 1 stands beside it")
    args.frames = 20 if args.quick else 400


def gain_of(runs: Runs, name: str) -> Estimate:
    """The same of a row."""
    producer, _, depth = name.rpartition(", depth ")
    return gain(runs, producer, int(depth))


DEPTH = Question(
    __doc__,
    run,
    {
        "frames per s": median("frames_per_s", ".1f"),
        "x depth 1": times(gain_of, *(name_of(producer, 1) for producer in PRODUCERS)),
        "from frame to result: p50 us": median("p50_us", ".0f"),
        "p99 us": median("p99_us", ".0f"),
    },
    options={"--depth": {"type": int, "default": 4, "help": "requests in flight (default 4)"}},
    settle=settle,
    budgets=budgets_of_depth,
    figures=("frames_per_s", "p50_us", "p99_us"),
    estimates={"gain": gain_of},
    kept=("depth",),
    bars=("frames_per_s", "frames per second"),
)


# ---- goodput


ELEMENTS, LAYERS = 200_000, 100
REST = 5e-3  # seconds until a client comes again that was turned away
FREE, WAYS = "one that waits", ("submit", "run_async", "asyncio.timeout")


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


TO_SUBMIT = against("submit", "good")


def budgets(runs: Runs, _: argparse.Namespace) -> list[Budget]:
    """Waiting must not cost a client its answers."""
    return [Budget(f"{way} >= 0.9 x submit", TO_SUBMIT(runs, way), 0.9, at_least=True) for way in WAYS[1:]]


def goodput(args: argparse.Namespace) -> Runs:
    """Do clients that wait for a saturated burst only so long get as much of it as clients that it turns away at once?

        python bench/burst_depth.py goodput [--pairs 9] [--seconds 2] [--clients 32] [--patience 0.05] [--json FILE]

    Tasks of one event loop ask one burst again and again, each for an answer within `--patience`, and together for
    more than the device can do. An answer is good when it comes in that time. The clients tell the burst by
    `submit(deadline=)` with policy "reject", and come again after 5 ms when they are turned away; by
    `run_async(timeout=)`; or not at all, and give up by `asyncio.timeout`. The first row is one client that waits as
    long as it takes: what the device can do.
    """
    seconds, runs = 0.2 if args.quick else args.seconds, Runs()
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
            runs.add(FREE, {"good": alone(single, seconds), "missed": 0})
            for way in WAYS[:: -1 if n % 2 else 1]:
                ask = asking(way, bursts[way], args.patience)
                came, not_there = asyncio.run(good_answers(ask, args.clients, seconds))
                runs.add(way, {"good": came / seconds, "missed": not_there / seconds})
        progress("")
    return runs


GOODPUT = Question(
    goodput.__doc__,
    goodput,
    {
        "good a second": median("good", ".0f"),
        "missed a second": median("missed", ".0f"),
        "to submit": times(TO_SUBMIT, FREE),
    },
    options={
        "--seconds": {"type": float, "default": 2},
        "--clients": {"type": int, "default": 32},
        "--patience": {"type": float, "default": 0.05},
    },
    budgets=budgets,
    bars=("good", "good answers a second"),
    figures=("good", "missed"),
    is_pinned=False,
)

# ---- rotation


DEPTHS = (4, 10, 11, 16, 32, 64)
SHALLOW = "depth 10"


def in_rotation(burst: Burst, depth: int, count: int) -> Block:
    """Microseconds that a request takes while `depth` are in flight, one after the other."""
    return {"us": 1e6 * seconds_in_flight(burst, count, depth, TIMEOUT)}


def rotate(args: argparse.Namespace) -> Runs:
    """All rounds, in turns."""
    runs, count = Runs(), 500 if args.quick else 5000
    with ExitStack() as stack:
        device = stack.enter_context(own_device())
        prepared: RemotePreparedModel = stack.enter_context(device.prepare(add_model()))
        bursts = {f"depth {d}": (stack.enter_context(prepared.burst(depth=d)), d) for d in DEPTHS}
        pin(device)
        for burst, depth in bursts.values():
            in_rotation(burst, depth, 10 * depth)
        for name in rounds(args.pairs, list(bursts)):
            runs.add(name, in_rotation(*bursts[name], count))
    return runs


TO_SHALLOW = against(SHALLOW, "us")
ROTATION = Question(
    """What does a request cost when many are in flight: is there more than its device knows?

        python bench/burst_depth.py rotation [--pairs 9] [--json FILE]

    An ADD on the reference device, submitted with so many in flight; a result is taken before one more is submitted. A
    device remembers 128 different requests of a burst. A burst whose input sets met all of its output sets would send
    more than that from depth 11 on, and each would be checked and bound anew. Client on CPU 0, device on CPU 1.
    """,
    rotate,
    {"us a request": interval("us"), "x depth 10": times(TO_SHALLOW, SHALLOW)},
    budgets=lambda runs, _: [
        Budget(f"depth {d} <= 1.2 x depth 10", TO_SHALLOW(runs, f"depth {d}"), 1.2) for d in DEPTHS if d > 10
    ],
    figures=("us",),
    bars=("us", "us a request"),
)

if __name__ == "__main__":
    ask({"": DEPTH.answer, "goodput": GOODPUT.answer, "rotation": ROTATION.answer})
