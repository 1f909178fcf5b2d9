"""Ray Data on one device per node: all actors of a node share its device, and with it one copy of the weights.

    pip install 'burst-engine[litert]' 'ray[data]'
    ray start --head --resources '{"burst_device": 4}'        # on each node: how many actors may share its device
    python examples/ray_data.py model.tflite --rows 1000 --actors 4

Without a cluster it makes one of this machine. The first actor of a node starts the device, the others find it, and the
device ends after the last of them. A device that dies is started again, and what it had not answered is executed again;
an actor or a node that dies is replaced by Ray, which gives the block to another. So each row comes out once.

Three things keep Ray's own CPU time near a millisecond a row. Actors read the images themselves, so that only numbers
(or paths) and answers pass Ray's object store. Ray has work for each block, so a block has many rows. And there is one
actor more than the device has executions at once: while an actor hands a block back, the others keep the device busy.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import ray.data
from ray.data import ActorPoolStrategy

import driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Read = Callable[[Any, tuple[int, ...]], NDArray[Any]]

DEPTH = 4  # requests of one actor in flight: the next ones wait at the device while it works
BLOCK = 64  # rows: what Ray hands to an actor at once, and what is done again when the actor dies


def meet_on_this_node() -> None:
    """Actors of one account on one node meet in one runtime directory, and so at one device.

    Where a node is a machine the usual directory would do. Here several nodes may be on one machine, as in tests.
    """
    node = ray.get_runtime_context().get_node_id()
    os.environ["BURST_RUNTIME_DIR"] = f"/tmp/burst-{os.getuid()}-{node[:16]}"


def read_image(number: int, shape: tuple[int, ...]) -> NDArray[np.int8]:
    """One image, in place of a file that a program of yours would open and decode. The same for the same number."""
    return np.random.default_rng(number).integers(-128, 128, shape, np.int8)


class Classifier:
    """An actor. It reads images and hands them over: the work is done in the device's process."""

    def __init__(self, path: str, device: str, read: Read = read_image) -> None:
        meet_on_this_node()
        self.device = driver.connect(device)
        self.open(driver.load(path), read)

    def open(self, model: driver.Model, read: Read) -> None:
        """A burst for `model`, whose images `read` makes of what a row says and of a shape."""
        self.read, self.shape, self.dtype = read, tuple(map(int, model.inputs[0].shape)), model.inputs[0].dtype
        self.burst = self.device.prepare(model, preference="sustained_speed").burst(depth=DEPTH, recover=True)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The rows of `batch` with an answer each, copied out of the shared memory in which results are."""
        answers, waiting = [], deque()
        for number in batch["id"]:
            image = self.read(number, self.shape).astype(self.dtype, copy=False)
            if len(waiting) == DEPTH:
                answers.append(waiting.popleft().result().outputs[0].copy())
            waiting.append(self.burst.submit(image))
        answers.extend(future.result().outputs[0].copy() for future in waiting)
        return {**batch, "answer": np.stack(answers)}


def numbers(rows: int) -> ray.data.Dataset:
    """The rows, in blocks."""
    return ray.data.range(rows, override_num_blocks=-(-rows // BLOCK))


def classified(path: str, rows: int, actors: int, device: str = "litert") -> ray.data.Dataset:
    """The pipeline. Each actor takes a `burst_device` of its node; a block is repeated until an actor has done it."""
    context = ray.data.DataContext.get_current()
    context.actor_init_retry_on_errors = True  # a device may die while an actor prepares its model there
    return numbers(rows).map_batches(
        Classifier,
        fn_constructor_kwargs={"path": os.path.abspath(path), "device": device},
        batch_size=None,  # a block
        compute=ActorPoolStrategy(size=actors),
        num_cpus=0,  # the device has the work
        resources={"burst_device": 1},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .tflite or .onnx file that lies at this path on each node")
    parser.add_argument("--device", default="litert")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--actors", type=int, default=(os.cpu_count() or 1) + 1)
    its = parser.parse_args()
    if not (os.environ.get("RAY_ADDRESS") or ray.is_initialized()):
        ray.init(resources={"burst_device": its.actors}, include_dashboard=False)
    begin, found = time.monotonic(), 0
    for batch in classified(its.model, its.rows, its.actors, its.device).iter_batches():
        found += len(batch["id"])
    print(f"{found} rows in {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
