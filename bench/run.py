"""Runs the whole bench, and keeps what it finds in one JSON: machine, commit, conditions, rows, medians and intervals.

    python bench/run.py [--only burst_payload.py fenced.py …] [--budget MINUTES] [--again] [--quick] [--json FILE]
    python bench/run.py --script "serving.py MODEL.onnx --shape 1,1,64,160"
    python bench/run.py --keep [--json FILE]

It may be stopped at any time: a result is in the JSON when its script has ended, and is not measured again for the same
commit, unless --again says so. What a script prints and draws lies beside the JSON, in files of its name. --budget ends
before a script that would take longer than is left. --keep measures nothing: it puts the tables of these results into
bench/README.md, those that docs/performance.md shows there, and the pictures into docs/. The JSON itself is not kept in
the repository: it goes with a release.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measured_pages import PAGE, README, ROOT, kept, with_results, written
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# The name of a result: about how many seconds it takes, and options that do not change what it asks.
PLAN = {
    "queue_roundtrip.py": (20, ""),
    "queue_roundtrip.py --sizes": (30, ""),
    "queue_throughput.py": (150, "--pairs 5"),
    "queue_idle.py": (60, ""),
    "queue_throughput.py broadcast": (135, "--pairs 4 --seconds 0.4"),
    "queue_idle.py number": (50, ""),
    "burst_roundtrip.py queue": (10, ""),
    "burst_roundtrip.py": (30, ""),
    "burst_roundtrip.py c": (10, ""),
    "burst_payload.py frame": (20, ""),
    "burst_payload.py": (50, ""),
    "burst_depth.py": (30, ""),
    "burst_many.py": (70, ""),
    "burst_many.py top": (140, ""),
    "interference.py": (60, ""),
    "interference.py prepare": (70, ""),
    "ops.py": (50, ""),
    "memory.py": (100, ""),
    "mobilenet.py": (30, "--pairs 9"),
    "mobilenet.py --threads 2": (20, "--pairs 9"),
    "mobilenet.py threads": (50, ""),
    "cold_start.py": (50, ""),
    "newcomer.py": (70, ""),
    "cold_start.py cache": (110, "--pairs 7"),
    "cold_start.py constants": (40, "--pairs 5"),
    "qos.py --only stream grpc": (610, "--pairs 5 --seconds 6"),
    "qos.py --only fairness uids": (60, "--pairs 5 --seconds 10"),
    "fenced.py": (10, ""),
    "state.py": (10, ""),
    "burst_depth.py goodput": (80, ""),
    "idle_cost.py": (50, ""),
}
# The name of a result: its options for pictures, and the files of the documentation that they are kept as.
PICTURES = {
    "queue_roundtrip.py --sizes": {"--plot": "docs/queue_sizes.png"},
    "queue_throughput.py": {"--plot": "docs/queue_throughput.png"},
    "queue_idle.py number": {"--plot": "docs/queue_cost.png"},
    "burst_roundtrip.py": {"--plot": "docs/pictures/burst_roundtrip.png", "--cdf": "docs/pictures/burst_cdf.png"},
    "burst_payload.py": {"--plot": "docs/pictures/burst_payload.png"},
    "qos.py --only stream grpc": {"--plot": "docs/pictures/qos.png"},
}
PATIENCE = 4  # a script that takes as many times its figure above has failed, and 60 s more
HEAVY = {"rounds", "cdf_us", "blocks"}  # of every round: what medians and intervals were made of


def commit() -> str:
    """What is measured: HEAD, and whether files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short=8", "HEAD") or "unknown"
    return (
        f"{name}+"
        if git("status", "--porcelain", "--untracked-files=no", "--", "burst", "csrc", "driver", "fmq")
        else name
    )


def slim(found: Any) -> Any:
    """Without the figures of every round."""
    if isinstance(found, dict):
        return {key: slim(value) for key, value in found.items() if key not in HEAVY}
    return [slim(value) for value in found] if isinstance(found, list) else found


def plan(args: argparse.Namespace) -> dict[str, tuple[float, str]]:
    """What is asked for, as in PLAN."""
    if args.script:
        name, *words = shlex.split(args.script)
        if words and f"{name} {words[0]}" in kept(README.read_text()):
            name += f" {words.pop(0)}"
        return {name: (300, shlex.join(words))}
    return {name: one for name, one in PLAN.items() if not args.only or name.split()[0] in args.only}


def measure(name: str, args: argparse.Namespace, seconds: float, options: str) -> dict[str, Any]:
    """Runs one script in a session of its own: its result, or {"failed": why}. Pictures go to the folder of --json."""
    script, *words = shlex.split(f"{name} {options}")
    folder = args.json.parent
    folder.mkdir(parents=True, exist_ok=True)
    target, log = folder / "one.json", folder / f"{name.replace(' ', '_')}.log"
    target.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "bench" / script), *words, "--json", str(target)]
    for option, page in PICTURES.get(name, {}).items():
        command += [option, str(folder / Path(page).name)]
    begin, most = time.monotonic(), PATIENCE * seconds + 60
    with log.open("w") as out:
        command += ["--quick"] if args.quick else []
        one_thread = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
        process = subprocess.Popen(command, env=one_thread, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(most)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than {most} s; see {log}"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code or not target.exists():
        return {"failed": f"exit status {code}; see {log}"}
    found = slim(json.loads(target.read_text()))
    took = round(time.monotonic() - begin, 1)
    return {"command": shlex.join([script, *words]), "rounds": found.pop("pairs"), **found, "seconds": took}


def read(path: Path) -> dict[str, Any]:
    """A JSON of this program. Ends it for a file that is none."""
    if not path.exists():
        return {"format": 1, "results": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("format") != 1:
        sys.exit(f"bench: {path}: format {found.get('format')!r}; this program reads 1; choose another FILE")
    return found


def save(path: Path, measured: dict[str, Any]) -> None:
    """At once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(measured, indent=1) + "\n")
    draft.replace(path)


def is_done(result: dict[str, Any] | None, now: str, *, is_quick: bool) -> bool:
    """Whether it need not be measured again."""
    return bool(result) and "failed" not in result and (result["commit"], result.get("quick", False)) == (now, is_quick)


def run(args: argparse.Namespace) -> int:
    """Everything that is not there yet; 1 when something failed."""
    measured, now = read(args.json), commit()
    results = measured["results"]
    chosen = plan(args)
    left = [name for name in chosen if args.again or not is_done(results.get(name), now, is_quick=args.quick)]
    expected = {name: chosen[name][0] for name in left}
    end = time.monotonic() + args.budget * 60 if args.budget else float("inf")
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("of {task.fields[about]}")
    save(args.json, measured)
    with Progress(*columns) as progress:
        task = progress.add_task("", total=(total := sum(expected.values())), about=f"about {total / 60:.0f} min")
        for name, seconds in expected.items():
            if time.monotonic() + seconds > end:
                continue
            progress.update(task, description=name)
            result = measure(name, args, *chosen[name])
            results[name] = {**result, "commit": now, "quick": args.quick}
            save(args.json, measured)
            progress.advance(task, seconds)
    done = [name for name in chosen if is_done(results.get(name), now, is_quick=args.quick)]
    minutes = sum(results[name]["seconds"] for name in done) / 60
    print(f"{args.json}: {len(done)} of {len(chosen)} results, {minutes:.1f} minutes in all")
    for name in sorted({*chosen} - {*done}):
        print(f"missing: {name}: {results.get(name, {}).get('failed', 'there was no time; run this again')}")
    return 1 if any("failed" in results.get(name, {}) for name in left) else 0


def results_of(path: Path) -> dict[str, Any]:
    """The results in a JSON, less those that failed. Ends this program for one of --quick, which has none."""
    found = read(path)["results"]
    if any(result.get("quick") for result in found.values()):
        sys.exit(f"bench: {path}: --quick measures nothing; run without it before --keep")
    return {name: result for name, result in found.items() if "failed" not in result}


def keep(args: argparse.Namespace) -> None:
    """Write the pages, copy the pictures. Ends this program for a result that has no place in bench/README.md."""
    found = results_of(args.json)
    if homeless := set(found) - set(kept(README.read_text())):
        marks = ", ".join(f"<!-- from {name} --> <!-- end -->" for name in sorted(homeless))
        sys.exit(f"bench: {README} has no place for {len(homeless)} results; make one for each: {marks}")
    for picture in (one for name in found for one in PICTURES.get(name, {}).values()):
        with contextlib.suppress(FileNotFoundError):  # the JSON came without its pictures
            shutil.copyfile(args.json.parent / Path(picture).name, ROOT / picture)
    README.write_text(with_results(README.read_text(), found))
    PAGE.write_text(written(PAGE.read_text(), README.read_text()))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted({line.split()[0] for line in PLAN}), metavar="SCRIPT")
    parser.add_argument("--script", metavar="LINE", help="a script with its options, in the place of the plan")
    parser.add_argument(
        "--budget", type=float, metavar="MINUTES", help="begin nothing that would take longer than this in all"
    )
    parser.add_argument("--again", action="store_true", help="measure also what is there for this commit")
    parser.add_argument("--quick", action="store_true", help="tiny blocks: shows that it works, measures nothing")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "bench/out/bench.json", metavar="FILE", help="where results are kept"
    )
    parser.add_argument("--keep", action="store_true", help="write the results into bench/README.md and the page")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a running script ends, too
    return keep(args) or 0 if args.keep else run(args)


if __name__ == "__main__":
    sys.exit(main())
