"""`burst serve`: runs a device under this account, for others to use."""

from __future__ import annotations

from pathlib import Path

import click

from driver import serving
from driver.errors import DriverError


@click.command()
@click.argument("device")
@click.option("--group", metavar="NAME", help="Members of this group may connect, whatever their account.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=serving.DEFAULT_DIR,
    show_default=True,
    help="Where its socket lies: a folder of this account's. It is made if its parent is there.",
)
def serve(device: str, group: str | None, folder: Path) -> None:
    """Runs DEVICE in the foreground under this account, until SIGTERM or Ctrl-C.

    Clients connect by its socket's path, which is printed: driver.connect("/run/burst/litert.sock"). Without --group,
    only those of this account may. Exits with 2 when it cannot be served so, and with 1 when the device died.
    """
    try:
        serving.serve(device, folder, group)
    except DriverError as error:
        raise click.UsageError(str(error)) from error
