"""What the scripts print and write: a table, budgets, JSON."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from measure import Runs, Subject, over_floor, times_floor

from driver.cli.timing import Estimate, in_words

if TYPE_CHECKING:
    from collections.abc import Sequence


class Budget(NamedTuple):
    """A promise, and what came of it: None when it could not be measured."""

    text: str
    found: Estimate | None
    limit: float
    unit: str = "x"
    at_least: bool = False  #: the limit is the least that keeps it, and not the most

    @property
    def verdict(self) -> str:
        """The median decides; an interval that contains the limit is told."""
        if self.found is None:
            return "not measured"
        median, low, high, _ = self.found
        is_kept = median >= self.limit if self.at_least else median <= self.limit
        is_within = low < self.limit <= high if self.at_least else low <= self.limit < high
        return ("met" if is_kept else "missed") + (", the interval contains the limit" if is_within else "")

    def line(self) -> str:
        """For people."""
        return f"{self.text}: {spell(self.found, self.unit)} -> {self.verdict}"


def spell(found: Estimate | None, unit: str = "") -> str:
    """A median with its interval."""
    if found is None:
        return "-"
    return f"{found.median:.2f}{unit and ' '}{unit} [{found.low:.2f} .. {found.high:.2f}]"


def size(nbytes: int) -> str:
    """For people."""
    if nbytes < 1024:
        return f"{nbytes} B"
    return f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"


def arguments(doc: str | None, pairs: int = 9) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, help=f"rounds; below 9 proves little (default {pairs}, with --quick 2)")
    parser.set_defaults(default_pairs=pairs)
    parser.add_argument("--quick", action="store_true", help="tiny blocks: shows that it works, measures nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all percentiles of all blocks, and the conditions")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture (.png, .svg, .pdf); needs matplotlib")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, checked before anything long begins."""
    args = parser.parse_args()
    if args.pairs is None:
        args.pairs = 2 if args.quick else args.default_pairs
    if args.pairs < 1:
        parser.error("--pairs: at least 1")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; install it, or the extra 'bench'")
    return args


_told: list[str] = []


def progress(stage: str, step: str = "") -> None:
    """One line that rewrites itself; a line per stage when stderr is no terminal. "" ends it."""
    if sys.stderr.isatty():
        print(f"\r{f'{stage}: {step}' if step else stage:<78}", end="" if stage else "\n", file=sys.stderr, flush=True)
    elif stage and _told != [stage]:
        _told[:] = [stage]
        print(stage, file=sys.stderr, flush=True)


def subject_rows(runs: Runs, subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """A row per floor and subject: medians over rounds, and the pairs."""
    floors = [Subject(name, dict, name) for name in dict.fromkeys(s.floor for s in subjects)]
    return [_row(runs, subject) for subject in (*floors, *subjects)]


def _row(runs: Runs, subject: Subject) -> dict[str, Any]:
    row: dict[str, Any] = {"name": subject.name, "ours": subject.is_ours, "floor": subject.floor}
    if subject.name in runs.errors:
        return {**row, "error": runs.errors[subject.name]}
    for key in ("p50_us", "p99_us", "p999_us"):
        row[key] = float(np.median(runs.values(subject.name, key)))
    row["over_floor_us"] = over_floor(runs, subject.name)._asdict()
    row["times_floor"] = times_floor(runs, subject.name)._asdict()
    return {**row, "rounds": runs.blocks[subject.name]}


_HEAD = ("", "p50 us", "p99 us", "p99.9 us", "over the floor, us", "x floor", "floor")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    name = row["name"]
    if "error" in row:
        return name, "-", "-", "-", row["error"][:60], "", ""
    figures = tuple(f"{row[key]:.2f}" for key in ("p50_us", "p99_us", "p999_us"))
    if name == row["floor"]:
        return name, *figures, "", "", ""
    floor = row["floor"].removeprefix("floor: ").removeprefix("limit ").partition(",")[0]
    over, times = Estimate(**row["over_floor_us"]), Estimate(**row["times_floor"])
    return name, *figures, spell(over), f"{times.median:.2f}", floor


def table(lines: Sequence[Sequence[str]], head: Sequence[str] = _HEAD) -> str:
    """Columns as wide as they need to be."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    show = [head, ["-" * w for w in widths], *lines]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in show)


def markdown(lines: Sequence[Sequence[str]], head: Sequence[str] = _HEAD) -> str:
    """The same for a page."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


class Report(NamedTuple):
    """What a script has to say."""

    question: str
    conditions: dict[str, Any]
    lines: Sequence[Sequence[str]]
    budgets: Sequence[Budget]
    body: dict[str, Any]  #: what the JSON has besides
    head: Sequence[str] = _HEAD
    more: Sequence[tuple[Sequence[Sequence[str]], Sequence[str]]] = ()  #: further tables: their lines and heads


def publish(args: argparse.Namespace, report: Report) -> None:
    """Prints all, and writes the JSON."""
    machine = in_words(report.conditions)
    print(f"{report.question}\n{machine}\n")
    tables = ((report.lines, report.head), *report.more)
    print("\n\n".join(table(*one) for one in tables), end="\n\n")
    print("\n".join(budget.line() for budget in report.budgets))
    if args.quick:
        print("\n--quick: these figures measure nothing.")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(_plain(report, args.pairs), indent=1) + "\n")


def _plain(report: Report, pairs: int) -> dict[str, Any]:
    budgets = [
        {**b._asdict(), "found": b.found._asdict() if b.found else None, "verdict": b.verdict} for b in report.budgets
    ]
    return {
        "question": report.question,
        "conditions": report.conditions,
        "pairs": pairs,
        "tables": [{"head": head, "rows": lines} for lines, head in ((report.lines, report.head), *report.more)],
        "budgets": budgets,
        **report.body,
    }
