"""Output that the sub-commands share: text, JSON, tables, progress, and how figures are formatted.

Names in model files, and messages of other programs, reach the terminal only through `echo` and `TerminalConsole`.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fmq.printable import LAYOUT, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from typing import IO

    from rich.console import ConsoleOptions, RenderableType
    from rich.segment import Segment


class TerminalConsole(Console):
    """A console that shows control characters and markup in text instead of acting on them."""

    def __init__(self, *, file: IO[str] | None = None, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(file=file, stderr=stderr, width=width, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, LAYOUT))


def echo(text: str, *, err: bool = False) -> None:
    """Print text, and flush: another program may wait for the line. Control characters become visible."""
    click.echo(printable(text, LAYOUT), err=err)


_JSON_LINE = 110
"""Characters of a line of JSON."""
_UNITS = ("s", 1e6), ("ms", 1e3), ("us", 1.0)
json_option = click.option("--json", "as_json", is_flag=True, help="Print only JSON.")


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
    console = TerminalConsole(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda words: status.update(Text(words))
    else:
        yield lambda _words: None


def print_json(found: Any) -> None:
    """Print JSON on standard output: what fits into a line is one. NaN and infinities become null."""
    echo(_json(_plain(found), ""))


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
    """Print all values, on several lines where the width is too small.

    `right`: columns to align at the right. These and the first one are not broken if there is room for them, and
    unless `folds`.
    """
    console, whole = TerminalConsole(), set() if folds else {0, *right}
    if _least_width([head, *rows], whole) > console.width:
        whole = set()
    table = Table(*(Column(word, overflow="fold", no_wrap=number in whole) for number, word in enumerate(head)))
    for number in right:
        table.columns[number].justify = "right"
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _least_width(rows: Iterable[Sequence[str]], whole: Collection[int]) -> int:
    """Return the width of a table that breaks no word, and no cell of the columns `whole`."""
    columns = zip(*rows, strict=True)
    widths = [
        max(cell_len(part) for cell in cells for part in ([cell] if number in whole else cell.split() or [""]))
        for number, cells in enumerate(columns)
    ]
    return sum(widths) + 3 * len(widths) + 1  # a line between columns, and a space on each side


def print_line(words: str) -> None:
    """Print plain text; a terminal may wrap it."""
    TerminalConsole().print(Text(words), soft_wrap=True)


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
