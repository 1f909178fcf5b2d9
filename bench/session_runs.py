"""What does a run of an ONNX Runtime session cost below `burst exec`, by the length of the run?

    python bench/session_runs.py [--files FILE...] [--pairs 9] [--seconds 1] [--json FILE]

A program makes a session of each file with the options that a program gives that gives none, and runs it on the same
inputs for --seconds after a warm-up: in process, and below `burst exec`, with the device there. Open sizes are 1 in
front and the first of a few elsewhere with which the file runs. Files that run with none of them are left out, and
named. A figure is the median of a program's runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from measure import Budget, Runs, rounds
from own_device import own_device
from question import Question, interval

from driver.cli.timing import Estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

OWN, OURS = "in process", "burst exec"
_SMALL = 50_000  # bytes of a file that has few weights
PROGRAM = """
import json, statistics, sys, time
import numpy as np
import onnxruntime

path, seconds = sys.argv[1], float(sys.argv[2])
types = {"tensor(float)": "f4", "tensor(int64)": "i8", "tensor(int32)": "i4", "tensor(bool)": "?"}
session, random = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]), np.random.default_rng(1)

def feed(size):
    found = {}
    for i in session.get_inputs():
        shape = [d if isinstance(d, int) else size if n else 1 for n, d in enumerate(i.shape)]
        values = random.random(shape) if i.type == "tensor(float)" else np.ones(shape)
        found[i.name] = values.astype(types[i.type])
    return found

for size in (32, 64, 320, 16, 1):
    try:
        given = feed(size)
        session.run(None, given)
        break
    except Exception:
        continue
else:
    sys.exit("no size fits")
times, end = [], time.monotonic() + 1.5 * seconds
while (begin := time.monotonic()) < end or len(times) < 9:
    session.run(None, given)
    times.append(time.monotonic() - begin)
print(json.dumps(statistics.median(times[len(times) // 3 :]) * 1000))
"""


def block(before: list[str], path: str, seconds: float) -> float | None:
    """The median time of a run in ms; None if the file does not run."""
    command = [*before, sys.executable, "-c", PROGRAM, path, str(seconds)]
    done = subprocess.run(command, check=False, capture_output=True)
    return json.loads(done.stdout) if not done.returncode else None


def shipped() -> list[str]:
    """The .onnx files with weights that installed packages have brought."""
    folders = [Path(folder) for folder in sys.path if folder.endswith("site-packages")]
    found = {path.resolve() for folder in folders for path in folder.rglob("*.onnx") if path.stat().st_size > _SMALL}
    return sorted(str(path) for path in found if not {"test", "tests", "testing", "datasets"} & set(path.parts))


def run(args: argparse.Namespace) -> Runs:
    """All rounds of one file after the other: both ways once, the next round backwards."""
    runs, below = Runs(), [sys.executable, "-m", "burst_engine", "exec", "--"]
    with own_device("onnxruntime"):
        for path in args.files or shipped():
            name = "/".join(Path(path).parts[-2:])
            if block(below, path, 0.01) is None:  # the file is tried once, before the first program has it
                runs.drop(name, "it runs with none of the sizes")
                continue
            found: dict[str, list[float]] = {OWN: [], OURS: []}
            for way in rounds(args.pairs, [OWN, OURS], lambda way, name=name: f"{name}, {way}"):
                found[way].append(block(below if way == OURS else [], path, args.seconds) or np.nan)
            for own, ours in zip(*found.values(), strict=True):
                runs.add(name, {"own": own, "ours": ours, "ratio": ours / own})
    return runs


def budgets(runs: Runs, _: argparse.Namespace) -> Sequence[Budget]:
    """The ratios of files whose runs take a millisecond and more: each the median of its pairs."""
    long = [name for name in runs.blocks if np.median(runs.values(name, "own")) >= 1]
    if not long:
        return []
    ratios = sorted(float(np.median(runs.values(name, "ratio"))) for name in long)
    found = ("median", float(np.median(ratios)), 1.05), ("worst", ratios[-1], 1.25)
    return [
        Budget(
            f"{len(long)} files over 1 ms, {which}: <= {limit} x in process", Estimate(ratio, ratio, ratio, 1.0), limit
        )
        for which, ratio, limit in found
    ]


SESSION_RUNS = Question(
    __doc__,
    run,
    {"ms in process": interval("own"), "ms below burst exec": interval("ours"), "ratio": interval("ratio")},
    options={
        "--files": {"nargs": "+", "metavar": "FILE", "help": "default: what installed packages have brought"},
        "--seconds": {"type": float, "default": 1.0, "help": "of runs in a program that count (default 1)"},
    },
    budgets=budgets,
    figures=("own", "ours", "ratio"),
    bars=("ratio", "x"),
    label=lambda name: name,
    kept=("seconds",),
    is_pinned=False,
)

if __name__ == "__main__":
    SESSION_RUNS.answer()
