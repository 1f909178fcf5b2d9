"""Connects to devices that `burst serve` runs, by the paths of their sockets. The client never starts them.

By a path the user says which account to trust: the owner of the folder. So no other account but root may be able to put
a socket there, and the listening process must belong to that owner.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from burst.channel import Channel
from driver.devices.library.description import is_library
from driver.errors import DeviceFailed, DeviceNotFound


def is_path(address: str) -> bool:
    """Return True if an address is the path of a socket: names of devices have no slash, libraries end in .so."""
    return "/" in address and not is_library(address)


def connect(address: str) -> Channel:
    """Return a connection to the device that is served there. Raise DeviceNotFound, DeviceFailed."""
    path = Path(address)
    if not path.is_absolute():
        raise DeviceNotFound(f"name={address!r}: the path of a socket is absolute; use {os.path.abspath(address)!r}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        folder = path.parent.resolve(strict=True)
        owner = owner_of(folder)
        sock.connect(str(folder / path.name))
    except DeviceFailed:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise _explained_error(address, error) from error
    channel = Channel(sock)
    if (uid := channel.peer_uid) != owner:
        channel.close()
        raise DeviceFailed(
            f"{address}: uid {uid} listens in a folder of uid {owner}, and may not be the device; remove the socket"
        )
    return channel


def is_dead(path: str) -> bool:
    """Return True if no process listens any more at the socket there. Wait for none: its queue may be full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def owner_of(folder: Path) -> int:
    """Return the owner of a folder. Raise DeviceFailed if others, but root, can write there; OSError."""
    for place in (folder, *folder.parents):
        mode = place.stat().st_mode
        is_sticky = place != folder and mode & stat.S_ISVTX  # there, what is in it belongs to its owners
        if mode & 0o022 and not is_sticky:
            raise DeviceFailed(
                f"{place}: others may write to it, so any account could listen there; run chmod go-w {place}"
            )
    return folder.stat().st_uid


def _explained_error(address: str, error: OSError) -> DeviceNotFound | DeviceFailed:
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return DeviceNotFound(f"name={address!r}: no device is served there; start it with `burst serve`")
        case ConnectionRefusedError():
            return DeviceFailed(f"{address}: no device listens there any more; start it again with `burst serve`")
        case PermissionError():
            return DeviceFailed(
                f"{address}: uid {os.getuid()} may not connect; serve the device with --group, "
                "and add your account to that group"
            )
    return DeviceFailed(f"{address}: {error}")
