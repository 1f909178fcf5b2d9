"""What does a camera's frame cost on its way to a result, beside the same model on the same buffer without a camera?

    python bench/cameras.py [--device litert] [--pairs 9] [--json FILE]

Frames of 1920 x 1080 in nv12 lie in buffers that a camera has exported, and the camera demo's detector runs on them:
the network itself converts the pixels that it looks at. The camera is a fake (tests/fake_camera.py) that answers the
ioctls in this process and has the next frame at once, so its row holds all that `driver.Camera` does for a frame:
waiting, taking, giving back. No camera: the same burst on the same buffers; frames with and without a camera take turns
one by one. Without a model is a frame that is taken and given back, also one of a webcam's, which is decoded from JPEG.
At the end the burst says how much it copied.
Memory: what the device's two processes keep for themselves with one such camera and with eight, each in a thread of its
own, on one prepared model; buffers of cameras belong to the cameras.
"""

from __future__ import annotations

import math
import re
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import simplejpeg
from measure import HERE, Runs, conditions, percentiles, pin_client, scratch
from own_device import own_device, pin
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import driver
from burst import Request, RequestArgument
from driver.cli.timing import Estimate, estimate, time_calls
from driver.demos.detector import build_model, outputs_of
from driver.demos.scene import Scene

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from driver import Burst, Camera, RemoteDevice, RemotePreparedModel

sys.path.append(str(HERE.parent / "tests"))
from fake_camera import FakeCamera

QUESTION = "What does a camera's frame cost on its way to a result, beside the same model without a camera?"
HEAD = ("", "us per frame", "x without a camera")
CAMERA, ALONE = "camera to result, 1080p nv12", "the same buffers, no camera"
TAKEN = "a frame taken and given back, no model"
DECODED = "the same of MJPG, which is decoded"
WIDTH, HEIGHT, CAMERAS = 1920, 1080, 8
MOST, MOST_MEMORY = 1.05, 1.1


def opened(folder: Path, number: int, stack: ExitStack) -> Camera:
    """A fake camera that always has the next frame, whose buffers hold noise that stays."""
    fake = FakeCamera(folder / f"video{number}", size=(WIDTH, HEIGHT), free_running=True, fill=lambda *_: None)
    stack.callback(fake.close)
    camera = stack.enter_context(driver.Camera(fake.path, "nv12", WIDTH, HEIGHT, ioctl=fake.ioctl))
    for room in fake.rooms:
        room[:] = np.random.default_rng(number).integers(0, 256, room.size, np.uint8)
    return camera


def webcam(folder: Path, stack: ExitStack) -> Camera:
    """A fake camera that always has the next JPEG of the demo's scene, which stays in its buffers."""
    picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    Scene(0, WIDTH, HEIGHT).render(picture)
    data = np.frombuffer(simplejpeg.encode_jpeg(picture, 85, colorsubsampling="422"), np.uint8)
    fake = FakeCamera(folder / "webcam", ("MJPG",), (WIDTH, HEIGHT), free_running=True, fill=lambda *_: len(data))
    stack.callback(fake.close)
    camera = stack.enter_context(driver.Camera(fake.path, "rgb", WIDTH, HEIGHT, ioctl=fake.ioctl))
    for room in fake.rooms:
        room[: len(data)] = data
    return camera


def requests_of(camera: Camera) -> list[Request]:
    """One for each of its buffers."""
    sizes = [4 * math.prod(shape) for shape in outputs_of(WIDTH, HEIGHT)]
    results = driver.Memory.create(sum(sizes))
    outputs = RequestArgument(pool=1, length=sizes[0]), RequestArgument(pool=1, offset=sizes[0], length=sizes[1])
    return [Request((RequestArgument(),), outputs, (buffer, results)) for buffer in camera.buffers]


def ways(camera: Camera, burst: Burst) -> dict[str, Callable[[], object]]:
    """A frame of the camera, and the same execution without it; and a frame without a model."""
    requests, turn = requests_of(camera), [0]

    def filmed() -> object:
        with camera.next_frame() as frame:
            return burst.execute(requests[frame.index])

    def alone() -> object:
        turn[0] = (turn[0] + 1) % len(requests)
        return burst.execute(requests[turn[0]])

    for request in requests:
        burst.execute(request).raise_for_status()
    return {CAMERA: filmed, ALONE: alone, TAKEN: lambda: camera.next_frame().release()}


def private(device: RemoteDevice) -> float:
    """Megabytes that both processes keep and share with none."""
    kilobytes = 0
    for pid in (device.service_pid, device.engine_pid):
        roll = Path(f"/proc/{pid}/smaps_rollup").read_text()
        kilobytes += sum(map(int, re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+)", roll, re.MULTILINE)))
    return kilobytes / 1024


def filmed_by(count: int, device_name: str, frames: int) -> float:
    """Megabytes of a fresh device after so many cameras have had their frames through one prepared model."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        device = stack.enter_context(own_device(device_name))
        prepared = stack.enter_context(device.prepare(build_model(WIDTH, HEIGHT, pixels="nv12")))
        films = [_film(opened(folder, number, stack), prepared, frames, stack) for number in range(count)]
        threads = [threading.Thread(target=film) for film in films]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return private(device)


def _film(camera: Camera, prepared: RemotePreparedModel, frames: int, stack: ExitStack) -> Callable[[], None]:
    burst, requests = stack.enter_context(prepared.burst()), requests_of(camera)

    def film() -> None:
        for frame, _ in zip(camera, range(frames), strict=False):
            burst.execute(requests[frame.index]).raise_for_status()

    return film


def run(args: argparse.Namespace) -> tuple[Runs, int]:
    """All rounds, in turns; and the bytes that the burst has copied."""
    runs = Runs()
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        device = stack.enter_context(own_device(args.device))
        prepared = stack.enter_context(device.prepare(build_model(WIDTH, HEIGHT, pixels="nv12")))
        burst = stack.enter_context(prepared.burst())
        calls, jpegs = ways(opened(folder, 0, stack), burst), webcam(folder, stack)
        for number in range(args.pairs):
            progress(f"round {number + 1} of {args.pairs}", CAMERA)
            pin(device)
            times: dict[str, list[Any]] = {name: [] for name in calls}
            for _ in range(args.count):
                for name, call in calls.items():
                    times[name].append(time_calls(call, 1))
            # By itself: a picture that is decoded leaves nothing of other frames in the caches.
            times[DECODED] = [time_calls(lambda: jpegs.next_frame().release(), args.count)]
            for name, blocks in times.items():
                runs.blocks.setdefault(name, []).append(percentiles(np.concatenate(blocks)))
        return runs, int(burst.stats()["copied_bytes"]["bulk"])


def exactly(value: float) -> Estimate:
    """A figure that was counted once."""
    return Estimate(value, value, value, 1.0)


def main() -> None:
    """Measures, prints, writes."""
    parser = arguments(__doc__)
    parser.add_argument("--device", default="litert", help="which runs the network")
    parser.add_argument("--count", type=int, default=40, help="frames of a block")
    args = parse(parser)
    if args.quick:
        args.count = 3
    pin_client()
    found = conditions()
    runs, copied = run(args)
    progress("memory")
    one, many = (filmed_by(count, args.device, args.count) for count in (1, CAMERAS))
    progress("")
    ratio = estimate(runs.values(CAMERA) / runs.values(ALONE))
    lines = [(name, spell(estimate(runs.values(name))), spell(ratio) if name == CAMERA else "") for name in runs.blocks]
    lines += [
        (f"memory of the device, {n} camera{'s' * (n > 1)}", f"{mb:.1f} MB", "")
        for n, mb in ((1, one), (CAMERAS, many))
    ]
    budgets = [
        Budget("bytes of frames copied", exactly(copied), 0, "bytes"),
        Budget(f"camera to result: <= {MOST} x without a camera", ratio, MOST),
        Budget(f"memory with {CAMERAS} cameras: <= {MOST_MEMORY} x with one", exactly(many / one), MOST_MEMORY),
    ]
    rows: list[dict[str, Any]] = [{"name": name, "ours": True, "rounds": runs.blocks[name]} for name in runs.blocks]
    body = {"rows": rows, "copied_bytes": copied, "memory_mb": [one, many]}
    publish(args, Report(QUESTION, found, lines, budgets, body, HEAD))
    if args.plot:
        import plots

        figures = {name: float(np.median(runs.values(name))) for name in runs.blocks}
        plots.bars(args.plot, figures, "us per frame", QUESTION)


if __name__ == "__main__":
    main()
