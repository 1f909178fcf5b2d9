"""`burst record`: runs a program, and keeps what it asks of devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click

from driver.recording import BadRecording, Recording
from driver.recording.recorder import MOST_MB, VARIABLE, VARIABLE_MB


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--out",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("recording.burst"),
    show_default=True,
    help="The file, which is not there yet. Further processes of the program write FILE.PID.",
)
@click.option("--force", is_flag=True, help="Replace that file.")
@click.option(
    "--most-mb",
    type=click.IntRange(1, 10**9 - 1),
    default=MOST_MB,
    show_default=True,
    help="How large a file may become; what comes then is left out.",
)
@click.option("--json", "as_json", is_flag=True, help="Say at the end as JSON, on standard error, what was recorded.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def record(path: Path, force: bool, most_mb: int, as_json: bool, command: tuple[str, ...]) -> None:
    """Runs COMMAND, and records its requests to devices.

    Models, inputs, outputs, times and deadlines are kept, as by `burst record --out camera.burst -- python camera.py`.
    The file is for its owner alone: it holds all that the program has shown to a device. Exits as the command does;
    with 1 when it asked nothing of a device.
    """
    if force:
        path.unlink(missing_ok=True)
    if path.exists():
        raise click.UsageError(f"--out {path}: it is there already; add --force to replace it, or name another")
    if not path.absolute().parent.is_dir():
        raise click.UsageError(f"--out {path}: there is no such folder; make it, or name another")
    code = _run(command, os.environ | {VARIABLE: str(path.absolute()), VARIABLE_MB: str(most_mb)})
    found = _found(path)
    click.echo(json.dumps(found, indent=1) if as_json else _words(found), err=True)
    sys.exit(code or not found)


def _run(command: tuple[str, ...], environment: dict[str, str]) -> int:
    """Its exit status, as a shell tells it. Ctrl-C is for the command, which ends as it likes."""
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
    """One for each file."""
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
        return "nothing was recorded: the command asked nothing of a device"
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
