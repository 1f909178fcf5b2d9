"""`burst renew`: has another engine take over what the engine of a running device has."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

import click

from burst import PeerDied
from driver.cli.device_name import DeviceName
from driver.cli.epilog import examples
from driver.cli.output import echo, json_option, print_json
from driver.client import discovery, moving, served_sockets
from driver.client.cells import cells_of
from driver.client.connection import Connection
from driver.client.device import RemoteDevice

_WITHIN = 10.0  # seconds for answers
_ENDED = "engine {} has ended, and all its clients have another one"
_GOES_ON = "engine {} goes on for clients that do not go over, as programs in C; all others have another one"
_GRACE = 0.3  # seconds in which a client that has models begins


@click.command(epilog=examples("burst renew onnxruntime", "burst renew /run/burst/onnxruntime.sock"))
@click.argument("device", type=DeviceName(served=True))
@json_option
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait for the clients to go over.")
def renew(device: str, as_json: bool, timeout: float) -> None:
    """Have another engine take over from the engine of a running device.

    DEVICE is a device's name, or the socket path of a served device. The other engine is prepared beside the first one;
    programs in Python go over between two requests, and lose none. Exits with 1 if they stay, and says why.
    """
    channel = served_sockets.connect(device) if served_sockets.is_path(device) else discovery.running(device)
    if channel is None:
        raise click.ClickException(f"{device} does not run: the next program starts a new engine anyway")
    with RemoteDevice(Connection(channel, timeout=_WITHIN), device) as remote:
        firsts = _asked(remote, timeout)
    ended = {pid: _has_ended(pidfd, timeout) for pid, pidfd in firsts.items()}
    if as_json:
        print_json([{"engine": pid, "has_ended": has_ended} for pid, has_ended in ended.items()])
        return
    for pid, has_ended in ended.items():
        echo(f"renewed: {_ENDED if has_ended else _GOES_ON}".format(pid))


def _asked(remote: RemoteDevice, timeout: float) -> dict[int, int]:
    """Ask the engines for a renewal, wait until others are there, and return the first ones, each with a pidfd."""
    own = remote.connection
    with cells_of(own, _WITHIN) as cells:
        connections = [connection for _, connection in cells.connected]
        firsts = {each.engine_pid: os.pidfd_open(each.engine_pid) for each in connections}
        for connection in connections:
            connection.call("renew", "burst renew", timeout=_WITHIN)
        for connection in connections:
            with suppress(PeerDied):  # it has no clients any more, and has ended
                _see_to_it(remote, connection, timeout)
    return firsts


def _see_to_it(remote: RemoteDevice, connection: Connection, timeout: float) -> None:
    """Wait for another engine, and begin it where nobody else does. Raise ClickException if the first one stays."""
    state = moving.await_change(connection, _GRACE)
    if state.stage == "draining":
        connection.call("drained", timeout=_WITHIN)
    elif state.stage == "asked" and connection is remote.connection:
        moving.Move(remote, connection, state).run()
    elif state.stage == "asked":
        connection.call("successor", False, timeout=_WITHIN)  # for the next client, if there is none now
    end = time.monotonic() + timeout
    while (state := moving.await_change(connection, 0.0)).stage in ("asked", "draining") and time.monotonic() < end:
        moving.await_change(connection, end - time.monotonic())
    if state.stage == "stayed":
        raise click.ClickException(f"the engine {connection.engine_pid} stays: {state.words}")
    if state.stage in ("asked", "draining"):
        raise click.ClickException(f"no other engine was there within {timeout:g} s")


def _has_ended(pidfd: int, timeout: float) -> bool:
    """Wait for the end of a process."""
    try:
        return bool(select.select([pidfd], [], [], timeout)[0])
    finally:
        os.close(pidfd)
