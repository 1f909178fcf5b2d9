"""What does `burst exec` cost a program at its start, and what stays in it of a runtime that loses memory?

    python bench/unchanged.py [--runs 400] [--pairs 9] [--json FILE]

A program imports ONNX Runtime, makes a session of a file of 33 kB and runs it once: in process, and below `burst exec`,
with the device there. Time is from the start of Python to the first result; processor time is the program's. The
device's runtime loses 100 kB a run (burst_test_devices.leaking:Leaking): the program then runs the file --runs times,
and says by how much its private memory has grown, and the device's. In process nothing is lost: its runtime is whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from measure import Runs, rounds, scratch
from own_device import own_device
from question import Question, interval, median

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

DEVICE = "burst_test_devices.leaking:Leaking"
OWN, OURS = "in process", "burst exec"
PROGRAM = """
import json, re, sys, time
import numpy as np
import onnxruntime

def private(pid):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(kb) for kb in re.findall(r"Private_\\w+: +(\\d+)", file.read()))

path, runs, *pids = sys.argv[1:]
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
feed = {"x": np.ones((1, 64), np.float32)}
session.run(None, feed)
found = {"end": time.monotonic(), "cpu": time.process_time() * 1000}
for _ in range(100):
    session.run(None, feed)
before = [private(pid) for pid in ("self", *pids)]
for _ in range(int(runs)):
    session.run(None, feed)
grown = [1.024 * (private(pid) - was) / int(runs) for pid, was in zip(("self", *pids), before)]
print(json.dumps(found | dict(zip(("program", "device"), grown))))
"""


def write_model(path: Path) -> None:
    """Two layers."""
    from onnx import TensorProto, helper, numpy_helper, save

    random = np.random.default_rng(3)
    weights = [numpy_helper.from_array(random.standard_normal((64, 64)).astype(np.float32), name) for name in "ab"]
    nodes = [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("MatMul", ["h", "b"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in "xy")
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def block(before: list[str], *words: object) -> dict[str, float]:
    """What one run of the program says of itself. Modules are compiled once, as those of a wheel are."""
    begin = time.monotonic()
    command = [*before, sys.executable, "-c", PROGRAM, *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
    found["ms"] = (found.pop("end") - begin) * 1000
    return {"device": 0.0, **found}


def run(args: argparse.Namespace) -> Runs:
    """All rounds: both ways once, the next round backwards."""
    runs = Runs()
    with ExitStack() as stack:
        path = stack.enter_context(scratch()) / "net.onnx"
        write_model(path)
        device = stack.enter_context(own_device(DEVICE))
        below = [sys.executable, "-m", "burst_engine", "exec", "--device", DEVICE, "--"]
        block(below, path, 1)  # the file is tried once, before the first program has it
        for name in rounds(args.pairs, [OWN, OURS]):
            runs.add(
                name, block([], path, args.runs) if name == OWN else block(below, path, args.runs, device.engine_pid)
            )
    return runs


UNCHANGED = Question(
    __doc__,
    run,
    {
        "ms to the first result": interval("ms"),
        "ms of processor time": interval("cpu"),
        "kB a run, program": median("program"),
        "kB a run, device": median("device"),
    },
    options={"--runs": {"type": int, "default": 400, "help": "on a runtime that loses memory (default 400)"}},
    figures=("ms", "cpu", "program", "device"),
    bars=("ms", "ms"),
    label=lambda name: name,
    ours=(OURS,),
    kept=("runs",),
)

if __name__ == "__main__":
    UNCHANGED.answer()
