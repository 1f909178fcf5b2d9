"""Do packages that nobody changed give the same bits under `burst exec`, also where the engine is killed half-way?

    python bench/packages.py [--only magika ddddocr ...] [--python FILE]

Runs each program of `package_programs.py` three times in a Python of its own: as it is, under `burst exec`, and there
with a kill -9 of the engine before the fourth of six answers. Packages that are not installed are rows that say what
to install; `--python`: of an environment that has them, and Burst.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from package_programs import PACKAGES, STEPS, Package, whole

ROOT = Path(__file__).parents[1]
_DIGEST = 64  # characters
TIMEOUT = 500.0


class Ended(NamedTuple):
    """A program that has ended: its answers, the runs of its models, and why some were in its process."""

    answers: list[str]
    device_runs: int = 0
    process_runs: int = 0
    reasons: tuple[str, ...] = ()


def run(python: str, package: Package, *before: str, kills: bool = False) -> list[str]:
    """Return the digests that a program prints. Raise RuntimeError with the end of what it says if it fails."""
    command = [*before, python, "-W", "ignore", "-c", whole(package, kills=kills)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=TIMEOUT)
    found = [line for line in ended.stdout.splitlines() if len(line) == _DIGEST]
    if ended.returncode or len(found) != STEPS:
        raise RuntimeError(ended.stderr[-2000:] or f"{len(found)} answers instead of {STEPS}")
    return found


def run_in_device(python: str, package: Package, *, kills: bool) -> Ended:
    """Return what came of a program under `burst exec`. Raise as `run`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        before = [python, "-m", "burst_engine", "exec", "--report", str(report), "--"]
        answers = run(python, package, *before, kills=kills)
        processes = json.loads(report.read_text())["processes"]
    models = [model for process in processes for model in process["models"]]
    device, process = (sum(m.get(what, 0) for m in models) for what in ("device_runs", "process_runs"))
    reasons = tuple(row["reason"] for process in processes for row in process["in_process"])
    return Ended(answers, device, process_runs=process, reasons=reasons)


def row_of(python: str, name: str, package: Package) -> str:
    """Return the line of one package."""
    try:
        own = run(python, package)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        last = str(error).strip().splitlines()[-1].replace("|", "/")
        return f"| {name} | it does not run by itself: {last:.90} (pip install {package.install}) | | | |"
    cells = []
    for kills in (False, True):
        try:
            found = run_in_device(python, package, kills=kills)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            last = str(error).strip().splitlines()[-1].replace("|", "/")
            cells.append(f"**fails**: {last:.90}")
            continue
        cells.append("same bits" if found.answers == own else "**differs**")
        runs = f"{found.device_runs} | {found.process_runs}"
        if found.reasons:
            print(f"{name}: in its process: {'; '.join(found.reasons)}", file=sys.stderr)
    return f"| {name} | {' | '.join(cells)} | {runs if '**fails**' not in cells[-1] else ' | '} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PACKAGES, default=list(PACKAGES), metavar="NAME")
    parser.add_argument("--python", default=sys.executable, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("BURST_RUNTIME_DIR", folder)
        print("| package | under burst exec | with a kill | runs in the device | in the process |")
        print("|---|---|---|--:|--:|")
        for name in args.only:
            print(row_of(args.python, name, PACKAGES[name]), flush=True)


if __name__ == "__main__":
    main()
