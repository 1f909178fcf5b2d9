"""`burst record` and `burst replay`: record the requests of a program to devices, and repeat them on any device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from burst import BurstError
from driver.cli.epilog import examples
from driver.cli.output import TerminalConsole, echo, json_option
from driver.errors import DriverError
from driver.recording import BadRecording, Recording
from driver.recording import replay as play
from driver.recording.recorder import MOST_MB, VARIABLE, VARIABLE_MB
from driver.recording.replay import TOLERANCE

if TYPE_CHECKING:
    from driver.recording import ReplayReport
    from driver.recording.replay import Pace


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog=examples("burst record --out camera.burst -- python camera.py"),
)
@click.option(
    "--out",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("recording.burst"),
    show_default=True,
    help="File to write; must not exist. Child processes of the program write FILE.PID.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option(
    "--most-mb",
    type=click.IntRange(1, 10**9 - 1),
    default=MOST_MB,
    show_default=True,
    help="Size limit of a file in MB; later requests are left out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, on standard error.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def record(path: Path, force: bool, most_mb: int, as_json: bool, command: tuple[str, ...]) -> None:
    """Run a program and record its requests to devices.

    Records models, inputs, outputs, times and deadlines. Only the owner can read the file, for it holds all data that
    the program sent to a device. Exits with the status of COMMAND, or with 1 if it sent no request to a device.
    """
    if force:
        path.unlink(missing_ok=True)
    if path.exists():
        raise click.UsageError(f"--out {path}: the file exists; add --force to replace it, or pass another name")
    if not path.absolute().parent.is_dir():
        raise click.UsageError(f"--out {path}: the folder does not exist; create it, or pass another name")
    code = _run(command, os.environ | {VARIABLE: str(path.absolute()), VARIABLE_MB: str(most_mb)})
    found = _found(path)
    echo(json.dumps(found, indent=1) if as_json else _words(found), err=True)
    sys.exit(code or not found)


def _run(command: tuple[str, ...], environment: dict[str, str]) -> int:
    """Run the command; return its exit status as a shell does. Ctrl-C goes to the command alone."""
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise click.UsageError(f"{command[0]}: cannot be run: {error.strerror}") from error
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def _found(path: Path) -> list[dict[str, object]]:
    """Return a summary of each file."""
    found: list[dict[str, object]] = []
    for each in (path, *sorted(path.parent.glob(f"{path.name}.*"))):
        if not each.exists():
            continue
        try:
            with Recording(each) as recording:
                found.append(
                    {
                        "file": str(each),
                        "requests": len(recording),
                        "models": len(recording.models),
                        "streams": len(recording.streams),
                        "seconds": round(recording.seconds, 3),
                        "bytes": recording.nbytes,
                        "left_out": recording.left_out or {},
                        "trouble": recording.trouble,
                    }
                )
        except BadRecording as error:
            found.append({"file": str(each), "requests": 0, "trouble": str(error)})
    return found


def _words(found: list[dict[str, object]]) -> str:
    if not found:
        return "nothing was recorded: the command sent no request to a device"
    lines = []
    for one in found:
        lines.append(
            f"{one['file']}: {one['requests']} requests in {one.get('seconds', 0)} s, {one.get('bytes', 0)} bytes"
        )
        left_out = one.get("left_out")
        if isinstance(left_out, dict):
            lines += [f"  left out {count}: {reason}" for reason, count in left_out.items()]
        if one["trouble"]:
            lines.append(f"  {one['trouble']}")
    return "\n".join(lines)


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
                echo(f"{file}: {recording.trouble}", err=True)
            report = _played(recording, device, pace, tolerance if compare else None)
    except (DriverError, BurstError) as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        echo(json.dumps(_plain(report), indent=1))
    else:
        _show(report, compare)
    sys.exit(bool(report.different or report.failed))


def _played(recording: Recording, device: str | None, pace: Pace, tolerance: float | None) -> ReplayReport:
    """Replay with a progress bar, if stderr is a terminal."""
    console = TerminalConsole(stderr=True)
    columns = TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(recording))
        return play(recording, device, pace, tolerance, tell=lambda: progress.advance(task))


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
    figures = (Column(heading, justify="right", no_wrap=True) for heading in ("p50", "p90", "p99", "max", "answers"))
    table = Table("latency", *figures)
    for name, times in report.percentiles().items():
        cells = [_time(times[p]) for p in ("p50", "p90", "p99", "max")] if times else ["-"] * 4
        answers = ", ".join(f"{count} {status}" for status, count in report.statuses[name].most_common())
        table.add_row(name, *cells, answers)
    TerminalConsole().print(table)
    echo(f"replayed in {report.seconds:.3f} s; requests were sent at most {_time(report.late)} late")
    if compare:
        echo(f"{report.compared} requests compared, {report.different} different")
    if worst := report.worst:
        where = "".join(f"[{i}]" for i in worst.at)
        place = f"request {worst.request}, output {worst.output}{where}, recorded as {worst.was:g}"
        echo(f"largest difference {worst.by:g}: {place}")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"
