"""`burst cache`: what is kept of compilations, and how to be rid of it."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from driver.cli.output import json_option, print_json, print_table
from driver.runtime.cache.folder import Folder, default_folder
from driver.runtime.cache.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.runtime.cache.folder import Compilation, Pruned

_MB = 10**6
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _seconds(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """A whole number and a unit."""
    if value is None:
        return None
    if not (match := re.fullmatch(r"(\d{1,6})([smhdw])", value, re.ASCII)):
        raise click.BadParameter(f"{value!r}: a whole number and one of s, m, h, d and w, as 30d or 12h")
    return float(match[1]) * _SECONDS[match[2]]


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        json_option,
        click.option(
            "--dir",
            "path",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            metavar="FOLDER",
            help="Where compilations lie, if not in ~/.cache/burst/compiled.",
        ),
    ):
        function = option(function)
    return function


@click.group()
def cache() -> None:
    """Compilations that are kept on disk. All of this is safe while programs use them."""


@cache.command("list")
@_options
def list_(path: Path | None, as_json: bool) -> None:
    """Lists them, those used last first."""
    folder = _folder(path)
    found = sorted(folder.entries(), key=lambda compilation: -compilation.used)
    if as_json:
        print_json([asdict(compilation) for compilation in found])
    else:
        _show(found, folder, Console())


@cache.command()
@_options
@click.option("--most-mb", type=click.IntRange(min=0), metavar="N", help="Until N MB are left. [default: the limit]")
@click.option("--older-than", callback=_seconds, metavar="30d|12h|…", help="Those not used for so long.")
def prune(path: Path | None, as_json: bool, most_mb: int | None, older_than: float | None) -> None:
    """Removes what has not been used for long, and what crashes have left."""
    folder = _folder(path)
    _tell(_removed(folder, lambda: folder.prune(None if most_mb is None else most_mb * _MB, older_than)), as_json)


@cache.command()
@_options
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(path: Path | None, as_json: bool, yes: bool) -> None:
    """Removes all of them."""
    folder = _folder(path)
    found = folder.entries()
    if found and not yes:
        click.confirm(f"Remove {_sum(found)} from {folder.path}?", abort=True, err=True)
    _tell(_removed(folder, folder.clear), as_json)


def _folder(path: Path | None) -> Folder:
    try:
        return Folder(path or default_folder())
    except ValueError as error:
        raise click.UsageError(f"--dir: {error}" if path else str(error)) from error


def _removed(folder: Folder, remove: Callable[[], Pruned]) -> Pruned:
    try:
        return remove()
    except OSError as error:
        raise click.UsageError(f"{folder.path}: {error}; make it writable, or choose another with --dir") from error


def _tell(pruned: Pruned, as_json: bool) -> None:
    if as_json:
        removed = [asdict(compilation) for compilation in pruned.removed]
        print_json({"removed": removed, "in_use": pruned.in_use})
        return
    left = f"; left alone {pruned.in_use} being made anew" if pruned.in_use else ""
    click.echo(f"removed {_sum(pruned.removed)}{left}")


def _show(found: list[Compilation], folder: Folder, console: Console) -> None:
    table = Table("model", "device", "size", "age", "used", "hits")
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    now = time.time()
    for compilation in found:
        version = f", version {compilation.version}" if compilation.version else ""
        device = Text(f"{compilation.device}{version}")
        ages = (_age(now - seconds) for seconds in (compilation.made, compilation.used))
        table.add_row(Text(compilation.model), device, _size(compilation.nbytes), *ages, str(compilation.hits))
    if found:
        console.print(table)
    console.print(Text(f"{_sum(found)} in {folder.path}, which may hold {_size(folder.most)}"), soft_wrap=True)


def _sum(found: list[Compilation]) -> str:
    nbytes = sum(compilation.nbytes for compilation in found)
    return f"{len(found)} compilation{'s' * (len(found) != 1)}, {_size(nbytes)}"


def _size(nbytes: int) -> str:
    return f"{nbytes / _MB:,.1f} MB" if nbytes >= _MB / 10 else f"{nbytes / 1e3:,.1f} kB"


def _age(seconds: float) -> str:
    """In the largest unit of which there is one; the clock may have been put back."""
    unit = next((unit for unit in "dhm" if seconds >= _SECONDS[unit]), "s")
    return f"{max(0, seconds) // _SECONDS[unit]:.0f} {unit}"


@cache.command("verify")
@_options
def verify_(path: Path | None, as_json: bool) -> None:
    """Asks each device whether it still takes what it has kept, and starts those that do not run.

    Exits with 1 when one is refused: it will be compiled anew, and replaced, when it is next wanted.
    """
    verdicts = list(verify(_folder(path)))
    if as_json:
        print_json([{**asdict(v.entry), "state": v.state, "reason": v.reason} for v in verdicts])
    else:
        rows = [(v.entry.model, v.entry.device, v.state, v.reason) for v in verdicts]
        print_table(("model", "device", "state", "reason"), rows)
    raise SystemExit(1 if any(verdict.state == "refused" for verdict in verdicts) else 0)
