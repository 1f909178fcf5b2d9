"""`burst doctor`: checks this machine and installation, and says how to fix what is wrong."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict

import click
from rich.text import Text

from driver.cli.epilog import examples
from driver.cli.output import TerminalConsole, echo, json_option, print_json
from driver.doctor import Finding, examine, examine_program

_COLOURS = {"ok": "green", "note": "yellow", "warning": "red"}


@click.command(epilog=examples("burst doctor", "burst doctor -- python app.py"))
@click.option("--start", is_flag=True, help="Also start every installed device.")
@click.option("--quiet", is_flag=True, help="Leave out what is ok; the last line counts it.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def doctor(start: bool, quiet: bool, as_json: bool, command: tuple[str, ...]) -> None:
    """Check this machine, or what of a program runs where.

    A warning means that something fails; a note means that something is slower or limited. Exits with 1 if there is a
    warning.

    COMMAND is run once, to its end or until Ctrl-C, as `burst exec` runs it, and what it prints goes to standard
    error. Without it, this machine and installation are checked.
    """
    if command and start:
        raise click.UsageError("--start: there is no such check of a program; leave out --start, or the command")
    try:
        findings = examine_program(command) if command else examine(start=start)
    except OSError as error:
        raise click.UsageError(f"{command[0]}: cannot be run: {error.strerror}") from error
    shown = [finding for finding in findings if not quiet or finding.state != "ok"]
    if as_json:
        print_json([asdict(finding) for finding in shown])
    else:
        for finding in shown:
            _tell(finding)
        counts = Counter(finding.state for finding in findings)
        warnings, notes = (f"{counts[each]} {each}{'s' * (counts[each] != 1)}" for each in ("warning", "note"))
        echo(f"{warnings}, {notes}, {counts['ok']} ok")
    sys.exit(any(finding.state == "warning" for finding in findings))


def _tell(finding: Finding) -> None:
    state = f"{finding.state:<8}", _COLOURS[finding.state]
    TerminalConsole().print(Text.assemble(state, f"{finding.subject}: {finding.found}"), soft_wrap=True)
    if finding.state != "ok":
        for words in filter(None, (finding.why, finding.remedy)):
            echo(f"{'':<10}{words}")
