"""`burst serve`: runs a device under this account, for others to use."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click

from driver import serving
from driver.cli.names import DeviceName
from driver.cli.output import json_option
from driver.errors import DriverError


@click.command()
@click.argument("device", type=DeviceName())
@click.option("--group", metavar="NAME", help="Members of this group may connect, whatever their account.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=serving.DEFAULT_DIR,
    show_default=True,
    help="Where its socket lies: a folder of this account's. It is made if its parent is there.",
)
@json_option
def serve(device: str, group: str | None, folder: Path, as_json: bool) -> None:
    """Runs a device under this account, for others to use.

    It stays in the foreground until SIGTERM or Ctrl-C. Clients connect by its socket's path, which is printed:
    driver.connect("/run/burst/litert.sock"). Without --group, only those of this account may. Exits with 2 when it
    cannot be served so, and with 1 when the device died.
    """
    try:
        serving.serve(device, folder, group, partial(_tell, device) if as_json else None)
    except DriverError as error:
        raise click.UsageError(str(error)) from error


def _tell(device: str, socket: Path) -> None:
    """At once: whoever reads it waits for it."""
    print(json.dumps({"device": device, "socket": str(socket)}), flush=True)
