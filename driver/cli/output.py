"""Output that the sub-commands share: JSON, tables, progress, and how figures are formatted."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_JSON_LINE = 110
"""Characters of a line of JSON."""
_UNITS = ("s", 1e6), ("ms", 1e3), ("us", 1.0)
json_option = click.option("--json", "as_json", is_flag=True, help="Print only JSON.")


def examples(*lines: str) -> str:
    """Return the epilog of a command's help: one example per line, not wrapped."""
    return "\n  ".join(("\b\nExamples:", *lines))


def with_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Add options to a command, which its help lists in this order."""

    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return add


@contextmanager
def progress() -> Iterator[Callable[[str], object]]:
    """Yield a function that shows what the command is doing: on standard error, and only if that is a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda words: status.update(Text(words))
    else:
        yield lambda _words: None


def print_json(found: Any) -> None:
    """Print JSON on standard output: what fits into a line is one. NaN and infinities become null."""
    click.echo(_json(_plain(found), ""))


def _json(found: Any, indent: str) -> str:
    line = json.dumps(found, allow_nan=False)
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    is_row = isinstance(found, list) and not any(isinstance(value, dict | list) for value in inner)
    if not inner or is_row or len(indent) + len(line) <= _JSON_LINE:
        return line
    deeper = indent + "  "
    if isinstance(found, dict):
        lines = [f"{json.dumps(str(key))}: {_json(value, deeper)}" for key, value in found.items()]
    else:
        lines = [_json(value, deeper) for value in inner]
    left, right = "{}" if isinstance(found, dict) else "[]"
    return f"{left}\n{deeper}" + f",\n{deeper}".join(lines) + f"\n{indent}{right}"


def _plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), *, folds: bool = False
) -> None:
    """`right`: columns to align at the right. `folds`: breaks long words; else the first column is never broken."""
    table = Table(*(Column(word, overflow="fold" if folds else "ellipsis") for word in head))
    table.columns[0].no_wrap = not folds
    for number in right:
        table.columns[number].justify, table.columns[number].no_wrap = "right", True
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def print_line(words: str) -> None:
    """Print plain text; a terminal may wrap it."""
    Console().print(Text(words), soft_wrap=True)


def spelled(us: float | None, low: float | None = None, high: float | None = None) -> str:
    """Format microseconds in a readable unit, with an interval in that unit if one is given."""
    if us is None:
        return "-"
    unit, size = next(((unit, size) for unit, size in _UNITS if us >= size), _UNITS[-1])
    return f"{digits(us / size)} {unit}" + ("" if low is None or high is None else interval(low / size, high / size))


def interval(low: float, high: float) -> str:
    """Format an interval, to append to a figure."""
    return f" [{digits(low)} .. {digits(high)}]"


def digits(number: float) -> str:
    """Format a number with three significant digits; below 1, with three decimals."""
    if number >= 1000:
        return f"{number:.0f}"
    if number < 1:
        return f"{number:.3f}"
    return f"{number:#.3g}".rstrip(".")
