"""The camera demo on a real camera: the device reads frames in the camera's own buffers, and nothing is copied.

The camera's driver is asked for nv12, which most cameras with a processor of their own deliver; the network converts
the pixels that it looks at. A camera without it, as most on USB are, is read by FFmpeg (`camera_sources`).
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np

import burst
import driver
from driver.demos.camera import TIMEOUT, WARM_UP, FrameResult
from driver.demos.detector import build_model, decode, outputs_of
from driver.demos.latencies import TimedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def open_camera(spec: str, fps: float, size: tuple[int, int], **how: Any) -> driver.Camera | None:
    """The camera that `--source` names, newest frame first; None where it names none. Raises CameraFailed."""
    if not Path(spec).is_char_device():
        return None
    return driver.Camera(spec, "nv12", *size, fps=fps or None, newest=True, **how)


@contextmanager
def connected_camera(camera: driver.Camera, device: str, **how: Any) -> Iterator[BufferDetector]:
    """The network on a device, for this camera's frames. `how`: options of `burst`, such as `spin`."""
    with (
        driver.connect(device) as remote,
        remote.prepare(build_model(camera.width, camera.height, pixels="nv12")) as prepared,
        prepared.burst(measure=True, recover=True, **how) as fast,
    ):
        yield BufferDetector(prepared, fast, camera)


class BufferDetector:
    """Both ways to the network, for each of the camera's buffers."""

    def __init__(self, prepared: driver.RemotePreparedModel, fast: driver.Burst, camera: driver.Camera) -> None:
        """Makes a request for each buffer, once."""
        self.fast, self.camera = fast, camera
        sizes = [4 * math.prod(shape) for shape in outputs_of(camera.width, camera.height)]
        results = driver.Memory.create(sum(sizes))
        outputs = tuple(
            burst.RequestArgument(pool=1, offset=sum(sizes[:i]), length=size) for i, size in enumerate(sizes)
        )
        requests = [burst.Request((burst.RequestArgument(),), outputs, (frame, results)) for frame in camera.buffers]
        self.paths: dict[str, Callable[[int], burst.Result]] = {
            "burst": lambda n: fast.execute(requests[n], measure=True, timeout=TIMEOUT),
            "plain RPC": lambda n: prepared.execute(requests[n], measure=True, timeout=TIMEOUT),
        }
        for run in self.paths.values():
            for n in range(WARM_UP):
                run(n % len(requests)).raise_for_status()

    def watch(self) -> Iterator[FrameResult]:
        """Frame after frame, until the camera is unplugged."""
        for index, frame in enumerate(self.camera):
            calls, found = {}, []
            for path in sorted(self.paths, reverse=index % 2 == 1):
                start = time.perf_counter()
                result = self.paths[path](frame.index)
                calls[path] = TimedCall(time.perf_counter() - start, result.timing.time_on_device)
                result.raise_for_status()
                if path == "burst":
                    found = decode(result.outputs)
            counts = self.camera.stats()
            yield FrameResult(index, picture(frame.memory), found, None, calls, counts["missed"] + counts["skipped"])

    def stats(self) -> dict[str, Any]:
        """What the burst counted."""
        return self.fast.stats()


def picture(frame: driver.HardwareBuffer) -> np.ndarray:
    """A copy in RGB, for the film and the pictures."""
    planes = frame.read()[0, :, :, 0]
    return np.asarray(av.VideoFrame.from_ndarray(planes, format="nv12").to_ndarray(format="rgb24"))
