"""What does a frame cost through Frigate's plug-in for shared memory, beside its zmq detector? And a kill?

    python bench/gateways.py gstreamer [--frames 150] [--pairs 3] [--json FILE]
    python bench/gateways.py satellites FOLDER [--word hey_jarvis_v0.1.onnx] [--seconds 8] [--pairs 3] [--json FILE]
    FRIGATE_SOURCE=~/frigate python bench/gateways.py frigate [--calls 100] [--pairs 9] [--kills 5] [--json FILE]

FRIGATE_SOURCE is a checkout of https://github.com/blakeblackshear/frigate: the zmq detector is Frigate's own module,
loaded from there. Frames are 640 x 640 of uint8, 1.2 MB, from an array like the one over Frigate's shared memory. The
model finds one box by looking at one pixel, so what is measured is the way to the model and back. The zmq detector
asks `burst serve onnxruntime --frigate`, and a server that answers rows of zeros without looking at the frame: the
least that its protocol costs.

Memory: of the server and the device, for one detector and for eight, each of which has had its frames looked at.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
from measure import Budget, ask, progress, scratch, server_process, spell
from onnx import TensorProto, helper, numpy_helper
from question import Finding, Inquiry

import driver
from driver.cli.timing import Estimate, estimate, order_of_round, time_calls
from driver.gateways.gstreamer.plugin_folder import ELEMENT, FOLDER

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/driver"))

SIZE, CAMERAS = 640, 8
PLUG_IN, ZMQ, EMPTY = "plug-in, shared memory", "zmq detector, burst serve --frigate", "zmq detector, empty server"
HEAD = ("what", "us, or as said", "beside")
ZEROS = [b'{"shape":[20,6],"dtype":"float32"}', bytes(480)]


def write_model(path: Path) -> None:
    """One row of yolonas whose score is the first pixel's brightness."""
    arrays = {"from": [0] * 4, "to": [1] * 4, "one": [1]}
    weights = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in arrays.items()]
    row = np.array([[0, 64, 64, 320, 320, 0.5, 3]], np.float32)
    slope = np.array([[0, 0, 0, 0, 0, 0.4 / 255, 0]], np.float32)
    weights += [numpy_helper.from_array(row, "row"), numpy_helper.from_array(slope, "slope")]
    nodes = [
        helper.make_node("Slice", ["x", "from", "to"], ["corner"]),
        helper.make_node("Cast", ["corner"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["float", "one"], ["pixel"]),
        helper.make_node("Mul", ["slope", "pixel"], ["more"]),
        helper.make_node("Add", ["row", "more"], ["found"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.UINT8, (1, SIZE, SIZE, 3))]
    outputs = [helper.make_tensor_value_info("found", TensorProto.FLOAT, (1, 7))]
    graph = helper.make_graph(nodes, "detector", inputs, outputs, initializer=weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def serve_zeros(address: str) -> None:
    """Until standard input ends."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(address)
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        print("ready", flush=True)
        while True:
            asks = len(socket.recv_multipart(copy=False)) == 1
            socket.send_multipart([b'{"model_available":true,"model_loaded":true}'] if asks else ZEROS)


@contextmanager
def server(kind: str, folder: Path) -> Iterator[tuple[str, int]]:
    """A server process of that kind; its address and pid."""
    address = f"ipc://{folder}/{'ours' if kind == ZMQ else 'empty'}.sock"
    words = ["--frigate", address, "--model", str(folder / "model.onnx"), "--model-type", "yolonas"]
    ours = [sys.executable, "-m", "driver.cli", "serve", "onnxruntime", *words]
    command = ours if kind == ZMQ else [sys.executable, __file__, "frigate", "--server", address]
    with server_process(command) as pid:
        yield address, pid


def frame(brightness: int) -> np.ndarray[Any, Any]:
    return np.full((1, SIZE, SIZE, 3), brightness, np.uint8)


def check(rows: Any, brightness: int) -> None:
    """It is the answer to that frame."""
    assert abs(rows[0, 1] - 0.5 - 0.4 * brightness / 255) < 1e-5, rows[0]


def latency(args: argparse.Namespace, calls: dict[str, Callable[[Any], Any]]) -> dict[str, list[float]]:
    """Microseconds of the median of each round, by subject."""
    given, found = frame(200), {name: [] for name in calls}
    for name, call in calls.items():
        time_calls(lambda call=call: call(given), 10)
        if name != EMPTY:
            check(call(given), 200)
    for number in range(args.pairs):
        progress("latency", f"round {number + 1} of {args.pairs}")
        for name in order_of_round(list(calls), number):
            its = calls[name]
            found[name].append(float(np.median(time_calls(lambda its=its: its(given), args.calls))) / 1e3)
    progress("")
    return found


def kills(count: int, call: Callable[[Any], Any]) -> list[float]:
    """Seconds from a kill of the device to the next right answer."""
    took = []
    for number in range(count):
        progress("kill -9 of the device", f"{number + 1} of {count}")
        for n in range(20):
            check(call(frame(n)), n)
        with driver.connect("onnxruntime") as device:
            os.kill(device.engine_pid, signal.SIGKILL)
        begin = time.monotonic()
        check(call(frame(100 + number)), 100 + number)
        took.append(time.monotonic() - begin)
        time.sleep(1.2)  # a device that dies ten times in ten seconds is given up
    progress("")
    return took


def _pss(pids: set[int]) -> float:
    import psutil

    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 1e6


def memory(make: Callable[[], Any], pids: Callable[[], set[int]]) -> tuple[float, float]:
    """MB of server and device, for one detector and for eight that ask at the same time."""
    detectors = [make()]
    for n in range(50):
        check(detectors[0].detect_raw(frame(n)), n)
    one = _pss(pids())
    detectors += [make() for _ in range(CAMERAS - 1)]

    def ask(detector: Any) -> None:
        for n in range(50):
            check(detector.detect_raw(frame(n)), n)

    threads = [threading.Thread(target=ask, args=(detector,)) for detector in detectors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return one, _pss(pids())


def measured(args: argparse.Namespace) -> Finding:
    """Latency, recovery and memory."""
    from frigate_stand_ins import config, plug_in, zmq_config

    source = os.environ.get("FRIGATE_SOURCE")
    if not source:
        raise SystemExit("set FRIGATE_SOURCE to a checkout of https://github.com/blakeblackshear/frigate")
    theirs = plug_in(Path(source) / "frigate/detectors/plugins/zmq_ipc.py", "zmq_ipc")
    ours = plug_in(ROOT / "examples/frigate/burst.py", "burst_plug_in")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="burst-frigate-")))
        os.environ["BURST_RUNTIME_DIR"] = str(folder)  # a device of the script's own
        model = folder / "model.onnx"
        write_model(model)
        served = {kind: stack.enter_context(server(kind, folder)) for kind in (ZMQ, EMPTY)}

        def zmq_detector(kind: str) -> Any:
            return theirs.ZmqIpcDetector(zmq_config(served[kind][0], model, "yolonas", SIZE))

        plug = ours.BurstDetector(config(model, "yolonas", SIZE, device="onnxruntime"))
        stack.callback(plug.close)
        calls = {PLUG_IN: plug.detect_raw}
        calls |= {kind: zmq_detector(kind).detect_raw for kind in (ZMQ, EMPTY)}
        found = latency(args, calls)
        recovered = {kind: kills(args.kills, calls[kind]) for kind in (PLUG_IN, ZMQ)}

        def pids() -> set[int]:
            with driver.connect("onnxruntime") as device:
                return {served[ZMQ][1], device.connection.service_pid, device.engine_pid}

        one, eight = memory(lambda: zmq_detector(ZMQ), pids)
    return _report(found, recovered, one, eight)


def _report(found: dict[str, list[float]], recovered: dict[str, list[float]], one: float, eight: float) -> Finding:
    lines = [(name, f"{np.median(values):.4g}", "") for name, values in found.items()]
    budgets = []
    for other, limit in ((ZMQ, 0.2), (EMPTY, 0.2)):
        ratio = estimate(np.divide(found[PLUG_IN], found[other]))
        budgets.append(Budget(f"plug-in <= {limit} x the {other}", ratio, limit))
    for kind, took in recovered.items():
        slowest = float(max(took))
        lines.append((f"{kind}: device killed", f"{np.median(took):.3f} s", f"slowest of {len(took)}: {slowest:.3f} s"))
        budgets.append(Budget(f"{kind}: next right answer <= 0.5 s", estimate(np.array(took)), 0.5, "s"))
    lines.append((f"memory, one detector and {CAMERAS}", f"{one:.1f} MB, {eight:.1f} MB", ""))
    times = eight / one
    budgets.append(Budget(f"{CAMERAS} detectors <= 1.1 x the memory of one", Estimate(times, times, times, 1), 1.1))
    body = {"seconds": found, "recovered": recovered, "memory": [one, eight]}
    return Finding(lines, budgets, body, HEAD)


def settle(args: argparse.Namespace) -> None:
    """Short blocks for --quick."""
    if args.quick:
        args.calls, args.kills = 5, 1


FRIGATE = Inquiry(
    __doc__,
    measured,
    options={
        "--calls": {"type": int, "default": 100, "help": "frames of a block"},
        "--kills": {"type": int, "default": 5},
    },
    settle=settle,
)


# ---- gstreamer


SIDE, RATE, SHORT = 320, 30, 30
GSTREAMER_HEAD = ("element", "% of one processor in the pipeline's process", "frames a second")


class Playing(NamedTuple):
    """One run of a pipeline: seconds of a processor, and seconds that it played."""

    cpu: float
    wall: float


def gstreamer_write_model(path: Path) -> None:
    """SSD's four outputs from the mean of all bytes: it takes little time, and none of it is counted."""
    nodes = [
        helper.make_node("Cast", ["frame"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Reshape", ["mean", "shape"], ["scores"]),
        *(helper.make_node("Identity", [f"its_{name}"], [name]) for name in ("boxes", "classes", "count")),
    ]
    values = {
        "shape": np.array([1, 1], np.int64),
        "its_boxes": np.array([[[0.25, 0.125, 0.75, 0.5]]], np.float32),
        "its_classes": np.ones((1, 1), np.float32),
        "its_count": np.ones(1, np.float32),
    }
    outputs = {"boxes": [1, 1, 4], "classes": [1, 1], "scores": [1, 1], "count": [1]}
    graph = helper.make_graph(
        nodes,
        "mean",
        [helper.make_tensor_value_info("frame", TensorProto.UINT8, [1, SIDE, SIDE, 3])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def play(element: str, frames: int, place: Path) -> Playing:
    """Runs gst-launch-1.0 to its end."""
    pipeline = (
        f"gst-launch-1.0 videotestsrc is-live=true num-buffers={frames} ! "
        f"video/x-raw,width=1920,height=1080,framerate={RATE}/1 ! videoscale ! videoconvert ! "
        f"video/x-raw,format=RGB,width={SIDE},height={SIDE} ! {element} ! fakesink sync=false"
    )
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GST_PLUGIN_PATH": str(FOLDER),
        "GST_REGISTRY": str(place / "registry.bin"),
        "BURST_RUNTIME_DIR": str(place),
    }
    with (place / "out").open("w+") as out:
        player = subprocess.Popen(pipeline.split(), env=os.environ | own, stdout=out, stderr=subprocess.STDOUT)
        _pid, status, usage = os.wait4(player.pid, 0)
        player.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    ended = re.search(r"Execution ended after (\d+):(\d+):([\d.]+)", text)
    if player.returncode or ended is None or "WARNING" in text:
        raise SystemExit(text)
    hours, minutes, seconds = map(float, ended.groups())
    return Playing(usage.ru_utime + usage.ru_stime, 3600 * hours + 60 * minutes + seconds)


def played(args: argparse.Namespace) -> Finding:
    """Long runs and short ones, with the element and without."""
    if shutil.which("gst-launch-1.0") is None:
        raise SystemExit("GStreamer is missing: see docs/howto/gstreamer.md")
    shares: dict[str, list[float]] = {"identity": [], ELEMENT: []}
    rates: dict[str, list[float]] = {"identity": [], ELEMENT: []}
    with tempfile.TemporaryDirectory(prefix="burst-bench-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        gstreamer_write_model(place / "mean.onnx")
        elements = {"identity": "identity", ELEMENT: f"{ELEMENT} model={place}/mean.onnx threshold=0"}
        for element in elements.values():
            play(element, SHORT, place)  # makes the registry, and starts the device
        for number in range(args.pairs):
            for name in sorted(elements, reverse=bool(number % 2)):
                progress(f"round {number + 1} of {args.pairs}", name)
                short, long = (play(elements[name], frames, place) for frames in (SHORT, SHORT + args.frames))
                shares[name].append(100 * (long.cpu - short.cpu) / (args.frames / RATE))
                rates[name].append(args.frames / (long.wall - short.wall))
        progress("")
    beside = estimate([ours - floor for ours, floor in zip(shares[ELEMENT], shares["identity"], strict=True)])
    rate = estimate(rates[ELEMENT])
    lines = [(name, spell(estimate(shares[name])), spell(estimate(rates[name]))) for name in shares]
    budgets = [
        Budget("1080p30: 30 frames a second held", rate, 29.9, "frames/s", at_least=True),
        Budget("1080p30: <= 5 % of a processor beside the model and the pipeline", beside, 5.0, "%"),
    ]
    return Finding(lines, budgets, {"percent": shares, "rate": rates}, GSTREAMER_HEAD)


GSTREAMER = Inquiry(
    """What does the element `burstinfer` cost a pipeline of 1080p at 30 frames a second, beside the model?

        python bench/gateways.py gstreamer [--frames 150] [--pairs 3] [--json FILE]

    Run it in the environment of docs/howto/gstreamer.md, with the extra `bench` and onnx. A live test source is
    scaled to 320 x 320, and goes through the element or through `identity`. Processor time is that of gst-launch-1.0
    alone, as the kernel counts it for a child that has ended: the model runs in other processes. Each figure is the
    difference of a long run and a short one, so that starting costs nothing.
    """,
    played,
    options={"--frames": {"type": int, "default": 150, "help": "of a long run beyond those of a short one"}},
    settle=lambda args: vars(args).update({"frames": 30} if args.quick else {}),
    pairs=3,
)


# ---- satellites


MANY, STEP, SATELLITES_RATE = 16, 1280, 16000
MOST_MEMORY, MOST_MS = 1.1, 80.0
SATELLITES_HEAD = ("satellites", "memory, MB", "CPU s / s of sound", "listened to after, ms: p50", "p99")
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Sequence[int]) -> float:
    """Of these processes, since they began."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / _TICKS


async def satellite(address: str, phase: float, seconds: float) -> list[float]:
    """Milliseconds from each chunk to the answer of the ping behind it."""
    from wyoming.audio import AudioChunk, AudioStart
    from wyoming.client import AsyncClient
    from wyoming.ping import Ping

    noise = np.random.default_rng(1).integers(-500, 500, STEP).astype(np.int16).tobytes()
    chunk, found = AudioChunk(SATELLITES_RATE, 2, 1, noise).event(), []
    async with AsyncClient.from_uri(address) as client:
        await client.write_event(AudioStart(SATELLITES_RATE, 2, 1).event())
        begin = time.monotonic() + phase
        for n in range(round(seconds * SATELLITES_RATE / STEP)):
            await asyncio.sleep(max(0.0, begin + n * STEP / SATELLITES_RATE - time.monotonic()))
            sent = time.monotonic()
            await client.write_event(chunk)
            await client.write_event(Ping().event())
            if await client.read_event() is None:
                raise SystemExit("the server ended the connection")
            found.append(1e3 * (time.monotonic() - sent))
        await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))  # all stay until all are done
    return found


async def satellites_measured(address: str, pids: Sequence[int], count: int, seconds: float) -> dict[str, float]:
    """`count` satellites for so long."""
    from memory import held

    before = cpu_seconds(pids)
    tasks = [asyncio.create_task(satellite(address, n * STEP / SATELLITES_RATE / count, seconds)) for n in range(count)]
    await asyncio.sleep(seconds * 0.95)
    megabytes = held(list(pids))
    times = np.concatenate(await asyncio.gather(*tasks))
    p50, p99 = np.percentile(times, (50, 99))
    cpu = (cpu_seconds(pids) - before) / count / seconds
    return {"megabytes": megabytes, "cpu": cpu, "p50_ms": float(p50), "p99_ms": float(p99)}


def with_server(folder: Path, word: str, count: int, seconds: float) -> dict[str, float]:
    """On a server and a device of their own."""
    from memory import family

    with scratch() as place:
        os.environ["BURST_RUNTIME_DIR"] = str(place)
        words = ["serve", "onnxruntime", "--wyoming", "tcp://:0", "--wake-word", str(folder / word), "--json"]
        command = [sys.executable, "-m", "driver.cli", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                assert process.stdout
                said = json.loads(process.stdout.readline() or "{}")
                if not said:
                    raise SystemExit(f"burst serve has not begun: run burst {' '.join(words)}")
                with driver.connect("onnxruntime") as device:
                    pids = sorted({*family(process.pid), *family(device.service_pid), *family(device.engine_pid)})
                    found = asyncio.run(satellites_measured(said["wyoming"], pids, count, seconds))
            finally:
                process.terminate()
        for pid in (device.service_pid, device.engine_pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return found


def listened(args: argparse.Namespace) -> Finding:
    """One satellite and sixteen, in turns."""
    seconds = 1.0 if args.quick else args.seconds
    found: dict[int, list[dict[str, float]]] = {1: [], MANY: []}
    for number in range(args.pairs):
        for count in order_of_round([1, MANY], number):
            progress("satellites", f"round {number + 1}, {count}")
            found[count].append(with_server(args.folder, args.word, count, seconds))
    progress("")
    of = {n: {key: estimate([each[key] for each in rounds]) for key in rounds[0]} for n, rounds in found.items()}
    ratios = [many["megabytes"] / one["megabytes"] for one, many in zip(found[1], found[MANY], strict=True)]
    budgets = [
        Budget(f"memory of {MANY} satellites beside one", estimate(ratios), MOST_MEMORY),
        Budget(f"80 ms of {MANY} satellites are listened to within, p99", of[MANY]["p99_ms"], MOST_MS, "ms"),
    ]
    lines = [
        (str(n), spell(each["megabytes"]), spell(each["cpu"]), spell(each["p50_ms"]), spell(each["p99_ms"]))
        for n, each in of.items()
    ]
    body: dict[str, Any] = {"rounds": {str(n): rounds for n, rounds in found.items()}}
    return Finding(lines, budgets, body, SATELLITES_HEAD)


SATELLITES = Inquiry(
    """What do sixteen satellites on one wake word's model cost, beside one?

        python bench/gateways.py satellites FOLDER [--word hey_jarvis_v0.1.onnx] [--seconds 8] [--pairs 3] [--json FILE]

    FOLDER has openWakeWord's melspectrogram.onnx, embedding_model.onnx and the wake word's model. `burst serve
    onnxruntime --wyoming` and its device are started anew for each measurement; satellites, wyoming's own clients in
    this process, send 80 ms of noise every 80 ms, each at its own phase, and a ping behind it: the answer to that
    tells when the sound was listened to. Memory of the server and of both processes of the device at the end, while
    all are connected, and their processor time per second of one satellite's sound.
    """,
    listened,
    options={
        "folder": {"type": Path, "help": "of openWakeWord's models"},
        "--word": {"default": "hey_jarvis_v0.1.onnx", "help": "(default %(default)s)"},
        "--seconds": {"type": float, "default": 8.0, "help": "of each measurement (default %(default)s)"},
    },
    pairs=3,
)


if __name__ == "__main__":
    if sys.argv[2:3] == ["--server"]:
        serve_zeros(sys.argv[3])
    else:
        ask({"frigate": FRIGATE.answer, "gstreamer": GSTREAMER.answer, "satellites": SATELLITES.answer})
