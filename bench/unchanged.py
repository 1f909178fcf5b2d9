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
from measure import Budget, Runs, ask, rounds, scratch, shared_memory
from own_device import own_device
from question import Question, against, interval, median, times

from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
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


def budgets(runs: Runs, _: argparse.Namespace) -> Sequence[Budget]:
    """The start of a program, beside the same in process in the same round."""
    more = estimate(runs.values(OURS, "ms") - runs.values(OWN, "ms"))
    return [Budget("to the first result: <= 300 ms more than in process", more, 300, "ms")]


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
    budgets=budgets,
    figures=("ms", "cpu", "program", "device"),
    bars=("ms", "ms"),
    label=lambda name: name,
    ours=(OURS,),
    kept=("runs",),
)

HOLDING = """
import sys
import numpy as np
import onnxruntime

session, types = onnxruntime.InferenceSession(sys.argv[1]), {"tensor(float)": "f4", "tensor(int64)": "i8"}

def ones(given, length):
    shape = [d if isinstance(d, int) else length if n else 1 for n, d in enumerate(given.shape)]
    return np.ones(shape, types[given.type])

for length in (16, 64, 128):
    session.run(None, {given.name: ones(given, length) for given in session.get_inputs()})
print(flush=True)
input()
"""


def held(before: Sequence[str], path: str, clients: int, others: Sequence[int]) -> float:
    """MiB of so many programs that have run a file, and of the processes beside them."""
    command, pipe = [*before, sys.executable, "-c", HOLDING, path], subprocess.PIPE
    with ExitStack() as stack:
        programs = [
            stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)) for _ in range(clients)
        ]
        for program in programs:
            assert program.stdout
            if program.stdout.readline() != "\n":
                raise SystemExit(f"bench: {path} does not run")
        found = shared_memory([*(program.pid for program in programs), *others])
        for program in programs:
            program.communicate("\n")
    return found


def run_programs(args: argparse.Namespace) -> Runs:
    """All rounds: both ways once, the next round backwards. The device has been there, and has seen the file."""
    runs, below = Runs(), [sys.executable, "-m", "burst_engine", "exec", "--"]
    with own_device("onnxruntime") as device:
        held(below, args.model, 1, ())
        for name in rounds(args.pairs, [OWN, OURS]):
            pids = [device.service_pid, device.engine_pid] if name == OURS else []
            runs.add(name, {"mib": held(below if name == OURS else [], args.model, args.clients, pids)})
    return runs


PROGRAMS = Question(
    """What do several programs with one model hold in memory below `burst exec`, beside a session in each of them?

        python bench/unchanged.py programs MODEL [--clients 8] [--pairs 5] [--json FILE]

    Each program opens the .onnx file and runs it on inputs of three sizes: 1 in front, and 16, 64 and 128 where else a
    size is open. Then the memory of all of them counts, and of the device: pages in proportion to who shares them.
    """,
    run_programs,
    {"MiB": interval("mib"), "x in process": times(against(OWN, "mib"), OWN)},
    options={"model": {"metavar": "MODEL"}, "--clients": {"type": int, "default": 8, "help": "programs (default 8)"}},
    budgets=lambda runs, args: [
        Budget(f"memory of {args.clients} programs: <= 0.5 x in process", against(OWN, "mib")(runs, OURS), 0.5)
    ],
    figures=("mib",),
    bars=("mib", "MiB"),
    ours=(OURS,),
    kept=("clients",),
    pairs=5,
    is_pinned=False,
)

if __name__ == "__main__":
    ask({"": UNCHANGED.answer, "programs": PROGRAMS.answer})
