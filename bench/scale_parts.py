"""What do the parts cost of which a service on one node to a thousand is made?

    python bench/scale_parts.py [--requests N] [--out examples/scale.json]        # needs the extras oip and ray
    python bench/scale_parts.py ray [--images N] [--pairs 3] [--json FILE]

One small model file (mobilenet_int8.tflite, 64 x 64) is asked in every way by one client at a time: a burst,
`compiled.serve`, the Open Inference Protocol over gRPC (`burst serve --oip`, asked by tritonclient), and a deployment
of Ray Serve by its handle (examples/ray_serve.py). What a way adds is its time less the burst's median; the CPU time is
that of all processes but the device's. Beside that stand executions of MobileNetV1 in floats, memory, and how long a
request takes whose device has just been killed. `examples/scale.py` makes a model of this.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from measure import HERE, Budget, ask, conditions, cpu_seconds, progress
from models import IMAGE, mobilenet
from question import Finding, Inquiry

import driver
from driver.cli.timing import estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

FILE = HERE.parent / "tests/driver/importers/vendor/mobilenet_int8.tflite"
X = np.zeros((1, 64, 64, 3), np.int8)
MARK = "BURST_SCALE_PARTS"
Way = dict[str, Any]


def quantiles(seconds: Iterable[float], less: float = 0.0) -> list[float]:
    """101 of them, in milliseconds, after `less` is taken away."""
    found = np.percentile(np.array(list(seconds)) * 1e3 - less, np.linspace(0, 100, 101))
    return [round(max(0.0, float(value)), 4) for value in found]


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each call, after a twentieth of them to warm up."""
    for _ in range(max(5, count // 20)):
        call()
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return found


def memory(pids: Iterable[int]) -> float:
    """Megabytes of these processes: what they share counts in proportion."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return round(total / 1024, 1)


def marked() -> list[int]:
    """Processes that were started by this one, and theirs, but for devices: those inherit no environment."""
    mark, found = f"{MARK}={os.getpid()}".encode(), []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def costs(call: Callable[[], object], count: int, pids: Callable[[], Iterable[int]], base: float) -> Way:
    """A way's own time and CPU time for a request. base: the burst's median, in milliseconds."""
    timed(call, 5)
    these = list(pids())
    before = sum(map(cpu_seconds, these))
    its = timed(call, count)
    spent = (sum(map(cpu_seconds, these)) - before) * 1e3 / (count + max(5, count // 20))
    return {"ms": quantiles(its, base), "cpu_ms": round(spent, 3), "mb": memory(these)}


def of_bursts(parts: dict[str, Any], count: int) -> float:
    """The device's own figures, and a burst's. Returns its median."""
    with driver.connect("litert") as device:
        pids = device.service_pid, device.engine_pid
        with device.prepare(mobilenet("float32")) as network, network.burst() as burst:
            image = np.zeros(IMAGE, np.float32)
            parts["execution"] = {
                "model": "MobileNetV1, float32, 224 x 224",
                "ms": quantiles(timed(lambda: burst.run(image), count)),
            }
            parts["device_mb"] = memory(pids)
        with device.prepare(driver.load(FILE)) as small, small.burst(recover=True) as burst:
            its = timed(lambda: burst.run(X), count)
            base = float(np.median(its) * 1e3)
            parts["ways"]["burst"] = costs(lambda: burst.run(X), count, lambda: [os.getpid()], base)
            os.kill(device.engine_pid, signal.SIGKILL)
            parts["device_dies_ms"] = round(timed_once(lambda: burst.run(X)), 1)
    return base


def timed_once(call: Callable[[], object]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def of_serving(count: int, base: float) -> Way:
    """`compiled.serve`, awaited by one task."""

    async def main() -> Way:
        loop = asyncio.get_running_loop()
        async with compiled.serve(replicas=1) as server:

            async def many() -> tuple[list[float], float]:
                found, before = [], cpu_seconds(os.getpid())
                for _ in range(count):
                    begin = loop.time()
                    await server.run(X)
                    found.append(loop.time() - begin)
                return found, (cpu_seconds(os.getpid()) - before) * 1e3 / count

            await many()
            its, spent = await many()
        return {"ms": quantiles(its, base), "cpu_ms": round(spent, 3), "mb": memory([os.getpid()])}

    with driver.compile(driver.load(FILE), devices=["litert"]) as compiled:
        return asyncio.run(main())


def of_oip(count: int, base: float) -> Way:
    """An unmodified client over TCP on this machine, its tensor in the message."""
    from tritonclient import grpc

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "small.tflite").symlink_to(FILE)
        command = [
            sys.executable,
            "-m",
            "driver.cli",
            "serve",
            "litert",
            "--oip",
            "127.0.0.1:0",
            "--models",
            folder,
            "--json",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout
                (address,) = json.loads(server.stdout.readline())["oip"]
                client = grpc.InferenceServerClient(address)
                its = grpc.InferInput("image", list(X.shape), "INT8")
                its.set_data_from_numpy(X)
                return costs(lambda: client.infer("small", [its]), count, lambda: [server.pid], base)
            finally:
                server.terminate()


def of_ray(count: int, base: float) -> tuple[Way, float]:
    """A deployment with one replica, by its handle; then seconds until it was ready."""
    import ray
    import ray_serve
    from ray import serve

    begin = time.monotonic()
    ray.init(resources={"burst_device": 1}, include_dashboard=False, log_to_driver=False)
    handle = serve.run(ray_serve.application(str(FILE), 1))
    handle.classify.remote(X).result()
    ready = time.monotonic() - begin
    found = costs(lambda: handle.classify.remote(X).result(), count, marked, base)
    serve.shutdown()
    ray.shutdown()
    return found, round(ready, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ |= {
        "PYTHONPATH": str(HERE.parent / "examples"),
        "BURST_RUNTIME_DIR": tempfile.mkdtemp(prefix="burst-b-"),
    }
    sys.path.insert(0, str(HERE.parent / "examples"))
    parts: dict[str, Any] = {
        "command": f"python bench/scale_parts.py --requests {args.requests}",
        **conditions(),
        "ways": {},
    }
    base = of_bursts(parts, args.requests)
    parts["small_execution_ms"] = round(base, 3)
    parts["ways"]["compiled.serve"] = of_serving(args.requests, base)
    os.environ[MARK] = str(os.getpid())
    parts["ways"]["burst serve --oip"] = of_oip(args.requests, base)
    parts["ways"]["Ray Serve"], parts["ray_ready_s"] = of_ray(args.requests, base)
    for name, way in parts["ways"].items():
        at = {q: way["ms"][q] for q in (50, 99)}
        print(
            f"{name:<20} adds p50 {at[50]:.2f} ms, p99 {at[99]:.2f} ms; CPU {way['cpu_ms']:.2f} ms; {way['mb']:.0f} MB"
        )
    ms = parts["execution"]["ms"]
    print(f"an execution {ms[50]:.2f} ms, p99 {ms[99]:.2f}; a device {parts['device_mb']} MB")
    print(f"after the death of its device a request takes {parts['device_dies_ms']} ms")
    if args.out:
        args.out.write_text(json.dumps(parts, indent=1) + "\n")


# ---- ray


PIXELS, LEAST = 448, 0.95
ACTORS = (os.cpu_count() or 1) + 1
WARM_UP, REST = 384, 192  # rows that do not count
LOOK = 1.0  # seconds between two looks at CPU times: a look takes milliseconds
sys.path.insert(0, str(HERE.parent / "examples"))


class Took(NamedTuple):
    """Of one run: rows a second, by whom how many CPU milliseconds went into a row, and what outsiders took."""

    rate: float
    device: float
    others: float
    outside: float
    """Processors that programs had which are no part of the run: more than 0.1, and the rate says little."""


class Process(NamedTuple):
    """As /proc has it: its own CPU seconds, and those of its children that ended."""

    parent: int
    seconds: float


def processes() -> dict[int, Process]:
    """All of this machine. One that ends meanwhile is left out."""
    found, tick = {}, os.sysconf("SC_CLK_TCK")
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            found[pid] = Process(int(fields[1]), sum(map(int, fields[11:15])) / tick)
    return found


def descends(pid: int, ancestor: int, from_: dict[int, Process]) -> bool:
    """Also from itself."""
    while pid in from_ and pid != ancestor:
        pid = from_[pid].parent
    return pid == ancestor


def machine_seconds() -> float:
    """Of all processors, what was not idle."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, *interrupts = map(int, fields)
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


class Meter:
    """CPU seconds of devices, and of this process with all that Ray has started for it."""

    def _sums(self) -> tuple[float, float, float]:
        device, others, seen = 0.0, 0.0, processes()
        for pid, its in seen.items():
            if descends(pid, os.getpid(), seen):
                others += its.seconds
            elif self._is_device(pid):
                device += its.seconds
        return device, others, machine_seconds() - device - others

    def _is_device(self, pid: int) -> bool:
        """Services and engines for this place. Each is a child of nothing that is ours."""
        with contextlib.suppress(OSError):
            if b"\0-P\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                return any(value.startswith(self._place) for value in values)
        return False

    def __init__(self, place: str) -> None:
        """`place`: how the runtime directories of the devices begin."""
        self._place = f"BURST_RUNTIME_DIR={place}".encode()

    def _look(self) -> None:
        """In a thread, until the rows are there."""
        while not self._is_over.wait(LOOK):
            self._looks.append((time.monotonic(), *self._sums()))

    def rate(self, done: Iterable[float], rows: int) -> Took:
        """`done`: for each row when it was, with the `rows` that count and those before and after."""
        self._looks, self._is_over = [], threading.Event()
        thread = threading.Thread(target=self._look)
        thread.start()
        ends = np.sort(list(done))
        self._is_over.set()
        thread.join()
        if len(ends) != WARM_UP + rows + REST:
            sys.exit(f"bench: {len(ends)} rows came of {WARM_UP + rows + REST}")
        limits = ends[[WARM_UP, WARM_UP + rows]]
        times, *sums = np.array(self._looks).T
        took = float(limits[1] - limits[0])
        device, others, outside = (float(np.diff(np.interp(limits, times, its))[0]) for its in sums)
        return Took(rows / took, device * 1e3 / rows, others * 1e3 / rows, outside / took)


def model() -> driver.Model:
    return mobilenet("quant8", 1.0, PIXELS)


def read(number: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The model takes unsigned bytes, and the recipe makes signed ones."""
    from ray_data import read_image

    return read_image(number, shape).view(np.uint8)


def loop(device: driver.RemoteDevice, rows: int) -> Iterator[float]:
    """A plain loop on as many bursts as there are actors, in turns: each executes one row at a time."""
    prepared = device.prepare(model(), preference="sustained_speed")
    bursts = [prepared.burst(depth=4, recover=True) for _ in range(ACTORS)]
    waiting: deque[Any] = deque()
    for number in range(WARM_UP + rows + REST):
        image = read(number, (1, PIXELS, PIXELS, 3))
        if len(waiting) == 4 * ACTORS:
            waiting.popleft().result().outputs[0].copy()
            yield time.monotonic()
        waiting.append(bursts[number % ACTORS].submit(image))
    for future in waiting:
        future.result().outputs[0].copy()
        yield time.monotonic()


def pipeline(rows: int) -> Iterator[float]:
    """Ray Data, with the recipe's own actor but for the model."""
    import ray.data
    import ray_data

    class Network(ray_data.Classifier):
        def __init__(self) -> None:
            sys.path.insert(0, str(HERE))  # where an actor finds this file's modules
            ray_data.meet_on_this_node()
            self.device = driver.connect("litert")
            self.open(model(), read)

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            begin, found = time.monotonic(), super().__call__(batch)
            count = len(found["id"])  # one after the other, in equal steps
            return {**found, "at": np.linspace(begin, time.monotonic(), count + 1)[1:]}

    done = ray_data.numbers(WARM_UP + rows + REST).map_batches(
        Network,
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=ACTORS),
        num_cpus=0,
        resources={"burst_device": 1},
    )
    for batch in done.iter_batches(batch_size=None):
        yield from batch["at"].tolist()


def with_ray(rows: int) -> Took:
    """In a cluster that is made for it, and ends with it."""
    import ray

    ray.init(resources={"burst_device": ACTORS}, include_dashboard=False, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        node = ray.get_runtime_context().get_node_id()
        return Meter(f"/tmp/burst-{os.getuid()}-{node[:16]}").rate(pipeline(rows), rows)
    finally:
        ray.shutdown()


def fed(args: argparse.Namespace) -> Finding:
    """A plain loop and Ray Data, in turns."""
    os.environ["PYTHONPATH"] = f"{HERE.parent / 'examples'}:{HERE}"
    os.environ |= {"RAY_DATA_DISABLE_PROGRESS_BARS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    place = tempfile.mkdtemp(prefix="burst-bench-", dir="/tmp")
    os.environ["BURST_RUNTIME_DIR"] = place
    beside, alone = [], []
    for number in range(args.pairs):
        progress(f"round {number + 1} of {args.pairs}")
        with driver.connect("litert") as device:
            alone.append(Meter(place).rate(loop(device, args.images), args.images))
        beside.append(with_ray(args.images))
    progress("")
    found = estimate([b.rate / a.rate for a, b in zip(alone, beside, strict=True)])
    lines = [
        (name, *(f"{value:.2f}" for value in np.median(took, axis=0)))
        for name, took in (("plain loop", alone), ("Ray Data", beside))
    ]
    cpu = estimate([(a.device + a.others) / (b.device + b.others) for a, b in zip(alone, beside, strict=True)])
    budgets = [
        Budget("Ray Data >= 0.95 x the plain loop", found, LEAST, at_least=True),
        Budget("CPU time of the plain loop >= 0.95 x Ray Data's", cpu, LEAST, at_least=True),
    ]
    rows = {"loop": [one._asdict() for one in alone], "ray": [one._asdict() for one in beside]}
    return Finding(lines, budgets, {"ratio": found._asdict(), **rows}, RAY_HEAD)


RAY_HEAD = ("", "rows/s", "device, CPU ms/row", "all else, CPU ms/row", "outsiders, CPUs")
RAY = Inquiry(
    """What is left of a device's throughput when Ray Data feeds it, beside a plain loop on the same cores?

        python bench/scale_parts.py ray [--images N] [--pairs 3] [--json FILE]        # needs the extra `ray`

    MobileNetV1 in bytes for images of 448 x 448, which one core takes about 20 ms for, on the litert device with as
    many executions at once as there are CPUs. The pipeline is that of examples/ray_data.py: an actor more than there
    are CPUs, which make each image from its row's number in place of a file. The plain loop makes the same images and
    has four in flight in each of as many bursts. Each takes its turn in every round, and Ray runs in its own turns
    only. A row is done when its answer is, by the clock of the process that got it: Ray delivers rows late and many
    at once. Rates and CPU times are of N images after a warm-up, in which Ray starts its actors, and before a rest,
    in which some actors have nothing left to do.
    """,
    fed,
    options={"--images": {"type": int, "default": 1000, "help": "a round and subject (default 1000)"}},
    pairs=3,
)


if __name__ == "__main__":
    ask({"": main, "ray": RAY.answer})
