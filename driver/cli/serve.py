"""`burst serve`: serves a device from this account to other programs and accounts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from burst import BurstError
from driver.cli.device_name import DeviceName
from driver.cli.gateways import ServeCommand, serve_gateway
from driver.cli.output import echo, json_option
from driver.errors import DriverError
from driver.gateway import GatewayCall
from driver.service import serve as service
from driver.service.probe import check

_WITHIN = 5.0  # seconds


@click.command(
    cls=ServeCommand,
    examples_of_device=(
        "burst serve litert --group video",
        "burst serve litert --metrics :9100",
        "burst serve --unit | sudo tee /etc/systemd/system/burst@.service",
    ),
)
@click.argument("device", type=DeviceName(served=True), required=False)
@click.option("--group", metavar="NAME", help="Allow members of this group to connect.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, readable=False),  # it may be another account's, and gateways do not use it
    default=service.DEFAULT_DIR,
    show_default=True,
    help="Folder of the socket, owned by this account. Created if its parent exists.",
)
@click.option(
    "--metrics",
    metavar="ADDRESS",
    help="Serve /metrics (Prometheus) and /healthz at HOST:PORT, at :PORT (this machine only), or at a socket's path.",
)
@click.option(
    "--files-of-others",
    is_flag=True,
    help="With --group: run model files of all accounts on a device that has one engine for them all, such as a GPU.",
)
@click.option(
    "--uids",
    metavar="FIRST-LAST",
    help="With --group: numbers that no account has as uid or gid. The engine of each account gets one of them. Or "
    "subuids: those that /etc/subuid gives this account.",
)
@click.option(
    "--real-time",
    is_flag=True,
    help="Serve all bursts before all that is ordinary on the machine (SCHED_FIFO), where RLIMIT_RTPRIO allows it. "
    "With --unit, print a unit for that.",
)
@click.option("--unit", is_flag=True, help="Print a systemd unit for /etc/systemd/system/burst@.service and exit.")
@click.option("--user", default="burst", show_default=True, help="With --unit: the account that runs the device.")
@click.option("--dynamic-user", is_flag=True, help="With --unit: systemd makes that account, while the device runs.")
@click.option(
    "--check", "checked", metavar="SOCKET", help="Check that the device at SOCKET answers, and exit with 0 or 1."
)
@json_option
@click.pass_context
def serve(
    context: click.Context,
    /,
    device: str | None,
    group: str | None,
    folder: Path,
    metrics: str | None,
    files_of_others: bool,
    uids: str | None,
    real_time: bool,
    unit: bool,
    user: str,
    dynamic_user: bool,
    checked: str | None,
    as_json: bool,
    **_gateways: Any,
) -> None:
    """Serve a device to other programs and accounts.

    Runs in the foreground until SIGTERM or Ctrl-C. Prints the path of the socket; clients pass it to driver.connect,
    for example driver.connect("/run/burst/litert.sock"). Without --group, only this account may connect. Exits with 2
    if the device cannot be served, and with 1 if it dies.

    With an option of a gateway, serves that gateway instead, which is a client of the device.
    """
    command = context.command
    assert isinstance(command, ServeCommand)
    if checked:
        _check(checked)
    elif unit:
        _print_unit(user, group or user, uids, is_dynamic=dynamic_user, real_time=real_time)
    elif device is None:
        raise click.UsageError("missing DEVICE, for example: burst serve litert")
    elif asked := command.asked(context):
        if len(asked) > 1:
            options = " and ".join(each.option for each in asked)
            raise click.UsageError(f"{options} are of different gateways: give each to a burst serve of its own")
        if group or files_of_others or uids or real_time:
            raise click.UsageError(
                f"{asked[0].option} serves a gateway, and not the device: give --group to another burst serve"
            )
        serve_gateway(asked[0], GatewayCall(device, asked[0].values, metrics), as_json)
    elif uids and not group:
        raise click.UsageError(f"--uids {uids}: only this account may connect, so there is one engine: add --group")
    else:
        try:
            tell = partial(_tell, device) if as_json else None
            how = partial(service.serve, files_of_others=files_of_others, uids=uids, real_time=real_time, tell=tell)
            how(device, folder, group, metrics)
        except DriverError as error:
            raise click.UsageError(str(error)) from error


def _print_unit(user: str, group: str, uids: str | None, **how: bool) -> None:
    try:
        echo(service.unit(user, group, _command(), uids, **how).removesuffix("\n"))
    except DriverError as error:
        raise click.UsageError(str(error)) from error


def _check(address: str) -> None:
    try:
        echo(check(os.path.abspath(address), _WITHIN))
    except (DriverError, BurstError) as error:
        echo(f"Error: {error}", err=True)
        sys.exit(1)


def _command() -> str:
    """Return the path of `burst` in this installation."""
    beside = Path(sys.executable).with_name("burst")
    return str(beside) if beside.exists() else shutil.which("burst") or "/usr/bin/env burst"


def _tell(device: str, socket: Path, metrics: str | None) -> None:
    """Print and flush: another program waits for this line."""
    echo(json.dumps({"device": device, "socket": str(socket), "metrics": metrics}))
