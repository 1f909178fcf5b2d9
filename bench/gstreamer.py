"""What does the element `burstinfer` cost a pipeline of 1080p at 30 frames a second, beside the model?

    python bench/gstreamer.py [--frames 150] [--pairs 3] [--json FILE]

Run it in the environment of docs/howto/gstreamer.md, with the extra `bench` and onnx. A live test source is scaled to
320 x 320, and goes through the element or through `identity`. Processor time is that of gst-launch-1.0 alone, as the
kernel counts it for a child that has ended: the model runs in other processes. Each figure is the difference of a long
run and a short one, so that starting costs nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from measure import conditions
from onnx import TensorProto, helper, numpy_helper
from verdict import Budget, Report, arguments, parse, progress, publish, spell

from driver.cli.timing import estimate
from driver.gateways.gstreamer.plugin_folder import ELEMENT, FOLDER

QUESTION = "What does burstinfer cost a pipeline of 1080p at 30 frames a second, beside the model?"
SIDE, RATE, SHORT = 320, 30, 30
HEAD = ("element", "% of one processor in the pipeline's process", "frames a second")


class Playing(NamedTuple):
    """One run of a pipeline: seconds of a processor, and seconds that it played."""

    cpu: float
    wall: float


def write_model(path: Path) -> None:
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


def main() -> None:
    """Measures, prints, writes."""
    parser = arguments(__doc__, pairs=3)
    parser.add_argument("--frames", type=int, default=150, help="of a long run beyond those of a short one")
    args = parse(parser)
    if args.quick:
        args.frames = 30
    if shutil.which("gst-launch-1.0") is None:
        raise SystemExit("GStreamer is missing: see docs/howto/gstreamer.md")
    shares: dict[str, list[float]] = {"identity": [], ELEMENT: []}
    rates: dict[str, list[float]] = {"identity": [], ELEMENT: []}
    with tempfile.TemporaryDirectory(prefix="burst-bench-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        write_model(place / "mean.onnx")
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
    publish(args, Report(QUESTION, conditions(), lines, budgets, {"percent": shares, "rate": rates}, HEAD))


if __name__ == "__main__":
    main()
