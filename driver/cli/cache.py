"""`burst cache`: lists, verifies and removes compilations kept on disk."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Column, Table
from rich.text import Text

from driver.cli.epilog import examples
from driver.cli.output import TerminalConsole, echo, json_option, print_json, print_table, with_options
from driver.runtime.cache.folder import Folder, default_folder
from driver.runtime.cache.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from driver.runtime.cache.folder import Compilation, Pruned

_MB = 10**6
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _seconds(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """Parse a whole number with a unit."""
    if value is None:
        return None
    if not (match := re.fullmatch(r"(\d{1,6})([smhdw])", value, re.ASCII)):
        raise click.BadParameter(f"{value!r}: expected a whole number and a unit (s, m, h, d, w), for example 30d")
    return float(match[1]) * _SECONDS[match[2]]


_options = with_options(
    click.option(
        "--dir",
        "path",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="Folder of the compilations. [default: ~/.cache/burst/compiled]",
    ),
    json_option,
)


@click.group(
    epilog=examples(
        "burst cache list",
        "burst cache prune --older-than 30d",
        "burst cache prune --most-mb 500",
    )
)
def cache() -> None:
    """List, verify and remove compilations kept on disk.

    All of these are safe while programs use the cache.
    """


@cache.command("list")
@_options
def list_(path: Path | None, as_json: bool) -> None:
    """List compilations, most recently used first."""
    folder = _folder(path)
    found = sorted(folder.entries(), key=lambda compilation: -compilation.used)
    if as_json:
        print_json([asdict(compilation) for compilation in found])
    else:
        _show(found, folder, TerminalConsole())


@cache.command()
@_options
@click.option(
    "--most-mb", type=click.IntRange(min=0), metavar="N", help="Shrink the cache to N MB. [default: its limit]"
)
@click.option("--older-than", callback=_seconds, metavar="30d|12h|…", help="Remove what was not used for this long.")
def prune(path: Path | None, as_json: bool, most_mb: int | None, older_than: float | None) -> None:
    """Remove old compilations and leftovers of crashes."""
    folder = _folder(path)
    _tell(_removed(folder, lambda: folder.prune(None if most_mb is None else most_mb * _MB, older_than)), as_json)


@cache.command()
@_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clear(path: Path | None, as_json: bool, yes: bool) -> None:
    """Remove all compilations."""
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
        raise click.UsageError(
            f"{folder.path}: {error}; make it writable, or pass another folder with --dir"
        ) from error


def _tell(pruned: Pruned, as_json: bool) -> None:
    if as_json:
        removed = [asdict(compilation) for compilation in pruned.removed]
        print_json({"removed": removed, "in_use": pruned.in_use})
        return
    left = f"; kept {pruned.in_use} that other programs are compiling" if pruned.in_use else ""
    echo(f"removed {_sum(pruned.removed)}{left}")


def _show(found: list[Compilation], folder: Folder, console: Console) -> None:
    figures = (Column(heading, justify="right", no_wrap=True) for heading in ("size", "age", "used", "hits"))
    table = Table("model", "device", *figures)
    now = time.time()
    for compilation in found:
        version = f", version {compilation.version}" if compilation.version else ""
        device = Text(f"{compilation.device}{version}")
        ages = (_age(now - seconds) for seconds in (compilation.made, compilation.used))
        table.add_row(Text(compilation.model), device, _size(compilation.nbytes), *ages, str(compilation.hits))
    if found:
        console.print(table)
    console.print(Text(f"{_sum(found)} in {folder.path} (limit {_size(folder.most)})"), soft_wrap=True)


def _sum(found: list[Compilation]) -> str:
    nbytes = sum(compilation.nbytes for compilation in found)
    return f"{len(found)} compilation{'s' * (len(found) != 1)}, {_size(nbytes)}"


def _size(nbytes: int) -> str:
    return f"{nbytes / _MB:,.1f} MB" if nbytes >= _MB / 10 else f"{nbytes / 1e3:,.1f} kB"


def _age(seconds: float) -> str:
    """Format an age in its largest unit; never below 0, for the clock may have been set back."""
    unit = next((unit for unit in "dhm" if seconds >= _SECONDS[unit]), "s")
    return f"{max(0, seconds) // _SECONDS[unit]:.0f} {unit}"


@cache.command("verify")
@_options
def verify_(path: Path | None, as_json: bool) -> None:
    """Check that devices still accept their compilations.

    Starts the devices that are not running. Exits with 1 if a device refuses a compilation; it is then compiled again
    and replaced at its next use.
    """
    verdicts = list(verify(_folder(path)))
    if as_json:
        print_json([{**asdict(v.entry), "state": v.state, "reason": v.reason} for v in verdicts])
    else:
        rows = [(v.entry.model, v.entry.device, v.state, v.reason) for v in verdicts]
        print_table(("model", "device", "state", "reason"), rows)
    raise SystemExit(1 if any(verdict.state == "refused" for verdict in verdicts) else 0)
