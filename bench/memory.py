"""What does memory cost: state that stays on the device, mapping, and the weights of many clients?

    python bench/memory.py [--peers all|none|zmq …] [--clients N …] [--json FILE] [--plot FILE]

State: a network that reads what it wrote the last time, executed step by step. Its state stays in two buffers of the
device that take turns (domain); or lies in the client's pools, where the client copies each new state to where the next
step reads it (copied); or goes there and back as arrays on the plain path. Small: an LSTM of 128 units, 1 KiB of
state. Large: a leaky sum of 1 MiB. Mapping: the same execution on 6.2 MB of memory that the device knows, and on memory
that it maps for each call. All beside one execution of the small network through a burst that copies nothing. Camera:
four values of an RGBA image of 1920 x 1080 pixels that lies in a hardware buffer, as a camera leaves it there, through
a burst that copies none of it; the same bytes in a message by other ways, whose receiver leaves them alone. Weights:
a FULLY_CONNECTED with 100 MB of them, prepared and run by 1, 4 and 16 client processes; what the device's two processes
have in memory beyond what they had before, pages in proportion to who shares them.
Client on CPU 0, device on CPU 1.
"""

from __future__ import annotations

import multiprocessing
import re
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from burst_frame import slicing
from measure import Runs, Subject, block_of, conditions, interleave, peer_block, peers_process, pin_client, ratio
from own_device import own_device, pinned
from verdict import Budget, Report, arguments, cells, parse, progress, publish, subject_rows

import driver
from burst import Memory, Request, RequestArgument
from driver import BufferDesc, BufferRole

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from measure import Ask

    from driver import Model, RemoteDevice, RemotePreparedModel
    from driver.cli.timing import Estimate

QUESTION = "What does memory cost?"
FLOOR = "floor: the small step, nothing copied"
KINDS = ("small", "large")
WAYS = ("domain", "copied", "plain path")
CAMERA = "camera frame, burst"
PEERS = {"pickle": "pickled", "zmq": "zmq", "grpc": "grpc"}  # in peers.py
KNOWN, MAPPED = "6.2 MB that the device knows", "6.2 MB mapped for the call"
UNITS, LARGE, FRAME = 128, 1 << 18, (1, 1080, 1920, 3)
WEIGHTS = 25_600, 1024  # float32: 100 MB
MOST = 1.05  # times the memory of one client


def lstm() -> Model:
    """x, the state and the cell's state -> the next of both; every array [1, UNITS]."""
    rng = np.random.default_rng(1)
    m = driver.ModelBuilder()
    x, h, c = (m.input("float32", (1, UNITS)) for _ in range(3))
    weights = [rng.standard_normal((UNITS, UNITS)).astype(np.float32) / UNITS for _ in range(8)]
    biases = [np.zeros(UNITS, np.float32)] * 4
    peepholes, projection = [None] * 3, [None] * 2
    parts = m.operation("LSTM", x, *weights, *peepholes, *biases, *projection, h, c, 4, 0.0, 0.0)
    m.output(parts[1], parts[2])
    return m.build()


def leaky_sum() -> Model:
    """x, the state -> tanh(x + state), of LARGE elements."""
    m = driver.ModelBuilder()
    x, h = m.input("float32", (1, 4)), m.input("float32", (LARGE // 4, 4))
    m.output(m.operation("TANH", m.operation("ADD", h, x, 0)))
    return m.build()


MODELS: dict[str, Callable[[], Model]] = {"small": lstm, "large": leaky_sum}


class Steps:
    """A network with a state, step by step, in three ways."""

    def __init__(self, prepared: RemotePreparedModel, stack: ExitStack) -> None:
        graph = prepared.model.main
        x, *states = [graph.operands[i].dimensions for i in graph.inputs]
        self._x = np.ones(x, np.float32)
        self._zeros = [np.zeros(shape, np.float32) for shape in states]
        self._prepared, self._burst = prepared, stack.enter_context(prepared.burst())
        self._requests = cycle(self._ping_pong(stack))
        self._copying = stack.enter_context(prepared.burst())
        for place, value in zip(self._copying.inputs, (self._x, *self._zeros), strict=True):
            place[...] = value
        self._state = list(self._zeros)

    def _ping_pong(self, stack: ExitStack) -> list[Request]:
        """Two requests: each reads the buffers that the other one writes."""
        device, memory = self._prepared.device, Memory.create(self._x.nbytes)
        memory.asarray(np.float32, self._x.shape)[...] = self._x
        sides = [
            [
                stack.enter_context(
                    device.allocate(BufferDesc(), [self._prepared], [BufferRole(0, 1 + n)], [BufferRole(0, n)])
                )
                for n in range(len(self._zeros))
            ]
            for _ in range(2)
        ]
        for buffer, zeros in zip(sides[0], self._zeros, strict=True):
            buffer.copy_from(zeros)
        count = len(self._zeros)
        reads = tuple(RequestArgument(pool=1 + n) for n in range(count))
        writes = tuple(RequestArgument(pool=1 + count + n) for n in range(count))
        inputs = (RequestArgument(length=memory.nbytes), *reads)
        return [Request(inputs, writes, (memory, *here, *there)) for here, there in (sides, (sides[1], sides[0]))]

    def domain(self) -> None:
        """Nothing of the state leaves the device."""
        result = self._burst.execute(next(self._requests))
        assert not result.status

    def copied(self) -> None:
        """The client copies it from where it was written to where it is read."""
        result = self._copying.run()
        for place, output in zip(self._copying.inputs[1:], result.outputs, strict=True):
            place[...] = output

    def plain(self) -> None:
        """There and back as arrays."""
        self._state = list(self._prepared.run(self._x, *self._state))

    def still(self) -> None:
        """One step, again and again the same."""
        self._copying.run()


def mapping(prepared: RemotePreparedModel) -> dict[str, Callable[[], object]]:
    """An execution on memory that the device knows, and on memory that it forgets after each call."""
    nbytes = int(np.prod(FRAME))
    memory = Memory.create(nbytes + 64)
    memory.asarray()[:] = 1
    request = Request((RequestArgument(length=nbytes),), (RequestArgument(offset=nbytes, length=4),), (memory,))

    def mapped() -> None:
        prepared.execute(request)
        prepared.device.free_memory(memory)

    return {KNOWN: lambda: prepared.execute(request), MAPPED: mapped}


def camera(device: RemoteDevice, stack: ExitStack) -> Callable[[], object]:
    """An execution on an image in a hardware buffer."""
    frame, pool = driver.HardwareBuffer.allocate("rgba", 1920, 1080), Memory.create(4)
    frame.plane(0)[...] = 7
    prepared = stack.enter_context(device.prepare(slicing(frame.shape)))
    burst = stack.enter_context(prepared.burst())
    request = Request((RequestArgument(),), (RequestArgument(pool=1, length=4),), (frame, pool))
    assert burst.execute(request).outputs[0].reshape(-1).tolist() == [8] * 4
    assert burst.stats()["copied_bytes"]["bulk"] == 0
    return lambda: burst.execute(request)


def peers(names: Sequence[str], count: int, ask: Ask) -> list[Subject]:
    """The image in a message."""
    return [
        Subject(f"camera frame, {name}", peer_block(ask, PEERS[name], count, 4 * 1920 * 1080), FLOOR) for name in names
    ]


def subjects(device: RemoteDevice, counts: tuple[int, int], stack: ExitStack) -> tuple[list[Subject], Any]:
    """All rows, and the floor's call."""
    found, steps = [], {}
    for kind, count in zip(KINDS, counts, strict=True):
        steps[kind] = Steps(stack.enter_context(device.prepare(MODELS[kind]())), stack)
        calls = steps[kind].domain, steps[kind].copied, steps[kind].plain
        found += [
            Subject(f"{kind} state, {way}", block_of(call, count), FLOOR, is_ours=True)
            for way, call in zip(WAYS, calls, strict=True)
        ]
    calls = mapping(stack.enter_context(device.prepare(slicing(FRAME))))
    calls[CAMERA] = camera(device, stack)
    found += [Subject(name, block_of(call, counts[0]), FLOOR, is_ours=True) for name, call in calls.items()]
    for subject in found:
        subject.block = pinned(device, subject.block)
    return found, steps["small"].still


# ---- weights


def _client(units: int, ready: Any, end: Any) -> None:
    """Prepares the large model, and keeps it until told."""
    m = driver.ModelBuilder()
    weights, bias = np.ones((units, WEIGHTS[1]), np.float32), np.zeros(units, np.float32)
    m.output(m.operation("FULLY_CONNECTED", m.input("float32", (1, WEIGHTS[1])), weights, bias, 0))
    with driver.connect() as device, device.prepare(m.build()) as prepared:
        prepared.run(np.ones((1, WEIGHTS[1]), np.float32))
        ready.set()
        end.wait()


def device_bytes(device: RemoteDevice) -> int:
    """Of both processes, in proportion to who shares what."""
    rolls = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in (device.service_pid, device.engine_pid)]
    return sum(int(re.search(r"^Pss:\s+(\d+)", roll, re.MULTILINE)[1]) << 10 for roll in rolls)  # type: ignore[index]


def weights_of(clients: Sequence[int], units: int) -> list[tuple[int, float]]:
    """(clients, megabytes of the device beyond what it has without any) for each number of clients."""
    context, found = multiprocessing.get_context("spawn"), []
    for count in clients:
        progress("weights", f"{count} clients")
        with own_device() as device:
            before, end, processes = device_bytes(device), context.Event(), []
            for _ in range(count):
                ready = context.Event()
                processes.append(context.Process(target=_client, args=(units, ready, end)))
                processes[-1].start()
                ready.wait()
            found.append((count, (device_bytes(device) - before) / 2**20))
            end.set()
            for process in processes:
                process.join()
    progress("")
    return found


def budgets(runs: Runs, resident: Sequence[tuple[int, float]], names: Sequence[str]) -> list[Budget]:
    """State that stays is the cheapest; known memory is not mapped again; weights are there once."""
    from driver.cli.timing import estimate

    def against(name: str, reference: str) -> Estimate | None:
        return ratio(runs, name, reference) if runs.has(name, reference) else None

    found = [
        Budget(f"{kind} state: domain <= {way}", against(f"{kind} state, domain", f"{kind} state, {way}"), 1.0)
        for kind in KINDS
        for way in WAYS[1:]
    ]
    found += [Budget(f"camera frame: burst <= {n}", against(CAMERA, f"camera frame, {n}"), 1.0) for n in names]
    found.append(Budget("known memory <= mapped for the call", against(KNOWN, MAPPED), 1.0))
    (_, alone), *others = resident
    for count, nbytes in others:
        found.append(Budget(f"memory with {count} clients <= {MOST} x one", estimate([nbytes / alone]), MOST))
    return found


def run(args: argparse.Namespace) -> Runs:
    """All rounds."""
    counts = (50, 5) if args.quick else (3000, 200)
    with ExitStack() as stack:
        device = stack.enter_context(own_device())
        args.subjects, floor = subjects(device, counts, stack)
        args.subjects += peers(args.peers, counts[1] // 2, stack.enter_context(peers_process()))
        floors = {FLOOR: pinned(device, block_of(floor, counts[0]))}
        return interleave(args.subjects, floors, args.pairs, progress)


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--peers", nargs="+", default=["all"], choices=("all", "none", *PEERS), metavar="PEER")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16], help="that prepare the large model")
    args = parse(parser)
    args.peers = [name for name in PEERS if name in args.peers or "all" in args.peers]
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    pin_client()
    found = conditions()
    runs = run(args)
    resident = weights_of(args.clients, WEIGHTS[0] // 10 if args.quick else WEIGHTS[0])
    rows = subject_rows(runs, args.subjects)
    head = ("clients of one model", "MB of the device")
    more = [([(str(count), f"{nbytes:.0f}") for count, nbytes in resident], head)]
    body = {"subjects": rows, "resident": resident}
    told = budgets(runs, resident, args.peers)
    publish(args, Report(QUESTION, found, [cells(row) for row in rows], told, body, more=more))
    if args.plot:
        import plots

        plots.latencies(args.plot, rows, [], "Memory: one execution")


if __name__ == "__main__":
    main()
