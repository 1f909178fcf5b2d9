"""Make docs/camera.webp: some seconds of the camera demo's scene, with what the network found in each frame.

    python docs/camera_picture.py     needs the extra `demo`; half a minute

Every frame goes through the burst, as in `burst demo camera`; Pillow writes the picture.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from driver.demos.camera import FrameResult, connected
from driver.demos.camera_sources import Clock, open_source
from driver.demos.drawing import annotate

FRAMES, EVERY, FPS = 180, 2, 30  # 6 s of a camera's 30 frames a second, of which every other one is shown
SIZE = (480, 360)
SEED = 0


def pictures(steps: Iterable[FrameResult]) -> Iterator[Image.Image]:
    """Every other frame, annotated; with the medians until then, for single calls are too quick to be read."""
    times: dict[str, list[float]] = {"burst": [], "plain RPC": []}
    for step in steps:
        for path, call in step.calls.items():
            times[path].append(1e3 * call.seconds)
        if step.index % EVERY == 0:
            yield picture(step, "   ".join(f"{path} {median(ms):.1f} ms" for path, ms in times.items()))


def picture(step: FrameResult, caption: str) -> Image.Image:
    """One frame, annotated."""
    return Image.fromarray(np.ascontiguousarray(annotate(step.frame, step.found, caption))).resize(SIZE, Image.LANCZOS)


def main() -> None:
    """Record and write."""
    with connected("reference") as detector:
        steps = islice(detector.watch(open_source("scene", SEED, FPS), Clock(fps=0)), FRAMES)
        first, *others = pictures(steps)
    path = Path(__file__).with_name("camera.webp")
    first.save(path, save_all=True, append_images=others, duration=1000 * EVERY // FPS, loop=0, quality=45, method=6)
    print(f"{path.name}: {1 + len(others)} frames, {path.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
