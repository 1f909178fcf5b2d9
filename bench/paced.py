"""What does another process cost a stream: calls that come 10 to 120 times a second, and work for a while?

    python bench/paced.py [--rates 30 …] [--works 3000 …] [--peers all|none|zmq …] [--json FILE]
    python bench/paced.py cameras [--device litert] [--pairs 9] [--json FILE]
    python bench/paced.py hint [--pairs 5] [--seconds 1.5] [--json FILE]

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
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from idle_cost import SECONDS, Side, device_that, wide_model
from measure import (
    HERE,
    Budget,
    Runs,
    ask,
    compile_c,
    figures_of,
    percentiles,
    progress,
    rounds,
    scratch,
    spell,
)
from native_device import work_of
from own_device import own_device, pin
from question import Question, against, interval, median, times

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
    from question import Cell, Figure

    from driver import Burst, Camera, RemoteDevice, RemotePreparedModel

RATES, WORKS = (10, 30, 60, 120), (0, 300, 3000, 15000)
USUAL = 30, 3000  # the rate and the work of the budgets
ONE, TWO, ANY = "floor: one processor", "floor: two processors", "floor: any processor"
BURST, SLEEPING, PYTHON = "burst", 'burst, "low_power"', "burst, device in Python"
FLOORS = {ONE: (0, 0), TWO: (0, 1), ANY: (-1, -1)}
DEVICES = {BURST: "Spinning", SLEEPING: "Spinning", PYTHON: "SpinningInPython"}


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


def row_of(pace: Pace, name: str) -> str:
    """A row's name."""
    return f"{pace.text}; {name}"


def measure(args: argparse.Namespace) -> Runs:
    """Every subject once a round and pace; the order turns."""
    runs = Runs()
    with ExitStack() as stack:
        blocks = subjects(stack, args)
        for number in range(args.pairs):
            for pace in args.paces:
                frames = max(2, round(args.seconds * pace.hz / 2))
                for name in order_of_round(list(blocks), number):
                    block = partial(blocks[name], pace, frames)
                    runs.attempt(row_of(pace, name), block, f"round {number + 1} of {args.pairs}")
    progress("")
    return runs


def costs_to_one(runs: Runs, row: str) -> Estimate | None:
    """To the floor on one processor, at the same pace."""
    return against(f"{row.partition('; ')[0]}; {ONE}", "costs_us")(runs, row)


def to_own(key: str) -> Figure:
    """The ratio of a figure to that of the same work in process."""
    return lambda runs, row: estimate(runs.values(row, key) / runs.values(row, f"own_{key}"))


P99_TO_OWN, CPU_TO_OWN = to_own("p99_us"), to_own("cpu_us")


def budgets(runs: Runs, args: argparse.Namespace) -> list[Budget]:
    """Of a burst, in a stream as a camera's."""
    usual = Pace(*USUAL)
    if usual not in args.paces:
        return []
    row = row_of(usual, BURST)
    return [
        Budget(f"{usual.text}: costs over the floor's on one processor", costs_to_one(runs, row), 1.5),
        Budget(f"{usual.text}: CPU time of both processes over that in process", CPU_TO_OWN(runs, row), 1.03),
        Budget(f"{usual.text}: p99 over that in process", P99_TO_OWN(runs, row), 1.5),
    ]


def settle(args: argparse.Namespace) -> None:
    """The paces, and the peers that there are."""
    chosen = {"all": list(PEERS), "none": []}.get(args.peers[0], args.peers)
    if unknown := set(chosen) - set(PEERS):
        raise ValueError(f"--peers: no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    args.peers = chosen
    args.paces = [Pace(hz, work) for hz in args.rates or RATES for work in args.works or WORKS if work * hz < 0.95e6]
    if not (args.rates or args.works):  # a cross through the usual one: all of them would take an hour
        args.paces = [pace for pace in args.paces if USUAL[0] == pace.hz or USUAL[1] == pace.work]
    if args.quick:
        args.seconds, args.paces = 0.2, args.paces[:1] if args.rates else [Pace(120, 300), Pace(*USUAL)]


PACED = Question(
    __doc__,
    measure,
    {
        "p50 us": median("p50_us", ".0f"),
        "p99 us": median("p99_us", ".0f"),
        "costs us": interval("costs_us"),
        "x one processor": times(costs_to_one),
        "p99 x own": times(P99_TO_OWN),
        "CPU x own": times(CPU_TO_OWN),
    },
    options={
        "--rates": {"type": float, "nargs": "+", "metavar": "HZ", "help": f"frames a second (default {RATES})"},
        "--works": {"type": float, "nargs": "+", "metavar": "US", "help": f"microseconds of work (default {WORKS})"},
        "--peers": {"nargs": "+", "default": ["all"], "help": f"all, none, or some of {', '.join(PEERS)}"},
        "--seconds": {"type": float, "default": 4, "help": "for one block (default 4)"},
    },
    settle=settle,
    budgets=budgets,
    estimates={"costs_to_one": costs_to_one, "p99_to_own": P99_TO_OWN, "cpu_to_own": CPU_TO_OWN},
    group=lambda row: row.partition("; ")[0],
    label=lambda row: row.partition("; ")[2],
    ours=[row_of(Pace(hz, work), name) for hz in RATES for work in WORKS for name in DEVICES],
    pairs=5,
    is_pinned=False,
)

# ---- cameras


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


def filmed(args: argparse.Namespace) -> Runs:
    """All rounds, in turns; the bytes that the burst has copied; and memory."""
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
        args.copied_bytes = int(burst.stats()["copied_bytes"]["bulk"])
    progress("memory")
    args.memory_mb = [filmed_by(count, args.device, args.count) for count in (1, CAMERAS)]
    progress("")
    return runs


def exactly(value: float) -> Estimate:
    """A figure that was counted once."""
    return Estimate(value, value, value, 1.0)


def camera_budgets(runs: Runs, args: argparse.Namespace) -> list[Budget]:
    """Nothing is copied, and a camera costs nothing."""
    one, many = args.memory_mb
    return [
        Budget("bytes of frames copied", exactly(args.copied_bytes), 0, "bytes"),
        Budget(f"camera to result: <= {MOST} x without a camera", TO_ALONE(runs, CAMERA), MOST),
        Budget(f"memory with {CAMERAS} cameras: <= {MOST_MEMORY} x with one", exactly(many / one), MOST_MEMORY),
    ]


def memory_table(_: Runs, args: argparse.Namespace) -> list[tuple[list[tuple[str, ...]], tuple[str, ...]]]:
    """With one camera, and with many."""
    rows = [(f"{n} camera{'s' * (n > 1)}", f"{mb:.1f}") for n, mb in zip((1, CAMERAS), args.memory_mb, strict=True)]
    return [(rows, ("memory of the device", "MB"))]


TO_ALONE = against(ALONE, "p50_us")
FILMED = Question(
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
    """,
    filmed,
    {
        "us per frame": interval("p50_us"),
        "x without a camera": lambda runs, row: spell(TO_ALONE(runs, row)) if row == CAMERA else "",
    },
    options={
        "--device": {"default": "litert", "help": "which runs the network"},
        "--count": {"type": int, "default": 40, "help": "frames of a block"},
    },
    settle=lambda args: vars(args).update(count=3) if args.quick else None,
    budgets=camera_budgets,
    more=memory_table,
    kept=("memory_mb",),
    figures=("p50_us",),
    bars=("p50_us", "us per frame"),
)


# ---- the hint of an open burst

NOTHING, ALL = "nothing", "idle states, clock and arenas: as devices do"
ASKING = {
    NOTHING: "AskingForNothing",
    "idle states: 2 us": "AskingForIdleStates",
    "idle states: none at all, processors poll": "AskingForPolling",
    "clock": "AskingForClock",
    ALL: "AskingForAll",
}
HINT_PACE = Pace(60, 1000)
KEPT_ARENAS, TRIMMED = "a burst after a rest, arenas kept", "a burst after a rest, arenas trimmed"
CPUS = Path("/sys/devices/system/cpu")


def polled_seconds() -> float:
    """Of all processors, while they had nothing to do: time of the idle state that polls."""
    files = [path for path in CPUS.glob("cpu[0-9]*/cpuidle/state*/name") if path.read_text() == "POLL\n"]
    return sum(int(path.with_name("time").read_text()) for path in files) / 1e6


def asking(stack: ExitStack, name: str) -> Callable[[int], Block]:
    """What runs a block of a burst that is open no longer, on a device that asks for that."""
    device = stack.enter_context(own_device(f"native_device:{ASKING[name]}"))
    prepared = stack.enter_context(device.prepare(model()))
    processes, own = (device.service_pid, device.engine_pid), work_of(HINT_PACE.work)

    def block(frames: int) -> Block:
        with prepared.burst() as burst:
            for array, value in zip(burst.inputs, (HINT_PACE.work, 0), strict=True):
                array[:] = value
            in_turns((burst.run, own), HINT_PACE.hz, 3, processes)
            polled, begin = polled_seconds(), time.monotonic()
            found = in_microseconds(in_turns((burst.run, own), HINT_PACE.hz, frames, processes))
            return {**found, "polling": (polled_seconds() - polled) / (time.monotonic() - begin)}

    return block


def rested(stack: ExitStack, device_name: str) -> Callable[[int], Block]:
    """What runs a block of requests after each other, a rest, and the first request after it."""
    side = Side(stack.enter_context(device_that(device_name, SECONDS)), wide_model(), stack)

    def block(_: int) -> Block:
        time_calls(side.burst.run, 5)
        time.sleep(4 * SECONDS)
        megabytes = side.megabytes()
        took = float(time_calls(side.burst.run, 1)[0]) / 1e3
        return {"p50_us": took, "held_mb": megabytes}

    return block


def hinted(args: argparse.Namespace) -> Runs:
    """All rounds, in turns. No burst is open but the one whose turn it is, as the hint holds for the machine."""
    runs, frames = Runs(), max(2, round(args.seconds * HINT_PACE.hz / 2))
    with ExitStack() as stack:
        blocks = {name: asking(stack, name) for name in ASKING}
        for name in rounds(args.pairs, list(blocks)):
            runs.add(name, blocks[name](frames))
    with ExitStack() as stack:
        resting = {KEPT_ARENAS: "reference", TRIMMED: "native_device:Trimming"}
        blocks = {name: rested(stack, device) for name, device in resting.items()}
        for name in rounds(args.pairs, list(blocks)):
            runs.add(name, blocks[name](frames))
    return runs


def where_known(key: str, cell: Cell) -> Cell:
    """A column of the rows that have that figure."""
    return lambda runs, row: cell(runs, row) if key in runs.blocks[row][0] else ""


TO_NOTHING = against(NOTHING, "costs_us")
HINT = Question(
    """What does an open burst ask of the machine, and what is it worth?

        python bench/paced.py hint [--pairs 5] [--seconds 1.5] [--json FILE]

    A stream of 60 requests a second with 1 ms of work each, in turns with the same work in this process, on devices
    that ask for a part of the hint (docs/preference.md) or all of it, while their burst is open: one is
    open at a time, because idle states are the machine's. "Costs" is the difference of the two medians. CPU is that of
    both processes for one frame of the burst; processors that poll while they have nothing to do are counted apart, as
    no process is charged for it: 1.00 is one processor. Devices ask for idle states of at most 2 us; the row that has
    none at all shows why. Arenas matter to a burst that has rested: the first request after that, of a model with
    temporaries of 16 MB, and what the engine holds meanwhile.
    """,
    hinted,
    {
        "p50 us": median("p50_us", ".0f"),
        "p99 us": where_known("p99_us", median("p99_us", ".0f")),
        "costs us": where_known("costs_us", interval("costs_us")),
        "x nothing": where_known("costs_us", times(TO_NOTHING, NOTHING)),
        "CPU us a frame": where_known("cpu_us", median("cpu_us", ".0f")),
        "processors that poll idly": where_known("polling", median("polling")),
        "held at rest, MB": where_known("held_mb", median("held_mb", ".1f")),
    },
    options={"--seconds": {"type": float, "default": 1.5, "help": "for one block (default 1.5)"}},
    settle=lambda args: vars(args).update(seconds=0.1) if args.quick else None,
    group=lambda row: "a stream" if row in ASKING else "a rest",
    figures=("p50_us",),
    ours=(ALL, KEPT_ARENAS),
    bars=("p50_us", "us"),
    pairs=5,
    is_pinned=False,
)


if __name__ == "__main__":
    ask({"": PACED.answer, "cameras": FILMED.answer, "hint": HINT.answer})
