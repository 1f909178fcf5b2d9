"""`burst doctor`: what of this machine and this installation stands in the way, and what to do about it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from driver.doctor import Finding, examine

_COLOURS = {"ok": "green", "note": "yellow", "warning": "red"}


@click.command()
@click.option("--start", is_flag=True, help="Also start every installed device.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
def doctor(start: bool, as_json: bool) -> None:
    """Looks at everything that bursts depend on.

    A warning is what makes something fail, a note what makes it slower or smaller. Exits with 1 if there is a warning.
    """
    findings = examine(start=start)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            _tell(finding)
    sys.exit(any(finding.state == "warning" for finding in findings))


def _tell(finding: Finding) -> None:
    state = click.style(f"{finding.state:<8}", fg=_COLOURS[finding.state])
    click.echo(f"{state}{finding.subject}: {finding.found}")
    if finding.state != "ok":
        for words in filter(None, (finding.why, finding.remedy)):
            click.echo(f"{'':<10}{words}")
