"""What does another process cost a stream: calls that come 10 to 120 times a second, and work for a while?

    python bench/paced.py [--rates 30 …] [--works 3000 …] [--peers all|none|zmq …] [--json FILE]
    python bench/paced.py cameras [--device litert] [--pairs 9] [--json FILE]

A camera's frames, not calls back to back: between two frames both processes sleep, processors go idle and caches cool.
Each subject runs in turns, frame by frame, with the same work in the client's own process. "Costs" is the difference of
the two medians: what the other process costs beyond the work. Processor time is that of both processes for one frame,
over that of the frames in process. Nothing is pinned, but for the two floors (peers/paced.c) that say so. The work is
native_device.py's: as many microseconds of arithmetic as the first input says.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from measure import (
    HERE,
    Budget,
    NotMeasured,
    Report,
    Runs,
    arguments,
    ask,
    compile_c,
    conditions,
    figures_of,
    parse,
    percentiles,
    pin_client,
    progress,
    publish,
    scratch,
    spell,
)
from native_device import work_of
from own_device import own_device, pin

import driver
from burst import Request, RequestArgument
from driver.cli.timing import Estimate, estimate, order_of_round, time_calls
from driver.demos.detector import build_model, outputs_of
from driver.demos.scene import Scene

sys.path += [str(HERE / "peers"), str(HERE.parent / "tests")]
from fake_camera import FakeCamera
from frames import PEERS, in_turns

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from measure import Block

    from driver import Burst, Camera, RemoteDevice, RemotePreparedModel

QUESTION = "What does another process cost a stream?"
RATES, WORKS = (10, 30, 60, 120), (0, 300, 3000, 15000)
USUAL = 30, 3000  # the rate and the work of the budgets
ONE, TWO, ANY = "floor: one processor", "floor: two processors", "floor: any processor"
BURST, SLEEPING, PYTHON = "burst", 'burst, "low_power"', "burst, device in Python"
FLOORS = {ONE: (0, 0), TWO: (0, 1), ANY: (-1, -1)}
DEVICES = {BURST: "Spinning", SLEEPING: "Spinning", PYTHON: "SpinningInPython"}
HEAD = ("frames a second, work", "", "p50 us", "p99 us", "costs us", "x one processor", "p99 x own", "CPU x own")


class Pace(NamedTuple):
    """A stream: frames a second, and microseconds of work for each."""

    hz: float
    work: float

    @property
    def text(self) -> str:
        """For the table."""
        return f"{self.hz:g}/s, {self.work / 1e3:g} ms"


def in_microseconds(row: dict[str, float]) -> Block:
    """The figures of one block."""
    found = {f"{key.removesuffix('_ns')}_us": value / 1e3 for key, value in row.items()}
    return {**found, "max_us": found["p99_us"], "costs_us": found["p50_us"] - found["own_p50_us"]}


def floor(binary: Path, name: str, pace: Pace, frames: int) -> Block:
    """A block of peers/paced.c."""
    numbers = (*FLOORS[name], pace.hz, pace.work, frames)
    done = subprocess.run([binary, *map(str, numbers)], check=True, capture_output=True, timeout=120)
    return in_microseconds(json.loads(done.stdout))


def peer(name: str, pace: Pace, frames: int) -> Block:
    """A block of one of peers/frames.py. Raises NotMeasured."""
    command = [sys.executable, HERE / "peers" / "frames.py", name, *map(str, (pace.hz, pace.work, frames))]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=180)
    return in_microseconds(figures_of(json.loads(done.stdout)))


def model() -> driver.Model:
    """An ADD, which a spinning device does not add."""
    m = driver.ModelBuilder()
    x, y = m.input("float32", (1, 4)), m.input("float32", (1, 4))
    m.output(m.operation("ADD", x, y, 0))
    return m.build()


def ours(stack: ExitStack, name: str) -> Callable[[Pace, int], Block]:
    """What runs a block of a burst, on a device of its own."""
    device = stack.enter_context(own_device(f"native_device:{DEVICES[name]}"))
    prepared = stack.enter_context(
        device.prepare(model(), preference="low_power" if name == SLEEPING else "fast_single_answer")
    )
    burst = stack.enter_context(prepared.burst())
    processes = device.service_pid, device.engine_pid

    def block(pace: Pace, frames: int) -> Block:
        for array, value in zip(burst.inputs, (pace.work, 0), strict=True):
            array[:] = value
        own = work_of(pace.work)
        in_turns((burst.run, own), pace.hz, 3, processes)
        return in_microseconds(in_turns((burst.run, own), pace.hz, frames, processes))

    return block


def subjects(stack: ExitStack, args: argparse.Namespace) -> dict[str, Callable[[Pace, int], Block]]:
    """By name: what runs a block."""
    binary = compile_c(stack.enter_context(scratch()) / "paced", HERE / "peers" / "paced.c")
    floors: dict[str, Callable[[Pace, int], Block]] = {name: partial(floor, binary, name) for name in FLOORS}
    peers: dict[str, Callable[[Pace, int], Block]] = {name: partial(peer, name) for name in args.peers}
    return {**floors, **{name: ours(stack, name) for name in DEVICES}, **peers}


def measure(args: argparse.Namespace) -> dict[Pace, Runs]:
    """Every subject once a round and pace; the order turns."""
    found = {pace: Runs() for pace in args.paces}
    with ExitStack() as stack:
        blocks = subjects(stack, args)
        for number in range(args.pairs):
            for pace, runs in found.items():
                frames = max(2, round(args.seconds * pace.hz / 2))
                for name in order_of_round(list(blocks), number):
                    if name in runs.errors:
                        continue
                    progress(f"round {number + 1} of {args.pairs}", f"{pace.text}: {name}")
                    try:
                        runs.add(name, blocks[name](pace, frames))
                    except NotMeasured as why:
                        runs.drop(name, str(why))
    progress("")
    return found


def paired(runs: Runs, name: str, key: str, other: str, other_key: str) -> Estimate | None:
    """The ratio of two figures of the same round."""
    if not runs.has(name, other):
        return None
    return estimate(runs.values(name, key) / runs.values(other, other_key))


def ratios(runs: Runs, name: str) -> dict[str, Estimate | None]:
    """What the table and the budgets say."""
    return {
        "costs_to_one": paired(runs, name, "costs_us", ONE, "costs_us"),
        "p99_to_own": paired(runs, name, "p99_us", name, "own_p99_us"),
        "cpu_to_own": paired(runs, name, "cpu_us", name, "own_cpu_us"),
    }


def row(pace: Pace, runs: Runs, name: str) -> dict[str, Any]:
    """For the JSON."""
    found = {"name": name, "pace": pace.text, "ours": name in DEVICES}
    if name in runs.errors:
        return {**found, "error": runs.errors[name]}
    against = {key: value and value._asdict() for key, value in ratios(runs, name).items()}
    return {**found, **against, "rounds": runs.blocks[name]}


def line(pace: Pace, runs: Runs, name: str) -> tuple[str, ...]:
    """One line of the table."""
    if name in runs.errors:
        return pace.text, name, "-", "-", runs.errors[name][:40], "", "", ""
    figures = [f"{np.median(runs.values(name, key)):.0f}" for key in ("p50_us", "p99_us")]
    costs = spell(estimate(runs.values(name, "costs_us")))
    return pace.text, name, *figures, costs, *(spell(found) for found in ratios(runs, name).values())


def budgets(runs: Runs, pace: Pace) -> list[Budget]:
    """Of a burst, in a stream as a camera's."""
    found = ratios(runs, BURST)
    return [
        Budget(f"{pace.text}: costs over the floor's on one processor", found["costs_to_one"], 1.5),
        Budget(f"{pace.text}: CPU time of both processes over that in process", found["cpu_to_own"], 1.03),
        Budget(f"{pace.text}: p99 over that in process", found["p99_to_own"], 1.5),
    ]


def options() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, pairs=5)
    parser.add_argument("--rates", type=float, nargs="+", metavar="HZ", help=f"frames a second (default {RATES})")
    parser.add_argument("--works", type=float, nargs="+", metavar="US", help=f"microseconds of work (default {WORKS})")
    parser.add_argument("--peers", nargs="+", default=["all"], help=f"all, none, or some of {', '.join(PEERS)}")
    parser.add_argument("--seconds", type=float, default=4, help="for one block (default 4)")
    args = parse(parser)
    chosen = {"all": list(PEERS), "none": []}.get(args.peers[0], args.peers)
    if unknown := set(chosen) - set(PEERS):
        parser.error(f"--peers: no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    args.peers = chosen
    args.paces = [Pace(hz, work) for hz in args.rates or RATES for work in args.works or WORKS if work * hz < 0.95e6]
    if not (args.rates or args.works):  # a cross through the usual one: all of them would take an hour
        args.paces = [pace for pace in args.paces if USUAL[0] == pace.hz or USUAL[1] == pace.work]
    if args.quick:
        args.seconds, args.paces = 0.2, args.paces[:1] if args.rates else [Pace(120, 300), Pace(*USUAL)]
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = options()
    found = measure(args)
    names = [*FLOORS, *DEVICES, *args.peers]
    lines = [line(pace, runs, name) for pace, runs in found.items() for name in names]
    rows = [row(pace, runs, name) for pace, runs in found.items() for name in names]
    held = [budget for pace, runs in found.items() if pace == USUAL for budget in budgets(runs, pace)]
    publish(args, Report(QUESTION, conditions(), lines, held, {"subjects": rows}, HEAD))


# ---- cameras


CAMERAS_QUESTION = "What does a camera's frame cost on its way to a result, beside the same model without a camera?"
CAMERAS_HEAD = ("", "us per frame", "x without a camera")
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
    import simplejpeg

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
                runs.add(name, percentiles(np.concatenate(blocks)))
        return runs, int(burst.stats()["copied_bytes"]["bulk"])


def exactly(value: float) -> Estimate:
    """A figure that was counted once."""
    return Estimate(value, value, value, 1.0)


def cameras() -> None:
    """What does a camera's frame cost on its way to a result, beside the same model on its buffer without a camera?

        python bench/paced.py cameras [--device litert] [--pairs 9] [--json FILE]

    Frames of 1920 x 1080 in nv12 lie in buffers that a camera has exported, and the camera demo's detector runs on
    them: the network itself converts the pixels that it looks at. The camera is a fake (tests/fake_camera.py) that
    answers the ioctls in this process and has the next frame at once, so its row holds all that `driver.Camera` does
    for a frame: waiting, taking, giving back. No camera: the same burst on the same buffers; frames with and without
    a camera take turns one by one. Without a model is a frame that is taken and given back, also one of a webcam's,
    which is decoded from JPEG. At the end the burst says how much it copied. Memory: what the device's two processes
    keep for themselves with one such camera and with eight, each in a thread of its own, on one prepared model;
    buffers of cameras belong to the cameras.
    """
    parser = arguments(cameras.__doc__)
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
    publish(args, Report(CAMERAS_QUESTION, found, lines, budgets, body, CAMERAS_HEAD))
    if args.plot:
        import plots

        figures = {name: float(np.median(runs.values(name))) for name in runs.blocks}
        plots.bars(args.plot, figures, "us per frame", CAMERAS_QUESTION)


if __name__ == "__main__":
    ask({"": main, "cameras": cameras})
