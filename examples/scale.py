"""A model of a service on one node to a thousand, made of parts that were measured on one.

    python examples/scale.py [--parts examples/scale.json] [--load 0.7] [--price 0.10] [--out scale.png]

The parts are of `bench/scale_parts.py`, with their machine and command. A node has as many executions at once as the
machine had processors; each occupies one for the time of a measured execution and the CPU time that the way adds.
Requests come at random, at `--load` of what all nodes can do, and each goes to the less busy of two nodes, as Ray Serve
and many balancers do. Its latency is the wait, the execution and what the way adds, all drawn from what was measured,
and `--network` for a way that crosses machines. The price of a node is yours to fill in.

What the model leaves out: nodes that differ, traffic that swells, a balancer that is itself full, cold starts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
WAYS = ("compiled.serve", "burst serve --oip", "Ray Serve")  # the first reaches one node, its own
NODES = 1, 3, 10, 30, 100, 300, 1000
BLOCKS = 10  # of requests; the first is left out, because all nodes begin idle


class Row(NamedTuple):
    """What a way gives on so many nodes."""

    way: str
    nodes: int
    capacity: float  #: inferences a second, at most
    rate: float  #: at the load
    p50: float  #: milliseconds, at the load
    p99: float
    memory: float  #: gigabytes
    per_million: float  #: the price of a million inferences at the load


def drawn(ms: list[float], count: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Times of the distribution that has these quantiles, in milliseconds."""
    return np.interp(rng.random(count), np.linspace(0, 1, len(ms)), ms)


def latencies(arrivals: Any, busy: Any, nodes: int, slots: int, rng: np.random.Generator) -> Any:
    """Wait and service of each request, in milliseconds. Each goes to the one of two nodes that is free the sooner."""
    free = np.zeros((nodes, slots))
    first, second = rng.integers(nodes, size=(2, len(arrivals)))
    found = np.empty(len(arrivals))
    for n, (at, needs, a, b) in enumerate(zip(arrivals, busy, first, second, strict=True)):
        node = free[a] if free[a].min() <= free[b].min() else free[b]
        slot = node.argmin()
        node[slot] = max(at, node[slot]) + needs
        found[n] = node[slot] - at
    return found


def row(parts: dict[str, Any], way: str, nodes: int, its: argparse.Namespace) -> Row:
    """One way on so many nodes."""
    rng, part, slots = np.random.default_rng(nodes), parts["ways"][way], parts["processors"]
    execution = drawn(parts["execution"]["ms"], its.requests, rng)
    busy = execution + part["cpu_ms"]
    capacity = nodes * slots / busy.mean() * 1e3
    rate = its.load * capacity
    arrivals = np.cumsum(rng.exponential(1e3 / rate, its.requests))
    took = latencies(arrivals, busy, nodes, slots, rng) - part["cpu_ms"]  # it is in what the way adds
    took += drawn(part["ms"], its.requests, rng) + (its.network if way != WAYS[0] else 0)
    p50, p99 = np.percentile(took[its.requests // BLOCKS :], [50, 99])
    memory = nodes * (parts["device_mb"] + part["mb"]) / 1024
    return Row(way, nodes, capacity, rate, p50, p99, memory, its.price * nodes / (rate * 3600) * 1e6)


def rows(parts: dict[str, Any], its: argparse.Namespace) -> list[Row]:
    """All ways on all numbers of nodes; the first on one."""
    return [row(parts, way, nodes, its) for way in WAYS for nodes in its.nodes if nodes == 1 or way != WAYS[0]]


def draw(found: list[Row], path: Path, its: argparse.Namespace) -> None:
    """Four small pictures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    places = figure.subplots(2, 2)
    labels = {
        "rate": f"inferences a second, at {its.load:.0%} load",
        "p99": "p99, ms",
        "memory": "memory, GB",
        "per_million": f"price of a million, at {its.price:g} per node and hour",
    }
    for place, (field, label) in zip(places.flat, labels.items(), strict=True):
        for way in WAYS:
            points = [(one.nodes, getattr(one, field)) for one in found if one.way == way]
            place.plot(*zip(*points, strict=True), marker="o", label=way)
        place.set(xscale="log", xlabel="nodes", title=label)
        if field in {"rate", "memory"}:
            place.set_yscale("log")
        else:
            place.set_ylim(bottom=0)
    places.flat[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, default=HERE / "scale.json")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--load", type=float, default=0.7, help="part of the capacity that is used (default 0.7)")
    parser.add_argument("--price", type=float, default=0.10, help="of a node for an hour (default 0.10: no real price)")
    parser.add_argument("--network", type=float, default=0.3, help="milliseconds there and back (default 0.3: a guess)")
    parser.add_argument("--requests", type=int, default=100_000, help="that are simulated (default 100,000)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a picture; needs the extra 'demo'")
    parser.add_argument("--json", action="store_true")
    its = parser.parse_args()
    if not 0 < its.load < 1:
        parser.error(f"--load {its.load}: more than 0 and less than 1")
    parts = json.loads(its.parts.read_text())
    found = rows(parts, its)
    if its.json:
        json.dump([one._asdict() for one in found], sys.stdout)
    else:
        print(f"parts: {parts['command']}; {parts['processor']}, {parts['processors']} processors")
        print(f"an execution: {parts['execution']['model']}, {parts['execution']['ms'][50]:.1f} ms\n")
        head = "capacity/s", "rate/s", "p50 ms", "p99 ms", "GB", "a million"
        print(f"{'way':<20}{'nodes':>6}" + "".join(f"{word:>11}" for word in head))
        for one in found:
            figures = f"{one.p50:>11.1f}{one.p99:>11.1f}{one.memory:>11.1f}{one.per_million:>11.3f}"
            print(f"{one.way:<20}{one.nodes:>6}{one.capacity:>11.0f}{one.rate:>11.0f}{figures}")
    if its.out:
        draw(found, its.out, its)


if __name__ == "__main__":
    main()
