"""What does a frame of a pipeline cost at its own pace, in time and in processor time, beside the runtime in process?

    python bench/pipelines.py [--files FILE@HZ …] [--pairs 5] [--seconds 4] [--json FILE]
    python bench/pipelines.py web [--clients 4] [--rate 20] [--pairs 5] [--seconds 4] [--json FILE]

Two pipelines: frames of 640 x 480 from a file, 30 a second, cut and scaled for MobileNetV1 (.tflite); and sound of 16
kHz from a file in blocks of 20 ms, through four layers of 512 (.onnx). --files: model files of your own in their place,
on random inputs, so many a second. In process: the file in its own runtime, on one thread, on two, and as a program has
it that asks for no number. Burst: the device's own choice, which it has made before the first block
(docs/preference.md); and devices whose executions have one thread and two. Each has blocks in turns, so that no other
one's threads are awake. Processor time is that of all processes for one frame. Nothing is pinned. With `web`, the
pipeline is a web service (web_service.py).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from litert import NAMES, written
from measure import Budget, Runs, ask, rounds, scratch
from models import IMAGE, mobilenet
from own_device import own_device
from question import Question, against, interval, median, times

import driver
from driver.cli.timing import estimate
from driver.runtime.frame_cost import processor_ns

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from measure import Block

    Run = Callable[[dict[str, Any]], object]

OWN = {"in process, 1 thread": 1, "in process, 2 threads": 2, "in process, default": 0}
ONE, TWO, DEFAULT = OWN
BURST, BURST_ONE, BURST_TWO = "burst", "burst, 1 thread", "burst, 2 threads"
DEVICES = {
    ".onnx": {
        BURST: "onnxruntime",
        BURST_ONE: "thread_devices:OnnxRuntimeInOne",
        BURST_TWO: "thread_devices:OnnxRuntimeInTwo",
    },
    ".tflite": {BURST: "litert", BURST_ONE: NAMES[1], BURST_TWO: NAMES[2]},
}
SUBJECTS = (*OWN, *DEVICES[".onnx"])
CHOOSING = 80  #: frames until a device has chosen
LAYERS, WIDTH, BLOCK = 4, 512, 320
HEIGHT, ROW = 480, 640


class Stage(NamedTuple):
    """A pipeline: the model's file, frames a second, and what makes the inputs of the next frame."""

    name: str
    path: Path
    hz: float
    feeds: Callable[[], dict[str, Any]]


def write_sound_model(path: Path) -> None:
    """Four layers, from a block of samples to as many."""
    from gpu_models import Graph

    random, sizes = np.random.default_rng(3), (BLOCK, *[WIDTH] * (LAYERS - 1), BLOCK)
    graph, at = Graph(), "x"
    for shape in pairwise(sizes):
        weights = graph.constant(random.standard_normal(shape).astype(np.float32) / 20)
        at = graph.node("Tanh", graph.node("MatMul", at, weights))
    graph.save(path, (1, BLOCK), at, (1, BLOCK))


def frames_of(path: Path, dtype: str, shape: tuple[int, ...], frames: int = 16) -> Callable[[], np.ndarray]:
    """A file of noise, and what reads its next frame, the first one after the last."""
    np.random.default_rng(1).integers(
        0, 256, (frames, int(np.prod(shape)) * np.dtype(dtype).itemsize), np.uint8
    ).tofile(path)
    size, turn = int(np.prod(shape)), [0]

    def frame() -> np.ndarray:
        turn[0] = (turn[0] + 1) % frames
        offset = turn[0] * size * np.dtype(dtype).itemsize
        return np.fromfile(path, dtype, size, offset=offset).reshape(shape)

    return frame


def usual_stages(folder: Path) -> list[Stage]:
    """The camera and the sound."""
    camera, sound = folder / "mobilenet.tflite", folder / "sound.onnx"
    camera.write_bytes(written(mobilenet("float32")))
    write_sound_model(sound)
    image = frames_of(folder / "frames", "uint8", (HEIGHT, ROW, 3))
    block = frames_of(folder / "samples", "int16", (1, BLOCK))
    (name,) = (port.name for port in driver.load(camera).inputs)

    def cut() -> dict[str, Any]:
        middle = image()[128 : 128 + IMAGE[1], 208 : 208 + IMAGE[2]]
        return {name: (middle[None].astype(np.float32) - 128) / 128}

    return [
        Stage("camera, 30/s", camera, 30, cut),
        Stage("sound, 50/s", sound, 50, lambda: {"x": block().astype(np.float32) / 32768}),
    ]


def stage_of(words: str) -> Stage:
    """A file of the user's. Raises ValueError."""
    path, _, hz = words.rpartition("@")
    inputs = driver.load(path).inputs
    random = np.random.default_rng(0)
    feeds = {t.name: random.random([d or 1 for d in t.shape or ()]).astype(t.dtype) for t in inputs}
    return Stage(f"{Path(path).name}, {hz}/s", Path(path), float(hz), lambda: feeds)


def own(stage: Stage, threads: int) -> Run:
    """The file in its runtime, in this process; 0 threads: as it is by default."""
    if stage.path.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(stage.path, options, providers=["CPUExecutionProvider"])
        return partial(session.run, None)
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(stage.path), num_threads=threads or None)
    interpreter.allocate_tensors()
    (place,), outputs = interpreter.get_input_details(), interpreter.get_output_details()

    def run(feeds: dict[str, Any]) -> object:
        interpreter.set_tensor(place["index"], next(iter(feeds.values())))
        interpreter.invoke()
        return [interpreter.get_tensor(detail["index"]) for detail in outputs]

    return run


def paced(stage: Stage, run: Run, processes: Sequence[int], frames: int) -> Block:
    """A block: each frame is due at its time, is read and made ready, and run."""
    took, used, at = np.empty(frames), processor_ns(processes), time.monotonic()
    for n in range(frames):
        at += 1 / stage.hz
        time.sleep(max(0.0, at - time.monotonic()))
        begin = time.perf_counter()
        run(stage.feeds())
        took[n] = time.perf_counter() - begin
    p50, p99 = np.percentile(took, (50, 99)) * 1e3
    return {"p50_ms": p50, "p99_ms": p99, "cpu_ms": (processor_ns(processes) - used) / 1e6 / frames}


def through_burst(stack: ExitStack, stage: Stage, device_name: str) -> tuple[Run, Sequence[int]]:
    """A burst of its own device, and the device's processes."""
    device = stack.enter_context(own_device(device_name))
    burst = stack.enter_context(stack.enter_context(device.prepare(driver.load(stage.path))).burst())
    return burst.run, (device.service_pid, device.engine_pid)


def measure(args: argparse.Namespace) -> Runs:
    """Every subject once a round; devices choose before the first one."""
    runs, blocks = Runs(), {}
    with ExitStack() as stack:
        stages = [*map(stage_of, args.files)] or usual_stages(stack.enter_context(scratch()))
        for stage in stages:
            frames = max(2, round(args.seconds * stage.hz))
            for subject in SUBJECTS:
                here = subject in OWN
                run, processes = (
                    (own(stage, OWN[subject]), ())
                    if here
                    else through_burst(stack, stage, DEVICES[stage.path.suffix][subject])
                )
                paced(stage, run, processes, 3 if here or args.quick else CHOOSING)
                blocks[f"{stage.name}; {subject}"] = partial(paced, stage, run, processes, frames)
        for name in rounds(args.pairs, list(blocks)):
            runs.add(name, blocks[name]())
    return runs


def beside(subject: str, key: str) -> Callable[[Runs, str], Any]:
    """The ratio of a row's figure to that of another subject in the same pipeline."""
    return lambda runs, row: against(f"{row.partition('; ')[0]}; {subject}", key)(runs, row)


def budgets(runs: Runs, _: argparse.Namespace) -> list[Budget]:
    """Of the devices' choice, for each pipeline."""
    found = []
    for stage in dict.fromkeys(row.partition("; ")[0] for row in runs.blocks):
        row, others = f"{stage}; {BURST}", (f"{stage}; {BURST_ONE}", f"{stage}; {BURST_TWO}")
        best = min(others, key=lambda other: float(np.median(runs.values(other, "p50_ms"))))
        found += [
            Budget(f"{stage}: processor time over one thread's in process", beside(ONE, "cpu_ms")(runs, row), 1.05),
            Budget(
                f"{stage}: processor time over the default's in process", beside(DEFAULT, "cpu_ms")(runs, row), 1.05
            ),
            Budget(
                f"{stage}: p50 over that of the better number of threads",
                estimate(runs.values(row, "p50_ms") / runs.values(best, "p50_ms")),
                1.06,
            ),
        ]
    return found


def settle(args: argparse.Namespace) -> None:
    """Check the files. Raises ValueError."""
    for words in args.files:
        path, _, hz = words.rpartition("@")
        if Path(path).suffix not in DEVICES or not hz.replace(".", "", 1).isdigit():
            raise ValueError(f"--files {words}: give an .onnx or .tflite file, and so many a second: net.onnx@30")
    if args.quick:
        args.seconds = 0.1


PIPELINES = Question(
    __doc__,
    measure,
    {
        "p50 ms": interval("p50_ms"),
        "p99 ms": median("p99_ms"),
        "CPU ms a frame": interval("cpu_ms"),
        "CPU x 1 thread in process": times(beside(ONE, "cpu_ms")),
        "CPU x default in process": times(beside(DEFAULT, "cpu_ms")),
    },
    options={
        "--files": {"nargs": "+", "default": [], "metavar": "FILE@HZ", "help": "model files in the place of the two"},
        "--seconds": {"type": float, "default": 4, "help": "for one block (default 4)"},
    },
    settle=settle,
    budgets=budgets,
    figures=("p50_ms", "p99_ms", "cpu_ms"),
    bars=("cpu_ms", "ms"),
    group=lambda row: row.partition("; ")[0],
    label=lambda row: row.partition("; ")[2],
    pairs=5,
    is_pinned=False,
)


def ask_web() -> None:
    """Of a web service, which needs aiohttp and Pillow."""
    from web_service import WEB

    WEB.answer()


if __name__ == "__main__":
    ask({"": PIPELINES.answer, "web": ask_web})
