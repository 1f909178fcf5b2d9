"""`burst doctor`: checks this machine and installation, and says how to fix what is wrong."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict

import click

from driver.cli.output import json_option, print_json
from driver.doctor import Finding, examine

_COLOURS = {"ok": "green", "note": "yellow", "warning": "red"}


@click.command()
@click.option("--start", is_flag=True, help="Also start every installed device.")
@click.option("--quiet", is_flag=True, help="Show warnings and notes alone.")
@json_option
def doctor(start: bool, quiet: bool, as_json: bool) -> None:
    """Check this machine and installation for problems.

    A warning means that something fails; a note means that something is slower or limited. Exits with 1 if there is a
    warning.
    """
    findings = examine(start=start)
    shown = [finding for finding in findings if not quiet or finding.state != "ok"]
    if as_json:
        print_json([asdict(finding) for finding in shown])
    else:
        for finding in shown:
            _tell(finding)
        counts = Counter(finding.state for finding in findings)
        click.echo(f"{counts['warning']} warnings, {counts['note']} notes, {counts['ok']} ok")
    sys.exit(any(finding.state == "warning" for finding in findings))


def _tell(finding: Finding) -> None:
    state = click.style(f"{finding.state:<8}", fg=_COLOURS[finding.state])
    click.echo(f"{state}{finding.subject}: {finding.found}")
    if finding.state != "ok":
        for words in filter(None, (finding.why, finding.remedy)):
            click.echo(f"{'':<10}{words}")
