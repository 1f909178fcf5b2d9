"""Find moving objects in a camera's frames, with the network in another process.

    python examples/camera.py                       a generated scene, 30 frames a second
    python examples/camera.py --source film.mp4     a video file: anything FFmpeg reads
    python examples/camera.py --source /dev/video0  a V4L2 camera
    python examples/camera.py --fps 0               as fast as it goes

Every frame is written straight into the burst's input, which the device process sees too: nothing is copied on the way.
The same frame then goes to the same device over the plain RPC path. The run leaves an annotated video, a picture of the
latencies of both paths and a picture of one frame in --out, and closes with a table. It needs no display and no camera.
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from boxes import Agreement
from detector import FRAME, OUTPUTS, build_model, decode
from drawing import Film, annotate
from report import Latencies, draw_frame, draw_latencies, latency_table, summary_table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sources import HEIGHT, WIDTH, Clock, Source, open_source

import burst
import driver

if TYPE_CHECKING:
    from boxes import Box

TIMEOUT = 5.0  # seconds for one execution
WARM_UP = 20  # calls on each path before anything is measured
REFRESH = 10  # frames between two updates of the progress bar


def plain_request() -> burst.Request:
    """Lay out the same execution for the plain path, in shared memory as well: the frame, then both outputs."""
    sizes = [math.prod(FRAME), *(4 * math.prod(shape) for shape in OUTPUTS)]
    memory = driver.Memory.create(sum(sizes))
    frame, *outputs = (burst.RequestArgument(offset=sum(sizes[:i]), length=size) for i, size in enumerate(sizes))
    return burst.Request((frame,), tuple(outputs), (memory,))


class Demo:
    """One run: frames from a source through both paths to the device."""

    def __init__(self, prepared: driver.RemotePreparedModel, fast: driver.Burst, source: Source) -> None:
        self.source, self.fast = source, fast
        self.frame = fast.inputs[0][0]  # uint8 [480, 640, 3], in memory shared with the device
        request = plain_request()
        self.plain_frame = request.pools[0].asarray(np.uint8, self.frame.shape)
        self.calls = {
            "burst": lambda: fast.run(timeout=TIMEOUT),
            "plain RPC": lambda: prepared.execute(request, measure=True, timeout=TIMEOUT),
        }
        self.latencies = {path: Latencies() for path in self.calls}
        self.agreement = Agreement()
        self.sample: tuple[np.ndarray, list[Box], list[Box] | None] | None = None

    def warm_up(self) -> None:
        """Let both paths map their memory and fill their caches."""
        for call in self.calls.values():
            for _ in range(WARM_UP):
                call().raise_for_status()

    def step(self, index: int, keep: bool) -> list[Box]:
        """Take one frame through both paths and return what the burst found in it."""
        truth = self.source.read(self.frame)
        self.plain_frame[...] = self.frame
        found: list[Box] = []
        for path in sorted(self.calls, reverse=index % 2 == 1):  # in turns: neither always comes second
            start = time.perf_counter()
            result = self.calls[path]()
            self.latencies[path].add(time.perf_counter() - start, result.timing.time_on_device)
            result.raise_for_status()
            if path == "burst":
                found = decode(result.outputs)  # before the next run: the outputs are views of shared memory
        if truth is not None:
            self.agreement.count(found, truth)
        if keep:
            self.sample = self.frame.copy(), found, truth
        return found


def run(demo: Demo, args: argparse.Namespace, film: Film | None, console: Console) -> Clock:
    """Show the demo `args.frames` frames on schedule; Ctrl-C ends it early."""
    columns = "[bold]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    times = "burst {task.fields[burst]:.2f} ms · plain {task.fields[plain]:.2f} ms"
    facts = TextColumn(times + " · dropped {task.fields[lost]}")
    demo.warm_up()
    # The bar is refreshed by hand, between frames: a thread of its own would disturb what is measured.
    with Progress(*columns, facts, console=console, auto_refresh=False) as progress:
        task = progress.add_task("frames", total=args.frames, burst=0.0, plain=0.0, lost=0)
        clock = Clock(args.fps)
        try:
            for index in range(args.frames):
                demo.source.skip(clock.tick())
                found = demo.step(index, keep=index in {0, args.frames // 2})
                fast, slow = (latencies.latest for latencies in demo.latencies.values())
                if film is not None:
                    caption = f"frame {index}  burst {fast:.2f} ms  plain {slow:.2f} ms  dropped {clock.dropped}"
                    film.add(annotate(demo.frame, found, caption))
                progress.update(task, advance=1, burst=fast, plain=slow, lost=clock.dropped)
                if index % REFRESH == 0:
                    progress.refresh()
        except KeyboardInterrupt:
            console.print("stopped early")
    return clock


def report(demo: Demo, clock: Clock, args: argparse.Namespace, console: Console) -> None:
    """Leave the pictures and print the tables."""
    seen = len(demo.latencies["burst"])
    if not seen:
        return
    stats = demo.fast.stats()
    runs, copied = stats["runs"], stats["copied_bytes"]["bulk"]
    facts = {
        "source": demo.source.name,
        "frames": f"{seen} seen, {clock.dropped} dropped",
        "burst": f"{runs['burst']} runs ({WARM_UP} to warm up), {runs['plain']} fell back, {copied} frame bytes copied",
    }
    files = [args.out / "latency.png"] + [args.out / Film.NAME] * (not args.no_video)
    draw_latencies(files[0], demo.latencies, demo.source.name)
    if demo.sample is not None:
        files.append(args.out / "frame.png")
        draw_frame(files[-1], *demo.sample)
    console.print(summary_table(facts, demo.agreement, files))
    console.print(latency_table(demo.latencies))


def arguments() -> argparse.Namespace:
    """Read the command line and refuse what cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--source", default="scene", help="'scene', a video file or /dev/videoN (default: scene)")
    add("--frames", type=int, default=1000, help="how many frames, each through both paths (default: 1000)")
    add("--fps", type=float, default=30, help="frames per second; 0: as fast as it goes (default: 30)")
    add("--seed", type=int, default=0, help="which generated scene (default: 0)")
    out = Path(__file__).with_name("out")
    add("--out", type=Path, default=out, help="folder for the results (default: examples/out)")
    add("--device", default="reference", help="which device runs the network (default: reference)")
    add("--spin", type=float, help="seconds for which the burst polls before it sleeps (default: its own choice)")
    add("--no-video", action="store_true", help="write no video")
    args = parser.parse_args()
    for name, least in (("frames", 1), ("fps", 0), ("seed", 0), ("spin", 0)):
        value = getattr(args, name)
        if value is not None and not least <= value < 1e9:
            parser.error(f"--{name} {value}: must be at least {least} and less than a billion")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: cannot be made ({error.strerror}); pass a folder you may write to")
    if not args.no_video and (args.out / Film.NAME).resolve() == Path(args.source).resolve():
        parser.error(f"--source {args.source}: this run would overwrite it; pass another --out or --no-video")
    return args


def main() -> None:
    """Run the demo."""
    args, console = arguments(), Console()
    spin = {} if args.spin is None else {"spin": args.spin}
    try:
        with ExitStack() as stack:
            source = stack.enter_context(closing(open_source(args.source, args.seed, args.fps)))
            device = stack.enter_context(driver.connect(args.device))
            prepared = stack.enter_context(device.prepare(build_model()))
            fast = stack.enter_context(prepared.burst(measure=True, **spin))
            film = None if args.no_video else stack.enter_context(Film(args.out, WIDTH, HEIGHT, args.fps))
            demo = Demo(prepared, fast, source)
            clock = run(demo, args, film, console)
    except (ValueError, driver.DriverError, burst.BurstError) as error:
        raise SystemExit(f"camera.py: {error}") from error
    report(demo, clock, args, console)


if __name__ == "__main__":
    main()
