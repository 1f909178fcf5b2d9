"""How does what a device does grow with the number, or the size, of what there is?

    python bench/growth.py [--only bursts depth clients models pools payload operations] [--seconds 20]
                           [--most NUMBER] [--json FILE] [--plot FILE]

Each curve is what one thing takes: one more burst, client, model or pool when there are so many already, a request
among them, a request with so many in flight or of so many bytes, a model of so many operations. Its exponent is that
of a power of the number or the size, fitted to the larger half of those that were reached. 0 for one more is linear
growth of all, and 1 is that for bytes and operations: what is worse has a budget that it misses. The device is the
reference; each round has new ones. --seconds ends a curve early, --most leaves larger sizes out.
"""

from __future__ import annotations

import itertools
import resource
import time
from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from burst_payload import count_of, open_burst, written
from burst_roundtrip import add_model
from measure import Budget, Runs, progress, spell
from own_device import own_device
from question import Question

import driver
from burst import Memory, Request, RequestArgument
from driver.cli.timing import estimate, time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    Points = Iterator[tuple[int, dict[str, float]]]
    Dimension = Callable[[driver.RemoteDevice, Sequence[int], float], Points]

FEWEST = 3  # sizes of a fit
QUICK = 0.25  # of the times of a curve at one size, so many are shorter: the rest may be others' work
ROOM = 0.1  # of an exponent: what the noise of a machine makes of a straight line
FLOATS = 1 << 15  # of a model's constants
NBYTES = 16  # of an argument of ADD


class Curve(NamedTuple):
    """Attributes:
    unit: of its values.
    linear: the exponent up to which all together grow no faster than their number.
    """

    unit: str
    linear: int = 0


CURVES = {
    "bursts: one more": Curve("ms"),
    "bursts: a request in turn": Curve("us"),
    "depth: a request": Curve("us"),
    "clients: one more": Curve("ms"),
    "clients: a request in turn": Curve("us"),
    "models: one more": Curve("ms"),
    "models: an equal one": Curve("ms"),
    "pools: one more": Curve("us"),
    "pools: a request in turn": Curve("us"),
    "payload: a request": Curve("us", 1),
    "operations: building": Curve("ms", 1),
    "operations: preparing": Curve("ms", 1),
    "operations: running": Curve("us", 1),
}
SIZES: dict[str, Sequence[int]] = {
    "bursts": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "depth": (1, 2, 4, 8, 16, 32, 64),
    "clients": (1, 2, 5, 10, 20, 50, 100, 200),
    "models": (1, 3, 10, 30, 100, 300, 1000),
    "pools": (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000),
    "payload": (*(64 << 4 * n for n in range(6)), 1 << 28, 1 << 30),
    "operations": (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000),
}


def one_more(sizes: Sequence[int], end: float, add: Callable[[int], object]) -> Iterator[tuple[int, float]]:
    """Adds as many as each size says: seconds of one of the last that came, until the clock says `end`."""
    took: list[float] = []
    for size in sizes:
        while len(took) < size:
            began = time.perf_counter()
            add(len(took))
            took.append(time.perf_counter() - began)
            if time.monotonic() > end:
                return
        yield size, float(np.quantile(took[-max(1, size // 3) :], QUICK))


def in_turn(calls: Sequence[Callable[[], object]], least: int = 300) -> float:
    """Microseconds of a call, each as often as the others."""
    turns = itertools.cycle(calls)

    def one() -> object:
        return next(turns)()

    time_calls(one, len(calls))
    return float(np.quantile(time_calls(one, max(least, len(calls))), QUICK)) / 1e3


def of_bursts(device: driver.RemoteDevice, sizes: Sequence[int], end: float) -> Points:
    """Bursts of one client on one model."""
    prepared, opened = device.prepare(add_model()), list[driver.Burst]()
    for size, seconds in one_more(sizes, end, lambda _: opened.append(prepared.burst(spin=0))):
        asked = in_turn([burst.run for burst in opened])
        yield size, {"bursts: one more": seconds * 1e3, "bursts: a request in turn": asked}


def of_depth(device: driver.RemoteDevice, sizes: Sequence[int], end: float) -> Points:
    """Requests in flight in one burst."""
    prepared = device.prepare(add_model())
    for depth in itertools.takewhile(lambda _: time.monotonic() < end, sizes):
        with prepared.burst(depth=depth) as burst:
            flying = deque(burst.submit() for _ in range(depth))

            def land(burst: driver.Burst = burst, flying: deque[Any] = flying) -> None:
                flying.popleft().result(10)
                flying.append(burst.submit())

            asked = in_turn([land] * depth, 1000)
            while flying:
                flying.popleft().result(10)
        yield depth, {"depth: a request": asked}


def of_clients(device: driver.RemoteDevice, sizes: Sequence[int], end: float) -> Points:
    """Connections of one process, each with a model and a burst."""
    clients, opened = list[driver.RemoteDevice](), list[driver.Burst]()
    with ExitStack() as stack:
        for size, seconds in one_more(
            sizes, end, lambda _: clients.append(stack.enter_context(driver.connect(device.name)))
        ):
            opened += [client.prepare(add_model()).burst(spin=0) for client in clients[len(opened) :]]
            asked = in_turn([burst.run for burst in opened])
            yield size, {"clients: one more": seconds * 1e3, "clients: a request in turn": asked}


def model(number: int) -> driver.Model:
    """One that is unlike those of other numbers."""
    m, constants = driver.ModelBuilder(), np.random.default_rng(number).random(FLOATS, np.float32)
    m.output(m.operation("ADD", m.input("float32", (FLOATS,)), constants, 0))
    return m.build()


def of_models(device: driver.RemoteDevice, sizes: Sequence[int], end: float) -> Points:
    """Models of one client, all of one size; then one that equals another."""
    models, prepared = (model(number) for number in itertools.count()), list[Any]()
    for size, seconds in one_more(sizes, end, lambda _: prepared.append(device.prepare(next(models)))):
        equal = [model(number) for number in np.linspace(0, size - 1, 5, dtype=int)]
        took = [in_turn([partial(once_prepared, device, each)], 1) for each in equal]
        yield size, {"models: one more": seconds * 1e3, "models: an equal one": float(np.median(took)) / 1e3}


def once_prepared(device: driver.RemoteDevice, of: driver.Model) -> None:
    """Prepares and closes it."""
    device.prepare(of).close()


def of_pools(device: driver.RemoteDevice, sizes: Sequence[int], end: float) -> Points:
    """Pools of explicit requests in one burst; a burst knows so many, and maps another one anew."""
    prepared, requests = device.prepare(add_model()), list[Request]()
    burst = prepared.burst(spin=0)
    places = [RequestArgument(offset=n * 64, length=NBYTES) for n in range(3)]

    def add(_: int) -> None:
        requests.append(Request(tuple(places[:2]), tuple(places[2:]), (Memory.create(4096),)))
        burst.execute(requests[-1]).raise_for_status()

    for size, seconds in one_more(sizes, end, add):
        asked = in_turn([partial(burst.execute, request) for request in requests])
        yield size, {"pools: one more": seconds * 1e6, "pools: a request in turn": asked}


def of_payload(device: driver.RemoteDevice, sizes: Sequence[int], end: float) -> Points:
    """Bytes that the client writes into a burst's input before each request; the model looks at four of them."""
    for nbytes in itertools.takewhile(lambda _: time.monotonic() < end, sizes):
        with ExitStack() as stack:
            shape = (1, 1, nbytes, 1)
            burst, payload = open_burst(device, shape, stack, adds=False), np.full(shape, 7, np.uint8)
            asked = in_turn([partial(written, burst, payload)], count_of(nbytes, 500))
        yield nbytes, {"payload: a request": asked}


def chain(length: int) -> driver.Model:
    """Additions, one after the other."""
    m = driver.ModelBuilder()
    found, one = m.input("float32", (4,)), np.ones(4, np.float32)
    for _ in range(length):
        found = m.operation("ADD", found, one, 0)
    m.output(found)
    return m.build()


def of_operations(device: driver.RemoteDevice, sizes: Sequence[int], end: float) -> Points:
    """Operations of one model."""
    for length in itertools.takewhile(lambda _: time.monotonic() < end, sizes):
        began = time.perf_counter()
        built = chain(length)
        made = time.perf_counter()
        with device.prepare(built) as prepared:
            ready = time.perf_counter()
            with prepared.burst() as burst:
                asked = in_turn([burst.run], max(5, 500 // length))
        yield (
            length,
            {
                "operations: building": (made - began) * 1e3,
                "operations: preparing": (ready - made) * 1e3,
                "operations: running": asked,
            },
        )


DIMENSIONS: dict[str, Dimension] = {
    "bursts": of_bursts,
    "depth": of_depth,
    "clients": of_clients,
    "models": of_models,
    "pools": of_pools,
    "payload": of_payload,
    "operations": of_operations,
}


def exponent(points: dict[int, float]) -> float:
    """Of the power that is nearest to the larger half of the points; not a number for fewer than two."""
    last = sorted(points)[-max(FEWEST, -(-len(points) // 2)) :]
    if len(last) < 2:
        return float("nan")
    return float(np.polyfit(np.log(last), np.log([points[size] for size in last]), 1)[0])


def measure(args: argparse.Namespace) -> Runs:
    """All rounds, on devices of their own."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each pool has a descriptor, and each client some
    runs = Runs()
    for number in range(args.pairs):
        for name in args.only:
            progress(f"round {number + 1} of {args.pairs}", name)
            found: dict[str, dict[int, float]] = {}
            sizes = [size for size in SIZES[name] if size <= args.most]
            with own_device() as device:
                for size, values in DIMENSIONS[name](device, sizes, time.monotonic() + args.seconds):
                    for curve, value in values.items():
                        found.setdefault(curve, {})[size] = value
            for curve, points in found.items():
                runs.add(curve, {"points": points, "exponent": exponent(points)})
    progress("")
    return runs


def points_of(runs: Runs, curve: str) -> dict[int, float]:
    """Medians over the rounds that reached a size."""
    blocks = [block["points"] for block in runs.blocks[curve]]
    sizes = sorted({size for points in blocks for size in points})
    return {size: float(np.median([points[size] for points in blocks if size in points])) for size in sizes}


def value(found: float) -> str:
    """Four digits, or more of what is large."""
    return f"{found:.4g}" if found < 1e4 else f"{found:,.0f}"


def told(size: int) -> str:
    """A size, for people."""
    return next(
        (f"{size >> n} {unit}" for n, unit in ((30, "Gi"), (20, "Mi"), (10, "Ki")) if not size % (1 << n)), f"{size:,}"
    )


def tables(runs: Runs, args: argparse.Namespace) -> list[tuple[list[tuple[str, ...]], tuple[str, ...]]]:
    """One for each dimension, with a column for each size."""
    found = []
    for name in args.only:
        curves = {curve: points_of(runs, curve) for curve in runs.blocks if curve.startswith(f"{name}:")}
        sizes = sorted({size for points in curves.values() for size in points})
        lines = [
            (
                f"{curve}, {CURVES[curve].unit}",
                *(value(points[size]) if size in points else "-" for size in sizes),
                spell(estimate(runs.values(curve, "exponent"))),
            )
            for curve, points in curves.items()
        ]
        found.append((lines, (name, *map(told, sizes), "exponent")))
    return found


def budgets(runs: Runs, _: argparse.Namespace) -> list[Budget]:
    """Nothing grows faster than the number or the size."""
    limits = {curve: CURVES[curve].linear + ROOM for curve in runs.blocks}
    return [
        Budget(f"{curve}: exponent <= {limit:g}", estimate(runs.values(curve, "exponent")), limit, "")
        for curve, limit in limits.items()
    ]


def rows(runs: Runs, _: argparse.Namespace) -> list[dict[str, Any]]:
    """For the JSON and the picture."""
    return [
        {
            "name": curve,
            "ours": True,
            "unit": CURVES[curve].unit,
            "points": list(points_of(runs, curve).items()),
            "exponent": estimate(runs.values(curve, "exponent"))._asdict(),
            "rounds": runs.blocks[curve],
        }
        for curve in runs.blocks
    ]


def draw(args: argparse.Namespace, _: Runs, found: list[dict[str, Any]]) -> None:
    """A small picture for each dimension, both axes logarithmic."""
    import plots

    plots.growth(args.plot, found, "What one thing takes, against the number or the size of what there is")


def settle(args: argparse.Namespace) -> None:
    """--quick measures the smallest alone."""
    if args.quick:
        args.most, args.seconds = min(args.most, 1024), min(args.seconds, 1.0)


GROWTH = Question(
    __doc__,
    measure,
    options={
        "--only": {"nargs": "+", "default": [*DIMENSIONS], "choices": DIMENSIONS, "metavar": "DIMENSION"},
        "--seconds": {"type": float, "default": 20.0, "help": "of each dimension in a round (default 20)"},
        "--most": {"type": int, "default": 1 << 30, "metavar": "NUMBER", "help": "the largest number or size"},
    },
    settle=settle,
    budgets=budgets,
    kept=("seconds", "most"),
    rows=rows,
    tables=tables,
    draw=draw,
    pairs=3,
    is_pinned=False,
)

if __name__ == "__main__":
    GROWTH.answer()
