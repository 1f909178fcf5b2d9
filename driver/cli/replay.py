"""`burst replay`: the requests of a recording again, on any device."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from burst import BurstError
from driver.errors import DriverError
from driver.recording import Recording
from driver.recording import replay as play
from driver.recording.compare import TOLERANCE

if TYPE_CHECKING:
    from driver.recording import Report
    from driver.recording.replay import Pace


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--device", metavar="NAME", help="Play it there. By default on the device that it was recorded on.")
@click.option(
    "--pace",
    type=click.Choice(["recorded", "max"]),
    default="recorded",
    show_default=True,
    help="Each request at its time, or as soon as the one before it is done.",
)
@click.option("--compare", is_flag=True, help="Compare outputs with those that were recorded.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=TOLERANCE,
    show_default=True,
    help="A float may differ by this part of it (or of 1), an integer by this many.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
def replay(file: str, device: str | None, pace: Pace, compare: bool, tolerance: float, as_json: bool) -> None:
    """Plays a recording, and says how long requests took then and now.

    Exits with 1 when outputs differ, or more requests failed than then; with 2 when it cannot be played.
    """
    try:
        with Recording(file) as recording:
            if recording.trouble:
                click.echo(f"{file}: {recording.trouble}", err=True)
            report = _played(recording, device, pace, tolerance if compare else None)
    except (DriverError, BurstError) as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(_plain(report), indent=1))
    else:
        _show(report, compare)
    sys.exit(bool(report.different or report.failed))


def _played(recording: Recording, device: str | None, pace: Pace, tolerance: float | None) -> Report:
    """With progress on a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(recording))
        return play(recording, device, pace, tolerance, lambda: progress.advance(task))


def _plain(report: Report) -> dict[str, Any]:
    return {
        "requests": {name: dict(counts) for name, counts in report.statuses.items()},
        "seconds": report.seconds,
        "late": report.late,
        "latency": report.percentiles(),
        "compared": report.compared,
        "different": report.different,
        "worst": report.worst._asdict() if report.worst else None,
    }


def _show(report: Report, compare: bool) -> None:
    table = Table("latency", "p50", "p90", "p99", "max", "answers")
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, times in report.percentiles().items():
        cells = [_time(times[p]) for p in ("p50", "p90", "p99", "max")] if times else ["-"] * 4
        answers = ", ".join(f"{count} {status}" for status, count in report.statuses[name].most_common())
        table.add_row(name, *cells, answers)
    Console().print(table)
    click.echo(f"played in {report.seconds:.3f} s; the latest request came {_time(report.late)} after its time")
    if compare:
        click.echo(f"{report.compared} compared, {report.different} different")
    if worst := report.worst:
        where = "".join(f"[{i}]" for i in worst.at)
        place = f"request {worst.request}, output {worst.output}{where}, which was {worst.was:g}"
        click.echo(f"the largest difference is {worst.by:g}: {place}")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"
