"""Ray Serve on one device per node: replicas hand requests over, and the device's process does the work.

    pip install 'burst-engine[litert]' 'ray[serve]'
    ray start --head --resources '{"burst_device": 4}'        # on each node: how many replicas may share its device
    python examples/ray_serve.py model.tflite --replicas 2
    curl --data-binary @image.npy http://127.0.0.1:8000/ --output answer.npy

Without a cluster it makes one of this machine. Replicas are placed by the resource `burst_device`; those of a node
share its device. A replica that fails its health check, which is an execution, is replaced by Ray Serve.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import serve
from ray_data import meet_on_this_node
from starlette.responses import Response

import driver

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from starlette.requests import Request

DEPTH = 4  # requests of a replica at the device: one is executed, the others wait there


@serve.deployment(
    max_ongoing_requests=2 * DEPTH,
    max_queued_requests=64,
    ray_actor_options={"num_cpus": 0, "resources": {"burst_device": 1}},
)
class Classifier:
    """A replica: no thread waits, its event loop does."""

    def __init__(self, path: str, device: str) -> None:
        meet_on_this_node()
        self.device = driver.connect(device)
        model = driver.load(path)
        self.burst = self.device.prepare(model).burst(depth=DEPTH, recover=True)
        self.nothing = np.zeros(model.inputs[0].shape, model.inputs[0].dtype)

    async def classify(self, image: NDArray[Any], timeout: float | None = None) -> NDArray[Any]:
        """By a handle. An error of the device comes to the caller as itself: `driver.InvalidArgument` and others."""
        result = await self.burst.run_async(image, timeout=timeout)
        return result.outputs[0].copy()  # out of shared memory, before Ray has it

    async def __call__(self, request: Request) -> Response:
        """By HTTP: one .npy file there, one back."""
        try:
            answer = await self.classify(np.load(io.BytesIO(await request.body()), allow_pickle=False))
        except ValueError as error:  # also InvalidArgument
            return Response(f"{error}\n", status_code=400, media_type="text/plain")
        file = io.BytesIO()
        np.save(file, answer)
        return Response(file.getvalue(), media_type="application/octet-stream")

    async def check_health(self) -> None:
        """An execution that fails, or takes 20 s, has this replica replaced."""
        await self.classify(self.nothing, timeout=20)


def application(path: str, replicas: int, device: str = "litert") -> serve.Application:
    """What `serve.run` takes."""
    return Classifier.options(num_replicas=replicas).bind(os.path.abspath(path), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .tflite or .onnx file that lies at this path on each node")
    parser.add_argument("--device", default="litert")
    parser.add_argument("--replicas", type=int, default=2)
    its = parser.parse_args()
    if not os.environ.get("RAY_ADDRESS"):
        ray.init(resources={"burst_device": its.replicas}, include_dashboard=False)
    serve.run(application(its.model, its.replicas, its.device))
    print("serving on http://127.0.0.1:8000/ until Ctrl-C", flush=True)
    signal.sigwait([signal.SIGINT, signal.SIGTERM])
    serve.shutdown()


if __name__ == "__main__":
    main()
