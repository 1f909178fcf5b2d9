"""What is left of a device's throughput when Ray Data feeds it, beside a plain loop on the same cores?

    python bench/ray_pipeline.py [--images N] [--rounds N] [--json FILE]        # needs the extra `ray`

MobileNetV1 in bytes for images of 448 x 448, which one core takes about 20 ms for, on the litert device with as many
executions at once as there are CPUs. The pipeline is that of examples/ray_data.py: two actors, batches of 16, images
that are made from their row's number in place of files. The plain loop makes the same images and has four in flight in
each of two bursts. Each takes its turn in every round. A row is done when its answer is, by the clock of the process
that got it: Ray delivers rows late and many at once. Rates and CPU times are of the middle half of the rows: at first a
pipeline starts its actors for seconds, and at the end some have nothing to do, which long runs do not feel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from measure import HERE, conditions
from models import mobilenet
from verdict import Budget

import driver
from driver.cli.timing import estimate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

QUESTION = "What is left of a device's throughput when Ray Data feeds it?"
PIXELS, ACTORS, LEAST = 448, 2, 0.95
MARK = "BURST_RAY_BENCH"
LOOK = 0.1  # seconds between two looks at CPU times
sys.path.insert(0, str(HERE.parent / "examples"))


class Took(NamedTuple):
    """Of one run: rows a second, and by whom how many CPU milliseconds went into a row."""

    rate: float
    device: float
    others: float


def opened(device: driver.RemoteDevice) -> driver.Burst:
    """The burst of the loop, and of each actor."""
    return device.prepare(mobilenet("quant8", 1.0, PIXELS), preference="sustained_speed").burst(depth=4, recover=True)


def cpu_seconds(pid: int) -> float:
    """Of a process; 0 when it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


class Meter:
    """CPU seconds of devices, and of this process with all that Ray has started for it."""

    def _sums(self) -> tuple[float, float]:
        mark, device, others = f"{MARK}={os.getpid()}".encode(), 0.0, time.process_time()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                is_device = b"\0-P\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
                if is_device and any(value.startswith(self._place) for value in values):
                    device += cpu_seconds(pid)
                elif mark in values and pid != os.getpid():
                    others += cpu_seconds(pid)
        return device, others

    def __init__(self, place: str) -> None:
        """`place`: how the runtime directories of the devices begin."""
        self._place = f"BURST_RUNTIME_DIR={place}".encode()

    def _look(self) -> None:
        """In a thread, until the rows are there."""
        while not self._is_over.wait(LOOK):
            self._looks.append((time.monotonic(), *self._sums()))

    def rate(self, done: Iterable[float], rows: int) -> Took:
        """`done`: for each row when it was."""
        self._looks, self._is_over = [], threading.Event()
        thread = threading.Thread(target=self._look)
        thread.start()
        ends = np.sort(list(done))
        self._is_over.set()
        thread.join()
        if len(ends) != rows:
            sys.exit(f"bench: {len(ends)} rows came of {rows}")
        middle = ends[[rows // 4, 3 * rows // 4]]
        times, *sums = np.array(self._looks).T
        device, others = (float(np.diff(np.interp(middle, times, its))[0]) * 1e3 * 2 / rows for its in sums)
        return Took(rows / 2 / float(middle[1] - middle[0]), device, others)


def loop(bursts: list[driver.Burst], rows: int) -> Iterator[float]:
    """A plain loop on as many bursts as there are actors, in turns: each executes one row at a time."""
    from ray_data import images

    waiting: deque[Any] = deque()
    for number in range(rows):
        image = made(images({"id": [number]}, (1, PIXELS, PIXELS, 3)))["image"][0]
        if len(waiting) == 4 * len(bursts):
            waiting.popleft().result().outputs[0].copy()
            yield time.monotonic()
        waiting.append(bursts[number % len(bursts)].submit(image))
    for future in waiting:
        future.result().outputs[0].copy()
        yield time.monotonic()


def made(batch: dict[str, Any]) -> dict[str, Any]:
    """The model takes unsigned bytes, and the recipe makes signed ones."""
    return {**batch, "image": batch["image"].view(np.uint8)}


def pipeline(rows: int) -> Iterator[float]:
    """Ray Data, with the recipe's own actor but for the model."""
    import ray.data
    import ray_data

    class Network(ray_data.Classifier):
        def __init__(self) -> None:
            sys.path.insert(0, str(HERE))  # where an actor finds this file's modules
            ray_data.meet_on_this_node()
            self.device = driver.connect("litert")
            self.burst = opened(self.device)

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            begin, found = time.monotonic(), super().__call__(batch)
            count = len(found["id"])  # one after the other, in equal steps
            return {**found, "at": np.linspace(begin, time.monotonic(), count + 1)[1:]}

    numbers = ray.data.range(rows, override_num_blocks=rows // ray_data.BATCH)
    shape = {"shape": (1, PIXELS, PIXELS, 3)}
    ready = numbers.map_batches(ray_data.images, batch_size=ray_data.BATCH, fn_kwargs=shape).map_batches(made)
    done = ready.map_batches(
        Network,
        batch_size=ray_data.BATCH,
        compute=ray.data.ActorPoolStrategy(size=ACTORS),
        num_cpus=0,
        resources={"burst_device": 1},
    )
    for batch in done.select_columns(["at"]).iter_batches(batch_size=None):
        yield from batch["at"].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=960, help="a round and subject (default 960)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    import ray

    os.environ |= {MARK: str(os.getpid()), "PYTHONPATH": f"{HERE.parent / 'examples'}:{HERE}"}
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    place = tempfile.mkdtemp(prefix="burst-bench-", dir="/tmp")
    os.environ["BURST_RUNTIME_DIR"] = place
    ray.init(resources={"burst_device": ACTORS}, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    node = ray.get_runtime_context().get_node_id()
    beside, alone, rays = [], [], Meter(f"/tmp/burst-{os.getuid()}-{node[:16]}")
    for _ in range(args.rounds):
        with driver.connect("litert") as device:
            bursts = [opened(device) for _ in range(ACTORS)]
            alone.append(Meter(place).rate(loop(bursts, args.images), args.images))
        beside.append(rays.rate(pipeline(args.images), args.images))
        print(f"loop {alone[-1]}\nRay Data {beside[-1]}", flush=True)
    ray.shutdown()
    found = estimate([b.rate / a.rate for a, b in zip(alone, beside, strict=True)])
    print(f"\n{'':<14}{'rows/s':>8}{'device, CPU ms/row':>20}{'all else, CPU ms/row':>22}")
    for name, took in (("plain loop", alone), ("Ray Data", beside)):
        rate, device, others = np.median(took, axis=0)
        print(f"{name:<14}{rate:>8.1f}{device:>20.1f}{others:>22.1f}")
    print(Budget("Ray Data >= 0.95 x the plain loop", found, LEAST, at_least=True).line())
    if args.json:
        rows = {"loop": [one._asdict() for one in alone], "ray": [one._asdict() for one in beside]}
        args.json.write_text(json.dumps({"question": QUESTION, **conditions(), "ratio": found._asdict(), **rows}))


if __name__ == "__main__":
    main()
