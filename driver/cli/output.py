"""What the sub-commands have in common: JSON, tables, and how figures are spelled."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_UNITS = ("s", 1e6), ("ms", 1e3), ("us", 1.0)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")


@contextmanager
def watched() -> Iterator[Callable[[str], object]]:
    """What goes on, for who watches: on a terminal alone, and there on standard error."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda words: status.update(Text(words))
    else:
        yield lambda _words: None


def print_json(found: Any) -> None:
    """The one thing on standard output. Numbers that JSON does not know are null."""
    click.echo(json.dumps(_plain(found), indent=1, allow_nan=False))


def _plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """`right`: the columns of figures."""
    table = Table(*head)
    table.columns[0].no_wrap = True
    for column in right:
        table.columns[column].justify, table.columns[column].no_wrap = "right", True
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def print_line(words: str) -> None:
    """A line that a terminal may wrap, and no markup in it."""
    Console().print(Text(words), soft_wrap=True)


def spelled(us: float | None, low: float | None = None, high: float | None = None) -> str:
    """A time in microseconds, for people; and an interval in the same unit, if there is one."""
    if us is None:
        return "-"
    unit, size = next(((unit, size) for unit, size in _UNITS if us >= size), _UNITS[-1])
    return f"{digits(us / size)} {unit}" + ("" if low is None or high is None else interval(low / size, high / size))


def interval(low: float, high: float) -> str:
    """Behind a figure."""
    return f" [{digits(low)} .. {digits(high)}]"


def digits(number: float) -> str:
    """Three of them that count, and of thousandths as many as there are."""
    if number >= 1000:
        return f"{number:.0f}"
    if number < 1:
        return f"{number:.3f}"
    return f"{number:#.3g}".rstrip(".")
