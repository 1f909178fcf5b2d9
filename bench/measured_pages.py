"""Writes the figures of docs/performance.md and bench/README.md: what stands between their marks is out of one JSON.

A mark says which result, and what of it: `<!-- from burst_frame.py; columns: p50 us | p99 us; budgets: all -->`. All
columns and rows are shown when none are named. Rows of other machines in the JSON stand below ours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verdict import markdown

from driver.cli.timing import in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Result = dict[str, Any]
    Lines = list[Sequence[str]]

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "bench/measured.json"
PAGES = ROOT / "docs/performance.md", ROOT / "bench/README.md"
PART = re.compile(r"(<!-- from (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class NotThere(Exception):
    """A page asks for what the JSON does not have."""


def written(page: str, measured: dict[str, Any]) -> str:
    """The page with what the JSON has. Raises NotThere."""
    return PART.sub(lambda match: f"{match[1]}\n{part(match[2], measured)}\n\n{match[4]}", page)


def part(order: str, measured: dict[str, Any]) -> str:
    """What belongs between the marks: command, machine, the tables with those columns, what came of the budgets."""
    name, *options = order.split("; ")
    if name.startswith("section: "):
        return section(name.removeprefix("section: "))
    asked = dict(option.split(": ", 1) for option in options)
    columns, rows = (asked[key].split(" | ") if key in asked else [] for key in ("columns", "rows"))
    keys = of_script(name, measured["results"])
    if not keys:
        raise NotThere(f"{name} has no results; `bench/run.py --only {name.partition(' ')[0]}` measures it")
    results = [measured["results"][key] for key in keys]
    there = {row[0] for result in results for table in result["tables"] for row in table["rows"]}
    if not set(rows) <= there:
        raise NotThere(f"{name} has no row {set(rows) - there}")
    others = measured.get("others", [])
    shown = []
    for key, result in zip(keys, results, strict=True):
        beside = [other["results"][key] for other in others if key in other["results"]]
        shown += _shown(result, beside, columns, rows)
        if asked.get("budgets") == "all" and result["budgets"]:
            shown.append("\n".join(_verdicts(result, beside)))
    return "\n\n".join(shown)


def of_script(name: str, results: dict[str, Result]) -> list[str]:
    """The result of that name, else all of that script, whatever else it was told."""
    return [name] if name in results else [key for key in results if key.partition(" ")[0] == name]


def section(title: str) -> str:
    """A part that no script prints, as it stands in the README."""
    found = re.search(rf"^### {re.escape(title)}\n\n(.*?)\n\n(?:###|<!--)", PAGES[1].read_text(), re.DOTALL | re.M)
    if not found:
        raise NotThere(f"{PAGES[1].name} has no section {title!r}")
    return found[1]


def _judged(budget: dict[str, Any]) -> str:
    """What came of a budget, for people."""
    if not (found := budget["found"]):
        return f"- -> {budget['verdict']}"
    unit = budget["unit"] and f" {budget['unit']}"
    interval = f"{found['median']:.2f}{unit} [{found['low']:.2f} .. {found['high']:.2f}]"
    return f"{interval} -> {budget['verdict']}"


def _verdicts(result: Result, others: list[Result]) -> Iterator[str]:
    """A line for each budget, with what other machines found."""
    for budget in result["budgets"]:
        text = budget["text"]
        beside = [
            f"*machine {number}*: {_judged(one)}"
            for number, other in enumerate(others, 2)
            for one in other["budgets"]
            if one["text"] == text
        ]
        yield "; ".join([f"- {text}: {_judged(budget)}", *beside])


def machine(result: Result) -> str:
    """Where and when, and of which commit."""
    return f"{in_words(result['conditions'])}, commit {result['commit']}; {result['rounds']} rounds"


def _shown(result: Result, others: list[Result], columns: list[str], wanted: list[str]) -> Iterator[str]:
    yield f"`bench/{result['command']}`"
    yield machine(result)
    for number, other in enumerate(others, 2):
        yield f"*machine {number}*: {machine(other)}"
    for place, table in enumerate(result["tables"]):
        head = table["head"]
        if not set(columns) <= set(head):
            continue
        tables = [table, *(_same(other, place, head) for other in others)]
        places = [0] + [head.index(column) for column in columns] if columns else list(range(len(head)))
        lines = [[row[n] for n in places] for row in _beside(tables) if not wanted or row[0] in wanted]
        yield markdown(lines, [head[n] for n in places])


def _same(other: Result, place: int, head: Sequence[str]) -> dict[str, Any]:
    """Another machine's table of this place, unless it has other columns."""
    tables = other["tables"]
    return tables[place] if place < len(tables) and tables[place]["head"] == head else {"head": head, "rows": []}


def _beside(tables: list[dict[str, Any]]) -> Lines:
    """Our rows, each with that of each other machine below it. Rows of one name are told apart by their order, and left
    out where another machine has more of them, or fewer.
    """
    ours, *others = (table["rows"] for table in tables)
    lines: Lines = []
    for place, row in enumerate(ours):
        lines.append(row)
        before, all_of_ours = (sum(one[0] == row[0] for one in rows) for rows in (ours[:place], ours))
        for number, rows in enumerate(others, 2):
            theirs = [one for one in rows if one[0] == row[0]]
            if len(theirs) == all_of_ours:
                lines.append([f"*machine {number}*, {row[0]}", *theirs[before][1:]])
    return lines
