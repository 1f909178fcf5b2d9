"""`burst record`: runs a program and records its requests to devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click

from driver.cli.output import examples
from driver.recording import BadRecording, Recording
from driver.recording.recorder import MOST_MB, VARIABLE, VARIABLE_MB


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
    click.echo(json.dumps(found, indent=1) if as_json else _words(found), err=True)
    sys.exit(code or not found)


def _run(command: tuple[str, ...], environment: dict[str, str]) -> int:
    """Runs the command; returns its exit status as a shell does. Ctrl-C goes to the command alone."""
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
    """A summary of each file."""
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
