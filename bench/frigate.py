"""What does a frame cost through Frigate's plug-in for shared memory, beside its zmq detector? And a kill?

    FRIGATE_SOURCE=~/frigate python bench/frigate.py [--calls 100] [--pairs 9] [--kills 5] [--json FILE]

FRIGATE_SOURCE is a checkout of https://github.com/blakeblackshear/frigate: the zmq detector is Frigate's own module,
loaded from there. Frames are 640 x 640 of uint8, 1.2 MB, from an array like the one over Frigate's shared memory. The
model finds one box by looking at one pixel, so what is measured is the way to the model and back. The zmq detector
asks `burst serve onnxruntime --frigate`, and a server that answers rows of zeros without looking at the frame: the
least that its protocol costs.

Memory: of the server and the device, for one detector and for eight, each of which has had its frames looked at.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import psutil
import zmq
from measure import conditions, server_process
from onnx import TensorProto, helper, numpy_helper
from verdict import Budget, Report, arguments, parse, progress, publish

import driver
from driver.cli.timing import Estimate, estimate, order_of_round, time_calls

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/driver"))
from frigate_stand_ins import config, plug_in, zmq_config  # noqa: E402

QUESTION = "What does a frame cost through Frigate's plug-in for shared memory, beside its zmq detector?"
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
    command = ours if kind == ZMQ else [sys.executable, __file__, "--server", address]
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


def measured(args: argparse.Namespace) -> Report:
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


def _report(found: dict[str, list[float]], recovered: dict[str, list[float]], one: float, eight: float) -> Report:
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
    return Report(QUESTION, conditions(), lines, budgets, body, HEAD)


def main() -> None:
    if sys.argv[1:2] == ["--server"]:
        serve_zeros(sys.argv[2])
        return
    parser = arguments(__doc__, pairs=9)
    parser.add_argument("--calls", type=int, default=100, help="frames of a block")
    parser.add_argument("--kills", type=int, default=5)
    args = parse(parser)
    if args.quick:
        args.calls, args.kills = 5, 1
    publish(args, measured(args))


if __name__ == "__main__":
    main()
