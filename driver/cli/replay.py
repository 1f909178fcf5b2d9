"""`burst replay`: repeats the requests of a recording on any device."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from burst import BurstError
from driver.cli.output import examples, json_option
from driver.errors import DriverError
from driver.recording import Recording
from driver.recording import replay as play
from driver.recording.replay import TOLERANCE

if TYPE_CHECKING:
    from driver.recording import ReplayReport
    from driver.recording.replay import Pace


@click.command(
    epilog=examples(
        "burst replay camera.burst",
        "burst replay camera.burst --device onnxruntime --pace max --compare",
    )
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--device", metavar="NAME", help="Device to use. [default: the device of the recording]")
@click.option(
    "--pace",
    type=click.Choice(["recorded", "max"]),
    default="recorded",
    show_default=True,
    help="Send requests at their recorded times, or each as soon as the one before is done.",
)
@click.option("--compare", is_flag=True, help="Compare outputs with the recorded ones.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=TOLERANCE,
    show_default=True,
    help="With --compare: allowed difference, relative for floats (absolute below 1), absolute for integers.",
)
@json_option
def replay(file: str, device: str | None, pace: Pace, compare: bool, tolerance: float, as_json: bool) -> None:
    """Repeat recorded requests and compare their latency.

    Exits with 1 if outputs differ or if more requests failed than in the recording, with 2 if it cannot be replayed.
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


def _played(recording: Recording, device: str | None, pace: Pace, tolerance: float | None) -> ReplayReport:
    """Replays with a progress bar, if stderr is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(recording))
        return play(recording, device, pace, tolerance, lambda: progress.advance(task))


def _plain(report: ReplayReport) -> dict[str, Any]:
    return {
        "requests": {name: dict(counts) for name, counts in report.statuses.items()},
        "seconds": report.seconds,
        "late": report.late,
        "latency": report.percentiles(),
        "compared": report.compared,
        "different": report.different,
        "worst": report.worst._asdict() if report.worst else None,
    }


def _show(report: ReplayReport, compare: bool) -> None:
    table = Table("latency", "p50", "p90", "p99", "max", "answers")
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, times in report.percentiles().items():
        cells = [_time(times[p]) for p in ("p50", "p90", "p99", "max")] if times else ["-"] * 4
        answers = ", ".join(f"{count} {status}" for status, count in report.statuses[name].most_common())
        table.add_row(name, *cells, answers)
    Console().print(table)
    click.echo(f"replayed in {report.seconds:.3f} s; requests were sent at most {_time(report.late)} late")
    if compare:
        click.echo(f"{report.compared} requests compared, {report.different} different")
    if worst := report.worst:
        where = "".join(f"[{i}]" for i in worst.at)
        place = f"request {worst.request}, output {worst.output}{where}, recorded as {worst.was:g}"
        click.echo(f"largest difference {worst.by:g}: {place}")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"
