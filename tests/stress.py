"""How long stress tests are, and the totals that they come to over many runs.

    python tests/stress.py [--only FIGURE …] [--minutes M]    goes on where the last run stopped, up to the totals
    python tests/stress.py --table                            what has been done so far

`BURST_STRESS` scales them: 1, the default, is the full length, of hours; `make stress` takes a twentieth, sized for two
hours on two cores. `make stress-long` runs such parts until the totals are reached, and writes each into
tests/stress-ledger.json, with the commit that it ran on, and into tests/README.md. It can be stopped and started
again at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEDGER, README = ROOT / "tests/stress-ledger.json", ROOT / "tests/README.md"
BUDGET = float(os.environ.get("BURST_STRESS", "1"))
PART = 0.1
"""The budget of one run of a part."""


def times(count: int) -> int:
    """So many in a full run; the part of them that the budget allows, but one."""
    return max(1, round(count * BUDGET))


def seconds(full: float) -> float:
    """The same of time."""
    return full * min(1.0, BUDGET)


class Goal(NamedTuple):
    """A figure, how much of it there is to be, and the test that adds to it."""

    total: int
    test: str


_IMPORTERS = "tests/driver/importers"
_IN_FILE_FORM = "tests/hostile/test_mutant_files.py::test_a_million_mutants_reach_no_neighbour"
GOALS = {
    "kills with recovery": Goal(5000, "tests/driver/client/test_recovery_kills.py::test_many_random_kills"),
    "kills in mid-sentence": Goal(200, "tests/examples/test_language_model.py::test_kills_in_mid_sentence"),
    "renewals under load": Goal(10_000, "tests/driver/client/test_renewal_kills.py"),
    "runs that leak": Goal(10**5, "tests/driver/service/test_upkeep.py"),
    "mutants of .tflite": Goal(10**6, f"{_IMPORTERS}/test_tflite_damage.py::test_a_million_mutants_find_nothing"),
    "mutants of .onnx": Goal(10**6, f"{_IMPORTERS}/test_onnx_damage.py::test_a_million_mutants_find_nothing"),
    "mutants of headers, tflite": Goal(
        10**6, f"{_IMPORTERS}/test_file_form.py::test_a_million_mutants_of_headers[fuzz_tflite]"
    ),
    "mutants of headers, onnx": Goal(
        10**6, f"{_IMPORTERS}/test_file_form.py::test_a_million_mutants_of_headers[fuzz_onnx]"
    ),
    "mutants in file form, tflite": Goal(500_000, f"{_IN_FILE_FORM}[tflite]"),
    "mutants in file form, onnx": Goal(500_000, f"{_IN_FILE_FORM}[onnx]"),
    "cycles of memory": Goal(10**6, "tests/burst/test_leaks.py::test_allocate_encode_free"),
    "cycles of buffers": Goal(10**6, "tests/driver/engine/test_domains.py::TestEndurance::test_a_million_cycles"),
    "mutated packets to a device": Goal(10**7, "tests/driver/service/test_hostile_client.py"),
    "seconds beside attackers": Goal(7200, "tests/hostile/test_soak.py"),
}


def ledger() -> list[dict[str, Any]]:
    """The runs so far."""
    found: list[dict[str, Any]] = json.loads(LEDGER.read_text()) if LEDGER.exists() else []
    return found


def done(runs: list[dict[str, Any]]) -> Counter[str]:
    """What runs that passed add up to."""
    totals: Counter[str] = Counter()
    for run in runs:
        if run["passed"]:
            totals.update(run["tally"])
    return totals


def table(runs: list[dict[str, Any]]) -> str:
    """How far each figure is, and on which commits."""
    totals, lines = done(runs), [f"{'what':28} {'so far':>12} {'of':>12}  commits"]
    for name, goal in GOALS.items():
        lines.append(f"{name:28} {totals[name]:>12,} {goal.total:>12,}  {' '.join(commits(runs, name)) or '-'}")
    return "\n".join(lines)


def commits(runs: list[dict[str, Any]], *names: str) -> list[str]:
    """On which these figures came together, in order."""
    return list(dict.fromkeys(run["commit"] for run in runs if run["passed"] and {*names} & run["tally"].keys()))


def sentence(runs: list[dict[str, Any]]) -> str:
    """What tests/README.md says: only what was really run."""
    totals = done(runs)
    found = [f"{totals[name]:,} {name} (of {GOALS[name].total:,})" for name in GOALS if totals[name]]
    if not found:
        return "`make stress-long` has not run yet."
    known = commits(runs, *GOALS)
    on = f"commit {known[0]}" if len(known) == 1 else f"commits {known[0]} to {known[-1]}"
    text = f"So far long runs have come to {', '.join(found)}: [ledger](stress-ledger.json), {on}."
    return "\n".join(textwrap.wrap(text, 130, break_long_words=False, break_on_hyphens=False))


def quote(text: str, runs: list[dict[str, Any]]) -> str:
    """tests/README.md with that sentence between its marks."""
    return re.sub(
        r"(?<=<!-- from stress-ledger\.json -->\n).*?(?=\n<!-- end -->)",
        lambda _: sentence(runs),
        text,
        flags=re.DOTALL,
    )


def run_part(name: str, budget: float) -> dict[str, Any]:
    """One run of the test that adds to a figure, as the ledger keeps it."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tally = Path(folder) / "tally"
        words = [sys.executable, "-m", "pytest", "-q", "-m", "stress", "-o", "faulthandler_timeout=3600"]
        environment = os.environ | {"BURST_STRESS": str(budget), "BURST_TALLY": str(tally)}
        status = subprocess.run([*words, GOALS[name].test], cwd=ROOT, env=environment, check=False).returncode
        found = json.loads(tally.read_text()) if tally.exists() else {}
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    took = round(time.monotonic() - begin)
    return {
        "commit": commit,
        "when": when,
        "test": GOALS[name].test,
        "seconds": took,
        "passed": not status,
        "tally": found,
    }


def go_on(names: list[str], minutes: float) -> int:
    """Runs parts in turn until each figure has its total, or the time is over; 1 when a test has failed."""
    runs, end = ledger(), time.monotonic() + 60 * minutes
    while left := [name for name in names if done(runs)[name] < GOALS[name].total]:
        for name in left:
            if time.monotonic() > end:
                return 0
            run = run_part(name, PART)
            if run["passed"] and not run["tally"].get(name):
                print(f"{GOALS[name].test} was skipped, or counts no {name!r}", file=sys.stderr)
                return 1
            runs.append(run)
            LEDGER.write_text(json.dumps(runs, indent=1) + "\n")
            README.write_text(quote(README.read_text(), runs))
            if not run["passed"]:
                return 1
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="what has been done so far")
    parser.add_argument(
        "--only", nargs="+", choices=GOALS, default=list(GOALS), metavar="FIGURE", help=", ".join(GOALS)
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begins no part after so long")
    args = parser.parse_args()
    status = 0 if args.table else go_on(args.only, args.minutes)
    print(table(ledger()))
    return status


if __name__ == "__main__":
    sys.exit(main())
