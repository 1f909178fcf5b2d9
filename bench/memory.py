"""What does memory cost: state that stays on the device, mapping, and the weights of many clients?

    python bench/memory.py [--peers all|none|zmq …] [--clients N …] [--json FILE] [--plot FILE]
    python bench/memory.py files [--clients N …] [--json FILE]
    python bench/memory.py accounts [DEVICE …] [--rounds N]

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
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from burst_payload import slicing
from measure import (
    Budget,
    Runs,
    Subject,
    ask,
    block_of,
    interleave,
    peer_block,
    peers_process,
    progress,
    ratio,
    shared_memory,
    spell,
)
from own_device import own_device, pinned
from question import Finding, Inquiry, beside_floors, dots

import driver
from burst import Memory, Request, RequestArgument
from driver import BufferDesc, BufferRole
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from measure import Ask

    from driver import Model, RemoteDevice, RemotePreparedModel
    from driver.cli.timing import Estimate

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


def device_memory(device: RemoteDevice) -> float:
    """MiB of both processes, in proportion to who shares what."""
    return shared_memory((device.service_pid, device.engine_pid))


def weights_of(clients: Sequence[int], units: int) -> list[tuple[int, float]]:
    """(clients, megabytes of the device beyond what it has without any) for each number of clients."""
    context, found = multiprocessing.get_context("spawn"), []
    for count in clients:
        progress("weights", f"{count} clients")
        with own_device() as device:
            before, end, processes = device_memory(device), context.Event(), []
            for _ in range(count):
                ready = context.Event()
                processes.append(context.Process(target=_client, args=(units, ready, end)))
                processes[-1].start()
                ready.wait()
            found.append((count, device_memory(device) - before))
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
        runs = interleave(args.subjects, floors, args.pairs, progress)
    args.resident = weights_of(args.clients, WEIGHTS[0] // 10 if args.quick else WEIGHTS[0])
    return runs


RESIDENT_HEAD = ("clients of one model", "MB of the device")
MEMORY = beside_floors(
    __doc__,
    run,
    options={"--clients": {"nargs": "+", "type": int, "default": [1, 4, 16], "help": "that prepare the large model"}},
    peers=PEERS,
    budgets=lambda runs, args: budgets(runs, args.resident, args.peers),
    more=lambda _, args: [([(str(count), f"{nbytes:.0f}") for count, nbytes in args.resident], RESIDENT_HEAD)],
    kept=("resident",),
    draw=dots("Memory: one execution"),
)

# ---- files


MEGABYTES = 32
NETS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # operator: shapes of the input, of the weights
    "Add": ((1, 1024), (MEGABYTES << 8, 1024)),
    "MatMul": ((1, 4096), (4096, MEGABYTES << 6)),
    "Conv": ((1, 1024, 4, 4), (MEGABYTES << 5, 1024, 3, 3)),
}


def written(operator: str, folder: Path) -> Path:
    """The file of such a net."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    shape, weights = NETS[operator]
    values = np.random.default_rng(1).standard_normal(weights).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "w"], ["all"]), helper.make_node("ReduceMax", ["all"], ["y"], keepdims=0)],
        operator,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(values, "w")],
    )
    path = folder / f"{operator}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def _files_client(path: Path, ready: Any, end: Any) -> None:
    with driver.compile(driver.load(path), ["onnxruntime"]) as compiled:
        compiled.run(np.ones(NETS[path.stem][0], np.float32))
        ready.set()
        end.wait()


def resident(path: Path, clients: int) -> float:
    """Megabytes of the device beyond what it has without a client."""
    context = multiprocessing.get_context("spawn")
    with own_device("onnxruntime") as device:
        before, end, processes = device_memory(device), context.Event(), []
        for _ in range(clients):
            ready = context.Event()
            processes.append(context.Process(target=_files_client, args=(path, ready, end)))
            processes[-1].start()
            ready.wait()
        found = device_memory(device) - before
        end.set()
        for process in processes:
            process.join()
    return found


def measured(clients: Sequence[int], rounds: int) -> dict[str, dict[int, list[float]]]:
    """Megabytes by operator and number of clients, once a round."""
    found: dict[str, dict[int, list[float]]] = {name: {count: [] for count in clients} for name in NETS}
    with tempfile.TemporaryDirectory() as folder:
        paths = [written(name, Path(folder)) for name in NETS]
        for number in range(rounds):
            for path in paths:
                for count in clients:
                    progress(f"round {number + 1}", f"{path.stem}, {count} clients")
                    found[path.stem][count].append(resident(path, count))
    progress("")
    return found


def files(args: argparse.Namespace) -> Finding:
    """Each file for few clients and for many."""
    found = measured(args.clients, args.pairs)
    few, many = args.clients
    shares = {name: [b / a for a, b in zip(*each.values(), strict=True)] for name, each in found.items()}
    told = [Budget(f"{name}: {many} clients <= {MOST} x {few}", estimate(each), MOST) for name, each in shares.items()]
    head = ("operator, weights", *(f"MB of the device, {count} clients" for count in args.clients))
    rows = [
        (f"{name}, {np.prod(NETS[name][1]) >> 18} MB", *(f"{np.median(values):.0f}" for values in each.values()))
        for name, each in found.items()
    ]
    return Finding(rows, told, {"resident": found}, head)


FILES = Inquiry(
    """What do the weights of one .onnx file cost the device, for one program that opens it and for eight?

        python bench/memory.py files [--clients N …] [--pairs 3] [--json FILE]

    Three files of one operator with a constant, and the largest element of what it gives. ONNX Runtime treats these
    constants differently: Add reads it where it lies, MatMul and Conv pack it anew. Each client is a process that
    compiles the file and runs it once. What counts is what the device's two processes have in memory beyond what they
    had before, pages in proportion to who shares them.
    """,
    files,
    options={"--clients": {"nargs": 2, "type": int, "default": [1, 8], "help": "that open the file"}},
    pairs=3,
)


# ---- accounts


SERVER, GROUP, ONE, TWO = 61701, 61799, 61702, 61703  # numbers need no account
CLIENTS = 16
MOST_OF_ONE, MOST_OF_TWO = 1.1, 2.2  # times the memory of one client
ACCOUNTS = Path(__file__).resolve().parents[1] / "tests/accounts.py"
SETTLED, LOOKS = 0.5, 20  # seconds between two looks that have to agree; at most so many


def client(address: str) -> None:
    """Prepares the model, runs it, says so, and keeps it until its standard input ends."""
    m = driver.ModelBuilder()
    weights, bias = np.ones(WEIGHTS, np.float32), np.zeros(WEIGHTS[0], np.float32)
    m.output(m.operation("FULLY_CONNECTED", m.input("float32", (1, WEIGHTS[1])), weights, bias, 0))
    with driver.connect(address) as device, device.prepare(m.build()) as prepared, prepared.burst() as burst:
        burst.run(np.ones((1, WEIGHTS[1]), np.float32))
        print("ready", flush=True)
        sys.stdin.read()


def begun(uid: int, words: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A process of that account, in the group."""
    command = [sys.executable, "-I", "-S", str(ACCOUNTS), str(uid), f"{uid},{GROUP}", sys.executable, *words]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": "/", "env": environment}
    return subprocess.Popen(command, **pipes, start_new_session=True)


@contextmanager
def served(device: str) -> Iterator[tuple[str, int]]:
    """The socket of a device that is served to the group, and the process that listens."""
    with tempfile.TemporaryDirectory(prefix="burst-m-", dir="/tmp") as name:
        home = Path(name)
        home.chmod(0o755)
        os.chown(home, SERVER, SERVER)
        words = ["-m", "driver.cli", "serve", device, "--group", str(GROUP), "--dir", f"{home}/run"]
        with begun(SERVER, words, os.environ | {"HOME": name}) as process:
            assert process.stdout
            while "is ready after" not in (line := process.stdout.readline()):
                if not line:
                    raise SystemExit(f"{device} was not served")
            try:
                yield f"{home}/run/{device}.sock", process.pid
            finally:
                process.terminate()


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def held(pids: list[int]) -> float:
    """Megabytes that these processes keep: their part of private and of file pages, and shared memory whole."""
    kilobytes, shared = 0, dict[int, int]()
    for pid in pids:
        roll = Path(f"/proc/{pid}/smaps_rollup").read_text()
        kilobytes += sum(map(int, re.findall(r"^Pss_(?:Anon|File):\s+(\d+)", roll, re.MULTILINE)))
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            where, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(("/memfd:", "/dev/shm/", "/dev/zero")) and int(inode) not in shared:
                with suppress(FileNotFoundError):  # it was there a moment ago
                    shared[int(inode)] = os.stat(f"/proc/{pid}/map_files/{where}").st_blocks // 2
    return (kilobytes + sum(shared.values())) / 1024


def settled(pid: int) -> float:
    """Megabytes of a process and all below it, when they do not change any more."""
    before = 0.0
    for _ in range(LOOKS):
        now = held(family(pid))
        if abs(now - before) < now / 100:
            break
        before = now
        time.sleep(SETTLED)
    return now


def accounts_measured(device: str, uids: list[int]) -> float:
    """Megabytes of the device with clients of these accounts."""
    with served(device) as (address, pid), ExitStack() as stack:
        words = [str(Path(__file__).resolve()), "accounts", "--client", address]
        for uid in uids:
            process = stack.enter_context(begun(uid, words))
            stack.callback(process.kill)
            assert process.stdout
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"the client of uid {uid} failed")
        return settled(pid)


def accounts(args: argparse.Namespace) -> Finding:
    """Each device without a client, with one, and with sixteen of one account and of two."""
    if os.geteuid():
        raise SystemExit("only root can start clients of other accounts")
    half = CLIENTS // 2
    ways = {"none": [], "one": [ONE], "16 of one": [ONE] * CLIENTS, "16 of two": [ONE] * half + [TWO] * half}
    lines: list[tuple[str, ...]] = []
    budgets: list[Budget] = []
    body: dict[str, Any] = {}
    for device in args.devices:
        found = {way: [accounts_measured(device, uids) for _ in range(args.pairs)] for way, uids in ways.items()}
        body[device] = found
        of_one, of_two = (estimate(np.divide(found[way], found["one"])) for way in ("16 of one", "16 of two"))
        lines.append((device, *(f"{np.median(rounds):.0f}" for rounds in found.values()), spell(of_one), spell(of_two)))
        budgets.append(Budget(f"{device}: 16 clients of one account <= {MOST_OF_ONE} x one", of_one, MOST_OF_ONE))
        budgets.append(Budget(f"{device}: 16 clients of two accounts <= {MOST_OF_TWO} x one", of_two, MOST_OF_TWO))
    return Finding(lines, budgets, {"megabytes": body}, ACCOUNTS_HEAD)


ACCOUNTS_HEAD = ("device", "no client, MB", "one client, MB", "16 of one account, MB", "of two, MB", "x one", "x one")
OF_ACCOUNTS = Inquiry(
    """What does an engine for each account cost in memory?

        python bench/memory.py accounts [DEVICE …] [--pairs 3] [--json FILE]

    `burst serve DEVICE --group` under an account of its own; clients of other accounts, which only root can start.
    Each prepares a FULLY_CONNECTED with 100 MB of weights, and runs it in a burst that stays open. For one client,
    for 16 of one account, and for 16 of two: what all processes of the device keep in memory together, with the cell
    of the device's own account, which is always there. Private pages, and pages of files, count in proportion to who
    shares them (PSS), and shared memory counts whole: a model that the engine has mapped, and does not touch, is no
    page of its own, but is there.
    """,
    accounts,
    options={"devices": {"nargs": "*", "default": ["litert", "onnxruntime", "reference"]}},
    pairs=3,
)


if __name__ == "__main__":
    if sys.argv[1:3] == ["accounts", "--client"]:
        client(sys.argv[3])
    else:
        ask({"": MEMORY.answer, "files": FILES.answer, "accounts": OF_ACCOUNTS.answer})
