"""Ray Data on one device per node: all actors of a node share its device, and with it one copy of the weights.

    pip install 'burst-engine[litert]' 'ray[data]'
    ray start --head --resources '{"burst_device": 4}'        # on each node: how many actors may share its device
    python examples/ray_data.py model.tflite --rows 1000 --actors 4

Without a cluster it makes one of this machine. The first actor of a node starts the device, the others find it, and the
device ends after the last of them. A device that dies is started again, and what it had not answered is executed again;
an actor or a node that dies is replaced by Ray, which gives the batch to another. So each row comes out once.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from typing import Any

import numpy as np
import ray
import ray.data
from ray.data import ActorPoolStrategy

import driver

DEPTH = 4  # requests of one actor in flight: the next ones wait at the device while it works
BATCH = 16  # rows: what an actor that dies has to do again


def meet_on_this_node() -> None:
    """Actors of one account on one node meet in one runtime directory, and so at one device.

    Where a node is a machine the usual directory would do. Here several nodes may be on one machine, as in tests.
    """
    node = ray.get_runtime_context().get_node_id()
    os.environ["BURST_RUNTIME_DIR"] = f"/tmp/burst-{os.getuid()}-{node[:16]}"


class Classifier:
    """An actor. It only hands rows over: the work is done in the device's process."""

    def __init__(self, path: str, device: str) -> None:
        meet_on_this_node()
        self.device = driver.connect(device)
        self.model = self.device.prepare(driver.load(path), preference="sustained_speed")
        self.burst = self.model.burst(depth=DEPTH, recover=True)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The rows of `batch` with an answer each, copied out of the shared memory in which results are."""
        answers, waiting = [], deque()
        for image in batch.pop("image"):
            if len(waiting) == DEPTH:
                answers.append(waiting.popleft().result().outputs[0].copy())
            waiting.append(self.burst.submit(image))
        answers.extend(future.result().outputs[0].copy() for future in waiting)
        return {**batch, "answer": np.stack(answers)}


def images(batch: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Rows with an image each, in place of files that a program of yours would read. The same for the same row."""
    made = [np.random.default_rng(number).integers(-128, 128, shape, np.int8) for number in batch["id"]]
    return {**batch, "image": np.stack(made)}


def classified(path: str, rows: int, actors: int, device: str = "litert") -> ray.data.Dataset:
    """The pipeline. Each actor takes a `burst_device` of its node; a batch is repeated until an actor has done it."""
    info = driver.load(path).inputs[0]
    numbers = ray.data.range(rows, override_num_blocks=max(1, rows // (4 * BATCH)))
    made = numbers.map_batches(images, batch_size=BATCH, fn_kwargs={"shape": tuple(info.shape)})
    return made.map_batches(
        Classifier,
        fn_constructor_kwargs={"path": os.path.abspath(path), "device": device},
        batch_size=BATCH,
        compute=ActorPoolStrategy(size=actors),
        num_cpus=0,  # the device has the work
        resources={"burst_device": 1},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .tflite or .onnx file that lies at this path on each node")
    parser.add_argument("--device", default="litert")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--actors", type=int, default=2)
    its = parser.parse_args()
    if not (os.environ.get("RAY_ADDRESS") or ray.is_initialized()):
        ray.init(resources={"burst_device": its.actors}, include_dashboard=False)
    begin, found = time.monotonic(), 0
    for batch in classified(its.model, its.rows, its.actors, its.device).iter_batches():
        found += len(batch["id"])
    print(f"{found} rows in {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
