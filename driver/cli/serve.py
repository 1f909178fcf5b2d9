"""`burst serve`: runs a device under this account, for others to use."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import click

from burst import BurstError
from driver.cli.names import DeviceName
from driver.cli.output import json_option
from driver.errors import DriverError
from driver.service import serve as service
from driver.service.probe import check

_WITHIN = 5.0  # seconds


@click.command()
@click.argument("device", type=DeviceName(), required=False)
@click.option("--group", metavar="NAME", help="Members of this group may connect, whatever their account.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=service.DEFAULT_DIR,
    show_default=True,
    help="Where its socket lies: a folder of this account's. It is made if its parent is there.",
)
@click.option(
    "--metrics",
    metavar="ADDRESS",
    help="Answer /metrics for Prometheus and /healthz at HOST:PORT, at :PORT for this machine alone, or at a path.",
)
@click.option("--unit", is_flag=True, help="Only print a unit for systemd: /etc/systemd/system/burst@.service.")
@click.option("--user", default="burst", show_default=True, help="The account that the unit names.")
@click.option(
    "--check", "checked", metavar="SOCKET", help="Only ask whether the device there answers: exit with 0 or 1."
)
@json_option
def serve(
    device: str | None,
    group: str | None,
    folder: Path,
    metrics: str | None,
    unit: bool,
    user: str,
    checked: str | None,
    as_json: bool,
) -> None:
    """Runs a device under this account, for others to use.

    It stays in the foreground until SIGTERM or Ctrl-C. Clients connect by its socket's path, which is printed:
    driver.connect("/run/burst/litert.sock"). Without --group, only those of this account may. Exits with 2 when it
    cannot be served so, and with 1 when the device died.
    """
    if checked:
        _check(checked)
    elif unit:
        click.echo(service.unit(user, group or user, _command()), nl=False)
    elif device is None:
        raise click.UsageError("which DEVICE? As `burst serve litert`")
    else:
        try:
            service.serve(device, folder, group, metrics, partial(_tell, device) if as_json else None)
        except DriverError as error:
            raise click.UsageError(str(error)) from error


def _check(address: str) -> None:
    try:
        click.echo(check(os.path.abspath(address), _WITHIN))
    except (DriverError, BurstError) as error:
        click.echo(str(error), err=True)
        sys.exit(1)


def _command() -> str:
    """The path of `burst` in this installation."""
    beside = Path(sys.executable).with_name("burst")
    return str(beside) if beside.exists() else shutil.which("burst") or "/usr/bin/env burst"


def _tell(device: str, socket: Path, metrics: str | None) -> None:
    """At once: whoever reads it waits for it."""
    print(json.dumps({"device": device, "socket": str(socket), "metrics": metrics}), flush=True)
