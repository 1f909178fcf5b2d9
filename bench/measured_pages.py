"""Writes figures into bench/README.md out of results, and into docs/performance.md out of bench/README.md.

What stands between the marks `<!-- from NAME -->` and `<!-- end -->` of bench/README.md is all that is kept of a result
in the repository: command, machine, tables and budgets. The whole record is the JSON that `bench/run.py` writes, which
a release carries. A mark of docs/performance.md says what of that it shows, all columns and rows when it names none:
`<!-- from burst_payload.py --frame; columns: p50 us | p99 us; budgets: all -->`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from measure import markdown

from driver.cli.timing import in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Result = dict[str, Any]
    Table = list[list[str]]  # its head, then its rows

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "bench/README.md", ROOT / "docs/performance.md"
PART = re.compile(r"(<!-- from (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class NotThere(Exception):
    """A page asks for what bench/README.md does not have."""


class Kept(NamedTuple):
    """A result, as bench/README.md has it."""

    heading: str  #: the command, and the machine
    tables: list[Table]
    budgets: str


def with_results(readme: str, results: Mapping[str, Result]) -> str:
    """Return bench/README.md with these results in the place of those that it has of the same names."""

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}\n{_text(results[match[2]])}\n\n{match[4]}" if match[2] in results else match[0]

    return PART.sub(replaced, readme)


def _text(result: Result) -> str:
    """All that is kept of a result."""
    where = f"{in_words(result['conditions'])}, commit {result['commit']}; {result['rounds']} rounds"
    tables = [markdown(table["rows"], table["head"]) for table in result["tables"] if table["rows"]]
    budgets = "\n".join(map(_judged, result["budgets"]))
    return "\n\n".join(filter(None, [f"`bench/{result['command']}`", where, *tables, budgets]))


def _judged(budget: dict[str, Any]) -> str:
    """A line for a budget, with what came of it."""
    if not (found := budget["found"]):
        return f"- {budget['text']}: - -> {budget['verdict']}"
    unit = budget["unit"] and f" {budget['unit']}"
    interval = f"{found['median']:.2f}{unit} [{found['low']:.2f} .. {found['high']:.2f}]"
    return f"- {budget['text']}: {interval} -> {budget['verdict']}"


def kept(readme: str) -> dict[str, Kept]:
    """Return the results of bench/README.md by name."""
    return {match[2]: _kept(match[3].strip()) for match in PART.finditer(readme)}


def _kept(text: str) -> Kept:
    command, where, *rest = *text.split("\n\n"), "", ""  # nothing stands in a new place yet
    tables = [[_cells(line) for line in each.split("\n")] for each in rest if each.startswith("|")]
    budgets = [each for each in rest if each.startswith("- ")]
    return Kept(f"{command}\n\n{where}", [[head, *rows] for head, _, *rows in tables], "\n\n".join(budgets))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" | ")]


def written(page: str, readme: str) -> str:
    """Return the page with what bench/README.md has. Raises NotThere."""
    return PART.sub(lambda match: f"{match[1]}\n{part(match[2], readme)}\n\n{match[4]}", page)


def part(order: str, readme: str) -> str:
    """Return what belongs between the marks of a page. Raises NotThere."""
    name, *options = order.split("; ")
    if name.startswith("section: "):
        return _section(name.removeprefix("section: "), readme)
    asked = dict(option.split(": ", 1) for option in options)
    columns, rows = (asked[key].split(" | ") if key in asked else [] for key in ("columns", "rows"))
    results = kept(readme)
    found = [results[key] for key in of_script(name, results)]
    if not found:
        raise NotThere(f"{name} has no results; `bench/run.py --only {name.partition(' ')[0]}` measures it")
    if not set(rows) <= (there := {row[0] for each in found for table in each.tables for row in table[1:]}):
        raise NotThere(f"{name} has no row {set(rows) - there}")
    shown = []
    for each in found:
        shown += [each.heading, *_chosen(each.tables, columns, rows)]
        shown += [each.budgets] if asked.get("budgets") == "all" and each.budgets else []
    return "\n\n".join(shown)


def of_script(name: str, results: Mapping[str, object]) -> list[str]:
    """Return the result of that name, else all of that script, whatever else it was told."""
    return [name] if name in results else [key for key in results if key.partition(" ")[0] == name]


def _chosen(tables: list[Table], columns: list[str], wanted: list[str]) -> Iterator[str]:
    for head, *rows in tables:
        if set(columns) <= set(head):
            places = [0] + [head.index(column) for column in columns] if columns else list(range(len(head)))
            lines = [[row[n] for n in places] for row in rows if not wanted or row[0] in wanted]
            yield markdown(lines, [head[n] for n in places])


def _section(title: str, readme: str) -> str:
    """A part that no script prints, as it stands in bench/README.md."""
    found = re.search(rf"^### {re.escape(title)}\n\n(.*?)\n\n(?:###|<!--)", readme, re.DOTALL | re.MULTILINE)
    if not found:
        raise NotThere(f"bench/README.md has no section {title!r}")
    return found[1]
