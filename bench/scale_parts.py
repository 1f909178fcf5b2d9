"""What do the parts cost of which a service on one node to a thousand is made?

    python bench/scale_parts.py [--requests N] [--out examples/scale.json]        # needs the extras oip and ray

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
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import HERE, conditions
from models import IMAGE, mobilenet
from ray_pipeline import cpu_seconds

import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


if __name__ == "__main__":
    main()
