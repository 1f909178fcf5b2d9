"""`burst exec`: runs a program whose models live in a device, without a change to the program."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from driver.cli.device_name import DeviceName
from driver.cli.epilog import examples
from driver.cli.output import echo
from driver.dropin.environment import RUNTIMES, environment_of_program, option_against_hook


@click.command(
    "exec",
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "burst exec -- python app.py",
        "burst exec --report report.json -- gunicorn --workers 4 app:application",
    ),
)
@click.option("--device", type=DeviceName(served=True), metavar="NAME", help="Device to use. [default: the runtime's]")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to FILE what ran where, and why; print a table at the end of each process.",
)
@click.option("--only", type=click.Choice(RUNTIMES), help="Replace this runtime alone.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def execute(device: str | None, report: Path | None, only: str | None, command: tuple[str, ...]) -> None:
    """Run a program with its models in a device.

    When a Python below COMMAND imports a runtime, classes of that runtime are replaced by some of the same names,
    which run models in a device, and in the program's own process what a device does not do. COMMAND takes the place of
    this process. Nothing is written but FILE.
    """
    if report is not None:
        try:
            report.write_text(json.dumps({"processes": []}))
        except OSError as error:
            raise click.UsageError(f"--report {report}: {error.strerror}") from error
    if option := option_against_hook(command):
        words = f"Python's option {option} keeps `burst exec` out: its models run in the program"
        echo(f"burst exec: {command[0]}: {words}", err=True)
    try:
        os.execvpe(command[0], command, environment_of_program(device, report, only))  # noqa: S606 (there is to be none)
    except OSError as error:
        raise click.UsageError(f"{command[0]}: cannot be run: {error.strerror}") from error
